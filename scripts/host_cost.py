"""Print what the engine costs the host: a decode step with a device that takes no time, and a long prefix match.

python scripts/host_cost.py
"""

import statistics
import time

import numpy as np

from minisgl.batch import Batch, Outcome
from minisgl.cache.radix import RadixCache
from minisgl.config import SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.request import Int32, Request
from minisgl.scheduler import Scheduler

RUNNING = 256


class Tokens:
    """A result that is there at once."""

    def __init__(self, tokens: Int32) -> None:
        self._tokens = tokens

    def wait(self) -> Outcome:
        return Outcome(self._tokens)


class NoDevice:
    """A runner whose every token is 1."""

    def launch(self, batch: Batch) -> Tokens:
        return Tokens(np.ones(int(batch.samples.sum()), dtype=np.int32))


def decode_step_us(overlap: bool) -> list[float]:
    """Microseconds of each step that only decodes, with 256 requests running."""
    scheduler = Scheduler(num_slots=RUNNING, num_pages=40_000, page_size=16, context=4096, chunk_size=8192)
    engine = Engine(scheduler, NoDevice(), overlap)
    sampling = SamplingParams(temperature=0.6, ignore_eos=True).with_defaults(NEUTRAL)
    rng = np.random.default_rng(0)
    for key in range(RUNNING):
        prompt = rng.integers(2, 10_000, rng.integers(100, 1024), dtype=np.int32)
        engine.add(
            Request(
                key=key,
                prompt=prompt,
                max_tokens=1024,
                sampling=sampling,
                stop_ids=(0,),
                seed=key,
                arrival_s=float(key),
            )
        )
    while engine.stats().running < RUNNING or scheduler._prefilling:
        engine.step()
    times = []
    for _ in range(900):
        start = time.perf_counter()
        committed = engine.step()
        times.append((time.perf_counter() - start) * 1e6)
        assert len(committed.keys) == RUNNING
    return times


def match_ms(page_size: int, pieces: int) -> list[float]:
    """Milliseconds to match a cached prompt of 10,000 tokens that entered the tree in so many pieces."""
    cache = RadixCache(page_size)
    tokens = np.random.default_rng(0).integers(0, 50_000, 10_000, dtype=np.int32)
    pages = len(tokens) // page_size
    ends = sorted({pages * (i + 1) // pieces for i in range(pieces)})
    node, start = cache.root, 0
    for end in ends:
        run = np.arange(start, end, dtype=np.int32)
        node, _ = cache.insert(node, tokens[start * page_size : end * page_size], run)
        start = end
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        _, found = cache.match(tokens)
        times.append((time.perf_counter() - begin) * 1e3)
        assert len(found) == pages
    return times


def main() -> None:
    """Print medians."""
    for overlap in (True, False):
        times = decode_step_us(overlap)
        print(
            f"decode step, {RUNNING} running, overlap {'on' if overlap else 'off'}: median "
            f"{statistics.median(times):.0f} us, p99 {sorted(times)[int(len(times) * 0.99)]:.0f} us"
        )
    for page_size in (1, 16, 64):
        for pieces in (1, 20, 150):
            times = match_ms(page_size, pieces)
            print(f"match 10,000 tokens, page {page_size}, {pieces} nodes: median {statistics.median(times):.3f} ms")


if __name__ == "__main__":
    main()
