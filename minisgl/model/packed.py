"""Weights laid out for a CPU that multiplies bfloat16: once, where each call would lay them out anew."""

import torch
from torch import Tensor

FEW_ROWS = 4
"""Up to here a product takes as long as reading its weight does: the smaller one wins."""
_GROUP, _LEVELS = 32, 16


def can_pack(weight: Tensor) -> bool:
    """Whether packing pays: for bfloat16 on a CPU."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()


class PackedWeight:
    """A [out, in] weight in oneDNN's layout, and beside it in 4 bits where it has no more than that to say.

    The weights of a GGUF file in 4 bits are such: 16 evenly spaced levels for each 32 of them.
    """

    def __init__(self, weight: Tensor) -> None:
        # For several rows: asked for a single one, oneDNN takes blocks of 64 outputs, too few to share between cores.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self._four_bits = None
        if torch.backends.cpu.get_cpu_capability() == "AVX512" and (found := in_four_bits(weight)) is not None:
            levels, scales = found
            self._four_bits = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), scales

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in] to [T, out]."""
        if self._four_bits is not None and len(x) <= FEW_ROWS:
            levels, scales = self._four_bits
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, levels, _GROUP, scales)
            return y if bias is None else y + bias
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")


def in_four_bits(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """A bfloat16 [out, in] weight as levels 0 to 15, int32 [out, in], and bfloat16 [in / 32, out, 2]: step and value
    of level 8 of each 32 inputs. None where the weight is not made of 16 levels, to within bfloat16's rounding.
    """
    rows, columns = weight.shape
    if rows % 16 or columns % _GROUP:
        return None
    levels, scales = [], []
    for part in weight.split(1024):  # most weights are known not to be such from the first
        groups = part.float().view(len(part), -1, _GROUP)  # [N, G, 32]
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        step = (high - low) / (_LEVELS - 1)
        scale = torch.cat([step, low + _LEVELS // 2 * step], dim=-1).bfloat16()  # [N, G, 2]
        furthest = torch.maximum(low.abs(), high.abs())
        step.clamp_(min=torch.finfo(torch.float32).tiny)  # a group that is all one value
        level = groups.sub_(low).div_(step).round()
        off = groups.sub_(level).abs_().amax(-1, keepdim=True) * step
        if (off > furthest * 2**-7).any():
            return None
        levels.append(level.int().view_as(part))
        scales.append(scale)
    return torch.cat(levels), torch.cat(scales).transpose(0, 1).contiguous()
