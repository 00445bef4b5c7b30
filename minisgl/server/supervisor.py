"""The process that `minisgl serve` is: it starts an engine and its frontends, watches them, and ends them all."""

import asyncio
import errno
import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.server import child
from minisgl.server.config import ServerConfig
from minisgl.server.messages import Control, EngineFacts, EngineSettings, FrontendSettings
from minisgl.source.cache_folder import Report

logger = logging.getLogger(__name__)

MODULES = ("minisgl.server.worker", "minisgl.server.app")
GRACE_S = 2.0
"""What a part has to end by itself, once it has been told to."""
CLEANER = 'while read -r group; do groups="$groups -$group"; done; kill -KILL $groups; rm -rf -- "$0"'
"""For the shell: when stdin ends, as it does however this process ends, kill the process groups named there, and
remove the folder."""


@dataclass(eq=False)
class Part:
    """A process of the server, leader of a group of its own, so that Ctrl-C reaches the supervisor alone."""

    name: str
    process: asyncio.subprocess.Process
    followed: asyncio.Task[None] = field(init=False)  # until it has ended
    reports_ready: int = 0
    fault: str = ""  # what it said of its end


class Supervisor:
    """The processes of one server, from the first one's start to the last one's end.

    `modules` are the engine's and the frontends': each runs as a process that speaks `messages`.
    """

    def __init__(
        self, engine: EngineConfig, server: ServerConfig, log_level: str, modules: tuple[str, str] = MODULES
    ) -> None:
        self._engine_config, self._server, self._log_level, self._modules = engine, server, log_level, modules
        self._parts: list[Part] = []  # the cleaner, the frontends, the engine
        self._facts: EngineFacts | None = None
        self._ready = False
        self._signal = 0  # the first that came; since then it drains
        self._silent_s = 0.0  # since the engine's last beat

    async def run(self, progress: AbstractContextManager[Report], say: Callable[[str], None]) -> int:
        """Serve until a signal comes, and what runs has ended: then the exit code is 0 for SIGTERM, 130 for Ctrl-C.

        `progress` shows how the start goes, `say` prints a line. Raises ValueError if the server cannot start, and
        ChildProcessError if a part of it has died. On return, and after an exception, nothing of it is left.
        """
        self._say = say
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, signal.Signals(number))
        reason = "the server was stopped"
        server = self._server
        with child.socket_folder() as folder, reserve(server.host, server.port) as holder, ExitStack() as bars:
            self._bars, self._report = bars, bars.enter_context(progress)
            self._host, self._port = holder.getsockname()[:2]
            self._warn()
            try:
                await self._start(folder)
                await self._over
            except (ValueError, OSError) as error:
                reason = str(error)
                raise
            finally:
                await self._end(reason)
        return 0 if self._signal == signal.SIGTERM else 128 + signal.SIGINT

    # Start

    def _warn(self) -> None:
        if not self._server.api_key and not ipaddress.ip_address(self._host.partition("%")[0]).is_loopback:
            where = f"{self._host}, port {self._port}"
            logger.warning("whoever can reach %s may use this server: give --api-key, or listen on 127.0.0.1", where)

    async def _start(self, folder: Path) -> None:
        self._report("starting", 0, None)
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._cleaner = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", CLEANER, folder, stdin=pipe, stdout=null, stderr=null, process_group=0
        )
        self._add("the cleaner", self._cleaner)
        server, address = self._server, f"ipc://{folder}/engine"
        for number in range(server.frontends):
            settings = FrontendSettings(
                number=number,
                address=address,
                host=self._host,
                port=self._port,
                server=asdict(server),
                log_level=self._log_level,
            )
            self._add(f"frontend {number}", await child.start(self._modules[1], settings))
        settings = EngineSettings(
            address=address,
            config=asdict(self._engine_config),
            max_queued_requests=server.max_queued_requests,
            served_names=list(server.served_model_name or ()),
            log_interval_s=server.log_interval,
            log_level=self._log_level,
        )
        self._add("the engine", await child.start(self._modules[0], settings))

    def _add(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._parts.append(part := Part(name, process))
        assert self._cleaner.stdin is not None
        if process is not self._cleaner:
            self._cleaner.stdin.write(f"{process.pid}\n".encode())
        part.followed = self._watch(self._follow(part))

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside all else; its exception ends the server."""

        def settle(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                self._fail(error)

        task = asyncio.create_task(work)
        task.add_done_callback(settle)
        return task

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # Life

    async def _follow(self, part: Part) -> None:
        """Take in what a part reports until it ends, as it may only when it has been told to."""
        if part.process.stdout is not None:
            async for report in child.reports(part.process):
                match report.kind:
                    case "progress" if not self._ready:
                        self._report("starting", 1, 1)
                        self._report(report.text, report.done, report.total or None)
                    case "ready":
                        self._note_ready(part, report.facts)
                    case "beat":
                        self._silent_s = 0.0
                    case "fatal":
                        part.fault = report.text
        code = await part.process.wait()
        if self._over.done():
            return
        if self._signal and code == 0 and part in self._frontends:
            if all(each.process.returncode is not None for each in self._frontends):
                self._over.set_result(None)
            return
        if part.fault and not self._ready:
            raise ValueError(part.fault)
        raise ChildProcessError(f"{part.name} has died: {part.fault or child.how_it_ended(code)}")

    @property
    def _frontends(self) -> list[Part]:
        return self._parts[1 : 1 + self._server.frontends]

    def _note_ready(self, part: Part, facts: EngineFacts | None) -> None:
        part.reports_ready += 1
        if facts is not None:
            self._facts = facts
            self._tell_frontends(Control(do="ready", facts=facts))
            self._beats = self._watch(self._watch_engine())
        # A frontend says it when it listens, and again when it knows the model.
        if self._facts is not None and all(each.reports_ready == 2 for each in self._frontends):
            self._ready = True
            self._bars.close()
            self._say(f"ready at {url(self._host, self._port)}; try it:")
            self._say(example(url(self._host, self._port), self._facts, self._server))

    async def _watch_engine(self) -> None:
        """Raise when the engine hangs, and half-way there stop taking requests.

        Time in which this process did not run itself does not count.
        """
        limit_s, stalled = self._server.watchdog_timeout, False
        while self._silent_s < limit_s:
            await asyncio.sleep(1)
            self._silent_s += 1
            if stalled != (self._silent_s >= limit_s / 2):
                stalled = not stalled
                reason = f"the engine has not finished a step for {self._silent_s:g} s" if stalled else ""
                self._tell_frontends(Control(do="stalled", reason=reason))
        raise ChildProcessError(f"the engine has not finished a step for {limit_s:g} s")

    # End

    def _stop(self, number: signal.Signals) -> None:
        """The first signal lets what runs end; a second one does not, nor one before anything can run."""
        if self._over.done():
            return
        if self._signal or not self._ready:
            self._signal = self._signal or number
            self._over.set_result(None)
            return
        self._signal = number
        self._tell_frontends(Control(do="drain"))
        limit_s = self._server.drain_timeout
        late = ChildProcessError(f"the frontends have not ended {GRACE_S:g} s after the drain timeout")
        asyncio.get_running_loop().call_later(limit_s + GRACE_S, self._fail, late)
        self._say(f"stopping; what runs has {limit_s:g} s to end, and Ctrl-C ends it now")

    def _tell_frontends(self, control: Control) -> None:
        for part in self._frontends:
            child.send(part.process, control)

    async def _end(self, reason: str) -> None:
        """End what is left: frontends tell `reason` to whom they owe an answer; what takes too long is killed."""
        self._over.cancel()
        self._bars.close()
        self._tell_frontends(Control(do="fail", reason=reason))
        for part in self._parts[1 + self._server.frontends :]:
            with suppress(ProcessLookupError):
                part.process.terminate()  # the engine, which may be downloading by a process of its own
        if len(self._parts) > 1:
            await asyncio.wait([part.followed for part in self._parts[1:]], timeout=GRACE_S)
        for part in self._parts:
            with suppress(ProcessLookupError):  # of a part that has ended, others of its group may be left
                os.killpg(part.process.pid, signal.SIGKILL)
        if self._parts:
            await asyncio.wait([part.followed for part in self._parts])


@contextmanager
def reserve(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that keeps a port for this server and never listens; the frontends listen beside it.

    Nobody else gets the port from now on, although it is shared: to bind beside this socket takes SO_REUSEPORT, and a
    second server binds without it. SO_REUSEADDR is there only for connections of an earlier server that linger in
    TIME_WAIT; as it would also let two servers in at the same moment, each listens for that moment, which only one
    of them can. Raises ValueError if the port cannot be had.
    """
    holder = None
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, kind)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port != 0)
        holder.bind(place)
        if port:
            holder.listen()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, False)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, True)
        if port:
            holder.shutdown(socket.SHUT_RDWR)
    except UnicodeError:
        raise ValueError(f"cannot listen on {host}, port {port}: that cannot be the name of a host") from None
    except OSError as error:
        if holder is not None:
            holder.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} on {host} is in use: choose another with --port, or 0 for any") from None
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    with holder:
        yield holder


def url(host: str, port: int) -> str:
    """Where a client on this machine finds the server; `host` is an IP address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def example(url: str, facts: EngineFacts, server: ServerConfig) -> str:
    """A command for the shell that asks the server something its model can answer."""
    folder = Path(facts.folder)
    route, asked = "completions", {"prompt": "Once upon a time"}
    if not (folder / "tokenizer.json").is_file():
        asked = {"prompt": [0]}
    elif server.chat_template is not None or _has_chat_template(folder):
        question = {"role": "user", "content": "What is the capital of France?"}
        route, asked = "chat/completions", {"messages": [question]}
    body = {"model": facts.model_name, **asked, "max_tokens": 50, "temperature": 0}
    key = ' -H "Authorization: Bearer $MINISGL_API_KEY"' if server.api_key else ""
    return f"curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _has_chat_template(folder: Path) -> bool:
    """Whether a model brings one; without reading what a frontend will read in full."""
    config = folder / "tokenizer_config.json"
    in_config = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
    return in_config or any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json"))
