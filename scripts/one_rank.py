"""One rank of several, alone on one GPU: what its own part of the work takes, with no other to wait for or add up with.

    python scripts/one_rank.py bench --config bench_configs/offline-256-qwen3-32b-tp2.toml
    python scripts/one_rank.py profile --model bench_configs/models/qwen3-32b --load-format dummy --tp 2 --batch 256

`run`, `bench` without a server, and `profile`; `--tp`, or the file's, says of how many ranks this is the first.
All kernels, shapes and steps are those of that rank, except that sums over all ranks are left out: what several GPUs
take beyond this is their communication. So it bounds what they can reach. The tokens mean nothing.
"""

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import minisgl.build
from minisgl.config import EngineConfig
from minisgl.parallel.crew import Crew, Place, Task
from minisgl.parallel.ranks import Ranks


class Silence:
    """A process group whose others say nothing: what this rank has is the sum, and every part of what is gathered."""

    def allreduce(self, tensors: list[Tensor], options: object) -> None:
        """Leave them as they are."""

    def _allgather_base(self, together: Tensor, mine: Tensor, options: object) -> None:
        together.view(-1, mine.numel()).copy_(mine.expand(together.numel() // mine.numel(), -1))

    def abort(self) -> None:
        """Nobody is there."""


@contextmanager
def lead_nobody(place: Place, config: EngineConfig, task: Task) -> Iterator[tuple[Ranks, Crew]]:
    """What `lead` yields, with no other rank started."""
    group: Any = Silence()
    yield Ranks(place.rank, place.size, group), Crew([], [], on_device=False)


def pretend_to_lead() -> None:
    """From here on, engines of several ranks consist of the first."""
    minisgl.build.lead = lead_nobody
    if torch.cuda.is_available():
        torch.cuda.init()  # before it is told of more GPUs than there are
        torch.cuda.device_count = lambda: 1 << 10


if __name__ == "__main__":
    pretend_to_lead()
    runpy.run_module("minisgl", run_name="__main__")
