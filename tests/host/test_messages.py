"""Engine process and clients over a real socket, with a device that has no model."""

import asyncio
import random
from functools import wraps

import msgspec
import numpy as np
import pytest
from fake_device import expected
from in_one_thread import place, text_of

from minisgl.batch import Logprobs, PromptLogprobs
from minisgl.config import SamplingParams
from minisgl.request import NO_TOKENS, Request
from minisgl.scheduler import Committed
from minisgl.server.client import EngineDead
from minisgl.server.messages import (
    CLIENT_BITS,
    Add,
    Answer,
    Ask,
    Control,
    Ended,
    Finish,
    Observation,
    Refused,
    Report,
    Step,
    StepLogprobs,
    StepPromptLogprobs,
    ToClient,
    ToEngine,
    client_identity,
)
from minisgl.server.worker import steps_by_client

GREEDY = SamplingParams(max_tokens=8)


def in_loop(test):
    """Run an async test in an event loop of its own."""

    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def outcome(ticket):
    """How a prompt ended: its reasons, or the name of what it raised."""
    if not ticket.done.done():
        return None
    if ticket.done.exception():
        return type(ticket.done.exception()).__name__
    return [answer.finish_reason for answer in ticket.done.result().outputs]


# --- what messages are


PACKED = StepLogprobs(b"12345678", b"1234", b"1234", b"1234")


@pytest.mark.parametrize(
    ("message", "union"),
    [
        (Add([1, 2], [3, -4], b"\1\0\0\0", 5, {"logit_bias": {7: -1.5}, "temperature": 0.5}, [2], [[1, 2]]), ToEngine),
        (Finish([1 << 41], "stop"), ToEngine),
        (Ask(1, "metrics"), ToEngine),
        (Observation(1, 2, 3, ["stop"], None, 0.5, b"1234"), ToEngine),
        (Step(b"12345678", b"1234", [Ended(1, "error", 0, 3)], PACKED, [StepPromptLogprobs(5, 1, PACKED)]), ToClient),
        (Step(b"", b""), ToClient),
        (Refused([1, 2], 9), ToClient),
        (Answer(1, {"running": 2}), ToClient),
    ],
)
def test_a_message_is_read_as_what_was_sent(message, union):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize(
    "line", [Control(do="drain"), Control(do="fail", reason="x\ny"), Report(kind="progress", text="a", done=1, total=2)]
)
def test_a_line_is_one_line_and_read_as_what_was_sent(line):
    written = msgspec.json.encode(line)
    assert b"\n" not in written
    assert msgspec.json.decode(written, type=type(line)) == line


def test_client_identities_are_different_and_never_begin_with_zero():
    identities = [client_identity(number) for number in (0, 1, 2, 64, 255, 256, 1 << 22)]
    assert len(set(identities)) == len(identities)
    assert all(len(identity) == 4 and identity[0] for identity in identities)


def test_each_client_gets_what_is_its_own_and_nothing_else():
    a, b, c = (number << CLIENT_BITS for number in (1, 2, 3))
    scores = Logprobs(np.array([1, 2], "f4"), np.array([[5], [6]], "i4"), np.array([[1.5], [2.5]], "f4"))
    ended = Request(key=b + 7, prompt=NO_TOKENS, max_tokens=1, sampling=GREEDY, stop_ids=(), seed=0, arrival_s=0)
    ended.finish_reason = "abort"
    committed = Committed(
        keys=np.array([b, a, b + 1, a + 9]),
        tokens=np.array([10, 11, 12, 13], "i4"),
        ended=[ended],
        logprob_keys=np.array([a, b + 1]),
        logprobs=scores,
        prompt_logprobs=[(c, PromptLogprobs(0, 1, scores))],
    )
    steps = dict(steps_by_client(committed))
    assert steps.keys() == {1, 2, 3}
    assert np.frombuffer(steps[1].keys, "<i8").tolist() == [a, a + 9]
    assert np.frombuffer(steps[1].tokens, "<i4").tolist() == [11, 13]
    assert np.frombuffer(steps[2].tokens, "<i4").tolist() == [10, 12]
    assert steps[2].ended == [Ended(b + 7, "abort", 0, 0)] and steps[1].ended == []
    assert np.frombuffer(steps[2].logprobs.keys, "<i8").tolist() == [b + 1]
    assert np.frombuffer(steps[2].logprobs.top, "<f4").tolist() == [2.5]
    assert np.frombuffer(steps[1].logprobs.chosen, "<f4").tolist() == [1]
    assert [each.key for each in steps[3].prompt_logprobs] == [c] and steps[3].tokens == b""


# --- answers


@in_loop
async def test_answers_are_the_engines_tokens_in_pieces_and_as_a_whole(tmp_path):
    async with place(tmp_path) as here:
        client, pieces = here.client(), []
        prompts = [[i, i + 1, 5] for i in range(10)]
        params = SamplingParams(max_tokens=9, n=3)
        generations = [client.prepare(prompt, params, stream=True) for prompt in prompts]
        tickets = [client.submit(generation, pieces.extend) for generation in generations]
        await here.rest()
        for prompt, ticket in zip(prompts, tickets, strict=True):
            want = expected(prompt, 9)
            output = ticket.done.result()
            assert [(a.token_ids, a.text, a.finish_reason) for a in output.outputs] == [
                (want, text_of(want), "length")
            ] * 3
            mine = [p for p in pieces if p.request_id == output.request_id]
            for index in range(3):
                of_one = [p for p in mine if p.index == index]
                assert [t for p in of_one for t in p.token_ids] == want
                assert "".join(p.text for p in of_one) == text_of(want)
                assert [p.completion for p in of_one] == [None] * (len(of_one) - 1) + [output.outputs[index]]
            assert [p.output for p in mine] == [None] * (len(mine) - 1) + [output]
            assert output.timing.ttft_s is not None
        assert not here.worker._requests and not client._open


@in_loop
async def test_a_whole_answer_and_a_stream_agree_and_only_a_stream_has_pieces(tmp_path):
    async with place(tmp_path) as here:
        client, pieces = here.client(), []
        whole = client.submit(client.prepare([1, 2], GREEDY, stream=False), pieces.extend)
        stream = client.submit(client.prepare([1, 2], GREEDY, stream=True))
        await here.rest()
        assert whole.done.result().outputs == stream.done.result().outputs and not pieces


@in_loop
async def test_requests_of_several_clients_are_served_in_order_of_arrival(tmp_path):
    async with place(tmp_path, num_slots=1) as here:
        order = []
        clients = [here.client(number) for number in (3, 1, 2)]
        for i in range(12):
            client = clients[i % 3]
            ticket = client.submit(client.prepare([i], GREEDY, stream=False))
            ticket.done.add_done_callback(lambda _, i=i: order.append(i))
            while len(here.worker._requests) <= i:
                here.worker._take_messages()
                await asyncio.sleep(0)
        await here.rest()
        assert order == list(range(12))


@in_loop
async def test_a_stop_string_across_tokens_cuts_text_tokens_and_what_comes_after_it(tmp_path):
    async with place(tmp_path) as here:
        client, pieces = here.client(), []
        want = expected([1, 2, 3], 30)
        stop = text_of(want[4:6])
        at = text_of(want).find(stop)
        params = SamplingParams(max_tokens=30, stop=["none of it", stop])
        ticket = client.submit(client.prepare([1, 2, 3], params, stream=True), pieces.extend)
        await here.rest()
        (answer,) = ticket.done.result().outputs
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text_of(want)[:at], "stop", stop)
        assert answer.token_ids == want[: at + 2]
        assert "".join(p.text for p in pieces) == answer.text
        assert [t for p in pieces for t in p.token_ids] == answer.token_ids, "a token came after the stop string"
        assert here.engine.stats().steps < 20, "the engine was told"


@in_loop
async def test_text_prompts_are_tokenized_and_token_bytes_kept_from_the_engine(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()
        ticket = client.submit(client.prepare(text_of([7]), GREEDY, stream=False))
        await here.rest()
        assert ticket.done.result().prompt_token_ids == [7]
        assert ticket.done.result().prompt == text_of([7])
        assert ticket.done.result().outputs[0].token_ids == expected([7], 8)


@in_loop
async def test_what_cannot_run_is_a_value_error_before_anything_is_sent(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()
        for prompt, message in (([99], "token id 99"), ([], "no tokens"), ([1] * 64, "the context holds 64")):
            with pytest.raises(ValueError, match=message):
                client.prepare(prompt, GREEDY, stream=False)
        assert client.num_open == 0 and not here.worker._requests


@in_loop
async def test_numbers_of_tokens_may_be_of_any_size(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()
        for much in (1 << 31, 1 << 63, 1 << 70):
            params = SamplingParams(max_tokens=much, min_tokens=much)
            ticket = client.submit(client.prepare([1], params, stream=False))
            await here.rest()
            assert len(ticket.done.result().outputs[0].token_ids) == here.engine.context - 1


@in_loop
async def test_a_prompt_that_cannot_be_sent_is_not_waited_for(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()
        generation = client.prepare([1], GREEDY, stream=False)
        generation.requests[0].seed = 1 << 70
        with pytest.raises(OverflowError):
            client.submit(generation)
        assert client.num_open == 0 and not client._open


@in_loop
async def test_generate_yields_pieces_and_leaving_it_aborts(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()

        async def answer(most):
            tokens = []
            async for piece in client.generate([4, 5], SamplingParams(max_tokens=40)):
                tokens += piece.token_ids
                if len(tokens) == most:
                    break
            return tokens

        all_of_it = asyncio.create_task(answer(most=None))
        await here.until(all_of_it.done)
        assert all_of_it.result() == expected([4, 5], 40)
        some = asyncio.create_task(answer(most=3))
        await here.until(some.done)
        await here.rest()
        assert some.result() == expected([4, 5], 3)
        assert here.engine.stats().running == here.engine.stats().pages_locked == 0
        assert here.worker._metrics.aborted == 1


@in_loop
async def test_generate_ends_with_the_output_when_it_is_aborted_from_elsewhere(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()

        async def answer():
            pieces = []
            async for piece in client.generate([4, 5], SamplingParams(max_tokens=40)):
                pieces.append(piece)
                client.abort(piece.request_id)
            return pieces

        asking = asyncio.create_task(answer())
        await here.until(asking.done)
        *_, last = asking.result()
        assert last.finished and last.output.outputs[0].finish_reason == "abort"
        assert last.output.outputs[0].token_ids == [t for piece in asking.result() for t in piece.token_ids]


# --- refusals


@in_loop
async def test_beyond_a_full_queue_each_request_is_refused_and_gets_exactly_one_answer(tmp_path):
    async with place(tmp_path, num_slots=2, max_queued=3) as here:
        clients = [here.client(1), here.client(2)]
        tickets = [
            (client := clients[i % 2]).submit(client.prepare([i % 97], GREEDY, stream=False)) for i in range(200)
        ]
        longest = 0
        while any(client.num_open for client in clients):
            here.worker.turn()
            longest = max(longest, here.engine.stats().waiting)
            await here.settle()
        await here.rest()
        ends = [outcome(ticket) for ticket in tickets]
        answered, refused = ends.count(["length"]), ends.count("EngineBusy")
        assert answered + refused == 200 and answered >= 5 and refused >= 100
        assert longest == 3
        for i, ticket in enumerate(tickets):
            if outcome(ticket) == ["length"]:
                assert ticket.done.result().outputs[0].token_ids == expected([i % 97], 8)
        assert here.worker._metrics.rejected == refused
        again = clients[0].submit(clients[0].prepare([3], GREEDY, stream=False))
        await here.rest()
        assert outcome(again) == ["length"]


@in_loop
async def test_an_idle_engine_takes_all_that_it_has_room_for_however_short_its_queue(tmp_path):
    async with place(tmp_path, num_slots=4, num_pages=64, max_queued=1) as here:
        client = here.client()
        tickets = [client.submit(client.prepare([i], GREEDY, stream=False)) for i in range(5)]
        many = client.submit(client.prepare([9], SamplingParams(max_tokens=8, n=4), stream=False))
        await here.rest()
        assert [outcome(ticket) for ticket in tickets] == [["length"]] * 5
        assert outcome(many) == "EngineBusy" and many.done.exception().waiting == 1
        many = client.submit(client.prepare([9], SamplingParams(max_tokens=8, n=4), stream=False))
        await here.rest()
        assert outcome(many) == ["length"] * 4, "more answers than the queue has places, but nobody waits"


# --- aborts


@pytest.mark.parametrize("turns", range(12))
@in_loop
async def test_abort_in_every_state_ends_once_and_gives_everything_back(tmp_path, turns):
    async with place(tmp_path, num_slots=2, chunk_size=8, num_pages=24) as here:
        client, told = here.client(), []
        params = SamplingParams(max_tokens=6, n=2)
        tickets = [client.submit(client.prepare(range(i, i + 20), params, stream=True), told.append) for i in range(3)]
        victim = tickets[turns % 3]
        for _ in range(turns):
            here.worker.turn()
            await here.settle()
        had_ended = victim.done.done()
        client.abort(victim.generation)
        client.abort(victim.generation.request_id)
        told.clear()
        await here.rest()
        client.abort(victim.generation)  # late
        assert had_ended or victim.generation.request_id not in {p.request_id for come in told for p in come}
        for i, ticket in enumerate(tickets):
            whole = expected(range(i, i + 20), 6)
            for answer in ticket.done.result().outputs:
                assert answer.token_ids == whole[: len(answer.token_ids)]
                if ticket is not victim or answer.finish_reason == "length":
                    assert answer.token_ids == whole
                else:
                    assert answer.finish_reason == "abort"
        assert here.engine.stats().running == here.engine.stats().pages_locked == 0
        assert not here.worker._requests and not client._open


@in_loop
async def test_random_clients_that_come_and_go_leave_nothing_behind(tmp_path):
    rng = random.Random(4)
    async with place(tmp_path, num_slots=5, num_pages=48, max_queued=8) as here:
        clients, tickets, prompts = [here.client(1), here.client(2)], [], []
        for _ in range(600):
            if rng.random() < 0.4:
                client = rng.choice(clients)
                prompt = [rng.randrange(97) for _ in range(rng.randint(1, 30))]
                params = SamplingParams(max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 3]))
                prompts.append(prompt)
                tickets.append((client, client.submit(client.prepare(prompt, params, stream=rng.random() < 0.5))))
            if tickets and rng.random() < 0.3:
                client, ticket = rng.choice(tickets)
                client.abort(ticket.generation)
            here.worker.turn()
            here.engine.scheduler.check()
            await here.settle()
        await here.rest()
        seen = {str(outcome(ticket)) for _, ticket in tickets}
        assert {"EngineBusy", "['abort']", "['length']"} <= seen and "None" not in seen
        for prompt, (_, ticket) in zip(prompts, tickets, strict=True):
            if outcome(ticket) != "EngineBusy":
                for answer in ticket.done.result().outputs:
                    assert answer.token_ids == expected(prompt, len(answer.token_ids))
        assert here.engine.stats().pages_locked == 0 and not here.worker._requests
        assert not any(client._open or client._tickets for client in clients)


@in_loop
async def test_tokens_that_come_after_an_abort_are_no_part_of_the_answer(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()
        ticket = client.submit(client.prepare([1], SamplingParams(max_tokens=30), stream=False))
        key = ticket.generation.request_id
        await here.until(lambda: len(client._open[key].tokens) == 2)
        client.abort(ticket.generation)
        late = np.array([key], "<i8").tobytes()
        client._take_step(Step(late, np.array([5], "<i4").tobytes()))
        client._take_step(Step(b"", b"", [Ended(key, "length", 0, 3)]))
        (answer,) = ticket.done.result().outputs
        assert (answer.token_ids, answer.finish_reason) == (expected([1], 2), "abort")


# --- what goes wrong


@in_loop
async def test_a_message_that_is_wrong_is_without_effect(tmp_path, caplog):
    async with place(tmp_path) as here:
        client = here.client()
        ticket = client.submit(client.prepare([1], GREEDY, stream=False))
        encode = msgspec.msgpack.encode
        for frames in (
            [b""],
            [b"\xc1 no msgpack"],
            [b"two", b"frames"],
            [encode({"type": "Unknown"})],
            [encode({"type": "Add", "keys": "x"})],
            [encode(Refused([1], 2))],
            [encode(Finish([12345], "stop"))],
            [encode(Finish([-1], "abort"))],
            [encode(Observation(1, 0, 1, ["stop"], 0.5, 0.5, b"odd"))],
        ):
            client._socket.send_multipart(frames)
        await here.rest()
        assert outcome(ticket) == ["length"]
        assert "without effect" in caplog.text
        stats = asyncio.create_task(client.stats())
        await here.until(stats.done)
        assert stats.result() == here.engine.stats()


WRONG = {
    "no prompt": {"prompt": b""},
    "half a token": {"prompt": b"\1\0\0"},
    "a token that does not exist": {"prompt": np.array([97], "<i4").tobytes()},
    "a token below zero": {"prompt": np.array([-1], "<i4").tobytes()},
    "no room": {"max_tokens": 64},
    "nothing to generate": {"max_tokens": 0},
    "more to generate than there may be": {"sampling": {"min_tokens": 1 << 40}},
    "a stop id that does not exist": {"stop_ids": [97]},
    "a bad word that does not exist": {"bad_words": [[5, 97]]},
    "a bias for no token": {"sampling": {"logit_bias": {97: 1.0}}},
    "an unknown field": {"sampling": {"colour": 1}},
    "a wrong value": {"sampling": {"temperature": -1.0}},
    "too few seeds": {"seeds": []},
    "a long seed": {"seeds": [1 << 63]},
}


@pytest.mark.parametrize("what", WRONG)
@in_loop
async def test_a_request_that_cannot_run_ends_with_an_error_and_nobody_else_does(tmp_path, what):
    async with place(tmp_path) as here:
        client = here.client()
        good = client.submit(client.prepare([1], GREEDY, stream=False))
        send, client._send = client._send, lambda message: None
        bad = client.submit(client.prepare([2], GREEDY, stream=False))
        client._send = send
        fields = {"keys": [bad.generation.request_id], "seeds": [0], "prompt": b"\1\0\0\0", "max_tokens": 3}
        client._send(Add(**{**fields, "sampling": {}, "stop_ids": [], "bad_words": [], **WRONG[what]}))
        await here.rest()
        assert outcome(good) == ["length"] and outcome(bad) == ["error"]


@in_loop
async def test_a_key_that_is_in_use_or_anothers_takes_nothing_from_its_owner(tmp_path):
    async with place(tmp_path) as here:
        client, other = here.client(1), here.client(2)
        ticket = client.submit(client.prepare([1], GREEDY, stream=False))
        await here.until(lambda: bool(here.worker._requests))
        add = Add([ticket.generation.request_id], [0], b"\2\0\0\0", 3, {}, [], [])
        client._send(add)
        other._send(add)
        await here.rest()
        assert ticket.done.result().outputs[0].token_ids == expected([1], 8)


@in_loop
async def test_a_step_that_raises_ends_every_request_with_an_error_and_the_engine_goes_on(tmp_path, caplog):
    async with place(tmp_path, num_slots=2) as here:
        client, launch = here.client(), here.engine.runner.launch
        params = SamplingParams(max_tokens=8, n=2)
        tickets = [client.submit(client.prepare([i], params, stream=False)) for i in range(4)]
        await here.until(lambda: any(entry.tokens for entry in client._open.values()))

        def fail(batch):
            here.engine.runner.launch = launch
            raise RuntimeError("the device says no")

        here.engine.runner.launch = fail
        await here.rest()
        assert [outcome(ticket) for ticket in tickets] == [["error"] * 2] * 4
        for i, ticket in enumerate(tickets):
            for answer in ticket.done.result().outputs:
                assert answer.token_ids == expected([i], len(answer.token_ids)), "what had come is kept"
        assert "the device says no" in caplog.text
        again = client.submit(client.prepare([5], GREEDY, stream=False))
        await here.rest()
        assert again.done.result().outputs[0].token_ids == expected([5], 8)


@in_loop
async def test_a_device_that_is_lost_ends_the_worker(tmp_path):
    async with place(tmp_path, device_lost=lambda: True) as here:
        client = here.client()
        client.submit(client.prepare([1], GREEDY, stream=False))

        def fail(batch):
            raise RuntimeError("an illegal memory access")

        here.engine.runner.launch = fail
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await here.until(lambda: False)


@in_loop
async def test_when_the_engine_is_said_to_be_dead_everything_open_ends_and_nothing_more_begins(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()
        ticket = client.submit(client.prepare([1], SamplingParams(max_tokens=50), stream=True))

        async def stream():
            return [piece async for piece in client.generate([2], SamplingParams(max_tokens=50))]

        streaming = asyncio.create_task(stream())
        await here.until(lambda: client.num_open == 2 and all(entry.tokens for entry in client._open.values()))
        asking = asyncio.create_task(client.stats())
        await asyncio.sleep(0)
        client.fail("the engine has died (signal SIGKILL)")
        client.fail("again")
        for waits in (streaming, asking, ticket.done):
            with pytest.raises(EngineDead, match=r"^the engine has died \(signal SIGKILL\)$"):
                await waits
        with pytest.raises(EngineDead, match="SIGKILL"):
            client.submit(client.prepare([1], GREEDY, stream=False))
        with pytest.raises(EngineDead, match="SIGKILL"):
            await client.metrics()
        client.abort(ticket.generation)
        assert client.num_open == 0
        calls, client._receive = [], lambda: calls.append(1)
        for _ in range(3):
            here.worker.turn()
            await asyncio.sleep(0.01)
        assert here.engine.stats().running == 2 and not calls, "what still comes keeps nobody awake"


@pytest.mark.parametrize("where", ["sink", "take_token", "end"])
@in_loop
async def test_an_answer_that_cannot_be_handed_over_fails_alone(tmp_path, caplog, where):
    async with place(tmp_path) as here:
        client = here.client()

        def fail(*args):
            raise OSError("the pipe is broken")

        generation = client.prepare([1], SamplingParams(max_tokens=40, n=2), stream=True)
        if where != "sink":
            setattr(generation, where, fail)
        bad = client.submit(generation, fail if where == "sink" else None)
        good = client.submit(client.prepare([2], GREEDY, stream=True))
        await here.rest()
        assert outcome(bad) == "OSError" and "the pipe is broken" in caplog.text
        assert good.done.result().outputs[0].token_ids == expected([2], 8)
        assert not client._tickets and not client._open and not here.worker._requests
        assert where == "end" or here.engine.stats().steps < 20, "the engine was told"


@in_loop
async def test_an_answer_of_which_tokens_were_lost_is_an_error(tmp_path, caplog):
    async with place(tmp_path) as here:
        client = here.client()
        ticket = client.submit(client.prepare([1], GREEDY, stream=False))
        client._take_step(Step(b"", b"", [Ended(ticket.generation.request_id, "length", 0, 3)]))
        assert outcome(ticket) == ["error"]
        assert "of 3 tokens of an answer, 0 have come" in caplog.text


@in_loop
async def test_a_client_that_has_gone_hinders_nobody(tmp_path):
    async with place(tmp_path) as here:
        gone, stays = here.client(1), here.client(2)
        gone.submit(gone.prepare([1], SamplingParams(max_tokens=30), stream=False))
        ticket = stays.submit(stays.prepare([2], SamplingParams(max_tokens=30), stream=False))
        await here.until(lambda: len(here.worker._requests) == 2)
        await gone.close()
        await gone.close()
        await here.rest()
        assert ticket.done.result().outputs[0].token_ids == expected([2], 30)
        assert not here.worker._requests


@in_loop
async def test_flushing_the_cache_drops_what_no_request_holds_and_says_whether_that_was_all(tmp_path):
    async with place(tmp_path) as here:
        client = here.client()

        async def flush():
            asking = asyncio.create_task(client.flush_cache())
            await here.until(asking.done)
            return asking.result()

        client.submit(client.prepare(range(20), GREEDY, stream=False))
        await here.rest()
        assert here.engine.stats().pages_cached == 6
        client.submit(client.prepare(range(20), SamplingParams(max_tokens=40), stream=False))
        await here.until(lambda: here.engine.stats().running == 1)
        assert not await flush()
        assert here.engine.stats().pages_cached == 0 < here.engine.stats().pages_locked
        await here.rest()
        assert await flush()
        stats = here.engine.stats()
        assert stats.pages_free == here.engine.scheduler.num_pages
