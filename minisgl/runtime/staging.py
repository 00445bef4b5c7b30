"""What travels between host and device: one packed copy to the device a step, and a small one back."""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from minisgl.batch import Int32, Logprobs, Outcome, PromptLogprobs

Scores = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities on the device: of n tokens [n], the ids [n, K] of the likeliest in their place, and theirs."""


ALIGNED = 32
"""int32 numbers in 128 bytes."""


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

    @property
    def arrived(self) -> bool:
        """Whether it is here."""
        return self._arrived is None or self._arrived.query()

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

    def send(self, arrays: dict[str, Int32], into: Tensor | None = None) -> dict[str, Tensor]:
        """Copy int32 arrays to the device, packed into one: to new memory, or to the front of `into`.

        Each begins at a multiple of `ALIGNED`, since Triton compiles a kernel anew for a pointer that is less aligned.
        """
        starts = np.cumsum([0, *(-(-len(a) // ALIGNED) * ALIGNED for a in arrays.values())]).tolist()
        size = starts.pop()
        buffer, sent = self._next(size)
        on_host = buffer.numpy()
        for start, array in zip(starts, arrays.values(), strict=True):
            on_host[start : start + len(array)] = array
        packed = buffer
        if sent is not None:
            packed = torch.empty(size, dtype=torch.int32, device=self._device) if into is None else into[:size]
            packed.copy_(buffer[:size], non_blocking=True)
            sent.record()
            self._buffers.append((buffer, sent))
        placed = zip(arrays.items(), starts, strict=True)
        return {name: packed[start : start + len(array)] for (name, array), start in placed}

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

    def _next(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Memory for so many int32 numbers that nothing reads any more, and what is to say when it is read again."""
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.int32), None
        buffer, sent = self._buffers.popleft() if len(self._buffers) > 2 else (None, torch.cuda.Event())
        if buffer is not None:
            sent.synchronize()
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        return buffer, sent
