"""`minisgl models`: what is in the caches, minisgl's own and Hugging Face's; to get one, to remove one."""

import json
import sys
import time
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from minisgl.source.cache_folder import cache_folder
from minisgl.source.inventory import cached_models, find_cached

from .terminal import LogConfig, progress, start_logging, table_console

models = typer.Typer()


@models.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the models on this machine, get one, or remove one.

    The list has each model's name, kind (alias; imported from a file; Hugging Face hub), size, and when it was last
    used, as far as the disk keeps that: often to the day.
    """
    if context.invoked_subcommand is not None:
        return
    found = cached_models()
    if as_json:
        print(json.dumps([{k: getattr(model, k) for k in ("name", "kind", "size_bytes", "used_s")} for model in found]))
        return
    if not found:
        print(f"no models in {cache_folder()} and Hugging Face's cache; `minisgl models pull smollm2` gets one")
        return
    table = Table("name", "kind", "size", "last used", box=box.SIMPLE_HEAD)
    for model in found:
        used = time.strftime("%Y-%m-%d", time.localtime(model.used_s))
        table.add_row(Text(model.name), model.kind, f"{model.size_bytes / 1e6:,.0f} MB", used)
    table_console().print(table)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="Hugging Face repo id, alias or .gguf file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repo.")] = None,
) -> None:
    """Get a model, so that it is there when it is needed."""
    from minisgl.source.hub import locate

    with progress(start_logging(LogConfig())) as report:
        folder = locate(name, revision, report=report)
    print(folder.path)


@models.command()
def rm(
    name: Annotated[str, typer.Argument(help="A name of the list.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the cache; other files are never touched."""
    model = find_cached(name)
    size = f"{model.size_bytes / 1e6:,.0f} MB"
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError(f"{name} ({size}) is not removed without asking: give --yes")
        print(f"Remove {name} ({size})? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Exit(1)
    model.remove()
    print(f"removed {name} ({size})")
