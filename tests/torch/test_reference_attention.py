"""The reference backend against attention written out, one query head of one token at a time, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.base import KVCache, PagedAttention, Shape, Step
from minisgl.attention.reference import group_by_length, phases, supports

MakeStep = Callable[..., tuple[Step, Tensor]]
Row = tuple[int, int, int]  # slot, first token, end of the tokens computed in this step

NUM_LAYERS = 2


class Requests:
    """Requests whose tokens have random queries, keys and values, and a backend whose memory starts as NaN.

    Page tables hold nonsense beyond a request's own pages.
    """

    def __init__(
        self,
        make_step: MakeStep,
        lengths: Sequence[int],
        *,
        page_size: int = 4,
        num_kv_heads: int = 2,
        group: int = 2,
        head_size: int = 16,
        dtype: torch.dtype = torch.float32,
        scale: float | None = None,
        device: str = "cpu",
        spare_pages: int = 3,
    ) -> None:
        self.make_step, self.device, self.static = make_step, torch.device(device), False
        self.scale = head_size**-0.5 if scale is None else scale
        pages = [-(-length // page_size) for length in lengths]
        num_pages = sum(pages) + spare_pages
        shape = Shape(page_size, num_kv_heads * group, num_kv_heads, head_size, dtype, None)
        self.kv = KVCache(shape, NUM_LAYERS, num_pages, self.device)
        self.backend = PagedAttention(self.kv, *phases(self.kv, shape, self.scale))
        self.kv.memory.fill_(torch.nan)
        generator = torch.Generator().manual_seed(0)
        shuffled = torch.randperm(num_pages, generator=generator).int()
        self.page_table = torch.full((len(lengths) + 1, max(pages) + 2), 2**30, dtype=torch.int32)
        for slot, count in enumerate(pages):
            self.page_table[slot, :count], shuffled = shuffled[:count], shuffled[count:]

        def random(heads: int) -> list[Tensor]:  # [layer, length, heads, D] for each request
            return [torch.randn(NUM_LAYERS, n, heads, head_size, generator=generator).to(dtype) for n in lengths]

        self.page_table = self.page_table.to(device)
        self.q, self.k, self.v = random(num_kv_heads * group), random(num_kv_heads), random(num_kv_heads)

    def run(self, rows: Sequence[Row], num_decode: int = 0) -> list[Tensor]:
        """What one step gives each row: [layer, q_len, H, D]."""
        tokens = [(s, range(a, b), b) for s, a, b in rows]
        step, _ = self.make_step(self.page_table, self.kv.page_size, tokens, num_decode)
        self.backend.begin(replace(step, static=self.static))
        layers = []
        for layer in range(NUM_LAYERS):
            q, k, v = (torch.cat([x[slot][layer, a:b] for slot, a, b in rows]) for x in (self.q, self.k, self.v))
            for cache, new in zip(self.kv.entries(layer), (k, v), strict=True):
                cache.index_copy_(0, step.entries, new.to(self.device))
            layers.append(self.backend.forward(layer, q.to(self.device)).cpu())
        return list(torch.stack(layers).split([stop - start for _, start, stop in rows], dim=1))

    def written_out(self, slot: int, start: int, stop: int) -> Tensor:
        """What they must be."""
        q, k, v = (x[slot].double() for x in (self.q, self.k, self.v))
        group = q.shape[2] // k.shape[2]
        out = torch.empty_like(q[:, start:stop])
        for token in range(start, stop):
            for head in range(q.shape[2]):
                seen_k, seen_v = (x[:, : token + 1, head // group] for x in (k, v))  # [layer, token + 1, D]
                scores = torch.einsum("ld,lnd->ln", q[:, token, head], seen_k) * self.scale
                out[:, token - start, head] = torch.einsum("ln,lnd->ld", scores.softmax(-1), seen_v)
        return out

    def check(self, rows: Sequence[Row], num_decode: int = 0, atol: float = 2e-6) -> None:
        for row, got in zip(rows, self.run(rows, num_decode), strict=True):
            torch.testing.assert_close(got.double(), self.written_out(*row), rtol=0, atol=atol)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decodes_chunks_and_whole_prompts_share_a_step(make_step: MakeStep, page_size: int) -> None:
    requests = Requests(make_step, [1, 68, 40, 66, 20, 64], page_size=page_size)
    requests.check([(1, 0, 64), (2, 0, 16), (3, 0, 65), (5, 0, 63)])
    requests.check([(3, 65, 66), (1, 64, 65), (2, 16, 40), (0, 0, 1), (4, 0, 20), (5, 63, 64)], num_decode=2)
    requests.check([(1, 65, 66)], num_decode=1)
    requests.check([(1, 66, 68)])


@pytest.mark.parametrize("group", range(1, 9))
def test_every_number_of_query_heads_per_key_head_gives_exact_attention(make_step: MakeStep, group: int) -> None:
    requests = Requests(make_step, [9, 6], num_kv_heads=3, group=group)
    requests.check([(0, 0, 5), (1, 0, 3)])
    requests.check([(0, 5, 6), (1, 3, 6)], num_decode=1)


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_size_and_dtype_gives_attention_within_its_rounding(
    make_step: MakeStep, head_size: int, dtype: torch.dtype
) -> None:
    requests = Requests(make_step, [9, 7], head_size=head_size, dtype=dtype)
    atol = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    requests.check([(0, 0, 5), (1, 0, 3)], atol=atol)
    requests.check([(0, 5, 6), (1, 3, 6)], num_decode=1, atol=atol)
    requests.check([(0, 6, 7), (1, 6, 7)], num_decode=2, atol=atol)


def test_a_given_scale_replaces_the_usual_one_in_every_phase(make_step: MakeStep) -> None:
    requests = Requests(make_step, [9, 6], scale=0.9)
    requests.check([(0, 0, 5), (1, 0, 3)])
    requests.check([(0, 5, 6), (1, 3, 6)], num_decode=1)


def test_a_long_chunk_behind_a_cached_prefix_is_causal_across_its_query_blocks(make_step: MakeStep) -> None:
    requests = Requests(make_step, [650], page_size=16, num_kv_heads=1, group=1, head_size=8)
    requests.check([(0, 0, 50)])
    requests.check([(0, 50, 650)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cached", [0, 1, 16, 63, 100])
def test_chunks_of_every_size_behind_every_prefix(
    make_step: MakeStep, cached: int, dtype: torch.dtype, device: str
) -> None:
    sizes = [1, 2, 5, 16, 63, 64, 65, 66, 127, 129]
    requests = Requests(
        make_step, [cached + n for n in sizes], page_size=16, num_kv_heads=1, dtype=dtype, device=device
    )
    if cached:
        requests.run([(slot, 0, cached) for slot in range(len(sizes))])
    rows = [(slot, cached, cached + n) for slot, n in enumerate(sizes)]
    requests.check(rows, atol=2e-6 if dtype == torch.float32 else 2e-2)


def test_a_row_gets_the_same_whatever_runs_beside_it(make_step: MakeStep) -> None:
    lengths = [300, 7, 150, 31, 200, 5]
    requests = Requests(make_step, lengths)
    requests.run([(slot, 0, length - 1) for slot, length in enumerate(lengths)])
    rows = [(slot, length - 1, length) for slot, length in enumerate(lengths)]
    together = requests.run([*rows[:4], rows[5], rows[4]], num_decode=5)
    for row, got in zip([*rows[:4], rows[5]], together, strict=False):
        torch.testing.assert_close(got, requests.run([row], num_decode=1)[0], rtol=0, atol=1e-6)


def test_many_decode_rows_of_very_different_lengths_are_each_exact(make_step: MakeStep) -> None:
    lengths = [1, 2, 3, 400, 5, 130, 129, 128, 64, 270]
    requests = Requests(make_step, lengths, page_size=16, num_kv_heads=1)
    requests.run([(slot, 0, length - 1) for slot, length in enumerate(lengths) if length > 1])
    requests.check([(slot, length - 1, length) for slot, length in enumerate(lengths)], num_decode=len(lengths))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spare_pages", [100, 1000])  # copies of few rows are kept, or of all
def test_rows_that_go_on_are_exact_whoever_comes_goes_and_pauses_beside_them(
    make_step: MakeStep, spare_pages: int, seed: int
) -> None:
    random = Random(seed)
    requests = Requests(make_step, [90] * 5, num_kv_heads=1, head_size=8, spare_pages=spare_pages)
    lengths = [0] * 5  # tokens with KV; 0: nobody is in the slot
    for step in range(110):
        old = [slot for slot in range(5) if 0 < lengths[slot] < 90 and random.random() < 0.98]
        rows = [(slot, lengths[slot], lengths[slot] + 1) for slot in old]
        if not rows or random.random() < 0.04:
            slot = random.randrange(5)
            rows = [row for row in rows if row[0] != slot and step % 2]  # some steps have nothing but prompts
            for each in (requests.q, requests.k, requests.v):  # of somebody else, in the same pages
                each[slot] = torch.randn(each[slot].shape, generator=torch.Generator().manual_seed(step))
            rows.append((slot, 0, lengths[slot] if 0 < lengths[slot] < 90 else random.randrange(1, 60)))
        is_prompt = [start == 0 for _, start, _ in rows]
        requests.check(rows, num_decode=is_prompt.count(False))
        for slot, _, stop in rows:
            lengths[slot] = stop


def test_nan_left_in_a_page_by_another_request_does_not_spread(make_step: MakeStep) -> None:
    requests = Requests(make_step, [30, 3, 3], page_size=16)
    requests.k[0].fill_(torch.nan)
    requests.v[0].fill_(torch.inf)
    requests.run([(0, 0, 30)])
    requests.page_table[1, 0], requests.page_table[2, 0] = (
        requests.page_table[0, 0].item(),
        requests.page_table[0, 1].item(),
    )
    requests.check([(1, 0, 2), (2, 0, 1)])
    requests.check([(1, 2, 3), (2, 1, 2)], num_decode=2)


@pytest.mark.parametrize("budget", [1, 500, 4096, 1 << 20])
def test_groups_hold_each_row_once_and_little_padding(budget: int) -> None:
    rng = np.random.default_rng(budget)
    for _ in range(50):
        lengths = rng.integers(1, 2 ** rng.integers(1, 13), size=rng.integers(0, 70)).astype(np.int32)
        groups = group_by_length(lengths, budget)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        for group in groups:
            longest = lengths[group[0]]
            assert lengths[group].max() == longest
            assert lengths[group].min() >= longest // 2 or longest <= 128
            assert len(group) == 1 or len(group) * longest <= budget


def test_one_long_row_does_not_pad_255_short_ones() -> None:
    lengths = np.full(256, 100, np.int32)
    lengths[17] = 8000
    groups = group_by_length(lengths, budget=1 << 20)
    assert sum(len(group) * int(lengths[group].max()) for group in groups) == lengths.sum()


def test_a_static_step_reads_lengths_on_the_device_alone(make_step: MakeStep) -> None:
    lengths = [1, 2, 3, 400, 5, 130, 129, 128, 64, 270]
    requests = Requests(make_step, lengths, page_size=16, num_kv_heads=1)
    requests.page_table[requests.page_table == 2**30] = 0  # what a graph reads beyond a row's pages is within the pool
    requests.run([(slot, 0, length - 1) for slot, length in enumerate(lengths) if length > 1])
    requests.static = True
    requests.check([(slot, length - 1, length) for slot, length in enumerate(lengths)], num_decode=len(lengths))


def test_the_reference_supports_everything() -> None:
    assert supports(Shape(3, 10, 2, 7, torch.float32, None), "decode") is None
