"""An answer as a server streams it: server-sent events, as OpenAI's API has them, noted with their times.

Content is text, or the reasoning before it, or calls of tools, or tokens that the server shows; an event that only
names the role has none.
"""

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from minisgl.bench.record import Event, RequestRecord

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]


CONTENT = ("content", "reasoning", "reasoning_content", "tool_calls", "token_ids")
"""Fields of a delta that are part of the answer."""


class ServerFault(Exception):
    """The server refused a request, broke off, or was not there."""


def understood(data: bytes, kind: type[T], what: str) -> T:
    """JSON of a server as what it should be; raises ServerFault, naming `what`, for anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ServerFault(f"{what} is not as OpenAI's API has it: {error}: {data[:200]!r}") from error


class Cached(Struct):
    cached_tokens: Count | None = None


class Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: Cached | None = None


class Choice(Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class Chunk(Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class Events:
    """The server-sent events of an answer, as its bytes come in."""

    def __init__(self) -> None:
        self.over = False
        """Whether the one that is the last by its name has come."""
        self._rest = b""

    def take(self, data: bytes) -> Iterator[bytes]:
        """What the events hold that these bytes complete, but for the last."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for payload in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if payload == b"[DONE]":
                self.over = True
            else:
                yield payload


def check(error: Any) -> None:
    """Raises ServerFault for what an event has as its error, if it has one."""
    if error:
        raise ServerFault(str(error.get("message") if isinstance(error, dict) else error))


class Answer:
    """One answer as its bytes come in: it fills a record, whose `completion_tokens` grow where the server tells."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.token_ids: list[int] = []
        self.text = ""
        self._events = Events()

    def take(self, data: bytes, now_s: float) -> None:
        """What came at that moment. Raises ServerFault for an error of the server's or what is no event."""
        for payload in self._events.take(data):
            self._note(understood(payload, Chunk, "an event"), now_s)

    def _note(self, chunk: Chunk, now_s: float) -> None:
        check(chunk.error)
        tokens = None if chunk.usage is None else self._count(chunk.usage)
        has_content = False
        for choice in chunk.choices or ():
            delta = choice.delta or {}
            has_content |= any((choice.text, choice.token_ids, *map(delta.get, CONTENT)))
            self.token_ids += choice.token_ids or ()
            self.text += str(delta.get("content") or "")
            self.record.finish_reason = choice.finish_reason or self.record.finish_reason
        if has_content:
            self.record.events.append(Event(now_s, tokens))

    def _count(self, usage: Usage) -> int | None:
        """Note what the server counts; how many tokens are new, where it says how many there are."""
        record, before = self.record, self.record.completion_tokens or 0
        if usage.prompt_tokens is not None:
            record.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is None:
            return None
        record.completion_tokens = usage.completion_tokens
        return usage.completion_tokens - before

    def end(self) -> None:
        """Nothing more comes. Raises ServerFault if that was not all, or is nothing."""
        if not self._events.over and self.record.finish_reason is None:
            raise ServerFault("the answer broke off, or was no stream of events")
        if not self.record.events:
            raise ServerFault("the answer has no content")
