"""Two runs side by side: how much each figure has changed, and how sure that is.

The change is B / A − 1 of a statistic over the values that were measured: of throughput and of phases over repetitions,
of latencies over requests. Its interval holds 95 % of the changes between samples drawn, with replacement, from the
repetitions or the requests of each side (the percentile bootstrap; Efron and Tibshirani, An Introduction to the
Bootstrap, chapter 13). What was measured once has no interval. A figure is worse, or better, where its change is above
the tolerance and, if there is an interval, 0 is outside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from minisgl.bench.figures import digits, doubts, label, pass_figures
from minisgl.bench.metrics import failed, latencies, succeeded
from minisgl.bench.record import Pass, Run, read

RESAMPLES = 1000
LEVEL = 0.95
TOTALS = {"output_tokens_per_s": "output tok/s", "goodput_per_s": "goodput req/s", "joules_per_token": "J/token"}
SHOWN = ("ttft_s", "tpot_s", "itl_s", "e2e_s")

Statistic = Callable[[np.ndarray], Any]
"""One number of many."""
P99: Statistic = partial(np.percentile, q=99)


class Measure(NamedTuple):
    """What was measured of a figure: values in groups that chance draws together, such as the gaps of one request."""

    groups: Sequence[Any]
    statistic: Statistic
    more_is_better: bool = False

    @property
    def value(self) -> float:
        """The figure."""
        return float(self.statistic(np.hstack(self.groups)))


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
    for name in ("model", "device", "devices", "versions", "machine", "engine", "workload", "load", "sampling"):
        one, other = getattr(a, name), getattr(b, name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            yield from (f"{name}.{key}: {one.get(key)} | {other.get(key)}" for key in keys)
        elif one != other:
            yield f"{name}: {one} | {other}"


def compare_files(a: Path, b: Path, tolerance: float, console: Console) -> bool:
    """Print how much the figures of two files have changed, and what else differs; True if anything is worse."""
    if not (isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance}")
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
    runs = {"A": before, "B": after}
    notes = [f"{name}: {doubt}" for name, run in runs.items() for part in run.passes for doubt in doubts(run, part)]
    notes += [f"differs: {note}" for note in unlike(before, after)]
    console.print(table, *notes, sep="\n", markup=False, highlight=False)
    return any(each.verdict == "worse" for each in found)


def _measures(run: Run) -> dict[tuple[str, str], Measure]:
    """By load and figure; passes of one load are repetitions of it."""
    found: dict[tuple[str, str], Measure] = {}
    for load, passes in _by_load(run).items():
        measures: dict[str, Measure] = {}
        if run.mode == "latency":
            phases = [phase for part in passes for phase in part.phases]
            for name in dict.fromkeys(phase.name for phase in phases):
                times_ms = [1e3 * (phase.ended_s - phase.began_s) for phase in phases if phase.name == name]
                measures[f"{name} ms, median"] = Measure(times_ms, np.median)
        else:
            figures = [pass_figures(run, part) for part in passes]
            for name, text in TOTALS.items():
                values = [each[name] for each in figures if name in each]
                measures[text] = Measure(values, np.mean, more_is_better=name != "joules_per_token")
        if run.mode == "online":
            requests = [request for part in passes for request in part.requests]
            measures["failed, share"] = Measure([len(failed(requests)) / len(requests)] if requests else [], np.mean)
            each_ms = [{name: 1e3 * values for name, values in latencies([r]).items()} for r in succeeded(requests)]
            for name in SHOWN:
                groups = [values[name] for values in each_ms if len(values[name])]
                measures[f"{label(name)} ms, median"] = Measure(groups, np.median)
                measures[f"{label(name)} ms, p99"] = Measure(groups, P99)
        found |= {(load, figure): measure for figure, measure in measures.items() if len(measure.groups)}
    return found


def _by_load(run: Run) -> dict[str, list[Pass]]:
    loads: dict[str, list[Pass]] = {}
    for part in (part for part in run.passes if not part.interrupted):
        loads.setdefault("all at once" if run.mode == "throughput" else part.name, []).append(part)
    return loads


def _difference(key: tuple[str, str], a: Measure, b: Measure, tolerance: float) -> Difference:
    change = b.value / a.value - 1 if a.value else inf if b.value else 0.0
    bounds = interval(a, b) if len(a.groups) > 1 and len(b.groups) > 1 and a.value else None
    verdict: Literal["better", "worse", ""] = ""
    if abs(change) > tolerance and (bounds is None or not bounds[0] <= 0 <= bounds[1]):
        verdict = "better" if (change > 0) == a.more_is_better else "worse"
    return Difference(load=key[0], figure=key[1], a=a.value, b=b.value, change=change, interval=bounds, verdict=verdict)


def interval(a: Measure, b: Measure) -> tuple[float, float]:
    """Of the change from a figure of several groups to another."""
    rng = np.random.default_rng(0)  # the same files, the same answer

    def drawn(each: Measure) -> np.ndarray:
        count, values = len(each.groups), np.hstack(each.groups)
        group_of = np.repeat(np.arange(count), [np.size(group) for group in each.groups])
        times = (np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(RESAMPLES))
        return np.array([each.statistic(np.repeat(values, often[group_of])) for often in times])

    of_a, of_b = drawn(a), drawn(b)
    low, high = np.percentile(of_b[of_a > 0] / of_a[of_a > 0] - 1, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
