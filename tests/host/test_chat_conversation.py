"""Conversations as data and as files that OpenAI's clients take."""

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from minisgl.config import SamplingParams
from minisgl.openai.conversation import Conversation, Turn, read_saved, request_body
from minisgl.openai.protocol import CHAT, parse_request
from minisgl.results import streamed_cost

TURNS = (
    Turn(question="Who are you?", answer="Nobody.", thinking="Hm.", cost=streamed_cost(10, 0, 5, 0.1, 0.4)),
    Turn(question="日本語?", answer="はい。", cost=streamed_cost(20, 15, 4, 0.1, 0.3)),
)
CONVERSATION = Conversation(system="Be brief.", turns=TURNS)
SAMPLING = SamplingParams(
    temperature=0.5, max_tokens=9, stop=["\n"], seed=3, logprobs=2, logit_bias={5: -1.5}, top_k=4, ignore_eos=True
)


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(turn.question, turn.answer) for turn in conversation.turns]


def test_messages_are_in_order_and_without_thoughts():
    assert CONVERSATION.messages("And now?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Nobody."},
        {"role": "user", "content": "日本語?"},
        {"role": "assistant", "content": "はい。"},
        {"role": "user", "content": "And now?"},
    ]
    assert Conversation().messages() == []


def test_the_last_answer_tells_how_much_of_the_context_is_used():
    assert CONVERSATION.num_tokens == 24
    assert CONVERSATION.with_turns(TURNS[:1]).num_tokens == 15
    assert Conversation().num_tokens == Conversation(turns=(Turn(question="a", answer="b"),)).num_tokens == 0


@pytest.mark.parametrize("thinking", [None, True, False])
def test_what_was_saved_comes_back(thinking):
    body = request_body("some/model", CONVERSATION.messages("And now?"), SAMPLING, thinking)
    saved = read_saved(json.dumps(body).encode())
    assert (saved.conversation.system, said(saved.conversation)) == ("Be brief.", said(CONVERSATION))
    assert (saved.question, saved.sampling, saved.thinking) == ("And now?", SAMPLING, thinking)


def test_a_saved_conversation_is_a_request_to_any_server_of_the_api():
    plain = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=9, seed=3, stop="x", presence_penalty=0.1, logprobs=2)
    body = request_body("some/model", CONVERSATION.messages(), plain, None)
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
    assert body["logprobs"] is True and body["top_logprobs"] == 2
    assert parse_request(CHAT, body, ["some/model"]).sampling == plain


def test_messages_alone_are_a_conversation_too():
    saved = read_saved(json.dumps(CONVERSATION.messages()).encode())
    assert said(saved.conversation) == said(CONVERSATION)
    assert (saved.question, saved.sampling, saved.thinking) == (None, SamplingParams(), None)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"{", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 200_000, "it is not JSON"),
        ([], "messages must be a list of at least one message"),
        (3, "must be a JSON object"),
        ([{"role": "assistant", "content": "hi"}], "message 0 is"),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}], "message 1 is"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "message 0 is"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "message 1 is"),
        ({"messages": [{"role": "user", "content": "hi"}], "temperature": 1000}, "temperature must be from 0 to 100"),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": [1]}, "tools is not supported"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(data: Any, line: str):
    with pytest.raises(ValueError, match=line):
        read_saved(data if isinstance(data, bytes) else json.dumps(data).encode())


def test_the_line_below_an_answer_says_what_is_known_of_its_cost():
    assert str(streamed_cost(10, 5, 21, 0.5, 2.0)) == "tokens in 10 (cached 5), out 21, TTFT 500 ms, 10.0 tok/s"
    measured = streamed_cost(10, None, 21, 0.5, 2.0, joules=50.0)
    assert str(measured) == "tokens in 10, out 21, TTFT 500 ms, 10.0 tok/s, 20 W, 2.4 J/token"
    assert str(streamed_cost(None, None, None, 0.5, 2.0)) == "TTFT 500 ms"
    assert str(streamed_cost(3, 0, 1, 0.01, 0.0)) == "tokens in 3 (cached 0), out 1, TTFT 10 ms"
