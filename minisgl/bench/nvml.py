"""What GPUs do meanwhile: NVML asked in the background, and what follows from its answers.

Energy over a stretch of time is the difference of the device's counter at its ends, read off between the two samples
around each; where a device has no counter, power is integrated over time instead, and the result says so. Both are of
the whole board, whoever uses it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

import numpy as np

from minisgl.bench.record import GpuSample

INTERVAL_S = 0.1
PROCESSES_EVERY = 10
"""Who else computes is asked in one of so many samples: it takes the driver long."""
LEAST_STRETCH_S = 1.0
"""Counters of energy move up to 0.1 s late: over a shorter stretch a figure would be off by more than a tenth."""

REASONS: Mapping[int, str] = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "another GPU's clock",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""What holds clocks back, by NVML's bits; left out is what is no fault: idle, and clocks that someone has set."""

T = TypeVar("T")


class Gpus(Protocol):
    """The GPUs that the engine uses."""

    def read(self) -> list[GpuSample]:
        """A sample of each, now, with one time for all."""
        ...


class Nvml:
    """`Gpus` by NVML: the first `count` that CUDA may see. Raises ValueError with the reason where it cannot be asked.

    `driver` is the module pynvml; `visible` is CUDA_VISIBLE_DEVICES: numbers, or names like GPU-8f2c…; None: all.
    """

    def __init__(self, driver: Any, count: int, visible: str | None) -> None:
        self._nvml, self._reads = driver, 0
        try:
            driver.nvmlInit()
            names = range(driver.nvmlDeviceGetCount()) if visible is None else filter(None, visible.split(","))
            self._handles = [self._handle(str(name).strip()) for name in names][:count]
            self._numbers = [driver.nvmlDeviceGetIndex(handle) for handle in self._handles]
        except driver.NVMLError as error:
            raise ValueError(f"NVML does not answer: {error}") from error
        if not self._handles:
            raise ValueError("NVML shows no GPU that CUDA may use")

    def read(self) -> list[GpuSample]:
        """A sample of each; what a device does not support is None."""
        time_s, processes = time.monotonic(), self._reads % PROCESSES_EVERY == 0
        self._reads += 1
        return [self._sample(*each, time_s, processes) for each in zip(self._numbers, self._handles, strict=True)]

    def _sample(self, number: int, handle: Any, time_s: float, processes: bool) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        running = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) if processes else None
        return GpuSample(
            time_s=time_s,
            gpu=number,
            power_w=None if power_mw is None else power_mw / 1e3,
            energy_mj=ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
            sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            throttle_reasons=[text for bit, text in REASONS.items() if reasons & bit],
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            used_bytes=memory and memory.used,
            utilization=rates and rates.gpu / 100,
            other_processes=others([each.pid for each in running]) if running else None,
        )

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T | None:
        with suppress(self._nvml.NVMLError):
            return function(*arguments)

    def _handle(self, name: str) -> Any:
        by_number, by_name = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
        return by_number(int(name)) if name.isdigit() else by_name(name)


def others(pids: Sequence[int], root: Path = Path("/")) -> int:
    """How many of the processes on a GPU are neither this one nor its descendants.

    One at least is ours: in a container, NVML may give it a number that is not the one here.
    """
    return len(pids) - max(sum(_is_ours(pid, root) for pid in pids), 1)


def _is_ours(pid: int, root: Path) -> bool:
    while pid > 1 and pid != os.getpid():
        try:
            after_name = (root / f"proc/{pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return False
        pid = int(after_name.split()[1])
    return pid == os.getpid()


def open_gpus(device: str, count: int) -> Gpus | str:
    """NVML's view of the engine's GPUs; or why there is none. `device` is cpu or cuda."""
    if device != "cuda":
        return "the engine runs on the CPU"
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # nvidia-ml-py

        return Nvml(pynvml, count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except ImportError:
        return "nvidia-ml-py is missing: pip install nvidia-ml-py"
    except ValueError as error:
        return str(error)


class Sampler:
    """A thread that reads the GPUs every `interval_s` while the `with` block runs.

    It does nothing where there is only a reason why there are none: `missing`.
    """

    def __init__(self, gpus: Gpus | str | None, interval_s: float = INTERVAL_S) -> None:
        self.missing, self._gpus = (gpus, None) if isinstance(gpus, str) else (None, gpus)
        self._interval_s = interval_s
        self._samples: list[GpuSample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nvml")

    def __enter__(self) -> Self:
        if self._gpus is not None:
            self._samples += self._gpus.read()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._gpus is not None:
            self._thread.join()

    def between(self, began_s: float, ended_s: float) -> list[GpuSample]:
        """The samples of a stretch that is over, and of each GPU the last before and the first after it.

        Waits for the latter, half a second at most.
        """
        patience = time.monotonic() + max(0.5, 2 * self._interval_s)
        while self._thread.is_alive() and self._samples[-1].time_s < ended_s and time.monotonic() < patience:
            time.sleep(self._interval_s / 10)
        samples = list(self._samples)
        first_s = max((s.time_s for s in samples if s.time_s <= began_s), default=began_s)
        last_s = min((s.time_s for s in samples if s.time_s >= ended_s), default=ended_s)
        return [s for s in samples if first_s <= s.time_s <= last_s]

    def _run(self) -> None:
        assert self._gpus is not None
        while not self._over.wait(self._interval_s):
            self._samples += self._gpus.read()


Source = Literal["counter", "power"]


def energy(samples: Sequence[GpuSample], began_s: float, ended_s: float) -> tuple[float, Source] | None:
    """Joules of all GPUs from `began_s` to `ended_s`, and how they are known.

    None where samples do not reach around that time, or it is too short to say.
    """
    known = ((joules(source, samples, began_s, ended_s), source) for source in get_args(Source))
    return next(((j, source) for j, source in known if j is not None and ended_s - began_s >= LEAST_STRETCH_S), None)


def joules(source: Source, samples: Sequence[GpuSample], began_s: float, ended_s: float) -> float | None:
    """The same by one source; power is taken to be straight between samples."""
    total = 0.0
    for gpu in {sample.gpu for sample in samples}:
        field = "energy_mj" if source == "counter" else "power_w"
        points = [(s.time_s, getattr(s, field)) for s in samples if s.gpu == gpu and getattr(s, field) is not None]
        if not points or not points[0][0] <= began_s <= ended_s <= points[-1][0]:
            return None
        times, values = np.array(points).T
        spent = values / 1e3
        if source == "power":
            spent = np.cumsum(np.diff(times, prepend=times[0]) * (values + np.roll(values, 1)) / 2)
        begin, end = np.interp([began_s, ended_s], times, spent)
        total += float(end - begin)
    return total if samples else None


def doubts(samples: Sequence[GpuSample]) -> Iterator[str]:
    """Why what was measured meanwhile is not what the GPU can do, or not all the engine's."""
    for reason in sorted({reason for s in samples for reason in s.throttle_reasons}):
        share = sum(reason in s.throttle_reasons for s in samples) / len(samples)
        yield f"clocks were held back by the {reason} in {share:.0%} of the samples"
    if most := max((s.other_processes or 0 for s in samples), default=0):
        yield f"{most} other process{'es' if most > 1 else ''} computed on the same GPU"
