"""ModelRunner: runs batches on one device."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import PagedAttention, Step
from minisgl.batch import Batch, Int32, Joins
from minisgl.model.decoder import Decoder
from minisgl.runtime.graphs import DecodeGraphs
from minisgl.runtime.pieces import ForwardPieces
from minisgl.runtime.sampler import Sampler
from minisgl.runtime.staging import Pending, Scores, Staging


class ModelRunner:
    """Owns the device's side of the running requests: page tables, last tokens and sampling rows, by slot.

    Everything runs on one stream, in the order of `launch`: that is what lets a batch read what the one before
    it writes, and the prefix cache show a page as soon as the batch that fills it was launched.
    """

    def __init__(
        self, model: Decoder, attention: PagedAttention, *, num_slots: int, context: int, device: torch.device
    ) -> None:
        page_size, spare = attention.kv.page_size, attention.kv.spare_page
        self._model, self._attention, self._device = model, attention, device
        # A row more than slots, and a last token: what fills a CUDA graph's batch up.
        self._page_table = torch.full(
            (num_slots + 1, -(-context // page_size)), spare, dtype=torch.int32, device=device
        )
        self._last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._sampler = Sampler(num_slots, context, device, model.vocabulary)
        self._logprobs = np.full(num_slots, -1, dtype=np.int32)  # alternatives to report; -1: nothing
        self._prompt_top = np.full(num_slots, -1, dtype=np.int32)  # the same for the prompt
        self._prompt_end = np.zeros(num_slots, dtype=np.int32)  # the prompt's length
        self._staging = Staging(device)
        self._graphs: DecodeGraphs | None = None
        self._pieces: ForwardPieces | None = None

    def capture(
        self, rows: Sequence[int], tokens: Sequence[int], report: Callable[[int, int], None] | None = None
    ) -> None:
        """From now on use CUDA graphs: whole ones of these numbers of rows, for steps that decode and do nothing else.

        All other steps use pieces, of these numbers of tokens, the largest of which is more than a step can have.
        `report` is told how many are captured, and of how many.
        """
        total = len(rows) + len(tokens)

        def tell(done: int) -> None:
            if report is not None:
                report(done, total)

        self._pieces = ForwardPieces(self._model, self._attention, max(tokens))
        self._pieces.capture(tokens, lambda done, _: tell(done))
        tables = self._page_table, self._last_token
        draw = self._sampler.draw if len(self._model.vocabulary.parts) == 1 else None
        self._graphs = DecodeGraphs(self._model, self._attention, self._staging, *tables, draw, max(rows))
        self._graphs.capture(rows, lambda done, _: tell(len(tokens) + done))

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Pending:
        """Run a batch's forward and sampling; on CUDA this returns before the device is done."""
        try:
            return self._launch(batch)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                "a step does not fit the GPU's memory beside the KV pool: lower --gpu-memory-utilization, "
                f"--chunked-prefill-size or --max-running-requests ({str(error).splitlines()[0]})"
            ) from error

    def _launch(self, batch: Batch) -> Pending:
        self._take_joins(batch.joins)
        only_decodes = batch.num_decode == len(batch.slots)
        size = self._graphs.size_for(batch.num_decode) if self._graphs and only_decodes else None
        if self._graphs is None or size is None:
            return self._launch_any(batch)
        logits, slots, lengths, drawn = self._graphs.replay(batch, size)
        return self._sample(batch, logits, slots, lengths, [], drawn)

    def _launch_any(self, batch: Batch) -> Pending:
        sent = self._staging.send(_host_arrays(batch))
        slots, kv_len, positions = sent["slots"].long(), sent["kv_len"], sent["positions"].long()
        if len(batch.page_writes):
            slot, index, page = sent["page_writes"].view(-1, 3).long().unbind(dim=1)
            self._page_table[slot, index] = page.int()
        page_size = self._attention.kv.page_size
        pages = self._page_table[sent["token_slots"].long(), positions // page_size].long()  # [T]
        entries = pages * page_size + positions % page_size
        input_ids = torch.cat([self._last_token[slots[: batch.num_decode]], sent["input_ids"].long()])  # [T]
        step = Step(batch, self._page_table[slots], kv_len, positions, entries)
        if self._pieces is not None:
            hidden = self._pieces.forward(input_ids, step)  # [T, E]
        else:
            self._attention.begin(step)
            hidden = self._model.forward(input_ids, positions, self._attention)  # [T, E]
        prompts = self._score_prompts(batch, hidden)
        if not batch.samples.any():
            return self._staging.receive(torch.empty(0, dtype=torch.int64, device=self._device), NOBODY, None, prompts)
        logits = self._model.logits(hidden[sent["sample_tokens"].long()])  # [S, v]
        rows = sent["sample_rows"].long()
        return self._sample(batch, logits, sent["slots"][rows], kv_len[rows], prompts)

    def _sample(
        self, batch: Batch, logits: Tensor, slots: Tensor, lengths: Tensor, prompts: list[tuple[int, int, Scores]],
        drawn: Tensor | None = None,
    ) -> Pending:  # fmt: skip
        """Draw from logits [S, v] of the rows that sample; `slots` and `lengths` are theirs on the device, int32.

        `drawn` has been already, as requests have it that want nothing else; for others that is done once more.
        """
        rows = batch.slots[batch.samples]
        if drawn is not None and self._sampler.only_draws(rows):
            tokens = drawn
        else:
            kv_len = batch.kv_len[batch.samples]
            tokens = self._sampler.sample(logits, rows, kv_len, slots, lengths, self._last_token)  # [S]
        reports = np.flatnonzero(self._logprobs[rows] >= 0).astype(np.int32)
        scores = None
        if reports.size:
            at = torch.from_numpy(reports).to(self._device, non_blocking=True)
            asked = self._model.vocabulary.whole(logits[at])
            scores = logprobs(asked, tokens[at].clamp(min=0), int(self._logprobs[rows].max()))
        return self._staging.receive(tokens, reports, scores, prompts)

    def _take_joins(self, joins: Joins) -> None:
        if len(joins.slots):
            self._sampler.join(joins)
            self._logprobs[joins.slots] = joins.logprobs
            self._prompt_top[joins.slots] = joins.prompt_logprobs
            self._prompt_end[joins.slots] = joins.prompt_len

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> list[tuple[int, int, Scores]]:
        """Log-probabilities of prompt tokens, for prefill rows whose requests ask for them: (slot, first, scores)."""
        prompts = []
        stops = np.cumsum(batch.q_len)
        for row in range(batch.num_decode, len(batch.slots)):
            slot = int(batch.slots[row])
            start = int(batch.kv_len[row] - batch.q_len[row])
            count = min(int(batch.kv_len[row]), int(self._prompt_end[slot]) - 1) - start
            if self._prompt_top[slot] < 0:
                continue
            first = int(stops[row] - batch.q_len[row])
            for at in range(0, count, SCORED_AT_ONCE):
                size = min(SCORED_AT_ONCE, count - at)
                logits = self._model.logits(hidden[first + at : first + at + size])
                logits = self._model.vocabulary.whole(logits)  # [size, V]
                said = self._sampler.history(slot, start + at + 1, start + at + size + 1)
                prompts.append((slot, start + at + 1, logprobs(logits, said, int(self._prompt_top[slot]))))
        return prompts


SCORED_AT_ONCE = 256
NOBODY: Int32 = np.empty(0, dtype=np.int32)


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Scores:
    """Log-probabilities of `tokens` [n] under logits [n, V], and the `count` likeliest."""
    scores = logits.float().log_softmax(dim=-1)
    top, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return scores.gather(-1, tokens[:, None])[:, 0], ids, top


def _host_arrays(batch: Batch) -> dict[str, Int32]:
    """A batch and what follows from it."""
    rows = np.repeat(np.arange(len(batch.slots), dtype=np.int32), batch.q_len)  # [T], the row of each token
    ends = np.cumsum(batch.q_len, dtype=np.int32)
    return {
        "page_writes": batch.page_writes.reshape(-1),
        "slots": batch.slots,
        "kv_len": batch.kv_len,
        "token_slots": batch.slots[rows],
        "positions": np.arange(len(rows), dtype=np.int32) + (batch.kv_len - ends)[rows],
        "input_ids": batch.input_ids,
        "sample_tokens": (ends - 1)[batch.samples],
        "sample_rows": np.flatnonzero(batch.samples).astype(np.int32),
    }
