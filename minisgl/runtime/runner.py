"""ModelRunner: runs batches on one device."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend, Step
from minisgl.batch import Batch, Int32, Logprobs, Outcome, PromptLogprobs
from minisgl.model.decoder import Decoder
from minisgl.runtime.sampler import Sampler


class ModelRunner:
    """Owns the device's side of the running requests: page tables, last tokens and sampling rows, by slot.

    Everything runs on one stream, in the order of `launch`: that is what lets a batch read what the one before
    it writes, and the prefix cache show a page as soon as the batch that fills it was launched.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        *,
        num_slots: int,
        context: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._model, self._attention, self._device = model, attention, device
        self._page_table = torch.zeros(num_slots, -(-context // page_size), dtype=torch.int32, device=device)
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._sampler = Sampler(num_slots, context, device)
        self._logprobs = np.full(num_slots, -1, dtype=np.int32)  # alternatives to report; -1: nothing
        self._prompt_top = np.full(num_slots, -1, dtype=np.int32)  # the same for the prompt
        self._prompt_end = np.zeros(num_slots, dtype=np.int32)  # the prompt's length
        self._staging = Staging(device)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> "Pending":
        """Run a batch's forward and sampling; on CUDA this returns before the device is done."""
        host = _host_arrays(batch)
        on_device = self._staging.send(host)
        self._write_tables(batch, on_device["page_writes"])
        slots, kv_len = on_device["slots"].long(), on_device["kv_len"]
        step = Step(
            batch=batch,
            page_table=self._page_table,
            slots=slots,
            kv_len=kv_len,
            token_slots=on_device["token_slots"].long(),
            positions=on_device["positions"].long(),
        )
        prompt_ids = on_device["input_ids"].long()
        input_ids = torch.cat([self._last_token[slots[: batch.num_decode]], prompt_ids])  # [T]
        self._attention.plan(step)
        hidden = self._model.forward(input_ids, step.positions, self._attention)  # [T, E]
        prompts = self._score_prompts(batch, hidden)
        if not batch.samples.any():
            return self._staging.receive(torch.empty(0, dtype=torch.int64, device=self._device), NOBODY, None, prompts)
        logits = self._model.logits(hidden[on_device["sample_tokens"].long()])  # [S, V]
        rows, lengths = batch.slots[batch.samples], batch.kv_len[batch.samples]
        sample_slots, positions = slots[on_device["sample_rows"].long()], kv_len[on_device["sample_rows"].long()].long()
        tokens = self._sampler.sample(logits, rows, lengths, sample_slots, positions)  # [S]
        self._last_token[sample_slots] = tokens.clamp(min=0)
        reports = np.flatnonzero(self._logprobs[rows] >= 0).astype(np.int32)
        scores = None
        if reports.size:
            at = torch.from_numpy(reports).long().to(self._device)
            scores = logprobs(logits[at], tokens[at].clamp(min=0), int(self._logprobs[rows].max()))
        return self._staging.receive(tokens, reports, scores, prompts)

    def _write_tables(self, batch: Batch, page_writes: Tensor) -> None:
        if len(batch.page_writes):
            slot, index, page = page_writes.view(-1, 3).unbind(dim=1)
            self._page_table[slot.long(), index.long()] = page
        joins = batch.joins
        if len(joins.slots):
            self._sampler.join(joins)
            self._logprobs[joins.slots] = joins.logprobs
            self._prompt_top[joins.slots] = joins.prompt_logprobs
            self._prompt_end[joins.slots] = joins.prompt_len

    def _score_prompts(self, batch: Batch, hidden: Tensor) -> list[tuple[int, int, "Scores"]]:
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
                logits = self._model.logits(hidden[first + at : first + at + size])  # [size, V]
                said = self._sampler.history(slot, start + at + 1, start + at + size + 1)
                prompts.append((slot, start + at + 1, logprobs(logits, said, int(self._prompt_top[slot]))))
        return prompts


Scores = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities on the device: of n tokens [n], the ids [n, K] of the likeliest in their place, and theirs."""

SCORED_AT_ONCE = 256
NOBODY: Int32 = np.empty(0, dtype=np.int32)


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Scores:
    """Log-probabilities of `tokens` [n] under logits [n, V], and the `count` likeliest."""
    scores = logits.float().log_softmax(dim=-1)
    top, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return scores.gather(-1, tokens[:, None])[:, 0], ids, top


class Pending:
    """An outcome on its way from the device, as tensors on the host."""

    def __init__(
        self,
        tokens: Tensor,
        reports: Int32,
        scores: Scores | None,
        prompts: list[tuple[int, int, Scores]],
        arrived: torch.cuda.Event | None,
    ) -> None:
        self._tokens, self._reports, self._scores = tokens, reports, scores
        self._prompts, self._arrived = prompts, arrived

    def wait(self) -> Outcome:
        """Wait until it is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return Outcome(
            tokens=self._tokens.numpy().astype(np.int32),
            logprob_rows=self._reports,
            logprobs=None if self._scores is None else _as_arrays(self._scores),
            prompt_logprobs=tuple(PromptLogprobs(slot, at, _as_arrays(scores)) for slot, at, scores in self._prompts),
        )


def _as_arrays(scores: Scores) -> Logprobs:
    chosen, ids, top = scores
    return Logprobs(chosen.numpy(), ids.numpy().astype(np.int32), top.numpy())


class Staging:
    """One packed copy to the device a step, and one small one back.

    On CUDA the packed buffer is pinned, and stays as it is until its copy has passed: two rest between uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, arrays: dict[str, Int32]) -> dict[str, Tensor]:
        """Copy int32 arrays to the device, packed into one."""
        lengths = [len(a) for a in arrays.values()]
        packed = torch.from_numpy(np.concatenate(list(arrays.values())))
        if self._device.type == "cuda":
            packed = self._pinned(packed)
        return dict(zip(arrays, packed.split(lengths), strict=True))

    def receive(
        self, tokens: Tensor, reports: Int32, scores: Scores | None, prompts: list[tuple[int, int, Scores]]
    ) -> Pending:
        """Begin copying an outcome to the host."""
        tokens = self._to_host(tokens)
        scores = None if scores is None else self._scores_to_host(scores)
        prompts = [(slot, at, self._scores_to_host(each)) for slot, at, each in prompts]
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return Pending(tokens, reports, scores, prompts, arrived)

    def _scores_to_host(self, scores: Scores) -> Scores:
        chosen, ids, top = (self._to_host(each) for each in scores)
        return chosen, ids, top

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _pinned(self, packed: Tensor) -> Tensor:
        buffer, sent = self._buffers.popleft() if len(self._buffers) > 2 else (None, torch.cuda.Event())
        if buffer is not None:
            sent.synchronize()
        if buffer is None or len(buffer) < len(packed):
            buffer = torch.empty(2 * len(packed), dtype=packed.dtype, pin_memory=True)
        buffer[: len(packed)] = packed
        on_device = buffer[: len(packed)].to(self._device, non_blocking=True)
        sent.record()
        self._buffers.append((buffer, sent))
        return on_device


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
