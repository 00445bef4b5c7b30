"""The angles of rotary position embedding (Su et al., arXiv:2104.09864), and the ways to stretch its context."""

import math

import torch
from torch import Tensor

from minisgl.source.model_config import RopeConfig


def rope_table(rope: RopeConfig, head_size: int, max_position: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position's angles: [max_position, D] float32."""
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(rope, head_size))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)  # [max_position, D]
    return (table * attention_factor(rope)).to(device)


def inverse_frequencies(rope: RopeConfig, head_size: int) -> Tensor:
    """Angle per position of each pair of a head: [D/2] float32."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)  # [D/2]
    if rope.type == "linear":
        return inverse / rope.factor
    if rope.type == "llama3":
        return _llama3(inverse, rope)
    if rope.type == "yarn":
        return _yarn(inverse, rope, head_size)
    return inverse


def attention_factor(rope: RopeConfig) -> float:
    """What yarn multiplies queries and keys by; 1 for every other type."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: slow pairs are slowed by `factor`, fast ones left alone, those between blended."""
    assert rope.original_max_position is not None
    turns = rope.original_max_position * inverse / (2 * math.pi)  # [D/2], within the original context
    fast = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(inverse, rope.factor, fast.clamp(0, 1))


def _yarn(inverse: Tensor, rope: RopeConfig, head_size: int) -> Tensor:
    """YaRN (Peng et al., arXiv:2309.00071): the same blend, along a ramp over the pairs' indices."""
    assert rope.original_max_position is not None
    first = _pair_that_turns(rope.beta_fast, rope, head_size)
    last = _pair_that_turns(rope.beta_slow, rope, head_size)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    if first == last:
        last += 0.001
    slow = (torch.arange(head_size // 2, dtype=torch.float32) - first) / (last - first)  # [D/2]
    return _blend(inverse, rope.factor, 1 - slow.clamp(0, 1))


def _blend(inverse: Tensor, factor: float, fast: Tensor) -> Tensor:
    """Where `fast` is 1 keep the frequency, where it is 0 divide it by `factor`."""
    return inverse / factor * (1 - fast) + inverse * fast


def _pair_that_turns(times: float, rope: RopeConfig, head_size: int) -> float:
    """Index, as a real number, of the pair that turns so many times within the original context."""
    assert rope.original_max_position is not None
    wavelength = rope.original_max_position / (times * 2 * math.pi)  # in positions per radian
    return head_size * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
