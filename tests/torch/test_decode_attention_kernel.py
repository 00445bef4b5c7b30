"""The kernel that decodes, against its reference: interpreted on a CPU, compiled on a GPU."""

from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.kernels import decode_attention
from minisgl.kernels.decode_attention import DecodeAttention, decode_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter cuts off what bfloat16 can't hold


class Rows:
    """Queries, scattered pages of keys and values, and a kernel for them."""

    def __init__(self, lengths, page_size=16, num_kv_heads=2, group=2, head_size=64, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(DTYPE).to(DEVICE)

        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).int()
        self.tables = order[torch.randint(len(order), (len(lengths), max(counts) + 2), generator=generator)]
        for row, own in enumerate(order.split([*counts, 2])[:-1]):
            self.tables[row, : len(own)] = own
        self.tables = self.tables.to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.keys, self.values = (random(len(order), page_size, num_kv_heads, head_size) for _ in range(2))
        self.q = random(len(lengths), num_kv_heads * group, head_size)
        self.kernel = DecodeAttention(num_kv_heads * group, num_kv_heads, head_size, DEVICE)

    def attend(self):
        self.kernel.plan(self.lengths, self.keys.shape[1])
        inputs = self.q, self.keys, self.values, self.tables, self.lengths, 0.125
        return self.kernel(*inputs, torch.full_like(self.q, torch.nan))

    def check(self):
        got = self.attend()
        expected = decode_attention_reference(self.q, self.keys, self.values, self.tables, self.lengths, 0.125)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[DTYPE]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(got, self.attend())  # nothing is left over for the next call
        assert not self.kernel._sums[:, self.q.shape[1] // self.keys.shape[2] :].any()  # what nobody writes is read too


@pytest.fixture(params=["in order", "backwards"])
def order(request, monkeypatch):
    """The order in which the interpreter runs programs; a GPU has its own."""
    if DEVICE.type == "cuda":
        return
    builder = import_module("triton.runtime.interpreter").interpreter_builder
    place, size, count = builder.set_grid_idx, builder.set_grid_dim, [0]

    def set_size(x, y, z):
        count[0] = x
        size(x, y, z)

    if request.param == "backwards":
        monkeypatch.setattr(builder, "set_grid_dim", set_size)
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(count[0] - 1 - x, y, z))


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=7), st.sampled_from([16, 32, 64]), st.integers(0, 9))
def test_it_is_the_reference(lengths, page_size, seed):
    Rows(lengths, page_size, seed=seed).check()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("head_size", [64, 128])
def test_every_shape(group, head_size):
    Rows([70, 1, 33], num_kv_heads=1, group=group, head_size=head_size).check()


def test_pages_larger_than_a_tile():
    Rows([300, 128, 129], page_size=128).check()


def test_rows_in_parts_are_joined_whatever_ends_first(order):
    Rows([900]).check()
    Rows([300, 1, 200, 77, 500], num_kv_heads=3).check()
    rows = Rows([400, 300])
    rows.q *= 50  # parts whose scores lie far apart
    rows.check()


@pytest.mark.parametrize("per_root", [0.1, 1, 3])
def test_shares_of_any_least_size(per_root, monkeypatch):
    monkeypatch.setattr(decode_attention, "_PARTS_PER_ROOT", per_root)
    Rows([900]).check()
    Rows([500, 40], num_kv_heads=3).check()


def test_many_short_rows():
    Rows([1] * 40).check()


def test_float16():
    rows = Rows([70, 300, 5])
    rows.q, rows.keys, rows.values = rows.q.half(), rows.keys.half(), rows.values.half()
    expected = decode_attention_reference(rows.q, rows.keys, rows.values, rows.tables, rows.lengths, 0.125)
    torch.testing.assert_close(rows.attend(), expected, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("length", [1, 16, 17, 33, 60, 150])
def test_fewer_tiles_than_programs(length):
    Rows([length], num_kv_heads=1).check()


def planned(lengths, num_kv_heads):
    """Tiles of a key head by row, where shares begin among all tiles, and where the plan says that they do."""
    kernel = DecodeAttention(2 * num_kv_heads, num_kv_heads, 64, DEVICE)
    kernel.plan(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), 64)
    *places, (total, programs) = kernel._shares.tolist()
    tiles = [-(-length // 64) for length in lengths]
    assert total == sum(tiles) * num_kv_heads
    least = max(1, int(np.sqrt(np.float32(max(tiles))) / np.float32(3) + np.float32(0.5)))
    assert programs == min(len(places), total // least)
    return tiles, [total * program // programs for program in range(programs + 1)], places


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1100])
def test_shares_are_equal_however_many_rows_there_are(count):
    """Against whole numbers of Python's: lengths up to 100k tokens, more rows than are looked at together."""
    generator = torch.Generator().manual_seed(count)
    tiles, begins, places = planned(torch.randint(1, 100_000, (count,), generator=generator).tolist(), 8)
    for begin, (row, row_begin) in zip(begins[:-1], places, strict=False):
        assert row_begin == 8 * sum(tiles[:row]) <= begin < row_begin + 8 * tiles[row]


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 100), max_size=9), st.integers(1, 12_800), st.integers(1, 4), st.booleans())
def test_a_long_row_is_in_no_more_parts_than_pay_whatever_is_beside_it(monkeypatch, others, longest, heads, first):
    monkeypatch.setattr(decode_attention, "_PROGRAMS", 12)  # more in all than a row should have
    lengths = [longest, *others] if first else [*others, longest]
    tiles, begins, _ = planned(lengths, heads)
    row = lengths.index(longest)
    start = heads * sum(tiles[:row])
    for head in range(heads):
        begin = start + head * tiles[row]
        parts = sum(one < begin + tiles[row] and other > begin for one, other in pairwise(begins))
        assert parts <= max(3 * tiles[row] ** 0.5 * 1.5, 4) + 2  # a third root is rounded to whole tiles


def test_what_lies_beyond_a_row_does_not_reach_it():
    rows = Rows([70, 100, 16])
    before = rows.attend()
    own = torch.zeros(rows.keys.shape[:2], dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(rows.lengths.tolist()):
        at = torch.arange(length, device=DEVICE)
        own[rows.tables[row, at // 16].long(), at % 16] = True
    rows.keys[~own] = rows.values[~own] = torch.nan
    assert torch.equal(before, rows.attend())


def test_queries_may_lie_in_a_larger_tensor():
    rows = Rows([20, 40])
    before = rows.attend()
    wide = torch.zeros(2, 12, 64, dtype=DTYPE, device=DEVICE)
    wide[:, 3:7] = rows.q
    rows.q = wide[:, 3:7]
    out = torch.empty_like(before)
    rows.kernel(rows.q, rows.keys, rows.values, rows.tables, rows.lengths, 0.125, out)
    assert torch.equal(before, out)
