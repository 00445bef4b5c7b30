"""The kernel that gathers a decode step's inputs, against its reference: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kernels.inputs import decode_inputs_fused, decode_inputs_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = -7


def state(lengths, num_slots, width, seed=0):
    """Slots, lengths and new pages of a batch, and last tokens and pages of all slots."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=generator)[: len(lengths)].int()
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    new_pages = torch.randint(0, 2**31 - 1, (len(lengths),), generator=generator, dtype=torch.int32)
    new_pages[::2] = -1
    last_token = torch.randint(0, 150_000, (num_slots,), generator=generator)
    page_table = torch.randint(0, 2**31 - 1, (num_slots, width), generator=generator, dtype=torch.int32)
    return [t.to(DEVICE) for t in (slots, kv_len, new_pages, last_token, page_table)]


def check(slots, kv_len, new_pages, last_token, page_table, page_size):
    """Both agree, and with what they promise, row by row."""
    tables = torch.full((len(slots), page_table.shape[1]), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    expected_tables, expected_pages = tables.clone(), page_table.clone()
    got = decode_inputs_fused(slots, kv_len, new_pages, last_token, page_table, page_size, tables)
    expected = decode_inputs_reference(slots, kv_len, new_pages, last_token, expected_pages, page_size, expected_tables)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.int64 and mine.is_contiguous() and torch.equal(mine, theirs)
    assert torch.equal(page_table, expected_pages) and torch.equal(tables, expected_tables)
    for row, (slot, length, new) in enumerate(zip(slots.tolist(), kv_len.tolist(), new_pages.tolist(), strict=True)):
        used = -(-length // page_size)
        page, offset = int(page_table[slot, used - 1]), (length - 1) % page_size
        assert new in (-1, page)
        assert [int(each[row]) for each in got] == [int(last_token[slot]), length - 1, page * page_size + offset]
        assert torch.equal(tables[row, :used], page_table[slot, :used])
        assert (tables[row, used:] == UNTOUCHED).all()


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_it_is_the_reference(data):
    page_size = data.draw(st.sampled_from([1, 2, 16, 64]))
    width = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(1, width * page_size), min_size=1, max_size=9))
    num_slots = len(lengths) + data.draw(st.integers(0, 5))
    check(*state(lengths, num_slots, width, seed=data.draw(st.integers(0, 99))), page_size)


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_longer_than_a_block_are_copied_whole(page_size):
    pages = [1, 1023, 1024, 1025, 2047, 2049, 2600]
    lengths = [page_size * count for count in pages] + [page_size * 1024 + 1]
    check(*state(lengths, 12, 2600), page_size)


def test_tables_may_be_the_first_rows_and_columns_of_larger_ones():
    arguments = state([1, 33, 160], 5, 10)
    larger = torch.full((6, 14), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    expected = larger[:3, :10].clone()
    decode_inputs_reference(*arguments, 16, expected)
    decode_inputs_fused(*arguments, 16, larger[:3, :10])
    assert torch.equal(larger[:3, :10], expected)
    larger[:3, :10] = UNTOUCHED
    assert (larger == UNTOUCHED).all()


def test_rows_may_share_a_slot_as_padding_does():
    slots, kv_len, new_pages, last_token, page_table = state([5, 1, 1], 3, 4)
    slots[2], new_pages[:] = slots[1], -1
    check(slots, kv_len, new_pages, last_token, page_table, 16)


def test_no_rows_give_nothing():
    tables = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    got = decode_inputs_fused(*state([], 3, 4), 16, tables)
    assert [each.shape for each in got] == [(0,)] * 3


@pytest.mark.gpu
def test_a_graph_replays_it_with_new_values():
    inputs = state([40_000, 17, 1, 16], 300, 2600)
    tables = torch.full((4, 2600), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    decode_inputs_fused(*inputs, 16, tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode_inputs_fused(*inputs, 16, tables)
    for seed, lengths in enumerate(([5, 2600 * 16, 160, 161], [1, 1, 20_000, 3])):
        fresh = state(lengths, 300, 2600, seed)
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
        tables.fill_(UNTOUCHED)
        expected_tables = tables.clone()
        graph.replay()
        expected = decode_inputs_reference(*fresh, 16, expected_tables)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
        assert torch.equal(tables, expected_tables) and torch.equal(inputs[-1], fresh[-1])


@pytest.mark.gpu
def test_the_page_table_may_have_more_than_2_31_elements():
    page_table = torch.zeros(2**31 // 2600 + 3, 2600, dtype=torch.int32, device=DEVICE)
    page_table[-1, :3] = torch.tensor([4, 5, 6], device=DEVICE)
    last_token = torch.arange(len(page_table), device=DEVICE)
    slot, length, no_page = (
        torch.tensor([each], dtype=torch.int32, device=DEVICE) for each in (len(page_table) - 1, 35, -1)
    )
    check(slot, length, no_page, last_token, page_table, 16)
