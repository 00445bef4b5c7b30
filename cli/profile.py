"""`minisgl profile`: where the time of a step goes."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from minisgl.config import EngineConfig
from minisgl.profiling.options import ProfileConfig

from .terminal import LogConfig, progress, say, start_logging, table_console


def profile(
    options: ProfileConfig,
    config: EngineConfig,
    logs: LogConfig,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(metavar="A B", help="Compare --output files.")] = None,
) -> None:
    """Capture steps of an engine, and say where their time goes.

    The report goes to stdout, all else to stderr. With --compare, the exit code is 1 if a step has become slower.
    """
    from minisgl.profiling import profile as command  # not before the options are known to be right: they bring numpy
    from minisgl.profiling import report

    if compare is not None:
        raise typer.Exit(report.compare(*compare, table_console()))
    console = start_logging(logs)
    command.profile(config, options, progress(console), partial(say, console), table_console())
