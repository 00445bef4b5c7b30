"""Time the fused kernels on a CUDA device, beside the bytes that they must move.

    python scripts/gpu_kernels.py

Medians of triton.testing.do_bench (cold L2) in microseconds, and bytes read and written over that time.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.testing import do_bench

from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.gumbel import sample
from minisgl.kernels.norm import add_rms_norm
from minisgl.kernels.rotary import Rotation, rotate_and_store

DEVICE = torch.device("cuda")


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, device=DEVICE).bfloat16()


def show(name: str, run: Callable[[], object], moved_bytes: int) -> None:
    """Time it and print a line."""
    ms: Any = do_bench(run, warmup=10, rep=50, return_mode="median")
    us = ms * 1e3
    print(f"{name:<48}{us:8.1f} us{moved_bytes / us / 1e6:8.2f} TB/s")


def main() -> None:
    """Every kernel at sizes of Qwen3-0.6B and 14B."""
    for rows in (1, 256, 8192):
        for width in (1024, 5120):
            x, delta, weight = bf16(rows, width), bf16(rows, width), bf16(width)
            show(f"add_rms_norm {rows} x {width}", lambda: add_rms_norm(x, delta, weight, 1e-6), 8 * x.numel())  # noqa: B023
        for width in (3072, 17408):
            gate_up = bf16(rows, 2 * width)
            show(f"silu_and_mul {rows} x {width}", lambda: silu_and_mul(gate_up), 3 * gate_up.numel())  # noqa: B023
        for heads in (16, 40):
            qkv, keys, values = bf16(rows, heads + 16, 128), bf16(20_000, 8, 128), bf16(20_000, 8, 128)
            rotation = Rotation(torch.rand(40_960, 128, device=DEVICE), torch.arange(rows, device=DEVICE))
            norms, at = (bf16(128), bf16(128), 1e-6), torch.randperm(20_000, device=DEVICE)[:rows]
            run = lambda: rotate_and_store(qkv, rotation, norms, keys, values, at)  # noqa: B023, E731
            show(f"rotate_and_store {rows} x {heads}/8", run, 4 * qkv.numel())
    for rows in (1, 256):
        logits, slots = bf16(rows, 151_936), torch.arange(rows, device=DEVICE, dtype=torch.int32)
        for temperature in (0.0, 0.6):
            heat = torch.full((rows,), temperature, device=DEVICE)
            run = lambda: sample(logits, slots, heat, slots.long(), slots)  # noqa: B023, E731
            show(f"sample {rows} x 151,936, temperature {temperature}", run, 2 * logits.numel())


if __name__ == "__main__":
    main()
