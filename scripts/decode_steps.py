"""What a decode step takes by several attention backends, in turns in one process.

    python scripts/decode_steps.py bench_configs/models/qwen3-0.6b flashinfer flashinfer,triton
    python scripts/decode_steps.py bench_configs/models/qwen3-32b flashinfer flashinfer,triton --tp 2

Random weights, on one CUDA device; with `--tp`, the part of one rank of so many, without its communication
(scripts/one_rank.py). Each figure is the mean of 80 steps behind 15 others, overlapped as ever, in microseconds.
"""

import argparse
import itertools
import time

import numpy as np
import torch
from one_rank import pretend_to_lead

import minisgl.build
from minisgl import EngineConfig, SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.request import Request
from minisgl.source.hub import locate
from minisgl.source.model_config import read_model_config

SIZES = ((1, 128), (1, 600), (1, 2000), (1, 16_000), (4, 600), (8, 600), (16, 600), (32, 600))
WARM_UP, STEPS, TURNS = 15, 80, 2
KEYS = itertools.count()


def main() -> None:
    """Print a line for each batch size and context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    pretend_to_lead()
    engines = {name: engine_of(arguments, name) for name in arguments.backends}
    print(f"{'rows × tokens':>16}", *(f"{name:>24}" for name in engines))
    for rows, tokens in SIZES:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(TURNS):
            for name, engine in engines.items():
                times[name].append(step_s(engine, rows, tokens, turn))
        cells = (" · ".join(f"{1e6 * each:,.1f}" for each in times[name]) for name in engines)
        print(f"{rows:>7} × {tokens:>6,}", *(f"{cell:>24}" for cell in cells), flush=True)


def engine_of(arguments: argparse.Namespace, backend: str) -> Engine:
    """An engine as `minisgl bench` would have it, but for its backend."""
    most = max(rows for rows, _ in SIZES)
    config = EngineConfig(
        model=arguments.model,
        load_format="dummy",
        device=arguments.device,
        tp=arguments.tp,
        attention_backend=backend,
        max_model_len=max(tokens for _, tokens in SIZES) + WARM_UP + STEPS + 10,
        max_running_requests=most,
        num_pages=1600,
        page_size=64,
        cache="none",
    )
    config = minisgl.build.resolve(config)
    folder = locate(config.model, None, "dummy")
    model = read_model_config(folder.path)
    return minisgl.build.build_engine(minisgl.build.resolve_kernels(config, model), folder, model)


def step_s(engine: Engine, rows: int, tokens: int, seed: int) -> float:
    """Seconds of a step that decodes so many rows behind prompts of so many tokens."""
    sampling = SamplingParams(temperature=0.6).with_defaults(NEUTRAL)
    prompts = np.random.default_rng(seed).integers(0, 10_000, (rows, tokens), dtype=np.int32)
    most = WARM_UP + STEPS + 5
    requests = [
        Request(key=next(KEYS), prompt=prompt, max_tokens=most, sampling=sampling, stop_ids=(), seed=row, arrival_s=0.0)
        for row, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    while engine.scheduler.slots.decoding.sum() < rows:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    synchronize()
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    synchronize()
    end_s = time.perf_counter()
    for request in requests:
        engine.finish(request, "abort")
    while engine.has_work:
        engine.step()
    return (end_s - begin_s) / STEPS


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
