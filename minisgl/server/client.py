"""EngineClient: requests to an engine process, from an asyncio program."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import numpy as np
import zmq

from minisgl.batch import Logprobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.generation import NEUTRAL, Front, Generation, Prompt
from minisgl.request import Request
from minisgl.results import Piece, RequestOutput
from minisgl.scheduler import Stats
from minisgl.server import child, messages
from minisgl.server.messages import CLIENT_BITS
from minisgl.source.cache_folder import Report
from minisgl.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Sink = Callable[[list[Piece]], None]
"""Takes what one step of the engine brought to a prompt's answers, at least one piece."""

_TO_ENGINE = tuple(f.name for f in fields(SamplingParams) if f.name not in ("stop", "stop_token_ids", "bad_words"))
"""Fields of SamplingParams that the engine sees: the others travel as token ids, or are judged here."""


class EngineBusy(RuntimeError):
    """The engine's queue is full: the request was not taken."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests are waiting, and the queue is full")
        self.waiting = waiting


class EngineDead(RuntimeError):
    """The engine process has ended, or was said to have: what it worked on is lost."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A prompt that the engine has been given.

    `done` brings the output once every answer has ended and the engine has let go of it; or EngineBusy, EngineDead.
    """

    generation: Generation
    done: asyncio.Future[RequestOutput]
    sink: Sink | None
    open: int  # requests whose end the engine has not reported
    gaps_s: list[np.ndarray] = field(default_factory=list)  # between the tokens of each request that has ended


@dataclass(eq=False, slots=True)
class _Open:
    """One request's answer, as far as it has come."""

    request: Request
    ticket: Ticket
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # when they came
    closed: bool = False  # it was ended from here: what still comes of it is not wanted
    dropped: int = 0  # tokens that came all the same


def make_front(facts: messages.EngineFacts, tokenizer: Tokenizer | None) -> Front:
    """What turns prompts into requests for an engine; the tokenizer is that of the folder `facts.folder`."""
    own = tokenizer.eos_token_ids if tokenizer else ()
    return Front(
        tokenizer=tokenizer,
        vocab_size=facts.vocab_size,
        context=facts.context,
        eos_ids=tuple(sorted(token for token in {*facts.eos_ids, *own} if token < facts.vocab_size)),
        defaults={**NEUTRAL, **facts.sampling_defaults},
        model_name=facts.model_name,
    )


class EngineClient:
    """Requests to an engine process, from an asyncio program; all but `prepare` belong to its event loop."""

    def __init__(self, address: str, number: int, front: Front) -> None:
        """Connect to the engine that binds `address`, inside a running event loop; `number` is this client's own."""
        assert 0 <= number < 1 << 23, "its requests' keys are int64"
        self.front = front
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[int, Ticket] = {}  # by request id
        self._open: dict[int, _Open] = {}  # by request key
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._dead: str | None = None  # why nothing can be asked of the engine any more
        self._owned = AsyncExitStack()  # an engine process, where it is this client's
        self._lock = threading.Lock()
        self._next_key, self._end_key = number << CLIENT_BITS, number + 1 << CLIENT_BITS
        self._asked = 0
        self._random = random.SystemRandom()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(messages.ToClient).decode
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, messages.client_identity(number))
        self._socket.connect(address)
        self._awake = False  # `_receive` is going to be called
        self._loop.add_reader(self._socket.fileno(), self._wake)

    @classmethod
    async def launch(cls, config: EngineConfig, report: Report | None = None) -> Self:
        """Start an engine process of one's own; `close` (or `async with`) ends it.

        ValueError says why it cannot start. `report` is told how downloading and loading go.
        """
        async with AsyncExitStack() as stack:
            address, facts, died = await stack.enter_async_context(_own_engine(config, report))
            tokenizer = await asyncio.to_thread(Tokenizer.find, Path(facts.folder))
            client = cls(address, 0, make_front(facts, tokenizer))
            died.add_done_callback(lambda died: died.cancelled() or client.fail(died.result()))
            client._owned = stack.pop_all()
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail what is open, leave the engine, and end it if it is one's own; safe to call again."""
        self.fail("this client is closed")
        self._socket.close()
        self._context.term()
        await self._owned.aclose()

    @property
    def num_open(self) -> int:
        """Prompts whose end the engine has not reported."""
        return len(self._tickets)

    # Requests

    def prepare(self, prompt: Prompt, params: SamplingParams, *, stream: bool) -> Generation:
        """Tokenize and check a prompt, and give it keys; ValueError says what is wrong. May run in any thread.

        With `stream`, each token makes a piece; without, only the output is made.
        """
        count = getattr(params, "n", None) or 1
        with self._lock:
            key = self._next_key
            self._next_key += count
        assert self._next_key <= self._end_key, "more requests than a client may count"
        generation = self.front.generation(prompt, params, key, self._random.getrandbits(63), stream)
        assert len(generation.requests) == count
        return generation

    def submit(self, generation: Generation, sink: Sink | None = None) -> Ticket:
        """Send a prepared prompt to the engine. Raises EngineDead if that has ended.

        `sink` is called from the receiving callback, before `done` is set, never for one that was aborted. What it
        raises aborts the prompt, and `done` raises it again.
        """
        self._check_alive()
        first, now_s = generation.requests[0], time.monotonic()
        sampling = {name: value for name in _TO_ENGINE if (value := getattr(first.sampling, name)) is not None}
        self._send(
            messages.Add(
                keys=[request.key for request in generation.requests],
                seeds=[request.seed for request in generation.requests],
                prompt=first.prompt.astype("<i4", copy=False).tobytes(),
                max_tokens=first.max_tokens,
                sampling=sampling,
                stop_ids=list(first.stop_ids),
                bad_words=[list(word) for word in first.bad_words],
            )
        )
        ticket = Ticket(generation, self._loop.create_future(), sink, len(generation.requests))
        self._tickets[generation.request_id] = ticket
        for request in generation.requests:
            request.arrival_s = now_s
            self._open[request.key] = _Open(request, ticket)
        return ticket

    def abort(self, generation: Generation | int) -> None:
        """End a prompt, given itself or its `request_id`: `done` brings what there is, with the reason `abort`.

        Without effect on one that has ended.
        """
        request_id = generation if isinstance(generation, int) else generation.request_id
        ticket = self._tickets.get(request_id)
        if ticket is None or self._dead is not None:
            return
        ticket.sink = None
        self._finish([r.key for r in ticket.generation.requests if r.key in self._open], "abort")

    def _finish(self, keys: list[int], reason: Literal["stop", "abort"]) -> None:
        for key in keys:
            self._open[key].closed = True
        self._send(messages.Finish(keys, reason))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Answer one prompt piece by piece; leaving the loop aborts it. The last piece has `.output`.

        Raises ValueError for a prompt that cannot run, EngineBusy, EngineDead.
        """
        generation = await asyncio.to_thread(self.prepare, prompt, sampling_params or SamplingParams(), stream=True)
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

        def take(come: list[Piece]) -> None:
            for piece in come:
                pieces.put_nowait(piece)

        ticket = self.submit(generation, take)
        ticket.done.add_done_callback(lambda done: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
                if piece.finished:
                    return
            # It was aborted, or raises what ended it.
            yield Piece(
                request_id=ticket.generation.request_id, index=0, text="", token_ids=[], output=await ticket.done
            )
        finally:
            self.abort(generation)

    # Questions

    async def stats(self) -> Stats:
        """Counts of requests, pages, prefix-cache hits, retractions and steps."""
        return Stats(**await self._ask("stats"))

    async def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format."""
        return await self._ask("metrics")

    async def flush_cache(self) -> bool:
        """Drop every cached page that no running request holds; whether that was all of them."""
        return await self._ask("flush_cache")

    async def profile(self, steps: int) -> Any:
        """Profile that many of the engine's next steps at most: True, or False if that is being done already.

        With 0 steps that ends: the trace, as `minisgl.profiling` reads it, or None if none was begun.
        """
        return await self._ask("profile", steps)

    async def _ask(self, what: Literal["stats", "metrics", "flush_cache", "profile"], steps: int = 0) -> Any:
        """Between two steps of the engine, so after a long one it takes as long. RuntimeError where it fails at it."""
        self._check_alive()
        self._asked += 1
        answer = self._questions[self._asked] = self._loop.create_future()
        self._send(messages.Ask(self._asked, what, steps))
        if (value := await answer) is msgspec.UNSET:
            raise RuntimeError(f"the engine process has failed at {what}: its log says why")
        return value

    # The engine's end

    def fail(self, reason: str) -> None:
        """The engine is dead: all open tickets and questions end with EngineDead(reason), and so does what follows."""
        if self._dead is not None:
            return
        self._dead = reason
        self._loop.remove_reader(self._socket.fileno())
        waiting = [*(ticket.done for ticket in self._tickets.values()), *self._questions.values()]
        for each in (self._tickets, self._open, self._questions):
            each.clear()
        for future in waiting:
            _raise_in(future, EngineDead(reason))

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    # Messages

    def _send(self, message: messages.ToEngine) -> None:
        self._socket.send(self._encode(message), zmq.NOBLOCK)
        self._wake()  # sending may have taken the signal that something has come

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Take one message, and the next in the loop's next round: between two, everything else has its turn."""
        self._awake = False
        if self._dead is not None:
            return
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        self._wake()
        message = self._decode(frame)
        if isinstance(message, messages.Step):
            self._take_step(message)
        elif isinstance(message, messages.Refused):
            self._refuse(message)
        elif (question := self._questions.pop(message.number, None)) is not None and not question.done():
            question.set_result(message.value)

    def _refuse(self, refused: messages.Refused) -> None:
        for key in refused.keys:
            entry = self._open.pop(key, None)
            if entry is not None:
                self._tickets.pop(entry.ticket.generation.request_id, None)
                _raise_in(entry.ticket.done, EngineBusy(refused.waiting))

    def _take_step(self, step: messages.Step) -> None:
        now_s = time.monotonic()
        keys = np.frombuffer(step.keys, "<i8").tolist()
        tokens = np.frombuffer(step.tokens, "<i4").tolist()
        if step.prompt_logprobs or step.logprobs is not None:
            self._take_logprobs(step, dict(zip(keys, tokens, strict=True)))
        told: dict[Ticket, None] = {}
        stopped: list[int] = []
        for key, token in zip(keys, tokens, strict=True):
            entry = self._open.get(key)
            if entry is None:
                continue
            if entry.closed:
                entry.dropped += 1
                continue
            entry.tokens.append(token)
            entry.times_s.append(now_s)
            ticket = entry.ticket
            told[ticket] = None
            try:
                if ticket.generation.take_token(key, token, now_s) is not None:
                    stopped.append(key)
            except Exception as error:
                self._spoil(ticket, error)
        if stopped:
            self._finish(stopped, "stop")
        for ended in step.ended:
            if (entry := self._open.pop(ended.key, None)) is not None:
                self._end(entry, ended, now_s)
                told[entry.ticket] = None
        for ticket in told:
            self._tell(ticket)
            if ticket.open == 0:
                self._complete(ticket)

    def _take_logprobs(self, step: messages.Step, tokens: dict[int, int]) -> None:
        for prompt in step.prompt_logprobs:
            if (entry := self._open.get(prompt.key)) is not None:
                entry.ticket.generation.take_prompt_logprobs(prompt.first, _unpacked(prompt.logprobs))
        if step.logprobs is None:
            return
        logprobs = _unpacked(step.logprobs)
        for row, key in enumerate(np.frombuffer(step.logprobs.keys, "<i8").tolist()):
            entry = self._open.get(key)
            if entry is not None and not entry.closed and key in tokens:
                entry.ticket.generation.take_logprobs(key, tokens[key], logprobs, row)

    def _end(self, entry: _Open, ended: messages.Ended, now_s: float) -> None:
        request, ticket = entry.request, entry.ticket
        request.output = np.array(entry.tokens, dtype=np.int32)
        request.cached_tokens = ended.cached_tokens
        request.finish_reason = "abort" if entry.dropped else ended.reason
        if len(entry.tokens) + entry.dropped != ended.num_tokens:
            logger.error("of %d tokens of an answer, %d have come", ended.num_tokens, len(entry.tokens))
            request.finish_reason = "error"
        ticket.open -= 1
        ticket.gaps_s.append(np.diff(np.array(entry.times_s)))
        try:
            ticket.generation.end(request.key, now_s)
        except Exception as error:
            self._spoil(ticket, error)

    def _tell(self, ticket: Ticket) -> None:
        """Hand over what a step brought."""
        pieces = ticket.generation.pieces
        if not pieces:
            return
        come = list(pieces)
        pieces.clear()
        if ticket.sink is None:
            return
        try:
            ticket.sink(come)
        except Exception as error:
            self._spoil(ticket, error)

    def _spoil(self, ticket: Ticket, error: Exception) -> None:
        """What went wrong with an answer's text, or with who takes it, ends that prompt and no other."""
        logger.error("an answer cannot be handed over: %r", error, exc_info=error)
        _raise_in(ticket.done, error)
        self.abort(ticket.generation)

    def _complete(self, ticket: Ticket) -> None:
        output = self._tickets.pop(ticket.generation.request_id).generation.output
        if output is None:  # spoilt
            return
        if not ticket.done.done():
            ticket.done.set_result(output)
        self._send(
            messages.Observation(
                prompt_tokens=len(output.prompt_token_ids),
                cached_tokens=output.cached_tokens,
                completion_tokens=sum(len(answer.token_ids) for answer in output.outputs),
                finish_reasons=[answer.finish_reason for answer in output.outputs],
                ttft_s=output.timing.ttft_s,
                total_s=output.timing.total_s,
                gaps_s=np.concatenate(ticket.gaps_s).astype("<f4").tobytes(),
            )
        )


def _raise_in(future: asyncio.Future[Any], error: Exception) -> None:
    """Set an exception that nobody has to look at: whoever does not wait for a future any more need not know."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def _unpacked(packed: messages.StepLogprobs) -> Logprobs:
    chosen = np.frombuffer(packed.chosen, "<f4")
    shape = (len(chosen), len(packed.top) // 4 // max(len(chosen), 1))
    return Logprobs(
        chosen, np.frombuffer(packed.top_ids, "<i4").reshape(shape), np.frombuffer(packed.top, "<f4").reshape(shape)
    )


@asynccontextmanager
async def _own_engine(
    config: EngineConfig, report: Report | None
) -> AsyncIterator[tuple[str, messages.EngineFacts, asyncio.Task[str]]]:
    """An engine process, ended on leaving: its address, what it has loaded, and what will say that it has died."""
    with child.socket_folder() as folder:
        least = logger.getEffectiveLevel()  # in the engine, a level of the user's own has no name
        level = logging.getLevelName(min(max(least // 10, 1), 5) * 10)
        settings = messages.EngineSettings(address=f"ipc://{folder}/engine", config=asdict(config), log_level=level)
        process = await child.start("minisgl.server.worker", settings)
        try:
            lines = child.reports(process)
            facts = await _ready(process, lines, report)
            died = asyncio.create_task(_died(process, lines))
            yield settings.address, facts, died
            died.cancel()
        finally:
            await child.end(process)


async def _ready(
    process: asyncio.subprocess.Process, lines: AsyncIterator[messages.Report], report: Report | None
) -> messages.EngineFacts:
    async for line in lines:
        if line.facts is not None:
            return line.facts
        if line.kind == "fatal":
            raise ValueError(line.text)
        if report is not None:
            report(line.text, line.done, line.total or None)
    raise ValueError(f"the engine has died while it started: {child.how_it_ended(await process.wait())}")


async def _died(process: asyncio.subprocess.Process, lines: AsyncIterator[messages.Report]) -> str:
    """Wait until it does; then say how."""
    said = ""
    async for line in lines:
        said = line.text  # beats have none
    return f"the engine has died: {said or child.how_it_ended(await process.wait())}"
