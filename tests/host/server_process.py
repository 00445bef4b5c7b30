"""A `minisgl serve` process under test: what it prints, what it consists of, and what it leaves behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("MINISGL_") or k == "MINISGL_CACHE"} | {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/host'}",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}
MINISGL = (sys.executable, "-c", "import sys; from cli.main import main; sys.exit(main())")
PATIENCE_S = 60.0
"""How long something may take on a busy machine before a test gives up."""


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE_S:.0f} s for {what}"
        time.sleep(0.02)


class ServerProcess:
    """`with` kills what is left; `folder` is the server's TMPDIR, and gets its stderr too."""

    def __init__(self, folder: Path, *arguments: str, program: Sequence[str] = MINISGL, **environment: str) -> None:
        self.sockets = folder / "sockets"
        self.sockets.mkdir(parents=True)
        self._log = folder / "stderr"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [*program, "serve", *arguments],
                env={**ENVIRONMENT, "TMPDIR": str(self.sockets), **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._seen: set[int] = set()
        self.connections: list[socket.socket] = []
        """Closed in the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.parts()
        for pid in (self.process.pid, *self._seen):
            if self.process.poll() is None or pid != self.process.pid:
                kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        for connection in self.connections:
            connection.close()
        assert self.process.stdout
        self.process.stdout.close()
        if error is not None:
            print(self.stderr)

    @property
    def stderr(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_text(self, pattern: str) -> re.Match[str]:
        """Wait until the server has printed this."""

        def found() -> bool:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.stderr)
            assert match or not ended, f"ended with {self.process.returncode}:\n{self.stderr}"
            return match is not None

        wait_for(found, pattern)
        match = re.search(pattern, self.stderr)
        assert match
        return match

    def wait_until_ready(self) -> str:
        """The server's URL, once it says it."""
        self.parts()
        self.url = self.wait_for_text(r"ready at (http://\S+);")[1]
        self.parts()
        return self.url

    def parts(self) -> list[int]:
        """The process ids of its children, in the order of their start: the cleaner, the frontends, the engine."""
        pids = children_of(self.process.pid)
        self._seen |= {*pids}
        return pids

    def processes(self, pid: int | None = None) -> set[int]:
        """All that it has started, and what that has started."""
        children = set(children_of(pid or self.process.pid))
        found = children.union(*(self.processes(each) for each in children))
        self._seen |= found
        return found

    def wait_for_the_end(self) -> int:
        """The exit code, once nothing is left: no process, no socket's folder, and the port can be bound."""
        code = self.process.wait(PATIENCE_S)
        wait_for(lambda: not any(map(is_alive, self._seen)), "the end of every part")
        wait_for(lambda: not [*self.sockets.iterdir()], "the removal of the sockets' folder")
        if hasattr(self, "url"):
            place = urlsplit(self.url)
            assert place.port
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are nobody's
                probe.bind(("127.0.0.1", place.port))
                probe.listen()
        return code


def children_of(pid: int) -> list[int]:
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ends just now
            pids += map(int, task.read_text().split())
    return pids


def is_alive(pid: int) -> bool:
    """Whether any thread of a process runs; one that only waits to be reaped does not.

    The first may have ended, and look so from outside, while others still hold what the process has open.
    """
    return not _states(pid) <= {"Z", "X"}


def _states(pid: int) -> set[str]:
    """Letters of proc(5), one for each thread."""
    states = set[str]()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


def halt(pid: int) -> None:
    """Stop a process with all its threads. Until the last of them stands still, SIGTERM would end it at once."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _states(pid) <= {"T", "Z", "X"}, "a process to stand still")


def listening(pid: int) -> set[str]:
    """The addresses and ports, as Linux writes them, where a process listens for TCP connections."""
    own = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own}


def kill(pid: int, number: signal.Signals) -> None:
    if is_alive(pid):
        os.kill(pid, number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
