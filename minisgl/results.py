"""What comes back from a model, as users see it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from minisgl.request import FinishReason  # which brings numpy


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
    finish_reason: "FinishReason"
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


@dataclass(frozen=True)
class Cost:
    """What answers have taken, as the line below them says it; what nobody knows is None, and not said."""

    tokens_in: int | None
    cached: int | None  # of these, found in the prefix cache
    tokens_out: int | None
    ttft_s: float | None
    tokens_per_s: float | None
    joules: float | None = None  # what the GPUs took
    watts: float | None = None

    def __str__(self) -> str:
        cached = "" if self.cached is None else f" (cached {self.cached})"
        each = self.joules / self.tokens_out if self.joules is not None and self.tokens_out else None
        parts = (
            (self.tokens_in, f"tokens in {self.tokens_in}{cached}"),
            (self.tokens_out, f"out {self.tokens_out}"),
            (self.ttft_s, f"TTFT {(self.ttft_s or 0) * 1e3:.0f} ms"),
            (self.tokens_per_s, f"{self.tokens_per_s or 0:.1f} tok/s"),
            (self.watts, f"{self.watts or 0:.0f} W"),
            (each, f"{each or 0:.2g} J/token"),
        )
        return ", ".join(text for value, text in parts if value is not None)


def cost_of(outputs: Sequence[RequestOutput], elapsed_s: float) -> Cost:
    """What prompts have taken; of several the median TTFT, and the rate of all together."""
    tokens_out = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    waits_s = [output.timing.ttft_s for output in outputs if output.timing.ttft_s is not None]
    return Cost(
        tokens_in=sum(len(output.prompt_token_ids) for output in outputs),
        cached=sum(output.cached_tokens for output in outputs),
        tokens_out=tokens_out,
        ttft_s=statistics.median(waits_s) if waits_s else None,
        tokens_per_s=outputs[0].timing.decode_tokens_per_s if len(outputs) == 1 else tokens_out / elapsed_s,
    )


def streamed_cost(
    tokens_in: int | None,
    cached: int | None,
    tokens_out: int | None,
    ttft_s: float,
    decode_s: float,
    joules: float | None = None,
) -> Cost:
    """What one answer has taken that came as a stream, for `decode_s` seconds after its first token."""
    later = (tokens_out or 0) - 1
    rate = later / decode_s if later > 0 and decode_s > 0 else None
    watts = None if joules is None else joules / (ttft_s + decode_s)
    return Cost(tokens_in, cached, tokens_out, ttft_s, rate, joules, watts)


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
