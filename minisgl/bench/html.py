"""A run as one HTML file that needs nothing else: what was measured on what, its tables, notes and pictures."""

import io
import json
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from minisgl.bench import plot, report
from minisgl.bench.output import NO_MATPLOTLIB, has_matplotlib
from minisgl.bench.record import Run


def write(run: Run, path: Path) -> None:
    """Write the report; without matplotlib it says in the pictures' place how to get it."""
    console = Console(record=True, width=130, file=io.StringIO())
    report.show(run, console)
    settings = {"run": {"date": run.date}, "machine": run.machine, "versions": run.versions, "engine": run.engine}
    settings |= {"workload": run.workload, "load": run.load, "sampling": run.sampling}
    given = {of: {k: v for k, v in each.items() if v is not None} for of, each in settings.items() if each}
    console.print("", json.dumps(given, indent=2), sep="\n", markup=False, highlight=False)
    page = console.export_html(theme=DEFAULT_TERMINAL_THEME, inline_styles=True)
    title = f"<title>{escape(f'{run.mode} of {run.model}')}</title>"
    page = page.replace("<head>", f"<head>\n{title}", 1).replace("<body>", f"<body>\n{_picture(run)}", 1)
    path.write_text(page, encoding="utf-8")


def _picture(run: Run) -> str:
    if not has_matplotlib():
        return f"<p>No picture: {NO_MATPLOTLIB}.</p>"
    svg = io.BytesIO()
    plot.draw(run, svg, "svg")
    return svg.getvalue().decode().partition("<!DOCTYPE")[2].partition(">")[2]
