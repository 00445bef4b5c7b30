"""`minisgl serve`: answer over HTTP, by OpenAI's protocol."""

import asyncio
import dataclasses
from typing import Annotated

import typer
from rich.console import Console

from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig

from .run import start
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

    if name is not None and set(context.params["model"] or ()) - {name}:
        raise typer.BadParameter("give the model once, as an argument or as --model", param_hint="MODEL")
    config = dataclasses.replace(config, model=config.model if name is None else name)
    level = start_logging(console := Console(stderr=True), logs, unset="info")
    if config.node_rank > 0:
        start(config, console)  # works for the server of the first host, and ends this process with it
    serving = Supervisor(config, server, level).run(progress(console), lambda line: say(console, line))
    raise typer.Exit(asyncio.run(serving))
