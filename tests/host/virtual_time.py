"""An event loop whose clock stands still while anything runs, and jumps to the next timer when nothing does."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is what the timers say: sleeping takes none, and measured times are exact."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and nothing will come"
        self._loop.now_s += max(timeout, 0.0)
        return super().select(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
