"""A trace as torch.profiler writes it, in Chrome's format that Perfetto shows: what the device did, when and for whom.

While an engine is captured, ranges like `minisgl.launch#12` name the part of a step that the host is at, and the
step. What runs on the device belongs to the range in which the host asked for it: a kernel and the call that launched
it, also as part of a CUDA graph, have a number in common, their correlation. Without kernels the CPU is the device, and
its operations are what runs on it.

Times are microseconds. A moment of a device counts once: for the work that began first, of those that run then; on a
CPU, where operations call others, for the innermost. So what all work has of its own adds up to the time in which the
device was busy, whatever overlaps.
"""

import gzip
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from minisgl.profiling.facts import Facts
from minisgl.profiling.groups import group_of, short

RANGE = re.compile(r"minisgl\.(\w+)#(\d+)")
RANK_IDS = 10_000_000
"""The processes' ids in a merged trace: of rank r they begin at r times this, which is more than any of Linux has."""
WAIT = "wait"
"""The part of a step in which the host waits for the device; so are calls that do, wherever they stand."""
ON_DEVICE, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")

Raw = dict[str, Any]
"""A trace, or an event of it, as JSON has it."""
T = TypeVar("T")


class Event(Struct):
    """Of a trace: of kind X, something that took time."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = {}

    @property
    def span(self) -> tuple[float, float]:
        """When it began and ended."""
        return self.ts, self.ts + self.dur

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.pid // RANK_IDS if isinstance(self.pid, int) else 0


class _File(Struct):
    """What is needed of a trace's JSON."""

    traceEvents: list[Event]
    baseTimeNanoseconds: float = 0.0


class Stretch(NamedTuple):
    """Time that the host spent in a part of a step, and not in a smaller one within it."""

    begin_us: float
    end_us: float
    part: str
    step: int


NOWHERE = Stretch(0.0, 0.0, "", -1)


class Work(NamedTuple):
    """A kernel, a copy, or an operation of a CPU."""

    name: str
    group: str
    step: int  # for which the host asked for it; -1: for none
    rank: int  # whose device it ran on
    asked_us: float  # when the host did
    begin_us: float
    own_us: float  # busy with it, and with nothing that counts before it
    idle_us: float  # before it, since all other work of the device had ended


class Trace(NamedTuple):
    """All of a trace that figures are made of."""

    facts: Facts
    work: list[Work]  # rank by rank, in the order of their beginnings
    host: list[Stretch]  # of rank 0, in order, none of which overlap


def read(data: bytes, origin: str) -> Raw:
    """A trace from its JSON, plain or gzipped; raises ValueError, naming the origin, for anything else."""
    try:
        trace = msgspec.json.decode(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, type=Raw)
        msgspec.convert(trace, _File)
        return trace
    except (EOFError, OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{origin} is no trace of torch.profiler, as JSON, plain or gzipped") from error


def packed(trace: Raw) -> bytes:
    """A trace as gzipped JSON."""
    return gzip.compress(msgspec.json.encode(trace), 5)


def with_ranges(trace: Raw, ranges: Iterable[tuple[str, int, int]], process: int, thread: int) -> Raw:
    """The trace and, in a thread of a process, ranges: their names, and when they began and ended, in ns since 1970."""
    base, of = trace.get("baseTimeNanoseconds", 0), {"ph": "X", "cat": "user_annotation", "pid": process, "tid": thread}
    events = [of | {"name": n, "ts": (begin - base) / 1e3, "dur": (end - begin) / 1e3} for n, begin, end in ranges]
    return trace | {"traceEvents": trace["traceEvents"] + events}


def merge(traces: Sequence[Raw]) -> Raw:
    """One trace of those of ranks 0, 1, … on one host; what is said beside the events is said by rank 0."""
    events = list(traces[0]["traceEvents"])
    for rank, trace in enumerate(traces[1:], start=1):
        later_us = (trace.get("baseTimeNanoseconds", 0) - traces[0].get("baseTimeNanoseconds", 0)) / 1e3
        for event in trace["traceEvents"]:
            moved = {key: event[key] + rank * RANK_IDS for key in ("pid", "id") if isinstance(event.get(key), int)}
            events.append(event | moved | {"ts": event.get("ts", 0.0) + later_us})
    return traces[0] | {"traceEvents": events}


def split(trace: Raw, phases: Sequence[str]) -> dict[str, Raw]:
    """A trace for each of its steps' phases, given in the steps' order: what belongs to no step is in all of them."""
    hosts, of_phase = _hosts(trace), {phase: trace | {"traceEvents": []} for phase in phases}
    for raw in trace["traceEvents"]:
        event = msgspec.convert(raw, Event)
        number = hosts[event.rank].asked(event)[1].step if event.ph == "X" else -1
        for phase in (phases[number],) if 0 <= number < len(phases) else of_phase:
            of_phase[phase]["traceEvents"].append(raw)
    return of_phase


def understand(trace: Raw) -> Trace:
    """What a trace says; raises ValueError where it is not of an engine of ours, or nothing ran."""
    try:
        facts, hosts = msgspec.convert(trace.get("minisgl"), Facts), _hosts(trace)
    except msgspec.ValidationError as error:
        raise ValueError(f"the trace is not of minisgl profile: {error}") from error
    on_cpu = not any(host.of(*ON_DEVICE) for host in hosts.values())
    work = [work for rank, host in hosts.items() for work in _work(rank, host, on_cpu)]
    if not work or not hosts[0].stretches:
        raise ValueError("the engine did nothing while the trace was taken: give it requests to answer")
    return Trace(facts, work, hosts[0].stretches)


class _Host:
    """What a rank's host did, and when it asked for what its devices did."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        annotations = self.of("user_annotation")
        ranges = [(*each.span, match, each) for each in annotations if (match := RANGE.match(each.name))]
        spans = [(begin, end, (match[1], int(match[2]))) for begin, end, match, _ in ranges]
        spans += [(*each.span, (WAIT, None)) for each in self.of(*CALLS) if "Synchronize" in each.name]
        self.stretches: list[Stretch] = []
        for begin, end, (part, step) in innermost(spans):
            if step is None:  # that of what it lies in
                step = self.stretches[-1].step if self.stretches and self.stretches[-1].end_us == begin else -1
            self.stretches.append(Stretch(begin, end, part, step))
        self.threads = {event.tid for *_, event in ranges}
        self._begins = [stretch.begin_us for stretch in self.stretches]
        self._calls = {event.args.get("correlation"): event.ts for event in self.of(*CALLS)}

    def of(self, *kinds: str) -> list[Event]:
        """The events of some categories."""
        return [event for event in self.events if event.cat in kinds]

    def asked(self, event: Event) -> tuple[float, Stretch]:
        """When, and where, it asked for an event; of one of its own, when and where it was."""
        number = event.args.get("correlation")
        at_us = event.ts if number is None else self._calls.get(number, event.ts)
        index = bisect_right(self._begins, at_us) - 1
        inside = index >= 0 and at_us <= self.stretches[index].end_us
        return at_us, self.stretches[index] if inside else NOWHERE


def _hosts(trace: Raw) -> dict[int, _Host]:
    events: dict[int, list[Event]] = {0: []}
    for event in msgspec.convert(trace["traceEvents"], list[Event]):
        if event.ph == "X":
            events.setdefault(event.rank, []).append(event)
    return {rank: _Host(mine) for rank, mine in events.items()}


def _work(rank: int, host: _Host, on_cpu: bool) -> Iterator[Work]:
    """What a rank's device did, in order: on a CPU also gloo, which has threads of its own while the host waits."""
    events = host.of(*ON_DEVICE)
    if on_cpu:
        events = [each for each in host.of("cpu_op") if each.tid in host.threads]
        events += [each for each in host.of("user_annotation") if each.name.startswith("gloo:")]
    own_us: dict[int, float] = defaultdict(float)
    for begin, end, inner in innermost((*event.span, id(event)) for event in events) if on_cpu else ():
        own_us[inner] += end - begin
    busy_until = min((event.ts for event in events), default=0.0)
    for event in sorted(events, key=lambda event: event.span):
        (begin, end), (asked_us, asked) = event.span, host.asked(event)
        own, idle = max(end - max(begin, busy_until), 0.0), max(begin - busy_until, 0.0)
        own = own_us[id(event)] if on_cpu else own
        yield Work(short(event.name), group_of(event.name, asked.part), asked.step, rank, asked_us, begin, own, idle)
        busy_until = max(busy_until, end)


def innermost(spans: Iterable[tuple[float, float, T]]) -> list[tuple[float, float, T]]:
    """Disjoint stretches in order, each with what is innermost there of spans that lie within one another."""
    found: list[tuple[float, float, T]] = []
    around: list[tuple[float, T]] = []  # what the current moment lies in: its end, and what it is
    at = 0.0
    for begin, end, what in [*sorted(spans, key=lambda span: (span[0], -span[1])), (float("inf"), 0.0, None)]:
        while around and at < begin:
            until, inner = around[-1]
            if at < (stop := min(until, begin)):
                found.append((at, stop, inner))
                at = stop
            if until <= begin:
                around.pop()
        at = max(at, begin)
        if what is not None:
            around.append((end, what))
    return found
