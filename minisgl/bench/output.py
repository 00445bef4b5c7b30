"""Where the results of a benchmark go."""

import os
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
            given = getattr(self, name)
            if given is not None and (Path(given).is_dir() or not os.access(Path(given).absolute().parent, os.W_OK)):
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

        if self.output is not None:
            record.write(run, Path(self.output))
        report.show(run, console)
        if self.plot is not None:
            plot.draw(run, Path(self.plot))
        if self.html is not None:
            html.write(run, Path(self.html))
        requests = [request for part in run.passes for request in part.requests]
        if bad := failed(requests):
            raise ValueError(f"{len(bad)} of {len(requests)} requests failed, the first: {bad[0].error}")


def has_matplotlib() -> bool:
    """Whether pictures can be drawn; nothing is imported for the answer."""
    return find_spec("matplotlib") is not None
