"""What comes back from a model, as users see it."""

from dataclasses import dataclass

import msgspec

from minisgl.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability, from the model's unmodified scores, and the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: dict[int, float]  # by token id, likeliest first


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]  # with the end-of-text or stop token that ended it
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string, or the user's stop token; None for the model's own end
    logprobs: list[TokenLogprob] | None  # one per token, where asked for


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When things happened to a prompt's answers, in seconds."""

    ttft_s: float | None  # from arrival to the first token
    total_s: float  # from arrival to the end
    decode_tokens_per_s: float | None  # after the first token, all answers together; None where there is no second


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All that came of a prompt."""

    request_id: int
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None  # one per token, None for the first, where asked for
    cached_tokens: int  # prompt tokens whose KV was found in the prefix cache
    outputs: list[Completion]
    timing: Timing

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text


class Piece(msgspec.Struct, frozen=True, kw_only=True):  # a sixth of the time that a dataclass takes, for every token
    """A part of an answer as it streams; the last one carries the whole."""

    request_id: int
    index: int  # of the answer, where there are several
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # one per token, where asked for
    completion: Completion | None = None  # with the last piece of each answer
    output: RequestOutput | None = None  # with the last piece of all

    @property
    def finished(self) -> bool:
        return self.output is not None
