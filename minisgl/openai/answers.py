"""Bodies of answers in the terms of OpenAI's API, as plain dicts."""

import codecs
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minisgl.openai.protocol import CHAT, ApiRequest, RequestError

if TYPE_CHECKING:
    from minisgl.results import Completion, RequestOutput, TokenLogprob

TokenBytes = Callable[[int], bytes]
"""A token's UTF-8, which may be part of a character."""

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        404: "not_found_error",
        500: "server_error",
        503: "unavailable_error",
        504: "timeout_error",
    }
)


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
    return {
        "id": new_id("chatcmpl-" if chat else "cmpl-"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                **choice(request, output, completion, token_bytes),
                "finish_reason": finish_reason(request, completion),
                "stop_reason": completion.stop_reason,
                **shown_prompt(request, output.prompt_token_ids, output.prompt_logprobs, token_bytes),
                **({"token_ids": answer_ids(request, completion)} if request.return_token_ids else {}),
            }
            for index, (output, completion) in enumerate(answers)
        ],
        "usage": build_usage(request, outputs),
    }


def build_usage(request: ApiRequest, outputs: Sequence["RequestOutput"]) -> dict[str, Any]:
    """The tokens that a request took and made; a prompt counts once, however many answers it has."""
    return usage_of(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(answer_ids(request, answer)) for output in outputs for answer in output.outputs),
        sum(output.cached_tokens for output in outputs),
    )


def usage_of(tokens_in: int, tokens_out: int, cached: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": tokens_in,
        "completion_tokens": tokens_out,
        "total_tokens": tokens_in + tokens_out,
        "prompt_tokens_details": {"cached_tokens": cached},
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


def finish_reason(request: ApiRequest, completion: "Completion") -> str:
    """Why an answer ended; one that is not wanted ended with the prompt."""
    return "length" if request.prompt_only else completion.finish_reason


def answer_ids(request: ApiRequest, completion: "Completion") -> list[int]:
    """The tokens of an answer, none where only the prompt is wanted."""
    return [] if request.prompt_only else completion.token_ids


def shown_prompt(
    request: ApiRequest,
    token_ids: list[int],
    scores: "Sequence[TokenLogprob | None] | None",
    token_bytes: TokenBytes,
) -> dict[str, Any]:
    """What a choice shows of its prompt beside the text."""
    shown: dict[str, Any] = {}
    if scores is not None and not echoes_scores(request):
        shown["prompt_logprobs"] = [each and _entry(each, token_bytes) for each in scores]
    if request.return_token_ids:
        shown["prompt_token_ids"] = token_ids
    return shown


def echoes_scores(request: ApiRequest) -> bool:
    """Whether the prompt's log-probabilities stand before the answer's."""
    return request.echo and request.sampling.logprobs is not None


def prompt_text(prompt: str | None, token_ids: Sequence[int], token_bytes: TokenBytes) -> str:
    """A prompt as text: as it was given, or what its tokens are."""
    return b"".join(map(token_bytes, token_ids)).decode(errors="replace") if prompt is None else prompt


class Scores:
    """One answer's log-probabilities in the shape of a route, from its beginning on."""

    def __init__(self, route: str, token_bytes: TokenBytes) -> None:
        self._chat, self._token_bytes = route == CHAT, token_bytes
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the tokens so far: a token that is part of one begins where that does

    def show(self, tokens: Sequence[int], scores: Sequence["TokenLogprob | None"]) -> dict[str, Any]:
        """Of the next tokens; a prompt's first one has no log-probability."""
        if self._chat:
            return {"content": [each and _entry(each, self._token_bytes) for each in scores], "refusal": None}
        offsets = []
        pieces = [self._token_bytes(token) for token in tokens]
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(piece))
        return {
            "tokens": [_shown(piece) for piece in pieces],
            "token_logprobs": [each and each.logprob for each in scores],
            "top_logprobs": [each and _top(each, self._token_bytes) for each in scores],
            "text_offset": offsets,
        }


def _chat_choice(
    request: ApiRequest, output: "RequestOutput", completion: "Completion", token_bytes: TokenBytes
) -> dict[str, Any]:
    scores = completion.logprobs
    return {
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if scores is None else Scores(CHAT, token_bytes).show(completion.token_ids, scores),
    }


def _choice(
    request: ApiRequest, output: "RequestOutput", completion: "Completion", token_bytes: TokenBytes
) -> dict[str, Any]:
    tokens = answer_ids(request, completion)
    scores: list[TokenLogprob | None] = [*(completion.logprobs or ())[: len(tokens)]]
    text = "" if request.prompt_only else completion.text
    if request.echo:
        text = prompt_text(output.prompt, output.prompt_token_ids, token_bytes) + text
        tokens = output.prompt_token_ids + tokens
        scores = (output.prompt_logprobs or []) + scores
    shown = completion.logprobs is not None
    return {"text": text, "logprobs": Scores(request.route, token_bytes).show(tokens, scores) if shown else None}


def _top(logprob: "TokenLogprob", token_bytes: TokenBytes) -> dict[str, float]:
    """The likeliest tokens, and the one that was chosen; of those with the same text the likeliest."""
    top: dict[str, float] = {}
    for token, value in (*logprob.top.items(), (logprob.token_id, logprob.logprob)):
        top.setdefault(_shown(token_bytes(token)), value)
    return top


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
