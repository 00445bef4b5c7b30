"""What the bodies of requests to OpenAI's API ask for: which fields there are, and what each may hold."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from minisgl.config import SamplingParams, check_range

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
ROUTES = (CHAT, COMPLETIONS)
"""What a batch file can ask for."""

MOST_TOKENS = 2**30
"""What a number of tokens is cut to: more than any context, and still an int32 with a prompt's length added."""

MOST_ENTRIES = 1000
"""What a list that is looked through for every token may have."""

ROLES = ("system", "developer", "user", "assistant", "tool")

Schema = Mapping[str, Any]
"""What a field may hold, as JSON Schema says it."""

SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"logit_bias", "logprobs"}
"""Fields that mean what they mean in `SamplingParams`."""


def _schema(kind: str | list[str], description: str, **more: Any) -> Schema:
    return {"type": kind, **more, "description": description}


_MODEL = {"model": _schema("string", "One of the names that the model is served under; default: the first.")}
_MESSAGES = {
    "messages": _schema(
        "array",
        "The conversation: objects with a role, and as content a text, a list of text parts, or null.",
        minItems=1,
        items={"type": "object", "required": ["role"], "properties": {"role": {"enum": ROLES}}},
    )
}
_TEMPLATE = {
    "add_generation_prompt": _schema("boolean", "Open the assistant's answer; default: true."),
    "continue_final_message": _schema("boolean", "Leave the last message open, for the model to go on with it."),
    "chat_template_kwargs": _schema("object", "Further variables of the model's chat template."),
}
_GENERATION = {
    **_MODEL,
    "max_completion_tokens": _schema("integer", "Another name of max_tokens.", minimum=1),
    "logit_bias": _schema("object", "From token ids to what is added to their scores, -100 to 100."),
    "return_token_ids": _schema("boolean", "Show the token ids of prompt and answer beside the text."),
}
OWN: Mapping[str, Mapping[str, Schema]] = {
    CHAT: {
        **_GENERATION,
        **_MESSAGES,
        **_TEMPLATE,
        "logprobs": _schema("boolean", "Show the log-probability of each token."),
        "top_logprobs": _schema("integer", "And of the so many likeliest in its place, up to 20."),
    },
    COMPLETIONS: {
        **_GENERATION,
        "prompt": _schema(["string", "array"], "A text, a list of token ids, or a list of either."),
        "logprobs": _schema("integer", "Log-probabilities of each token and of the so many likeliest, up to 20."),
        "echo": _schema("boolean", "Show the prompt before the answer; max_tokens may be 0 then."),
    },
    TOKENIZE: {
        **_MODEL,
        "prompt": _schema("string", "The text; or messages, a conversation, in its place."),
        "add_special_tokens": _schema("boolean", "With those that a prompt begins with; default: true for a text."),
        "return_token_strs": _schema("boolean", "Show each token's text beside its id."),
        **_MESSAGES,
        **_TEMPLATE,
    },
    DETOKENIZE: {
        **_MODEL,
        "tokens": _schema("array", "The token ids.", items={"type": "integer"}),
        "skip_special_tokens": _schema("boolean", "Leave special tokens out of the text; default: false."),
    },
}
"""Fields that a route gives a meaning to, beside those of `SAMPLING`."""

REQUIRED = {CHAT: ("messages",), COMPLETIONS: ("prompt",), TOKENIZE: (), DETOKENIZE: ("tokens",)}

STREAM: Mapping[str, Schema] = {
    "stream": _schema("boolean", "Send the answer in pieces, as server-sent events."),
    "stream_options": _schema(
        "object",
        "What a stream has beside its text: the usage in a last piece of its own, or so far in every piece.",
        properties={
            name: {"type": "boolean"} for name in ("include_usage", "continuous_usage_stats", "include_obfuscation")
        },
        additionalProperties=False,
    ),
}
"""Fields that only a server gives a meaning to: a batch file has no streams."""

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that never change the output: taken with any value."""

_EITHER: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        CHAT: {
            **_EITHER,
            "add_special_tokens": (False,),  # the template writes them
            "audio": (),
            "documents": ([],),
            "echo": (False,),
            "function_call": ("none", "auto"),
            "functions": ([],),
            "modalities": (["text"],),
            "prediction": (),
            "reasoning_effort": ("none",),
            "tool_choice": ("none", "auto"),
            "tools": ([],),
            "verbosity": ("medium",),
            "web_search_options": (),
        },
        COMPLETIONS: {**_EITHER, "add_special_tokens": (True,)},
        TOKENIZE: {},
        DETOKENIZE: {},
    }
)
"""Fields that are not supported, and the values at which that makes no difference; null always is one."""


class RequestError(ValueError):
    """A request that cannot be done, in the terms of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What a stream has beside its text."""

    include_usage: bool = False  # in a last piece of its own
    continuous_usage_stats: bool = False  # so far, in every piece


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """What a request body asks for."""

    route: str
    prompts: list[str | list[int]]  # of /v1/completions
    messages: list[Any]  # of /v1/chat/completions; the chat template judges what they hold
    template_options: Mapping[str, Any]  # for the chat template, beside the messages
    sampling: SamplingParams
    return_token_ids: bool
    echo: bool  # show the prompt before the answer
    prompt_only: bool  # show nothing else: max_tokens 0, for which the engine makes one token
    stream: StreamOptions | None  # None: answer in one body


def parse_request(
    route: str,
    body: object,
    models: Collection[str],
    defaults: SamplingParams | None = None,
    *,
    streams: bool = False,
) -> ApiRequest:
    """Read the body of a request to a model that has these names; what it does not set comes from `defaults`.

    Null is the same as absent. Raises RequestError, naming the field, its value and what is allowed: nothing that
    would change the output is ignored. `streams` says whether there can be any.
    """
    known = SAMPLING | OWN[route].keys() | WITHOUT_EFFECT | (STREAM.keys() if streams else frozenset())
    given = _given(route, body, known, models)
    echo = _truth(given, "echo")
    prompt_only = echo and type(given.get("max_tokens")) is int and given["max_tokens"] == 0
    sampling = _sampling(route, given | {"max_tokens": 1} if prompt_only else given, defaults or SamplingParams())
    if echo and sampling.logprobs is not None:
        if sampling.prompt_logprobs is not None:
            raise RequestError(
                "echo shows the prompt's log-probabilities with logprobs: leave out prompt_logprobs",
                param="prompt_logprobs",
            )
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    return ApiRequest(
        route=route,
        prompts=_prompts(given) if route == COMPLETIONS else [],
        messages=_messages(given) if route == CHAT else [],
        template_options=_template_options(given) if route == CHAT else {},
        sampling=sampling,
        return_token_ids=_truth(given, "return_token_ids"),
        echo=echo,
        prompt_only=prompt_only,
        stream=_stream(given) if streams else None,
    )


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """What the body of a request to /tokenize asks for: the tokens of a text, or of a conversation."""

    prompt: str | None
    messages: list[Any]
    template_options: Mapping[str, Any]
    add_special_tokens: bool
    return_token_strs: bool


def parse_tokenize(body: object, models: Collection[str]) -> TokenizeRequest:
    """Read the body of a request to /tokenize; raises RequestError as `parse_request` does."""
    given = _given(TOKENIZE, body, OWN[TOKENIZE].keys(), models)
    prompt = given.get("prompt")
    if (prompt is None) == ("messages" not in given) or not isinstance(prompt, str | None):
        raise RequestError(f"set prompt, a text, or messages, and not both; prompt is {prompt!r:.80}", param="prompt")
    return TokenizeRequest(
        prompt=prompt,
        messages=_messages(given) if prompt is None else [],
        template_options=_template_options(given),
        add_special_tokens=_truth(given, "add_special_tokens", prompt is not None),
        return_token_strs=_truth(given, "return_token_strs"),
    )


def parse_detokenize(body: object, models: Collection[str]) -> tuple[list[int], bool]:
    """The token ids in the body of a request to /detokenize, and whether special ones are left out of the text."""
    given = _given(DETOKENIZE, body, OWN[DETOKENIZE].keys(), models)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or not (_is_token_ids(tokens) or tokens == []):
        raise RequestError(f"tokens must be a list of token ids, got {tokens!r:.80}", param="tokens")
    return tokens, _truth(given, "skip_special_tokens")


def read_variables(text: str | None) -> dict[str, Any]:
    """Variables of the chat template for every request; raises ValueError unless `text` is a JSON object of them."""
    try:
        return _template_options({"chat_template_kwargs": json.loads(text or "{}")})
    except ValueError as error:
        raise ValueError(f"default_chat_template_kwargs: {error}") from error


def _given(route: str, body: object, known: Collection[str], models: Collection[str]) -> dict[str, Any]:
    """The fields that a body sets, each known or at a value without effect, for a model that is there."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {body!r:.80}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in known:
            continue
        if name not in NEUTRAL[route]:
            near = get_close_matches(name, [*known, *NEUTRAL[route]], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"{name!r:.80} is not a field of {route}{hint}", param=name, code="unknown_parameter")
        if value not in NEUTRAL[route][name]:
            raise RequestError(
                f"{name} is not supported, got {value!r:.80}: leave it out", param=name, code="unsupported_parameter"
            )
    if "model" in given and not (isinstance(given["model"], str) and given["model"] in models):
        raise RequestError(
            f"model {given['model']!r:.200} is not loaded, but {' or '.join(models)}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return given


def _stream(given: Mapping[str, Any]) -> StreamOptions | None:
    stream, options = _truth(given, "stream"), given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - STREAM["stream_options"]["properties"].keys():
        raise RequestError(
            f"stream_options must be an object of include_usage and continuous_usage_stats, got {options!r:.80}",
            param="stream_options",
        )
    if options and not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    asked = {name: _truth(options, name) for name in options if options[name] is not None}
    asked.pop("include_obfuscation", None)
    return StreamOptions(**asked) if stream else None


def _prompts(given: Mapping[str, Any]) -> list[str | list[int]]:
    prompt = given.get("prompt")
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return [prompt]  # type: ignore[list-item]
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) or _is_token_ids(each) for each in prompt):
        return prompt
    raise RequestError(
        f"prompt must be a text, a list of token ids, or a list of either, got {prompt!r:.80}", param="prompt"
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _messages(given: Mapping[str, Any]) -> list[Any]:
    """The conversation, what a developer says being what a system message says."""
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {messages!r:.80}", param="messages")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else message
        if not isinstance(message, dict) or role not in ROLES:
            raise RequestError(
                f"message {index} must be an object with a role, one of {', '.join(ROLES)}, got {role!r:.80}",
                param="messages",
            )
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or options.keys() & {"messages", "tools", "documents"}:
        raise RequestError(
            "chat_template_kwargs must be an object of the template's own variables, without messages, tools and "
            f"documents, got {options!r:.80}",
            param="chat_template_kwargs",
        )
    own = ("add_generation_prompt", "continue_final_message")
    return options | {name: _truth(given, name) for name in own if name in given}


def _truth(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r:.80}", param=name)
    return value


def _sampling(route: str, given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    chosen = {name: value for name, value in given.items() if name in SAMPLING}
    renamed = {}  # SamplingParams' name → the API's, where it is another
    if "max_completion_tokens" in given:
        limit = given["max_completion_tokens"]
        if chosen.get("max_tokens", limit) != limit:
            raise RequestError(
                f"max_completion_tokens={limit!r} and max_tokens={chosen['max_tokens']!r} contradict each other: "
                "set one of them",
                param="max_completion_tokens",
            )
        chosen["max_tokens"], renamed["max_tokens"] = limit, "max_completion_tokens"
    if "logit_bias" in given:
        chosen["logit_bias"] = _logit_bias(given["logit_bias"])
    if "logprobs" in given or "top_logprobs" in given:
        chosen["logprobs"] = _logprobs(given) if route == CHAT else given["logprobs"]
        renamed["logprobs"] = "top_logprobs" if route == CHAT else "logprobs"
    for name in ("stop", "stop_token_ids", "bad_words"):
        if isinstance(entries := chosen.get(name), list) and len(entries) > MOST_ENTRIES:
            raise RequestError(f"{name} has {len(entries)} entries, and at most {MOST_ENTRIES} are allowed", param=name)
    if type(most := chosen.get("max_tokens")) is int:
        chosen["max_tokens"] = min(most, MOST_TOKENS)
    try:
        # What the body turns off (logprobs: false) stays off, whatever the defaults say.
        sampling = SamplingParams(**{f.name: getattr(defaults, f.name) for f in fields(defaults)} | chosen)
        check_range("min_tokens", sampling.min_tokens, least=0, most=MOST_TOKENS)
        return sampling
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        param = renamed.get(name, name)
        raise RequestError(f"{param} {rest}", param=param if param in given else None) from error


def _logprobs(given: Mapping[str, Any]) -> int | None:
    """Chat's two fields as one: how many alternatives, or None for no log-probabilities at all."""
    asked, top = _truth(given, "logprobs"), given.get("top_logprobs")
    if not asked and top not in (None, 0):
        raise RequestError(f"top_logprobs is {top!r:.80}, which needs logprobs: true", param="top_logprobs")
    return (0 if top is None else top) if asked else None


def _logit_bias(value: object) -> dict[int, Any]:
    """JSON has only texts as keys."""
    if isinstance(value, dict) and all(re.fullmatch("0|[1-9][0-9]{0,9}", token) for token in value):
        return {int(token): bias for token, bias in value.items()}
    raise RequestError(
        f'logit_bias must be an object from token ids to numbers, like {{"15043": -100}}, got {value!r:.80}',
        param="logit_bias",
    )
