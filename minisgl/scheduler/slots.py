"""Slots: the running requests as arrays, one row each, so that a step costs numpy calls and not Python per request."""

import numpy as np
from numpy.typing import NDArray

from minisgl.batch import Float32, Joins, Ragged
from minisgl.cache.radix import Node
from minisgl.request import Int32, Request


class Slots:
    """Rows are written when a request joins and stay its own until it has ended and no launched batch holds it.

    Tokens of a row: `known` are on the host; `total` counts those that a launched batch will draw, too.
    `kv` of them have had their KV launched: a prompt's chunks up to there, and all but the last when it decodes.
    """

    def __init__(self, num_slots: int, context: int, page_size: int) -> None:
        self.page_size = page_size
        width = -(-context // page_size)
        self.request: list[Request | None] = [None] * num_slots
        self.node: list[Node | None] = [None] * num_slots  # the tree node that the request has locked
        self.tokens: Int32 = np.empty((num_slots, context), dtype=np.int32)  # memory is touched only as rows grow
        self.table: Int32 = np.empty((num_slots, width), dtype=np.int32)  # pages, never changed once written
        self.owned = np.zeros((num_slots, width), dtype=np.bool_)  # pages that are the request's and not the tree's
        self.key = np.zeros(num_slots, dtype=np.int64)
        self.known = np.zeros(num_slots, dtype=np.int32)
        self.total = np.zeros(num_slots, dtype=np.int32)
        self.limit = np.zeros(num_slots, dtype=np.int32)  # total at which the request is complete
        self.kv = np.zeros(num_slots, dtype=np.int32)
        self.pages = np.zeros(num_slots, dtype=np.int32)  # entries of `table` in use
        self.in_tree = np.zeros(num_slots, dtype=np.int32)  # leading pages that the tree has, its own or ours
        self.in_flight = np.zeros(num_slots, dtype=np.int32)  # launched batches that hold the row
        self.held = np.zeros(num_slots, dtype=np.bool_)  # the row is some request's
        self.active = np.zeros(num_slots, dtype=np.bool_)  # and that request has not ended
        self.decoding = np.zeros(num_slots, dtype=np.bool_)  # active, and its last prompt chunk was launched
        self.stop_ids: Int32 = np.full((num_slots, 4), -1, dtype=np.int32)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def join(self, request: Request, node: Node, cached: Int32, fresh: Int32) -> int:
        """Give a request a row, with the cached pages of its prefix and fresh pages for the rest of what it has."""
        slot = self._free.pop()
        count, known = len(cached) + len(fresh), request.num_known
        self.request[slot], self.node[slot], request.slot = request, node, slot
        self.tokens[slot, :known] = request.known
        self.table[slot, : len(cached)] = cached
        self.table[slot, len(cached) : count] = fresh
        self.owned[slot, : len(cached)] = False
        self.owned[slot, len(cached) : count] = True
        self.key[slot] = request.key
        self.known[slot] = self.total[slot] = known
        self.limit[slot] = len(request.prompt) + request.max_tokens
        self.kv[slot] = len(cached) * self.page_size
        self.pages[slot] = count
        self.in_tree[slot] = len(cached)
        self.held[slot] = self.active[slot] = True
        self._set_stop_ids(slot, request.stop_ids)
        return slot

    def leave(self, slot: int) -> Int32:
        """Free a row that no launched batch holds; returns the pages that were the request's own."""
        assert self.in_flight[slot] == 0
        request = self.request[slot]
        assert request is not None
        count = self.pages[slot]
        owned = self.table[slot, :count][self.owned[slot, :count]]
        request.slot = -1
        self.request[slot] = self.node[slot] = None
        self.held[slot] = self.active[slot] = self.decoding[slot] = False
        self.pages[slot] = 0
        self._free.append(slot)
        return owned

    def output(self, slot: int) -> Int32:
        """A copy of the tokens generated so far."""
        request = self.request[slot]
        assert request is not None
        return self.tokens[slot, len(request.prompt) : self.known[slot]].copy()

    def add_page(self, slots: Int32, pages: Int32) -> Int32:
        """Append one fresh page to each of `slots`; returns the writes [n, 3] for the device's table."""
        index = self.pages[slots]
        self.table[slots, index] = pages
        self.owned[slots, index] = True
        self.pages[slots] = index + 1
        return np.stack([slots, index, pages], axis=1)

    def row_writes(self, slot: int) -> Int32:
        """All table entries of a row [n, 3], for a device that has not seen them."""
        count = int(self.pages[slot])
        writes = np.empty((count, 3), dtype=np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = slot, np.arange(count), self.table[slot, :count]
        return writes

    def joins(self, slots: list[int]) -> Joins:
        """How the requests that join are sampled."""
        requests = [r for r in (self.request[s] for s in slots) if r is not None]
        params = [r.sampling for r in requests]
        prompt_len = np.array([len(r.prompt) for r in requests], dtype=np.int32)

        def floats(name: str) -> Float32:
            return np.array([getattr(p, name) for p in params], dtype=np.float32)

        def count(name: str) -> Int32:
            return np.array([-1 if (k := getattr(p, name)) is None else k for p in params], dtype=np.int32)

        return Joins(
            slots=np.array(slots, dtype=np.int32),
            temperature=floats("temperature"),
            top_k=np.maximum(count("top_k"), 0),
            top_p=floats("top_p"),
            min_p=floats("min_p"),
            seed=np.array([r.seed for r in requests], dtype=np.int64),
            presence=floats("presence_penalty"),
            frequency=floats("frequency_penalty"),
            repetition=floats("repetition_penalty"),
            prompt_len=prompt_len,
            min_len=prompt_len + count("min_tokens"),
            logprobs=count("logprobs"),
            prompt_logprobs=count("prompt_logprobs"),
            history=Ragged.of([self.tokens[r.slot, : self.known[r.slot]] if r.needs_history else () for r in requests]),
            stop_ids=Ragged.of([r.stop_ids if p.min_tokens else () for r, p in zip(requests, params, strict=True)]),
            bias_ids=Ragged.of([list(p.logit_bias or ()) for p in params]),
            bias=Ragged.of([list((p.logit_bias or {}).values()) for p in params], np.float32),
            bad_words=Ragged.of([[t for word in r.bad_words for t in (len(word), *word)] for r in requests]),
        )

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider: NDArray[np.int32] = np.full((len(self.stop_ids), len(ids)), -1, dtype=np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
