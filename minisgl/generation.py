"""From prompts to requests and from tokens to results: the part of an engine's front that is about text."""

import hashlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from minisgl.batch import Logprobs
from minisgl.config import SamplingParams
from minisgl.request import FinishReason, Request, room_for
from minisgl.results import Completion, Piece, RequestOutput, Timing, TokenLogprob
from minisgl.tokenizer.stream import StreamDecoder
from minisgl.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "n": 1,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "priority": 0,
    }
)
"""Sampling where neither user nor model says anything."""

TAIL = 8
"""Tokens of a text prompt that its answer's decoder is shown."""

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Front:
    """What turns a prompt into requests: everything about them that can be wrong is found here, as a ValueError."""

    tokenizer: Tokenizer | None
    vocab_size: int
    context: int
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, Any]  # sampling, with a value for every field of NEUTRAL
    model_name: str

    def generation(self, prompt: Prompt, params: SamplingParams, key: int, seed: int, stream: bool) -> "Generation":
        """A prompt's requests, with keys from `key` on; `seed` is for those that set none."""
        ids = self.token_ids(prompt)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {params!r:.80}")
        params = params.with_defaults(self.defaults)
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        room = room_for(len(ids), params.max_tokens, self.context)
        if params.max_tokens is not None and room < params.max_tokens:
            logger.info("max_tokens %d cut to %d, which is what the context leaves", params.max_tokens, room)
        # No answer comes so far, and numbers must fit into messages and arrays.
        params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens or 0, room))
        if params.texts("stop"):
            self.need_tokenizer("a stop string")
        seed = seed if params.seed is None else params.seed
        own_stops = () if params.ignore_eos else self.eos_ids
        tokens = np.array(ids, dtype=np.int32)
        bad_words = self._bad_words(params.texts("bad_words"))
        requests = [
            Request(
                key=key + index,
                prompt=tokens,
                max_tokens=room,
                sampling=params,
                stop_ids=tuple({*(params.stop_token_ids or ()), *own_stops}),
                bad_words=bad_words,
                seed=derived_seed(seed, index),
                arrival_s=0.0,
            )
            for index in range(params.n or 1)
        ]
        requests[0].followers = requests[1:]
        return Generation(self.tokenizer, prompt if isinstance(prompt, str) else None, requests, stream)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids, checked."""
        if isinstance(prompt, str):
            ids = self.need_tokenizer("a text prompt").encode(prompt)
        elif is_list(prompt):
            ids = list(prompt)
        else:
            raise ValueError(f"a prompt must be text or token ids, got {prompt!r:.80}")
        for kind in set(map(type, ids)):
            if issubclass(kind, bool) or not issubclass(kind, int | np.integer):
                token = next(token for token in ids if type(token) is kind)
                raise ValueError(f"a prompt must be text or token ids, got {token!r:.80} in it")
        self._check_ids("prompt", ids)
        return ids

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer, or a ValueError that names what needs one."""
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self.model_name} has none: give token ids")
        return self.tokenizer

    def _check_ids(self, name: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}: token id {token} is not in the model's vocabulary of {self.vocab_size}")

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """A word's tokens at the beginning of a text, and after a space."""
        if not words:
            return ()
        tokenizer = self.need_tokenizer("bad_words")
        spelled = [tokenizer.encode(text, add_special_tokens=False) for word in words for text in (word, f" {word}")]
        return tuple({tuple(ids): None for ids in spelled if ids})


def is_list(value: object) -> bool:
    """Whether it is a list of some kind, also of numpy's: neither text nor a single value."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: the first one's is the user's, the others' are drawn from it."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(eq=False)
class Answer:
    """One request's text as it comes."""

    request: Request
    index: int
    decoder: StreamDecoder | None  # None: no stop strings, and nobody reads before the end
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion: Completion | None = None


class Generation:
    """A prompt's answers: tokens in, pieces and the result out."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: str | None, requests: list[Request], stream: bool) -> None:
        self.requests = requests
        self.request_id = requests[0].key
        self.prompt = prompt
        """The text, where it was one."""
        self.output: RequestOutput | None = None
        self.ended: list[Generation] | None = None
        """Where it puts itself when its output is there."""
        self.pieces: deque[Piece] = deque()
        """What has come and nobody has taken yet, where it is to stream."""
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * len(requests[0].prompt)
        """Of the prompt's tokens, as far as they have come."""
        self._tokenizer, self._stream = tokenizer, stream
        stops = requests[0].sampling.texts("stop")
        reads = stream or bool(stops)  # else text is made at the end, in one go
        self._answers = {r.key: Answer(r, i, self._decoder() if reads else None) for i, r in enumerate(requests)}
        self._first_token_s: float | None = None
        self._last_token_s = 0.0

    def _decoder(self) -> StreamDecoder | None:
        """A text prompt is continued, with the space before the next word; what follows token ids begins a text."""
        if self._tokenizer is None:
            return None
        params = self.requests[0].sampling
        tail = [] if self.prompt is None else self.requests[0].prompt[-TAIL:].tolist()
        return StreamDecoder(
            self._tokenizer,
            params.texts("stop"),
            skip_special_tokens=bool(params.skip_special_tokens),
            prompt_tail=tail,
            min_tokens=params.min_tokens or 0,
            include_stop=bool(params.include_stop_str_in_output),
        )

    def take_token(self, key: int, token: int, now_s: float) -> Request | None:
        """Take in a request's next token; returns the request if a stop string has ended it."""
        answer = self._answers[key]
        if self._first_token_s is None:
            self._first_token_s = now_s
        self._last_token_s = now_s
        text, matched = "", None
        if answer.decoder is not None and token not in answer.request.stop_ids:
            text = answer.decoder.push([token])
            matched = answer.decoder.matched
            answer.text.append(text)
        if self._stream:
            scored = answer.logprobs[-1:] if answer.request.sampling.logprobs is not None else None
            self.pieces.append(
                Piece(request_id=self.request_id, index=answer.index, text=text, token_ids=[token], logprobs=scored)
            )
        return None if matched is None else answer.request

    def take_logprobs(self, key: int, token: int, logprobs: Logprobs, row: int) -> None:
        """Take in what a token's log-probabilities are."""
        answer = self._answers[key]
        answer.logprobs.append(_token_logprob(token, logprobs, row, answer.request.sampling.logprobs or 0))

    def take_prompt_logprobs(self, first: int, logprobs: Logprobs) -> None:
        """The same for prompt tokens from `first` on; a retracted prompt brings them again."""
        request = self.requests[0]
        count = request.sampling.prompt_logprobs or 0
        for row in range(len(logprobs.chosen)):
            token = int(request.prompt[first + row])
            self.prompt_logprobs[first + row] = _token_logprob(token, logprobs, row, count)

    def end(self, key: int, now_s: float) -> None:
        """Note that a request has ended; the last one makes the output."""
        answer = self._answers[key]
        request, decoder = answer.request, answer.decoder
        assert request.finish_reason is not None
        ids: list[int] = request.output.tolist()
        shown = ids[:-1] if ids and ids[-1] in request.stop_ids else ids
        reason: FinishReason = request.finish_reason
        stop_reason: str | int | None = None
        if len(shown) < len(ids) and ids[-1] in (request.sampling.stop_token_ids or ()):
            stop_reason = ids[-1]
        text = rest = ""
        if decoder is None and (decoder := self._decoder()) is not None:
            answer.text.append(decoder.push(shown))
        if decoder is not None:
            rest = decoder.finish()
            text = "".join([*answer.text, rest])
            if decoder.matched is not None:
                ids, reason, stop_reason = ids[: decoder.num_tokens_kept], "stop", decoder.matched
        answer.completion = Completion(
            index=answer.index,
            text=text,
            token_ids=ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if request.sampling.logprobs is None else answer.logprobs[: len(ids)],
        )
        done = [a.completion for a in self._answers.values() if a.completion is not None]
        if len(done) == len(self._answers):
            self._complete(done, now_s)
        if self._stream:
            self.pieces.append(
                Piece(
                    request_id=self.request_id,
                    index=answer.index,
                    text=rest,
                    token_ids=[],
                    completion=answer.completion,
                    output=self.output,
                )
            )

    def _complete(self, completions: list[Completion], now_s: float) -> None:
        request = self.requests[0]
        first = self._first_token_s
        decode_s = 0.0 if first is None else self._last_token_s - first
        tokens = sum(len(c.token_ids) for c in completions) - len(completions)
        asked = request.sampling.prompt_logprobs is not None
        self.output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt.tolist(),
            prompt_logprobs=self.prompt_logprobs if asked else None,
            cached_tokens=request.cached_tokens or 0,
            outputs=completions,
            timing=Timing(
                ttft_s=None if first is None else first - request.arrival_s,
                total_s=now_s - request.arrival_s,
                decode_tokens_per_s=tokens / decode_s if tokens > 0 and decode_s > 0 else None,
            ),
        )
        if self.ended is not None:
            self.ended.append(self)


def _token_logprob(token: int, logprobs: Logprobs, row: int, count: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist(), strict=True)
    return TokenLogprob(token_id=token, logprob=float(logprobs.chosen[row]), top=dict(top))
