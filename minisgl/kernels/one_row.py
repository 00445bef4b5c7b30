"""One token's projections: a matrix times a vector, with the norm before it and the gate behind it in the same kernel.

A matrix is read once and nothing is computed twice, so all that counts is how soon it begins to be read. On Hopper a
kernel starts while the one before it still runs (programmatic dependent launch): the first rows of the matrix are on
their way when the vector is there.
"""

import torch
from torch import Tensor

from minisgl.kernels.activation import silu_and_mul_reference
from minisgl.kernels.compiler import dependent_launch, power_of_two, tl, triton
from minisgl.kernels.norm import add_rms_norm_reference, rms_norm_reference

_MANY_ROWS = 16_384

Norm = tuple[Tensor, float]
"""Weight [K] and eps of the RMSNorm before a projection."""


def project_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, delta: Tensor | None, norm: Norm | None, gated: bool
) -> tuple[Tensor, Tensor]:
    """`project` in torch."""
    total = normed = x
    if norm is not None and delta is not None:
        total, normed = add_rms_norm_reference(x, delta, *norm)
    elif norm is not None:
        normed = rms_norm_reference(x, *norm)
    y = torch.nn.functional.linear(normed, weight, bias)
    return total, silu_and_mul_reference(y) if gated else y


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    delta: Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + delta [1, K], and the projection by `weight` [N, K] of its norm: [1, N], or gated [1, N / 2].

    Without `delta` the sum is x; without `norm` x itself is projected, and then there is no delta. `gated` applies
    `silu_and_mul`. Everything is rounded where the single kernels round. In one kernel on CUDA.
    """
    if not x.is_cuda:
        return project_reference(x, weight, bias, delta, norm, gated)
    return project_fused(x, weight, bias, delta, norm, gated)


def project_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, delta: Tensor | None, norm: Norm | None, gated: bool
) -> tuple[Tensor, Tensor]:
    """`project` in one kernel."""
    rows, size = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    block = min(power_of_two(size), 2048)
    at_once = 8 if rows > _MANY_ROWS else 2  # few, so that every processor has some; more where there are enough
    norm_weight, eps = norm or (None, 0.0)
    pdl, options = dependent_launch(x.device)
    options |= {"num_warps": max(1, at_once * block // 1024)}
    _project_kernel[(-(-rows // at_once),)](
        x, delta, norm_weight, eps, weight, bias, total, out, rows,
        size, block, at_once, gated, pdl,  # pyright: ignore[reportArgumentType]
        **options,
    )  # fmt: skip
    return total, out


if triton is not None:

    @triton.jit
    def _stream(x, delta, at, inside, dtype):
        """x + delta, rounded, as float32."""
        total = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        if delta is not None:
            total = (total + tl.load(delta + at, mask=inside, other=0).to(tl.float32)).to(dtype).to(tl.float32)
        return total

    @triton.jit(do_not_specialize=["rows"])
    def _project_kernel(
        x, delta, norm_weight, eps, weight, bias, total, out, rows,
        K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """A few rows of the matrix per program."""
        dtype = out.dtype.element_ty
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        lane = tl.arange(0, BLOCK)
        exists = row < rows
        source = weight + row[:, None].to(tl.int64) * K + lane[None, :]
        other = source + rows.to(tl.int64) * K
        inside = exists[:, None] & (lane < K)[None, :]
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
        w = tl.load(source, mask=inside, other=0)  # nobody writes it: no need to wait
        if GATED:
            u = tl.load(other, mask=inside, other=0)
        if PDL:
            tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]

        scale = 1.0
        if norm_weight is not None:
            squares = tl.zeros((BLOCK,), tl.float32)
            for first in tl.static_range(0, K, BLOCK):
                summed = _stream(x, delta, first + lane, first + lane < K, dtype)
                if delta is not None:  # noqa: SIM102  known when it is compiled, unlike the other
                    if tl.program_id(0) == 0:
                        tl.store(total + first + lane, summed.to(dtype), mask=first + lane < K)
                squares += summed * summed
            scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)

        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        gates = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in tl.static_range(0, K, BLOCK):
            at = first + lane
            vector = _stream(x, delta, at, at < K, dtype)
            if norm_weight is not None:
                vector = (vector * scale).to(dtype).to(tl.float32)
                vector *= tl.load(norm_weight + at, mask=at < K, other=0).to(tl.float32)
                vector = vector.to(dtype).to(tl.float32)
            sums += w.to(tl.float32) * vector[None, :]
            if GATED:
                gates += u.to(tl.float32) * vector[None, :]
            if first + BLOCK < K:
                later = exists[:, None] & (at + BLOCK < K)[None, :]
                w = tl.load(source + first + BLOCK, mask=later, other=0)
                if GATED:
                    u = tl.load(other + first + BLOCK, mask=later, other=0)
        y = tl.sum(sums, axis=1)
        if bias is not None:
            y += tl.load(bias + row, mask=exists, other=0).to(tl.float32)
        if GATED:
            up = tl.sum(gates, axis=1)
            if bias is not None:
                up += tl.load(bias + rows + row, mask=exists, other=0).to(tl.float32)
            gate = y.to(dtype).to(tl.float32)
            y = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        tl.store(out + row, y.to(dtype), mask=exists)
