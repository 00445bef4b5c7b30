"""The load client: it sends requests when the load wants them, and notes when what came.

An answer is a stream of server-sent events as OpenAI's API has it. Content is text, or the reasoning before it, or
tokens that the server shows; an event that only names the role has none. All runs in one event loop, whose own delays
are measured beside: what arrives while the loop is busy is noted late.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import aiohttp
import msgspec

from minisgl.bench.record import Event, Lag, Pass, RequestRecord
from minisgl.bench.workload import Job

LAG_EVERY_S = 0.01
CONNECT_S = 30.0
IDLE_S = 2.0
"""How long a connection may wait for its next request: servers close it after a few seconds more, at any moment."""

CONTENT = ("text", "content", "reasoning", "reasoning_content", "token_ids")
"""Fields of a choice, or of its delta, that are part of the answer."""


class ServerFault(Exception):
    """The server refused a request, broke off, or was not there."""


class Server(Protocol):
    """Where requests go."""

    def answer(self, route: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Send a JSON body; the bytes of the answer as they come. Raises ServerFault."""
        ...


class HttpServer:
    """A server at a URL without a path, through a session that has what every request needs, such as a key."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def answer(self, route: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """See `Server`."""
        try:
            async with self._session.post(self._url + route, data=body) as response:
                if response.status != 200:
                    raise ServerFault(f"{response.status}: {(await response.text())[:300]}")
                async for data in response.content.iter_any():
                    yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFault(str(error) or type(error).__name__) from error


@asynccontextmanager
async def connect(url: str, headers: Mapping[str, str]) -> AsyncIterator[HttpServer]:
    """A server at a URL, with as many connections as there are requests at once."""
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        yield HttpServer(session, url)


class Answer:
    """One answer as its bytes come in: it fills a record, whose `completion_tokens` grow where the server tells."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.token_ids: list[int] = []
        self._rest, self._over = b"", False

    def take(self, data: bytes, now_s: float) -> None:
        """What came at that moment. Raises ServerFault for an error of the server's or what is no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for payload in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            try:
                if payload == b"[DONE]":
                    self._over = True
                else:
                    self._note(msgspec.json.decode(payload), now_s)
            except (msgspec.MsgspecError, AttributeError, TypeError) as error:
                raise ServerFault(f"an event is not as OpenAI's API has it: {payload[:200]!r}") from error

    def _note(self, chunk: dict[str, Any], now_s: float) -> None:
        record, tokens, has_content = self.record, None, False
        if error := chunk.get("error"):
            raise ServerFault(str(error.get("message") if isinstance(error, dict) else error))
        if usage := chunk.get("usage"):
            before, record.completion_tokens = record.completion_tokens or 0, usage["completion_tokens"]
            record.prompt_tokens = usage.get("prompt_tokens")
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", record.cached_tokens)
            tokens = usage["completion_tokens"] - before
        for choice in chunk.get("choices") or ():
            fields = choice | (choice.get("delta") or {})
            has_content |= any(fields.get(name) for name in CONTENT)
            self.token_ids += choice.get("token_ids") or ()
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if has_content:
            record.events.append(Event(now_s, tokens))

    def end(self) -> None:
        """Nothing more comes. Raises ServerFault if that was not all, or is nothing."""
        if not self._over and self.record.finish_reason is None:
            raise ServerFault("the answer broke off")
        if not self.record.events:
            raise ServerFault("the answer has no content")


@dataclass(frozen=True)
class Asking:
    """What all requests have in common."""

    model: str
    sampling: Mapping[str, Any]
    counts_on: bool  # whether the server can count tokens in every event

    def body(self, job: Job, prompt: Sequence[int]) -> bytes:
        """The JSON of a request; it asks for token ids where the next turn of a conversation needs them."""
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self.counts_on else {})
        asked: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": options}
        if job.body is not None:
            return msgspec.json.encode(job.body | asked)
        ids = {"return_token_ids": True} if job.later else {}
        return msgspec.json.encode(asked | {"prompt": prompt, "max_tokens": job.output_len, **self.sampling} | ids)


class Load:
    """Requests against a server: at given times, or as many at once as may be, or both."""

    def __init__(
        self, server: Server, asking: Asking, clock: Callable[[], float] = time.monotonic, told: Callable[[], Any] = int
    ) -> None:
        self._server, self._asking, self._clock, self._told = server, asking, clock, told

    async def run(
        self, measured: Pass, jobs: Sequence[Job], times_s: Sequence[float] | None, concurrency: int | None
    ) -> None:
        """Send all and wait for their ends; what happens is in the pass at once, so that an interrupt loses nothing.

        `times_s` are those after the begin at which requests are meant to be sent, in order; without, each is when its
        turn comes. A conversation counts as one in `concurrency`; its next turn is sent when the answer before has
        ended. `told` is called at the end of every request.
        """
        bodies = [self._asking.body(job, job.prompt) for job in jobs]  # now, not when the time counts
        times = repeat(None, len(jobs)) if times_s is None else times_s
        room = asyncio.Semaphore(concurrency or len(jobs))
        lag = asyncio.create_task(self._watch_lag(measured))
        measured.began_s = begin_s = self._clock()
        try:
            async with asyncio.TaskGroup() as running:
                for job, body, time_s in zip(jobs, bodies, times, strict=True):
                    intended_s = None if time_s is None else begin_s + time_s
                    while intended_s is not None and (wait_s := intended_s - self._clock()) > 0:
                        await asyncio.sleep(wait_s)
                    await room.acquire()
                    task = running.create_task(self._converse(measured, job, body, intended_s))
                    task.add_done_callback(lambda _: room.release())
        finally:
            lag.cancel()
            with suppress(asyncio.CancelledError):
                await lag
            ends = [request.ended_s for request in measured.requests if request.ended_s is not None]
            measured.ended_s = max(ends, default=begin_s)

    async def _converse(self, measured: Pass, job: Job, body: bytes, intended_s: float | None) -> None:
        """All turns, or those up to one that fails."""
        answer = await self._ask(measured, job, body, intended_s)
        prompt = list(job.prompt)
        for number, turn in enumerate(job.later, start=1):
            if answer.record.error is None:
                prompt += answer.token_ids + turn.prompt
                turn = turn._replace(later=job.later[number:])
                answer = await self._ask(measured, turn, self._asking.body(turn, prompt), None)

    async def _ask(self, measured: Pass, job: Job, body: bytes, intended_s: float | None) -> Answer:
        sent_s = self._clock()
        ends_itself = job.body is not None or not self._asking.sampling.get("ignore_eos")
        record = RequestRecord(
            intended_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            asked_tokens=None if ends_itself else job.output_len,
        )
        measured.requests.append(record)
        answer = Answer(record)
        try:
            async with aclosing(self._server.answer(job.route, body)) as stream:
                async for data in stream:
                    answer.take(data, self._clock())
            answer.end()
            if job.later and len(answer.token_ids) != record.completion_tokens:
                raise ServerFault("the server shows no token ids, which the next turn of a conversation needs")
        except ServerFault as error:
            record.error = str(error)
        record.ended_s = self._clock()
        self._told()
        return answer

    async def _watch_lag(self, measured: Pass) -> None:
        """At even distances, how late the loop notices that it is time; so a long stall counts as long as it is."""
        due_s = self._clock() + LAG_EVERY_S
        while True:
            await asyncio.sleep(due_s - self._clock())
            now_s = self._clock()
            while due_s <= now_s:
                measured.lags.append(Lag(due_s, now_s - due_s))
                due_s += LAG_EVERY_S
