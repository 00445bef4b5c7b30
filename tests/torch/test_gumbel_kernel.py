"""The fused sampler against its reference: interpreted on a CPU, compiled on a GPU."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from minisgl.kernels.gumbel import (
    _log2_of_rest,
    choose_fused,
    choose_reference,
    find_fused,
    find_reference,
    noise,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOGITS = [torch.float32, torch.bfloat16, torch.float16]
MANY = 100 if DEVICE == "cuda" else 1  # interpreted, one tile of one row takes 25 ms


@pytest.fixture(autouse=True)
def _quiet_infinities():
    """Interpreted kernels compute in numpy, which warns of infinities that are meant."""
    with np.errstate(all="ignore"):
        yield


def inputs(rows, vocab, dtype=torch.float32, spread=2.0):
    """Logits, and parameters of three times as many slots: every third row is greedy."""
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    slots = torch.randperm(3 * rows, generator=generator)[:rows]
    temperature = 0.2 + 1.5 * torch.rand(3 * rows, generator=generator)
    temperature[slots[::3]] = 0
    seed = torch.randint(-(2**63), 2**63 - 1, (3 * rows,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (rows,), generator=generator)
    return [t.to(DEVICE) for t in (logits, slots, temperature, seed, positions)]


def sample_fused(logits, slots, temperature, seed, positions):
    tiles, last = -(-logits.shape[1] // 4096), torch.full_like(temperature, -9, dtype=torch.int64)
    found = find_fused(logits, slots, temperature, seed, positions, 0, tiles)[None]
    tokens = choose_fused(found, slots, temperature, last)
    if len(slots.unique()) == len(slots):
        assert last[slots.long()].tolist() == tokens.clamp(min=0).tolist(), "each slot's place gets its token"
    assert (last == -9).sum() == len(last) - len(slots.unique()), "and no other"
    return tokens


def sample_reference(logits, slots, temperature, seed, positions):
    found = find_reference(logits, slots, temperature, seed, positions, 0, 1)
    return choose_reference(found[None], slots, temperature)


def agreed(logits, slots, temperature, seed, positions):
    """The kernel's tokens, once seen to be the reference's, up to draws that rounding decides."""
    got = sample_fused(logits, slots, temperature, seed, positions)
    expected = sample_reference(logits, slots, temperature, seed, positions)
    assert got.dtype == torch.int64 and got.shape == expected.shape
    for row in (got != expected).nonzero()[:, 0].tolist():
        divisor = temperature[slots[row]]
        assert divisor > 0 and 0 <= got[row] < logits.shape[1] and expected[row] >= 0
        scores = (logits[row].float() - logits[row].float().max()) / divisor
        scores = scores + noise(seed[slots[row], None], positions[row, None], logits.shape[1])[0]
        assert scores[expected[row]] - scores[got[row]] < 5e-5
    assert (got != expected).sum() <= 1 + len(got) // 500
    return got


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(vocab, torch.float32) for vocab in (1, 12, 1023, 1024, 4095, 4096, 9000)]
    + [(vocab, torch.bfloat16) for vocab in (5, 1025, 4097)]
    + [(4097, torch.float16)],
)
def test_it_gives_the_references_tokens(vocab, dtype):
    logits, *rest = inputs(4 * MANY, vocab, dtype)
    if vocab > 1000:
        logits[:2, :-1] = -torch.inf
        logits[2, ::2] = -torch.inf
    tokens = agreed(logits, *rest)
    assert vocab <= 1000 or (tokens[:2] == vocab - 1).all()


@triton.jit
def _log2_of_rest_kernel(bits, out):
    at = tl.arange(0, 4096)
    tl.store(out + at, _log2_of_rest(tl.load(bits + at).to(tl.uint32)))


def test_the_fast_logarithm_is_good_to_five_digits():
    wanted = torch.cat((torch.logspace(-32, -5, 2047, base=2), torch.linspace(2**-5, 0.99, 2047))).double()
    bits = torch.cat(((wanted * 2**32).long(), torch.tensor([0, 2**32 - 1])))
    out = torch.empty(4096, device=DEVICE)
    _log2_of_rest_kernel[(1,)](bits.to(DEVICE), out)
    uniform = (bits.float() * (2.0**-32 - 2.0**-56) + 2.0**-33).double()
    expected = torch.log1p(-uniform) / math.log(2)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1.1e-5, atol=0)


def test_noise_alone_decides_among_equals():
    logits, slots, temperature, seed, positions = inputs(9 * MANY, 9000)
    tokens = agreed(torch.zeros_like(logits), slots, temperature.clamp(min=0.5), seed, positions)
    assert len(tokens.unique()) > 8 * MANY and len((tokens // 1024).unique()) > 4


@pytest.mark.parametrize("temperature", [2e-5, 0.02])
def test_low_temperatures_tell_close_logits_apart(temperature):
    logits, slots, _, seed, positions = inputs(8 * MANY, 9000)
    close = 300 + temperature * 2 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
    cold = torch.full((24 * MANY,), temperature, device=DEVICE)
    tokens = agreed(close.to(DEVICE), slots, cold, seed, positions)
    assert len(tokens.unique()) > 7 * MANY * 0.9 and len((tokens // 4096).unique()) > 1


@pytest.mark.parametrize("dtype", LOGITS)
def test_greedy_rows_get_the_lowest_id_of_equals(dtype):
    equals = [
        [0, 1],
        [5, 1029],
        [1029, 2060],
        [4095, 4096],
        [3000, 8191],
        [100, 4196, 8292],
        [8999],
        [1023, 1024, 8998],
    ]
    logits, slots, temperature, seed, positions = inputs(len(equals), 9000, dtype)
    for row, ids in enumerate(equals):
        logits[row, ids] = 20
    tokens = agreed(logits, slots, torch.zeros_like(temperature), seed, positions)
    assert tokens.tolist() == [ids[0] for ids in equals]


def test_greedy_rows_see_the_last_digit():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [3, 7000]] = torch.tensor([17.0, 17.000002], device=DEVICE)
    logits[1, [3, 4096]] = torch.tensor([1.5e-38, 1.6e-38], device=DEVICE)
    _, slots, temperature, seed, positions = inputs(2, 9000)
    assert agreed(logits, slots, torch.zeros_like(temperature), seed, positions).tolist() == [7000, 4096]


def test_rows_without_a_finite_best_get_no_token():
    bad = [(at, value) for value in (torch.nan, torch.inf) for at in (0, 3, 1024, 4095, 8999)]
    logits, slots, temperature, seed, positions = inputs(len(bad) + 6, 9000)
    clean = sample_fused(logits[-4:], slots[-4:], temperature, seed, positions[-4:])
    for row, (at, value) in enumerate(bad):
        logits[row, at] = value
    logits[len(bad) : len(bad) + 2] = -torch.inf
    got = sample_fused(logits, slots, temperature, seed, positions)
    assert got.tolist() == [-1] * (len(bad) + 2) + clean.tolist()
    assert torch.equal(got, sample_reference(logits, slots, temperature, seed, positions))


def test_logits_far_apart_are_no_trouble():
    logits, slots, temperature, seed, positions = inputs(6, 5000)
    for scale in (1e4, 1e30):
        agreed(logits * scale, slots, temperature, seed, positions)


def test_rows_need_not_be_contiguous():
    logits, *rest = inputs(4, 5000)
    wide = torch.full((4, 6000), 1e9, device=DEVICE)
    wide[:, :5000] = logits
    assert torch.equal(sample_fused(wide[:, :5000], *rest), sample_fused(logits, *rest))


def test_a_row_gets_the_same_token_alone_and_among_others():
    logits, slots, temperature, seed, positions = inputs(5, 6000)
    together = sample_fused(logits, slots, temperature, seed, positions)
    for i in range(5):
        row = slice(i, i + 1)
        assert sample_fused(logits[row], slots[row], temperature, seed, positions[row]) == together[i]


def test_no_rows_give_no_tokens():
    logits, slots, temperature, seed, positions = inputs(1, 5000)
    for function in (sample_fused, sample_reference):
        none = function(logits[:0], slots[:0], temperature, seed, positions[:0])
        assert none.dtype == torch.int64 and none.shape == (0,)


def test_draws_over_many_seeds_follow_the_distribution():
    count, temperature = 60 * MANY, 1.4
    logits = torch.linspace(-1, 1, 5)
    rows, slots = logits.expand(count, -1).contiguous().to(DEVICE), torch.arange(count, device=DEVICE)
    drawn = sample_fused(
        rows, slots, torch.full((count,), temperature, device=DEVICE), slots, torch.full((count,), 5, device=DEVICE)
    )
    assert chi_square(drawn, (logits / temperature).softmax(0)) < 4 + 5 * math.sqrt(8)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_from_several_tiles_follow_the_distribution(temperature):
    count, vocab = 50_000, 9000
    logits = torch.full((vocab,), -torch.inf)
    likely = torch.arange(0, vocab, 500)
    logits[likely] = torch.linspace(-2, 2, len(likely))
    slots = torch.arange(count, device=DEVICE)
    drawn = sample_fused(
        logits.to(DEVICE).expand(count, -1).contiguous(),
        slots,
        torch.full((count,), temperature, device=DEVICE),
        slots * 1000,
        torch.full((count,), 77, device=DEVICE),
    )
    assert (drawn % 500 == 0).all()
    degrees = len(likely) - 1
    expected = (logits[likely] / temperature).softmax(0)
    assert chi_square(drawn // 500, expected) < degrees + 5 * math.sqrt(2 * degrees)


def chi_square(drawn, probabilities):
    expected = probabilities.double() * len(drawn)
    seen = torch.bincount(drawn.cpu(), minlength=len(expected))
    return ((seen - expected) ** 2 / expected).sum()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [151_936, 128_256, 50_257])
def test_it_gives_the_references_tokens_at_real_sizes(vocab, dtype):
    agreed(*inputs(256, vocab, dtype, spread=3.0))


@pytest.mark.gpu
def test_logits_may_have_more_than_2_31_elements():
    vocab = 151_936
    logits = torch.zeros(2**31 // vocab + 3, vocab, dtype=torch.bfloat16, device=DEVICE)
    last, slots, temperature, seed, positions = inputs(3, vocab, torch.bfloat16)
    logits[-3:] = last
    rows = len(logits)
    slots = torch.cat((slots.new_zeros(rows - 3), slots))
    positions = torch.cat((positions.new_zeros(rows - 3), positions))
    tokens = sample_fused(logits, slots, temperature, seed, positions)
    assert torch.equal(tokens[-3:], sample_fused(last, slots[-3:], temperature, seed, positions[-3:]))
