"""Steps on several ranks: rank 0 sends each batch to the others and runs its own part of it, as they run theirs.

A batch is some kilobytes, and the device is at work on the one before it: a socket to each rank, on this host or on
another, is fast enough.
"""

import gc
import socket
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from minisgl.batch import Batch, Outcome
from minisgl.parallel.crew import Crew
from minisgl.parallel.line import pack, receive
from minisgl.parallel.ranks import Ranks

T = TypeVar("T")


class Pending(Protocol):
    """An outcome on its way."""

    @property
    def arrived(self) -> bool:
        """Whether it is here."""
        ...

    def wait(self) -> Outcome:
        """Wait until it is here."""
        ...


class Runner(Protocol):
    """One rank's part of a model."""

    def launch(self, batch: Batch) -> Pending:
        """Start its part of a step."""
        ...


class Leader:
    """The runner of rank 0, where there are others: none may take longer than `step_timeout_s` for a step."""

    def __init__(self, runner: Runner, crew: Crew, ranks: Ranks, step_timeout_s: float) -> None:
        # In this order, for whoever forgets to close it: graphs go before the communication that they have captured.
        self._runner: Runner | None = runner
        self._crew, self._ranks, self._step_timeout_s = crew, ranks, step_timeout_s

    def launch(self, batch: Batch) -> "Watched":
        """Start a batch on all ranks; ChildProcessError where one has ended. A failure of ours ends the others."""
        with self._crew.at_work(self._step_timeout_s, together=True):
            assert self._runner is not None, "closed"
            self._crew.send(pack(batch))
            return Watched(self._runner.launch(batch), self._crew, self._step_timeout_s)

    def together(self, order: str, work: Callable[[], T]) -> T:
        """Something beside steps that all ranks do: the others by this order (see `follow`), and this one `work`."""
        with self._crew.at_work(self._step_timeout_s, together=True):
            self._crew.send(pack(order))
            return work()

    def close(self) -> bool:
        """End the other ranks, and say whether the device can be asked for its memory; safe to call again."""
        self._crew.close()
        if self._runner is not None and not self._crew.device_waits:
            self._runner = None
            gc.collect()  # there may be a cycle that has graphs in it
            self._ranks.end()
        return not self._crew.device_waits


class Watched:
    """An outcome that may never come, because a rank has ended."""

    def __init__(self, pending: Pending, crew: Crew, timeout_s: float) -> None:
        self._pending, self._crew, self._timeout_s = pending, crew, timeout_s

    def wait(self) -> Outcome:
        """Wait until it is here; ChildProcessError where a rank has ended, or takes too long."""
        with self._crew.at_work(self._timeout_s):
            while not self._pending.arrived:
                self._crew.check()
                time.sleep(0)  # lets other threads run, and no more: the device is as quick
            return self._pending.wait()


def follow(runner: Runner, leader: socket.socket, obey: Callable[[str], object]) -> None:
    """Run the batches that rank 0 sends, and `obey` its orders, until it closes the line."""
    with leader.makefile("rb") as messages:
        while (message := receive(messages)) is not None:
            note_step(leader)
            if isinstance(message, str):
                obey(message)
            else:
                runner.launch(message)


def note_step(leader: socket.socket) -> None:
    """Tell rank 0 that this rank has come a step further: by a byte for each."""
    leader.sendall(b".")
