"""The pieces a decoder is made of. Weights are left unset here: `weights.py` fills them.

A layer's `outputs` and `inputs` say which rows and columns of a checkpoint's tensors this rank has of it.

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
from minisgl.parallel.ranks import Ranks
from minisgl.parallel.sharding import Shard, Vocabulary, whole


class Linear(nn.Module):
    """y = x Wᵀ + b, of several such projections of one input side by side, where `outputs` has several."""

    def __init__(
        self, inputs: Shard, outputs: Mapping[str, Shard], dtype: torch.dtype, device: torch.device, *, bias: bool
    ) -> None:
        """`outputs`, in their order, go by what a checkpoint calls the projections: one that is alone needs no name."""
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        out_size = sum(each.size for each in outputs.values())
        self.weight = _unset((out_size, inputs.size), dtype, device)
        self.bias = _unset((out_size,), dtype, device) if bias else None
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Give up the plain weight, once it is loaded, for what a CPU computes with."""
        self._packed = PackedWeight(self.weight)
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return self._product(x, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            return self._packed.linear(x, bias)
        if x.is_cuda and len(x) == 1:
            return project(x, self.weight, bias)[1]
        return F.linear(x, self.weight, bias)

    __call__ = forward


class SummedLinear(Linear):
    """The same where each rank has some of the inputs, and the outputs are the sum of what all make of theirs."""

    def __init__(
        self, inputs: Shard, out_size: int, dtype: torch.dtype, device: torch.device, ranks: Ranks, *, bias: bool
    ) -> None:
        super().__init__(inputs, {"": whole(out_size)}, dtype, device, bias=bias)
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return self._ranks.all_reduce(self._product(x, self.bias if self._ranks.rank == 0 else None))

    __call__ = forward


class Embedding(nn.Module):
    """One row of the weight per token id, from the rank that has it."""

    def __init__(self, vocabulary: Vocabulary, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.inputs, self.outputs = whole(size), {"": vocabulary.mine}
        self.weight = _unset((vocabulary.mine.size, size), dtype, device)
        self._vocabulary = vocabulary

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int32 or int64 to [T, E]."""
        mine, ranks = self._vocabulary.mine, self._vocabulary.ranks
        if ranks.size == 1:
            return F.embedding(ids, self.weight)
        ids = ids - mine.start
        elsewhere = (ids < 0) | (ids >= mine.size)
        found = F.embedding(ids.masked_fill(elsewhere, 0), self.weight)
        return ranks.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    __call__ = forward


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by the weight (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.inputs, self.outputs = whole(1), {"": whole(size)}
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
