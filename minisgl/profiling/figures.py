"""A trace → figures: for each phase, where the mean step's time goes, beside the least that it could be.

The least time is that of `bench.roofline`, in two: of the products with weights, the longer of reading the weights once
and of multiplying by them; of attention, the longer of reading keys and values and of its own products.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from minisgl.bench.roofline import Need, Roofline
from minisgl.profiling.facts import Facts, Step
from minisgl.profiling.groups import GROUPS
from minisgl.profiling.trace import WAIT, Trace, Work

SAVINGS = 3
"""Changes that are proposed."""

HOST_LATE, SYNCHRONISATION, OUTSIDE = "host late", "synchronisation", "outside of steps"
"""What the host did while the device had nothing to do: its part of a step, waiting for the device, neither."""
LEAST = {"GEMM": ("weights", "products with weights"), "attention": ("KV", "products of attention")}
"""What the least time of a group is for, where memory bounds it, and where computing does."""
CHANGES = GROUPS | {
    f"idle, {HOST_LATE}": "let the host be earlier: --cuda-graph, --overlap, fewer and larger operations",
    f"idle, {SYNCHRONISATION}": "launch the next step before the device is waited for: --overlap",
    f"idle, {OUTSIDE}": "give the engine more to do, or look at what is done between its steps",
    "idle, copy": "copy while the device computes",
    "idle, launch": "launch fewer kernels, or let each begin before the one ahead has ended",
}
"""What could make each part of a step shorter."""


class Line(Struct):
    """A row of a table: what something takes of a step, the mean of the devices."""

    name: str
    us: float
    calls: float = 1.0
    need: Need | None = None  # at least, of all devices together, where that is known


class PhaseFigures(Struct, kw_only=True):
    """The mean step of a phase: what groups take and what is idle adds up to its time, and so does the budget."""

    phase: str
    steps: int
    tokens: float  # computed in a step
    step_us: float
    groups: list[Line]
    kernels: list[Line]  # of one name
    idle: list[Line]  # by cause
    gaps: list[Line]  # by cause, and by the host's part of the step, or by what is before and after
    host: list[Line]  # by part of the step
    host_while_busy: float  # share of the host's time, waiting apart, in which the device was busy too
    graphs: float  # share of steps that CUDA graphs computed
    padding: float  # share of the graphs' tokens that only fill them up
    budget: list[Line]
    savings: list[Line]  # what to change, and what that would save at most


class Figures(Struct, kw_only=True):
    """All that `minisgl profile` says, and what its JSON holds."""

    facts: Facts  # without the steps
    step_us: float  # the mean of all phases
    phases: list[PhaseFigures]


def figures(trace: Trace) -> Figures:
    """Of a trace; raises ValueError where it has no whole step."""
    facts, count = trace.facts, len(trace.facts.steps)
    ran = {work.step for work in trace.work} & {stretch.step for stretch in trace.host}
    # Before the very first step nothing is known to be idle. A file of one phase has the work of its steps alone.
    counted = sorted(ran & set(range(max(min(facts.settling, count - 1), 1), count)))
    if not counted:
        raise ValueError(f"{count} steps were captured, and figures need two that ran: give the engine more to do")
    by_phase: dict[str, dict[int, Step]] = defaultdict(dict)
    for number in counted:
        by_phase[facts.steps[number].phase][number] = facts.steps[number]
    phases = [_phase(name, mine, trace) for name, mine in by_phase.items()]
    step_us = sum(phase.step_us * phase.steps for phase in phases) / len(counted)
    return Figures(facts=msgspec.structs.replace(facts, steps=[]), step_us=step_us, phases=phases)


def _phase(name: str, steps: Mapping[int, Step], trace: Trace) -> PhaseFigures:
    work = [each for each in trace.work if each.step in steps]
    share = 1 / (len(steps) * len({each.rank for each in work}))  # of a sum, what is a step's and a device's
    needs = _needs(list(steps.values()), trace.facts)
    groups = _lines(((each.group, each.own_us) for each in work), share)
    groups.sort(key=lambda line: list(GROUPS).index(line.name))
    for line in groups:
        line.need = needs.get(line.name)
    gaps = list(_gaps(steps, trace))
    idle = _lines(((cause, us) for cause, _, us in gaps), share)
    stretches = (each for each in trace.host if each.step in steps)
    host = _lines(((each.part, each.end_us - each.begin_us) for each in stretches), 1 / len(steps))
    at_work_us = sum(line.us for line in host if line.name != WAIT)
    late_us = sum(line.us for line in idle if line.name == HOST_LATE)
    graphs = [step for step in steps.values() if step.graph_tokens]
    least = {line.name: min(line.need.least_s * 1e6, line.us) for line in groups if line.need}
    rest = {line.name: line.us - least.get(line.name, 0.0) for line in groups}
    rest |= {f"idle, {line.name}": line.us for line in idle}
    must = [Line(LEAST[group][computes(needs[group])], us) for group, us in least.items()]
    return PhaseFigures(
        phase=name,
        steps=len(steps),
        tokens=sum(step.tokens for step in steps.values()) / len(steps),
        step_us=sum(line.us for line in (*groups, *idle)),
        groups=groups,
        kernels=_kernels(work, groups, share),
        idle=idle,
        gaps=_lines(((f"{cause}: {where}", us) for cause, where, us in gaps), share),
        host=host,
        host_while_busy=max(1 - late_us / at_work_us, 0.0),
        graphs=len(graphs) / len(steps),
        padding=1 - sum(s.tokens for s in graphs) / sum(s.graph_tokens for s in graphs) if graphs else 0.0,
        budget=[*must, *(Line(f"{part} beyond" if part in least else part, us) for part, us in rest.items())],
        savings=sorted((Line(CHANGES[part], us) for part, us in rest.items()), key=lambda line: -line.us)[:SAVINGS],
    )


def _lines(parts: Iterable[tuple[str, float]], share: float) -> list[Line]:
    """Sums by name, the longest first; equals, which a sum's rounding must not tell apart, as they come."""
    found: dict[str, Line] = {}
    for name, us in parts:
        line = found.setdefault(name, Line(name, 0.0, 0.0))
        line.us, line.calls = line.us + us * share, line.calls + share
    return sorted(found.values(), key=lambda line: -round(line.us, 6))


def _kernels(work: Sequence[Work], groups: Sequence[Line], share: float) -> list[Line]:
    """By name. One that is nearly all of its group needs what that needs; of others nothing is known."""
    lines, group = _lines(((each.name, each.own_us) for each in work), share), {e.name: e.group for e in work}
    for line in lines:
        line.need = next(g.need if line.us > 0.95 * g.us else None for g in groups if g.name == group[line.name])
    return lines


def _needs(steps: Sequence[Step], facts: Facts) -> dict[str, Need]:
    """What products with weights, and attention, need at least in the mean of some steps; nothing without ceilings."""
    if facts.ceilings is None:
        return {}
    roof, share = Roofline(facts.shape, facts.ceilings, facts.engine.tp), 1 / len(steps)
    gemm = sum((roof.products(step.tokens, step.samples) for step in steps), Need())
    attention = sum((roof.attention(step.prompts, step.decode_context) for step in steps), Need())
    return {"GEMM": gemm * share, "attention": attention * share}


def computes(need: Need) -> bool:
    """Whether most of its least time goes into computing, and not into reading."""
    return need.compute_s > need.memory_s


def _gaps(steps: Container[int], trace: Trace) -> Iterator[tuple[str, str, float]]:
    """Of idle time before work of these steps: its cause, where, and how long it was."""
    begins, ends = [each.begin_us for each in trace.host], [each.end_us for each in trace.host]
    for before, work in pairwise(trace.work):
        if not work.idle_us or work.step not in steps or work.step > before.step + 1 > 0:
            continue  # also before a step of another phase, which is in another file
        dry_us, between = work.begin_us - work.idle_us, f"{before.group} → {work.group}"
        asked_us = max(work.asked_us, dry_us)
        if asked_us < work.begin_us:
            yield "copy" if "copies" in (before.group, work.group) else "launch", between, work.begin_us - asked_us
        outside_us = asked_us - dry_us
        for stretch in trace.host[bisect_right(ends, dry_us) : bisect_left(begins, asked_us)]:
            us = min(stretch.end_us, asked_us) - max(stretch.begin_us, dry_us)
            outside_us -= us
            yield (SYNCHRONISATION, between, us) if stretch.part == WAIT else (HOST_LATE, stretch.part, us)
        if outside_us > 0:
            yield OUTSIDE, between, outside_us
