"""Our own kernel for decoding, `kernels.decode_attention`."""

import torch
from torch import Tensor

from minisgl.attention.base import KVCache, Phase, PhaseName, Shape, Step
from minisgl.kernels.compiler import triton
from minisgl.kernels.decode_attention import DecodeAttention


def supports(shape: Shape, phase: PhaseName) -> str | None:
    """None if the kernel can run, else why not."""
    if phase == "prefill":
        return "triton is for decode: name another backend for prefill, as in flashinfer,triton"
    if triton is None:
        return "triton is not installed: it comes with torch for CUDA"
    if shape.capability is None or shape.capability < (8, 0):
        return f"triton runs on compute capability 8.0 and later, not on {shape.device}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"triton takes bfloat16 and float16, not {shape.dtype_name}: use --dtype bfloat16, or reference"
    if shape.head_size not in (64, 128):
        return f"triton takes heads of 64 and 128, not {shape.head_size}"
    if shape.page_size < 16 or shape.page_size & (shape.page_size - 1):
        return f"triton takes pages of 16 tokens, 32, 64 and so on, not {shape.page_size}"
    return None


def phases(kv: KVCache, shape: Shape, scale: float) -> tuple[None, Phase]:
    """Decode alone."""
    return None, _Decode(kv, shape, scale)


class _Decode:
    """One query token a row; page tables and lengths are read on the device."""

    plans_on_host = False

    def __init__(self, kv: KVCache, shape: Shape, scale: float) -> None:
        self._kv, self._scale = kv, scale
        self._run = DecodeAttention(shape.num_heads, shape.num_kv_heads, shape.head_size, kv.memory.device)
        self._tables = self._lengths = kv.memory.new_empty(0)

    def plan(self, step: Step) -> None:
        """Keep in view what the kernel reads."""
        n = step.batch.num_decode
        self._tables, self._lengths = step.tables[:n], step.kv_len[:n]
        self._run.plan(self._lengths, self._kv.page_size)

    def forward(self, layer: int, q: Tensor, out: Tensor | None) -> Tensor:
        """[t, H, D] to [t, H, D]."""
        keys, values = self._kv.pages(layer)
        out = torch.empty_like(q) if out is None else out
        return self._run(q, keys, values, self._tables, self._lengths, self._scale, out)

    def for_graph(self, size: int, pages: int) -> Phase:
        """The same: its memory never moves, and graphs run one after the other."""
        del size, pages
        return self
