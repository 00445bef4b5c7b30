"""A device without a model. It keeps KV by page, as a real one does: reading a wrong page gives a wrong token."""

import numpy as np

from minisgl.batch import Outcome
from minisgl.config import SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.request import Request
from minisgl.scheduler import Scheduler

VOCAB = 97


def next_token(tokens) -> int:
    """The "model": any change in any earlier token, or in their order, changes what comes next."""
    state = 17
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 1_000_003
    return state % VOCAB


def expected(prompt, max_tokens, stop_ids=()) -> list[int]:
    tokens, out = list(prompt), []
    while len(out) < max_tokens and not (out and out[-1] in stop_ids):
        out.append(next_token(tokens))
        tokens.append(out[-1])
    return out


class Done:
    def __init__(self, tokens):
        self.tokens = np.array(tokens, dtype=np.int32)

    def wait(self):
        return Outcome(self.tokens)


class FakeRunner:
    def __init__(self, scheduler: Scheduler):
        slots, self.page_size = scheduler.num_slots, scheduler.page_size
        self.table = np.full((slots, scheduler.slots.table.shape[1]), -1, dtype=np.int64)
        self.kv = np.full(scheduler.num_pages * self.page_size, -1, dtype=np.int64)
        self.last_token = np.full(slots, -1, dtype=np.int64)
        self.batches = []

    def launch(self, batch):
        self.batches.append(batch)
        for slot, index, page in batch.page_writes.tolist():
            self.table[slot, index] = page
        start, read = 0, []
        for row, slot in enumerate(batch.slots.tolist()):
            end, count = int(batch.kv_len[row]), int(batch.q_len[row])
            if row < batch.num_decode:
                ids = [self.last_token[slot]]
            else:
                ids = batch.input_ids[start : start + count]
                start += count
            self.kv[self._at(slot, np.arange(end - count, end))] = ids
        assert start == len(batch.input_ids)
        for row, slot in enumerate(batch.slots.tolist()):
            if batch.samples[row]:
                seen = self.kv[self._at(slot, np.arange(int(batch.kv_len[row])))]
                self.last_token[slot] = next_token(seen)
                read.append(self.last_token[slot])
        return Done(read)

    def _at(self, slot, positions):
        return self.table[slot, positions // self.page_size] * self.page_size + positions % self.page_size


def make_request(key, prompt, max_tokens, stop_ids=(), priority=0, arrival_s=0.0) -> Request:
    sampling = SamplingParams(priority=priority).with_defaults(NEUTRAL)
    return Request(
        key=key,
        prompt=np.array(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=tuple(stop_ids),
        seed=0,
        arrival_s=arrival_s,
    )


def make_engine(*, overlap=True, num_slots=4, num_pages=32, page_size=4, context=64, chunk_size=16, **kwargs):
    context = min(context, num_pages * page_size)
    scheduler = Scheduler(
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        context=context,
        chunk_size=chunk_size,
        **kwargs,
    )
    return Engine(scheduler, FakeRunner(scheduler), overlap)


def run(engine, requests, check=True, most_steps=5000) -> list[Request]:
    """Add all, step to the end, and return them in the order in which they ended."""
    for request in requests:
        engine.add(request)
    ended = []
    for _ in range(most_steps):
        if not engine.has_work:
            return ended
        ended += engine.step().ended
        if check:
            engine.scheduler.check()
    raise AssertionError("the engine did not come to an end")
