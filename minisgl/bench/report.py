"""A run as tables on a terminal, with the formulas of its figures and what speaks against them."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from minisgl.bench.figures import Figures, digits, doubts, label, pass_figures, phase_figures, roofline_of
from minisgl.bench.load import parse_slo
from minisgl.bench.metrics import FORMULAS, LATENCIES, SPREAD, highest_rate
from minisgl.bench.record import Pass, Run

Columns = Mapping[str, tuple[str, float, str]]

THROUGHPUT: Columns = {
    "output_tokens_per_s": ("output tok/s", 1, ",.1f"),
    "bound_share": ("of bound", 1, ".1%"),
    "total_tokens_per_s": ("total tok/s", 1, ",.1f"),
    "duration_s": ("time s", 1, ".3f"),
    "steps": ("steps", 1, ",.0f"),
    "mean_batch": ("mean batch", 1, ".1f"),
    "tokens_in": ("in", 1, ",.0f"),
    "tokens_cached": ("cached", 1, ",.0f"),
    "tokens_out": ("out", 1, ",.0f"),
}
ONLINE: Columns = {
    "requests_per_s": ("req/s", 1, ".2f"),
    "output_tokens_per_s": ("output tok/s", 1, ",.1f"),
    "ttft_s.median": ("TTFT ms", 1e3, ",.1f"),
    "ttft_s.p99": ("p99", 1e3, ",.1f"),
    "tpot_s.median": ("TPOT ms", 1e3, ",.2f"),
    "tpot_s.p99": ("p99", 1e3, ",.2f"),
    "e2e_s.median": ("E2E s", 1, ",.2f"),
    "goodput_per_s": ("goodput", 1, ".2f"),
    "slo_share": ("in SLO", 1, ".1%"),
    "cache_hit_rate": ("cached", 1, ".1%"),
    "joules_per_token": ("J/token", 1, ".3f"),
    "failed": ("failed", 1, ".0f"),
}
"""Figures of a table, where they are there: heading, factor to its unit, format."""
GPU = {"sm_mhz": ("{:,.0f} MHz", 1), "utilization": ("{:.0%} busy", 1), "temperature_c": ("at most {:.0f} °C", 1)}
GPU |= {"used_bytes": ("at most {:.1f} GB", 1e9)}


def show(run: Run, console: Console) -> None:
    """Print what was measured, how each figure is computed, and what would mislead silently."""
    dtype = f" in {run.engine['dtype']}" if run.engine else ""
    devices = f"{run.devices} × {run.device}" if run.devices > 1 else run.device
    figures = [pass_figures(run, part) for part in run.passes]
    title = f"{run.mode} of {run.model}{dtype} on {devices}"
    console.print(title, *_tables(run, figures), *_notes(run, figures), sep="\n", markup=False, highlight=False)


def _tables(run: Run, figures: Sequence[Figures]) -> Iterator[Table]:
    """Those that fit the mode."""
    if run.mode == "throughput":
        yield _totals(run, figures, THROUGHPUT)
    elif run.mode == "online":
        yield _totals(run, figures, ONLINE)
        for part, each in zip(run.passes, figures, strict=True):
            yield _spreads(part, each)
    if any(part.phases for part in run.passes):
        yield _phases(run)


def _notes(run: Run, figures: Sequence[Figures]) -> Iterator[str]:
    """Formulas, doubts, failures, and why something is not known."""
    for part, each in zip(run.passes, figures, strict=True):
        yield from doubts(run, part)
        if part.interrupted:
            yield f"{part.name}: interrupted, {each['unfinished']:.0f} requests had not ended"
        if each.get("retractions"):
            yield f"{part.name}: {each['retractions']:.0f} retractions: the KV pool is too small for these requests"
        if "client_lag_s" in each:
            yield f"{part.name}: client lag {each['client_lag_s'] * 1e3:.1f} ms (p99)"
        if run.mode == "online" and each.get("tokens_per_event", 1.0) > 1.05:
            yield f"{part.name}: {each['tokens_per_event']:.2f} tokens in an event: ITL is from event to event"
        if "joules" in each:
            yield f"{part.name}: {_energy(each)}"
        gpu = [text.format(each[name] / unit) for name, (text, unit) in GPU.items() if name in each]
        yield from [f"{part.name}: GPU {', '.join(gpu)}"] if gpu else []
    if run.mode == "latency" and (hits := [each["cache_hit_rate"] for each in figures if "cache_hit_rate" in each]):
        yield f"found in the prefix cache: {max(hits):.1%} of a batch's prompt tokens at most"
    if run.load.get("find_max"):
        rate = highest_rate(run.passes, parse_slo(run.load["slo"]), run.load["slo_share"])
        yield "no rate keeps the slo" if rate is None else f"the highest rate that keeps the slo: {rate:.3g} req/s"
    if run.no_nvml:
        yield f"no power, energy and clocks: {run.no_nvml}"
    roof = roofline_of(run)
    if isinstance(roof, str) and run.mode != "online":
        yield f"no bound: {roof}"
    elif not isinstance(roof, str):
        rates = f"{digits(roof.ceilings.bytes_per_s / 1e9)} GB/s, {digits(roof.ceilings.flops_per_s / 1e12)} TFLOP/s"
        yield f"ceilings: {rates}, {roof.ceilings.source}"
    if run.mode == "online":
        shown = {name.partition(".")[0] for each in figures for name in each}
        yield from (text for name, text in FORMULAS.items() if name in shown)


def _energy(figures: Figures) -> str:
    agrees = figures.get("counter_per_power")
    source = f"counter, {agrees:.3f} of power × time" if agrees else "power × time, for there is no counter"
    token = f", {figures['joules_per_token']:.4f} J per output token" if "joules_per_token" in figures else ""
    return f"{figures['joules']:,.0f} J{token}, {figures['mean_power_w']:,.0f} W ({source})"


def _totals(run: Run, figures: Sequence[Figures], columns: Columns) -> Table:
    shown = {name: column for name, column in columns.items() if any(name in each for each in figures)}
    table = _table("load" if run.mode == "online" else "run", *(heading for heading, *_ in shown.values()))
    rows = [(part.name, each) for part, each in zip(run.passes, figures, strict=True)]
    if run.mode == "throughput":
        whole = [each for part, each in zip(run.passes, figures, strict=True) if not part.interrupted]
        known = {name: [each[name] for each in whole if name in each] for name in shown}
        rows += [("median", {name: median(values) for name, values in known.items() if values})] if whole else []
    for number, (name, each) in enumerate(rows, start=1):
        values = (_text(each.get(key), factor, layout) for key, (_, factor, layout) in shown.items())
        style, is_last = "bold" if name == "median" else "", number == len(run.passes)
        table.add_row(name, *values, style=style, end_section=is_last)
    return table


def _spreads(part: Pass, figures: Figures) -> Table:
    table = _table(f"{part.name}, ms", *SPREAD)
    for name in LATENCIES:
        values = [figures.get(f"{name}.{statistic}") for statistic in SPREAD]
        if values[0] is not None:
            table.add_row(label(name), *(_text(value, 1e3, ",.2f") for value in values))
    return table


def _phases(run: Run) -> Table:
    """Times and rates are medians of the repetitions."""
    headings = ("phase", "time ms", "max", "tok/s", "bound by", "of bound", "GB/s", "TFLOP/s", "J/token")
    table = _table("batch × prompt" if run.mode == "latency" else "run", *headings)
    for part in run.passes:
        for name, each in phase_figures(run, part).items():
            times = (digits(each["time_s"] * 1e3), digits(each["max_s"] * 1e3), digits(each["tokens_per_s"]))
            bound = ("–",) * 4
            if "least_s" in each:
                bound_by = "compute" if 2 * each["compute_s"] > each["least_s"] else "memory"
                rates = (digits(each["bytes_per_s"] / 1e9), digits(each["flops_per_s"] / 1e12))
                bound = (bound_by, f"{each['bound_share']:.1%}", *rates)
            table.add_row(part.name, name, *times, *bound, digits(each.get("joules_per_token")))
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _text(value: float | None, factor: float, layout: str) -> str:
    return "–" if value is None else format(value * factor, layout)
