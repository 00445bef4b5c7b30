"""Triton, where it is installed: each module defines its kernels only then, and a CPU needs none of them."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

__all__ = ["dependent_launch", "power_of_two", "tl", "triton"]


def power_of_two(size: int) -> int:
    """The least that is `size` or more: what the size of a block must be."""
    return 1 << (size - 1).bit_length()


def dependent_launch(device: torch.device) -> tuple[bool, dict[str, Any]]:
    """Whether kernels may start before the one that they wait for has ended, and what launches such a one.

    A kernel so launched calls `gdc_wait` before it reads what may not be complete yet: what the kernel ahead wrote, or
    any before that, back to the last one that was launched without this.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return able, {"launch_pdl": True} if able else {}
