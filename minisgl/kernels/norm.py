"""RMSNorm (Zhang & Sennrich, arXiv:1910.07467), alone and behind the sum that a residual stream makes of its input."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.compiler import dependent_launch, power_of_two, tl, triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise [..., E] in float32, round to x's dtype, then multiply by the weight [E]: as models are trained."""
    return (rms_norm_fused if x.is_cuda else rms_norm_reference)(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, both [T, E], and the `rms_norm` of that sum, each rounded to x's dtype."""
    return (add_rms_norm_fused if x.is_cuda else add_rms_norm_reference)(x, delta, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` by one operation that is fused on a CPU: a vector beside its negative has mean 0."""
    size = x.shape[-1]
    return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), eps=eps).narrow(-1, 0, size) * weight


def add_rms_norm_reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in torch."""
    total = x + delta
    return total, rms_norm_reference(total, weight, eps)


def rms_norm_fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one kernel; the last dimension is contiguous."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x.reshape(-1, x.shape[-1]), None, None, weight, out, eps)
    return out


def add_rms_norm_fused(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in one kernel; the last dimensions are contiguous."""
    total, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(x, delta, total, weight, out, eps)
    return total, out


def _launch(x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    rows, size = x.shape
    block = power_of_two(size)
    warps = min(max(block // 256, 1), 16)  # 8 elements a thread are 16 bytes at once; a block has 16 warps at most
    delta_stride = 0 if delta is None else delta.stride(0)
    pdl, options = dependent_launch(x.device)
    _norm_kernel[(rows,)](
        x, x.stride(0), delta, delta_stride, total, weight, out, size, eps, block, pdl,
        num_warps=warps, **options,  # pyright: ignore[reportCallIssue]  # launches take options, too
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _norm_kernel(
        x, x_stride, delta, delta_stride, total, weight, out, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
    ):
        """One row per program; without `delta`, the sum is x itself."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = at < size
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
            tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
        dtype = out.dtype.element_ty
        summed = tl.load(x + row * x_stride + at, mask=inside, other=0).to(tl.float32)
        if delta is not None:
            summed += tl.load(delta + row * delta_stride + at, mask=inside, other=0).to(tl.float32)
            rounded = summed.to(dtype)
            tl.store(total + row * size + at, rounded, mask=inside)
            summed = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(summed * summed, axis=0) / size + eps)
        normed = (summed * scale).to(dtype).to(tl.float32)
        normed *= tl.load(weight + at, mask=inside, other=0).to(tl.float32)
        tl.store(out + row * size + at, normed.to(dtype), mask=inside)
