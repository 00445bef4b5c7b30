"""`minisgl serve`: answer over HTTP, by OpenAI's protocol."""

import asyncio
import dataclasses
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig

from .terminal import LogConfig, progress, say, start_logging


def serve(
    context: typer.Context,
    server: ServerConfig,
    config: EngineConfig,
    logs: LogConfig,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
) -> None:
    """Serve a model over HTTP, by OpenAI's protocol.

    Everything is printed to stderr; when the server is ready, its address and a command that asks it something.
    SIGTERM and Ctrl-C let what runs end, a second Ctrl-C does not.
    """
    from minisgl.server.supervisor import Supervisor

    if name is not None:
        if set(context.params["model"] or ()) - {name}:
            raise typer.BadParameter("give the model once, as an argument or as --model", param_hint="MODEL")
        config = dataclasses.replace(config, model=name)
    console = Console(stderr=True)
    level = start_logging(console, logs, unset="info")
    supervisor = Supervisor(config, server, level)
    raise typer.Exit(asyncio.run(supervisor.run(progress(console), partial(say, console))))
