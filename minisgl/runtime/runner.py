"""ModelRunner: runs batches on one device."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend, Step
from minisgl.batch import Batch, Int32
from minisgl.model.decoder import Decoder
from minisgl.runtime.sampler import Sampler


class ModelRunner:
    """Owns the device's side of the running requests: page tables, last tokens and sampling rows, by slot.

    Everything runs on one stream, in the order of `launch`: that is what lets a batch read what the one before
    it writes, and the prefix cache show a page as soon as the batch that fills it was launched.
    """

    def __init__(
        self, model: Decoder, attention: AttentionBackend, *, num_slots: int, pages_per_slot: int, device: torch.device
    ) -> None:
        self._model, self._attention, self._device = model, attention, device
        self._page_table = torch.zeros(num_slots, pages_per_slot, dtype=torch.int32, device=device)
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._sampler = Sampler(num_slots, device)
        self._staging = Staging(device)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> "Pending":
        """Run a batch's forward and sampling; on CUDA this returns before the device is done."""
        host = _host_arrays(batch)
        on_device = self._staging.send(host)
        self._write_tables(batch, on_device)
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
        rows = batch.slots[batch.samples]
        if not len(rows):
            return Pending(torch.empty(0, dtype=torch.int64), None)
        logits = self._model.logits(hidden[on_device["sample_tokens"].long()])  # [S, V]
        sample_slots = on_device["sample_slots"].long()
        tokens = self._sampler.sample(logits, rows, sample_slots, on_device["sample_positions"].long())  # [S]
        self._last_token[sample_slots] = tokens.clamp(min=0)
        return self._staging.receive(tokens)

    def _write_tables(self, batch: Batch, on_device: dict[str, Tensor]) -> None:
        if len(batch.page_writes):
            slot, index, page = on_device["page_writes"].view(-1, 3).unbind(dim=1)
            self._page_table[slot.long(), index.long()] = page
        if len(batch.joins.slots):
            self._sampler.join(
                batch.joins,
                slots=on_device["join_slots"].long(),
                temperature=on_device["temperature"].view(torch.float32),
                top_k=on_device["top_k"],
                top_p=on_device["top_p"].view(torch.float32),
                seed=on_device["seed"].view(torch.int64),
            )


class Pending:
    """Tokens on their way from the device."""

    def __init__(self, tokens: Tensor, arrived: torch.cuda.Event | None) -> None:
        self._tokens, self._arrived = tokens, arrived

    def tokens(self) -> Int32:
        """Wait until they are here: int32, one per row that samples, -1 where logits were not numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens.numpy().astype(np.int32)


class Staging:
    """One packed copy to the device a step, and one small one back.

    On CUDA the packed buffer is pinned, and stays as it is until its copy has passed: two rest between uses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, arrays: dict[str, Int32]) -> dict[str, Tensor]:
        """Copy int32 arrays to the device, packed into one; 64-bit ones come as pairs and must be first."""
        lengths = [len(a) for a in arrays.values()]
        packed = torch.from_numpy(np.concatenate(list(arrays.values())))
        if self._device.type == "cuda":
            packed = self._pinned(packed)
        return dict(zip(arrays, packed.split(lengths), strict=True))

    def receive(self, tokens: Tensor) -> Pending:
        """Begin copying tokens to the host."""
        if self._device.type != "cuda":
            return Pending(tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Pending(host, arrived)

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
    """A batch and what follows from it, as int32 arrays; floats and 64-bit values by their bits."""
    rows = np.repeat(np.arange(len(batch.slots), dtype=np.int32), batch.q_len)  # [T], the row of each token
    ends = np.cumsum(batch.q_len, dtype=np.int32)
    positions = np.arange(len(rows), dtype=np.int32) + (batch.kv_len - ends)[rows]
    joins = batch.joins
    return {
        "seed": joins.seed.view(np.int32),
        "join_slots": joins.slots,
        "temperature": joins.temperature.view(np.int32),
        "top_k": joins.top_k,
        "top_p": joins.top_p.view(np.int32),
        "page_writes": batch.page_writes.reshape(-1),
        "slots": batch.slots,
        "kv_len": batch.kv_len,
        "token_slots": batch.slots[rows],
        "positions": positions,
        "input_ids": batch.input_ids,
        "sample_tokens": (ends - 1)[batch.samples],
        "sample_slots": batch.slots[batch.samples],
        "sample_positions": batch.kv_len[batch.samples],
    }
