"""Figures of a trace → people: tables, one HTML file, and what has changed between two."""

from collections.abc import Iterator
from functools import partial
from html import escape
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minisgl.bench.html import page
from minisgl.bench.record import write_whole
from minisgl.profiling.figures import Figures, Line, PhaseFigures, computes

TABLES = {"groups": "", "kernels": "kernel: ", "idle": "idle: ", "gaps": "idle, ", "host": "host: "}
"""Of a phase's figures, and what their lines are called beside those of the others."""
ROWS = 15
"""Of a table; the JSON has all."""
TOLERANCE, LEAST_US = 0.05, 1.0
"""What has changed by less is not called slower or faster: than this share, and than this."""
STEP = "the whole step"
IDLE_COLORS = ("#a50f15", "#de2d26", "#fb6a4a", "#fc9272", "#fcbba1")
COLORS = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#756bb1", "#bcbddc", "#31a354", "#a1d99b", "#fd8d3c", "#bdbdbd")


def show(found: Figures, console: Console) -> None:
    """Print where the mean step of each phase goes."""
    for line in _sentences(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for phase in found.phases:
        for name in TABLES:
            bounds = ("GB/s", "TFLOP/s", "bound by", "of bound") if name in ("groups", "kernels") else ()
            table = _table(f"{phase.phase}: {name}", "µs", "share", "calls", *bounds)
            for line in getattr(phase, name)[:ROWS]:
                table.add_row(*map(Text, _row(line, phase.step_us)))
            console.print(table)


def _sentences(found: Figures) -> Iterator[str]:
    facts = found.facts
    yield f"{facts.model} in {facts.engine.dtype} on {facts.device}"
    if plain_us := facts.plain_step_us:
        yield f"a step takes {plain_us / 1e3:,.3f} ms, and {found.step_us / plain_us - 1:+.1%} while it is profiled"
    if facts.no_ceilings:
        yield f"no bound: {facts.no_ceilings}"
    for phase in found.phases:
        yield f"\n{phase.phase}: {phase.steps} steps of {phase.tokens:,.1f} tokens"
        parts = " + ".join(f"{line.name} {line.us / 1e3:,.3f}" for line in phase.budget if line.us)
        yield f"{phase.step_us / 1e3:,.3f} ms = {parts}"
        if facts.engine.cuda_graph:
            yield f"CUDA graphs in {phase.graphs:.0%} of the steps, of whose tokens {phase.padding:.1%} only fill up"
        if facts.engine.device == "cuda":
            yield f"overlap: in {phase.host_while_busy:.1%} of the host's time, waiting apart, the device was busy"
        for number, line in enumerate(phase.savings, start=1):
            yield f"{number}. at most {line.us / 1e3:,.3f} ms ({line.us / phase.step_us:.1%}) to save: {line.name}"


def _row(line: Line, step_us: float) -> list[str]:
    row = [line.name, f"{line.us:,.1f}", f"{line.us / step_us:.1%}", f"{line.calls:,.1f}"]
    if line.need is None or not line.us:
        return row
    need, time_s = line.need, line.us / 1e6
    rates = f"{need.bytes / time_s / 1e9:,.0f}", f"{need.flops / time_s / 1e12:,.2f}"
    return [*row, *rates, "computing" if computes(need) else "memory", f"{need.least_s / time_s:.1%}"]


def _table(title: str, *columns: str) -> Table:
    table = Table(title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def write_html(found: Figures, path: Path) -> None:
    """Write the report as one file that needs nothing else: a bar for each phase's step, and the tables."""
    bars = "".join(_bar(phase) for phase in found.phases)
    write_whole(path, page(f"{found.facts.model}, profiled", bars, partial(show, found)).encode())


def _bar(phase: PhaseFigures) -> str:
    """A step's budget as a bar, and what each color stands for."""
    parts = legend = ""
    colors, idle_colors = iter(COLORS), iter(IDLE_COLORS)
    for line in (line for line in phase.budget if line.us):
        color = next(idle_colors if line.name.startswith("idle") else colors)
        share = f"{line.us / phase.step_us:.2%}"
        says = escape(f"{line.name}: {line.us / 1e3:,.3f} ms, {share}")
        parts += f'<div style="width:{share};background:{color}" title="{says}"></div>'
        legend += f'<span style="white-space:nowrap"><b style="color:{color}">■</b> {says}</span> '
    bar = f'<div style="display:flex;height:2em">{parts}</div>'
    heading = f"{escape(phase.phase)}: a step of {phase.step_us / 1e3:,.3f} ms"
    return f'<section style="font-family:sans-serif;margin:1em"><h3>{heading}</h3>{bar}<p>{legend}</p></section>'


def read(path: Path) -> Figures:
    """Read a report that was written as JSON; raises ValueError for something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Figures)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no report of minisgl profile --output: {error}") from error


def compare(a: Path, b: Path, console: Console) -> bool:
    """Print what has changed from A to B, phase by phase; whether a step has become slower. Raises ValueError."""
    before, after = ({phase.phase: _named(phase) for phase in read(path).phases} for path in (a, b))
    if not before.keys() & after.keys():
        raise ValueError(f"no phase is in both: {a} has {', '.join(before)}, {b} has {', '.join(after)}")
    slower = False
    for phase in (phase for phase in before if phase in after):
        table = _table(f"{phase}: µs of a step", "A", "B", "B - A", "change", "")
        a_us, b_us = before[phase], after[phase]
        rows = [(name, a_us.get(name, 0.0), b_us.get(name, 0.0)) for name in a_us | b_us]
        rows.sort(key=lambda row: (row[0] != STEP, -abs(row[2] - row[1])))
        for name, old, new in rows[: 2 * ROWS]:
            verdict, style = "", ""
            if abs(new - old) > max(TOLERANCE * old, LEAST_US):
                verdict, style = ("slower", "red") if new > old else ("faster", "green")
            slower |= (name, verdict) == (STEP, "slower")
            change = f"{new / old - 1:+.1%}" if old else "new"
            values = (name, f"{old:,.1f}", f"{new:,.1f}", f"{new - old:+,.1f}", change, verdict)
            table.add_row(*map(Text, values), style=style)
        console.print(table)
    return slower


def _named(phase: PhaseFigures) -> dict[str, float]:
    """Every time of a step, by a name that no other has."""
    lines = {kind + line.name: line.us for name, kind in TABLES.items() for line in getattr(phase, name)}
    return {STEP: phase.step_us} | lines
