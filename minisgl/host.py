"""What this host gives the process: memory within its cgroup, CPU instructions, nvcc, processes, a thread aside."""

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(module: str, *arguments: str) -> list[str]:
    """What runs a module of minisgl as a process: of this very minisgl, whatever is installed or lies in the folder."""
    find = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import minisgl, runpy; del sys.path[0]"
    return [sys.executable, "-P", "-c", f"{find}; runpy.run_module({module!r}, None, '__main__', True)", *arguments]


def end_with(owner: int) -> None:
    """Let the kernel kill this process when the thread of process `owner` ends that has started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it ended before the kernel knew
        os._exit(1)


def aside(call: Callable[[], T], timeout_s: float | None = None) -> T:
    """The result of a call that may hang where no time-out of its own and no Ctrl-C reaches it; or TimeoutError.

    It runs in a daemon thread, which nobody waits for any more once this has raised.
    """
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="aside").start()
    return outcome.result(timeout_s)


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes."""

    free_bytes: int
    limit_bytes: int


def memory(root: Path = Path("/")) -> Memory:
    """What this process may still take, and have in all: the system's, and less where a cgroup says so."""
    fields = dict(line.split(":", 1) for line in read(root / "proc/meminfo").splitlines() if ":" in line)
    free, limit = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for most, used, stat in _cgroups(root):
        if most.isdigit() and used.isdigit():  # version 2 says "max" where there is no limit
            cache = next((int(n) for k, n in stat if k in ("inactive_file", "total_inactive_file")), 0)
            limit, free = min(limit, int(most)), min(free, int(most) - (int(used) - cache))
    return Memory(free_bytes=max(free, 0), limit_bytes=limit)


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """The processor's instruction sets, as Linux names them."""
    return frozenset((cpu_field("flags", root) or cpu_field("Features", root)).split())


def cpu_field(name: str, root: Path = Path("/")) -> str:
    """What Linux says of the first processor under a name, empty where it says nothing."""
    fields = (line.partition(":") for line in read(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for field, _, value in fields if field.strip() == name), "")


def nvcc() -> str | None:
    """CUDA's compiler, where kernel libraries look for it: CUDA_HOME or CUDA_PATH, else PATH and /usr/local/cuda."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def flashinfer_compiles() -> bool:
    """Whether FlashInfer is installed without its compiled kernels, and so compiles them at first use."""
    spec = find_spec("flashinfer")
    if spec is None or find_spec("flashinfer_jit_cache"):
        return False
    folders = [Path(folder, "data", "aot") for folder in spec.submodule_search_locations or ()]
    return not any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def read(file: Path) -> str:
    """A small file's text, empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _cgroups(root: Path) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(limit, used, statistics) of this process's memory cgroup and those around it, versions 1 and 2."""
    found = []
    for line in (read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = base / path.lstrip("/")
        for folder in [inner, *inner.parents]:
            limit, used = read(folder / names[0]), read(folder / names[1])
            if limit and used:
                stat = [(k, n) for k, n in (s.split() for s in read(folder / "memory.stat").splitlines())]
                found.append((limit, used, stat))
            if folder == base:
                break
    return found
