"""Print how fast SmolLM2 runs on this CPU, here and in transformers (its generate, dynamic cache, no compile).

    python scripts/cpu_speed.py

One stream: a prompt of 64 tokens, 128 new ones. Batch: 16 prompts of 64 to 256 tokens, 128 new ones each; transformers
gets them as one padded batch. Transformers' dtype is whichever of float32 and bfloat16 is faster for it; each figure
is the best of three runs.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from minisgl import LLM, SamplingParams
from minisgl.source.hub import locate

NEW_TOKENS = 128
RUNS = 3
DTYPES = ("float32", "bfloat16")


def prompts(count: int, shortest: int, longest: int, run: int) -> list[list[int]]:
    """Random prompts, other ones for every run, so that no cache knows them."""
    rng = random.Random(f"{count}/{run}")
    return [[rng.randrange(1000, 40_000) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def rate(generate: Callable[[list[list[int]]], int], count: int, shortest: int, longest: int) -> float:
    """Most new tokens a second over the runs."""
    best = 0.0
    for run in range(RUNS):
        given = prompts(count, shortest, longest, run)
        begin = time.perf_counter()
        made = generate(given)
        best = max(best, made / (time.perf_counter() - begin))
    return best


def ours(dtype: str) -> tuple[float, float]:
    """Tokens a second of one stream and of the batch."""
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM("smollm2", device="cpu", dtype=dtype) as llm:

        def generate(given: list[list[int]]) -> int:
            return sum(len(out.outputs[0].token_ids) for out in llm.generate(given, greedy))

        return rate(generate, 1, 64, 64), rate(generate, 16, 64, 256)


def theirs(dtype: str) -> tuple[float, float]:
    """The same in transformers."""
    folder = locate("smollm2").path
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(given: list[list[int]]) -> int:
        longest = max(map(len, given))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in given])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in given])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return (out.shape[1] - longest) * len(given)

    return rate(generate, 1, 64, 64), rate(generate, 16, 64, 256)


def main() -> None:
    """Print a table."""
    transformers.utils.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    print(f"{'tok/s':<24}{'one stream':>12}{'16 prompts':>12}")
    rows = {}
    for name, run in (("transformers", theirs), ("minisgl", ours)):
        for dtype in DTYPES:
            rows[name, dtype] = one, batch = run(dtype)
            print(f"{name + ' ' + dtype:<24}{one:>12.1f}{batch:>12.1f}", flush=True)
    for column, what in enumerate(("one stream", "16 prompts")):
        best = {n: max(rows[n, d][column] for d in DTYPES) for n in ("transformers", "minisgl")}
        print(f"{what}: minisgl {best['minisgl'] / best['transformers']:.2f} x transformers")


if __name__ == "__main__":
    main()
