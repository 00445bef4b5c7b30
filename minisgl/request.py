"""Request: a prompt, what came of it so far, and why it ended."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from minisgl.config import SamplingParams

Int32 = NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort", "error"]

NO_TOKENS: Int32 = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sequence to generate. The engine alone writes to it once it was added.

    While it runs, its tokens live in the scheduler's slot arrays; `output` is current whenever it
    holds no slot: before admission, while retracted, and from the moment it ends.
    """

    key: int  # unique in its engine
    prompt: Int32  # [N], N >= 1
    max_tokens: int  # most tokens to generate; prompt and these fit the context
    sampling: SamplingParams  # every field that has a default is set
    stop_ids: tuple[int, ...]  # tokens that end it: end-of-text unless ignored, and the user's
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that it must not produce
    seed: int
    arrival_s: float  # monotonic clock
    output: Int32 = field(default_factory=lambda: NO_TOKENS)
    slot: int = -1  # row of the device's tables; -1: none
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
    admitted_s: float | None = None  # when that was
    finish_reason: FinishReason | None = None
    retractions: int = 0
    passed_over: int = 0  # times that a later request was admitted while this one was the first to wait
    followers: list["Request"] = field(default_factory=list)  # wait until this one's prompt is in the prefix cache

    @property
    def priority(self) -> int:
        """Higher runs earlier under the priority policy, and is retracted later under every policy."""
        return self.sampling.priority or 0

    @property
    def needs_history(self) -> bool:
        """Whether its next token's scores depend on earlier tokens themselves, or its prompt is scored."""
        s = self.sampling
        penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty not in (None, 1)
        return bool(penalised or self.bad_words) or s.prompt_logprobs is not None

    @property
    def known(self) -> Int32:
        """Prompt and output so far; only while it holds no slot."""
        return np.concatenate([self.prompt, self.output]) if len(self.output) else self.prompt

    @property
    def num_known(self) -> int:
        """Length of `known`."""
        return len(self.prompt) + len(self.output)


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer in the context."""


def context_limit(model_len: int, num_pages: int, page_size: int) -> int:
    """The longest request in tokens, prompt and answer together: what the model allows and the KV pool holds."""
    return min(model_len, num_pages * page_size)


def room_for(prompt_len: int, max_tokens: int | None, context: int) -> int:
    """How many tokens may be generated after a prompt; a prompt that leaves no room is a ValueError."""
    if prompt_len < 1:
        raise ValueError("the prompt has no tokens")
    if prompt_len >= context:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; the context holds {context}, and at least one must be left for "
            f"the answer: shorten the prompt to {context - 1}, or raise --max-model-len or --num-pages where they "
            "are what limits it"
        )
    room = context - prompt_len
    return room if max_tokens is None else min(max_tokens, room)
