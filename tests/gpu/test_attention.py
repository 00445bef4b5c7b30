"""Every attention backend against the reference, which the CPU tests hold against attention written out in float64."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import KVCache, PagedAttention, Shape, Step
from minisgl.attention.choose import attention, why_not
from minisgl.batch import Batch, Joins

pytestmark = pytest.mark.gpu


Row = tuple[int, int]  # query tokens, length with them


def shape(page_size: int = 64, group: int = 2, num_kv_heads: int = 2, head_size: int = 128) -> Shape:
    capability = torch.cuda.get_device_capability()
    return Shape(page_size, group * num_kv_heads, num_kv_heads, head_size, torch.bfloat16, capability)


class Rows:
    """Rows of one step whose keys and values, those of this step included, are random and in the cache.

    Pages are scattered over the pool. What a table holds beyond a row's pages is some page of another row.
    """

    def __init__(
        self, shape: Shape, decodes: Sequence[int], prefills: Sequence[Row] = (), spare_pages: int = 3
    ) -> None:
        rows = [(1, n) for n in decodes] + list(prefills)
        q_len, kv_len = (np.array(x, np.int32) for x in zip(*rows, strict=True))
        pages = -(-kv_len // shape.page_size)
        num_pages = int(pages.sum()) + spare_pages
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.shape = shape
        self.kv = KVCache(shape, 2, num_pages, torch.device("cuda"))
        order = torch.randperm(num_pages, generator=generator, device="cuda").int()
        if spare_pages > 3:
            order = torch.arange(num_pages - 1, -1, -1, device="cuda", dtype=torch.int32)  # the far end of the pool
        tables = order[torch.randint(len(order), (len(rows), int(pages.max()) + 2), generator=generator, device="cuda")]
        used = order.split([*pages.tolist(), num_pages - int(pages.sum())])
        for row, own in enumerate(used[:-1]):
            tables[row, : len(own)] = own
        offsets = torch.arange(shape.page_size, device="cuda")
        for layer in range(2):
            for cache in self.kv.entries(layer):
                for own, length in zip(used[:-1], kv_len.tolist(), strict=True):
                    entries = (own[:, None].long() * shape.page_size + offsets).flatten()[:length]
                    size = (length, shape.num_kv_heads, shape.head_size)
                    cache[entries] = torch.randn(size, generator=generator, device="cuda").bfloat16()
        batch = Batch(
            slots=np.arange(len(rows), dtype=np.int32),
            q_len=q_len,
            kv_len=kv_len,
            num_decode=len(decodes),
            input_ids=np.zeros(int(q_len[len(decodes) :].sum()), np.int32),
            samples=np.ones(len(rows), np.bool_),
            page_writes=np.empty((0, 3), np.int32),
            joins=Joins.greedy(np.empty(0, np.int32)),
        )
        none = torch.empty(0, dtype=torch.int64, device="cuda")
        self.step = Step(batch, tables, torch.from_numpy(kv_len).cuda(), none, none)
        heads = (int(q_len.sum()), shape.num_heads, shape.head_size)
        self.q = torch.randn(heads, generator=generator, device="cuda").bfloat16()

    def attend(self, prefill: str, decode: str) -> Tensor:
        kernels = attention((prefill, decode), self.kv, self.shape)
        kernels.begin(self.step)
        torch.cuda.synchronize()  # in a model there is a kernel between the two
        kernels.forward(0, self.q)
        return kernels.forward(1, self.q)

    def check(self, prefill: str, decode: str) -> None:
        for name, phase in ((prefill, "prefill"), (decode, "decode")):
            reason = why_not(name, self.shape, phase)
            if reason and "not installed" in reason:
                pytest.skip(reason)
            assert reason is None
        expected = self.attend("reference", "reference").float()
        got = self.attend(prefill, decode).float()
        assert not got.isnan().any()
        # The reference rounds once, at its end; kernels round probabilities to bfloat16 as well.
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().mean()) + 4e-3)


BACKENDS = [("flashinfer", "flashinfer"), ("flashinfer", "triton"), ("flash", "flashinfer")]


@pytest.mark.parametrize(
    ("backends", "page_size"), [(b, p) for b in BACKENDS for p in (1, 16, 64) if "triton" not in b or p >= 16]
)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("head_size", [64, 128])
def test_mixed_steps_of_every_shape(backends, page_size: int, group: int, head_size: int) -> None:
    rows = Rows(
        shape(page_size, group, head_size=head_size),
        decodes=[1, 2, 63, 64, 65, 129, 700, 1500],
        prefills=[(1, 1), (5, 5), (64, 64), (65, 65), (200, 200), (3, 67), (1, 128), (130, 333), (64, 1000)],
    )
    rows.check(*backends)


@pytest.mark.parametrize("backends", BACKENDS, ids=",".join)
@pytest.mark.parametrize("page_size", [16, 64])
def test_contexts_up_to_32k(backends, page_size: int) -> None:
    lengths = [32_768, 32_767, 20_001, 7]
    Rows(shape(page_size), lengths, [(257, 32_768), (3000, 3000), (1, 30_000)]).check(*backends)


@pytest.mark.parametrize("backends", BACKENDS, ids=",".join)
def test_one_kind_of_rows_alone(backends) -> None:
    Rows(shape(), [300, 5]).check(*backends)
    Rows(shape(), [], [(300, 300), (17, 40)]).check(*backends)


@pytest.mark.parametrize("backends", BACKENDS, ids=",".join)
@pytest.mark.parametrize("rows", [256, 257])
def test_many_rows(backends, rows: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 1600, rows).tolist()
    Rows(shape(num_kv_heads=8), lengths, [(100, 900)] * 3).check(*backends)


@pytest.mark.parametrize("backends", BACKENDS, ids=",".join)
@pytest.mark.parametrize("page_size", [16, 64])
def test_offsets_beyond_32_bits(backends, page_size: int) -> None:
    spare = (2**31 // (8 * 128) + 2**16) // page_size  # so that the rows' entries lie beyond 2**31 elements
    Rows(shape(page_size, num_kv_heads=8), [700, 65], [(300, 300), (40, 400)], spare).check(*backends)


@pytest.mark.parametrize(
    ("decode", "page_size"), [("flashinfer", 1), ("flashinfer", 16), ("flashinfer", 64), ("triton", 16), ("triton", 64)]
)
def test_keys_beyond_a_request_do_not_reach_it(decode: str, page_size: int) -> None:
    """Neither other pages nor what an earlier request left in the rest of its last page, were it NaN."""
    lengths = [70, 100, 100]
    rows = Rows(shape(page_size), lengths[:2], [(40, lengths[2])])
    before = rows.attend("flashinfer", decode).clone()
    own = torch.zeros(rows.kv.memory.shape[2] * page_size, dtype=torch.bool, device="cuda")
    for row, length in enumerate(lengths):
        at = torch.arange(length, device="cuda")
        own[rows.step.tables[row, at // page_size].long() * page_size + at % page_size] = True
    for layer in range(2):
        for cache in rows.kv.entries(layer):
            cache[~own] = torch.nan
    assert torch.equal(before, rows.attend("flashinfer", decode))


@pytest.mark.parametrize("page_size", [1, 64])
def test_steps_that_are_planned_while_earlier_ones_wait_do_not_mix(page_size: int) -> None:
    """The host is steps ahead of a busy device; each step has other lengths."""
    rows = Rows(shape(page_size), [1500, 900, 40], [(100, 700), (30, 30)])
    steps = []
    for cut in range(6):
        kv_len = rows.step.batch.kv_len - cut * np.array([7, 5, 3, 11, 0], np.int32)
        batch = replace(rows.step.batch, kv_len=kv_len)
        steps.append(replace(rows.step, batch=batch, kv_len=torch.from_numpy(kv_len).cuda()))
    kernels = attention(("flashinfer", "flashinfer"), rows.kv, rows.shape)
    expected = []
    for step in steps:
        kernels.begin(step)
        expected.append(kernels.forward(0, rows.q))
        torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device="cuda")
    got = []
    for step in steps:
        busy = busy @ busy * 1e-4
        kernels.begin(step)
        got.append(kernels.forward(0, rows.q))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_storing_reaches_entries_beyond_32_bits() -> None:
    from minisgl.kernels.rotary import Rotation, rotate_and_store

    model = shape(num_kv_heads=8)
    kv = KVCache(model, 1, 2**31 // (8 * 128 * 64) + 10, torch.device("cuda"))
    entries = torch.tensor([0, kv.spare_page * 64 + 63, kv.spare_page * 64 - 1], device="cuda")
    heads = torch.randn(3, 32, 128, device="cuda", dtype=torch.bfloat16)
    rotation = Rotation(torch.cat([torch.ones(1, 64), torch.zeros(1, 64)], 1).cuda(), torch.zeros_like(entries))
    keys, values = kv.entries(0)
    q = rotate_and_store(heads, rotation, None, keys, values, entries)
    assert torch.equal(q, heads[:, :16])
    assert torch.equal(keys[entries], heads[:, 16:24]) and torch.equal(values[entries], heads[:, 24:])
    assert isinstance(attention(("flashinfer", "flashinfer"), kv, model), PagedAttention)
