"""Print where the time of one decode step goes on a CUDA device, kernel by kernel.

    python scripts/decode_profile.py MODEL [--batch 256] [--context 600] [--steps 20]

MODEL is a folder with a config.json; its weights are random. All requests have the same length, temperature is 0.6.
"""

import argparse
import time
from collections import defaultdict

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from minisgl import EngineConfig, SamplingParams
from minisgl.build import build_engine, resolve, resolve_kernels
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.request import Request
from minisgl.source.hub import locate
from minisgl.source.model_config import read_model_config

KINDS = (  # what a kernel's name has, and what that is called
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
    begin = time.perf_counter()
    for _ in range(asked.steps):
        engine.step()
    torch.cuda.synchronize()
    wall_us = (time.perf_counter() - begin) / asked.steps * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(asked.steps):
            engine.step()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in seen.key_averages():
        kind = next((what for part, what in KINDS if part.lower() in event.key.lower()), event.key[:60])
        spent[kind] += event.self_device_time_total / asked.steps
        calls[kind] += event.count
    for kind, us in sorted(spent.items(), key=lambda item: -item[1])[:16]:
        print(f"{kind:<60}{us:9.1f} us{calls[kind] / asked.steps:8.1f} launches")
    print(f"{'all kernels':<60}{sum(spent.values()):9.1f} us\n{'a step, unprofiled':<60}{wall_us:9.1f} us")


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
