"""What a device reaches at best, measured: `python -m minisgl.profiling.ceilings DEVICE DTYPE OWNER` prints it as JSON.

Memory: the better of copying a large buffer (bytes read and written) and of summing it up (bytes read). Matrix
products: a square one again and again. Of each the best of several stretches, for a ceiling is what is possible.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

from minisgl.host import end_with

BUFFER_BYTES = 2**29
"""Several times what caches hold, and little enough to fit beside an engine."""
MATRIX = {"cuda": 8192, "cpu": 2048}
STRETCHES, STRETCH_S = 20, 0.1


def measure(device: str, dtype: torch.dtype) -> dict[str, float]:
    """`bytes_per_s` and `flops_per_s` of `device`, "cuda" or "cpu", for matrices of `dtype`; takes seconds."""
    count = BUFFER_BYTES // 4
    source, target = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
    copied = _rate(lambda: target.copy_(source), 2.0 * BUFFER_BYTES, device)
    summed = _rate(source.sum, BUFFER_BYTES, device)
    width = MATRIX[device]
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    flops = _rate(lambda: torch.mm(a, b, out=out), 2.0 * width**3, device)
    return {"bytes_per_s": max(copied, summed), "flops_per_s": flops}


def _rate(work: Callable[[], object], amount: float, device: str) -> float:
    """`amount` a second, of the best stretch of work."""

    def timed(times: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(times):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    timed(2)
    times = max(1, round(STRETCH_S / timed(1)))
    return amount * times / min(timed(times) for _ in range(STRETCHES))


if __name__ == "__main__":
    end_with(int(sys.argv[3]))
    with torch.inference_mode():
        print(json.dumps(measure(sys.argv[1], getattr(torch, sys.argv[2]))))
