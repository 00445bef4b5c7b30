"""Both ends of the line between a process and the one that owns it: JSON lines on the child's stdin and stdout."""

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from minisgl.host import command, end_with
from minisgl.server.messages import Control, Report

_LONGEST_LINE = 1 << 20
_LONGEST_FOLDER = 90  # a Unix socket's path holds 107 bytes
END_S = 2.0
"""How long a child may take to end when it is asked to."""

Settings = TypeVar("Settings")


class Owner:
    """The process that started this one, as this one sees it. To be made first of all, before slow imports.

    From then on Ctrl-C is the owner's business, the kernel kills this process when the owner's thread that started it
    ends, and what anything prints to stdout goes to stderr, so that reports are all that the owner reads.
    """

    def __init__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with(os.getppid())
        self._reports = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        # Unbuffered: a thread that waits inside a buffer of Python's own would hold its lock at exit, which aborts.
        self._lines = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  as long as the process
        self._lock = threading.Lock()

    def settings(self, kind: type[Settings]) -> Settings:
        """The first line: what this process is to be."""
        return msgspec.json.decode(self._lines.readline(), type=kind)

    def tell(self, report: Report) -> None:
        """Send a line; an owner that has ended ends this process."""
        try:
            with self._lock:
                self._reports.write(msgspec.json.encode(report) + b"\n")
        except BrokenPipeError:
            os._exit(1)

    def listen(self, hear: Callable[[Control], None], lost: Callable[[], None]) -> None:
        """From now on tell `hear` of each further line, and `lost` of their end; both in a thread of its own."""

        def read() -> None:
            for line in self._lines:
                hear(msgspec.json.decode(line, type=Control))
            lost()

        threading.Thread(target=read, name="owner", daemon=True).start()


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder that only this user can enter, for the engine's socket; removed in the end.

    ValueError where an engine cannot be another's child: under torchrun, which starts one process for each rank.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError("torchrun cannot start this, whose engine is a process of its own: use --tp without torchrun")
    try:
        made = tempfile.TemporaryDirectory(prefix="minisgl-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ValueError(f"cannot make a folder for a socket: {error.strerror} ({error.filename})") from error
    with made as folder:
        if len(folder) > _LONGEST_FOLDER:
            raise ValueError(f"{folder} is too long for the path of a socket: set TMPDIR to a shorter folder")
        yield Path(folder)


async def start(module: str, settings: msgspec.Struct) -> asyncio.subprocess.Process:
    """Start a module of minisgl as a child and send it its settings.

    It leads a session and process group: the terminal's Ctrl-C does not reach it, and it can be ended with all that it
    started.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command(module), stdin=pipe, stdout=pipe, limit=_LONGEST_LINE, start_new_session=True
    )
    send(process, settings)
    return process


def send(process: asyncio.subprocess.Process, line: msgspec.Struct) -> None:
    """Send a child its settings or a `Control`; without effect on one that has ended."""
    assert process.stdin is not None
    if not process.stdin.is_closing():
        process.stdin.write(msgspec.json.encode(line) + b"\n")


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask a child to end, and kill it if it takes too long, or if the wait for it is given up.

    That it was given up is heeded when the child is gone, which takes a moment then: else its pipes stayed open.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process.terminate()
    gone, given_up = asyncio.ensure_future(process.wait()), None
    patience_s: float | None = END_S
    while not gone.done():
        try:
            await asyncio.wait({gone}, timeout=patience_s)
        except asyncio.CancelledError as error:
            given_up = error
        if not gone.done():
            patience_s = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if given_up is not None:
        raise given_up


async def reports(process: asyncio.subprocess.Process) -> AsyncIterator[Report]:
    """What a child reports, until it ends."""
    assert process.stdout is not None
    async for line in process.stdout:
        yield msgspec.json.decode(line, type=Report)


def how_it_ended(returncode: int) -> str:
    """`exit code 1`, or `signal SIGKILL`."""
    return f"exit code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"
