"""Attention in plain torch: the oracle that kernels are tested against, and what runs on a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from minisgl.attention.base import Step

_GATHERED_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # keys, or values, copied out of the pages at a time
_QUERY_BLOCK = 256  # queries that share a causal mask
_SHORT = 128  # rows up to this length share a group, whatever the ratio of their lengths


def supports(
    page_size: int, head_size: int, group: int, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """None, for there is no shape, dtype or device that this backend cannot run."""
    del page_size, head_size, group, dtype, capability
    return None


@dataclass(frozen=True, eq=False)
class _Decodes:
    """Decode rows of similar length, attended to together."""

    rows: Tensor | None  # [N] int64, rows of the batch and thereby query tokens; None: all of them, in order
    entries: Tensor | slice  # [N * L] int64, cache entries of each row, padded to the longest with its own first one
    mask: Tensor | None  # [N, 1, 1, L], 0 or -inf at padding; None where there is no padding


@dataclass(frozen=True, eq=False)
class _Prefill:
    """The query tokens of one prefill row."""

    start: int
    stop: int
    cached: int  # tokens before them that have KV already
    entries: Tensor | slice | None  # [kv_len] int64; None if nothing is cached


@dataclass(frozen=True, eq=False)
class _Plan:
    written: Tensor  # [T] int64, cache entry of each query token
    decodes: list[_Decodes]
    prefills: list[_Prefill]


class ReferenceAttention:
    """Owns the KV memory. A cache entry is a token's place in it: page * page_size + offset.

    Entries are read by the requests whose table names them and within their length only, so whatever else lies in the
    memory, NaN included, cannot reach a result: the memory is never cleared.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        """`scale` multiplies the scores; None is 1 / sqrt(head_size)."""
        self.kv = torch.empty(num_layers, 2, num_pages, page_size, num_kv_heads, head_size, dtype=dtype, device=device)
        self._entries_of = [(keys, values) for keys, values in self.kv.flatten(2, 3)]  # [P * page_size, K, D] each
        self.scale = scale
        self._plan: _Plan | None = None
        self._gathered = self.kv.new_empty(2, 0, num_kv_heads, head_size)  # reused by every layer and step

    def plan(self, step: Step) -> None:
        """Work out once a step which cache entries each row writes and reads."""
        page_size = self.kv.shape[3]
        pages = step.page_table[step.token_slots, step.positions // page_size].long()  # [T]
        decodes, prefills = list(self._plan_decodes(step)), list(self._plan_prefills(step))
        self._plan = _Plan(pages * page_size + step.positions % page_size, decodes, prefills)

        gathers = [each.entries for each in (*decodes, *prefills) if isinstance(each.entries, Tensor)]
        longest = max(map(len, gathers), default=0)
        if self._gathered.shape[1] < longest:
            self._gathered = self.kv.new_empty(2, longest, *self.kv.shape[4:])

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally to all that each request has.

        q is [T, H, D], k and v are [T, K, D], all of the cache's dtype; returns [T, H, D].
        """
        plan = self._plan
        assert plan is not None, "plan() comes before forward()"
        cache = self._entries_of[layer]
        cache[0].index_copy_(0, plan.written, k)
        cache[1].index_copy_(0, plan.written, v)

        if plan.decodes and plan.decodes[0].rows is None:
            return self._decode(plan.decodes[0], q, cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, H, D]
        for group in plan.decodes:
            assert group.rows is not None
            out.index_copy_(0, group.rows, self._decode(group, q[group.rows], cache))
        for row in plan.prefills:
            tokens = slice(row.start, row.stop)
            keys, values = (k[tokens], v[tokens]) if row.entries is None else self._gather(cache, row.entries)
            self._prefill(row.cached, q[tokens], keys, values, out[tokens])
        return out

    def _plan_decodes(self, step: Step) -> Iterator[_Decodes]:
        kv_len = step.batch.kv_len[: step.batch.num_decode]
        entry_bytes = self.kv[0, 0, 0, 0].nbytes
        budget = _GATHERED_BYTES[self.kv.device.type] // entry_bytes
        for group in group_by_length(kv_len, budget):
            longest = int(kv_len[group[0]])
            rows = torch.from_numpy(group).to(self.kv.device)  # [N]
            entries = self._entries(step, rows, longest)  # [N, L]
            mask = None
            if kv_len[group[-1]] < longest:
                padding = torch.arange(longest, device=self.kv.device) >= step.kv_len[rows, None]  # [N, L]
                entries = torch.where(padding, entries[:, :1], entries)
                mask = torch.zeros_like(padding, dtype=self.kv.dtype).masked_fill_(padding, -torch.inf)[:, None, None]
            whole = len(rows) == len(step.positions) and bool((np.diff(group) == 1).all())
            yield _Decodes(None if whole else rows, _run(entries.flatten()), mask)

    def _plan_prefills(self, step: Step) -> Iterator[_Prefill]:
        batch = step.batch
        stops = np.cumsum(batch.q_len)
        for row in range(batch.num_decode, len(batch.slots)):
            stop, q_len, kv_len = int(stops[row]), int(batch.q_len[row]), int(batch.kv_len[row])
            entries = None
            if kv_len > q_len:
                entries = _run(self._entries(step, torch.tensor([row], device=self.kv.device), kv_len)[0])
            yield _Prefill(stop - q_len, stop, kv_len - q_len, entries)

    def _entries(self, step: Step, rows: Tensor, length: int) -> Tensor:
        """The first `length` cache entries of each row, as its page table has them: [N, length] int64."""
        page_size = self.kv.shape[3]
        pages = step.page_table[step.slots[rows], : -(-length // page_size)].long()  # [N, pages]
        offsets = torch.arange(page_size, device=self.kv.device)
        return (pages[:, :, None] * page_size + offsets).flatten(1)[:, :length]

    def _gather(self, cache: tuple[Tensor, Tensor], entries: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values of n entries, [n, K, D] each, valid until the next gather."""
        if isinstance(entries, slice):
            return cache[0][entries], cache[1][entries]
        keys, values = self._gathered[:, : len(entries)]
        return (
            torch.index_select(cache[0], 0, entries, out=keys),
            torch.index_select(cache[1], 0, entries, out=values),
        )

    def _decode(self, group: _Decodes, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """One query token a row: [N, H, D] to [N, H, D]. The H / K query heads of a key head are its queries."""
        n, num_kv_heads = len(q), cache[0].shape[1]
        k, v = (
            gathered.unflatten(0, (n, -1)).transpose(1, 2)  # [N, K, L, D]
            for gathered in self._gather(cache, group.entries)
        )
        q = q.unflatten(1, (num_kv_heads, -1))  # [N, K, H / K, D]
        return attend(q, k, v, group.mask, self.scale).flatten(1, 2)

    def _prefill(self, cached: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Causal attention of one row's queries [q_len, H, D] to its `cached + q_len` keys, written to `out`.

        Queries go in blocks, so that no mask grows with their square; on a CPU with nothing cached none is needed.
        """
        num_kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        q, out = (x.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3) for x in (q, out))  # [K, H / K, q_len, D]
        k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))  # [K, H / K, kv_len, D], no copy
        if cached == 0 and not q.is_cuda:
            out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale))
            return
        for start in range(0, q.shape[2], _QUERY_BLOCK):
            stop = min(start + _QUERY_BLOCK, q.shape[2])
            seen = cached + stop
            hidden = torch.ones(stop - start, seen, dtype=torch.bool, device=q.device).triu(cached + start + 1)
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
            out[:, :, start:stop] = attend(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], mask, self.scale)


def _run(entries: Tensor) -> Tensor | slice:
    """Entries that follow each other as a slice, which needs no copy: what a lone request on a CPU has."""
    if entries.is_cuda or not bool((entries.diff() == 1).all()):
        return entries
    return slice(int(entries[0]), int(entries[-1]) + 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention over the last two dimensions; `mask` is added to the scores, `scale` None is 1 / sqrt(D).

    On CUDA the formula itself, in float32. torch's fused kernel for float32 has given wrong results there with a mask
    and heads that are expanded without a copy (65 queries, 81 keys, torch 2.11).
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q.float() @ k.float().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
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
