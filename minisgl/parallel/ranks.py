"""Ranks: the processes that hold one model together, and what they do together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ProcessGroup, Work


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that share a model, and what they do together.

    Every operation is one of all ranks, in the same order: on CUDA they take their place on the current stream. A lone
    rank has no group, and its operations are the identity, so nobody needs to ask whether there are others.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    sum_small: Callable[[Tensor], Tensor | None] | None = None
    """A faster sum for the tensors that it takes; None for all others, alike on all ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' contiguous x; x itself may be overwritten."""
        if self.group is None:
            return x
        if self.sum_small is not None and (total := self.sum_small(x)) is not None:
            return total
        options = AllreduceOptions()
        options.asyncOp = False  # on CUDA: in the current stream, with no event to wait for
        _wait(self.group.allreduce([x], options))
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's contiguous x, [ranks, …]."""
        if self.group is None:
            return x[None]
        together = x.new_empty(self.size * x.numel())
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self.group._allgather_base(together, x.view(-1), options))
        return together.view(self.size, *x.shape)

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks' numbers; all ranks have arrived when it is known."""
        return int(self.gather(torch.tensor([int(value)], device=device)).min())

    def end(self) -> None:
        """Give the connections up. No CUDA graph may be left that has captured an operation: this would wait for it."""
        if self.group is not None:
            self.group.abort()


def _wait(work: Work | None) -> None:
    """Until the current stream, or on a CPU this thread, may go on: NCCL has nothing to wait for in the first case."""
    if work is not None:
        work.wait()


ALONE = Ranks()
