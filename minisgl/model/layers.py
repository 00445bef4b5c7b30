"""The pieces a decoder is made of. Weights are left unset here: `weights.py` fills them.

Calling one is calling its `forward`: nobody hooks into it, and looking for hooks takes as long as a small operation.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.norm import add_rms_norm, rms_norm
from minisgl.kernels.one_row import project
from minisgl.model.packed import PackedWeight


class Linear(nn.Module):
    """y = x Wᵀ + b."""

    def __init__(self, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> None:
        super().__init__()
        self.weight = _unset((out_size, in_size), dtype, device)
        self.bias = _unset((out_size,), dtype, device) if bias else None
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Give up the plain weight, once it is loaded, for what a CPU computes with."""
        self._packed = PackedWeight(self.weight)
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if self._packed is not None:
            return self._packed.linear(x, self.bias)
        if x.is_cuda and len(x) == 1:
            return project(x, self.weight, self.bias)[1]
        return F.linear(x, self.weight, self.bias)

    __call__ = forward


class FusedLinear(Linear):
    """Several projections of one input as one matmul, their outputs side by side."""

    def __init__(
        self, in_size: int, parts: Mapping[str, int], dtype: torch.dtype, device: torch.device, *, bias: bool
    ) -> None:
        super().__init__(in_size, sum(parts.values()), dtype, device, bias=bias)
        self.parts = parts  # each projection's name in a checkpoint and its width, in order


class Embedding(nn.Module):
    """One row of the weight per token id."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _unset((vocab_size, size), dtype, device)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int32 or int64 to [T, E]."""
        return F.embedding(ids, self.weight)

    __call__ = forward


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by the weight (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _unset((size,), dtype, device)
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta (or x), and that sum normalised: [T, E] each."""
        if delta is None:
            return x, rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, delta, self.weight, self.eps)

    __call__ = forward


def normed_projection(
    norm: RMSNorm, linear: Linear, x: Tensor, delta: Tensor | None, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta, [T, in] each, and its norm's projection [T, out], or gated [T, out / 2]."""
    if x.is_cuda and len(x) == 1:
        return project(x, linear.weight, linear.bias, delta, (norm.weight, norm.eps), gated)
    total, normed = norm(x, delta)
    y = linear(normed)
    return total, silu_and_mul(y) if gated else y


def _unset(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
