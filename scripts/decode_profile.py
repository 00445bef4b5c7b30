"""Print where the time of one decode step goes on a CUDA device, kernel by kernel.

    python scripts/decode_profile.py MODEL [--batch 256] [--context 600] [--steps 20]

MODEL is a folder with a config.json; its weights are random. All requests have the same length, temperature is 0.6.
"""

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from minisgl import EngineConfig, SamplingParams
from minisgl.batch import Batch, Outcome
from minisgl.build import build_engine, resolve, resolve_kernels
from minisgl.engine import Engine, Result, Runner
from minisgl.generation import NEUTRAL
from minisgl.request import Request
from minisgl.source.hub import locate
from minisgl.source.model_config import read_model_config

KINDS = (  # what a kernel's name has, and what that is called
    ("decode_attention", "attention (ours)"),
    ("kernel_mha", "attention (XQA)"),
    ("BatchDecode", "attention (FlashInfer)"),
    ("BatchPrefill", "attention (FlashInfer)"),
    ("merge", "attention, merging"),
    ("rotate_and_store", "q/k norm, rope, store"),
    ("norm_kernel", "norms"),
    ("silu", "silu and mul"),
    ("candidates_kernel", "sampling"),
    ("winners_kernel", "sampling"),
    ("project_kernel", "matmul, one row"),
    ("decode_inputs", "inputs"),
    ("Memcpy", "copies"),
    ("gemm", "matmul"),
    ("nvjet", "matmul"),
    ("cutlass", "matmul"),
    ("splitKreduce", "matmul"),
    ("gemv", "matmul"),
)


def main() -> None:
    """Run, profile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    engine = fill(asked.model, asked.batch, asked.context, 3 * asked.steps + 60)
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    engine.runner = runner = Timed(engine.runner)
    begin = time.perf_counter()
    for _ in range(asked.steps):
        engine.step()
    host_us = (time.perf_counter() - begin - runner.waited_s) / asked.steps * 1e6
    torch.cuda.synchronize()
    wall_us = (time.perf_counter() - begin) / asked.steps * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(asked.steps):
            engine.step()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    idle: dict[str, float] = defaultdict(float)
    runs = sorted(
        (e.time_range.start, e.time_range.end, kind_of(e.name)) for e in seen.events() or () if is_on_device(e)
    )
    busy_until, last = runs[0][0], "the first"
    for start, end, kind in runs:
        spent[kind] += (end - start) / asked.steps
        calls[kind] += 1
        idle[f"{last} → {kind}"] += max(start - busy_until, 0) / asked.steps
        busy_until, last = max(busy_until, end), kind
    for kind, us in sorted(spent.items(), key=lambda item: -item[1])[:16]:
        print(f"{kind:<60}{us:9.1f} us{calls[kind] / asked.steps:8.1f} launches")
    print(f"{'all kernels':<60}{sum(spent.values()):9.1f} us\n{'a step, unprofiled':<60}{wall_us:9.1f} us")
    print(f"{'of the host, all but waiting':<60}{host_us:9.1f} us")
    length_us = (busy_until - runs[0][0]) / asked.steps
    print(f"{'a step, profiled':<60}{length_us:9.1f} us, the device idle for {sum(idle.values()) / length_us:.2%}")
    for pair, us in sorted(idle.items(), key=lambda item: -item[1])[:8]:
        print(f"    idle between {pair:<43}{us:9.1f} us")


class Timed:
    """A runner that notes how long its caller waits for results."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.waited_s = runner, 0.0

    def launch(self, batch: Batch) -> "TimedResult":
        """As the runner's."""
        return TimedResult(self, self._runner.launch(batch))


@dataclass
class TimedResult:
    """A result whose wait is noted."""

    timed: Timed
    result: Result

    def wait(self) -> Outcome:
        """As the result's."""
        begin = time.perf_counter()
        outcome = self.result.wait()
        self.timed.waited_s += time.perf_counter() - begin
        return outcome


def kind_of(name: str) -> str:
    """What a kernel is called in the table."""
    return next((what for part, what in KINDS if part.lower() in name.lower()), name[:60])


def is_on_device(event: Any) -> bool:
    """Whether it is a kernel or a copy, and no call of the host."""
    return event.device_type.name == "CUDA" and event.time_range.end > event.time_range.start


def fill(model: str, batch: int, context: int, new_tokens: int) -> Engine:
    """An engine in which so many requests decode."""
    config = resolve(
        EngineConfig(model=model, load_format="dummy", max_model_len=4096, max_running_requests=batch, device="cuda")
    )
    folder = locate(config.model, None, "dummy")
    shape = read_model_config(folder.path)
    engine = build_engine(resolve_kernels(config, shape), folder, shape)
    sampling = SamplingParams(temperature=0.6).with_defaults(NEUTRAL)
    for key in range(batch):
        prompt = np.random.default_rng(key).integers(0, 10_000, context, dtype=np.int32)
        engine.add(
            Request(
                key=key, prompt=prompt, max_tokens=new_tokens, sampling=sampling, stop_ids=(), seed=key, arrival_s=0.0
            )
        )
    while engine.scheduler.slots.decoding.sum() < batch:
        engine.step()
    return engine


if __name__ == "__main__":
    main()
