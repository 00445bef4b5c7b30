"""`minisgl serve`: answer over HTTP, by OpenAI's protocol."""

import asyncio
from functools import partial
from typing import Annotated

import typer

from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig

from .options import with_model
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

    level = logs.log_level or "info"
    config, console = with_model(config, name, context), start_logging(logs, unset=level)
    if config.node_rank > 0:
        start(config, console)  # works for the server of the first host, and ends this process with it
    supervisor = Supervisor(config, server, level)
    raise typer.Exit(asyncio.run(supervisor.run(progress(console), partial(say, console))))
