"""FlashInfer's kernels (Ye et al., arXiv:2501.01005): paged prefill, and decode by XQA or by its decode kernels.

XQA reads page tables and lengths on the device: it needs no plan, and replays in a CUDA graph as it is. The others plan
on the host, from lengths, into buffers of their own.
"""

import shutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import KVCache, Phase, PhaseName, Shape, Step
from minisgl.batch import Int32
from minisgl.host import flashinfer_compiles, nvcc

_WORKSPACE_BYTES = 256 << 20
_CAPABILITIES = (8, 9, 10, 12)
_XQA_CAPABILITIES = (9, 10, 12)
_XQA_PAGE_SIZES = (16, 32, 64, 128)
_HEAD_SIZES = (64, 128, 256)
_MOST_GROUP = 16  # query heads per key head
_FEW_ROWS = 16  # up to here an early start of XQA pays
_PLAIN_GROUPS = (1, 2, 3)  # where decode without tensor cores is as fast, and plans in a tenth of the time


def supports(shape: Shape, phase: PhaseName) -> str | None:
    """None if the kernels can run, else why not."""
    del phase
    if not find_spec("flashinfer"):
        return "flashinfer is not installed: pip install 'minisgl[cuda]'"
    if shape.capability is None or shape.capability[0] not in _CAPABILITIES:
        return f"flashinfer runs on compute capabilities 8.x, 9.x, 10.x and 12.x, not on {shape.device}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"flashinfer takes bfloat16 and float16, not {shape.dtype_name}: use --dtype bfloat16, or reference"
    if shape.head_size not in _HEAD_SIZES:
        return f"flashinfer takes heads of {', '.join(map(str, _HEAD_SIZES))}, not {shape.head_size}"
    if shape.group > _MOST_GROUP:
        return f"flashinfer takes up to {_MOST_GROUP} query heads per key head, not {shape.group}"
    return None


def compiler_missing() -> str | None:
    """What is not there to compile kernels with, and the way out; None where all is, or no kernel has to be."""
    if not flashinfer_compiles():
        return None
    found = {
        "nvcc is not there: install a CUDA toolkit, or set CUDA_HOME to it": nvcc(),
        "ninja is not there: pip install ninja": shutil.which("ninja"),
    }
    return "; ".join(reason for reason, path in found.items() if path is None) or None


def has_xqa(shape: Shape) -> bool:
    """Whether decode runs by XQA."""
    return (
        shape.capability is not None
        and shape.capability[0] in _XQA_CAPABILITIES
        and shape.page_size in _XQA_PAGE_SIZES
        and shape.head_size in (64, 128)
        and shape.group <= 8
    )


def phases(kv: KVCache, shape: Shape, scale: float) -> tuple[Phase, Phase]:
    """Prefill by FlashAttention 3 on Hopper and 2 elsewhere; decode by XQA where it supports the shape."""
    memory = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv.memory.device)  # of what runs in turn
    decode = _XQA(kv, scale) if has_xqa(shape) else _Decode(kv, shape, scale, memory)
    return _Prefill(kv, shape, scale, memory), decode


class _Planned:
    """What prefill and decode share: a wrapper of the library that plans, one plan at a time on its way.

    A plan is copied from a pinned buffer of the wrapper, so the next one waits until that copy has passed.
    """

    plans_on_host = True

    def __init__(self, kv: KVCache, shape: Shape, scale: float) -> None:
        self._kv, self._shape, self._scale = kv, shape, scale
        self._copied = torch.cuda.Event()

    def _plan(self, wrapper: Any, tables: Tensor, kv_len: Int32, *q_indptr: Tensor, **options: Any) -> None:
        """Plan for rows of a page table [N, pages] and their lengths [N]."""
        page_size = self._kv.page_size
        pages = -(-kv_len // page_size)  # [N]
        indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)  # [N + 1]
        # Each row's pages, one row after the other; all sizes are known, so that the host does not wait.
        of_rows = torch.from_numpy(np.stack([indptr[:-1], pages.astype(np.int32)]))  # [2, N]
        on_device = of_rows.to(tables.device, non_blocking=True)
        rows = torch.arange(len(pages), device=tables.device)
        rows = rows.repeat_interleave(on_device[1], output_size=int(indptr[-1]))  # [sum of pages]
        columns = torch.arange(int(indptr[-1]), device=tables.device) - on_device[0][rows]
        self._copied.synchronize()
        wrapper.plan(
            *q_indptr,
            torch.from_numpy(indptr),
            tables[rows, columns],
            torch.from_numpy((kv_len - (pages - 1) * page_size).astype(np.int32)),
            self._shape.num_heads,
            self._shape.num_kv_heads,
            self._shape.head_size,
            page_size,
            sm_scale=self._scale,
            q_data_type=self._shape.dtype,
            kv_data_type=self._shape.dtype,
            **options,
        )
        self._copied.record()


class _Prefill(_Planned):
    """Any number of query tokens a row."""

    def __init__(self, kv: KVCache, shape: Shape, scale: float, memory: Tensor) -> None:
        super().__init__(kv, shape, scale)
        kernel = "fa3" if shape.capability is not None and shape.capability[0] == 9 else "fa2"
        library = import_module("flashinfer.prefill")
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(memory, backend=kernel)

    def plan(self, step: Step) -> None:
        """Plan the prefill rows."""
        n, batch = step.batch.num_decode, step.batch
        q_indptr = np.concatenate([[0], np.cumsum(batch.q_len[n:])]).astype(np.int32)
        self._plan(self._wrapper, step.tables[n:], batch.kv_len[n:], torch.from_numpy(q_indptr), causal=True)

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D]."""
        return self._wrapper.run(q, self._kv.pages(layer), out=out)

    def for_graph(self, size: int, pages: int) -> Phase:
        """Graphs hold decode rows alone."""
        del size, pages
        return self


class _Decode(_Planned):
    """One query token a row, by the library's own decode kernels."""

    def __init__(
        self, kv: KVCache, shape: Shape, scale: float, memory: Tensor, graph: dict[str, Tensor] | None = None
    ) -> None:
        """`graph` holds the buffers of a wrapper whose launches a CUDA graph repeats."""
        super().__init__(kv, shape, scale)
        library = import_module("flashinfer.decode")
        self._memory = memory
        self._page_list = kv.memory.new_empty(0, dtype=torch.int32)  # every row's pages, for graphs of all sizes
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            memory, use_tensor_cores=shape.group not in _PLAIN_GROUPS, use_cuda_graph=graph is not None, **(graph or {})
        )

    def plan(self, step: Step) -> None:
        """Plan the decode rows."""
        n = step.batch.num_decode
        self._plan(self._wrapper, step.tables[:n], step.batch.kv_len[:n])

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D]."""
        return self._wrapper.run(q, self._kv.pages(layer), out=out)

    def for_graph(self, size: int, pages: int) -> Phase:
        """One whose buffers never move."""
        if len(self._page_list) < size * pages:
            self._page_list = self._page_list.new_empty(size * pages)  # rows may share pages: each lists its own
        numbers = self._page_list.new_empty(2, size + 1)
        buffers = {
            "paged_kv_indptr_buffer": numbers[0],
            "paged_kv_indices_buffer": self._page_list,
            "paged_kv_last_page_len_buffer": numbers[1, :size],
        }
        return _Decode(self._kv, self._shape, self._scale, self._memory, buffers)


class _XQA:
    """One query token a row, by the kernel of TensorRT-LLM that FlashInfer carries."""

    plans_on_host = False

    def __init__(self, kv: KVCache, scale: float) -> None:
        self._kv, self._scale = kv, scale
        self._run = import_module("flashinfer.decode").xqa_batch_decode_with_kv_cache
        self._memory = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv.memory.device)  # its counters: 0
        self._tables = self._lengths = kv.memory.new_empty(0)

    def plan(self, step: Step) -> None:
        """Keep in view what the kernel reads."""
        n = step.batch.num_decode
        self._tables, self._lengths = step.tables[:n], step.kv_len[:n].view(torch.uint32)

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D]."""
        return self._run(
            q,
            self._kv.pages(layer),
            self._memory,
            self._tables,
            self._lengths,
            self._tables.shape[1] * self._kv.page_size,
            bmm1_scale=self._scale,
            out=out,
            enable_pdl=len(q) <= _FEW_ROWS,
        )

    def for_graph(self, size: int, pages: int) -> Phase:
        """The same: its memory never moves, and graphs run one after the other."""
        del size, pages
        return self
