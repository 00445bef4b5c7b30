"""`minisgl compare`: what has changed between two runs of `minisgl bench`."""

from pathlib import Path

import typer

from .terminal import table_console


def compare(a: Path, b: Path, tolerance: float = 0.05) -> None:
    """Compare two files that minisgl bench --output has written, A the earlier one.

    Shows each figure's change with its interval of 95 %. The exit code is 1 if a figure of B is worse: by more than the
    tolerance, which is a share, and by more than chance.
    """
    from minisgl.bench.compare import compare_files  # which brings numpy

    raise typer.Exit(compare_files(a, b, tolerance, table_console()))
