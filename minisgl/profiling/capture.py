"""Capture an engine's steps with torch.profiler, in ranges that name the parts of each step.

The engine knows nothing of it: while it is captured, the methods of its objects that do a part of a step are shadowed
by ones that open a range around them. Before and after there is nothing of that, so it costs nothing then.

Ranges are of the host's clock, which is that of the profiler's times: its own take up to ten times as long, and it
would note every operator of torch beside them, for which a small step on a GPU is too short.
"""

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from minisgl.batch import Batch
from minisgl.config import EngineConfig
from minisgl.engine import Engine, Result
from minisgl.parallel.ranks import ALONE, Ranks
from minisgl.profiling import trace
from minisgl.profiling.facts import Facts, Step, engine_facts
from minisgl.scheduler import Committed
from minisgl.server.messages import EngineFacts

PARTS = (
    ("schedule", "scheduler", "schedule"),
    ("build", "scheduler", "_build"),
    ("schedule", "scheduler", "launched"),
    ("commit", "scheduler", "commit"),
    ("send", "_crew", "send"),  # to the other ranks, where there are some
    ("build", "_staging", "send"),
    ("plan", "_attention", "begin"),
    ("forward", "_model", "forward"),
    ("attention", "_attention", "attend"),  # of a layer, whose number comes first
    ("logits", "_model", "logits"),
    ("sample", "_runner", "_sample"),
)
"""A part of a step, and whose method does it: an attribute of the engine, of its runner, or of this rank's."""

Range = Callable[[str], AbstractContextManager[Any]]
"""Opens a range of that name in what is captured."""


class HostRange:
    """A range that adds its name, and when it began and ended, in ns, to those found."""

    def __init__(self, found: list[tuple[str, int, int]], name: str) -> None:
        self._found, self._name = found, name

    def __enter__(self) -> None:
        self._began = time.time_ns()

    def __exit__(self, *_: object) -> None:
        self._found.append((self._name, self._began, time.time_ns()))


class Ranges:
    """The ranges and the facts of an engine's steps, until it is closed."""

    def __init__(self, engine: Engine, open_range: Range, most: int, enough: Callable[[], object]) -> None:
        """`enough` is called at the end of the step that is the last of `most`."""
        self._batches: list[Batch] = []  # that were launched
        self._in_graphs: dict[int, int] = {}  # number of a step → the tokens of its CUDA graphs
        self._open, self._most, self._enough = open_range, most, enough
        self._number = 0  # of the step that is being made
        self._shadows = ExitStack()
        runner = getattr(engine.runner, "_runner", engine.runner)  # of this rank: a leader's has others beside it
        objects = {"_runner": runner} | vars(engine) | vars(engine.runner) | vars(runner)
        self._shadow(engine, "step", self._step)
        self._shadow(engine.runner, "launch", self._launch)
        for part, owner, method in PARTS:
            self._shadow(objects.get(owner), method, partial(self._ranged, part))
        self._shadow(objects["_graphs"], "replay", self._fill)
        self._shadow(objects["_pieces"], "_fill", self._fill)

    def close(self) -> list[Step]:
        """Leave the engine as it was; safe to call again. Returns what was launched."""
        self._shadows.close()
        return [_step(batch, self._in_graphs.get(number, 0)) for number, batch in enumerate(self._batches)]

    def _shadow(self, owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
        """Let `stand_in`, which gets the method and its arguments, be called in a method's place."""
        if owner is not None:
            vars(owner)[name] = partial(stand_in, getattr(owner, name))
            self._shadows.callback(vars(owner).pop, name)

    def _ranged(self, part: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        layer = f" layer {args[0]}" if part == "attention" else ""
        with self._open(f"minisgl.{part}#{self._number}{layer}"):
            return method(*args, **options)

    def _step(self, method: Callable[[], Committed]) -> Committed:
        self._number = len(self._batches)
        committed = self._ranged("step", method)
        if len(self._batches) >= self._most:
            self._enough()
        return committed

    def _launch(self, method: Callable[[Batch], Result], batch: Batch) -> Result:
        self._number = len(self._batches)  # where nobody calls `step`: in a rank that follows
        self._batches.append(batch)
        prompts = len(batch.slots) - batch.num_decode
        with self._open(f"minisgl.launch#{self._number} {batch.num_decode} rows decode, {prompts} prefill"):
            result = method(batch)
        vars(result)["wait"] = partial(self._ranged, "wait", result.wait)
        return result

    def _fill(self, method: Callable[[Any, int], Any], rows: Any, size: int) -> Any:
        """CUDA graphs of a size are used."""
        self._in_graphs[self._number] = size
        return method(rows, size)


def _step(batch: Batch, graph_tokens: int) -> Step:
    rows, after = batch.num_decode, batch.kv_len.tolist()
    return Step(
        tokens=int(batch.q_len.sum()),
        decode_rows=rows,
        decode_context=sum(after[:rows]),
        prompts=list(zip(after, (batch.kv_len - batch.q_len).tolist(), strict=True))[rows:],
        samples=int(batch.samples.sum()),
        graph_tokens=graph_tokens,
    )


def record(engine: Engine, facts: EngineFacts, most: int) -> "Recording":
    """Record the next steps of a server's engine."""
    return Recording(engine, engine_facts(facts.model_name, facts.folder, EngineConfig(**facts.config)), most)


class Recording:
    """A trace of an engine's next steps on all its ranks, which ends by itself after `most` of them."""

    def __init__(self, engine: Engine, facts: Facts, most: int, ops: bool = False) -> None:
        """With `ops`, operators of torch are noted on a GPU's host, too."""
        self._facts, self._over = facts, False
        self._ranks: Ranks = getattr(engine.runner, "_ranks", ALONE)
        self._together = getattr(engine.runner, "together", lambda order, work: work())
        self._mine = RankRecording(engine.runner, self._ranks, facts.engine.device)
        start = START_WITH_OPS if ops else START
        self._together(start, partial(self._mine.start, start))
        self._ranges = Ranges(engine, self._mine.open_range, most, self.stop)

    def stop(self) -> None:
        """End it now; safe to call again."""
        if self._over:
            return
        self._over = True
        facts = msgspec.structs.replace(self._facts, steps=self._ranges.close())
        self._together("stop", partial(self._mine.stop, msgspec.json.encode(facts).decode()))

    def trace(self) -> bytes:
        """The trace, as gzipped JSON, once; ends the recording."""
        self.stop()
        traces = self._together("trace", self._mine.gathered)
        return traces[0] if len(traces) == 1 else trace.packed(trace.merge([trace.read(each, "it") for each in traces]))


START, START_WITH_OPS = "start", "start with operators"
"""What ranks are told."""


class RankRecording:
    """One rank's part of a recording: what the profiler sees there."""

    def __init__(self, runner: Any, ranks: Ranks, device: str) -> None:
        self._runner, self._ranks, self._device = runner, ranks, device
        self._profile: profile | None = None
        self._found: list[tuple[str, int, int]] = []
        self.open_range = partial(HostRange, self._found)
        """Opens a range of a name in what this thread does."""

    def obey(self, order: str) -> None:
        """Do what the first rank does at the same time, and with the ranges that this one has."""
        if order in (START, START_WITH_OPS):
            self.start(order)
            engine: Any = SimpleNamespace(runner=self._runner, step=None)
            self._ranges = Ranges(engine, self.open_range, 0, int)
        elif order == "stop":
            self._ranges.close()
            self.stop("null")
        else:
            self.gathered()

    def start(self, order: str) -> None:
        """Let the profiler see what this process does."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it has lines of its own on stderr
        self._found.clear()
        on_cpu = self._device != "cuda" or order == START_WITH_OPS
        activities = [*[ProfilerActivity.CPU][:on_cpu], *[ProfilerActivity.CUDA][: self._device == "cuda"]]
        self._profile = profile(activities=activities)
        with warnings.catch_warnings(action="ignore"):  # it warns of cycles, of which there are none
            self._profile.start()

    def stop(self, facts: str) -> None:
        """No longer."""
        assert self._profile is not None
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._profile.add_metadata_json("minisgl", facts)
        self._profile.stop()

    def gathered(self) -> list[bytes]:
        """The traces of all ranks, in their order, as gzipped JSON; zeros behind it are no part of it."""
        assert self._profile is not None
        with tempfile.TemporaryDirectory(prefix="minisgl-profile-") as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            seen = trace.read(file.read_bytes(), "the trace")
        mine = trace.packed(trace.with_ranges(seen, self._found, os.getpid(), threading.get_native_id()))
        padded = torch.zeros(-self._ranks.least(-len(mine), torch.device(self._device)), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return [each.numpy().tobytes() for each in self._ranks.gather(padded.to(self._device)).cpu()]


@contextmanager
def seen_by_nsys(engine: Engine, steps: int) -> Iterator[None]:
    """Show Nsight Systems the next steps, with NVTX ranges that name their parts and the layers' attention."""
    ranges = Ranges(engine, torch.cuda.nvtx.range, steps, torch.cuda.profiler.stop)
    torch.cuda.profiler.start()
    yield
    ranges.close()


@contextmanager
def allocations(path: str | None, device: str) -> Iterator[None]:
    """Write to `path`, if any, what CUDA's allocator holds in the end, and all that it did to get there."""
    if path is None:
        yield
        return
    if device != "cuda":
        raise ValueError(f"memory must be unset on {device}: it is of CUDA's allocator")
    torch.cuda.memory._record_memory_history()
    try:
        yield
        torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
