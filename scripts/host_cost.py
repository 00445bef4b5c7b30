"""Print what the engine costs the host: a decode step and an admission with a device that takes no time, a batch on
its way to another rank, and a long prefix match.

python scripts/host_cost.py
"""

import socket
import statistics
import time
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from minisgl.batch import Batch, Outcome
from minisgl.cache.radix import RadixCache
from minisgl.config import SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.parallel.line import pack, receive
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

    batch: Batch

    def launch(self, batch: Batch) -> Tokens:
        self.batch = batch
        return Tokens(np.ones(int(batch.samples.sum()), dtype=np.int32))


def new_engine(overlap: bool) -> tuple[Engine, NoDevice]:
    """An engine, and its device."""
    scheduler = Scheduler(num_slots=RUNNING, num_pages=40_000, page_size=16, context=4096, chunk_size=8192)
    device = NoDevice()
    return Engine(scheduler, device, overlap), device


def ask(engine: Engine, prompt_lens: NDArray[np.int64], max_tokens: int, seed: int) -> None:
    """Add a request for each length of a prompt."""
    sampling = SamplingParams(temperature=0.6, ignore_eos=True).with_defaults(NEUTRAL)
    rng = np.random.default_rng(seed)
    for number, length in enumerate(prompt_lens.tolist()):
        key, prompt = seed * RUNNING + number, rng.integers(2, 10_000, length, dtype=np.int32)
        engine.add(
            Request(
                key=key,
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=sampling,
                stop_ids=(0,),
                seed=key,
                arrival_s=float(key),
            )
        )


def decoding(overlap: bool) -> tuple[Engine, NoDevice]:
    """An engine all of whose requests decode, and its device."""
    engine, device = new_engine(overlap)
    ask(engine, np.random.default_rng(1).integers(100, 1024, RUNNING), 1024, 0)
    while engine.stats().running < RUNNING or engine.scheduler._prefilling:
        engine.step()
    return engine, device


def admission_ms() -> list[float]:
    """Milliseconds of the step that admits 256 new prompts of 32 tokens."""
    engine, device = new_engine(overlap=True)
    times = []
    for turn in range(20):
        ask(engine, np.full(RUNNING, 32), 8, turn)
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
        assert len(device.batch.slots) == RUNNING
        while engine.has_work:
            engine.step()
    return times


def decode_step_us(overlap: bool) -> list[float]:
    """Microseconds of each step that only decodes, with 256 requests running."""
    engine, _ = decoding(overlap)
    times = []
    for _ in range(900):
        start = time.perf_counter()
        committed = engine.step()
        times.append((time.perf_counter() - start) * 1e6)
        assert len(committed.keys) == RUNNING
    return times


def to_another_rank_us() -> tuple[int, list[list[float]]]:
    """Bytes of such a batch as a message, and microseconds: to pack it, to send it, and to receive and unpack it."""
    engine, device = decoding(overlap=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as line:
        there, _ = listener.accept()
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size, times = 0, []
        with there, line.makefile("rb") as messages:
            for _ in range(900):
                engine.step()
                moments = [time.perf_counter()]
                message = pack(device.batch)
                moments.append(time.perf_counter())
                there.sendall(message)
                moments.append(time.perf_counter())
                assert isinstance(receive(messages), Batch)
                moments.append(time.perf_counter())
                size = len(message)
                times.append([(end - begin) * 1e6 for begin, end in pairwise(moments)])
    return size, [list(each) for each in zip(*times, strict=True)]


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
    print(f"admit {RUNNING} prompts of 32 tokens: median {statistics.median(admission_ms()):.1f} ms")
    size, times = to_another_rank_us()
    packed, sent, received = map(statistics.median, times)
    print(
        f"batch of {RUNNING} to another rank, {size:,} bytes: median {packed:.0f} us to pack, {sent:.0f} us to send, "
        f"{received:.0f} us to receive and unpack"
    )
    for page_size in (1, 16, 64):
        for pieces in (1, 20, 150):
            times = match_ms(page_size, pieces)
            print(f"match 10,000 tokens, page {page_size}, {pieces} nodes: median {statistics.median(times):.3f} ms")


if __name__ == "__main__":
    main()
