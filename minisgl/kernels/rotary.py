"""Queries and keys on their way from the projection to attention: normalised, rotated, and stored with the values.

Rotary position embedding (Su et al., arXiv:2104.09864), half-split style: element i of a head turns with i + D/2.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minisgl.kernels.compiler import dependent_launch, power_of_two, tl, triton
from minisgl.kernels.norm import rms_norm_reference

Norms = tuple[Tensor, Tensor, float]
"""Weights [D] of the queries' and the keys' RMSNorm, and its eps."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """By how much a step's tokens turn, for all layers."""

    table: Tensor  # [max_position, D] float32, every position's cosines, then its sines
    positions: Tensor  # [T] int64

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """What `rotate` multiplies by: two of [T, 1, D] float32."""
        cos, sin = self.table[self.positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle, in float32; x is [T, heads, D] of any dtype."""
    cos, sin = factors
    wide = x.float()
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def rotate_and_store(
    heads: Tensor, rotation: Rotation, norms: Norms | None, keys: Tensor, values: Tensor, entries: Tensor
) -> Tensor:
    """Normalise and rotate the heads of queries and keys; store keys and values; return the queries [T, H, D].

    `heads` [T, H + 2 K, D] holds queries, keys and values. Token t's go to row entries[t], int64 [T], of `keys` and
    `values` [N, K, D], which are of its dtype. Norms round as `rms_norm` does, the rotation once at its end.
    """
    return (rotate_and_store_fused if heads.is_cuda else rotate_and_store_reference)(
        heads, rotation, norms, keys, values, entries
    )


def rotate_and_store_reference(
    heads: Tensor, rotation: Rotation, norms: Norms | None, keys: Tensor, values: Tensor, entries: Tensor
) -> Tensor:
    """`rotate_and_store` in torch; what it returns is a view."""
    num_kv_heads = keys.shape[1]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk = heads[:, : num_heads + num_kv_heads]
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = (
            rms_norm_reference(qk[:, :num_heads], q_weight, eps),
            rms_norm_reference(qk[:, num_heads:], k_weight, eps),
        )
        qk = torch.cat((q, k), dim=1)
    qk = rotate(qk, rotation.factors)  # [T, H + K, D]
    keys.index_copy_(0, entries, qk[:, num_heads:])
    values.index_copy_(0, entries, heads[:, num_heads + num_kv_heads :])
    return qk[:, :num_heads]


def rotate_and_store_fused(
    heads: Tensor, rotation: Rotation, norms: Norms | None, keys: Tensor, values: Tensor, entries: Tensor
) -> Tensor:
    """`rotate_and_store` in one kernel; what it returns is contiguous, and heads are, each within itself."""
    tokens, all_heads, size = heads.shape
    num_kv_heads = keys.shape[1]
    num_heads = all_heads - 2 * num_kv_heads
    assert keys.stride() == values.stride() and heads.stride(1) == size
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    q = torch.empty(tokens, num_heads, size, dtype=heads.dtype, device=heads.device)
    half = power_of_two(size // 2)
    block = min(power_of_two(all_heads), max(512 // half, 1))  # heads that make 8 elements a thread
    pdl, options = dependent_launch(heads.device)
    _rotate_and_store_kernel[(tokens, -(-all_heads // block))](
        heads, heads.stride(0), rotation.table, rotation.positions, q_weight, k_weight, eps, entries,
        q, keys, values, keys.stride(0), keys.stride(1),
        num_heads, num_kv_heads, size // 2, half, block, pdl,  # pyright: ignore[reportArgumentType]
        **options,
    )  # fmt: skip
    return q


if triton is not None:

    @triton.jit
    def _rotate_and_store_kernel(
        heads, heads_stride, table, positions, q_weight, k_weight, eps, entries,
        q, keys, values, entry_stride, head_stride,
        H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):  # fmt: skip
        """A few heads of one token per program, as their left and right halves."""
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
        lane = tl.arange(0, HALF_BLOCK)[None, :]
        inside, is_q, is_value = lane < HALF, head < H, head >= H + K
        exists = inside & (head < H + 2 * K)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
            tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
        source = heads + token * heads_stride + head * (2 * HALF) + lane
        left = tl.load(source, mask=exists, other=0)
        right = tl.load(source + HALF, mask=exists, other=0)
        dtype = left.dtype

        x, y = left.to(tl.float32), right.to(tl.float32)
        if q_weight is not None:
            scale = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * HALF) + eps)[:, None]
            x_weight = tl.where(is_q, tl.load(q_weight + lane, mask=inside), tl.load(k_weight + lane, mask=inside))
            q_right, k_right = q_weight + HALF + lane, k_weight + HALF + lane
            y_weight = tl.where(is_q, tl.load(q_right, mask=inside), tl.load(k_right, mask=inside))
            x = ((x * scale).to(dtype).to(tl.float32) * x_weight.to(tl.float32)).to(dtype).to(tl.float32)
            y = ((y * scale).to(dtype).to(tl.float32) * y_weight.to(tl.float32)).to(dtype).to(tl.float32)
        angle = table + tl.load(positions + token) * (2 * HALF) + lane
        cos = tl.load(angle, mask=inside, other=0)
        sin = tl.load(angle + HALF, mask=inside, other=0)
        left = tl.where(is_value, left, (x * cos - y * sin).to(dtype))
        right = tl.where(is_value, right, (y * cos + x * sin).to(dtype))

        entry = tl.load(entries + token) * entry_stride
        target = tl.where(
            is_value, values + entry + (head - H - K) * head_stride, keys + entry + (head - H) * head_stride
        )
        target = tl.where(is_q, q + (token * H + head) * (2 * HALF), target) + lane
        tl.store(target, left, mask=exists)
        tl.store(target + HALF, right, mask=exists)
