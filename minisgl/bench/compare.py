"""Two runs side by side: how much each figure has changed, and how sure that is.

The change is B / A − 1 of a statistic over the values that were measured: of throughput and of phases over repetitions,
of latencies over requests. Its interval holds 95 % of the changes between samples drawn, with replacement, from the
values of each side (the percentile bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13). One
value has no interval. A figure is worse, or better, where its change is above the tolerance and, if there is an
interval, 0 is outside it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from minisgl.bench.figures import digits, label, pass_figures, phase_figures
from minisgl.bench.metrics import latencies
from minisgl.bench.record import Pass, Run, read

RESAMPLES, AT_ONCE = 1000, 50
LEVEL = 0.95
TOTALS = {"output_tokens_per_s": "output tok/s", "goodput_per_s": "goodput req/s", "joules_per_token": "J/token"}
SHOWN = ("ttft_s", "tpot_s", "itl_s", "e2e_s")

Statistic = Callable[..., Any]
"""One number of many, along an axis."""
P99: Statistic = partial(np.percentile, q=99)


class Measure(NamedTuple):
    """What was measured of a figure."""

    values: np.ndarray
    statistic: Statistic
    more_is_better: bool


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure in both runs."""

    load: str
    figure: str
    a: float
    b: float
    change: float  # b / a - 1
    interval: tuple[float, float] | None
    verdict: Literal["better", "worse", ""]


def differences(a: Run, b: Run, tolerance: float) -> list[Difference]:
    """Of each figure that both runs have, in the order of A; raises ValueError where they have none in common."""
    in_a, in_b = _measures(a), _measures(b)
    if not in_a.keys() & in_b.keys():
        loads = [f"{run.mode}: {', '.join(_by_load(run)) or 'nothing that was finished'}" for run in (a, b)]
        raise ValueError(f"the runs have no figure in common: one is of {loads[0]}, the other of {loads[1]}")
    return [_difference(key, in_a[key], in_b[key], tolerance) for key in in_a if key in in_b]


def unlike(a: Run, b: Run) -> Iterator[str]:
    """What else differs between two runs, for that may be why."""
    for name in ("model", "device", "devices", "versions", "machine", "engine", "workload", "sampling"):
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            yield from (f"{name}.{key}: {one.get(key)} | {other.get(key)}" for key in keys)
        elif one != other:
            yield f"{name}: {one} | {other}"


def compare_files(a: Path, b: Path, tolerance: float, console: Console) -> bool:
    """Print how much the figures of two files have changed, and what else differs; True if anything is worse."""
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    before, after = read(a), read(b)
    found = differences(before, after, tolerance)
    table = Table("load", "figure", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("A", "B", "change", f"{LEVEL:.0%} interval", ""):
        table.add_column(heading, justify="right")
    for each in found:
        interval = "–" if each.interval is None else f"{each.interval[0]:+.1%} … {each.interval[1]:+.1%}"
        style = {"worse": "red", "better": "green"}.get(each.verdict, "")
        values = (digits(each.a), digits(each.b), f"{each.change:+.1%}", interval, each.verdict)
        table.add_row(each.load, each.figure, *values, style=style)
    notes = (f"differs: {note}" for note in unlike(before, after))
    console.print(table, *notes, sep="\n", markup=False, highlight=False)
    return any(each.verdict == "worse" for each in found)


def _measures(run: Run) -> dict[tuple[str, str], Measure]:
    """By load and figure; passes of one load are repetitions of it."""
    found: dict[tuple[str, str], Measure] = {}
    for load, passes in _by_load(run).items():
        measures: dict[str, Measure] = {}
        for phase in (phase for part in passes for phase in phase_figures(run, part) if run.mode == "latency"):
            measures[f"{phase.name} ms, median"] = Measure(np.array(phase.times_s) * 1e3, np.median, False)
        for name, text in TOTALS.items() if run.mode != "latency" else ():
            values = np.array([each[name] for part in passes if name in (each := pass_figures(run, part))])
            measures[text] = Measure(values, np.mean, name != "joules_per_token")
        for name in SHOWN if run.mode == "online" else ():
            values = np.concatenate([latencies(part.requests)[name] for part in passes]) * 1e3
            measures[f"{label(name)} ms, median"] = Measure(values, np.median, False)
            measures[f"{label(name)} ms, p99"] = Measure(values, P99, False)
        found |= {(load, figure): measure for figure, measure in measures.items() if len(measure.values)}
    return found


def _by_load(run: Run) -> dict[str, list[Pass]]:
    loads: dict[str, list[Pass]] = {}
    for part in (part for part in run.passes if not part.interrupted):
        loads.setdefault("all at once" if run.mode == "throughput" else part.name, []).append(part)
    return loads


def _difference(key: tuple[str, str], a: Measure, b: Measure, tolerance: float) -> Difference:
    at_a, at_b = float(a.statistic(a.values)), float(b.statistic(b.values))
    change = at_b / at_a - 1 if at_a else 0.0
    interval = _interval(a, b) if len(a.values) > 1 and len(b.values) > 1 and at_a else None
    verdict: Literal["better", "worse", ""] = ""
    if abs(change) > tolerance and (interval is None or not interval[0] <= 0 <= interval[1]):
        verdict = "better" if (change > 0) == a.more_is_better else "worse"
    return Difference(load=key[0], figure=key[1], a=at_a, b=at_b, change=change, interval=interval, verdict=verdict)


def _interval(a: Measure, b: Measure) -> tuple[float, float]:
    rng = np.random.default_rng(0)  # the same files, the same answer

    def drawn(each: Measure) -> np.ndarray:
        count = len(each.values)
        drawn = [each.values[rng.integers(count, size=(AT_ONCE, count))] for _ in range(RESAMPLES // AT_ONCE)]
        return np.concatenate([each.statistic(one, axis=1) for one in drawn])

    low, high = np.percentile(drawn(b) / drawn(a) - 1, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
