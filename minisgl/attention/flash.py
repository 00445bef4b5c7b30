"""FlashAttention's kernels for prefill: version 4 (Dao et al., arXiv:2603.05451), or 2 (arXiv:2307.08691).

Version 4 has no split keys on Hopper, which decoding needs: name another backend for that.
"""

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import KVCache, Phase, PhaseName, Shape, Step
from minisgl.batch import Int32

_CAPABILITIES = {4: (9, 10), 2: (8, 9, 10, 12)}  # version 4 has no paged keys on 12.x
_PAGE_2 = 256  # version 2 takes pages of multiples of this


def version() -> int | None:
    """Which one is installed: 4 before 2. The folder alone does not tell them apart."""
    for number, name in ((4, "flash-attn-4"), (2, "flash-attn")):
        with suppress(PackageNotFoundError):
            distribution(name)
            return number
    return None


def supports(shape: Shape, phase: PhaseName) -> str | None:
    """None if the kernels can run, else why not."""
    number = version()
    if phase == "decode":
        return "flash is for prefill: name another backend for decode, as in flash,flashinfer"
    if number is None:
        return "flash-attn-4 is not installed: pip install 'minisgl[flash-attn]'"
    if shape.capability is None or shape.capability[0] not in _CAPABILITIES[number]:
        return f"flash-attn {number} does not run on {shape.device}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"flash takes bfloat16 and float16, not {shape.dtype_name}: use --dtype bfloat16, or reference"
    if shape.head_size not in (64, 96, 128):
        return f"flash takes heads of 64, 96 and 128, not {shape.head_size}"
    if number == 2 and shape.page_size % _PAGE_2:
        return f"flash-attn 2 takes pages of multiples of {_PAGE_2} tokens: use --page-size {_PAGE_2}"
    return None


def phases(kv: KVCache, shape: Shape, scale: float) -> tuple[Phase, None]:
    """Prefill by the version that is installed, and no decode. Version 2 has not been tested."""
    del shape
    return _Prefill(kv, scale), None


class _Prefill:
    """Any number of query tokens a row; page tables and lengths are read on the device."""

    plans_on_host = True

    def __init__(self, kv: KVCache, scale: float) -> None:
        self._kv, self._scale, self._version = kv, scale, version()
        module = "flash_attn.cute.interface" if self._version == 4 else "flash_attn"
        self._run = import_module(module).flash_attn_varlen_func
        self._arguments: dict[str, Any] = {}

    def plan(self, step: Step) -> None:
        """Say which tokens and pages are whose."""
        n, q_len, device = step.batch.num_decode, step.batch.q_len, step.tables.device
        self._arguments = {"cu_seqlens_q": _starts(q_len[n:], device), "max_seqlen_q": int(q_len[n:].max())}
        self._arguments |= {"causal": True, "softmax_scale": self._scale}
        if self._version == 4:
            self._arguments |= {"seqused_k": step.kv_len[n:], "page_table": step.tables[n:]}
        else:
            kv_len = step.batch.kv_len[n:]
            self._arguments |= {"cu_seqlens_k": _starts(kv_len, device), "max_seqlen_k": int(kv_len.max())}
            self._arguments |= {"block_table": step.tables[n:]}

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D]."""
        result = self._run(q, *self._kv.pages(layer), **self._arguments)
        result = result[0] if isinstance(result, tuple) else result
        return result if out is None else out.copy_(result)

    def for_graph(self, size: int, pages: int) -> Phase:
        """Graphs hold decode rows alone."""
        del size, pages
        return self


def _starts(lengths: Int32, device: torch.device) -> Tensor:
    """Where each of N rows begins, and where the last ends: [N + 1] int32."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(starts).to(device, non_blocking=True)
