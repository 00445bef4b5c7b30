import math

import numpy as np
import pytest
import torch

from minisgl.config import SamplingParams
from minisgl.generation import NEUTRAL
from minisgl.kernels.gumbel import draw, noise, noise_at, philox
from minisgl.parallel.ranks import ALONE
from minisgl.parallel.sharding import Vocabulary
from minisgl.request import Request
from minisgl.runtime.sampler import Sampler, keep_likely
from minisgl.scheduler.slots import Slots


def sampler(*rows, prompt=(0,), output=(), bad_words=(), stop_ids=(), context=64):
    """A sampler whose slot i has the sampling parameters of row i, after `prompt` and `output`."""
    slots = Slots(len(rows), context, page_size=16)
    for key, row in enumerate(rows):
        params = SamplingParams(**row).with_defaults(NEUTRAL)
        request = Request(
            key=key,
            prompt=np.array(prompt, dtype=np.int32),
            max_tokens=9,
            sampling=params,
            stop_ids=stop_ids,
            bad_words=bad_words,
            seed=params.seed or 0,
            arrival_s=0.0,
            output=np.array(output, dtype=np.int32),
        )
        slots._free = [key]
        slots.join(request, None, np.empty(0, np.int32), np.zeros(4, np.int32))
    made = Sampler(len(rows), context, torch.device("cpu"), Vocabulary.of(70_000, ALONE))
    made.join(slots.joins(list(range(len(rows)))))
    return made


def sample(made, logits, slots=None, positions=None):
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.array(slots, dtype=np.int32)
    at = np.arange(1, len(logits) + 1) if positions is None else np.array(positions)
    last = torch.full((int(slots.max()) + 1,), 7)
    tokens = made.sample(logits, slots, at.astype(np.int32), torch.from_numpy(slots).long(), torch.from_numpy(at), last)
    if len(set(slots.tolist())) == len(slots):
        assert last[slots].tolist() == tokens.clamp(min=0).tolist()
    return tokens.tolist()


def greedy(made, logits, length):
    return sample(made, logits[None].clone(), positions=[length])[0]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # known answers published with Random123
        ((0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ],
)
def test_philox_gives_its_published_answers(key, counter, words):
    number = torch.tensor(key[0] | key[1] << 32)
    assert tuple(int(w) for w in philox(number, torch.tensor(counter[0]), torch.tensor(counter[1]))) == words


def test_philox_agrees_with_plain_integer_arithmetic():
    def plain(k0, k1, c):
        c = list(c)
        for _ in range(7):
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
    assert torch.equal(draw(few, seed, at)[1], (few + noise(seed, at, 10_000)).argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.7)])
def test_draws_over_many_seeds_follow_the_distribution(temperature, top_k, top_p):
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    count = 6000
    made = sampler(*[{"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": i} for i in range(count)])
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
    made = sampler({"seed": 42})
    drawn = torch.tensor(sample(made, logits, slots=[0] * 20_000, positions=list(range(20_000))))
    pairs = torch.bincount(drawn[:-1] * 4 + drawn[1:], minlength=16).double()
    assert ((pairs - 1250) ** 2 / 1250).sum() < 15 + 5 * math.sqrt(30)


def test_each_row_of_a_mixed_batch_equals_its_solo_run():
    torch.manual_seed(0)
    rows = [
        {"temperature": 0},
        {"temperature": 1e-6, "seed": 1},
        {"temperature": 0.7, "seed": 5},
        {"top_k": 20, "seed": 6},
        {"temperature": 1.3, "top_p": 0.6, "seed": 7},
        {"top_k": 1, "seed": 8},
        {"min_p": 0.2, "seed": 9},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.3, "seed": 3},
        {"temperature": 0.9, "logit_bias": {4: 3.0, 9: -100}, "top_k": 7, "seed": 3},
    ]
    logits = torch.randn(len(rows), 5000) * 3
    together = sample(sampler(*rows), logits.clone())
    for i, row in enumerate(rows):
        assert sample(sampler(row), logits[i : i + 1], positions=[i + 1]) == [together[i]]
    greedy = logits.argmax(-1).tolist()
    assert [together[i] for i in (0, 1, 5)] == [greedy[i] for i in (0, 1, 5)]


def test_masked_logits_bring_no_nan_into_any_row():
    logits = torch.full((3, 100), -torch.inf)
    logits[:, 7] = 3.0
    rows = [{"temperature": 0}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1}]
    assert sample(sampler(*rows), logits) == [7, 7, 7]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-30])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    torch.manual_seed(0)
    logits = torch.randn(8, 1000) * 50
    rows = [{"temperature": temperature, "top_p": 0.9, "seed": i} for i in range(8)]
    assert sample(sampler(*rows), logits) == logits.argmax(-1).tolist()


def test_of_equal_logits_the_lowest_id_wins_on_every_path():
    logits = torch.zeros(4, 70_000)
    logits[:, [123, 4567, 69_999]] = 2.0
    rows = [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-7}, {"temperature": 0.5, "top_k": 1, "top_p": 0.1}]
    assert sample(sampler(*rows), logits) == [123] * 4
    assert sample(sampler(*rows), logits.bfloat16()) == [123] * 4


def test_a_row_with_a_nan_is_told_apart_and_the_others_are_not_touched():
    logits = torch.zeros(3, 50)
    logits[:, 9] = 1.0
    for row in ({"temperature": 0}, {}, {"top_p": 0.5}):
        for value in (torch.nan, torch.inf):
            bad = logits[:1].clone()
            bad[0, 3] = value
            assert sample(sampler(row), bad) == [-1]
        assert sample(sampler(row), torch.full((1, 50), -torch.inf)) == [-1]
    logits[1, 3] = torch.nan
    assert sample(sampler({"temperature": 0}, {"top_p": 0.9}, {"temperature": 0}), logits) == [9, -1, 9]


def test_top_p_keeps_the_token_that_crosses_p_and_at_least_one():
    scaled = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for p, kept in [(0.4, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.9, 3), (1e-9, 1), (1.0, 4)]:
        filtered = keep_likely(scaled, torch.tensor([0]), torch.tensor([p]))
        assert int((filtered > -torch.inf).sum()) == kept, p


@pytest.mark.parametrize("seed", range(30))
def test_sorting_only_the_likeliest_keeps_what_sorting_all_keeps(seed):
    rng = torch.Generator().manual_seed(seed)
    scaled = torch.randn(6, 500, generator=rng) * [0.01, 1, 5][seed % 3]
    if seed % 2:
        scaled = scaled.round()  # many equals, also across the border of what is sorted
    scaled -= scaled.amax(-1, keepdim=True)
    top_k = torch.tensor([0, 1, 5, 40, 63, 0])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.99, 1.0, 1e-6])
    whole = keep_likely(scaled, top_k, top_p, width=500)
    part = keep_likely(scaled, top_k, top_p, width=64)
    assert torch.equal(whole > -torch.inf, part > -torch.inf)
    assert torch.equal(whole, part)


def test_top_k_above_the_vocabulary_is_all_of_it():
    scaled = torch.randn(1, 30)
    assert torch.equal(keep_likely(scaled, torch.tensor([10**9]), torch.tensor([1.0])), scaled)


def test_penalties_act_on_what_was_said():
    logits = torch.tensor([2.0, 1.9, 1.8, -1.0, 0.5])
    said = {"prompt": (0, 3), "output": (1, 1, 2)}
    assert greedy(sampler({"temperature": 0}, **said), logits, 5) == 0
    assert greedy(sampler({"temperature": 0, "repetition_penalty": 5.0}, **said), logits, 5) == 4
    assert greedy(sampler({"temperature": 0, "presence_penalty": 0.2}, **said), logits, 5) == 0  # the prompt is free
    biased = logits + torch.tensor([-2.0, 0, 0, 0, 0])
    assert greedy(sampler({"temperature": 0, "presence_penalty": 0.2}, **said), biased, 5) == 1
    assert greedy(sampler({"temperature": 0, "frequency_penalty": 0.2}, **said), biased, 5) == 2
    assert greedy(sampler({"temperature": 0, "frequency_penalty": -1.0}, **said), logits, 5) == 1


def test_a_drawn_token_counts_for_the_next_draw():
    made = sampler({"temperature": 0, "presence_penalty": 2.0})
    logits = torch.tensor([3.0, 2.5, 2.0, 1.9])
    assert [greedy(made, logits, length) for length in (1, 2, 3, 4)] == [0, 1, 2, 3]


def test_a_bias_is_added_and_minus_100_forbids():
    logits = torch.tensor([3.0, 2.5, 2.0, 1.9])
    assert greedy(sampler({"temperature": 0, "logit_bias": {2: 2.0}}), logits, 1) == 2
    assert greedy(sampler({"temperature": 0, "logit_bias": {0: -100, 1: -100}}), logits, 1) == 2


def test_stop_tokens_are_not_drawn_before_min_tokens():
    made = sampler({"temperature": 0, "min_tokens": 2}, prompt=(5, 6, 7), stop_ids=(0, 1))
    logits = torch.tensor([3.0, 2.5, 2.0, 1.9])
    assert [greedy(made, logits, length) for length in (3, 4, 5)] == [2, 2, 0]


def test_bad_words_are_forbidden_where_they_would_be_completed_within_the_answer():
    made = sampler({"temperature": 0}, prompt=(1, 2), bad_words=((3,), (1, 2), (0, 0, 0)))
    logits = torch.tensor([1.0, 0.5, 0.9, 2.0])
    assert greedy(made, logits, 2) == 0, "a word of one token is never said"
    assert greedy(made, torch.tensor([0.0, 1.0, 2.0, 0.0]), 2) == 2, "the prompt's 1 does not begin an answer's word"
    made = sampler({"temperature": 0}, prompt=(9,), output=(1,), bad_words=((1, 2), (0, 0, 0)))
    assert greedy(made, torch.tensor([0.5, 1.0, 2.0, 0.0]), 2) == 1
    made = sampler({"temperature": 0}, prompt=(9,), bad_words=((0, 0, 0),))
    assert [greedy(made, torch.tensor([2.0, 1.0]), length) for length in (1, 2, 3, 4)] == [0, 0, 1, 0]


def test_min_p_leaves_out_what_is_unlikely_beside_the_best():
    probabilities = torch.tensor([0.5, 0.26, 0.24])
    made = sampler(*[{"min_p": 0.5, "seed": i} for i in range(300)])
    assert set(sample(made, probabilities.log().expand(300, -1), positions=[3] * 300)) == {0, 1}


def test_a_slot_that_is_used_again_has_nothing_of_its_last_request():
    made = sampler({"temperature": 0, "logit_bias": {2: 50}, "presence_penalty": 2.0}, bad_words=((0,),))
    logits = torch.tensor([3.0, 2.5, 2.0])
    assert greedy(made, logits, 1) == 2
    slots = Slots(1, 64, 16)
    params = SamplingParams(temperature=0).with_defaults(NEUTRAL)
    prompt = np.zeros(1, np.int32)
    request = Request(key=0, prompt=prompt, max_tokens=9, sampling=params, stop_ids=(), seed=0, arrival_s=0.0)
    slots.join(request, None, np.empty(0, np.int32), np.zeros(1, np.int32))
    made.join(slots.joins([0]))
    assert [greedy(made, logits, length) for length in (1, 2)] == [0, 0]
