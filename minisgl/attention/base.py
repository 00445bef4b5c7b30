"""What the model sees of attention, what a step tells it, and what a kernel library must offer to take part."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from minisgl.batch import Batch

PhaseName = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Shape:
    """All that decides whether a kernel can run."""

    page_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    capability: tuple[int, int] | None  # of the CUDA device; None on a CPU

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def device(self) -> str:
        """What it runs on, in words."""
        return "a CPU" if self.capability is None else "compute capability {}.{}".format(*self.capability)

    @property
    def dtype_name(self) -> str:
        """As users know it."""
        return str(self.dtype).removeprefix("torch.")


class KVCache:
    """The memory of keys and values, `[layer, 2, page, page_size, kv_head, head_size]`.

    A token's place in it is its entry: page * page_size + offset. The page after the last one belongs to nobody: rows
    that only fill up a CUDA graph write there.
    """

    def __init__(self, shape: Shape, num_layers: int, num_pages: int, device: torch.device) -> None:
        size = (num_layers, 2, num_pages + 1, shape.page_size, shape.num_kv_heads, shape.head_size)
        self.memory = torch.empty(size, dtype=shape.dtype, device=device)
        if device.type == "cuda":
            # Kernels give what lies beyond a request's last token a weight of 0, which a NaN would survive.
            self.memory.zero_()
        self.page_size, self.spare_page = shape.page_size, num_pages
        self._pages = [(keys, values) for keys, values in self.memory]
        self._entries = [(keys, values) for keys, values in self.memory.flatten(2, 3)]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by page: [pages, page_size, K, D] each."""
        return self._pages[layer]

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """The same by entry: [pages * page_size, K, D] each."""
        return self._entries[layer]


@dataclass(frozen=True, eq=False)
class Step:
    """One batch on the device. Rows as in `Batch`: decode first, then prefill.

    While a CUDA graph is captured, `static` says that `batch.kv_len` is no more than an upper bound.
    """

    batch: Batch
    tables: Tensor  # [B, pages per request] int32, each row's pages in order; beyond them, anything within the pool
    kv_len: Tensor  # [B] int32
    positions: Tensor  # [T] int64
    entries: Tensor  # [T] int64, where each token's keys and values go
    static: bool = False


class Phase(Protocol):
    """Attention of one kind of rows: those that prefill, or those that decode."""

    plans_on_host: bool
    """Whether `plan` reads lengths on the host: then a CUDA graph needs it again before each replay."""

    def plan(self, step: Step) -> None:
        """Prepare for the layers of one step, which has rows of this kind."""
        ...

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """Attend causally from q [t, H, D], the tokens of this kind of rows, to all that their requests have.

        The step's keys and values are in the cache already. The result is `out` [t, H, D], where that is given.
        """
        ...

    def for_graph(self, size: int, pages: int) -> "Phase":
        """The one to capture in a graph of `size` decode rows, of up to `pages` pages each; the largest comes first."""
        ...


class Attention(Protocol):
    """What a model asks for."""

    kv: KVCache

    @property
    def entries(self) -> Tensor:
        """Where the keys and values of this step's tokens go, [T] int64."""
        ...

    def forward(self, layer: int, q: Tensor) -> Tensor:
        """[T, H, D] to [T, H, D], once the step's keys and values of this layer are stored."""
        ...


class PagedAttention:
    """Attention over the KV cache: decode rows and prefill rows of a step each by their own kernel."""

    def __init__(self, kv: KVCache, prefill: Phase, decode: Phase) -> None:
        self.kv, self.prefill, self.decode = kv, prefill, decode
        self._step: Step | None = None

    @property
    def entries(self) -> Tensor:
        """Where the keys and values of this step's tokens go, [T] int64."""
        assert self._step is not None, "begin() comes before forward()"
        return self._step.entries

    def begin(self, step: Step, plan: bool = True) -> None:
        """Prepare for the layers of one step; without `plan` where its phases have planned already."""
        self._step = step
        if not plan:
            return
        if step.batch.num_decode:
            self.decode.plan(step)
        if step.batch.num_decode < len(step.batch.slots):
            self.prefill.plan(step)

    def forward(self, layer: int, q: Tensor) -> Tensor:
        """[T, H, D] to [T, H, D], once the step's keys and values of this layer are stored."""
        # Kernels write to memory that they are given; torch makes its own, and a copy would be one operation more.
        return self.attend(layer, q, torch.empty_like(q) if q.is_cuda else None)

    def attend(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """The same; the result is `out`, where that is given."""
        assert self._step is not None, "begin() comes before forward()"
        n = self._step.batch.num_decode
        if n in (0, len(q)):
            return (self.decode if n else self.prefill).forward(layer, q, out)
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        self.decode.forward(layer, q[:n], out[:n])
        self.prefill.forward(layer, q[n:], out[n:])
        return out

    def for_graph(self, size: int, pages: int) -> "PagedAttention":
        """The one to capture in a graph of `size` decode rows, of up to `pages` pages each; the largest comes first."""
        return PagedAttention(self.kv, self.prefill, self.decode.for_graph(size, pages))
