"""From logits to tokens: penalties and biases, filters, and the draw, row by row.

The order is that of the field: penalties, biases and bans, temperature, top-k, top-p, min-p, draw. Greedy rows are
exact argmax in any batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.batch import Int32, Joins
from minisgl.kernels.gumbel import sample
from minisgl.parallel.sharding import Vocabulary

GREEDY_BELOW = 1e-5
"""Temperatures up to here are greedy: nothing but rounding separates them from it."""


@dataclass(frozen=True, eq=False)
class Edits:
    """What changes a request's logits before the draw, on the host."""

    penalised: bool
    prompt_len: int
    min_len: int
    stop_ids: Sequence[int]
    bias_ids: Sequence[int]
    bias: Sequence[float]
    bad_words: Sequence[Sequence[int]]


class Sampler:
    """Holds each slot's sampling parameters: on the device for the work, on the host to choose it.

    Each of several ranks draws among its own tokens, and the best of these draws wins. A row that wants a filter or an
    edit needs all scores to know what it leaves of its own.
    """

    def __init__(self, num_slots: int, context: int, device: torch.device, vocabulary: Vocabulary) -> None:
        self._context, self._device, self._vocabulary = context, device, vocabulary
        self._part = None
        if len(vocabulary.parts) > 1:
            self._part = vocabulary.mine.start, vocabulary.widest, vocabulary.ranks.gather
        # One more than there are slots: for what fills a CUDA graph's batch up.
        self._temperature = torch.zeros(num_slots + 1, device=device)
        self._top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._top_p = torch.ones(num_slots, device=device)
        self._min_p = torch.zeros(num_slots, device=device)
        self._seed = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._penalties = torch.zeros(num_slots, 3, device=device)  # presence, frequency, repetition
        self._filters = np.zeros(num_slots, dtype=np.bool_)
        self._has_edits = np.zeros(num_slots, dtype=np.bool_)
        self._keeps_history = np.zeros(num_slots, dtype=np.bool_)
        self._edits: dict[int, Edits] = {}  # only slots that have some
        self._history: Tensor | None = None  # [slots, context] int32, where a request needs it

    def join(self, joins: Joins) -> None:
        """Take in the parameters of requests that join."""
        draws = (joins.temperature > GREEDY_BELOW) & (joins.top_k != 1)
        self._filters[joins.slots] = draws & ((joins.top_k > 0) | (joins.top_p < 1) | (joins.min_p > 0))
        self._keeps_history[joins.slots] = joins.history.lengths > 0
        slots = self._send(joins.slots).long()
        self._temperature[slots] = self._send(np.where(draws, joins.temperature, 0))
        self._top_k[slots] = self._send(joins.top_k).long()
        self._top_p[slots] = self._send(joins.top_p)
        self._min_p[slots] = self._send(joins.min_p)
        self._seed[slots] = self._send(joins.seed)
        self._penalties[slots] = self._send(np.stack([joins.presence, joins.frequency, joins.repetition], axis=1))
        for slot, edits in zip(joins.slots.tolist(), _edits(joins), strict=True):
            self._edits.pop(slot, None)
            self._has_edits[slot] = bool(edits.penalised or edits.min_len or edits.bias_ids or edits.bad_words)
            if self._has_edits[slot]:
                self._edits[slot] = edits
        for slot, tokens in zip(joins.slots.tolist(), joins.history.rows(), strict=True):
            if len(tokens):
                if self._history is None:
                    shape = (len(self._filters), self._context)
                    self._history = torch.zeros(shape, dtype=torch.int32, device=self._device)
                self._history[slot, : len(tokens)] = self._send(tokens)

    def history(self, slot: int, start: int, stop: int) -> Tensor:
        """Tokens of a slot that keeps them, int64."""
        assert self._history is not None
        return self._history[slot, start:stop].long()

    def only_draws(self, rows: Int32) -> bool:
        """Whether `draw` is all that these slots want."""
        return not (self._filters[rows] | self._has_edits[rows] | self._keeps_history[rows]).any()

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """`sample` where that is so, on the device alone: a CUDA graph can hold it, unless ranks have parts."""
        return sample(logits, slots, self._temperature, self._seed, positions, self._part, last)

    def sample(
        self, logits: Tensor, rows: Int32, lengths: Int32, slots: Tensor, positions: Tensor, last: Tensor
    ) -> Tensor:
        """One token for each row of `logits` [S, v], of the slots `rows`, whose requests have `lengths` tokens.

        `slots` and `positions` are the same two on the device, int32. Returns int64 [S], the same on all ranks; -1
        where logits are not numbers. `last` [slots], int64, gets them by slot, with 0 for -1.
        """
        mine = self._vocabulary.mine
        special = np.flatnonzero(self._filters[rows] | self._has_edits[rows])
        if special.size:
            at = self._send(special)
            scores = self._vocabulary.whole(logits[at]).float()  # [special, V]
            scores = self._filter(self._edit(scores, rows[special], lengths[special]), rows[special], slots[at])
            logits = logits.to(torch.float32, copy=True)
            logits[at] = scores[:, mine.start : mine.start + logits.shape[1]]
        tokens = self.draw(logits, slots, positions, last)
        if self._history is not None and (kept := np.flatnonzero(self._keeps_history[rows])).size:
            at = self._send(kept)
            # A row's last token at the context's end has no place, and no successor: it may spoil the one before.
            places = positions[at].long().clamp(max=self._context - 1)
            self._history[slots[at].long(), places] = tokens[at].int()
        return tokens

    def _filter(self, logits: Tensor, rows: Int32, slots: Tensor) -> Tensor:
        """Set to -inf, in float32 logits [n, V], what the filters of those of the rows that have some leave out."""
        filtered = np.flatnonzero(self._filters[rows])
        if not filtered.size:
            return logits
        at = self._send(filtered)
        drawn, slots = logits[at], slots[at]
        scaled = (drawn - drawn.amax(dim=-1, keepdim=True)) / self._temperature[slots, None]
        likely = keep_likely(scaled, self._top_k[slots], self._top_p[slots])
        out = (likely == -torch.inf) | (likely < self._min_p[slots, None].log())
        logits[at] = drawn.masked_fill(out & ~drawn.isnan(), -torch.inf)
        return logits

    def _edit(self, logits: Tensor, rows: Int32, lengths: Int32) -> Tensor:
        """Change float32 logits [n, V] in place, as those of the slots `rows` want that have edits."""
        changes: list[tuple[int, int, float]] = []
        words: list[tuple[int, int, Sequence[int]]] = []
        for row, slot in enumerate(rows.tolist()):
            if (edits := self._edits.get(slot)) is None:
                continue
            if edits.penalised:
                self._penalise(logits[row], slot, edits.prompt_len, int(lengths[row]))
            changes += ((row, token, bias) for token, bias in zip(edits.bias_ids, edits.bias, strict=True))
            if lengths[row] < edits.min_len:
                changes += ((row, token, -np.inf) for token in edits.stop_ids)
            words += ((row, slot, word) for word in edits.bad_words if len(word) <= lengths[row] - edits.prompt_len + 1)
        for row, slot, word in words:
            before = len(word) - 1
            last = logits[row, word[-1]]
            if before:
                said = self.history(slot, int(lengths[row]) - before, int(lengths[row]))
                last += torch.where((said == self._send(np.array(word[:-1]))).all(), -torch.inf, 0.0)
            else:
                last.fill_(-torch.inf)
        if changes:
            row, token, value = zip(*changes, strict=True)
            at = (self._send(np.array(row)), self._send(np.array(token)))
            logits.index_put_(at, self._send(np.array(value, dtype=np.float32)), accumulate=True)
        return logits

    def _penalise(self, logits: Tensor, slot: int, prompt_len: int, length: int) -> None:
        presence, frequency, repetition = self._penalties[slot]
        said = self.history(slot, 0, length)
        answer = said[prompt_len:]
        counts = torch.zeros_like(logits).scatter_add_(0, answer, torch.ones_like(answer, dtype=logits.dtype))
        scores = logits[said]
        logits[said] = torch.where(scores > 0, scores / repetition, scores * repetition)
        logits -= frequency * counts + presence * (counts > 0)

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _edits(joins: Joins) -> Iterable[Edits]:
    lists = (joins.stop_ids, joins.bias_ids, joins.bias, joins.bad_words)
    penalised = (joins.presence != 0) | (joins.frequency != 0) | (joins.repetition != 1)
    for i, (stop_ids, bias_ids, bias, bad_words) in enumerate(zip(*(r.rows() for r in lists), strict=True)):
        yield Edits(
            penalised=bool(penalised[i]),
            prompt_len=int(joins.prompt_len[i]),
            min_len=int(joins.min_len[i]) if len(stop_ids) else 0,
            stop_ids=stop_ids.tolist(),
            bias_ids=bias_ids.tolist(),
            bias=bias.tolist(),
            bad_words=list(_words(bad_words.tolist())),
        )


def _words(packed: list[int]) -> Iterable[list[int]]:
    at = 0
    while at < len(packed):
        yield packed[at + 1 : at + 1 + packed[at]]
        at += 1 + packed[at]


def keep_likely(scaled: Tensor, top_k: Tensor, top_p: Tensor, width: int = 1024) -> Tensor:
    """Set to -inf what top-k (0: off), then top-p (1: off) leave out, row by row of [S, V].

    Top-p keeps the fewest likeliest tokens whose probability, among those that top-k left, reaches p. Of equals the
    lowest ids stay. On a CPU only the `width` likeliest are sorted where that is seen to be enough.
    """
    if not scaled.is_cuda and width < scaled.shape[-1] and bool((top_k < width).all()):
        ids = scaled.topk(width, dim=-1).indices.sort(dim=-1).values  # in order, so that a stable sort orders equals
        total = torch.where(top_k > 0, -torch.inf, scaled.logsumexp(dim=-1))
        values, order = scaled.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        kept = _keep_sorted(values, top_k, top_p, total)
        least = kept.masked_fill(kept == -torch.inf, torch.inf).amin(dim=-1)
        if bool((least > values[:, -1]).all()):  # else equals of the last one kept may lie outside
            return torch.full_like(scaled, -torch.inf).scatter_(-1, ids.gather(-1, order), kept)
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    kept = _keep_sorted(values, top_k, top_p, torch.full_like(top_p, -torch.inf))
    return torch.empty_like(scaled).scatter_(-1, order, kept)


def _keep_sorted(values: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """The same for falling [S, W]; `total` [S] is the log of all mass, -inf where what top-k leaves has it all."""
    rank = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    mass = (values - torch.maximum(total, values.logsumexp(dim=-1))[:, None]).exp()
    before = mass.cumsum(dim=-1) - mass  # probability of all that is likelier
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    dropped[:, 0] = False
    return values.masked_fill(dropped, -torch.inf)
