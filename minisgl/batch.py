"""Batch: one step of the engine as host arrays, complete when built; Outcome: what it brings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lists of different lengths, one after the other."""

    values: NDArray[Any]
    lengths: Int32

    @classmethod
    def of(cls, rows: Sequence[Sequence[float] | NDArray[Any]], dtype: type[np.generic] = np.int32) -> "Ragged":
        """From the lists."""
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        return cls(np.concatenate([np.empty(0, dtype), *rows]).astype(dtype), lengths)

    def rows(self) -> list[NDArray[Any]]:
        """The lists as views."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclass(frozen=True, eq=False)
class Joins:
    """Requests that enter, or come back after a retraction: how each slot is sampled. J rows."""

    slots: Int32  # [J]
    temperature: Float32  # [J], 0 is greedy
    top_k: Int32  # [J], 0 is off
    top_p: Float32  # [J], 1 is off
    min_p: Float32  # [J], 0 is off
    seed: NDArray[np.int64]  # [J]
    presence: Float32  # [J], 0 is off
    frequency: Float32  # [J], 0 is off
    repetition: Float32  # [J], 1 is off
    prompt_len: Int32  # [J]
    min_len: Int32  # [J], prompt and answer together: up to there the tokens of `stop_ids` are not drawn
    logprobs: Int32  # [J], alternatives to report for each token; -1 is off
    prompt_logprobs: Int32  # [J], the same for the prompt
    history: Ragged  # J lists: all tokens so far, where a penalty, bad words or prompt_logprobs need them
    stop_ids: Ragged  # J lists, where min_len needs them
    bias_ids: Ragged  # J lists of token ids
    bias: Ragged  # J lists of float32
    bad_words: Ragged  # J lists: each word's length and then its tokens

    @classmethod
    def greedy(cls, slots: Int32) -> "Joins":
        """Requests that take the likeliest token, and ask for nothing else."""
        n = len(slots)
        zeros, nothing = np.zeros(n, np.float32), Ragged.of([()] * n)
        counts, unset = np.zeros(n, np.int32), np.full(n, -1, np.int32)
        return cls(
            slots=slots,
            temperature=zeros,
            top_k=counts,
            top_p=np.ones(n, np.float32),
            min_p=zeros,
            seed=np.zeros(n, np.int64),
            presence=zeros,
            frequency=zeros,
            repetition=np.ones(n, np.float32),
            prompt_len=counts,
            min_len=counts,
            logprobs=unset,
            prompt_logprobs=unset,
            history=nothing,
            stop_ids=nothing,
            bias_ids=nothing,
            bias=Ragged.of([()] * n, np.float32),
            bad_words=nothing,
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """Decode rows first, by rising slot, then prefill rows. Arrays only, so that other ranks can be sent it as it is.

    A decode row has one query token, `last_token[slot]` on the device; a prefill row has `q_len` tokens,
    which stand in `input_ids`. A row that does not sample (a chunk that is not the prompt's last) neither
    draws nor writes `last_token`.
    """

    slots: Int32  # [B]
    q_len: Int32  # [B]
    kv_len: Int32  # [B], tokens with KV once this step has run
    num_decode: int
    input_ids: Int32  # [sum of the prefill rows' q_len]
    samples: NDArray[np.bool_]  # [B]
    page_writes: Int32  # [W, 3]: slot, index in the slot's table row, page
    joins: Joins


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities, from unmodified logits, of n tokens and of the K likeliest in the place of each."""

    chosen: Float32  # [n]
    top_ids: Int32  # [n, K], likeliest first
    top: Float32  # [n, K]

    def take(self, rows: NDArray[np.bool_]) -> "Logprobs":
        """Some of the n tokens."""
        return Logprobs(self.chosen[rows], self.top_ids[rows], self.top[rows])


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """The same for the prompt tokens `first`, `first + 1`, … of a slot's request."""

    slot: int
    first: int
    logprobs: Logprobs


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a batch brought."""

    tokens: Int32  # [S], one per row that samples, in row order; -1 where logits were not numbers
    logprob_rows: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # [n], which of the S rows report
    logprobs: Logprobs | None = None  # of these
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
