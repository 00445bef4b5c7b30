"""Engine: launch the next batch, then take in the last one while the device works."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from minisgl.batch import Batch, Outcome
from minisgl.request import NO_TOKENS, FinishReason, Request
from minisgl.scheduler import Committed, Scheduler, Stats


class Result(Protocol):
    """What a launched batch will bring."""

    def wait(self) -> Outcome:
        """Wait for the device and return it."""
        ...


class Runner(Protocol):
    """The device, as the engine sees it."""

    def launch(self, batch: Batch) -> Result:
        """Start a batch (forward and sampling) and return at once.

        ChildProcessError: it is on several ranks, has lost one, and can run nothing any more.
        """
        ...


class Engine:
    """One loop for overlap on and off: with it, one batch may be in flight whose tokens are not known yet.

    Not thread-safe: one thread calls it. Requests are the caller's to make (`minisgl.llm`, a server's worker).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        overlap: bool = True,
        close: Callable[[], bool] = lambda: True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.close = close
        """End what works for it, and say whether the device still answers; no step comes after that."""
        self.check = check
        """Raise what the next step would raise because a rank has been lost, for whoever has no step to do."""
        self._depth = 1 if overlap else 0
        self._results: deque[Result] = deque()  # of the batches in scheduler.in_flight

    @property
    def context(self) -> int:
        """The longest request in tokens, prompt and answer together."""
        return self.scheduler.context

    @property
    def num_waiting(self) -> int:
        """Requests that were added and hold no slot."""
        return len(self.scheduler.queue)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self.scheduler.has_work or bool(self._results)

    def add(self, request: Request) -> None:
        """Queue a request that fits the context."""
        self.scheduler.add(request)

    def finish(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request now; the next step reports it. Without effect on one that has ended."""
        self.scheduler.finish(request, reason)

    def step(self) -> Committed:
        """Launch the next batch, then commit the oldest one if the device is far enough ahead.

        If the device fails, every request ends with `error` (the next call reports them) and the exception goes on.
        """
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                self._results.append(self.runner.launch(batch))
                self.scheduler.launched(batch)
            if len(self._results) > (self._depth if batch is not None else 0):
                return self.scheduler.commit(self._results.popleft().wait())
            ended = self.scheduler.take_ended()
            assert batch is not None or ended or not self.scheduler.queue, "requests wait, and nothing can run"
        except BaseException:
            self._results.clear()
            self.scheduler.fail_all()
            raise
        nobody = np.empty(0, np.int64)
        return Committed(nobody, NO_TOKENS, ended, nobody, None, [])

    def flush_cache(self) -> bool:
        """Drop every cached page that no running request holds; whether that was all of them."""
        return self.scheduler.flush_cache()

    def stats(self) -> Stats:
        """Counts at this moment."""
        return self.scheduler.stats()
