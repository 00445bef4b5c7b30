"""The ranks of one engine as processes: rank 0 starts the others of its host, and ends with them.

Rank 0 is the process that wants the engine. Another is one that it has started (`minisgl.runtime.rank`), or, under
torchrun and as the first of another host, one that has asked for the same engine.
"""

import atexit
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

import msgspec

from minisgl.config import EngineConfig
from minisgl.host import command
from minisgl.source.model_config import ModelConfig

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_TELL_S = 5.0
"""How long rank 0 may take to notice that another has ended; then it is stuck in a call to the device, and ends too."""
_END_S = 2.0
"""How long ranks may take to end when they are asked to."""
_LAST_WORDS_BYTES = 1 << 16
START_S = 600.0
"""How long ranks may stand still while they start, at least; what takes longest is to compile a kernel."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among the ranks of an engine, and where they meet."""

    rank: int
    size: int
    local_rank: int  # among those of this host: its GPU
    local_size: int  # ranks that this process starts, and itself
    host: str  # of the store through which they meet, which rank 0 holds
    port: int  # 0 lets the kernel choose
    one_host: bool = True
    torchrun: bool = False  # which has started all ranks


def find_place(config: EngineConfig) -> Place:
    """This process's place, from torchrun's environment where it has started several ranks, else from the config.

    ValueError where what these say does not fit together.
    """
    environ = os.environ
    if config.tp > 1 and environ.keys() >= {"TORCHELASTIC_RUN_ID", "WORLD_SIZE"}:
        size = int(environ["WORLD_SIZE"])
        if size != config.tp or config.nnodes > 1:
            raise ValueError(
                f"tp={config.tp}, nnodes={config.nnodes}: torchrun has started {size} ranks: tp must say so, not nnodes"
            )
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        one_host = environ["LOCAL_WORLD_SIZE"] == environ["WORLD_SIZE"]
        return Place(int(environ["RANK"]), size, int(environ["LOCAL_RANK"]), 1, host, port, one_host, torchrun=True)
    if config.node_rank >= config.nnodes:
        raise ValueError(f"node_rank={config.node_rank}: it must be less than nnodes={config.nnodes}, 0 on the first")
    if config.nnodes == 1:
        return Place(0, config.tp, 0, config.tp, "127.0.0.1", 0)
    host, _, port = (config.dist_init_addr or "").rpartition(":")
    if config.tp % config.nnodes or not (host.strip("[]:.0") and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(
            f"nnodes={config.nnodes}: tp={config.tp} must be a multiple of it, and dist_init_addr HOST:PORT of the "
            f"first host, got {config.dist_init_addr!r}"
        )
    local_size = config.tp // config.nnodes
    return Place(config.node_rank * local_size, config.tp, 0, local_size, host.strip("[]"), int(port), one_host=False)


class Task(msgspec.Struct):
    """What a started rank is told, on stdin."""

    place: Place
    config: dict[str, Any]
    folder: str
    name: str
    model: ModelConfig
    owner: int = 0
    """The process that starts it, and whose end is to be its own."""


@dataclass(eq=False)
class Other:
    """Another rank, as the one that started it or sends to it sees it."""

    rank: int
    process: subprocess.Popen[bytes] | None = None
    words: IO[bytes] | None = None  # what it says on stderr, to be read when it has ended
    line: socket.socket | None = None
    steps: int = 0  # how far it has come: it has met us, and every further step of its start, and batch

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank}" + (f" (pid {self.process.pid})" if self.process else "")

    def how_it_ended(self) -> str:
        """In one line."""
        if self.process is None or (code := self.process.returncode) is None:
            return f"{self.name} has closed its connection" + ("" if self.process else ": its own terminal says why")
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        said = self.last_words().partition("Fatal Python error: ")[0].splitlines()  # behind it, where all threads were
        return f"{self.name} ended with {how}" + (f": {said[-1]}" if said else "")

    def last_words(self) -> str:
        """The end of what it has said."""
        if self.words is None:
            return ""
        # Not by seek and read: the file's position is where the rank goes on.
        start = max(0, os.fstat(self.words.fileno()).st_size - _LAST_WORDS_BYTES)
        return os.pread(self.words.fileno(), _LAST_WORDS_BYTES, start).decode(errors="replace").strip()


@dataclass(eq=False)
class _Watch:
    """What the watching thread knows; it holds nothing that an engine is made of, so that one can be forgotten."""

    others: list[Other]
    on_device: bool  # where a rank that ends may leave this one's GPU waiting for ever
    failure: str | None = None
    failed: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)  # held by whoever ends them
    timeout_s: float | None = None  # how long all may stand still
    moved_s: float = 0.0  # when one last did not
    steps: int = 1  # how far we have come ourselves: all ranks take the same
    at_work: bool = False
    kept: object = None

    def run(self) -> None:
        """Look after the other ranks until the first ends; then end them all."""
        while not self.failed.is_set() and not self.ended.wait(_LOOK_S):
            with self.lock:
                lost = None if self.ended.is_set() else next(self._lost(), None)  # lines close while this waits
                if lost is not None:
                    if lost.rank == 0 and self.ended.wait(_TELL_S):
                        return  # rank 0 was done, and so are we
                    self.fail(lost.how_it_ended())
                elif (limit_s := self.timeout_s) is not None and time.monotonic() > self.moved_s + limit_s:
                    self.fail(f"the ranks have stood still for {limit_s:g} s, see --step-timeout: {self._who_hangs()}")
        until_s = time.monotonic() + _TELL_S
        while self.at_work and not self.ended.wait(_LOOK_S):
            if time.monotonic() > until_s:
                print(f"Error: {self.failure}", file=sys.stderr)
                leave(1)

    def _lost(self) -> Iterator[Other]:
        yield from (each for each in self.others if each.process is not None and each.process.poll() is not None)
        poller = select.poll()
        lines = {other.line.fileno(): other for other in self.others if other.line is not None}
        for number, other in lines.items():
            poller.register(number, select.POLLRDHUP | (select.POLLIN if other.rank else 0))
        for number, event in poller.poll(0):
            other = lines[number]
            if event == select.POLLIN:  # and nothing else: it tells of its steps
                other.steps += len(os.read(number, 4096))
                self.moved_s = time.monotonic()
            else:
                if other.process is not None:
                    with suppress(subprocess.TimeoutExpired):
                        other.process.wait(_END_S)
                yield other

    def _who_hangs(self) -> str:
        steps = {"rank 0": self.steps} | {other.name: other.steps for other in self.others}
        behind = [name for name, count in steps.items() if count < max(steps.values())]
        return f"{', '.join(behind)} is behind" if behind else "none is behind, so a step may just take longer"

    def fail(self, why: str, exit_code: int = 1) -> None:
        """End all ranks, for this reason; only the first counts."""
        with self.lock:
            if self.failure is not None or self.ended.is_set():
                return
            self.failure = why
            for other in self.others:
                if words := other.last_words():
                    logger.debug("%s said:\n%s", other.name, words)
            self.end(0)
            if self.on_device:
                atexit.register(leave, exit_code, self.kept)  # else Python's own end would wait for the device
            self.failed.set()

    def end(self, patience_s: float) -> None:
        """Close the lines, and kill who has not ended by then; who cannot be killed closes his side when he is done.

        Until then he may still be in his part of the last step, which the end of ours would break.
        """
        for other in self.others:
            if other.line is not None:
                with suppress(OSError):
                    other.line.shutdown(socket.SHUT_WR)
        until_s = time.monotonic() + patience_s
        for other in self.others:
            left_s = max(0.0, until_s - time.monotonic())
            if other.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    other.process.wait(left_s)
                other.process.kill()
                other.process.wait()
            elif other.line is not None:
                with suppress(OSError):
                    other.line.settimeout(left_s)
                    while other.line.recv(4096):
                        pass  # what it has told before


class Crew:
    """The other ranks, as one sees them that has started some of them, or leads all.

    A thread watches them. When one ends, all others are ended, and whoever waits for them here gets ChildProcessError
    with its name, how it ended and its last words.
    """

    def __init__(self, others: list[Other], start: list[Task], on_device: bool) -> None:
        """`others` are those to be started, with their `start`, and those that will come by themselves."""
        self._watch = _Watch(others, on_device)
        begun = threading.Event()

        def work(watch: _Watch) -> None:
            # Here, because a rank ends with the thread that has started it: so this one stays until they have ended.
            try:
                for other, task in zip(watch.others, start, strict=False):
                    other.words = tempfile.TemporaryFile()  # noqa: SIM115  as long as the rank
                    other.process = _start(task, other.words)
            except Exception as error:
                watch.fail(f"a rank cannot be started: {error}")
            finally:
                begun.set()
            watch.run()
            for process in filter(None, [other.process for other in watch.others]):
                process.wait()

        threading.Thread(target=work, args=(self._watch,), name="ranks", daemon=True).start()
        self.close = weakref.finalize(self, _close, self._watch, os.getpid())
        """End the other ranks; safe to call again, and done when nobody has this any more."""
        try:
            begun.wait()
        except BaseException:  # Ctrl-C
            begun.wait()  # a moment
            self.close()
            raise

    @contextmanager
    def at_work(self, timeout_s: float | None = None, together: bool = False) -> Iterator[None]:
        """What is done in here needs all ranks, which may stand still so long; ChildProcessError where one has ended.

        If `together`, they would wait for each other for ever once one of them has failed: then so have all.
        """
        watch = self._watch
        watch.at_work = True
        try:
            self.check()
            watch.moved_s, watch.timeout_s = time.monotonic(), timeout_s
            yield
        except BaseException as error:
            # A rank's end is felt here at once, as some error of its connection, and seen by the thread soon.
            if isinstance(error, RuntimeError | OSError):
                watch.failed.wait(1.0)
            ours = f"this rank has failed: {type(error).__name__} {error}".rstrip()
            if together:  # what the thread is about to find goes first
                watch.fail(ours, error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
            if watch.failure not in (None, ours) and isinstance(error, Exception):
                raise ChildProcessError(watch.failure) from error
            raise
        finally:
            watch.timeout_s, watch.at_work = None, False

    def check(self) -> None:
        """ChildProcessError if a rank has ended."""
        if self._watch.failure is not None or self._watch.ended.is_set():
            raise ChildProcessError(self._watch.failure or "the ranks have been ended")

    def note_step(self) -> None:
        """This rank has come a step further with its start; ChildProcessError if another has ended."""
        self.check()
        self._watch.steps += 1
        self._watch.moved_s = time.monotonic()

    @property
    def device_waits(self) -> bool:
        """Whether this rank's GPU may wait for one that has ended: nothing may be asked of it then, not even memory."""
        return self._watch.on_device and self._watch.failure is not None

    def keep(self, kept: object) -> None:
        """Where a rank has failed, keep something till this process ends: to free it would be to wait for the GPU."""
        self._watch.kept = kept

    def receive(self, listener: socket.socket) -> None:
        """Wait until each rank has come and said which it is."""
        coming = {other.rank: other for other in self._watch.others}
        listener.settimeout(_LOOK_S)
        while coming:
            self.check()
            with suppress(TimeoutError, ConnectionError):
                line, _ = listener.accept()
                line.settimeout(_END_S)
                rank = int.from_bytes(line.recv(4), "little")
                line.settimeout(None)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if other := coming.pop(rank, None):
                    other.line, other.steps = line, 1
                    line.sendall(b".")  # it may go on
                else:
                    line.close()
                    logger.warning("one has come that is none of ours; its own terminal says why")

    def send(self, message: bytes) -> None:
        """Send all ranks a message: a batch or an order, and a step of all."""
        self._watch.steps += 1
        for other in self._watch.others:
            assert other.line is not None, "receive() comes first"
            other.line.sendall(message)


def _close(watch: _Watch, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of it
    watch.ended.set()
    with watch.lock:
        watch.end(_END_S)
        # Else the thread holds it into Python's own end, which torch's threads do not survive; `keep` says when to.
        watch.kept = watch.kept if watch.on_device and watch.failure else None
        for other in watch.others:
            for file in filter(None, (other.line, other.words)):
                file.close()


def _start(task: Task, words: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own, where the terminal's Ctrl-C does not reach it."""
    own, pipe = command("minisgl.runtime.rank"), subprocess.PIPE
    process = subprocess.Popen(own, stdin=pipe, stdout=words, stderr=words, start_new_session=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # if it has ended, the thread will see that
        process.stdin.write(msgspec.json.encode(msgspec.structs.replace(task, owner=os.getpid())))
    return process


def leave(code: int, *_kept: object) -> NoReturn:
    """End this process as it stands: its device may never answer again."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
