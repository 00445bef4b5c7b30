import random

import numpy as np
import pytest
from fake_device import expected, make_engine, make_request, run
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.scheduler.scheduler import Demand


def outputs(requests):
    return [r.output.tolist() for r in requests]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_every_setting_gives_every_request_its_own_tokens(overlap, mixed, cache, page_size, policy, monkeypatch):
    monkeypatch.setattr(Demand, "share", 0.0)  # an optimist, so that pages run out
    rng = random.Random(5)
    engine = make_engine(
        overlap=overlap,
        mixed=mixed,
        cache=cache,
        page_size=page_size,
        policy=policy,
        num_slots=8,
        num_pages=160 // page_size,
    )
    shared = [rng.randrange(97) for _ in range(18)]
    requests = [
        make_request(i, shared[: rng.randint(0, 18)] + [rng.randrange(97) for _ in range(rng.randint(1, 6))], 38, [3])
        for i in range(30)
    ]
    assert len(run(engine, requests)) == 30
    assert outputs(requests) == [expected(r.prompt, 38, [3]) for r in requests]
    assert engine.stats().retractions > 0
    assert engine.stats().running == engine.stats().waiting == engine.stats().pages_locked == 0


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_random_operations_keep_every_count_and_every_token_right(data):
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    engine = make_engine(
        overlap=rng.random() < 0.7,
        mixed=rng.random() < 0.7,
        cache=rng.choice(["radix", "radix", "none"]),
        policy=rng.choice(["fcfs", "lpm", "priority"]),
        page_size=rng.choice([1, 2, 4, 8]),
        num_pages=rng.choice([16, 24, 64]),
        num_slots=rng.choice([1, 2, 5]),
        chunk_size=rng.choice([1, 3, 8, 64]),
    )
    if rng.random() < 0.5:
        engine.scheduler._demand.ended = engine.scheduler._demand.retracted = lambda *_: None
        engine.scheduler._demand._used = 0.0
    shared = [[rng.randrange(97) for _ in range(40)] for _ in range(2)]
    requests, ended = [], []
    for _ in range(200):
        if rng.random() < 0.3:
            room = engine.context - 1
            prompt = rng.choice(shared)[: rng.randint(0, min(40, room - 1))]
            prompt = prompt + [rng.randrange(97) for _ in range(rng.randint(1, min(9, room - len(prompt))))]
            limit = rng.randint(1, engine.context - len(prompt))
            requests.append(make_request(len(requests), prompt, min(limit, 25), [7, 8], rng.randint(-1, 1)))
            engine.add(requests[-1])
        if requests and rng.random() < 0.1:
            engine.finish(rng.choice(requests), rng.choice(["abort", "stop"]))
        if rng.random() < 0.05:
            assert engine.flush_cache() == (not engine.scheduler.cache.cached) and not engine.stats().pages_cached
        ended += engine.step().ended
        engine.scheduler.check()
    ended += run(engine, [])
    assert sorted(r.key for r in ended) == [r.key for r in requests], "each request ends exactly once"
    for r in requests:
        whole = expected(r.prompt, r.max_tokens, [7, 8])
        assert r.output.tolist() == whole[: len(r.output)]
        if r.finish_reason == "length":
            assert len(r.output) == r.max_tokens
        if r.finish_reason != "abort" and len(r.output) < len(whole):
            assert r.finish_reason == "stop"
    assert engine.stats().pages_locked == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", range(14))
def test_abort_in_every_state_gives_back_slot_and_pages_once(overlap, when):
    engine = make_engine(overlap=overlap, num_slots=2, chunk_size=8, num_pages=16)
    requests = [make_request(i, range(i, i + 20), 6) for i in range(3)]
    for r in requests:
        engine.add(r)
    victim, tokens = requests[when % 3], 0
    for step in range(60):
        if step == when:
            engine.finish(victim, "abort")
            engine.finish(victim, "abort")
            tokens = len(victim.output)
        committed = engine.step()
        if step >= when and victim.finish_reason == "abort":
            assert victim.key not in committed.keys.tolist(), "a token came after the abort"
        engine.scheduler.check()
    assert len(victim.output) == tokens or victim.finish_reason != "abort"
    assert not engine.has_work and engine.stats().pages_locked == 0
    for r in requests:
        if r is not victim:
            assert r.output.tolist() == expected(r.prompt, 6)


def test_a_finished_requests_slot_is_not_reused_while_a_launched_batch_holds_it():
    engine = make_engine(num_slots=1)
    first = make_request(0, [1, 2, 3], 9)
    second = make_request(1, [4, 5], 3)
    stop = expected(first.prompt, 9)[2]
    first.stop_ids = (stop,)
    run(engine, [first, second])
    assert outputs([first, second]) == [expected([1, 2, 3], 9, [stop]), expected([4, 5], 3)]
    for batch in engine.runner.batches:
        assert len(set(batch.slots.tolist())) == len(batch.slots)


def test_a_prompt_that_is_cached_to_the_last_page_still_computes_a_token():
    engine = make_engine(page_size=4)
    for length in (8, 9, 11, 12):
        prompt = list(range(length))
        first, again = make_request(0, prompt, 5), make_request(1, prompt, 5)
        run(engine, [first])
        run(engine, [again])
        assert first.output.tolist() == again.output.tolist() == expected(prompt, 5)
        assert again.cached_tokens == (length - 1) // 4 * 4


def test_cached_tokens_are_those_of_the_first_admission():
    engine = make_engine(num_slots=2, num_pages=10, page_size=4)
    requests = [make_request(0, range(12), 20), make_request(1, range(50, 62), 20)]
    run(engine, requests)
    assert requests[1].retractions > 0 and requests[1].cached_tokens == 0
    assert outputs(requests) == [expected(r.prompt, 20) for r in requests]


def test_two_identical_prompts_in_one_step_keep_their_own_pages():
    engine = make_engine(num_slots=3, num_pages=14, page_size=4)
    requests = [make_request(i, range(16), 24) for i in range(3)]
    run(engine, requests)
    assert outputs(requests) == [expected(range(16), 24)] * 3


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_lone_request_whose_own_copies_fill_the_pool_is_retracted_and_goes_on(page_size, overlap, mixed, monkeypatch):
    monkeypatch.setattr(Demand, "share", 0.0)
    pages = 40 // page_size
    engine = make_engine(
        overlap=overlap, mixed=mixed, num_slots=2, num_pages=pages, page_size=page_size, context=1000, chunk_size=64
    )
    assert engine.context == 40
    requests = [make_request(0, range(17), 2), make_request(1, range(17), 23)]  # computed together, twice
    run(engine, requests)
    assert outputs(requests) == [expected(range(17), 2), expected(range(17), 23)]
    assert requests[1].retractions == 1


def test_two_requests_that_do_not_fit_together_do_not_push_each_other_out_for_ever():
    engine = make_engine(num_slots=2, num_pages=16, page_size=4, context=60)
    requests = [make_request(0, range(20), 40), make_request(1, range(30, 50), 40)]
    run(engine, requests)
    assert outputs(requests) == [expected(r.prompt, 40) for r in requests]
    assert engine.stats().retractions <= 4


@pytest.mark.parametrize("overlap", [False, True])
def test_thirteen_long_prompts_in_chunks_with_two_tokens_each(overlap):
    engine = make_engine(overlap=overlap, num_slots=13, num_pages=400, page_size=16, context=4096, chunk_size=500)
    requests = [make_request(i, [5, 6] * 1000, 2) for i in range(13)]
    run(engine, requests)
    assert outputs(requests) == [expected([5, 6] * 1000, 2)] * 13


def test_retraction_waits_until_nothing_is_in_flight(monkeypatch):
    monkeypatch.setattr(Demand, "share", 0.0)
    engine = make_engine(num_slots=3, num_pages=16, page_size=2, context=32)
    retract, at = engine.scheduler._retract, []

    def spy():
        at.append(len(engine.scheduler.in_flight))
        retract()

    engine.scheduler._retract = spy
    run(engine, [make_request(i, range(i, i + 5), 25) for i in range(3)])
    assert at and set(at) == {0}


def test_a_steps_prefill_tokens_stay_within_the_chunk_size_and_decode_rows_come_on_top():
    engine = make_engine(num_slots=4, chunk_size=10, num_pages=64, context=64)
    run(engine, [make_request(i, range(i, i + 17), 8) for i in range(8)])
    batches = engine.runner.batches
    assert max(len(b.input_ids) for b in batches) == 10
    assert any(b.num_decode and len(b.input_ids) for b in batches)
    assert any(len(b.slots) - b.num_decode > 1 for b in batches), "one step should hold chunks of several prompts"


def test_separate_batches_hold_prefill_or_decode_rows_and_prefill_goes_first():
    engine = make_engine(mixed=False, num_slots=4, num_pages=64)
    run(engine, [make_request(i, range(i, i + 9), 8) for i in range(4)])
    assert all(b.num_decode in (0, len(b.slots)) for b in engine.runner.batches)
    assert not engine.runner.batches[0].num_decode


def test_eviction_takes_only_what_a_step_needs():
    engine = make_engine(num_slots=1, num_pages=8, page_size=4, context=32)
    run(engine, [make_request(0, range(24), 2)])
    cached = engine.stats().pages_cached
    run(engine, [make_request(1, range(50, 59), 1)])
    assert engine.stats().pages_cached == cached - (3 - (8 - cached)) + 2


def test_a_full_queue_of_long_answers_is_admitted_by_what_requests_really_use():
    engine = make_engine(num_slots=64, num_pages=128, page_size=4, context=512, chunk_size=512)
    stop = list(range(97))  # every request ends at its first token, whatever its limit
    run(engine, [make_request(i, range(8), 400, stop) for i in range(150)], check=False)
    widest = max(len(b.slots) for b in engine.runner.batches[-10:])
    assert widest > 12, "a worst-case reservation would let one run at a time"


def test_lpm_prefers_the_longest_cached_prefix_and_starves_nobody():
    engine = make_engine(policy="lpm", num_slots=1, num_pages=64)
    run(engine, [make_request(0, range(20), 1)])
    other, same = make_request(1, range(60, 80), 1), make_request(2, range(20), 1)
    assert run(engine, [other, same]) == [same, other]
    left_out = make_request(3, range(30, 50), 1)
    crowd = [make_request(4 + i, range(20), 1) for i in range(200)]
    order = run(engine, [left_out, *crowd])
    assert order.index(left_out) < 100


def test_priority_runs_the_higher_number_first_and_waiting_makes_up_for_it():
    engine = make_engine(policy="priority", num_slots=1)
    low, high = make_request(0, [1], 1, priority=-1), make_request(1, [2], 1, priority=5)
    assert run(engine, [low, high]) == [high, low]
    old, new = make_request(2, [1], 1, arrival_s=0.0), make_request(3, [2], 1, priority=1, arrival_s=1000.0)
    assert run(engine, [new, old]) == [old, new]


def test_the_lowest_priority_and_then_the_newest_is_retracted():
    engine = make_engine(num_slots=3, num_pages=12, page_size=4, context=40)
    requests = [make_request(i, range(i, i + 9), 22, priority=p) for i, p in enumerate([0, -1, 0])]
    run(engine, requests)
    assert requests[1].retractions > 0 and requests[0].retractions == 0
    assert outputs(requests) == [expected(r.prompt, 22) for r in requests]


def test_a_row_without_a_number_ends_with_an_error_and_the_others_go_on():
    engine = make_engine()
    launch = engine.runner.launch

    def broken(batch):
        result = launch(batch)
        result.tokens[batch.slots[batch.samples] == 0] = -1
        return result

    engine.runner.launch = broken
    requests = [make_request(i, [i, i], 4) for i in range(2)]
    run(engine, requests)
    bad = [r for r in requests if r.finish_reason == "error"]
    good = [r for r in requests if r.finish_reason == "length"]
    assert len(bad) == 1 and not len(bad[0].output)
    assert good[0].output.tolist() == expected(good[0].prompt, 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_fails_ends_every_request_and_the_engine_goes_on(overlap):
    engine = make_engine(overlap=overlap, num_slots=2)
    requests = [make_request(i, range(9), 9) for i in range(4)]
    launch = engine.runner.launch
    for r in requests:
        engine.add(r)
    engine.step()

    def fail(batch):
        raise RuntimeError("out of memory")

    engine.runner.launch = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.runner.launch = launch
    assert set(engine.step().ended) == set(requests)
    assert {r.finish_reason for r in requests} == {"error"}
    engine.scheduler.check()
    again = make_request(9, range(9), 9)
    run(engine, [again])
    assert again.output.tolist() == expected(range(9), 9)


def test_a_retracted_requests_step_begins_with_all_of_its_page_table():
    engine = make_engine(num_slots=2, num_pages=10, page_size=4)
    run(engine, [make_request(i, range(50 * i, 50 * i + 12), 20) for i in range(2)])
    for batch in engine.runner.batches:
        for slot in batch.joins.slots.tolist():
            index = np.sort(batch.page_writes[batch.page_writes[:, 0] == slot, 1])
            assert np.array_equal(index, np.arange(len(index)))
            assert len(index) * 4 >= batch.kv_len[batch.slots.tolist().index(slot)]


def test_an_abort_between_launch_and_commit_lets_no_token_through():
    engine = make_engine(num_slots=3, chunk_size=8)
    requests = [make_request(i, range(i, i + 20), 6) for i in range(3)]
    for r in requests:
        engine.add(r)
    launched = engine.scheduler.launched

    def abort_the_last(batch):
        launched(batch)
        if batch.samples.any():
            engine.finish(requests[2], "abort")

    engine.scheduler.launched = abort_the_last
    ended = run(engine, [])
    assert set(ended) == set(requests) and requests[2].finish_reason == "abort" and not len(requests[2].output)
    assert outputs(requests[:2]) == [expected(r.prompt, 6) for r in requests[:2]]


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_a_retracted_request_may_end_while_it_waits(reason, monkeypatch):
    monkeypatch.setattr(Demand, "share", 0.0)
    engine = make_engine(num_slots=2, num_pages=10, page_size=4, context=40)
    requests = [make_request(i, range(30 * i, 30 * i + 12), 20) for i in range(2)]
    for r in requests:
        engine.add(r)
    while not requests[1].retractions:
        engine.step()
    assert requests[1].slot < 0
    produced = requests[1].output.tolist()
    engine.finish(requests[1], reason)
    assert set(run(engine, [])) == set(requests)
    assert requests[1].output.tolist() == produced == expected(requests[1].prompt, 20)[: len(produced)]
    assert requests[0].output.tolist() == expected(requests[0].prompt, 20)
    assert engine.stats().pages_locked == 0


def test_a_prompt_in_chunks_may_be_retracted_and_starts_where_its_pages_are(monkeypatch):
    monkeypatch.setattr(Demand, "share", 0.0)
    engine = make_engine(num_slots=2, num_pages=12, page_size=4, context=48, chunk_size=4)
    old, new = make_request(0, range(8), 30), make_request(1, range(50, 80), 4)
    run(engine, [old, new])
    assert new.retractions and outputs([old, new]) == [expected(old.prompt, 30), expected(new.prompt, 4)]


def test_cancelling_a_request_near_capacity_lets_the_next_one_in():
    engine = make_engine(num_slots=2, num_pages=8, page_size=4, context=32)
    large, small = make_request(0, range(30), 2), make_request(1, [3], 4)
    engine.add(large)
    engine.add(small)
    engine.step()
    engine.finish(large, "abort")
    assert set(run(engine, [])) == {large, small}
    assert small.output.tolist() == expected([3], 4)


def test_a_prefix_that_was_seen_at_a_failed_admission_is_matched_again():
    engine = make_engine(num_slots=2, num_pages=10, page_size=4, context=40)
    run(engine, [make_request(0, range(16), 1)])  # leaves a prefix in the tree
    holder, wants = make_request(1, range(50, 70), 16), make_request(2, range(20), 8)
    run(engine, [holder, wants])
    assert wants.cached_tokens in (0, 4, 8, 12)  # of 16: the holder's growth evicted some while this one waited
    assert outputs([holder, wants]) == [expected(holder.prompt, 16), expected(range(20), 8)]


def test_decoding_inside_a_page_evicts_nothing():
    engine = make_engine(num_slots=1, num_pages=4, page_size=8, context=32)
    run(engine, [make_request(0, range(17), 1)])
    cached = engine.stats().pages_cached
    run(engine, [make_request(1, range(50, 54), 5)])  # fits the free pages: one
    assert cached == 2 and engine.stats().pages_cached == 3


def test_answers_that_end_by_a_stop_string_teach_admission_too():
    engine = make_engine(num_slots=64, num_pages=128, page_size=4, context=512, chunk_size=512)
    requests = [make_request(i, range(8), 400) for i in range(150)]
    for r in requests:
        engine.add(r)
    ended, width = [], []
    while engine.has_work:
        committed = engine.step()
        ended += committed.ended
        width.append(len(committed.keys))
        for key in committed.keys.tolist():
            engine.finish(requests[key], "stop")
    assert len(ended) == 150 and max(width[-10:]) > 12


def test_under_lpm_only_admissions_pass_a_request_over():
    engine = make_engine(policy="lpm", num_slots=2, num_pages=16, page_size=4, context=64)
    run(engine, [make_request(0, range(20), 1)])
    engine.add(make_request(1, range(60, 90), 30))
    engine.step()
    cold, hot = make_request(2, range(30, 55), 8), make_request(3, range(20), 30)
    engine.add(cold)
    engine.add(hot)
    for _ in range(25):
        engine.step()
    assert cold.passed_over <= 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.slots.owned.__setitem__((0, 0), not s.slots.owned[0, 0]),
        lambda s: s.slots.table.__setitem__((0, 2), s.slots.table[0, 0]),
        lambda s: s.pool.take(1),
        lambda s: s.slots.in_flight.__setitem__(0, 5),
        lambda s: s.slots.kv.__setitem__(0, 63),
        lambda s: s.slots.active.__setitem__(0, False),
    ],
)
def test_check_sees_damage(damage):
    engine = make_engine(num_slots=1)
    engine.add(make_request(0, range(9), 9))
    engine.step()
    engine.step()
    engine.scheduler.check()
    damage(engine.scheduler)
    with pytest.raises(AssertionError):
        engine.scheduler.check()
