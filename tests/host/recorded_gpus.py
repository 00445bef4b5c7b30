"""GPUs that say again what they said during a run, for what asks `nvml.Gpus`; and samples of made-up ones."""

import time
from collections.abc import Callable, Iterable
from itertools import groupby, takewhile
from pathlib import Path

from msgspec.structs import replace

from minisgl.bench.record import Event, GpuSample, Pass, RequestRecord, Run, read

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))
"""Files of `minisgl bench --output` whose runs were on GPUs."""


def recorded_run(file: Path | None) -> Run:
    """The run in a file; without one, a made-up run on two GPUs."""
    if file is not None:
        return read(file)
    samples = made_up(lambda time_s: 300 + 50 * time_s, gpus=2)
    done = RequestRecord(intended_s=0.5, sent_s=0.5, events=[Event(1.0, 1)], ended_s=9.5, completion_tokens=100)
    part = Pass(name="1", seed=0, began_s=0.5, ended_s=9.5, requests=[done], samples=samples)
    return Run(mode="throughput", model="made up", device="Toaster", workload={}, passes=[part])


class RecordedGpus:
    """Each moment of some samples comes again, as long after the first reading as it was after the first moment."""

    def __init__(self, samples: Iterable[GpuSample]) -> None:
        in_order = sorted(samples, key=lambda sample: (sample.time_s, sample.gpu))
        self._moments = [list(moment) for _, moment in groupby(in_order, key=lambda sample: sample.time_s)]
        self._first_s = in_order[0].time_s
        self._began_s: float | None = None

    def read(self) -> list[GpuSample]:
        """What was said at the last moment that has come, with its time by this clock; the last one stays."""
        now_s = time.monotonic()
        began_s = self._began_s = now_s if self._began_s is None else self._began_s
        moment = list(takewhile(lambda each: each[0].time_s - self._first_s <= now_s - began_s, self._moments))[-1]
        return [replace(sample, time_s=sample.time_s + self.later_s) for sample in moment]

    @property
    def later_s(self) -> float:
        """How much later than in the recording everything is said, once it has begun."""
        assert self._began_s is not None
        return self._began_s - self._first_s


def made_up(
    power_w: Callable[[float], float], seconds: float = 10.0, counter: bool = True, gpus: int = 1
) -> list[GpuSample]:
    """What GPUs of that power would say every 0.1 s; the counter moves by what was taken since the last sample."""
    samples, spent_mj = [], [5_000_000] * gpus
    for step in range(round(seconds * 10) + 1):
        for gpu in range(gpus):
            time_s = step / 10
            spent_mj[gpu] += round(100 * power_w(time_s - 0.05)) if step else 0
            samples.append(
                GpuSample(time_s=time_s, gpu=gpu, power_w=power_w(time_s), energy_mj=spent_mj[gpu] if counter else None)
            )
    return samples
