"""The cache folder, and how things get into it: once, by one process at a time, and never half.

A thing is built in a workspace beside its place and moved there when it is complete and on disk, so whatever stands
at its place can be trusted without a look at it.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Report = Callable[[str, float, float | None], None]
"""Told what is going on, the bytes done, and the bytes in all (None: not known); may be called from any thread."""


def silent(what: str, done_bytes: float, total_bytes: float | None) -> None:
    """A `Report` for those who do not want to know."""


def cache_folder() -> Path:
    """`$MINISGL_CACHE`, else `$XDG_CACHE_HOME/minisgl`, else `~/.cache/minisgl`; absolute, need not exist yet."""
    if own := os.environ.get("MINISGL_CACHE"):
        folder = Path(own)
    elif shared := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(shared) / "minisgl"
    else:
        folder = Path("~/.cache/minisgl")
    return folder.expanduser().absolute()


@contextmanager
def workspace(place: Path, report: Report) -> Iterator[Path]:
    """An empty folder beside `place`, in which this process alone builds what will stand there.

    Whoever enters second waits, and finds the work done. The lock goes with its process, so a crash leaves nothing
    behind but a workspace, which the next one empties.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_name(f".{place.name}.lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that makes {place.name}", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        scratch = place.with_name(f".{place.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def publish(built: Path, place: Path) -> None:
    """Move a complete file or folder to its place; its contents are on disk before its name is."""
    for path in [built, *built.iterdir()] if built.is_dir() else [built]:
        if not path.is_symlink():
            _sync(path)
    os.rename(built, place)
    _sync(place.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_free(folder: Path, need_bytes: int, what: str) -> None:
    """Raise OSError unless the disk that holds `folder` has room for `what`; the folder need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {need_bytes / 1e9:.2f} GB of disk, only {free_bytes / 1e9:.2f} GB are free",
            folder,
        )


def fingerprint(*parts: object) -> str:
    """A short name for these values, the same in every process."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
