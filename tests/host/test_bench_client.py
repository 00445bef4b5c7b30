"""The load client of `minisgl bench`: what it notes of answers, when it sends, and how it fails."""

import asyncio
import json
import socket
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import virtual_time
from hypothesis import given
from hypothesis import strategies as st

from minisgl.bench.answer import Answer, ServerFault
from minisgl.bench.asking import Asking, Words
from minisgl.bench.client import Load, connect
from minisgl.bench.metrics import doubts, latencies, totals
from minisgl.bench.record import Pass, RequestRecord
from minisgl.bench.workload import Job

approx = pytest.approx

Script = Sequence[tuple[float, bytes | ServerFault]]
"""What a fake server sends, each after so many seconds."""

FIELDS = st.sampled_from(
    ["choices", "usage", "error", "delta", "text", "content", "token_ids", "finish_reason", "completion_tokens"]
)
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
STOP = {"choices": [{"delta": {}, "finish_reason": "length"}]}
DONE = b"data: [DONE]\n\n"
ASKING = Asking(model="fake", sampling={"ignore_eos": True}, counts_on=True)


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def said(text: str, **more: Any) -> bytes:
    return event({"choices": [{"delta": {"content": text}, "finish_reason": None}], **more})


def used(completion_tokens: int, cached_tokens: int = 4) -> bytes:
    details = {"cached_tokens": cached_tokens}
    usage = {"prompt_tokens": 10, "completion_tokens": completion_tokens, "prompt_tokens_details": details}
    return event({"choices": [], "usage": usage})


GOOD = [(0.5, event(ROLE)), (0.25, said("a")), (0.125, said("b")), (0.125, event(STOP) + used(2) + DONE)]


class Fake:
    """A server that answers each request by the next script, without a socket."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts, self.bodies, self.routes, self.running, self.most = list(scripts), [], [], 0, 0

    async def answer(self, route: str, body: bytes) -> AsyncGenerator[bytes, None]:
        script = self.scripts[len(self.bodies) % len(self.scripts)]
        self.bodies.append(json.loads(body))
        self.routes.append(route)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for delay_s, data in script:
                await asyncio.sleep(delay_s)
                if isinstance(data, ServerFault):
                    raise data
                yield data
        finally:
            self.running -= 1


def load(
    fake: Fake,
    jobs: int | list[Job],
    times_s: Sequence[float] | None = None,
    concurrency: int | None = None,
    told: Any = int,
    asking: Asking = ASKING,
) -> Pass:
    measured = Pass(name="", load={} if times_s is None else {"qps": 1.0}, seed=0, began_s=0.0)
    if concurrency is not None:
        measured.load["concurrency"] = concurrency

    async def work() -> None:
        client = Load(fake, asking, clock=asyncio.get_running_loop().time, told=told)
        each = [Job([1, 2, 3], 2)] * jobs if isinstance(jobs, int) else jobs
        await client.run(measured, each, times_s, concurrency)

    virtual_time.run(work())
    return measured


def values(measured: Pass) -> dict[str, list[float]]:
    return {name: each.tolist() for name, each in latencies(measured.requests).items()}


def test_the_role_is_no_token_and_the_usage_no_time():
    found = values(load(Fake(GOOD), 1))
    assert found["ttft_s"] == approx([0.75])
    assert found["itl_s"] == approx([0.125])
    assert found["tpot_s"] == approx([0.125])
    assert found["e2e_s"] == approx([0.875])


def test_tokens_come_from_usage_where_an_event_has_several():
    script = [(1.0, said("a", usage={"prompt_tokens": 10, "completion_tokens": 1}))]
    script += [(0.6, said("b c d", usage={"prompt_tokens": 10, "completion_tokens": 4})), (0.0, used(5) + DONE)]
    measured = load(Fake(script), 1)
    (request,) = measured.requests
    assert [each.tokens for each in request.events] == [1, 3]
    assert (request.prompt_tokens, request.completion_tokens, request.cached_tokens) == (10, 5, 4)
    assert values(measured)["tpot_s"] == approx([0.6 / 4])
    assert values(measured)["itl_s"] == approx([0.6])
    assert totals(measured)["tokens_per_event"] == 2.5


def test_a_slow_first_token_is_ttft_alone_and_a_stall_is_itl():
    slow = [(9.0, said("a")), *[(0.1, said("b"))] * 3, (0.0, used(4) + DONE)]
    stalled = [(0.2, said("a")), (0.1, said("b")), (5.0, said("c")), (0.1, said("d")), (0.0, used(4) + DONE)]
    found = values(load(Fake(slow, stalled), 2, [0.0, 1.0]))
    assert sorted(found["ttft_s"]) == approx([0.2, 9.0])
    assert sorted(found["tpot_s"]) == approx([0.1, 5.2 / 3])
    assert max(found["itl_s"]) == approx(5.0)
    assert len(found["itl_s"]) == 6


@pytest.mark.parametrize("text", ["reasoning", "reasoning_content"])
def test_reasoning_is_content(text: str):
    thinks = event({"choices": [{"delta": {text: "hm", "content": None}, "finish_reason": None}]})
    assert values(load(Fake([(0.5, thinks), (0.5, said("a")), (0.0, used(2) + DONE)]), 1))["ttft_s"] == approx([0.5])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(0.1, ServerFault("503: busy"))], "503: busy"),
        ([(0.1, said("a")), (0.1, event({"error": {"message": "out of memory"}}) + DONE)], "out of memory"),
        ([(0.1, said("a")), (0.1, event({"error": "gone"}))], "gone"),
        ([(0.1, said("a"))], "the answer broke off"),
        ([(0.1, event(ROLE)), (0.1, event(STOP) + used(0) + DONE)], "the answer has no content"),
        ([(0.1, b'data: {"choices": 3}\n\n')], "an event is not as OpenAI's API has it"),
        ([(0.1, b"data: {\n\n")], "an event is not as OpenAI's API has it"),
        ([(0.1, b"data: [1, 2]\n\n")], "an event is not as OpenAI's API has it"),
        ([(0.1, b'data: {"error": "\xff"}\n\n')], "an event is not as OpenAI's API has it"),
        ([(0.1, b"data: " + b"[" * 100_000 + b"\n\n")], "an event is not as OpenAI's API has it"),
        ([(0.1, event({"usage": {"completion_tokens": "7"}}))], "an event is not as OpenAI's API has it"),
        ([(0.1, event({"choices": [{"text": "a", "token_ids": 5}]}))], "an event is not as OpenAI's API has it"),
        ([(0.1, b'{"choices": [{"text": "all at once"}]}')], "the answer broke off, or was no stream of events"),
    ],
)
def test_what_fails_is_counted_apart_and_has_no_latency(script: Script, message: str):
    measured = load(Fake(GOOD, script, GOOD, script), 4, [0.0, 1.0, 2.0, 3.0])
    errors = [request.error for request in measured.requests]
    assert errors[0] is None and errors[2] is None
    assert str(errors[1]).startswith(message) and str(errors[3]).startswith(message)
    figures = totals(measured)
    assert (figures["completed"], figures["failed"], figures["unfinished"]) == (2, 2, 0)
    assert values(measured)["ttft_s"] == approx([0.75, 0.75])
    assert figures["tokens_out"] == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(FIELDS, JSON).map(json.dumps).map(str.encode) | st.binary(), max_size=4))
def test_whatever_a_server_sends_is_an_answer_or_its_fault(events: list[bytes]):
    answer = Answer(RequestRecord(intended_s=0.0))
    with suppress(ServerFault):
        for data in events:
            answer.take(b"data: " + data + b"\n\n", 1.0)
        answer.end()
    assert all(each.time_s == 1.0 for each in answer.record.events)


def test_what_the_server_does_not_count_is_not_known_and_keeps_no_limit_on_it():
    uncounted = [(0.5, said("a")), (0.1, said("b", usage={"total_tokens": 9})), (0.0, event(STOP) + DONE)]
    measured = load(Fake(uncounted), 2)
    figures = totals(measured, {"tpot": 60.0})
    assert figures["completed"] == 2 and not {"tokens_out", "output_tokens_per_s", "tokens_per_event"} & figures.keys()
    assert (figures["goodput_per_s"], totals(measured, {"ttft": 0.6})["slo_share"]) == (0.0, 1.0)
    assert doubts(measured) == ["2 of 2 answers came without usage: their tokens are not counted"]


def test_an_answer_in_one_piece_is_suspect():
    measured = load(Fake([(0.5, said("all of it")), (0.0, used(9) + DONE)], GOOD), 2)
    for request in measured.requests:
        request.asked_tokens = None
    assert doubts(measured) == ["1 of 2 answers came in one piece: TTFT and TPOT are not of their tokens"]


def test_goodput_is_the_requests_that_keep_every_limit_by_the_time():
    slow = [(2.0, said("a")), (0.125, said("b")), (0.0, used(2) + DONE)]
    stalls = [(0.75, said("a")), (1.0, said("b")), (0.0, used(2) + DONE)]
    breaks = [(0.1, said("a"))]
    short = [(0.75, said("a")), (0.0, used(1) + DONE)]  # has no TPOT, so keeps any
    measured = load(Fake(GOOD, slow, stalls, breaks, short), 5, [0.0, 0.0, 0.0, 0.0, 6.25])
    figures = totals(measured, {"ttft": 0.8, "tpot": 0.5})
    assert figures["duration_s"] == approx(7.0)
    assert figures["goodput_per_s"] == approx(2 / 7)
    assert figures["slo_share"] == approx(2 / 5)
    assert figures["requests_per_s"] == approx(4 / 7)
    assert figures["output_tokens_per_s"] == approx(7 / 7)
    assert figures["cache_hit_rate"] == approx(0.4)


def test_bytes_may_be_cut_anywhere():
    data = b": comment\r\n\r\n" + b"".join(part for _, part in GOOD if isinstance(part, bytes)).replace(b"\n", b"\r\n")
    records = []
    for step in (1, 2, 3, 7, len(data)):
        records.append(record := RequestRecord(intended_s=0.0))
        answer = Answer(record)
        for at in range(0, len(data), step):
            answer.take(data[at : at + step], 1.0)
        answer.end()
    assert records == [records[-1]] * 5
    assert len(records[0].events) == 2


# When requests are sent


def test_requests_leave_at_their_times_however_long_answers_take():
    fake = Fake([(50.0, said("a")), (0.0, used(1) + DONE)])
    measured = load(fake, 4, [0.0, 0.1, 0.1, 3.7])
    assert fake.most == 4
    sent = [request.sent_s for request in measured.requests]
    assert [each - measured.began_s for each in sent if each is not None] == approx([0.0, 0.1, 0.1, 3.7])
    assert [request.intended_s for request in measured.requests] == approx(sent)
    assert totals(measured)["offered_per_s"] == approx(3 / 3.7)
    assert doubts(measured) == ["4 of 4 answers are shorter than was asked for"]


def test_waiting_for_room_counts_from_the_intended_time_only():
    fake = Fake(GOOD)
    measured = load(fake, 3, [0.0, 0.0, 0.0], concurrency=1)
    found = values(measured)
    assert found["ttft_s"] == approx([0.75] * 3)
    assert found["late_ttft_s"] == approx([0.75, 1.75, 2.75])
    assert found["late_e2e_s"] == approx([0.875, 1.875, 2.875])
    assert found["late_s"] == approx([0.0, 1.0, 2.0])
    assert (fake.most, doubts(measured)) == (1, []), "it is not the client that is slow"


def test_without_times_the_next_is_sent_when_one_has_ended():
    fake, told = Fake(GOOD), []
    measured = load(fake, 7, concurrency=3, told=lambda: told.append(1))
    assert (fake.most, len(told)) == (3, 7)
    assert totals(measured)["duration_s"] == approx(3.0)
    assert values(measured)["late_s"] == [0.0] * 7


def test_a_conversation_goes_on_with_what_was_answered():
    def answers(*tokens: int) -> Script:
        choice = {"text": "w" * len(tokens), "token_ids": tokens, "finish_reason": "length"}
        return [(0.5, event({"choices": [choice]}) + used(len(tokens)) + DONE)]

    fake = Fake(answers(7, 8), answers(9), answers(6, 6))
    measured = load(fake, [Job([1, 2], 2, later=(Job([3], 1), Job([4, 5], 2)))])
    assert [body["prompt"] for body in fake.bodies] == [[1, 2], [1, 2, 7, 8, 3], [1, 2, 7, 8, 3, 9, 4, 5]]
    assert [body.get("return_token_ids") for body in fake.bodies] == [True, True, None]
    assert [body["max_tokens"] for body in fake.bodies] == [2, 1, 2]
    assert [request.intended_s - measured.began_s for request in measured.requests] == approx([0.0, 0.5, 1.0])
    assert totals(measured)["failed"] == 0


def test_a_conversation_ends_where_a_turn_fails_or_shows_no_tokens():
    for script in ([(0.1, ServerFault("no"))], GOOD):
        fake = Fake(script)
        measured = load(fake, [Job([1], 2, later=(Job([3], 2),))])
        assert (len(fake.bodies), totals(measured)["failed"]) == (1, 1)
    assert "shows no token ids" in str(measured.requests[0].error)


def test_a_chat_is_of_messages_whose_tokens_are_words():
    words = Words()
    prompts = [words.tokenize(text) for text in ("why is  it so", "and\nthen", "is it")]
    assert [len(prompt) for prompt in prompts] == [4, 2, 2]
    fake = Fake(GOOD)
    later = (Job(prompts[1], 1), Job(prompts[2], 2))
    measured = load(fake, [Job(prompts[0], 2, later=later)], asking=replace(ASKING, words=words))
    assert fake.routes == ["/v1/chat/completions"] * 3
    assert [body["messages"] for body in fake.bodies][1:] == [
        [
            {"role": "user", "content": "why is  it so"},
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "and\nthen"},
        ],
        [
            {"role": "user", "content": "why is  it so"},
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "and\nthen"},
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "is it"},
        ],
    ]
    assert all("prompt" not in body and "return_token_ids" not in body for body in fake.bodies)
    assert totals(measured)["failed"] == 0
    assert Words().text([7, 10_000, 7]) == " 7 10000 7", "what is drawn at random"


def test_what_is_sent_is_what_was_asked_for():
    fake = Fake(GOOD)
    load(fake, [Job([1, 2], 5), Job([], 0, body={"messages": ["m"], "max_tokens": 3, "model": "x"}, route="/v1/chat")])
    options = {"include_usage": True, "continuous_usage_stats": True}
    common = {"model": "fake", "stream": True, "stream_options": options}
    assert fake.bodies[0] == {"prompt": [1, 2], "max_tokens": 5, "ignore_eos": True, **common}
    assert fake.bodies[1] == {"messages": ["m"], "max_tokens": 3, **common}
    assert fake.routes == ["/v1/completions", "/v1/chat"]


def test_an_interrupt_leaves_what_was_measured():
    measured = Pass(name="", seed=0, began_s=0.0)

    async def work() -> None:
        client = Load(Fake(GOOD), ASKING, clock=asyncio.get_running_loop().time)
        task = asyncio.create_task(client.run(measured, [Job([1], 2)] * 9, [float(n) / 2 for n in range(9)], None))
        await asyncio.sleep(2.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtual_time.run(work())
    figures = totals(measured)
    assert (figures["completed"], figures["failed"], figures["unfinished"]) == (3, 0, 2)
    assert figures["duration_s"] == approx(2.0), "the last end, for what came after it is not known"


def test_a_client_that_cannot_keep_up_says_so():
    class Busy(Fake):
        async def answer(self, route: str, body: bytes) -> AsyncGenerator[bytes, None]:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, virtual_time.VirtualLoop)
            loop.now_s += 0.3  # as if the processor had been taken for so long
            async for data in super().answer(route, body):
                yield data

    measured = load(Busy(GOOD), 20, [n / 10 for n in range(20)])
    late, left = doubts(measured)
    assert late.startswith("the client could not keep up: its event loop was ")
    assert left.startswith("the client could not keep up: requests left ")
    assert doubts(load(Fake(GOOD), 20, [n / 10 for n in range(20)])) == []


# Over a socket


class Socket:
    """A server that speaks HTTP by the scripts, in a thread of its own, and notes when it wrote content."""

    def __init__(self, *scripts: Script) -> None:
        self.fake, self.wrote_s, self.requests, self.talks = Fake(*scripts), [], [], []
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self.serve()), daemon=True)

    async def serve(self) -> None:
        self.over = asyncio.Event()
        async with await asyncio.start_server(self.talk, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self.ready.set()
            await self.over.wait()
            await asyncio.gather(*self.talks, return_exceptions=True)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.talks.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.requests.append(head)
        body = await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
            async for data in self.fake.answer("", body):
                if b'"content": "' in data and b'""' not in data:
                    self.wrote_s.append(time.monotonic())
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            writer.write(b"0\r\n\r\n")
        except ServerFault:
            pass  # as if it had died
        writer.close()
        await writer.wait_closed()


@contextmanager
def listening(*scripts: Script) -> Iterator[Socket]:
    server = Socket(*scripts)
    server.thread.start()
    assert server.ready.wait(10)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.over.set)
        server.thread.join(10)
        server.loop.close()


def over_http(url: str, count: int, times_s: Sequence[float], silence_s: float | None = None) -> Pass:
    measured = Pass(name="", load={"qps": 1.0}, seed=0, began_s=0.0)

    async def work() -> None:
        headers = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}
        async with connect(url, headers, silence_s) as server:
            await Load(server, ASKING).run(measured, [Job([1, 2], 2)] * count, times_s, None)

    asyncio.run(work())
    return measured


def test_over_a_socket_it_notes_what_the_server_did_within_20_ms():
    script = [(0.01, event(ROLE)), (0.02, said("a")), *[(0.02, said("b"))] * 3, (0.01, used(4) + DONE)]
    with listening(script) as server:
        measured = over_http(server.url, 6, [n * 0.03 for n in range(6)])
    events = sorted(each.time_s for request in measured.requests for each in request.events)
    assert totals(measured)["completed"] == 6 and len(events) == len(server.wrote_s) == 24
    late = [noted - wrote for noted, wrote in zip(events, sorted(server.wrote_s), strict=True)]
    assert statistics.median(map(abs, late)) < 0.02
    assert all("authorization: bearer sesame" in head for head in server.requests)


def test_over_a_socket_failures_are_failures():
    with listening([(0.0, said("a")), (0.01, ServerFault("dies"))], GOOD) as server:
        broken, good = over_http(server.url, 2, [0.0, 0.1]).requests
    assert broken.error and len(broken.events) == 1 and good.error is None
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    (request,) = over_http(f"http://127.0.0.1:{port}", 1, [0.0]).requests
    assert request.error is not None and "Cannot connect" in request.error


def test_an_answer_that_says_nothing_more_has_failed():
    with listening([(0.0, said("a")), (0.9, DONE)], [(0.9, DONE)]) as server:
        begun, silent = over_http(server.url, 2, [0.0, 0.1], silence_s=0.3).requests
    assert "imeout" in str(begun.error) and "imeout" in str(silent.error)
    assert (len(begun.events), len(silent.events)) == (1, 0)


def test_an_error_status_is_told_with_its_text_in_one_line():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        kind = b"Content-Type: text/plain; charset=klingon\r\n"
        writer.write(b"HTTP/1.1 429 Slow\r\n" + kind + b"Content-Length: 13\r\nConnection: close\r\n\r\n")
        writer.write(b"too\n often \xff!")
        await writer.drain()
        writer.close()

    async def work() -> Pass:
        measured = Pass(name="", seed=0, began_s=0.0)
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            async with connect(url, {}) as server:
                await Load(server, ASKING).run(measured, [Job([1], 1)], None, 1)
        return measured

    assert asyncio.run(work()).requests[0].error == "429: too often \ufffd!"
