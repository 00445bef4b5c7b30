"""A frontend process: HTTP on one side, an engine on the other, and everything that is text between them."""

import asyncio
import gc
import logging
import os
import resource
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from minisgl.server.child import Owner
from minisgl.server.client import EngineClient, make_front
from minisgl.server.config import ServerConfig
from minisgl.server.guard import Guard
from minisgl.server.messages import Control, EngineFacts, FrontendSettings, Report
from minisgl.server.routes import STALLED_S, Service
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that wait to be accepted; the system may allow fewer."""

LAST_WORDS_S = 1.0
"""How long answers that were failed have to reach their clients."""


class Frontend:
    """Listens from the start, answers once the engine is ready, and ends as its owner says.

    It reports `ready` twice: when it listens, and when it has what the engine's facts name and takes requests.
    """

    def __init__(self, owner: Owner, settings: FrontendSettings) -> None:
        self._owner, self._settings = owner, settings
        self._config = ServerConfig(**settings.server)
        path = self._config.chat_template
        self._chat_template = None if path is None else _read_template(path)
        self._service = Service(self._config)
        self._guard = Guard(self._config)
        self._client: EngineClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until the owner ends it; the exit code. Raises ValueError for what it cannot start with."""
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = loop.create_future()
        runner = web.AppRunner(
            self._guard.application(self._service.routes()),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=LAST_WORDS_S,
        )
        await runner.setup()
        await web.SockSite(runner, _bound(self._settings.host, self._settings.port), backlog=BACKLOG).start()
        self._owner.tell(Report(kind="ready"))

        def hear(control: Control) -> None:
            loop.call_soon_threadsafe(self._hear, control)

        self._owner.listen(hear, lost=lambda: hear(Control(do="fail", reason="the server was killed")))
        try:
            return await self._over
        finally:
            await runner.cleanup()
            if self._client is not None:
                await self._client.close()

    def _hear(self, control: Control) -> None:
        match control.do:
            case "ready":
                assert control.facts
                self._start(self._open(control.facts))
            case "stalled":
                self._service.pause(control.reason)
            case "drain":
                self._start(self._drain())
            case "fail":
                self._start(self._fail(control.reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside all else; its exception ends the process."""

        def settle(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) and not self._over.done():
                self._over.set_exception(error)

        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(settle)

    async def _open(self, facts: EngineFacts) -> None:
        """The engine is ready, and so is this when it can tokenize for it."""
        tokenizer = await asyncio.to_thread(Tokenizer.find, Path(facts.folder), self._chat_template)
        self._client = EngineClient(self._settings.address, self._settings.number, make_front(facts, tokenizer))
        self._service.open(self._client, facts)
        self._owner.tell(Report(kind="ready"))

    async def _drain(self) -> None:
        """Take no more requests, and end when those that run have, or have had their time."""
        self._service.refuse("draining", "it is being stopped")
        await self._idle(self._config.drain_timeout)
        if self._guard.open and self._client is not None:
            self._client.fail("the server is being stopped, and --drain-timeout is over")
            await self._idle(LAST_WORDS_S)
        self._end(0)

    async def _fail(self, reason: str) -> None:
        """End every answer with an error, and then this process."""
        self._service.refuse("failed", reason)
        if self._client is not None:
            self._client.fail(reason)
        await self._idle(LAST_WORDS_S)
        self._end(1)

    async def _idle(self, limit_s: float) -> None:
        """Wait until every request has its answer, but not longer than that."""
        end_s = asyncio.get_running_loop().time() + limit_s
        while self._guard.open and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)


def _bound(host: str, port: int) -> socket.socket:
    """A socket beside those of the other frontends on the same port."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections in TIME_WAIT
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED_S * 1000))  # for its connections
    listener.bind(address)
    return listener


def _read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {path}: {error}") from error
    ChatTemplate({"default": text}, {}).check()
    return text


def main() -> None:
    """The process that `python -m minisgl.server.app` is; its owner writes FrontendSettings to its stdin."""
    owner = Owner()
    settings = owner.settings(FrontendSettings)
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s %(levelname)s frontend {settings.number}: %(message)s"
    )
    logging.getLogger("minisgl").setLevel(settings.log_level.upper())
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a client's broken HTTP is no error of ours
    if settings.server["log_requests"]:
        logging.getLogger("minisgl.server.guard").setLevel(logging.INFO)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each connection is one
    gc.set_threshold(50_000, 20, 100)  # reading a body of a million lists must not collect garbage again and again
    code = 1
    try:
        code = uvloop.run(Frontend(owner, settings).run())
    except (ValueError, OSError) as error:
        owner.tell(Report(kind="fatal", text=str(error)))
    os._exit(code)  # a thread that tokenizes something long is not waited for


if __name__ == "__main__":
    main()
