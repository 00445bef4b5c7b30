"""The Typer app: every command of `minisgl`, under its name."""

import os
import sys
from typing import Annotated

import typer

from minisgl import __version__

from .bench import bench
from .chat import chat
from .compare import compare
from .doctor import doctor
from .models import models
from .options import command, unknown_variables
from .profile import profile
from .run import run
from .serve import serve

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # `main` reports errors
)
OF_OPTIONS = (run, serve, chat, bench, profile)
"""Commands whose options are fields of dataclasses."""
for each in OF_OPTIONS:
    command(app, each)
app.command()(compare)
app.command()(doctor)
app.add_typer(models, name="models")


@app.callback(invoke_without_command=True)
def minisgl(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Run large language models with a compact, fast engine."""
    for warning in unknown_variables(OF_OPTIONS, os.environ):
        print(f"Warning: {warning}", file=sys.stderr)
    if version:
        typer.echo(f"minisgl {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
