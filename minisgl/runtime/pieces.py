"""Forwards of any rows as CUDA graphs between the layers' attention, which alone is launched by itself.

A prompt of a few hundred tokens takes the device less time than the host needs to launch its kernels one by one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from minisgl.attention.base import KVCache, PagedAttention, Step
from minisgl.model.decoder import Decoder


def piece_sizes(largest: int) -> list[int]:
    """Numbers of tokens worth a set of graphs: padding adds at most a half, beyond 32."""
    sizes = [2**power * half // 2 for power in range(5, 17) for half in (2, 3)]  # 32, 48, 64, 96, …
    return [*(size for size in sizes if size < largest), largest]


class ForwardPieces:
    """For each of several numbers of tokens, the graphs that run before, between and after the layers' attention.

    Their memory never moves, and all of it is shared. Tokens that only fill a set up are the first of the spare page.
    """

    def __init__(self, model: Decoder, attention: PagedAttention, largest: int) -> None:
        """`largest` tokens are the most that a step has."""
        self._model, self._attention = model, attention
        weight = model.norm.weight
        self._input_ids = torch.zeros(largest, dtype=torch.int64, device=weight.device)
        self._positions, self._entries = torch.zeros_like(self._input_ids), torch.zeros_like(self._input_ids)
        self._q, self._out = weight.new_zeros(2, largest, model.num_heads, model.config.head_size)
        self._pieces: dict[int, tuple[list[torch.cuda.CUDAGraph], Tensor]] = {}
        self._sizes: list[int] = []
        self._stream = torch.cuda.Stream(weight.device)
        self._memory = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int], report: Callable[[int, int], None] | None = None) -> None:
        """Capture sets for these numbers of tokens, the largest first; `report` is told how many are done."""
        wanted = sorted(set(sizes), reverse=True)
        for done, size in enumerate(wanted):
            self._fill(0, size)
            self._pieces[size] = self._capture(size)
            if report is not None:
                report(done + 1, len(wanted))
        self._sizes = sorted(self._pieces)

    def forward(self, input_ids: Tensor, step: Step) -> Tensor:
        """Hidden states [T, E] of the tokens [T] of a step; valid until the next forward."""
        tokens = len(input_ids)
        size = self._sizes[bisect_left(self._sizes, tokens)]
        graphs, hidden = self._pieces[size]
        self._input_ids[:tokens], self._positions[:tokens] = input_ids, step.positions
        self._entries[:tokens] = step.entries
        self._fill(tokens, size)
        self._attention.begin(step)
        q, out = self._q[:tokens], self._out[:tokens]
        graphs[0].replay()
        for layer, graph in enumerate(graphs[1:]):
            self._attention.attend(layer, q, out)
            graph.replay()
        return hidden[:tokens]

    def _fill(self, tokens: int, size: int) -> None:
        """From that token on, up to `size`, there are only those of the spare page."""
        kv, rest = self._attention.kv, slice(tokens, size)
        self._input_ids[rest], self._positions[rest] = 0, 0
        self._entries[rest] = kv.spare_page * kv.page_size

    def _capture(self, size: int) -> tuple[list[torch.cuda.CUDAGraph], Tensor]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def cut() -> None:
            if graphs:
                graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")

        def forward(between: Callable[[], None]) -> Tensor:
            gap = _Gap(self._attention.kv, self._entries[:size], self._q[:size], self._out[:size], between)
            return self._model.forward(self._input_ids[:size], self._positions[:size], gap)

        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            forward(lambda: None)  # what is made at first use must not be made in a capture
            torch.cuda.synchronize()
            cut()
            hidden = forward(cut)
            graphs[-1].capture_end()
        torch.cuda.synchronize()
        return graphs, hidden


class _Gap:
    """Attention as a capture sees it: queries are put in `q`, `between` is called, and the result will be in `out`."""

    def __init__(self, kv: KVCache, entries: Tensor, q: Tensor, out: Tensor, between: Callable[[], None]) -> None:
        self.kv, self.entries = kv, entries
        self._q, self._out, self._between = q, out, between

    def forward(self, layer: int, q: Tensor) -> Tensor:
        del layer
        self._q.copy_(q)
        self._between()
        return self._out
