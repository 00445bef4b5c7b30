"""The cache folder, and how things get into it: once, by one process at a time, and never half."""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Report = Callable[[str, float, float | None], None]
"""Told what is going on, the bytes done, and the bytes in all (None: not known); may be called from any thread."""


def silent(what: str, done_bytes: float, total_bytes: float | None) -> None:
    """A `Report` for those who do not want to know."""


def cache_folder() -> Path:
    """`$MINISGL_CACHE`, else `$XDG_CACHE_HOME/minisgl`, else `~/.cache/minisgl`; absolute, need not exist yet."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("MINISGL_CACHE") or f"{shared}/minisgl")
    try:
        return folder.expanduser().absolute()
    except RuntimeError:  # the user, or the one after the ~, has none
        raise ValueError(f"{folder} is in a home folder that there is not: set MINISGL_CACHE to a folder") from None


def imported_folder(name: str, *source: object) -> Path:
    """Where a model lies that we made from something else; `source` is what tells that from any other."""
    digest = hashlib.sha256("\0".join(map(str, source)).encode()).hexdigest()
    return cache_folder() / "imported" / f"{name}-{digest[:16]}"


def make_once(
    place: Path, make: Callable[[Path], Path], report: Report, is_sound: Callable[[Path], bool] = Path.exists
) -> Path:
    """The place, where `make` has put a file or a folder, now or earlier: a whole one, whatever happens.

    `make` gets an empty folder beside the place, and returns what there, or it itself, is to be moved to the place; it
    is on disk before it has its name. Whoever comes second waits, and finds the work done. The lock goes with its
    process, so a crash leaves nothing behind but that folder, which the next one empties.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_name(f".{place.name}.lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that makes {place.name}", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_sound(place):
            return place
        scratch = place.with_name(f".{place.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(exist_ok=True)
        try:
            built = make(scratch)
            for path in (built, *built.glob("*")):
                if not path.is_symlink():
                    _sync(path)
            os.rename(built, place)
            _sync(place.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return place


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_free(folder: Path, need_bytes: int, what: str) -> None:
    """Raise OSError unless the disk that holds `folder` has room for `what`; the folder need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        sizes = f"{need_bytes / 1e9:.2f} GB of disk, only {free_bytes / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, f"{what} needs {sizes}", folder)


@contextmanager
def watched(
    report: Report, what: str, total_bytes: int, folder: Path, pattern: str = "*", done_bytes: int = 0
) -> Iterator[None]:
    """While someone else writes a file, report from a thread how it grows: the largest in the folder, on top of what
    is done already.
    """
    left = threading.Event()

    def watch() -> None:
        most_bytes = 0
        while not left.wait(0.2):
            with suppress(FileNotFoundError):  # it may be renamed or removed while we look
                most_bytes = max(most_bytes, *(path.stat().st_size for path in folder.rglob(pattern)), 0)
            report(what, min(done_bytes + most_bytes, total_bytes), total_bytes)

    thread = threading.Thread(target=watch, daemon=True, name="download-progress")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
