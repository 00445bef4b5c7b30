import math

import numpy as np
import pytest
import torch

from minisgl.batch import Joins
from minisgl.runtime.sampler import Sampler, add_noise, keep_top, lowest_argmax, noise, noise_at, philox


def sampler(*rows):
    """A sampler whose slot i has the parameters (temperature, top_k, top_p, seed) of row i."""
    made = Sampler(len(rows), torch.device("cpu"))
    temperature, top_k, top_p, seed = zip(*rows, strict=True)
    joins = Joins(
        slots=np.arange(len(rows), dtype=np.int32),
        temperature=np.array(temperature, dtype=np.float32),
        top_k=np.array(top_k, dtype=np.int32),
        top_p=np.array(top_p, dtype=np.float32),
        seed=np.array(seed, dtype=np.int64),
    )
    made.join(
        joins,
        slots=torch.from_numpy(joins.slots).long(),
        temperature=torch.from_numpy(joins.temperature),
        top_k=torch.from_numpy(joins.top_k),
        top_p=torch.from_numpy(joins.top_p),
        seed=torch.from_numpy(joins.seed),
    )
    return made


def sample(made, logits, slots=None, positions=None):
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.array(slots, dtype=np.int32)
    at = torch.arange(len(logits)) if positions is None else torch.tensor(positions)
    return made.sample(logits, slots, torch.from_numpy(slots).long(), at).tolist()


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # known answers published with Random123
        ((0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_philox_gives_its_published_answers(key, counter, words):
    number = torch.tensor(key[0] | key[1] << 32)
    assert tuple(int(w) for w in philox(number, torch.tensor(counter[0]), torch.tensor(counter[1]))) == words


def test_philox_agrees_with_plain_integer_arithmetic():
    def plain(k0, k1, c):
        c = list(c)
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        return c

    seeds = torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, 0x0123456789ABCDEF])
    for seed in seeds:
        got = philox(seed, torch.tensor([0, 5, 151_935]), torch.tensor([9, 2**31 - 1, 0]))
        key = int(seed) & 2**64 - 1
        for i, (c0, c1) in enumerate([(0, 9), (5, 2**31 - 1), (151_935, 0)]):
            assert [int(w[i]) for w in got] == plain(key & 0xFFFFFFFF, key >> 32, (c0, c1, 0, 0))


def test_noise_is_finite_everywhere_and_within_the_range_that_the_shortcut_relies_on():
    drawn = noise(torch.arange(2000), torch.full((2000,), 3), 1000)
    assert torch.isfinite(drawn).all()
    assert drawn.min() > -2.9 and drawn.max() < 23.0
    assert abs(drawn.mean() - 0.5772) < 0.005 and abs(drawn.std() - math.pi / math.sqrt(6)) < 0.005


def test_a_tokens_noise_is_the_same_however_it_is_computed():
    seed, at = torch.tensor([5, -3]), torch.tensor([1, 70_000])
    for vocab in (1, 4096, 4097, 10_000):
        rows, ids = torch.arange(2).repeat_interleave(vocab), torch.arange(vocab).repeat(2)
        assert torch.equal(noise(seed, at, vocab).flatten(), noise_at(seed[rows], at[rows], ids))
    few = torch.full((2, 10_000), -torch.inf)
    few[:, [0, 4095, 9999]] = torch.tensor([0.0, -1.0, -25.0])
    assert torch.equal(add_noise(few, seed, at), few + noise(seed, at, 10_000))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.7)])
def test_draws_over_many_seeds_follow_the_distribution(temperature, top_k, top_p):
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    count = 20_000
    made = sampler(*[(temperature, top_k, top_p, seed) for seed in range(count)])
    drawn = sample(made, logits.expand(count, -1), positions=[7] * count)
    p = (logits / temperature).softmax(0).double()
    order = p.argsort(descending=True)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        p[order[1:][p[order].cumsum(0)[:-1] >= top_p]] = 0
    p /= p.sum()
    seen = torch.bincount(torch.tensor(drawn), minlength=12).double()
    assert (seen[p == 0] == 0).all()
    expected = p[p > 0] * count
    chi_square = ((seen[p > 0] - expected) ** 2 / expected).sum()
    degrees = int((p > 0).sum()) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 5


def test_successive_positions_of_one_seed_are_independent_draws():
    logits = torch.zeros(4).expand(20_000, -1)
    made = sampler(*[(1.0, 0, 1.0, 42)] * 20_000)
    drawn = torch.tensor(sample(made, logits, positions=list(range(20_000))))
    pairs = torch.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16).double()
    assert ((pairs - 1250) ** 2 / 1250).sum() < 15 + 5 * math.sqrt(30)


def test_each_row_of_a_mixed_batch_equals_its_solo_run():
    torch.manual_seed(0)
    rows = [
        (0.0, 0, 1.0, 1),
        (1e-6, 0, 1.0, 1),
        (0.7, 0, 1.0, 5),
        (1.0, 20, 1.0, 6),
        (1.3, 0, 0.6, 7),
        (1.0, 1, 1.0, 8),
    ]
    logits = torch.randn(len(rows), 5000) * 3
    together = sample(sampler(*rows), logits)
    for i, row in enumerate(rows):
        assert sample(sampler(row), logits[i : i + 1], positions=[i]) == [together[i]]
    greedy = logits.argmax(-1).tolist()
    assert [together[i] for i in (0, 1, 5)] == [greedy[i] for i in (0, 1, 5)]


def test_masked_logits_bring_no_nan_into_any_row():
    logits = torch.full((3, 100), -torch.inf)
    logits[:, 7] = 3.0
    assert sample(sampler((0.0, 0, 1.0, 1), (0.7, 0, 1.0, 2), (0.7, 5, 0.5, 3)), logits) == [7, 7, 7]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-30])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    torch.manual_seed(0)
    logits = torch.randn(8, 1000) * 50
    assert sample(sampler(*[(temperature, 0, 0.9, i) for i in range(8)]), logits) == logits.argmax(-1).tolist()


def test_of_equal_logits_the_lowest_id_wins_on_every_path():
    logits = torch.zeros(4, 70_000)
    logits[:, [123, 4567, 69_999]] = 2.0
    rows = [(0.0, 0, 1.0, 1), (1.0, 1, 1.0, 2), (1e-7, 0, 1.0, 3), (0.5, 1, 0.1, 4)]
    assert sample(sampler(*rows), logits) == [123] * 4
    assert lowest_argmax(logits.bfloat16()).tolist() == [123] * 4


def test_a_row_with_a_nan_is_told_apart_and_the_others_are_not_touched():
    logits = torch.zeros(3, 50)
    logits[:, 9] = 1.0
    logits[1, 3] = torch.nan
    assert sample(sampler((0.0, 0, 1.0, 1), (1.0, 0, 0.9, 2), (0.0, 0, 1.0, 3)), logits) == [9, -1, 9]


def test_top_p_keeps_the_token_that_crosses_p_and_at_least_one():
    scaled = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for p, kept in [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.9, 3), (1e-9, 1), (1.0, 4)]:
        filtered = keep_top(scaled, torch.tensor([0]), torch.tensor([p]))
        assert int((filtered > -torch.inf).sum()) == kept, p
