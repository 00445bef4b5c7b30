"""Where the results of a benchmark go."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc

from minisgl.config import check_types

if TYPE_CHECKING:
    from rich.console import Console

    from minisgl.bench.record import Run


NO_MATPLOTLIB = "needs matplotlib: pip install 'minisgl[plot]'"
FORMATS = (".png", ".svg")
"""Of pictures, as their names end."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Results

    Raises ValueError, naming the field, its value and what is allowed.
    """

    output: Annotated[str | None, Doc("Write everything measured as JSON, every time stamp included.")] = None
    plot: Annotated[str | None, Doc("Draw it, as .png or .svg; needs matplotlib.")] = None
    html: Annotated[str | None, Doc("Write a report as one HTML file.")] = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("output", "plot", "html"):
            if (given := getattr(self, name)) is not None and not can_be_written(given):
                raise ValueError(f"{name} must be a file in a folder that is there and can be written, got {given!r}")
        if self.plot is not None:
            if Path(self.plot).suffix not in FORMATS:
                raise ValueError(f"plot must end in {' or '.join(FORMATS)}, got {self.plot!r}")
            if not has_matplotlib():
                raise ValueError(f"plot {NO_MATPLOTLIB}")

    def keep(self, console: "Console", run: "Run") -> None:
        """Write the files and print the tables; then raises ValueError if a request has failed."""
        from minisgl.bench import html, plot, record, report  # which bring numpy
        from minisgl.bench.metrics import failed

        writers: tuple[tuple[str | None, Callable[[Run, Path], None]], ...]
        writers = ((self.html, html.write), (self.plot, plot.draw), (self.output, record.write))
        with ExitStack() as rest:  # what is pushed is done in reverse, also after one of them has failed
            for path, write in writers:
                if path is not None:
                    rest.callback(write, run, Path(path))
            report.show(run, console)
        requests = [request for part in run.passes for request in part.requests]
        if bad := failed(requests):
            raise ValueError(f"{len(bad)} of {len(requests)} requests failed, the first: {bad[0].error}")


def can_be_written(path: str) -> bool:
    """Whether there may be a file here; what is something else, like /dev/null, is not to be replaced by one."""
    real = os.path.realpath(path)
    is_free = not os.path.exists(real) or (os.path.isfile(real) and os.access(real, os.W_OK))
    return is_free and os.access(os.path.dirname(real), os.W_OK)


def has_matplotlib() -> bool:
    """Whether pictures can be drawn; nothing is imported for the answer."""
    return find_spec("matplotlib") is not None
