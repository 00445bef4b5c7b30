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


class Linear(nn.Module):
    """y = x Wᵀ + b."""

    def __init__(self, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> None:
        super().__init__()
        self.weight = _unset((out_size, in_size), dtype, device)
        self.bias = _unset((out_size,), dtype, device) if bias else None
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Give up the plain weight for the layout that oneDNN computes with, once it is loaded; see `packed`."""
        self._packed = packed(self.weight)
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
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


def can_pack(weight: Tensor) -> bool:
    """Whether packing pays: for bfloat16 on a CPU, where each call would lay the weight out anew."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()


def packed(weight: Tensor) -> Tensor:
    """A [out, in] weight in oneDNN's layout for few rows; only `packed_linear` can read it.

    Asked for a single row, oneDNN takes blocks of 64 outputs instead of 32: too few to share evenly between cores.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, 16)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, in] to [T, out] with a weight from `packed`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _unset(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
