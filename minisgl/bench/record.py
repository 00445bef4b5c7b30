"""A benchmark as raw facts: what `minisgl bench --output run.json` writes, and what every figure is computed from.

The file is the JSON of a `Run`. Nothing in it is derived: `metrics` turns a run into figures, now or years later.

Times, whose names end in `_s`, are readings of one clock, `time.monotonic()` of the process that measured: only their
differences mean anything, and those of requests, phases, lags and GPU samples may be compared with one another.
None is what was not said or could not be known, never zero.
"""

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from minisgl import __version__
from minisgl.doctor.machine import cores, cpu_model, installed

FORMAT = 2
PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4")

Mode = Literal["throughput", "latency", "online"]


class Event(Struct, frozen=True, array_like=True):
    """An event of a stream that brought content, as JSON `[time_s, tokens]`."""

    time_s: float  # when the client had read it
    tokens: int | None = None  # how many tokens it brought, where the sender says so


class RequestRecord(Struct, kw_only=True):
    """A request, from the moment that it was meant to be sent until its end, good or bad."""

    intended_s: float  # when the load asked for it; with a limit on concurrency, when its turn had come
    sent_s: float | None = None  # when the client began to send it; None: it never came to that
    events: list[Event] = []
    ended_s: float | None = None  # when the last byte, or the error, had come
    asked_tokens: int | None = None  # how many it asked for; None: as many as the model likes
    prompt_tokens: int | None = None  # these three as the server's usage, or the engine, counts them
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # why it counts as failed


class Phase(Struct, frozen=True):
    """A stretch of work of our own engine whose borders are known."""

    name: Literal["prefill", "decode", "mixed"]
    began_s: float
    ended_s: float
    requests: int
    tokens_in: int  # prompt tokens, `tokens_cached` among them
    tokens_cached: int
    tokens_out: int  # tokens that this phase brought


class Lag(Struct, frozen=True, array_like=True):
    """How late the client's event loop noticed a moment, as JSON `[time_s, lag_s]`."""

    time_s: float
    lag_s: float


class GpuSample(Struct, kw_only=True, frozen=True):
    """What NVML says of a GPU at a moment; None for what this device or driver does not say."""

    time_s: float
    gpu: int  # index among the GPUs of the machine
    power_w: float | None = None
    energy_mj: int | None = None  # the device's counter of millijoules since its driver was loaded
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    throttle_reasons: list[str] = []  # what holds the clocks back, without what is normal when idle
    temperature_c: int | None = None
    used_bytes: int | None = None
    utilization: float | None = None  # share of the time in which a kernel ran, from 0 to 1
    other_processes: int | None = None  # that compute on it besides the engine


class Ceilings(Struct, kw_only=True, frozen=True):
    """What one of the devices reaches at best."""

    bytes_per_s: float  # memory, read and written
    flops_per_s: float  # matrix products in `dtype`, back to back
    dtype: str
    source: str  # how it is known


class Pass(Struct, kw_only=True):
    """One measurement: a repetition, a rate of a sweep, a shape of a list."""

    name: str  # as a table shows it: `1`, `2 req/s`, `8 × 512`
    load: dict[str, float] = {}  # what sets this pass apart: qps, concurrency, batch, input_len, output_len, …
    seed: int | str  # of its prompts, lengths and arrivals
    began_s: float  # the first intended send time, or the call of the engine
    ended_s: float | None = None  # the last request's end; None: not finished
    requests: list[RequestRecord] = []
    phases: list[Phase] = []
    steps: list[Event] = []  # of an engine in this process: when the host knew a step's tokens
    lags: list[Lag] = []
    samples: list[GpuSample] = []
    counters: dict[str, float] = {}  # what the engine counted meanwhile: steps, retractions
    interrupted: bool = False


def machine_facts() -> dict[str, str | float]:
    """The processor and the system of this machine."""
    return {"cpu": cpu_model(), "cores": cores(), "system": platform.platform(terse=True)}


def versions() -> dict[str, str]:
    """Of python, minisgl, torch and the kernel libraries that are installed."""
    own = {"python": platform.python_version(), "minisgl": __version__}
    return own | {name: found for name in PACKAGES if (found := installed(name))}


class Run(Struct, kw_only=True):
    """Everything that one call of `minisgl bench` has measured, and on what."""

    format: int = FORMAT
    date: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # of the start
    mode: Mode
    model: str
    device: str  # what the GPU or the processor calls itself; `unknown` behind a URL
    devices: int = 1  # that share the model
    machine: dict[str, str | float] = msgspec.field(default_factory=machine_facts)
    versions: dict[str, str] = msgspec.field(default_factory=versions)
    engine: dict[str, Any] | None = None  # options of our own engine, all that was `auto` resolved where known
    shape: dict[str, Any] | None = None  # of the model, as `source.model_config` has it
    workload: dict[str, Any]
    load: dict[str, Any] = {}  # online: rates, arrivals, limits, url
    sampling: dict[str, Any] = {}
    ceilings: Ceilings | None = None
    no_ceilings: str | None = None  # why there are none
    no_nvml: str | None = None  # why there are no GPU samples
    passes: list[Pass] = []


def write(run: Run, path: Path) -> None:
    """Write a run as JSON, whole or not at all."""
    write_whole(path, msgspec.json.encode(run) + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; where that fails, which is a ValueError, what was there before is there still."""
    path = path.resolve()  # a link stays one
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> Run:
    """Read what `write` has written; raises ValueError for a file that cannot be read or is something else."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no run of minisgl bench --output: {error}") from error
    if run.format != FORMAT:
        raise ValueError(f"{path} has format {run.format}, and this minisgl reads format {FORMAT}: measure again")
    return run
