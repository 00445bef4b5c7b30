"""What a user sees beside the results: logs and progress, both on stderr."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_doc import Doc
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from minisgl.config import check_types

Report = Callable[[str, float, float | None], None]
"""`report(what, done, total)`: `done` of `total` is finished, in any unit; a total of None is unknown."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Doc("Least severe message to show on stderr; debug adds tracebacks, and so does MINISGL_DEBUG=1."),
    ] = "warning"

    def __post_init__(self) -> None:
        check_types(self)


def start_logging(console: Console, logs: LogConfig) -> None:
    """Show the logs of minisgl from `log_level` on, and what other libraries warn of."""
    handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("minisgl").setLevel(logs.log_level.upper())


@contextmanager
def progress(console: Console) -> Iterator[Report]:
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
