"""What a user sees beside the results: logs and progress, both on stderr."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_doc import Doc
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from minisgl.config import check_types

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.results import RequestOutput
    from minisgl.source.cache_folder import Report


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Doc("Least severe message shown; debug adds tracebacks, like MINISGL_DEBUG=1; default: warning; serve: info."),
    ] = None

    def __post_init__(self) -> None:
        check_types(self)


def start_logging(logs: LogConfig, unset: str = "warning") -> Console:
    """Show the logs of minisgl from `log_level` on, and what other libraries warn of, on stderr's console."""
    console = Console(stderr=True)
    handler, form = logging.StreamHandler(), "%(asctime)s %(levelname)s %(message)s"  # whole lines for a file
    if console.is_terminal:
        handler, form = RichHandler(console=console, show_path=False, omit_repeated_times=False), "%(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[handler])
    logging.getLogger("minisgl").setLevel((logs.log_level or unset).upper())
    return console


def say(console: Console, line: str) -> None:
    """Print a line of what goes on, as it is."""
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def table_console() -> Console:
    """For tables on stdout: a pipe has no width that columns or names should be cut for."""
    return Console(width=None if sys.stdout.isatty() else 200)


@contextmanager
def progress(console: Console) -> Iterator["Report"]:
    """Show what is reported: as bars, gone when done, on a terminal; elsewhere one line as each thing begins."""
    if not console.is_terminal:
        begun: set[str] = set()

        def say(what: str, done: float, total: float | None) -> None:
            if what not in begun:
                begun.add(what)
                console.print(f"{what} …", markup=False, highlight=False, soft_wrap=True)

        yield say
        return

    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:

        def draw(what: str, done: float, total: float | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        yield draw


class Meter:
    """How far the requests are and how the engine fares: a bar on a terminal, elsewhere a line now and then.

    `llm` is asked only inside `advance` and `show`, so in the thread that runs it.
    """

    def __init__(self, console: Console, total: int, llm: "LLM") -> None:
        self._console, self._total, self._llm = console, total, llm
        self._every_s = 0.2 if console.is_terminal else 10.0
        self._began_s = self._shown_s = time.monotonic()
        self._done = self.tokens_in = self.tokens_cached = self.tokens_out = 0
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        # Answers are not for stderr, so stdout stays what it is; see `paused`.
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task(f"0/{total} requests", total=total)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def advance(self, *outputs: "RequestOutput") -> None:
        """One more request has ended, with these results."""
        self._done += 1
        self.tokens_in += sum(len(output.prompt_token_ids) for output in outputs)
        self.tokens_cached += sum(output.cached_tokens for output in outputs)
        self.tokens_out += sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        self.show()

    def show(self) -> None:
        """Draw it anew, if it is time for that: cheap enough for every step of the engine."""
        if time.monotonic() - self._shown_s < self._every_s:
            return
        self._shown_s = time.monotonic()
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, description=self._line())
        else:
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something is printed to stdout, where that is a terminal too."""
        if not (self._console.is_terminal and sys.stdout.isatty()):
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    @property
    def rate(self) -> float:
        """Tokens generated per second, from the first request on."""
        return self._llm.generated_tokens / max(time.monotonic() - self._began_s, 1e-9)

    def _line(self) -> str:
        stats = self._llm.stats()
        pages = stats.pages_free + stats.pages_cached + stats.pages_locked
        hits = stats.prefix_hit_tokens / max(stats.prompt_tokens, 1)
        return (
            f"{self._done}/{self._total} requests, {self.rate:.0f} tok/s, {stats.running} running, "
            f"{stats.waiting} waiting, KV {stats.pages_locked / pages:.0%}, cache hits {hits:.0%}"
        )
