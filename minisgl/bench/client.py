"""The load client: it sends requests when the load wants them, and notes when what came.

All runs in one event loop, whose own delays are measured beside: what arrives while the loop is busy is noted late.
"""

import asyncio
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import repeat
from typing import Any, Protocol

import aiohttp

from minisgl.bench.answer import Answer, ServerFault
from minisgl.bench.asking import Asking, Said
from minisgl.bench.record import Lag, Pass, RequestRecord
from minisgl.bench.workload import Job

LAG_EVERY_S = 0.01
CONNECT_S = 30.0
QUESTION_S = 60.0
"""How long the answer to a question may take that generates nothing."""
IDLE_S = 2.0
"""How long a connection may wait for its next request: servers close it after a few seconds more, at any moment."""


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
        async with self._response("POST", route, data=body) as response:
            async for data in response.content.iter_any():
                yield data

    async def ask(self, route: str, body: bytes | None = None) -> bytes:
        """The whole answer to a question, with a body by POST. Raises ServerFault."""
        limits = aiohttp.ClientTimeout(total=QUESTION_S)
        async with self._response("GET" if body is None else "POST", route, data=body, timeout=limits) as response:
            return await response.read()

    @asynccontextmanager
    async def _response(self, method: str, route: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose status is 200; any other, and what goes wrong while it is read, is a ServerFault."""
        try:
            async with self._session.request(method, self._url + route, **options) as response:
                if response.status != 200:
                    text = (await response.content.read(300)).decode(errors="replace")
                    raise ServerFault(f"{response.status}: {' '.join(text.split())}")
                yield response
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise ServerFault(str(error) or type(error).__name__) from error


@asynccontextmanager
async def connect(url: str, headers: Mapping[str, str], silence_s: float | None = None) -> AsyncIterator[HttpServer]:
    """A server at a URL, with as many connections as there are requests at once.

    An answer of which nothing comes for `silence_s` has failed.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        yield HttpServer(session, url)


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
        bodies = [self._asking.body(job, [job.prompt]) for job in jobs]  # now, not when the time counts
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
        said: list[Said] = [job.prompt]
        reply = await self._ask(measured, job, body, intended_s)
        for number, turn in enumerate(job.later, start=1):
            if reply is not None:
                said += [reply, turn.prompt]
                turn = turn._replace(later=job.later[number:])
                reply = await self._ask(measured, turn, self._asking.body(turn, said), None)

    async def _ask(self, measured: Pass, job: Job, body: bytes, intended_s: float | None) -> Said | None:
        """What the answer adds to a conversation that goes on; None where it failed."""
        sent_s = self._clock()
        ends_itself = job.body is not None or not self._asking.sampling.get("ignore_eos")
        record = RequestRecord(
            intended_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            asked_tokens=None if ends_itself else job.output_len,
        )
        measured.requests.append(record)
        answer, reply = Answer(record), None
        try:
            async with aclosing(self._server.answer(self._asking.route(job), body)) as stream:
                async for data in stream:
                    answer.take(data, self._clock())
            answer.end()
            reply = self._asking.reply(answer) if job.later else ""
        except ServerFault as error:
            record.error = str(error)
        record.ended_s = self._clock()
        self._told()
        return reply

    async def _watch_lag(self, measured: Pass) -> None:
        """At even distances, how late the loop notices that it is time; so a long stall counts as long as it is."""
        due_s = self._clock() + LAG_EVERY_S
        while True:
            await asyncio.sleep(due_s - self._clock())
            now_s = self._clock()
            while due_s <= now_s:
                measured.lags.append(Lag(due_s, now_s - due_s))
                due_s += LAG_EVERY_S
