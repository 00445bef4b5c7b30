"""What a terminal would show as one HTML file that needs nothing else; a run with its pictures and settings."""

import io
import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from minisgl.bench import plot, report
from minisgl.bench.output import NO_MATPLOTLIB, has_matplotlib
from minisgl.bench.record import Run


def write(run: Run, path: Path) -> None:
    """Write the report; without matplotlib it says in the pictures' place how to get it."""
    settings = {"run": {"date": run.date}, "machine": run.machine, "versions": run.versions, "engine": run.engine}
    settings |= {"workload": run.workload, "load": run.load, "sampling": run.sampling}
    given = {of: {k: v for k, v in each.items() if v is not None} for of, each in settings.items() if each}

    def show(console: Console) -> None:
        report.show(run, console)
        console.print("", json.dumps(given, indent=2), sep="\n", markup=False, highlight=False)

    path.write_text(page(f"{run.mode} of {run.model}", _picture(run), show), encoding="utf-8")


def page(title: str, picture: str, show: Callable[[Console], Any]) -> str:
    """A page of HTML: below the picture, which is HTML already, all that `show` prints."""
    console = Console(record=True, width=130, file=io.StringIO())
    show(console)
    made = console.export_html(theme=DEFAULT_TERMINAL_THEME, inline_styles=True)
    made = made.replace("<head>", f"<head>\n<title>{escape(title)}</title>", 1)
    return made.replace("<body>", f"<body>\n{picture}", 1)


def _picture(run: Run) -> str:
    if not has_matplotlib():
        return f"<p>No picture: {NO_MATPLOTLIB}.</p>"
    svg = io.BytesIO()
    plot.draw(run, svg, "svg")
    return svg.getvalue().decode().partition("<!DOCTYPE")[2].partition(">")[2]
