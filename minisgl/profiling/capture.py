"""Capture an engine's steps with torch.profiler, in ranges that name the parts of each step.

The engine knows nothing of it: while it is captured, the methods of its objects that do a part of a step are shadowed
by ones that open a range around them. Before and after there is nothing of that, so it costs nothing then.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._profiler import _RecordFunctionFast as record_function  # the public one takes ten times as long
from torch.profiler import ProfilerActivity, profile

from minisgl.batch import Batch
from minisgl.config import EngineConfig
from minisgl.engine import Engine, Result
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


class Ranges:
    """The ranges and the facts of an engine's steps, until it is closed."""

    def __init__(self, engine: Engine, open_range: Range, most: int, enough: Callable[[], object]) -> None:
        """`enough` is called at the end of the step that is the last of `most`."""
        self.steps: list[Step] = []
        """What was launched."""
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

    def close(self) -> None:
        """Leave the engine as it was; safe to call again."""
        self._shadows.close()

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
        self._number = len(self.steps)
        committed = self._ranged("step", method)
        if len(self.steps) >= self._most:
            self._enough()
        return committed

    def _launch(self, method: Callable[[Batch], Result], batch: Batch) -> Result:
        rows, after = batch.num_decode, batch.kv_len.tolist()
        prompts = list(zip(after, (batch.kv_len - batch.q_len).tolist(), strict=True))[rows:]
        tokens, samples = int(batch.q_len.sum()), int(batch.samples.sum())
        step = Step(tokens=tokens, decode_rows=rows, decode_context=sum(after[:rows]), prompts=prompts, samples=samples)
        self.steps.append(step)
        with self._open(f"minisgl.launch#{self._number} {step.phase} of {len(after)} rows, {tokens} tokens"):
            result = method(batch)
        vars(result)["wait"] = partial(self._ranged, "wait", result.wait)
        return result

    def _fill(self, method: Callable[[Any, int], Any], rows: Any, size: int) -> Any:
        """CUDA graphs of a size are used."""
        self.steps[-1].graph_tokens = size
        return method(rows, size)


def record(engine: Engine, facts: EngineFacts, most: int) -> "Recording":
    """Record the next steps of a server's engine."""
    return Recording(engine, engine_facts(facts.model_name, facts.folder, EngineConfig(**facts.config)), most)


class Recording:
    """A trace of an engine's next steps, which ends by itself after `most` of them."""

    def __init__(self, engine: Engine, facts: Facts, most: int) -> None:
        self._facts, self._on_cuda, self._over = facts, facts.engine.device == "cuda", False
        on_cuda = [ProfilerActivity.CUDA] if self._on_cuda else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_cuda])
        self._profile.start()
        self._ranges = Ranges(engine, record_function, most, self.stop)

    def stop(self) -> None:
        """End it now; safe to call again."""
        if self._over:
            return
        self._over = True
        self._ranges.close()
        if self._on_cuda:
            torch.cuda.synchronize()
        facts = msgspec.structs.replace(self._facts, steps=self._ranges.steps)
        self._profile.add_metadata_json("minisgl", msgspec.json.encode(facts).decode())
        self._profile.stop()

    def trace(self) -> bytes:
        """The trace, as gzipped JSON, once; ends the recording."""
        self.stop()
        with tempfile.TemporaryDirectory(prefix="minisgl-profile-") as folder:
            file = Path(folder, "trace.json.gz")
            self._profile.export_chrome_trace(str(file))
            return file.read_bytes()


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
