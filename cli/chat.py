"""`minisgl chat`: talk with a model in the terminal."""

from typing import Annotated

import typer

from minisgl.chat.config import ChatConfig
from minisgl.config import EngineConfig, SamplingParams

from .options import with_model
from .terminal import LogConfig, start_logging


def chat(
    context: typer.Context,
    form: ChatConfig,
    sampling: SamplingParams,
    config: EngineConfig,
    logs: LogConfig,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")] = None,
) -> None:
    """Talk with a model in the terminal, here or on a server.

    /help shows what can be entered beside questions. Lines from a pipe are questions and commands too: the answers go
    to stdout, all else to stderr.
    """
    from minisgl.chat.shell import chat  # not before the options are known to be right

    start_logging(logs)
    raise typer.Exit(chat(form, sampling, with_model(config, name, context)))
