"""A chat's answer as a server streams it, for those who read along: all that it holds, typed."""

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from minisgl.bench.answer import Choice, Events, ServerFault, Usage, check, understood
from minisgl.bench.client import HttpServer

TOO_LONG = ("context_length_exceeded", "maximum context length")
"""Signs of a conversation that is longer than the context, in what servers answer to it."""


class Likely(Struct):
    """A token and the logarithm of its probability."""

    token: str
    logprob: float


class Chosen(Likely):
    """The same of a token of the answer, with the likeliest in its place."""

    top_logprobs: list[Likely] | None = None


class Logprobs(Struct):
    content: list[Chosen] | None = None


class ReadChoice(Choice):
    logprobs: Logprobs | None = None

    @property
    def chosen(self) -> list[Chosen]:
        """The tokens of the text, where they were asked for."""
        return (self.logprobs and self.logprobs.content) or []

    def said(self, *names: str) -> str:
        """The text of the first of these fields that has any."""
        return str(next(filter(None, map((self.delta or {}).get, names)), ""))


class Chunk(Struct):
    """What an event brings."""

    choices: list[ReadChoice] | None = None
    usage: Usage | None = None
    error: Any = None


async def chunks(stream: AsyncIterator[bytes]) -> AsyncIterator[Chunk]:
    """Each event as it comes, up to the last; a server may keep the connection open after that.

    Raises ServerFault for an error of the server's, for what is no event, and where the last one is missing.
    """
    events, ended = Events(), False
    async for data in stream:
        for payload in events.take(data):
            chunk = understood(payload, Chunk, "an event")
            check(chunk.error)
            ended = ended or any(choice.finish_reason for choice in chunk.choices or ())
            yield chunk
        if events.over:
            return
    if not ended:
        raise ServerFault("the answer broke off")


class Model(Struct):
    id: str
    max_model_len: int | None = None


class Models(Struct):
    data: list[Model]


async def models(server: HttpServer) -> dict[str, int | None]:
    """The names of a server's models, with their contexts in tokens where it tells. Raises ServerFault."""
    listed = understood(await server.ask("/v1/models"), Models, "the list of models")
    return {each.id: each.max_model_len for each in listed.data}


def is_too_long(fault: ServerFault) -> bool:
    """Whether a server refuses a conversation because it is longer than the context."""
    return any(sign in str(fault) for sign in TOO_LONG)


def message(fault: ServerFault) -> str:
    """What a server says of a fault, in one line: the message alone, where it is JSON, which may be cut off."""
    text = str(fault)
    if parts := re.match(r'(\d+: )?.*?"message":\s*"((?:[^"\\]|\\.)*)', text):
        status, said = parts.groups("")
        with suppress(msgspec.DecodeError):  # of a character that is cut off
            said = msgspec.json.decode(f'"{said}"')
        text = f"{status}{said}"
    return " ".join(text.split())
