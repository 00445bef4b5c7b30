"""What the model asks of an attention backend, and what a step tells it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minisgl.batch import Batch


@dataclass(frozen=True, eq=False)
class Step:
    """One batch on the device, as attention sees it. Rows as in `Batch`: decode first, then prefill."""

    batch: Batch
    page_table: Tensor  # [slots + 1, pages per request] int32, this step's writes included
    slots: Tensor  # [B] int64
    kv_len: Tensor  # [B] int32
    token_slots: Tensor  # [T] int64, the slot that each query token belongs to
    positions: Tensor  # [T] int64


class AttentionBackend(Protocol):
    """Paged attention with a KV cache of `[layer, 2, page, page_size, kv_head, head_size]`."""

    def plan(self, step: Step) -> None:
        """Prepare for the layers of one step."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally to all that the request has.

        q is [T, H, D], k and v are [T, K, D], rotated already; returns [T, H, D].
        """
        ...
