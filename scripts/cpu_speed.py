"""Print how fast SmolLM2 runs on this CPU, here and in transformers (its generate, dynamic cache, no compile).

    python scripts/cpu_speed.py

One stream: a prompt of 64 tokens, 128 new ones. Batch: 16 prompts of 64 to 256 tokens, 128 new ones each; transformers
gets them as one padded batch. Transformers' dtype is whichever of float32 and bfloat16 is faster for it; each figure
is the best of five runs, in turns.
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
RUNS = 5
DTYPES = ("float32", "bfloat16")


Generate = Callable[[list[list[int]]], int]
"""Answers prompts greedily with `NEW_TOKENS` each, and says how many tokens it made."""


def prompts(count: int, shortest: int, longest: int, run: int) -> list[list[int]]:
    """Random prompts, other ones for every run, so that no cache knows them."""
    rng = random.Random(f"{count}/{run}")
    return [[rng.randrange(1000, 40_000) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def rates(contenders: dict[str, Generate], count: int, shortest: int, longest: int) -> dict[str, float]:
    """Most new tokens a second of each; they take turns, since what else a machine does changes with time."""
    best = dict.fromkeys(contenders, 0.0)
    for run in range(RUNS):
        given = prompts(count, shortest, longest, run)
        for name, generate in contenders.items():
            begin = time.perf_counter()
            made = generate(given)
            best[name] = max(best[name], made / (time.perf_counter() - begin))
    return best


def ours(dtype: str) -> Generate:
    """Minisgl."""
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm = LLM("smollm2", device="cpu", dtype=dtype)
    return lambda given: sum(len(out.outputs[0].token_ids) for out in llm.generate(given, greedy))


def theirs(dtype: str) -> Generate:
    """Transformers."""
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

    return generate


def main() -> None:
    """Print a table."""
    transformers.utils.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    makers = {"transformers": theirs, "minisgl": ours}
    contenders = {f"{name} {dtype}": make(dtype) for name, make in makers.items() for dtype in DTYPES}
    columns = {"one stream": rates(contenders, 1, 64, 64), "16 prompts": rates(contenders, 16, 64, 256)}
    print(f"{'tok/s':<24}{''.join(f'{what:>12}' for what in columns)}")
    for name in contenders:
        print(f"{name:<24}{''.join(f'{best[name]:>12.1f}' for best in columns.values())}")
    for what, best in columns.items():
        top = {m: max(rate for name, rate in best.items() if name.startswith(m)) for m in makers}
        print(f"{what}: minisgl {top['minisgl'] / top['transformers']:.2f} x transformers")


if __name__ == "__main__":
    main()
