"""The Typer app: every command of `minisgl`, under its name."""

from typing import Annotated

import typer

from minisgl import __version__

from .doctor import doctor
from .models import models
from .options import command
from .run import run

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # `main` reports errors
)
command(app)(run)
app.command()(doctor)
app.add_typer(models, name="models")


@app.callback(invoke_without_command=True)
def minisgl(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Run large language models with a compact, fast engine."""
    if version:
        typer.echo(f"minisgl {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
