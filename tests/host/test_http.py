"""What the HTTP server answers: a real frontend process over real sockets, on an engine that says the prompt again."""

import contextlib
import gzip
import http.client
import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import CONTEXT, MODEL, Served, served, write_model

from minisgl.openai.protocol import CHAT, COMPLETIONS, NEUTRAL, OWN, SAMPLING, STREAM, WITHOUT_EFFECT
from minisgl.tokenizer.tokenizer import Tokenizer

SERVED = (
    *("/health", "/health_generate", "/v1/models", "/v1/models/{name}"),
    *("/metrics", "/server_info", "/flush_cache", "/start_profile", "/stop_profile", "/openapi.json"),
)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model, default_chat_template_kwargs='{"persona": "poet"}', max_body_mb=1) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ask(
    server: Served, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body, from JSON where it is that; `body` is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
        response = connection.getresponse()
        raw = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, json.loads(raw) if "json" in found.get("content-type", "") else raw.decode()
    finally:
        connection.close()


def answer(server: Served, path: str, **body: Any) -> Any:
    status, _, answered = ask(server, path, body)
    assert status == 200, answered
    return answered


def stream(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end as it should."""
    text = answer(server, path, stream=True, **body)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def joined(path: str, events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in choices)


def scores(path: str, events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The log-probabilities of all pieces of an answer as those of one body."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    names = ["content"] if path == CHAT else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    found: dict[str, Any] = {name: [value for part in parts for value in part[name]] for name in names}
    return found | ({"refusal": None} if path == CHAT else {})


def refused(server: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that a request is answered with, in OpenAI's shape."""
    found, _, answered = ask(server, path, body)
    assert found == status, answered
    assert answered.keys() == {"error"} and answered["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in answered["error"]["message"]
    return answered["error"]


# Text, streamed or not

TEXTS = [
    "The capital of France is Paris.",
    "中文字符没有空格，日本語もそうです。",
    "한국어 문장은 이렇게 생겼습니다. 끝",
    "family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿, face 😀😃",
    'def main(argv):\n    if argv:\n\t\treturn "\\n"  # </s> &amp; \u2028\x00\x1f\n',
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, ["is", "👩", "이"], ["。", "\t"]])
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_stream_joined_are_the_answer_in_one_body(server: Served, path: str, stop: Any, text: str):
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": 150, "stop": stop, "n": 2, "logprobs": path == CHAT or 1}
    whole = answer(server, path, **body)
    events = stream(server, path, stream_options={"include_usage": True}, **body)
    for index, choice in enumerate(whole["choices"]):
        expected = choice["message"]["content"] if path == CHAT else choice["text"]
        assert len(expected) > 1
        assert joined(path, events, index) == expected
        assert scores(path, events, index) == choice["logprobs"]
        ends = [c for event in events for c in event["choices"] if c["index"] == index and c["finish_reason"]]
        assert [(c["finish_reason"], c["stop_reason"]) for c in ends] == [
            (choice["finish_reason"], choice["stop_reason"])
        ]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]


@given(ids=st.lists(st.integers(2, 399), min_size=1, max_size=40), stop=st.sampled_from([None, ["e"], ["\ufffd"]]))
@settings(max_examples=60, deadline=None)
def test_random_tokens_have_the_same_text_streamed_or_not(server: Served, ids: list[int], stop: Any):
    body = {"prompt": ids, "max_tokens": 2 * len(ids), "stop": stop, "logprobs": 0, "return_token_ids": True}
    whole = answer(server, COMPLETIONS, **body)["choices"][0]
    events = stream(server, COMPLETIONS, **body)
    assert joined(COMPLETIONS, events) == whole["text"]
    choices = [event["choices"][0] for event in events]
    assert [token for c in choices for token in c.get("token_ids", [])] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == ids
    assert scores(COMPLETIONS, events) == whole["logprobs"]


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage(server: Served):
    events = stream(server, CHAT, messages=HELLO, stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(delta.keys() == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert set(reasons[:-1]) == {None} and reasons[-1] == "stop"
    assert [event["usage"] for event in events[:-1]] == [None] * len(deltas)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert all("usage" not in event for event in stream(server, CHAT, messages=HELLO))


def test_usage_so_far_is_in_every_piece_where_it_is_asked_for(server: Served):
    events = stream(server, COMPLETIONS, prompt="Hello", max_tokens=4, stream_options={"continuous_usage_stats": True})
    said = itertools.accumulate(len(event["choices"][0]["text"]) for event in events)  # each token is a letter
    assert [event["usage"]["completion_tokens"] for event in events] == list(said)
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}


def raw(server: Served, data: bytes) -> bytes:
    """What is answered to these bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("header", [b"", b"Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_its_stream_without_chunks_up_to_the_end_of_the_connection(
    server: Served, header: bytes
):
    body = json.dumps({"prompt": "Hello", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (header, len(body))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + body)
        head, _, events = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"200 OK" in head and b"chunked" not in head
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


# Several prompts, echo, log-probabilities


@pytest.mark.parametrize("prompt", [["Hello", "Paris"], [[41, 70], [49]], ["Hello", [41, 70]]])
def test_several_prompts_have_their_choices_in_order(server: Served, prompt: list[Any]):
    body = {"prompt": prompt, "max_tokens": 3, "n": 2}
    whole = answer(server, COMPLETIONS, **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    alone = [answer(server, COMPLETIONS, **body | {"prompt": each, "n": 1})["choices"][0]["text"] for each in prompt]
    assert [choice["text"] for choice in whole["choices"]] == [text for text in alone for _ in range(2)]
    events = stream(server, COMPLETIONS, **body)
    assert [joined(COMPLETIONS, events, i) for i in range(4)] == [choice["text"] for choice in whole["choices"]]


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("prompt", ["Hello 中", [41, 70, 77]])
def test_echo_shows_the_prompt_before_the_answer(
    server: Served, tokenizer: Tokenizer, prompt: Any, logprobs: int | None, max_tokens: int
):
    body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    whole = answer(server, COMPLETIONS, **body)
    (choice,) = whole["choices"]
    ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    shown = ids + ids[:max_tokens]
    assert choice["text"] == tokenizer.decode(shown)
    assert choice["finish_reason"] == "length" and whole["usage"]["completion_tokens"] == max_tokens
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        expected = [None, *(pytest.approx(-1 - token / 1000) for token in shown[1:])]
        assert choice["logprobs"]["token_logprobs"] == expected
        assert choice["logprobs"]["top_logprobs"][0] is None and len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert "prompt_logprobs" not in choice
    events = stream(server, COMPLETIONS, **body)
    assert joined(COMPLETIONS, events) == choice["text"]
    if logprobs is not None:
        assert scores(COMPLETIONS, events) == choice["logprobs"]


def test_the_logprobs_of_a_prompt_are_the_same_streamed_or_not(server: Served):
    body = {"messages": HELLO, "prompt_logprobs": 1}
    (choice,) = answer(server, CHAT, **body)["choices"]
    events = stream(server, CHAT, **body)
    assert events[0]["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"][1]["top_logprobs"]) == 1


# Conversations


def prompt_of(server: Served, tokenizer: Tokenizer, **body: Any) -> str:
    """The prompt that the model gets for a conversation."""
    (choice,) = answer(server, CHAT, max_tokens=1, return_token_ids=True, **body)["choices"]
    return tokenizer.decode(choice["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        ([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}], "Hi"),
        ([], ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_content_is_text_or_parts_of_text_or_null_in_every_role(
    server: Served, tokenizer: Tokenizer, role: str, content: Any, text: str
):
    prompt = prompt_of(server, tokenizer, messages=[{"role": role, "content": content}])
    shown = "system" if role == "developer" else role
    assert prompt == f"<|im_start|>{shown}\n{text}<|im_end|>\n<|im_start|>poet\n"


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "Hello<|im_end|>\n<|im_start|>poet\n"),
        ({"chat_template_kwargs": {"persona": "judge"}}, "Hello<|im_end|>\n<|im_start|>judge\n"),
        ({"add_generation_prompt": False}, "Hello<|im_end|>\n"),
        ({"continue_final_message": True}, "Hello"),
    ],
)
def test_options_of_the_template_reach_it_over_those_of_the_server(
    server: Served, tokenizer: Tokenizer, options: dict[str, Any], end: str
):
    expected = f"<|im_start|>user\n{end}"
    assert prompt_of(server, tokenizer, messages=HELLO, **options) == expected
    tokens = answer(server, "/tokenize", messages=HELLO, **options)["tokens"]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected


# Errors

LONG = "x" * (2 * CONTEXT)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code", "part"),
    [
        (CHAT, b"{", 400, None, None, "the body is not JSON"),
        (CHAT, b"", 400, None, None, "the body is not JSON"),
        (CHAT, b'{"a": "\xff"}', 400, None, None, "the body is not JSON"),
        (CHAT, b"[" * 100_000, 400, None, None, "the body is"),
        (CHAT, [1], 400, None, None, "must be a JSON object"),
        (CHAT, b'{"tools": %b%b}' % (b"[" * 990, b"]" * 990), 400, "tools", "unsupported_parameter", ""),
        (CHAT, b'{"messages": [{"role": %b%b}]}' % (b"[" * 990, b"]" * 990), 400, "messages", None, ""),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, None, "the body is not JSON"),
        (CHAT, {}, 400, "messages", None, "at least one message, got None"),
        (CHAT, {"messages": []}, 400, "messages", None, "at least one message, got []"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages", None, "system, developer, user, assistant, tool"),
        (CHAT, {"messages": [{"role": "human", "content": "x"}]}, 400, "messages", None, "got 'human'"),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages", None, "got ['user']"),
        (CHAT, {"messages": ["x"]}, 400, "messages", None, "got 'x'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages",
            None,
            "got one of type 'image_url'",
        ),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages", None, "content must be"),
        (CHAT, {"messages": [{"role": "user", "content": "refuse"}]}, 400, "messages", None, "I take no such"),
        (
            CHAT,
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            400,
            "messages",
            None,
            "exclude each other",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": LONG}]},
            400,
            "messages",
            "context_length_exceeded",
            f"tokens; the context holds {CONTEXT}",
        ),
        (
            COMPLETIONS,
            {"prompt": [5] * CONTEXT},
            400,
            "prompt",
            "context_length_exceeded",
            f"the prompt has {CONTEXT} tokens; the context holds {CONTEXT}",
        ),
        (COMPLETIONS, {"prompt": ["fine", LONG]}, 400, "prompt", "context_length_exceeded", "the context holds"),
        (COMPLETIONS, {"prompt": ["x"] * 5000}, 400, "prompt", None, "5000 answers are asked for"),
        (COMPLETIONS, {"prompt": ["x"] * 5, "n": 1024}, 400, "prompt", None, "--max-queued-requests is 4096"),
        (COMPLETIONS, {"prompt": ""}, 400, None, None, "the prompt has no tokens"),
        (COMPLETIONS, {"prompt": [400]}, 400, None, None, "token id 400 is not in the model's vocabulary of 400"),
        (COMPLETIONS, {"prompt": [-1]}, 400, None, None, "token id -1"),
        (COMPLETIONS, {"prompt": [2**70]}, 400, None, None, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", None, "at least 1, got 0"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1, "echo": True}, 400, "max_tokens", None, "got -1"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"400": 1}}, 400, None, None, "logit_bias: token id 400"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**70}, 400, "seed", None, "seed must be"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 2**31}, 400, "min_tokens", None, "got 2147483648"),
        (COMPLETIONS, {"prompt": "x", "n": 2000}, 400, "n", None, "from 1 to 1024"),
        (
            COMPLETIONS,
            {"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": 1},
            400,
            "prompt_logprobs",
            None,
            "leave out prompt_logprobs",
        ),
        (CHAT, {"messages": HELLO, "stream": "yes"}, 400, "stream", None, "true or false, got 'yes'"),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400, "stream_options", None, "needs"),
        (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"x": 1}}, 400, "stream_options", None, "got"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, 400, "tools", "unsupported_parameter", "not supported"),
        (CHAT, {"messages": HELLO, "temprature": 1}, 400, "temprature", "unknown_parameter", "mean temperature?"),
        (CHAT, {"messages": HELLO, "a\nb": 1}, 400, "a\nb", "unknown_parameter", "'a\\nb' is not a field of"),
        (CHAT, {"messages": HELLO, "model": "gpt-5"}, 404, "model", "model_not_found", "'gpt-5' is not loaded"),
        ("/tokenize", {}, 400, "prompt", None, "set prompt, a text, or messages"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt", None, "not both"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", None, "prompt is 5"),
        ("/tokenize", {"prompt": "x", "spaces": 1}, 400, "spaces", "unknown_parameter", "not a field of /tokenize"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens", None, "a list of token ids"),
        ("/detokenize", {"tokens": [400]}, 400, None, None, "from 0 to 395, got 400"),
        ("/nothing", {}, 404, None, None, "there is no /nothing"),
        ("/health", {}, 405, None, None, "POST is not for /health, but GET"),
        (CHAT, b" " * 1_000_001, 413, None, None, "larger than --max-body-mb, 1 MB"),
    ],
)
def test_what_cannot_run_is_refused_in_the_shape_of_openai(
    server: Served, path: str, body: Any, status: int, param: str | None, code: str | None, part: str
):
    error = refused(server, path, body, status)
    assert part in error["message"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


BROKEN = [
    b"hello\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
]


@pytest.mark.parametrize("data", BROKEN)
def test_what_is_no_http_is_refused_or_dropped_and_not_logged(server: Served, data: bytes):
    with contextlib.suppress(ConnectionError):
        answered = raw(server, data)
        assert answered == b"" or answered.startswith(b"HTTP/1.0 400 ")
    assert ask(server, "/health")[0] == 200
    assert server.frontends[0].logged() == ""


def test_a_body_that_cannot_be_unpacked_is_refused(server: Served):
    status, _, body = ask(server, COMPLETIONS, b"hello", headers={"Content-Encoding": "gzip"})
    assert status == 400 and "the body cannot be read" in body["error"]["message"]
    packed = gzip.compress(json.dumps({"prompt": "Hello", "max_tokens": 1}).encode())
    assert ask(server, COMPLETIONS, packed, headers={"Content-Encoding": "gzip"})[0] == 200
    bomb = gzip.compress(b" " * 5_000_000)
    assert ask(server, COMPLETIONS, bomb, headers={"Content-Encoding": "gzip"})[0] == 413


BORDERS = st.sampled_from([sign * (1 << bits) for bits in (31, 32, 53, 63, 64, 100) for sign in (1, -1)])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | BORDERS | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_body_whatever_is_the_servers_own_fault(server: Served, path: str, data: st.DataObject):
    names = {
        *OWN[path],
        *NEUTRAL[path],
        *(SAMPLING | WITHOUT_EFFECT | STREAM.keys() if path in (CHAT, COMPLETIONS) else ()),
    }
    body = {CHAT: {"messages": HELLO}, "/detokenize": {"tokens": [5]}}.get(path, {"prompt": "Hello"})
    if path in (CHAT, COMPLETIONS):
        body = body | {"max_tokens": 2}
    body = body | data.draw(st.dictionaries(st.sampled_from(sorted(names)), JSON, max_size=3))
    status, _, answered = ask(server, path, body)
    assert status in (200, 400, 404), answered


# Around it


def test_the_model_has_a_card_with_its_longest_request(server: Served):
    (card,) = ask(server, "/v1/models")[2]["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CONTEXT)
    assert ask(server, f"/v1/models/{MODEL}")[2] == card
    assert ask(server, "/v1/models/a/b")[::2] == (
        404,
        {
            "error": {
                "message": "model 'a/b' is not loaded",
                "type": "not_found_error",
                "param": "model",
                "code": "model_not_found",
            }
        },
    )


def test_text_becomes_tokens_and_text_again(server: Served, tokenizer: Tokenizer):
    found = answer(server, "/tokenize", prompt="Hello 中<|im_end|>", return_token_strs=True)
    assert found["tokens"] == tokenizer.encode("Hello 中<|im_end|>")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == CONTEXT
    assert answer(server, "/detokenize", tokens=found["tokens"]) == {"prompt": "Hello 中<|im_end|>"}
    assert answer(server, "/detokenize", tokens=found["tokens"], skip_special_tokens=True) == {"prompt": "Hello 中"}
    assert answer(server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_a_healthy_server_says_so_and_makes_a_token(server: Served):
    assert ask(server, "/health")[::2] == (200, {"status": "ok"})
    status, _, body = ask(server, "/health_generate")
    assert (status, body["status"]) == (200, "ok")


def test_metrics_are_the_engines(server: Served):
    status, headers, text = ask(server, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    assert re.fullmatch(r"minisgl:steps_total \d+\n", text)


def test_the_server_tells_how_it_is_configured_and_what_it_does(server: Served):
    _, _, info = ask(server, "/server_info")
    assert info["model"] == MODEL and info["engine"] == {"model": "some/tiny"}
    assert info["server"]["max_body_mb"] == 1 and info["server"]["api_key"] is False
    assert info["stats"]["running"] == 0 and info["frontend"]["open_requests"] == 0


def test_the_cache_is_flushed_by_post_alone(server: Served):
    before = ask(server, "/server_info")[2]["stats"]["retractions"]  # as the fake engine counts it
    assert ask(server, "/flush_cache", method="GET")[0] == 405
    assert ask(server, "/flush_cache", method="POST")[::2] == (200, {"flushed": True})
    assert ask(server, "/server_info")[2]["stats"]["retractions"] == before + 1


def test_the_description_has_every_route_and_every_field(server: Served):
    paths = ask(server, "/openapi.json")[2]["paths"]
    assert paths.keys() == {*SERVED, CHAT, COMPLETIONS, "/tokenize", "/detokenize"}
    for path, methods in paths.items():
        ((method, operation),) = methods.items()
        assert operation["summary"]
        status, _, body = ask(server, path.replace("{name}", MODEL), {} if method == "post" else None)
        assert status not in (404, 405), (path, body)
    for path in OWN:
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        sampling = {*SAMPLING, *STREAM, *WITHOUT_EFFECT} if path in (CHAT, COMPLETIONS) else set()
        assert schema["properties"].keys() == {*OWN[path], *NEUTRAL[path], *sampling}
        assert all(field["description"] for field in schema["properties"].values())
        assert refused(server, path, {})["param"] in (*schema["required"], *schema["properties"])


def test_a_request_keeps_its_id_or_gets_one(server: Served):
    assert ask(server, "/health", headers={"X-Request-Id": "mine-1"})[1]["x-request-id"] == "mine-1"
    for other in ("", "two words", "x" * 129, "é"):
        assert re.fullmatch(
            "req_[0-9a-f]{32}", ask(server, "/health", headers={"X-Request-Id": other})[1]["x-request-id"]
        )
    assert "x-request-id" in ask(server, "/nothing")[1]
    streaming = {"prompt": "Hello", "max_tokens": 1, "stream": True}
    assert ask(server, COMPLETIONS, streaming, headers={"X-Request-Id": "s"})[1]["x-request-id"] == "s"


# OpenAI's own client


def test_openais_client_reads_a_chat(client: openai.OpenAI):
    result = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], n=2, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in result.choices] == ["user\nHello"] * 2
    assert {choice.finish_reason for choice in result.choices} == {"stop"}
    assert result.usage and result.usage.prompt_tokens == 18 and result.usage.completion_tokens == 24
    assert result.usage.prompt_tokens_details and result.usage.prompt_tokens_details.cached_tokens == 0
    logprobs = result.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 12 and len(logprobs.content[0].top_logprobs) == 2


def test_openais_client_reads_a_streamed_chat(client: openai.OpenAI):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            max_completion_tokens=4,
        )
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "use"
    assert parts[-1].choices[0].finish_reason == "length"
    entries = [each for part in parts if part.choices[0].logprobs for each in part.choices[0].logprobs.content or []]
    assert len(entries) == 4  # a special token has no text, and a log-probability
    assert last.choices == [] and last.usage and last.usage.completion_tokens == 4


def test_openais_client_reads_a_completion(client: openai.OpenAI):
    result = client.completions.create(model=MODEL, prompt=["Hello", "Paris"], max_tokens=9, stop="lo", logprobs=1)
    assert [(choice.text, choice.finish_reason) for choice in result.choices] == [
        ("Hel", "stop"),
        ("ParisParisParisParisPar", "length"),
    ]
    assert result.choices[0].logprobs and result.choices[0].logprobs.tokens == ["H", "e", "l", "l", "o"]


def test_openais_client_gets_its_own_errors(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", max_tokens=-1)
    assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"


def test_openais_client_lists_the_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "minisgl"
