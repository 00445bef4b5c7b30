"""Attention in plain torch: the oracle that kernels are tested against, and what runs on a CPU."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.base import KVCache, Phase, PhaseName, Shape, Step

_GATHERED_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # keys, or values, copied out of the pages at a time
_QUERY_BLOCK = 256  # queries that share a causal mask
_SHORT = 128  # rows up to this length share a group, whatever the ratio of their lengths
_ROOM = 32  # steps for which copies are kept
_KEPT_SHARE = 0.25  # of the KV cache's size, which they may take beside it


def supports(shape: Shape, phase: PhaseName) -> str | None:
    """None, for there is no shape, dtype or device that this backend cannot run."""
    del shape, phase
    return None


def phases(kv: KVCache, shape: Shape, scale: float) -> tuple[Phase, Phase]:
    """Prefill and decode; `scale` multiplies the scores."""
    del shape
    decode = ReferenceDecode(kv, scale)
    return ReferencePrefill(kv, scale, decode.forget), decode


@dataclass(frozen=True, eq=False)
class _Group:
    """Decode rows of similar length, attended to together."""

    rows: Tensor | slice  # N rows of the batch and thereby query tokens: indices [N] int64, or all of a range
    entries: Tensor  # [N * L] int64, cache entries of each row, padded to the longest with its own first one
    mask: Tensor | None  # [N, 1, 1, L], 0 or -inf at padding; None where there is no padding
    kept: "_Kept | None"


class _Kept:
    """A group's keys and values of all layers, copied out of the pages once: from then on they grow as the rows do.

    To copy takes as long as to attend, and step after step it would be the same but for the new tokens.
    """

    def __init__(self, memory: Tensor, entries: Tensor, kv_len: Tensor, new: Tensor) -> None:
        """From the cache's memory [layer, 2, entry, K, D], for rows [N, L] of which `new` [N] are not there yet."""
        rows, length = entries.shape
        self._memory, self._copies = memory, memory.index_select(2, entries.flatten())
        views = self._copies.unflatten(2, (rows, length)).transpose(3, 4).flatten(0, 1).unbind()  # [N, K, L, D] each
        self._layers = list(zip(views[::2], views[1::2], strict=True))
        self._new, self._at = new, torch.arange(rows) * length + kv_len - 1

    def grow(self, new: Tensor, mask: Tensor) -> None:
        """Each row gets a token, whose cache entry is in `new` [N], and which `mask` has hidden."""
        self._new, self._at = new, self._at + 1
        mask.view(-1).index_fill_(0, self._at, 0)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, L, D], once the cache has the new tokens'."""
        self._copies[layer].index_copy_(1, self._at, self._memory[layer].index_select(1, self._new))
        return self._layers[layer]


class ReferenceDecode:
    """One query token a row.

    Entries are read by the requests whose table names them and within their length only, so whatever else lies in the
    memory, NaN included, cannot reach a result.
    """

    plans_on_host = False  # rows are grouped on the host; of a static step that does not depend on their lengths

    def __init__(self, kv: KVCache, scale: float) -> None:
        """`scale` multiplies the scores."""
        self._kv, self._scale = kv, scale
        self._groups: list[_Group] = []
        self._gather = _Gather(kv)
        self._lengths: dict[int, int] = {}  # the rows of the step before: slot → tokens with KV
        self._room = 0  # steps for which what is kept of the groups has room

    def plan(self, step: Step) -> None:
        """Work out once a step which cache entries each row reads."""
        if step.static:
            self._groups, self._lengths, self._room = list(self._static_groups(step)), {}, 0
            return
        rows = slice(step.batch.num_decode)
        before = {slot: length + 1 for slot, length in self._lengths.items()}
        self._lengths = dict(zip(step.batch.slots[rows].tolist(), step.batch.kv_len[rows].tolist(), strict=True))
        if self._room and self._lengths == before:
            self._room -= 1
            for group in self._groups:
                assert group.kept is not None and group.mask is not None, "all groups are kept, or none"
                group.kept.grow(step.entries[rows][group.rows], group.mask)
            return
        self._room = self._room_for(step) if self._lengths == before else 0
        self._groups = []  # what they keep is let go of before there is more of it
        self._groups = list(self._plan_groups(step))
        self._gather.reserve(group.entries for group in self._groups if group.kept is None)

    def forget(self, slots: NDArray[np.int32]) -> None:
        """These slots prefill: whoever decodes in them next is not who did before."""
        if not self._lengths.keys().isdisjoint(slots.tolist()):
            self._lengths = {}

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D], one query token a row."""
        if out is None and len(self._groups) == 1 and isinstance(self._groups[0].rows, slice):
            return self._attend(self._groups[0], layer, q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        for group in self._groups:
            if isinstance(group.rows, Tensor):
                out.index_copy_(0, group.rows, self._attend(group, layer, q[group.rows]))
            else:
                out[group.rows] = self._attend(group, layer, q[group.rows])
        return out

    def for_graph(self, size: int, pages: int) -> "ReferenceDecode":
        """A new one, which keeps no memory between layers: the graph's own is used again by itself."""
        del size, pages
        return ReferenceDecode(self._kv, self._scale)

    def _plan_groups(self, step: Step) -> Iterator[_Group]:
        kv_len, device = step.batch.kv_len[: step.batch.num_decode], step.kv_len.device
        for group in group_by_length(kv_len, self._gather.budget):
            longest = int(kv_len[group[0]])
            in_order = bool((np.diff(group) == 1).all())
            rows = slice(int(group[0]), int(group[-1]) + 1) if in_order else torch.from_numpy(group).to(device)
            padded = self._room > 0 or int(kv_len[group[-1]]) < longest
            yield self._group(step, rows, longest + self._room, padded)

    def _room_for(self, step: Step) -> int:
        """For how many steps to keep copies of rows that have come twice: 0 where they would take too much memory."""
        longest = max(self._lengths.values())
        too_large = len(self._lengths) * (longest + _ROOM) > _KEPT_SHARE * self._kv.memory.shape[2] * self._kv.page_size
        if too_large or step.entries.is_cuda:
            return 0
        return min(_ROOM, step.tables.shape[1] * self._kv.page_size - longest)

    def _static_groups(self, step: Step) -> Iterator[_Group]:
        """The same for any lengths: every row as long as a row can be."""
        longest = step.tables.shape[1] * self._kv.page_size
        at_once = max(1, self._gather.budget // longest)
        for start in range(0, step.batch.num_decode, at_once):
            rows = slice(start, min(start + at_once, step.batch.num_decode))
            yield self._group(step, rows, longest, padded=True)

    def _group(self, step: Step, rows: Tensor | slice, longest: int, padded: bool) -> _Group:
        entries = _entries(step.tables[rows], longest, self._kv.page_size)  # [N, L]
        mask = None
        if padded:
            padding = torch.arange(longest, device=entries.device) >= step.kv_len[rows, None]  # [N, L]
            entries = torch.where(padding, entries[:, :1], entries)
            mask = torch.zeros_like(padding, dtype=self._kv.memory.dtype).masked_fill_(padding, -torch.inf)
            mask = mask[:, None, None]
        kept = None
        if self._room:
            new = step.entries[: step.batch.num_decode][rows]
            kept = _Kept(self._kv.memory.flatten(2, 3), entries, step.kv_len[rows].long(), new)
        return _Group(rows, entries.flatten(), mask, kept)

    def _attend(self, group: _Group, layer: int, q: Tensor) -> Tensor:
        """[N, H, D] to [N, H, D]. The H / K query heads of a key head are its queries."""
        if group.kept is not None:
            k, v = group.kept.read(layer)  # [N, K, L, D]
        else:
            gathered = self._gather.read(layer, group.entries)
            k, v = (x.view(len(q), -1, *x.shape[1:]).transpose(1, 2) for x in gathered)
        q = q.view(len(q), k.shape[1], -1, q.shape[2])  # [N, K, H / K, D]
        return attend(q, k, v, group.mask, self._scale).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class _Row:
    """The query tokens of one prefill row."""

    start: int
    stop: int
    cached: int  # tokens before them that have KV already
    entries: Tensor | slice  # [kv_len] int64


class ReferencePrefill:
    """Any number of query tokens a row."""

    plans_on_host = True

    def __init__(self, kv: KVCache, scale: float, forget: Callable[[NDArray[np.int32]], None]) -> None:
        """`scale` multiplies the scores; `forget` is told the slots that prefill."""
        self._kv, self._scale, self._forget = kv, scale, forget
        self._rows: list[_Row] = []
        self._gather = _Gather(kv)

    def plan(self, step: Step) -> None:
        """Work out once a step which cache entries each row reads."""
        self._forget(step.batch.slots[step.batch.num_decode :])
        self._rows = list(self._plan_rows(step))
        self._gather.reserve(row.entries for row in self._rows)

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        for row in self._rows:
            tokens = slice(row.start, row.stop)
            self._attend(row.cached, q[tokens], *self._gather.read(layer, row.entries), out[tokens])
        return out

    def for_graph(self, size: int, pages: int) -> "ReferencePrefill":
        """Graphs hold decode rows alone."""
        del size, pages
        return self

    def _plan_rows(self, step: Step) -> Iterator[_Row]:
        batch = step.batch
        stops = np.cumsum(batch.q_len[batch.num_decode :])
        for i, stop in enumerate(stops.tolist()):
            row = batch.num_decode + i
            q_len, kv_len = int(batch.q_len[row]), int(batch.kv_len[row])
            entries = _run(_entries(step.tables[row : row + 1], kv_len, self._kv.page_size)[0])
            yield _Row(stop - q_len, stop, kv_len - q_len, entries)

    def _attend(self, cached: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Causal attention of one row's queries [q_len, H, D] to its `cached + q_len` keys, written to `out`.

        Queries go in blocks, so that no mask grows with their square; on a CPU with nothing cached none is needed.
        """
        num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        q, out = (x.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3) for x in (q, out))  # [K, H / K, q_len, D]
        k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))  # [K, H / K, kv_len, D], no copy
        if cached == 0 and not q.is_cuda:
            out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale))
            return
        for start in range(0, q.shape[2], _QUERY_BLOCK):
            stop = min(start + _QUERY_BLOCK, q.shape[2])
            seen = cached + stop
            hidden = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).triu(cached + start + 1)
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
            out[:, :, start:stop] = attend(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], mask, self._scale)


class _Gather:
    """Copies keys and values out of the pages, into memory that every layer and step uses again."""

    def __init__(self, kv: KVCache) -> None:
        self._layers = kv.memory.flatten(2, 3).unbind()  # [2, entries, K, D] each: keys and values
        self._copies = kv.memory.new_empty(0)
        self._entry = kv.memory.shape[4:]  # K, D
        self.budget = _GATHERED_BYTES[kv.memory.device.type] // kv.memory[0, 0, 0, 0].nbytes
        """Entries to copy at a time."""

    def reserve(self, wanted: Iterable[Tensor | slice]) -> None:
        longest = max((len(entries) for entries in wanted if isinstance(entries, Tensor)), default=0)
        size = 2 * longest * self._entry.numel()
        if self._copies.numel() < size:
            self._copies = self._copies.new_empty(size)

    def read(self, layer: int, entries: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values of n entries, [n, K, D] each, valid until the next read."""
        memory = self._layers[layer]
        if isinstance(entries, slice):
            return memory[0, entries], memory[1, entries]
        copy, size = None, 2 * len(entries) * self._entry.numel()
        if size <= self._copies.numel():
            copy = self._copies[:size].view(2, len(entries), *self._entry)
        keys, values = torch.index_select(memory, 1, entries, out=copy)
        return keys, values


def _entries(tables: Tensor, length: int, page_size: int) -> Tensor:
    """The first `length` cache entries of each row of a page table [N, pages]: [N, length] int64."""
    pages = tables[:, : -(-length // page_size)].long()
    offsets = torch.arange(page_size, device=tables.device)
    return (pages[:, :, None] * page_size + offsets).flatten(1)[:, :length]


def _run(entries: Tensor) -> Tensor | slice:
    """Entries that follow each other as a slice, which needs no copy: what a lone request on a CPU has."""
    if entries.is_cuda or not bool((entries.diff() == 1).all()):
        return entries
    return slice(int(entries[0]), int(entries[-1]) + 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention over the last two dimensions; `mask` is added to the scores once `scale` has multiplied them.

    On CUDA the formula itself, in float32. torch's fused kernel for float32 has given wrong results there with a mask
    and heads that are expanded without a copy (65 queries, 81 keys, torch 2.11).
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    return (scores.softmax(dim=-1) @ v.float()).to(q.dtype)


def group_by_length(lengths: NDArray[np.int32], budget: int) -> list[NDArray[np.int64]]:
    """Split rows into groups, longest row first, that waste little when each is padded to its longest.

    Rows of a group are at least half as long as its longest, or short; a group of several rows stays within `budget`
    entries after padding.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = -lengths[order]
    groups: list[NDArray[np.int64]] = []
    start = 0
    while start < len(order):
        longest = -int(falling[start])
        least = longest // 2 if longest > _SHORT else 0
        similar = int(np.searchsorted(falling, -least, side="right"))
        stop = min(similar, start + max(1, budget // longest))
        groups.append(order[start:stop])
        start = stop
    return groups
