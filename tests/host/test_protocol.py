"""Request bodies of OpenAI's API, and the bodies that answer them."""

import dataclasses
import json
from typing import Any

import pytest
from fake_llm import output
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import SamplingParams
from minisgl.openai.answers import build_response, error_body
from minisgl.openai.protocol import (
    CHAT,
    COMPLETIONS,
    NEUTRAL,
    OWN,
    SAMPLING,
    WITHOUT_EFFECT,
    ApiRequest,
    RequestError,
    StreamOptions,
    parse_request,
)
from minisgl.results import RequestOutput, TokenLogprob

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ApiRequest:
    return parse_request(CHAT, {"messages": HELLO, **fields}, ["tiny"])


def complete(**fields: Any) -> ApiRequest:
    return parse_request(COMPLETIONS, {"prompt": "Hello", **fields}, ["tiny"])


def refusal(route: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        (chat if route == CHAT else complete)(**fields)
    return caught.value


# Requests


def test_a_conversation_is_kept_as_it_is():
    request = chat()
    assert (request.messages, request.prompts, request.template_options) == (HELLO, [], {})
    assert request.sampling == SamplingParams()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_several(prompt: Any, prompts: list[Any]):
    assert complete(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, {"text": "a"}, [True], [1, "a"], [[]], [1.0]])
def test_any_other_prompt_is_refused(prompt: Any):
    assert refusal(COMPLETIONS, prompt=prompt).param == "prompt"


@pytest.mark.parametrize("make", [chat, complete])
def test_every_sampling_field_has_its_own_name(make: Any):
    fields = {
        "n": 2,
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "bad_words": ["x"],
        "stop": "end",
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 2,
        "priority": 1,
    }
    assert make(**fields).sampling == SamplingParams(**fields)


def test_token_ids_are_text_in_the_keys_of_logit_bias():
    assert chat(logit_bias={"15043": -100, "5": 1.5}).sampling.logit_bias == {15043: -100, 5: 1.5}


@pytest.mark.parametrize("most", [2**30, 2**31, 2**63, 2**64, 10**30])
def test_more_tokens_than_any_context_has_are_cut_to_what_an_engine_can_count(most: int):
    assert chat(max_tokens=most).sampling.max_tokens == chat(max_completion_tokens=most).sampling.max_tokens == 2**30
    assert chat(max_tokens=most, min_tokens=2**30).sampling.min_tokens == 2**30
    for fields in ({}, {"max_tokens": most}):
        assert refusal(CHAT, min_tokens=most + 1, **fields).param == "min_tokens"


@pytest.mark.parametrize(
    "value",
    [{"one": 1}, [1], 5, {"1": 200}, {"1": "much"}, {"-1": 1}, {"5": 1, "05": 2}, {"1_0": 1}, {" 5": 1}, {"": 1}],
)
def test_any_other_logit_bias_is_refused(value: Any):
    assert refusal(CHAT, logit_bias=value).param == "logit_bias"


@pytest.mark.parametrize(
    ("make", "fields", "logprobs"),
    [
        (chat, {"logprobs": True}, 0),
        (chat, {"logprobs": True, "top_logprobs": 20}, 20),
        (chat, {"logprobs": False}, None),
        (chat, {"logprobs": False, "top_logprobs": 0}, None),
        (complete, {"logprobs": 0}, 0),
        (complete, {"logprobs": 5}, 5),
    ],
)
def test_each_route_asks_for_logprobs_in_its_own_way(make: Any, fields: dict[str, Any], logprobs: int | None):
    assert make(**fields).sampling.logprobs == logprobs


def test_what_the_body_turns_off_no_default_turns_on():
    defaults = SamplingParams(logprobs=3, temperature=0.5, stop=["x"], max_tokens=9)
    body = {"messages": HELLO, "logprobs": False, "stop": [], "temperature": None, "max_completion_tokens": 2}
    sampling = parse_request(CHAT, body, ["tiny"], defaults).sampling
    assert sampling == SamplingParams(temperature=0.5, stop=[], max_tokens=2)


def test_max_completion_tokens_is_another_name_of_max_tokens():
    assert chat(max_completion_tokens=7).sampling.max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).sampling.max_tokens == 7
    assert refusal(CHAT, max_completion_tokens=7, max_tokens=8).param == "max_completion_tokens"


def test_options_of_the_template_reach_it():
    request = chat(continue_final_message=True, add_generation_prompt=False, chat_template_kwargs={"thinking": 1})
    assert request.template_options == {"continue_final_message": True, "add_generation_prompt": False, "thinking": 1}


@pytest.mark.parametrize(
    ("route", "fields", "param", "part"),
    [
        (CHAT, {"messages": "hi"}, "messages", "a list of at least one message, got 'hi'"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0"),
        (
            CHAT,
            {"max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be at least 1, got 0",
        ),
        (CHAT, {"temperature": "hot"}, "temperature", "got 'hot'"),
        (CHAT, {"n": True}, "n", "got True"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        (CHAT, {"top_logprobs": []}, "top_logprobs", "needs logprobs: true"),
        (CHAT, {"logprobs": 2}, "logprobs", "logprobs must be true or false, got 2"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be from 0 to 20, got 21"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "got True"),
        *((CHAT, {name: ["x"] * 1001}, name, "has 1001 entries") for name in ("stop", "stop_token_ids", "bad_words")),
        (COMPLETIONS, {"min_tokens": 5, "max_tokens": 2}, "min_tokens", "from 0 to 2, got 5"),
        (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs", "got [1]"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "without messages"),
        (CHAT, {"add_generation_prompt": "yes"}, "add_generation_prompt", "true or false, got 'yes'"),
        (CHAT, {"return_token_ids": 1}, "return_token_ids", "true or false, got 1"),
        (CHAT, {"prompt": "hi"}, "prompt", "'prompt' is not a field of /v1/chat/completions"),
        (COMPLETIONS, {"messages": HELLO}, "messages", "'messages' is not a field of /v1/completions"),
        (CHAT, {"temprature": 1}, "temprature", "did you mean temperature?"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "response_format is not supported"),
        (CHAT, {"stream": True}, "stream", "stream is not supported"),
        (CHAT, {"echo": True}, "echo", "echo is not supported"),
        (CHAT, {"model": "gpt-5"}, "model", "'gpt-5' is not loaded, but tiny"),
        (CHAT, {"model": 5}, "model", "5 is not loaded"),
        (CHAT, {"model": []}, "model", "[] is not loaded"),
    ],
)
def test_what_would_change_the_output_is_refused_by_its_name(route: str, fields: dict[str, Any], param: str, part: str):
    error = refusal(route, **fields)
    assert error.param == param
    assert part in str(error) and "\n" not in str(error)
    assert error_body(error)["error"]["message"] == str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def outcome(route: str, body: dict[str, Any]) -> str:
    try:
        parse_request(route, body, {"tiny": None})
    except RequestError as error:
        return str(error)
    return "taken"


@given(route=st.sampled_from([CHAT, COMPLETIONS]), body=st.data())
@settings(max_examples=500, deadline=None)
def test_whatever_a_field_holds_it_is_taken_or_refused_in_one_line(route: str, body: st.DataObject):
    names = st.sampled_from(sorted({*SAMPLING, *OWN[route], *NEUTRAL[route], *WITHOUT_EFFECT, "other"}))
    given = {"messages": HELLO} if route == CHAT else {"prompt": "Hello"}
    given |= body.draw(st.dictionaries(names, JSON, max_size=3))
    assert "\n" not in outcome(route, given)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_role_stays_what_it_is(role: str):
    messages = [{"role": role, "content": "Hi", "name": "x"}]
    assert parse_request(CHAT, {"messages": messages}, ["tiny"]).messages == messages


def test_what_a_developer_says_is_a_system_message():
    messages = [{"role": "developer", "content": "Be brief."}]
    assert parse_request(CHAT, {"messages": messages}, ["tiny"]).messages == [messages[0] | {"role": "system"}]
    assert messages[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("fields", "stream"),
    [
        ({}, None),
        ({"stream": False, "stream_options": {}}, None),
        ({"stream": True}, StreamOptions()),
        ({"stream": True, "stream_options": {"include_usage": True}}, StreamOptions(include_usage=True)),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": None}},
            StreamOptions(continuous_usage_stats=True),
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, StreamOptions()),
    ],
)
def test_only_a_server_has_streams(fields: dict[str, Any], stream: StreamOptions | None):
    body = {"prompt": "Hello", **fields}
    assert parse_request(COMPLETIONS, body, ["tiny"], streams=True).stream == stream
    if stream is not None:
        assert refusal(COMPLETIONS, **fields).code == "unsupported_parameter"


def test_echo_scores_the_prompt_where_the_answer_is_scored():
    assert complete(echo=True).sampling == SamplingParams()
    assert complete(echo=True, logprobs=2).sampling == SamplingParams(logprobs=2, prompt_logprobs=2)
    assert refusal(COMPLETIONS, echo=True, logprobs=2, prompt_logprobs=1).param == "prompt_logprobs"
    assert complete(echo=True, prompt_logprobs=1).sampling.prompt_logprobs == 1


def test_no_tokens_are_asked_for_with_echo_alone():
    request = complete(echo=True, max_tokens=0)
    assert (request.prompt_only, request.sampling.max_tokens) == (True, 1)
    assert not complete(echo=True, max_tokens=1).prompt_only
    for fields in ({"max_tokens": 0}, {"max_tokens": -1, "echo": True}, {"max_tokens": False, "echo": True}):
        assert refusal(COMPLETIONS, **fields).param == "max_tokens"


def test_a_batch_file_has_echo_too():
    whole = answer(complete(echo=True, logprobs=0), scored_prompt())["choices"][0]
    assert whole["text"] == "xyabc"
    assert whole["logprobs"]["tokens"] == ["x", "y", "a", "b", "c"]
    assert whole["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, -0.5, -0.5]
    assert "prompt_logprobs" not in whole
    body = answer(complete(echo=True, max_tokens=0, return_token_ids=True), scored_prompt())
    (only,) = body["choices"]
    assert (only["text"], only["finish_reason"], only["token_ids"]) == ("xy", "length", [])
    assert body["usage"]["completion_tokens"] == 0


def scored_prompt() -> RequestOutput:
    result = output("abc", prompt_token_ids=[ord("x"), ord("y")], logprobs=0)
    scores = [None, TokenLogprob(token_id=ord("y"), logprob=-0.25, top={})]
    return dataclasses.replace(result, prompt_logprobs=scores)


@pytest.mark.parametrize("body", [None, "hi", [], 5])
def test_a_body_that_is_no_object_is_refused(body: Any):
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_request(CHAT, body, ["tiny"])


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_fields_at_a_value_without_effect_are_taken_and_so_is_null(route: str):
    make = chat if route == CHAT else complete
    plain = make()
    for name, values in NEUTRAL[route].items():
        for value in (*values, None):
            assert make(**{name: value}) == plain, name
    for name in WITHOUT_EFFECT:
        assert make(**{name: {"any": "thing"}}) == plain, name
    assert make(model="tiny") == make(model=None) == plain
    for name in ("temperature", "logprobs", "stop", "max_completion_tokens", "logit_bias"):
        assert make(**{name: None}) == plain, name


# Answers


def token_bytes(token: int) -> bytes:
    """Tokens from 256 on are single bytes, also of characters that have several."""
    return bytes([token - 256]) if token >= 256 else chr(token).encode()


def answer(request: ApiRequest, *outputs: RequestOutput) -> dict[str, Any]:
    body = build_response(request, outputs, "tiny", 1234, token_bytes)
    assert json.loads(json.dumps(body)) == body
    return body


def test_the_answer_to_a_conversation():
    body = answer(chat(), output("Hi", count=2, finish_reason="length"))
    assert body.pop("id").startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hi", "refusal": None}
    rest = {"message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert body == {
        "object": "chat.completion",
        "created": 1234,
        "model": "tiny",
        "choices": [{"index": 0, **rest}, {"index": 1, **rest}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_the_answer_to_a_prompt():
    body = answer(complete(), output("abc"))
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_two_answers_never_have_the_same_id():
    assert answer(chat(), output("a"))["id"] != answer(chat(), output("a"))["id"]


def test_logprobs_of_a_conversation_have_an_entry_for_each_token():
    body = answer(chat(logprobs=True, top_logprobs=2), output("abc", logprobs=2))
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "A", "logprob": -1.5, "bytes": [65]},
        ],
    }


def test_logprobs_of_a_completion_are_lists_beside_each_other():
    body = answer(complete(logprobs=0), output("abc", logprobs=0))
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],  # the chosen one always
        "text_offset": [0, 1, 2],
    }


def split_character() -> RequestOutput:
    """The answer a😀b, in six tokens."""
    result = output("a😀b", logprobs=0)
    tokens = [ord("a"), *(256 + byte for byte in "😀".encode()), ord("b")]
    scores = result.outputs[0].logprobs
    assert scores is not None
    result.outputs[0].token_ids[:] = tokens
    scores[:] = [TokenLogprob(token_id=token, logprob=-1.0, top={token: -1.0}) for token in tokens]
    return result


def test_a_part_of_a_character_has_its_own_bytes_and_all_bytes_joined_are_the_text():
    entries = answer(chat(logprobs=True), split_character())["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", *["\ufffd"] * 4, "b"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a😀b"
    assert [entry["top_logprobs"][0]["bytes"] for entry in entries] == [entry["bytes"] for entry in entries]


def test_the_offset_of_a_token_is_where_its_character_begins_in_the_text():
    logprobs = answer(complete(logprobs=0), split_character())["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_token_ids_are_returned_where_they_are_asked_for():
    (choice,) = answer(chat(return_token_ids=True), output("abc"))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98, 99], [1, 2])


def test_the_error_object_tells_what_is_wrong_with_which_field():
    assert error_body(refusal(CHAT, model="x")) == {
        "error": {
            "message": "model 'x' is not loaded, but tiny",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert error_body(ValueError("too long")) == {
        "error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}
    }
