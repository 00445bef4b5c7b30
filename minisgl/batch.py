"""Batch: one step of the engine as host arrays, complete when built."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Joins:
    """Requests that enter, or come back after a retraction: the sampling row of each slot. J rows."""

    slots: Int32  # [J]
    temperature: NDArray[np.float32]  # [J], 0 is greedy
    top_k: Int32  # [J], 0 is off
    top_p: NDArray[np.float32]  # [J], 1 is off
    seed: NDArray[np.int64]  # [J]


@dataclass(frozen=True, eq=False)
class Batch:
    """Decode rows first, then prefill rows. Arrays only, so that it can be sent to other ranks as it is.

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

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, decode and prefill together."""
        return self.num_decode + len(self.input_ids)
