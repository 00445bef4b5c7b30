"""What a step that only decodes reads, gathered on the device: the host knows neither its tokens nor their places."""

import torch
from torch import Tensor

from minisgl.kernels.compiler import tl, triton

Inputs = tuple[Tensor, Tensor, Tensor]
"""A decode step's input_ids, positions and cache entries: int64 [B] each."""


def decode_inputs(
    slots: Tensor, kv_len: Tensor, new_pages: Tensor,
    last_token: Tensor, page_table: Tensor, page_size: int, tables: Tensor,
) -> Inputs:  # fmt: skip
    """Each row's last token, its position (the last of `kv_len`), and the cache entry where its KV belongs.

    `slots`, `kv_len` (at least 1) and `new_pages` are int32 [B]; `last_token` [slots] int64 and `page_table` [slots, W]
    int32 go by slot. A row's new page, unless it is -1, is written to the page table at the row's position. Then the
    pages that the row has are copied to its row of `tables` [B, W] int32, whose rest stays as it is.
    """
    return (decode_inputs_fused if slots.is_cuda else decode_inputs_reference)(
        slots, kv_len, new_pages, last_token, page_table, page_size, tables
    )


def decode_inputs_reference(
    slots: Tensor, kv_len: Tensor, new_pages: Tensor,
    last_token: Tensor, page_table: Tensor, page_size: int, tables: Tensor,
) -> Inputs:  # fmt: skip
    """`decode_inputs` in torch."""
    rows, positions = slots.long(), kv_len.long() - 1  # [B]
    index, begins = positions // page_size, new_pages >= 0
    page_table[rows[begins], index[begins]] = new_pages[begins]
    used = torch.arange(tables.shape[1], device=tables.device) <= index[:, None]  # [B, W]
    tables.copy_(torch.where(used, page_table[rows, : tables.shape[1]], tables))
    return last_token[rows], positions, page_table[rows, index].long() * page_size + positions % page_size


def decode_inputs_fused(
    slots: Tensor, kv_len: Tensor, new_pages: Tensor,
    last_token: Tensor, page_table: Tensor, page_size: int, tables: Tensor,
) -> Inputs:  # fmt: skip
    """`decode_inputs` in one kernel, which a CUDA graph can hold."""
    out = torch.empty(3, len(slots), dtype=torch.int64, device=slots.device)
    block = 1024  # the pages of 16k tokens, 16 tokens each, in one go
    _decode_inputs_kernel[(len(slots),)](
        slots, kv_len, new_pages, last_token, page_table, page_table.stride(0), tables, tables.stride(0), out,
        page_size, block,  # pyright: ignore[reportArgumentType]  # launches take plain numbers for constexprs
    )  # fmt: skip
    input_ids, positions, entries = out.unbind()
    return input_ids, positions, entries


if triton is not None:

    @triton.jit
    def _decode_inputs_kernel(
        slots, kv_len, new_pages, last_token, page_table, page_table_stride, tables, tables_stride, out,
        PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One row per program."""
        row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        slot = tl.load(slots + row).to(tl.int64)
        position = tl.load(kv_len + row) - 1
        last = position // PAGE_SIZE
        pages = page_table + slot * page_table_stride
        page = tl.load(new_pages + row)
        if page >= 0:
            tl.store(pages + last, page)
        else:
            page = tl.load(pages + last)
        tl.store(out + row, tl.load(last_token + slot))
        tl.store(out + rows + row, position.to(tl.int64))
        tl.store(out + 2 * rows + row, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE)
        table = tables + row * tables_stride
        first = 0
        while first < last:
            at = first + tl.arange(0, BLOCK)
            tl.store(table + at, tl.load(pages + at, mask=at < last), mask=at < last)
            first += BLOCK
        tl.store(table + last, page)
