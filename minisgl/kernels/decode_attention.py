"""Attention of one new token a row to all that its request has, over paged keys and values.

What it costs is reading the cache. Split over a fixed number of programs, the tiles of all rows and key heads are read
in equal shares, whatever the rows' lengths are; where a share begins or ends within a row, the last program to finish
there joins the parts (stream-K, Osama et al., arXiv:2301.03598; the parts' softmax as in Milakov & Gimelshein,
arXiv:1805.02867). Of a row's last page no more is read than there are tokens.
"""

import torch
from torch import Tensor

from minisgl.kernels.compiler import dependent_launch, power_of_two, tl, triton

_PROGRAMS = 3  # a processor: so many fit beside each other, with a tile of 64 keys and values each
_TILE = 64  # tokens
_REGISTERS = 168  # a thread: what lets so many programs fit
_ROWS = 256  # whose lengths are looked at together
_LEAST_GROUP = 16  # rows of a matrix product
_JOINED, _MOST_JOINED = 32, 8  # parts at once: those of so many queries, and so many at most, for the registers' sake
_PARTS_PER_ROOT = 3  # of a row, to the square root of its tiles, at most: reading it takes as long as joining it then
_LOG2_E = 1.4426950408889634


class DecodeAttention:
    """The kernel with its memory for shares and parts, which calls in turn on one stream share."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, device: torch.device) -> None:
        self._num_kv_heads = num_kv_heads
        self._programs = _PROGRAMS * _processors(device)
        self._queries = power_of_two(num_heads // num_kv_heads)
        group = max(self._queries, _LEAST_GROUP)
        self._shares = torch.empty(self._programs + 1, 2, dtype=torch.int64, device=device)
        parts = 2 * self._programs, group  # a program has two at most: where its share begins, and where it ends
        self._sums = torch.zeros(*parts, head_size, device=device)  # of queries that are not there they stay 0
        self._scales = torch.empty(*parts, 2, device=device)  # largest score, and sum of exponentials
        # How many parts of the one split head that begins in a program's share are there; 0 between calls.
        self._done = torch.zeros(self._programs, dtype=torch.int32, device=device)

    def plan(self, lengths: Tensor, page_size: int) -> None:
        """Share the rows' tiles out, once a step, on the device: `lengths` int32 [B], each at least 1.

        Between this and the first call there must be a kernel that is launched as usual (see `dependent_launch`).
        """
        _share_kernel[(self._programs,)](
            lengths, len(lengths), self._num_kv_heads, self._shares,
            _PARTS_PER_ROOT, min(_TILE, page_size), _ROWS,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """`decode_attention_reference` in one kernel, in bfloat16 or float16; `lengths` are those of the plan."""
        _, num_heads, head_size = q.shape
        _, page_size, num_kv_heads, _ = keys.shape
        parts = max(2, min(_MOST_JOINED, _JOINED // self._queries))
        page_stride, entry_stride, head_stride, _ = keys.stride()
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        assert q.stride(1) == head_size and q.stride(2) == 1 and out.is_contiguous()
        pdl, options = dependent_launch(q.device)
        _decode_attention_kernel[(self._programs,)](
            q, q.stride(0), keys, values, page_stride, entry_stride, head_stride,
            tables, tables.stride(0), lengths, self._shares, out, self._sums, self._scales, self._done, scale * _LOG2_E,
            num_kv_heads, num_heads // num_kv_heads,
            self._sums.shape[1], self._queries, parts, head_size,  # pyright: ignore[reportArgumentType]
            min(_TILE, page_size), page_size, pdl,  # pyright: ignore[reportArgumentType]
            num_warps=4, maxnreg=_REGISTERS, **options,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
        return out


def decode_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Queries [B, H, D] over the cache by page, keys and values [pages, page_size, K, D]: [B, H, D].

    Row b has `lengths[b]` tokens (at least 1, int32), in the pages that `tables[b]` [B, W] int32 lists in order.
    """
    group = q.shape[1] // keys.shape[2]
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        k, v = (c[tables[row].long()].flatten(0, 1)[:length].float() for c in (keys, values))  # [N, K, D]
        heads = q[row].float().unflatten(0, (-1, group))  # [K, G, D]
        weights = torch.softmax(scale * torch.einsum("kgd,nkd->kgn", heads, k), dim=-1)
        out[row] = torch.einsum("kgn,nkd->kgd", weights, v).flatten(0, 1).to(out.dtype)
    return out


def _processors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 5
    )  # any, for tests


if triton is not None:

    @triton.jit
    def _count_tiles(lengths, first, rows, TILE: tl.constexpr, ROWS: tl.constexpr):
        """Tiles of a block of rows, for one key head; [ROWS] int64, 0 where there is no row."""
        at = first + tl.arange(0, ROWS)
        return ((tl.load(lengths + at, mask=at < rows, other=0) + TILE - 1) // TILE).to(tl.int64)

    @triton.jit
    def _part_of(program, first):
        """Where a program has its part of a head that begins in the share of program `first`, as that one's last."""
        return 2 * program + (program == first)

    @triton.jit
    def _join(
        part_sums, part_scales, first, last,
        GROUP: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    ):  # fmt: skip
        """What the parts of programs `first` to `last` make together, [QUERIES, D]; PARTS of them are read at once.

        Each thread adds up elements of its own. That is why this is a `for` and no part a tensor of parts: through a
        `while` Triton does not see which layout is wanted, and each part's scales would pass through shared memory.
        """
        query = tl.arange(0, QUERIES)
        at = query[:, None] * D + tl.arange(0, D)[None, :]
        top = tl.full((QUERIES,), -1e30, tl.float32)  # largest score
        total = tl.zeros((QUERIES,), tl.float32)  # sum of exponentials
        sums = tl.zeros((QUERIES, D), tl.float32)  # weighted values
        for begin in range(first, last + 1, PARTS):
            new_top = top
            for ahead in tl.static_range(PARTS):
                part = _part_of(tl.minimum(begin + ahead, last), first) * GROUP
                new_top = tl.maximum(new_top, tl.load(part_scales + 2 * (part + query)))
            shrink = tl.exp2(top - new_top)
            total, sums = total * shrink, sums * shrink[:, None]
            for ahead in tl.static_range(PARTS):
                part = _part_of(tl.minimum(begin + ahead, last), first) * GROUP
                weight = tl.exp2(tl.load(part_scales + 2 * (part + query)) - new_top)
                weight = tl.where(begin + ahead <= last, weight, 0)
                total += tl.load(part_scales + 2 * (part + query) + 1) * weight
                sums += tl.load(part_sums + part * D + at) * weight[:, None]
            top = new_top
        return sums / total[:, None]

    @triton.jit
    def _fetch(pointers):
        """Start to bring what lies there nearer, into the L2 cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["rows", "K"])
    def _share_kernel(
        lengths, rows, K, shares, PER_ROOT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
    ):  # fmt: skip
        """Where a program's share begins: the row, and the row's first tile; behind all, how many tiles and shares."""
        program = tl.program_id(0).to(tl.int64)
        total_tiles = tl.zeros((), tl.int64)
        longest = tl.zeros((), tl.int64)
        block = 0
        while block < rows:
            tiles = _count_tiles(lengths, block, rows, TILE, ROWS)
            total_tiles += tl.sum(tiles, axis=0) * K
            longest = tl.maximum(longest, tl.max(tiles, axis=0))
            block += ROWS
        # A row in n parts is read in a time as tiles / n, and joined in one as n: least where n is as tiles' root.
        least = tl.maximum((tl.sqrt(longest.to(tl.float32)) / PER_ROOT + 0.5).to(tl.int64), 1)
        programs = tl.minimum(tl.num_programs(0), total_tiles // least)  # that have a share
        begin = total_tiles * program // programs
        row = tl.zeros((), tl.int64)  # that holds the tile `begin`; beyond all where there is no share
        row_begin = tl.zeros((), tl.int64)  # its first tile
        block_begin = tl.zeros((), tl.int64)
        block = 0
        while block < rows:
            tiles = _count_tiles(lengths, block, rows, TILE, ROWS)
            before = block_begin + tl.cumsum(tiles, axis=0) * K <= begin
            row += tl.sum(before.to(tl.int64), axis=0)
            row_begin += tl.sum(tl.where(before, tiles, 0), axis=0) * K
            block_begin += tl.sum(tiles, axis=0) * K
            block += ROWS
        tl.store(shares + 2 * program, row)
        tl.store(shares + 2 * program + 1, row_begin)
        if program == 0:
            tl.store(shares + 2 * tl.num_programs(0), total_tiles)
            tl.store(shares + 2 * tl.num_programs(0) + 1, programs)

    @triton.jit(do_not_specialize=["table_stride", "K", "G"])
    def _decode_attention_kernel(
        q, q_stride, keys, values, page_stride, entry_stride, head_stride, tables, table_stride, lengths, shares,
        out, part_sums, part_scales, done, scale, K, G,
        GROUP: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
        PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """A share of all tiles per program; they count by row, then key head, then place."""
        program = tl.program_id(0).to(tl.int64)
        # Not waited for: between the plan and a layer there is a kernel that is launched as usual, the embedding.
        of_all = shares + 2 * tl.num_programs(0)
        total_tiles, programs = tl.load(of_all), tl.load(of_all + 1)
        row, row_begin = tl.load(shares + 2 * program), tl.load(shares + 2 * program + 1)
        begin = total_tiles * program // programs
        end = tl.minimum(total_tiles * (program + 1) // programs, total_tiles)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]
            if begin < end:  # what is not there yet, the newest token's, passes through the L2 as well
                count = (tl.load(lengths + row) + TILE - 1) // TILE
                first = (begin - row_begin) % count
                page = tl.load(tables + row * table_stride + first * TILE // PAGE_SIZE).to(tl.int64)
                place = page * page_stride + first * TILE % PAGE_SIZE * entry_stride
                place += (begin - row_begin) // count * head_stride
                line = tl.arange(0, TILE)[:, None] * entry_stride + tl.arange(0, D // 64)[None, :] * 64
                _fetch(keys + place + line)
                _fetch(values + place + line)
            tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]

        query, lane, token = tl.arange(0, GROUP)[:, None], tl.arange(0, D)[None, :], tl.arange(0, TILE)
        exists = query < G
        while begin < end:
            length = tl.load(lengths + row)
            count = (length + TILE - 1) // TILE
            head = (begin - row_begin) // count
            head_begin = row_begin + head * count
            first = (begin - head_begin).to(tl.int32)
            stop = tl.minimum(count, first + end - begin).to(tl.int32)
            at_query = (head * G + query) * D + lane
            heads = tl.load(q + row * q_stride + at_query, mask=exists, other=0)  # [G, D]
            source = head * head_stride + token[:, None] * entry_stride + lane
            top = tl.full((GROUP,), -1e30, tl.float32)
            total = tl.zeros((GROUP,), tl.float32)
            sums = tl.zeros((GROUP, D), tl.float32)
            for tile in tl.range(first, stop, num_stages=2):
                page = tl.load(tables + row * table_stride + tile * TILE // PAGE_SIZE).to(tl.int64)
                place = source + page * page_stride + tile * TILE % PAGE_SIZE * entry_stride
                live = token < length - tile * TILE
                k = tl.load(keys + place, mask=live[:, None], other=0)
                v = tl.load(values + place, mask=live[:, None], other=0)
                scores = tl.where(live[None, :], tl.dot(heads, tl.trans(k)) * scale, -1e30)  # [G, tile]
                new_top = tl.maximum(top, tl.max(scores, axis=1))
                weights = tl.exp2(scores - new_top[:, None])
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.sum(weights, axis=1)
                sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None])
                top = new_top

            target = out + row * (K * G * D) + at_query
            if stop - first == count:
                tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), mask=exists)
            else:
                part = (2 * program + (first == 0)) * GROUP
                tl.store(part_sums + (part + query) * D + lane, sums, mask=exists)
                of_query = (part + tl.arange(0, GROUP)) * 2
                tl.store(part_scales + of_query, top)
                tl.store(part_scales + of_query + 1, total)
                # The programs whose shares hold its first tile and its last.
                from_program = ((head_begin + 1) * programs - 1) // total_tiles
                to_program = ((head_begin + count) * programs - 1) // total_tiles
                tl.debug_barrier()  # every thread's part is written before the program says so
                others = tl.atomic_add(done + from_program, 1, sem="acq_rel")
                if others == to_program - from_program:
                    tl.debug_barrier()
                    first_part, last_part = from_program.to(tl.int32), to_program.to(tl.int32)
                    joined = _join(part_sums, part_scales, first_part, last_part, GROUP, QUERIES, PARTS, D)
                    joined_query = tl.arange(0, QUERIES)[:, None]  # fewer than of a matrix product
                    joined_target = out + row * (K * G * D) + (head * G + joined_query) * D + lane
                    tl.store(joined_target, joined.to(out.dtype.element_ty), mask=joined_query < G)
                    tl.store(done + from_program, 0)
            begin += stop - first
            if begin == row_begin + K * count:
                row_begin = begin
                row += 1
