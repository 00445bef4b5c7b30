"""A run as a picture: latencies, throughput over time, the curve of a sweep, phases, power; what of it there is."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import numpy as np

from minisgl.bench.figures import label, pass_figures, phase_figures
from minisgl.bench.metrics import latencies, succeeded
from minisgl.bench.record import Pass, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 5.2, 3.4
COLUMNS = 2
BUCKETS = (10, 60)
"""Of throughput over time: one a second, but not fewer nor more than these."""
CURVES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


def draw(run: Run, path: Path | IO[bytes], form: str | None = None) -> None:
    """Write the picture, in the form that the file's name ends in or that is given; no display is needed."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels = _panels(run)
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(columns * WIDTH_IN, rows * HEIGHT_IN + 0.4), layout="constrained")
    figure.suptitle(f"{run.mode} of {run.model} on {run.device}", parse_math=False)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_prop_cycle(color=colormaps["viridis"](np.linspace(0, 0.9, len(run.passes) or 1)))
        panel(axes)
        axes.grid(alpha=0.3)
        if names := axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="x-small", ncols=1 + len(names) // 8)
    figure.savefig(path, format=form, dpi=120)


def _panels(run: Run) -> Sequence[Callable[["Axes"], object]]:
    panels: list[Callable[[Axes], object]] = []
    done = sorted((p for p in run.passes if succeeded(p.requests)), key=lambda each: each.load.get("qps", 0))
    rates = [part for part in done if "qps" in part.load]
    if run.mode == "online" and done:
        panels += [lambda axes, name=name: _cdf(axes, name, done) for name in CURVES]
    if run.mode != "latency" and done:
        panels.append(lambda axes: _over_time(axes, done))
    if len(rates) > 1:
        panels.append(lambda axes: _curve(axes, run, rates))
    if any(part.phases for part in run.passes):
        panels.append(lambda axes: _phases(axes, run))
    if any(sample.power_w is not None for part in run.passes for sample in part.samples):
        panels.append(lambda axes: _power(axes, run.passes))
    return panels or [lambda axes: axes.set_title("no request has an answer")]


def _cdf(axes: "Axes", name: str, passes: Sequence[Pass]) -> None:
    for part in passes:
        values = np.sort(latencies(part.requests)[name]) * 1e3
        if len(values):
            axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=part.name)
    axes.set(xlabel=f"{label(name)}, ms", ylabel="share of requests" if name != "itl_s" else "share of gaps")
    axes.set_ylim(0, 1.02)
    _logarithmic(axes, "x")


def _over_time(axes: "Axes", passes: Sequence[Pass]) -> None:
    """Output tokens a second; a request's tokens are spread evenly over its events where those do not say."""
    for part in passes:
        points = [(step.time_s, step.tokens or 0) for step in part.steps] or [
            (event.time_s, event.tokens or (r.completion_tokens or 0) / len(r.events))
            for r in succeeded(part.requests)
            for event in r.events
        ]
        times, tokens = np.array(points).T
        times -= part.began_s
        duration_s = float(times.max())
        counts, edges = np.histogram(times, int(np.clip(duration_s, *BUCKETS)), (0.0, duration_s), weights=tokens)
        axes.plot((edges[:-1] + edges[1:]) / 2, counts / np.diff(edges), label=part.name, linewidth=1)
    axes.set(xlabel="time, s", ylabel="output tokens/s")
    axes.set_ylim(bottom=0)


def _curve(axes: "Axes", run: Run, passes: Sequence[Pass]) -> None:
    """From rate to rate, which bends back where a higher one brings no more tokens."""
    figures = [pass_figures(run, part) for part in passes]
    rates = [each.get("output_tokens_per_s", np.nan) for each in figures]
    for (name, color), (statistic, style) in product(
        (("ttft_s", "C0"), ("tpot_s", "C1")), (("median", "o-"), ("p99", "s--"))
    ):
        values = [each.get(f"{name}.{statistic}", np.nan) * 1e3 for each in figures]
        axes.plot(rates, values, style, color=color, label=f"{label(name)} {statistic}")
    axes.set(xlabel="output tokens/s", ylabel="ms")
    axes.margins(y=0.2)
    _logarithmic(axes, "y")


def _logarithmic(axes: "Axes", way: Literal["x", "y"]) -> None:
    """In this way, where values span more than a decade; with numbers as one writes them."""
    from matplotlib.ticker import LogFormatter

    low, high = getattr(axes.dataLim, f"interval{way}")
    if 0 < 10 * low < high:
        axes.set(**{f"{way}scale": "log"})
        getattr(axes, f"{way}axis").set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())


def _phases(axes: "Axes", run: Run) -> None:
    """Each phase's time, and in front of it its least time by the roofline."""
    rows = [(f"{p.name} {name}", each) for p in run.passes for name, each in phase_figures(run, p).items()]
    labels = [name for name, _ in rows]
    axes.barh(labels, [each["mean_s"] for _, each in rows], color="#9ecae1", label="took")
    if all("least_s" in each for _, each in rows):
        least_s = [each["least_s"] for _, each in rows]
        axes.barh(labels, least_s, height=0.4, color="#08519c", label="least by the roofline")
    axes.set(xlabel="time, s")
    axes.invert_yaxis()


def _power(axes: "Axes", passes: Sequence[Pass]) -> None:
    for part in passes:
        for gpu in sorted({sample.gpu for sample in part.samples}):
            known = [(s.time_s - part.began_s, s.power_w) for s in part.samples if s.gpu == gpu and s.power_w]
            axes.plot(*zip(*known, strict=True), label=f"{part.name}, GPU {gpu}", linewidth=1)
    axes.set(xlabel="time, s", ylabel="power, W")
    axes.set_ylim(bottom=0)
