"""The bodies of OpenAI's API, as plain dicts: what a request asks for, and the answer in the same terms."""

import codecs
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minisgl.config import SamplingParams

if TYPE_CHECKING:
    from minisgl.results import Completion, RequestOutput, TokenLogprob

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES = (CHAT, COMPLETIONS)

TokenBytes = Callable[[int], bytes]
"""A token's UTF-8, which may be part of a character."""

SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"logit_bias", "logprobs"}
"""Fields that mean what they mean in `SamplingParams`."""

_OWN = ("model", "max_completion_tokens", "logit_bias", "logprobs", "return_token_ids")
TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
OWN = {
    CHAT: frozenset({*_OWN, "messages", "top_logprobs", *TEMPLATE}),
    COMPLETIONS: frozenset({*_OWN, "prompt"}),
}
"""Further fields that a route gives a meaning to."""

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
    "echo": (False,),
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
    }
)
"""Fields that are not supported, and the values at which that makes no difference; null always is one."""


_TYPES: Mapping[int, str] = MappingProxyType({404: "not_found_error", 500: "server_error"})


class RequestError(ValueError):
    """A request that cannot be done, in the terms of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """What a request body asks for."""

    route: str
    prompts: list[str | list[int]]  # of /v1/completions
    messages: list[Any]  # of /v1/chat/completions; the chat template judges them
    template_options: Mapping[str, Any]  # for the chat template, beside the messages
    sampling: SamplingParams
    return_token_ids: bool


def parse_request(
    route: str, body: object, models: Collection[str], defaults: SamplingParams | None = None
) -> ApiRequest:
    """Read the body of a request to a model that has these names; what it does not set comes from `defaults`.

    Null is the same as absent. Raises RequestError, naming the field, its value and what is allowed: nothing that
    would change the output is ignored.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {body!r:.80}")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(route, given)
    if "model" in given and not (isinstance(given["model"], str) and given["model"] in models):
        raise RequestError(
            f"model {given['model']!r:.200} is not loaded, but {' or '.join(models)}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return ApiRequest(
        route=route,
        prompts=_prompts(given) if route == COMPLETIONS else [],
        messages=_messages(given) if route == CHAT else [],
        template_options=_template_options(given) if route == CHAT else {},
        sampling=_sampling(route, given, defaults or SamplingParams()),
        return_token_ids=_truth(given, "return_token_ids"),
    )


def _refuse_unsupported(route: str, given: Mapping[str, Any]) -> None:
    known = SAMPLING | OWN[route] | WITHOUT_EFFECT
    for name, value in given.items():
        if name in known:
            continue
        if name not in NEUTRAL[route]:
            near = get_close_matches(name, [*known, *NEUTRAL[route]], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"{name} is not a field of {route}{hint}", param=name, code="unknown_parameter")
        if value not in NEUTRAL[route][name]:
            raise RequestError(
                f"{name} is not supported, got {value!r:.80}: leave it out", param=name, code="unsupported_parameter"
            )


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
    messages = given.get("messages")
    if isinstance(messages, list) and messages:
        return messages
    raise RequestError(f"messages must be a list of at least one message, got {messages!r:.80}", param="messages")


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or options.keys() & {"messages", "tools", "documents"}:
        raise RequestError(
            "chat_template_kwargs must be an object of the template's own variables, without messages, tools and "
            f"documents, got {options!r:.80}",
            param="chat_template_kwargs",
        )
    return options | {name: _truth(given, name) for name in TEMPLATE[:2] if name in given}


def _truth(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
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
    try:
        # What the body turns off (logprobs: false) stays off, whatever the defaults say.
        unset = {f.name: getattr(defaults, f.name) for f in fields(defaults) if f.name not in chosen}
        return SamplingParams(**chosen).with_defaults(unset)
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


# --- answers


def new_id(prefix: str) -> str:
    """An id that no other answer has: `chatcmpl-…`, `cmpl-…`, `batch_req_…`."""
    return prefix + uuid.uuid4().hex


def build_response(
    request: ApiRequest, outputs: Sequence["RequestOutput"], model: str, created: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """The body of the answer; `outputs` has one for each prompt, `created` is in seconds since 1970."""
    chat = request.route == CHAT
    choice = _chat_choice if chat else _choice
    answers = [(output, completion) for output in outputs for completion in output.outputs]
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(completion.token_ids) for _, completion in answers)
    return {
        "id": new_id("chatcmpl-" if chat else "cmpl-"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                **choice(completion, token_bytes),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                **_prompt_logprobs(output, token_bytes),
                **(_token_ids(output, completion) if request.return_token_ids else {}),
            }
            for index, (output, completion) in enumerate(answers)
        ],
        "usage": {
            "prompt_tokens": tokens_in,
            "completion_tokens": tokens_out,
            "total_tokens": tokens_in + tokens_out,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        },
    }


def error_body(error: ValueError) -> dict[str, Any]:
    """OpenAI's error object of what cannot be done; of another ValueError, of what it says."""
    known = isinstance(error, RequestError)
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(error.status, "invalid_request_error") if known else "invalid_request_error",
            "param": error.param if known else None,
            "code": error.code if known else None,
        }
    }


def _chat_choice(completion: "Completion", token_bytes: TokenBytes) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None
        if logprobs is None
        else {"content": [_entry(each, token_bytes) for each in logprobs], "refusal": None},
    }


def _choice(completion: "Completion", token_bytes: TokenBytes) -> dict[str, Any]:
    if completion.logprobs is None:
        return {"text": completion.text, "logprobs": None}
    pieces = [token_bytes(each.token_id) for each in completion.logprobs]
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = [0]
    for piece in pieces[:-1]:  # a token that is part of a character begins where that does
        offsets.append(offsets[-1] + len(characters.decode(piece)))
    return {
        "text": completion.text,
        "logprobs": {
            "tokens": [_shown(piece) for piece in pieces],
            "token_logprobs": [each.logprob for each in completion.logprobs],
            "top_logprobs": [_top(each, token_bytes) for each in completion.logprobs],
            "text_offset": offsets[: len(pieces)],
        },
    }


def _top(logprob: "TokenLogprob", token_bytes: TokenBytes) -> dict[str, float]:
    """The likeliest tokens, and the one that was chosen; of those with the same text the likeliest."""
    top: dict[str, float] = {}
    for token, value in (*logprob.top.items(), (logprob.token_id, logprob.logprob)):
        top.setdefault(_shown(token_bytes(token)), value)
    return top


def _prompt_logprobs(output: "RequestOutput", token_bytes: TokenBytes) -> dict[str, Any]:
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [each and _entry(each, token_bytes) for each in output.prompt_logprobs]}


def _token_ids(output: "RequestOutput", completion: "Completion") -> dict[str, list[int]]:
    return {"token_ids": completion.token_ids, "prompt_token_ids": output.prompt_token_ids}


def _entry(logprob: "TokenLogprob", token_bytes: TokenBytes) -> dict[str, Any]:
    return {
        **_token(logprob.token_id, logprob.logprob, token_bytes),
        "top_logprobs": [_token(token, value, token_bytes) for token, value in logprob.top.items()],
    }


def _token(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    piece = token_bytes(token)
    return {"token": _shown(piece), "logprob": logprob, "bytes": list(piece)}


def _shown(piece: bytes) -> str:
    """A token as text, U+FFFD for what is only part of a character."""
    return piece.decode(errors="replace")
