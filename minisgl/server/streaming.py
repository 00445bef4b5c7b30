"""Answers as server-sent events: the pieces of an engine's step become bytes of HTTP, without a task or a queue."""

import asyncio
from collections.abc import Sequence

import msgspec

from minisgl.generation import Generation
from minisgl.openai.answers import (
    Scores,
    TokenBytes,
    answer_ids,
    build_usage,
    echoes_scores,
    finish_reason,
    new_id,
    prompt_text,
    shown_prompt,
)
from minisgl.openai.protocol import CHAT, ApiRequest, StreamOptions
from minisgl.results import Completion, Piece, RequestOutput, TokenLogprob

ROOM_BYTES = 1 << 16
"""What may wait in a connection for its reader before further pieces are held back."""

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


def event(body: object) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % encode(body)


class Stream:
    """One request's answers as a stream of events.

    The sink writes into the connection by itself, from `open` on. A client that reads too slowly gets its text in
    larger pieces: what there is no room for is held, as what it says and not as events, so that it takes no more
    memory than the answer itself.
    """

    def __init__(
        self, request: ApiRequest, generations: Sequence[Generation], model: str, created: int, token_bytes: TokenBytes
    ) -> None:
        self.request = request
        self.begun = asyncio.Event()
        """Set when there is something to send."""
        self._options = request.stream or StreamOptions()
        chat = request.route == CHAT
        self._fields = {
            "id": new_id("chatcmpl-" if chat else "cmpl-"),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }
        head = b'data: %b,"choices":[{"index":' % encode(self._fields)[:-1]
        per_prompt = len(generations[0].requests)
        self._choices = [
            Choice(self, generations[index // per_prompt], b"%b%d," % (head, index), token_bytes)
            for index in range(per_prompt * len(generations))
        ]
        self._tokens_in = sum(len(generation.requests[0].prompt) for generation in generations)
        self._held: dict[Choice, None] = {}  # those that have something to say
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = False

    def take(self, first: int, pieces: list[Piece]) -> None:
        """The sink of a prompt whose answers are the choices from `first` on."""
        for piece in pieces:
            choice = self._choices[first + piece.index]
            choice.hold(piece)
            self._held[choice] = None
        if self._transport is None:
            self.begun.set()
        else:
            self._write(self._transport)

    def open(self, transport: asyncio.WriteTransport, chunked: bool) -> None:
        """Let the sink write, in chunks of HTTP/1.1 or plain bytes."""
        self._transport, self._chunked = transport, chunked
        self._write(transport)

    def close(self) -> None:
        """Let the sink write no more."""
        self._transport = None

    def _write(self, transport: asyncio.WriteTransport) -> None:
        if not transport.is_closing() and transport.get_write_buffer_size() <= ROOM_BYTES and (events := self.events()):
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def events(self) -> bytes:
        """What is held and can be said by now."""
        events = b"".join([choice.events() for choice in self._held])
        self._held.clear()
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """All that follows what the sink has written, once every answer has ended."""
        last = b""
        if self._options.include_usage:
            last = event({**self._fields, "choices": [], "usage": build_usage(self.request, outputs)})
        return self.events() + last + DONE

    def usage(self) -> bytes:
        """What a piece says about usage, that of the tokens so far or none."""
        if self._options.continuous_usage_stats:
            tokens = sum(choice.sent for choice in self._choices)
            fields = (self._tokens_in, tokens, self._tokens_in + tokens)
            return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % fields
        return b',"usage":null' if self._options.include_usage else b""


class Choice:
    """One answer of a stream: what of it waits to be sent, and how that is written."""

    def __init__(self, stream: Stream, generation: Generation, head: bytes, token_bytes: TokenBytes) -> None:
        self.sent = 0
        """Tokens whose text, or part of it, has been sent."""
        self._stream, self._generation, self._head, self._token_bytes = stream, generation, head, token_bytes
        self._request = request = stream.request
        chat = request.route == CHAT
        self._before, self._after = (b'"delta":{"content":', b"}") if chat else (b'"text":', b"")
        self._empty = b'"delta":{}' if chat else b'"text":""'
        self._scores = Scores(request.route, token_bytes)
        self._begun = False
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._completion: Completion | None = None

    def hold(self, piece: Piece) -> None:
        """Take in what came, to be sent with the next event."""
        if not self._request.prompt_only:
            if piece.text:
                self._text.append(piece.text)
            self._ids += piece.token_ids
            if piece.logprobs:
                self._logprobs += piece.logprobs
        self._completion = piece.completion

    def events(self) -> bytes:
        """Events for what is held. Tokens without text yet wait for it: they may be cut with a stop string."""
        events = [] if self._begun else self._first()
        completion = self._completion
        if completion is not None:
            rest = max(0, len(answer_ids(self._request, completion)) - self.sent)
            del self._ids[rest:], self._logprobs[rest:]
        if self._text:
            text = encode("".join(self._text))
            self._text.clear()
            events.append(self._event(b"".join((self._before, text, self._after)), *self._tokens()))
        if completion is not None and completion.finish_reason in ("stop", "length"):
            scores, more = self._tokens()
            more += b',"stop_reason":' + encode(completion.stop_reason)
            events.append(self._event(self._empty, scores, more, encode(finish_reason(self._request, completion))))
        return b"".join(events)

    def _first(self) -> list[bytes]:
        """What comes before the answer's own text: the role, or the prompt."""
        self._begun = True
        request, generation = self._request, self._generation
        prompt: list[int] = generation.requests[0].prompt.tolist() if request.echo or request.return_token_ids else []
        asked = request.sampling.prompt_logprobs is not None
        shown = shown_prompt(request, prompt, generation.prompt_logprobs if asked else None, self._token_bytes)
        more = b"," + encode(shown)[1:-1] if shown else b""
        if request.route == CHAT:
            return [self._event(b'"delta":{"role":"assistant","content":""}', b"null", more)]
        if not request.echo:
            return [self._event(self._empty, b"null", more)] if more else []
        text = encode(prompt_text(generation.prompt, prompt, self._token_bytes))
        scores = b"null"
        if echoes_scores(request):
            scores = encode(self._scores.show(prompt, generation.prompt_logprobs))
        return [self._event(self._before + text, scores, more)]

    def _tokens(self) -> tuple[bytes, bytes]:
        """What is to be said of the tokens that wait, beside their text: log-probabilities, and ids."""
        scores = encode(self._scores.show(self._ids, self._logprobs)) if self._logprobs else b"null"
        more = b',"token_ids":' + encode(self._ids) if self._request.return_token_ids else b""
        self.sent += len(self._ids)
        self._ids.clear()
        self._logprobs.clear()
        return scores, more

    def _event(self, content: bytes, scores: bytes, more: bytes, reason: bytes = b"null") -> bytes:
        usage = self._stream.usage()
        return b"".join(
            (self._head, content, b',"logprobs":', scores, b',"finish_reason":', reason, more, b"}]", usage, b"}\n\n")
        )
