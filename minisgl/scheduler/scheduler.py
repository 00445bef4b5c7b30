"""Scheduler: admission, chunked prefill, retraction, and the bookkeeping of what a step brought."""

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from minisgl.batch import Batch, Joins, Logprobs, Outcome, PromptLogprobs
from minisgl.cache.pages import PagePool
from minisgl.cache.radix import NoCache, Node, RadixCache
from minisgl.config import CacheKind, SchedulePolicy
from minisgl.request import NO_TOKENS, FinishReason, Int32, Request
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.slots import Slots

Chunk = tuple[int, int, int]  # slot, and from which of its tokens to which

RETRY_STEPS = 8
"""A request that does not fit is tried again when another leaves, or so many steps later: matching takes time."""

NO_WRITES: Int32 = np.empty((0, 3), dtype=np.int32)
NO_WRITES.flags.writeable = False


class PrefixCache(Protocol):
    """Pages of earlier tokens, found by the tokens: `RadixCache`, or `NoCache`."""

    cached: int
    evictable: int

    def match_length(self, tokens: Int32) -> int: ...
    def match(self, tokens: Int32) -> tuple[Node, Int32]: ...
    def insert(self, node: Node, tokens: Int32, pages: Int32) -> tuple[Node, int]: ...
    def lock(self, node: Node) -> None: ...
    def unlock(self, node: Node) -> None: ...
    def evict(self, count: int) -> Int32: ...
    def check(self, holders: Iterable[Node]) -> Int32: ...


@dataclass(frozen=True, eq=False)
class Committed:
    """What a step brought: one token for each of n running requests, and the requests that ended.

    Log-probabilities come for those that asked for them, by the requests' keys.
    """

    keys: NDArray[np.int64]  # [n] the requests' keys
    tokens: Int32  # [n]
    ended: list[Request]
    logprob_keys: NDArray[np.int64]  # [m]
    logprobs: Logprobs | None  # of these requests' tokens
    prompt_logprobs: list[tuple[int, PromptLogprobs]]


@dataclass(frozen=True)
class Stats:
    """A moment of the engine; pages are free, cached (held by no request) or locked, and nothing else."""

    running: int
    waiting: int
    pages_free: int
    pages_cached: int
    pages_locked: int
    prompt_tokens: int  # of admitted requests, each counted once
    prefix_hit_tokens: int  # of these, found in the cache
    retractions: int
    steps: int


class Demand:
    """The share of its `max_tokens` that a request is expected to use, learnt from those that ended."""

    def __init__(self) -> None:
        self._used = 0.3  # moving average
        self._caution = 0.0  # raised by a retraction, fades as requests end

    @property
    def share(self) -> float:
        return min(1.0, self._used + self._caution)

    def ended(self, share: float) -> None:
        self._used += 0.05 * (share - self._used)
        self._caution *= 0.95

    def retracted(self) -> None:
        self._caution = min(1.0, self._caution + 0.1)


class Scheduler:
    """Decides each step's batch and owns the host's side of every request.

    The order of calls is `schedule`, `launched` (the batch is on the device's stream), and later `commit`,
    batch by batch in order. Everything the device does runs on one stream: a page that the tree shows was
    filled by a batch launched before any batch that reads it.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        context: int,
        chunk_size: int,
        policy: SchedulePolicy = "fcfs",
        mixed: bool = True,
        cache: CacheKind = "radix",
    ) -> None:
        self.context = context
        self.num_slots, self.num_pages, self.page_size = num_slots, num_pages, page_size
        self._chunk_size, self._mixed = chunk_size, mixed
        self._policy: SchedulePolicy = policy
        self._cache_kind: CacheKind = cache
        self._steps = self._retractions = self._hit_tokens = self._prompt_tokens = 0
        self._ended: list[Request] = []
        self._start_over()

    def _start_over(self) -> None:
        self.pool = PagePool(self.num_pages)
        self.cache: PrefixCache = RadixCache(self.page_size) if self._cache_kind == "radix" else NoCache()
        self.slots = Slots(self.num_slots, self.context, self.page_size)
        self.queue = WaitingQueue(self._policy, self.cache.match_length)
        self.in_flight: deque[Batch] = deque()  # launched and not yet committed
        self._prefilling: dict[int, None] = {}  # slots with prompt tokens left to launch, in order of admission
        self._demand = Demand()
        self._no_joins = Joins.greedy(NO_TOKENS)
        self._blocked_until = 0  # the step at which to try again to admit the next request that did not fit

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request; its followers come after it. They must fit the context, see `request.room_for`."""
        assert len(request.prompt) >= 1 and request.max_tokens >= 1
        assert len(request.prompt) + request.max_tokens <= self.context
        self.queue.push(request)
        self._blocked_until = 0

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it is; without effect on one that has ended.

        Its slot and pages are given back once no launched batch holds it.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self._ended.append(request)
        self._release_followers(request)
        slot = request.slot
        if slot < 0:
            self.queue.remove(request)
            return
        request.output = self.slots.output(slot)
        if reason in ("stop", "length"):
            self._demand.ended(len(request.output) / request.max_tokens)
        self.slots.active[slot] = self.slots.decoding[slot] = False
        self._prefilling.pop(slot, None)
        if self.slots.in_flight[slot] == 0:
            self._release(slot)

    @property
    def has_work(self) -> bool:
        """Whether a request waits, runs, or has ended and was not reported yet."""
        return bool(self.queue) or bool(self.slots.held.any()) or bool(self._ended)

    # A step

    def schedule(self) -> Batch | None:
        """The next batch. None: nothing can run, or only after what is in flight has been committed."""
        if self._mixed:
            grown = self._next_decode()
            chunks, joined = ([], []) if grown is None else self._next_chunks()
        else:
            chunks, joined = self._next_chunks()
            grown = (NO_TOKENS, NO_WRITES) if chunks else self._next_decode()
            if grown is not None and not len(grown[0]) and not chunks:
                chunks, joined = self._next_chunks()  # all that decoded may just have been retracted
        if grown is None:
            return None
        decode, writes = grown
        return self._build(decode, chunks, writes, joined) if len(decode) or chunks else None

    def launched(self, batch: Batch) -> None:
        """Note that a batch is on the device's stream: the full pages of its prompt chunks enter the tree."""
        self.slots.in_flight[batch.slots] += 1
        self.in_flight.append(batch)
        self._steps += 1
        for slot in batch.slots[batch.num_decode :].tolist():
            self._to_tree(slot, int(self.slots.kv[slot]) // self.page_size)
            request = self.slots.request[slot]
            if request is not None and self.slots.decoding[slot]:
                self._release_followers(request)

    def commit(self, outcome: Outcome) -> Committed:
        """Take in what the oldest launched batch brought."""
        batch, tokens = self.in_flight.popleft(), outcome.tokens
        slots = self.slots
        slots.in_flight[batch.slots] -= 1
        rows = batch.slots[batch.samples]
        fits = slots.active[rows]
        if (tokens < 0).any():
            for slot in rows[fits & (tokens < 0)].tolist():
                self._end(slot, "error")
            fits &= tokens >= 0
        reported = outcome.logprob_rows[fits[outcome.logprob_rows]]
        logprob_keys = slots.key[rows[reported]]
        logprobs = outcome.logprobs and outcome.logprobs.take(fits[outcome.logprob_rows])
        prompts = [(int(slots.key[p.slot]), p) for p in outcome.prompt_logprobs if slots.active[p.slot]]
        rows, tokens = rows[fits], tokens[fits]
        keys = slots.key[rows]
        at = slots.known[rows]
        slots.tokens[rows, at] = tokens
        slots.known[rows] = at + 1
        stopped = (slots.stop_ids[rows] == tokens[:, None]).any(axis=1)
        for i in np.flatnonzero(stopped | (at + 1 == slots.limit[rows])).tolist():
            self._end(int(rows[i]), "stop" if stopped[i] else "length")
        held = batch.slots
        for slot in held[slots.held[held] & ~slots.active[held] & (slots.in_flight[held] == 0)].tolist():
            self._release(slot)
        return Committed(keys, tokens, self.take_ended(), logprob_keys, logprobs, prompts)

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fail_all(self) -> None:
        """End every request with `error` and start over with empty tables: the device's state is not known."""
        known = [*self.queue.requests(), *(r for r in self.slots.request if r is not None)]
        for request in [*known, *(follower for r in known for follower in r.followers)]:
            if request.finish_reason is None:
                if request.slot >= 0:
                    request.output = self.slots.output(request.slot)
                request.finish_reason = "error"
                self._ended.append(request)
            request.slot = -1
        self._start_over()

    def flush_cache(self) -> bool:
        """Drop every cached page that no request holds; whether that was all of them."""
        self.pool.give(self.cache.evict(self.cache.evictable))
        return self.cache.cached == 0

    def _release_followers(self, request: Request) -> None:
        """Queue the requests that waited for this one's prompt to be in the prefix cache."""
        for follower in request.followers:
            if follower.finish_reason is None:
                self.queue.push(follower)
        request.followers = []

    # Decode rows

    def _next_decode(self) -> tuple[Int32, Int32] | None:
        """Every row that decodes, with the pages that they begin now; None if retraction must wait for a commit."""
        slots = self.slots
        while True:
            rows = np.flatnonzero(slots.decoding & (slots.total < slots.limit)).astype(np.int32)
            needy = rows[slots.kv[rows] == slots.pages[rows] * self.page_size]
            if len(needy) <= self.pool.free + self.cache.evictable:
                return rows, slots.add_page(needy, self._take_pages(len(needy)))
            if self.in_flight:
                return None
            self._retract()

    def _retract(self) -> None:
        """Send the least important running request back to the queue; nothing may be in flight."""
        running = np.flatnonzero(self.slots.active).tolist()
        requests = [r for r in (self.slots.request[s] for s in running) if r is not None]
        request = min(requests, key=lambda r: (r.priority, -r.arrival_s, -r.key))
        slot = request.slot
        request.output = self.slots.output(slot)
        request.retractions += 1
        self._prefilling.pop(slot, None)
        self._release(slot)
        self.queue.push(request)
        self._demand.retracted()
        self._retractions += 1

    # Prefill rows

    def _next_chunks(self) -> tuple[list[Chunk], list[int]]:
        """Prompt chunks within the step's budget: those begun, then newly admitted requests, whose slots come too."""
        budget = self._chunk_size
        chunks: list[Chunk] = []
        joined: list[int] = []

        def launch(slot: int) -> int:
            start = int(self.slots.kv[slot])
            end = min(int(self.slots.known[slot]), start + budget)
            chunks.append((slot, start, end))
            return end - start

        for slot in self._prefilling:
            if budget:
                budget -= launch(slot)
        ahead = self._pages_ahead() if len(self.queue) else 0
        while budget and self.slots.num_free and self._steps >= self._blocked_until:
            request = self.queue.select()
            if request is None:
                break
            slot = self._admit(request, ahead)
            if slot is None:
                self._blocked_until = self._steps + RETRY_STEPS
                break
            ahead += self._pages_for(int(self.slots.limit[slot] - self.slots.total[slot]))
            joined.append(slot)
            budget -= launch(slot)
        return chunks, joined

    def _admit(self, request: Request, ahead: int) -> int | None:
        """Give a request a slot and pages for all its known tokens, if they and what will be needed soon fit.

        `ahead` are the pages that running requests will still begin.
        """
        known = request.known
        # At least one token must be computed; all of them, where the prompt is to be scored.
        node, cached = self.cache.match(known[:-1] if request.sampling.prompt_logprobs is None else NO_TOKENS)
        self.cache.lock(node)
        need = -(-len(known) // self.page_size) - len(cached)
        wanted = need
        if self.slots.num_free < self.num_slots:  # alone it fits: that is what the context limit means
            own = self._pages_for(request.max_tokens - len(request.output))
            wanted += max(own, 1 if request.retractions else 0) + ahead
        if wanted > self.pool.free + self.cache.evictable:
            self.cache.unlock(node)
            return None
        self.queue.take(request)
        slot = self.slots.join(request, node, cached, self._take_pages(need))
        self._prefilling[slot] = None
        if request.cached_tokens is None:
            request.cached_tokens = len(cached) * self.page_size
            request.admitted_s = time.monotonic()
            self._prompt_tokens += len(known)
            self._hit_tokens += request.cached_tokens
        return slot

    def _pages_for(self, remaining: int) -> int:
        """Pages that a request will still begin, if it uses the expected share of its remaining tokens."""
        return math.ceil(self._demand.share * remaining / self.page_size)

    def _pages_ahead(self) -> int:
        """The same of all that run."""
        remaining = (self.slots.limit - self.slots.total)[self.slots.active]
        return int(np.ceil(self._demand.share * remaining / self.page_size).sum())

    # Pages

    def _take_pages(self, count: int) -> Int32:
        """Fresh pages; as many leaves of the tree are evicted as the free list is short of."""
        short = count - self.pool.free
        if short > 0:
            self.pool.give(self.cache.evict(short))
        return self.pool.take(count)

    def _to_tree(self, slot: int, count: int) -> None:
        """Let the tree have a request's first `count` pages, which are full.

        Pages that the tree has from another request stay this one's own until it ends: a running
        request's table never changes.
        """
        slots, start = self.slots, int(self.slots.in_tree[slot])
        if count <= start:
            return
        tokens = slots.tokens[slot, start * self.page_size : count * self.page_size]
        before = slots.node[slot]
        assert before is not None
        node, known = self.cache.insert(before, tokens, slots.table[slot, start:count])
        slots.owned[slot, start + known : count] = False
        self.cache.lock(node)
        self.cache.unlock(before)
        slots.node[slot] = node
        slots.in_tree[slot] = count

    def _release(self, slot: int) -> None:
        """The one way out of a slot. What a discarded step may have written last stays out of the tree."""
        written = min(int(self.slots.kv[slot]), int(self.slots.known[slot]) - 1)
        self._to_tree(slot, written // self.page_size)
        node = self.slots.node[slot]
        assert node is not None
        self.cache.unlock(node)
        self.pool.give(self.slots.leave(slot))
        self._blocked_until = 0

    def _end(self, slot: int, reason: FinishReason) -> None:
        request = self.slots.request[slot]
        assert request is not None
        self.finish(request, reason)

    def _build(self, decode: Int32, chunks: list[Chunk], writes: Int32, joined: list[int]) -> Batch:
        """Put the rows together and advance the host's counts as if the step had run."""
        slots = self.slots
        slots.kv[decode] += 1
        slots.total[decode] += 1
        rows, starts, ends = np.array(chunks, dtype=np.int32).reshape(-1, 3).T
        last = ends == slots.known[rows]
        slots.kv[rows] = ends
        slots.total[rows[last]] += 1
        slots.decoding[rows[last]] = True
        for slot in rows[last].tolist():
            del self._prefilling[slot]
        return Batch(
            slots=np.concatenate([decode, rows]),
            q_len=np.concatenate([np.ones(len(decode), np.int32), ends - starts]),
            kv_len=np.concatenate([slots.kv[decode], ends]),
            num_decode=len(decode),
            input_ids=np.concatenate([NO_TOKENS, *(slots.tokens[s, a:b] for s, a, b in chunks)]),
            samples=np.concatenate([np.ones(len(decode), np.bool_), last]),
            page_writes=np.concatenate([writes, *(slots.row_writes(s) for s in joined)]),
            joins=slots.joins(joined) if joined else self._no_joins,
        )

    # What it knows of itself

    def stats(self) -> Stats:
        """Counts at this moment; O(slots)."""
        return Stats(
            running=int(self.slots.active.sum()),
            waiting=len(self.queue),
            pages_free=self.pool.free,
            pages_cached=self.cache.evictable,
            pages_locked=self.num_pages - self.pool.free - self.cache.evictable,
            prompt_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._hit_tokens,
            retractions=self._retractions,
            steps=self._steps,
        )

    def check(self) -> None:
        """Prove that every page has one owner and every count holds; AssertionError says what does not."""
        slots = self.slots
        self.pool.check()
        used = np.flatnonzero(slots.held).tolist()
        tree = self.cache.check([n for n in (slots.node[s] for s in used) if n is not None])
        own = [slots.table[s, : slots.pages[s]][slots.owned[s, : slots.pages[s]]] for s in used]
        owners = np.concatenate([self.pool.free_pages(), tree, *own])
        assert np.array_equal(np.sort(owners), np.arange(self.num_pages)), "a page has no owner, or two"
        for s in used:
            lent = slots.table[s, : slots.pages[s]][~slots.owned[s, : slots.pages[s]]]
            assert np.isin(lent, tree).all(), f"slot {s} reads a page that the tree no longer has"
            request = slots.request[s]
            assert request is not None and request.slot == s
            assert slots.kv[s] <= slots.pages[s] * self.page_size
            assert slots.kv[s] <= slots.total[s] <= slots.limit[s] and slots.known[s] <= slots.total[s]
            assert slots.active[s] == (request.finish_reason is None)
            assert slots.active[s] or slots.in_flight[s], f"slot {s} has ended and was not given back"
            assert slots.decoding[s] <= slots.active[s]
            if slots.active[s]:
                assert (s in self._prefilling) != bool(slots.decoding[s])
        held = np.zeros(self.num_slots, dtype=np.int32)
        for batch in self.in_flight:
            held[batch.slots] += 1
        assert np.array_equal(held, slots.in_flight), "a slot's count of launched batches has drifted"
        assert not slots.active[~slots.held].any()
        assert all(r.slot < 0 and r.finish_reason is None for r in self.queue.requests())
