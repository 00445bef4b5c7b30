"""Triton, where it is installed: each module defines its kernels only then, and a CPU needs none of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

__all__ = ["power_of_two", "tl", "triton"]


def power_of_two(size: int) -> int:
    """The least that is `size` or more: what the size of a block must be."""
    return 1 << (size - 1).bit_length()
