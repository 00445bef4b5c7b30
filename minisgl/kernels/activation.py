"""SwiGLU's gate (Shazeer, arXiv:2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.compiler import dependent_launch, tl, triton


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Silu of the left half, rounded to its dtype, times the right half: [T, 2 F] to [T, F]."""
    return (silu_and_mul_fused if gate_up.is_cuda else silu_and_mul_reference)(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_and_mul_fused(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` in one kernel; the last dimension is contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024  # 8 elements a thread, which are 16 bytes at once
    pdl, options = dependent_launch(gate_up.device)
    _silu_and_mul_kernel[(rows, -(-width // block))](
        gate_up, gate_up.stride(0), out, width,
        block, pdl,  # pyright: ignore[reportArgumentType]  # launches take plain numbers for constexprs
        **options,
    )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _silu_and_mul_kernel(gate_up, row_stride, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
            tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
        row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        gate = gate_up + row * row_stride + at
        g = tl.load(gate, mask=inside, other=0).to(tl.float32)
        up = tl.load(gate + width, mask=inside, other=0).to(tl.float32)
        dtype = out.dtype.element_ty
        silu = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
        tl.store(out + row * width + at, (silu * up).to(dtype), mask=inside)
