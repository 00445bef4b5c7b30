"""NVML: what its answers mean, sampling in the background, energy, and what makes a run suspect."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_gpus import RECORDINGS, RecordedGpus, made_up, recorded_run
from rich.console import Console
from server_process import wait_for

from minisgl.bench import nvml, report
from minisgl.bench.figures import pass_figures
from minisgl.bench.nvml import Nvml, Sampler, doubts, energy, joules, open_gpus, others
from minisgl.bench.record import GpuSample


class Driver:
    """The part of pynvml that is used, with two GPUs; `refused` are functions that a device does not support."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *refused: str, reasons: int = 0, pids: Sequence[int] = ()) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda number: f"GPU-{number}",
            "nvmlDeviceGetHandleByUUID": lambda name: name,
            "nvmlDeviceGetIndex": lambda handle: int(handle[-1]),
            "nvmlDeviceGetPowerUsage": lambda _: 612_345,
            "nvmlDeviceGetTotalEnergyConsumption": lambda _: 98_765_432,
            "nvmlDeviceGetClockInfo": lambda _, clock: {1: 1_980, 2: 3_201}[clock],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: reasons,
            "nvmlDeviceGetTemperature": lambda *_: 51,
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=120 * 2**30),
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97),
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=pid) for pid in pids],
        }
        for name, answer in answers.items():
            setattr(self, name, self._refuse if name in refused else answer)

    def _refuse(self, *_: object) -> None:
        raise self.NVMLError("Not Supported")


def test_a_sample_is_in_the_units_of_the_record():
    (sample,) = Nvml(Driver(reasons=0x1 | 0x4 | 0x20, pids=[os.getpid(), 1]), 1, None).read()
    assert (sample.gpu, sample.power_w, sample.energy_mj) == (0, 612.345, 98_765_432)
    assert (sample.sm_mhz, sample.memory_mhz, sample.temperature_c) == (1_980, 3_201, 51)
    assert (sample.used_bytes, sample.utilization, sample.other_processes) == (120 * 2**30, 0.97, 1)
    assert sample.throttle_reasons == ["power limit", "temperature (software)"], "being idle is no fault"


def test_what_a_device_does_not_tell_is_none():
    names = [name for name in vars(Driver()) if name.startswith("nvmlDeviceGet")]
    kept = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetIndex"}
    (sample,) = Nvml(Driver(*set(names) - kept), 1, None).read()
    assert sample == GpuSample(time_s=sample.time_s, gpu=0)


@pytest.mark.parametrize(
    ("count", "visible", "gpus"),
    [(1, None, [0]), (2, None, [0, 1]), (1, "1", [1]), (2, "1, 0", [1, 0]), (1, "GPU-1,GPU-0", [1])],
)
def test_the_gpus_are_the_first_that_cuda_sees(count: int, visible: str | None, gpus: list[int]):
    assert [sample.gpu for sample in Nvml(Driver(), count, visible).read()] == gpus


def test_without_nvml_there_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    assert open_gpus("cpu", 1) == "the engine runs on the CPU"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus("cuda", 1) == "nvidia-ml-py is missing: pip install nvidia-ml-py"
    monkeypatch.setitem(sys.modules, "pynvml", Driver("nvmlInit"))  # type: ignore[arg-type]
    assert open_gpus("cuda", 1) == "NVML does not answer: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", Driver())  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert open_gpus("cuda", 1) == "NVML shows no GPU that CUDA may use"


def test_other_processes_are_those_that_this_one_has_not_started():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert others([os.getpid(), child.pid]) == 0
        assert others([child.pid, 1]) == 1
        child.kill()
    assert others([10**9]) == 0, "in a container the numbers are others: one of them is ours"
    assert others([10**9, 10**9 + 1]) == 1


def test_a_process_may_have_a_name_with_brackets(tmp_path: Path):
    (tmp_path / "proc" / "77").mkdir(parents=True)
    (tmp_path / "proc" / "77" / "stat").write_text(f"77 (a) b) S {os.getpid()} 1 1")
    assert others([77, 78], tmp_path) == 1


# Energy: GPUs, sampled every 0.1 s for 10 s


def test_energy_is_the_counters_difference_read_off_between_samples():
    samples = made_up(lambda _: 500.0, gpus=2)
    assert energy(samples, 1.0, 3.0) == (pytest.approx(2 * 500 * 2.0), "counter")
    assert energy(samples, 1.03, 3.29) == (pytest.approx(2 * 500 * 2.26), "counter")


def test_without_a_counter_power_is_integrated_and_that_is_said():
    samples = made_up(lambda time_s: 100 * time_s, counter=False)
    assert energy(samples, 2.0, 6.0) == (pytest.approx(50 * (36 - 4)), "power")


def test_counter_and_power_agree_where_power_changes():
    samples = made_up(lambda time_s: 700.0 if 2 < time_s < 6 else 120.0)
    by_counter, by_power = joules("counter", samples, 0.5, 9.5), joules("power", samples, 0.5, 9.5)
    assert by_counter is not None and by_power == pytest.approx(by_counter, rel=0.05)
    assert by_counter == pytest.approx(700 * 4 + 120 * 5, rel=0.02)


def test_a_stretch_that_samples_do_not_cover_or_that_is_short_has_no_energy():
    samples = made_up(lambda _: 500.0)
    assert energy(samples, 1.0, 10.5) is None and energy(samples, -0.1, 3.0) is None
    assert energy(samples, 1.0, 1.9) is None
    assert energy([], 1.0, 3.0) is None


# Sampling


class Recording:
    """GPUs that count how often they were read."""

    def __init__(self) -> None:
        self.num_reads = 0

    def read(self) -> list[GpuSample]:
        time_s, self.num_reads = time.monotonic(), self.num_reads + 1
        return [GpuSample(time_s=time_s, gpu=gpu, energy_mj=self.num_reads) for gpu in range(2)]

    def wait(self, most: int) -> None:
        """Until they were read so often from now on."""
        until = self.num_reads + most
        wait_for(lambda: self.num_reads >= until, "samples")


def test_the_sampler_has_samples_around_a_stretch_and_none_beyond():
    with Sampler(gpus := Recording(), interval_s=0.01) as sampler:
        gpus.wait(2)
        began_s = time.monotonic()
        gpus.wait(3)
        ended_s = time.monotonic()
        samples = sampler.between(began_s, ended_s)
        gpus.wait(2)
        again = sampler.between(began_s, ended_s)
    for gpu in range(2):
        times = [sample.time_s for sample in samples if sample.gpu == gpu]
        assert times == sorted(times) and len(times) >= 3
        assert times[0] <= began_s < times[1] and times[-2] < ended_s <= times[-1]
    assert again == samples


recordings = pytest.mark.parametrize("file", [None, *RECORDINGS], ids=lambda file: file.stem if file else "made up")


@recordings
def test_the_sampler_has_what_a_recorded_run_had(file: Path | None):
    samples = recorded_run(file).passes[0].samples
    with Sampler(gpus := RecordedGpus(samples), interval_s=0.01) as sampler:
        time.sleep(0.3)
        began_s = time.monotonic()
        time.sleep(0.9)
        got = sampler.between(began_s, time.monotonic())
    said = {(each.time_s + gpus.later_s, each.gpu): each.energy_mj for each in samples}
    heard = {(each.time_s, each.gpu): each.energy_mj for each in got}
    assert len({time_s for time_s, _ in heard}) >= 5 and heard.items() <= said.items()


@recordings
def test_of_a_recorded_run_counter_and_power_agree(file: Path | None):
    run, console = recorded_run(file), Console(width=200)
    with console.capture() as shown:
        report.show(run, console)
    for part in run.passes:
        figures = pass_figures(run, part)
        assert figures["counter_per_power"] == pytest.approx(1.0, abs=0.05)
        assert figures["joules"] > 0 and f"{part.name}: {figures['joules']:,.0f} J" in shown.get()


def test_the_sampler_without_gpus_does_nothing():
    with Sampler("there are none") as sampler:
        assert (sampler.between(0.0, 10.0), sampler.missing) == ([], "there are none")


def test_the_sampler_ends_with_its_block():
    gpus = Recording()
    with Sampler(gpus, interval_s=0.001):
        gpus.wait(3)
    reads = gpus.num_reads
    time.sleep(0.02)
    assert gpus.num_reads == reads


# What makes a run suspect


def test_a_run_that_was_throttled_or_shared_its_gpu_is_suspect():
    quiet = [GpuSample(time_s=float(n), gpu=0, other_processes=0 if n % 2 else None) for n in range(8)]
    assert list(doubts(quiet)) == []
    capped = [GpuSample(time_s=9.0, gpu=0, throttle_reasons=["power limit"], other_processes=2)] * 2
    assert list(doubts(quiet + capped)) == [
        "clocks were held back by the power limit in 20% of the samples",
        "2 other processes computed on the same GPU",
    ]
    assert list(doubts([])) == []


def test_every_reason_that_is_a_fault_has_a_name():
    assert set(nvml.REASONS) == {0x04, 0x08, 0x10, 0x20, 0x40, 0x80}
