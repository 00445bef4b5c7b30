"""What each rank holds of a model: its shard of every dimension that is parted."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from minisgl.parallel.ranks import Ranks
from minisgl.source.model_config import ModelConfig

_GRANULE = 16  # elements to which kernels like a matrix's rows to be aligned


@dataclass(frozen=True)
class Shard:
    """The part from `start` to `stop` of a dimension whose size is `whole`."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        """How much of the dimension it is."""
        return self.stop - self.start

    def of_heads(self, head_size: int) -> "Shard":
        """The same part where every element is a head of that size."""
        return Shard(self.start * head_size, self.stop * head_size, self.whole * head_size)


def whole(size: int) -> Shard:
    """All of a dimension."""
    return Shard(0, size, size)


def shards(size: int, ranks: Ranks) -> list[Shard]:
    """A dimension parted among the ranks, nearly evenly, at granules where it is large enough."""
    granule = _GRANULE if size // ranks.size >= _GRANULE else 1
    starts = [size * rank // ranks.size // granule * granule for rank in range(ranks.size)]
    return [Shard(start, stop, size) for start, stop in pairwise([*starts, size])]


def heads(count: int, ranks: Ranks) -> Shard:
    """This rank's heads: an equal share of them, or, of fewer heads than ranks, the one that it shares with others."""
    first = count * ranks.rank // ranks.size
    return Shard(first, first + max(1, count // ranks.size), count)


def check_divisible(model: ModelConfig, size: int) -> None:
    """ValueError, with what could be, unless so many ranks can hold the model: each has whole heads of all kinds."""
    heads, key_heads = model.num_heads, model.num_kv_heads
    most = min(heads, model.intermediate_size, model.vocab_size)
    possible = [n for n in range(1, most + 1) if heads % n == 0 and 0 in (key_heads % n, n % key_heads)]
    if size not in possible:
        *others, last = map(str, possible)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"tp={size}: the model has {heads} heads and {key_heads} key heads: tp may be {allowed}")


def per_rank(model: ModelConfig, size: int) -> ModelConfig:
    """The model as attention and KV cache of one of `size` ranks see it: with the rank's heads only."""
    return replace(model, num_heads=model.num_heads // size, num_kv_heads=max(1, model.num_kv_heads // size))


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary, parted among the ranks: each has the scores of its own tokens."""

    parts: list[Shard]
    ranks: Ranks

    @classmethod
    def of(cls, size: int, ranks: Ranks) -> "Vocabulary":
        """A vocabulary of so many tokens."""
        return cls(shards(size, ranks), ranks)

    @property
    def mine(self) -> Shard:
        """This rank's tokens."""
        return self.parts[self.ranks.rank]

    @property
    def widest(self) -> int:
        """Most tokens that a rank has."""
        return max(part.size for part in self.parts)

    def whole(self, scores: Tensor) -> Tensor:
        """All tokens' scores [n, V] from those that each rank has [n, v]."""
        if self.ranks.size == 1:
            return scores
        padded = torch.nn.functional.pad(scores, (0, self.widest - self.mine.size)).contiguous()
        together = self.ranks.gather(padded)  # [ranks, n, widest]
        return torch.cat([each[:, : part.size] for each, part in zip(together, self.parts, strict=True)], dim=1)
