"""The fused draw against its reference: interpreted on a CPU, compiled on a GPU."""

import math

import pytest
import torch

from minisgl.kernels.gumbel import draw, draw_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(rows, vocab, dtype=torch.float32):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 2).to(dtype)
    temperature = 0.2 + 1.5 * torch.rand(rows, generator=generator)
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    position = torch.randint(0, 2**31 - 1, (rows,), generator=generator)
    return [t.to(DEVICE) for t in (logits, temperature, seed, position)]


@pytest.mark.parametrize("vocab", [1, 12, 1023, 1024, 4095, 4096, 4097, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_draws_the_references_tokens(vocab, dtype):
    logits, temperature, seed, position = inputs(6, vocab, dtype)
    if vocab > 1000:
        logits[0, :-1] = -torch.inf
        logits[1, ::2] = -torch.inf
    best = logits.amax(-1)
    scaled = (logits.float() - best.float()[:, None]) / temperature[:, None]
    drawn = draw_fused(logits, best, temperature, seed, position)
    assert torch.equal(drawn, draw(scaled, seed, position))
    assert vocab <= 1000 or drawn[0] == vocab - 1


def test_rows_need_not_be_contiguous():
    logits, temperature, seed, position = inputs(4, 5000)
    wide = torch.full((4, 6000), 1e9, device=DEVICE)
    wide[:, :5000] = logits
    best = logits.amax(-1)
    whole = draw_fused(logits, best, temperature, seed, position)
    assert torch.equal(draw_fused(wide[:, :5000], best, temperature, seed, position), whole)


def test_draws_over_many_seeds_follow_the_distribution():
    count, temperature = 300, 1.4
    logits = torch.linspace(-1, 1, 5)
    rows = logits.expand(count, -1).contiguous().to(DEVICE)
    seeds, ones = torch.arange(count, device=DEVICE), torch.ones(count, device=DEVICE)
    drawn = draw_fused(rows, ones, temperature * ones, seeds, torch.full((count,), 5, device=DEVICE))
    expected = (logits / temperature).softmax(0).double() * count
    seen = torch.bincount(drawn.cpu(), minlength=5)
    assert ((seen - expected) ** 2 / expected).sum() < 4 + 5 * math.sqrt(8)
