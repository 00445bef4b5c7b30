"""Decode steps as CUDA graphs, one for each batch size of a list: a replay costs the host one launch."""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import PagedAttention, Phase, Step
from minisgl.batch import Batch, Int32, Joins
from minisgl.kernels.inputs import decode_inputs
from minisgl.model.decoder import Decoder
from minisgl.runtime.staging import ALIGNED, Staging


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: one row has kernels of its own; matmuls are no faster for fewer than 8."""
    sizes = [1, *range(8, 256, 8), *range(256, largest, 16)]
    return [*(size for size in sizes if size < largest), largest] if largest else []


class DecodeGraphs:
    """Forwards of decode rows, from what the host says of a step to the logits, and to tokens where one rank has all.

    Their memory never moves, and all of it is shared: graphs run one after the other on one stream. Rows that only
    fill a graph's batch up belong to the slot after the last one, whose pages are the cache's spare page.
    """

    def __init__(
        self,
        model: Decoder,
        attention: PagedAttention,
        staging: Staging,
        page_table: Tensor,
        last_token: Tensor,
        draw: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None,
        largest: int,
    ) -> None:
        """`page_table` [slots + 1, pages per request] int32 and `last_token` [slots + 1] int64 are the runner's.

        `draw` makes tokens int64 [B] of logits, slots and lengths, and writes them to `last_token`.
        """
        self._draw = draw
        self._model, self._attention, self._staging = model, attention, staging
        self._page_table, self._last_token = page_table, last_token
        self._spare_slot, self._context = page_table.shape[0] - 1, page_table.shape[1] * attention.kv.page_size
        self._inputs = torch.empty(3 * (largest + ALIGNED), dtype=torch.int32, device=page_table.device)
        self._tables = torch.full_like(page_table[:1], attention.kv.spare_page).repeat(largest, 1)
        self._logits = model.norm.weight.new_empty(largest, model.vocabulary.mine.size)
        # The graph, what plans for it on the host, and what it has drawn.
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Phase | None, Tensor | None]] = {}
        self._sizes: list[int] = []
        self._stream = torch.cuda.Stream(page_table.device)
        self._memory = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int], report: Callable[[int, int], None] | None = None) -> None:
        """Capture graphs of these sizes, the largest first; `report` is told how many are done, and of how many."""
        wanted = sorted(set(sizes), reverse=True)
        for done, size in enumerate(wanted):
            self._graphs[size] = self._capture(size)
            if report is not None:
                report(done + 1, len(wanted))
        self._sizes = sorted(self._graphs)

    def size_for(self, rows: int) -> int | None:
        """The smallest graph that takes so many rows."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def replay(self, batch: Batch, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Logits [B, v] of a batch that only decodes, its slots and its lengths, int32 [B], and the tokens drawn, [B].

        They are valid until the next.
        """
        n, filler = len(batch.slots), self._filler(size)
        filler["slots"][:n], filler["kv_len"][:n] = batch.slots, batch.kv_len
        filler["new_pages"][np.searchsorted(batch.slots, batch.page_writes[:, 0])] = batch.page_writes[:, 2]
        sent = self._staging.send(filler, into=self._inputs)
        graph, planner, drawn = self._graphs[size]
        if planner is not None:
            planner.plan(self._step(sent, filler["kv_len"])[1])
        graph.replay()
        return self._logits[:n], sent["slots"][:n], sent["kv_len"][:n], None if drawn is None else drawn[:n]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Phase | None, Tensor | None]:
        attention, on_host = self._attention.for_graph(size, self._page_table.shape[1]), self._filler(size)
        sent = self._staging.send(on_host, into=self._inputs)
        if attention.decode.plans_on_host:
            attention.decode.plan(self._step(sent, on_host["kv_len"])[1])
        longest = np.full(size, self._context, np.int32)

        def forward() -> Tensor | None:
            input_ids, step = self._step(sent, longest)
            attention.begin(step, plan=not attention.decode.plans_on_host)
            hidden = self._model.forward(input_ids, step.positions, attention)
            logits = self._model.logits(hidden, out=self._logits[:size])
            return self._draw and self._draw(logits, sent["slots"], sent["kv_len"], self._last_token)

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()  # what is made at first use must not be made in a capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # In this thread only: NCCL has one of its own, which may ask how far the device is at any time.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            drawn = forward()
        return graph, attention.decode if attention.decode.plans_on_host else None, drawn

    def _filler(self, size: int) -> dict[str, Int32]:
        """What a graph is told of rows that belong to nobody: slot, length, and no page that they begin."""
        return {
            "slots": np.full(size, self._spare_slot, np.int32),
            "kv_len": np.ones(size, np.int32),
            "new_pages": np.full(size, -1, np.int32),
        }

    def _step(self, sent: dict[str, Tensor], kv_len: Int32) -> tuple[Tensor, Step]:
        """Input ids [size] and the step, worked out on the device; doing it twice changes nothing."""
        size = len(kv_len)
        tables = self._tables[:size]
        page_size = self._attention.kv.page_size
        input_ids, positions, entries = decode_inputs(
            **sent, last_token=self._last_token, page_table=self._page_table, page_size=page_size, tables=tables
        )
        batch = Batch(
            slots=np.full(size, self._spare_slot, np.int32),
            q_len=np.ones(size, np.int32),
            kv_len=kv_len,
            num_decode=size,
            input_ids=np.empty(0, np.int32),
            samples=np.ones(size, np.bool_),
            page_writes=np.empty((0, 3), np.int32),
            joins=Joins.greedy(np.empty(0, np.int32)),
        )
        return input_ids, Step(batch, tables, sent["kv_len"], positions, entries, static=True)
