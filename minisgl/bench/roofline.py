"""The least time in which a device can do a workload: what must be computed and read, against its ceilings.

What is counted, for a model with L layers, E model width, H query heads, K key heads, D head size, F feed-forward width
and V vocabulary:

* Body: the layers' matrices, `L · (2 E H D + 2 E K D + 3 E F)` weights. Head: `E V` weights, read and multiplied once
  for each token that is drawn. The embedding table of a model whose head is not tied to it is not counted: of that
  a token reads one row. Norms and biases are too small to count.
* Prefill of a prompt of N tokens: `2 · body · N + 2 · head` FLOPs, and causal attention, `4 L H D · N (N + 1) / 2`; all
  prompts together at the matmul ceiling, or one reading of the weights if that takes longer. It brings each
  request's first token.
* Decode: all requests run together from the start, each until its answer is complete, so the batch shrinks. A step
  takes the longer of reading body and head once and of multiplying by them, `2 (body + head)` FLOPs a request; then
  the keys and values of every running request, the new token's included, are read: `2 L K D` elements a token. The
  FLOPs of attention hide behind that reading.

Nothing of it overlaps, and nothing is left out of it by a prefix cache. An engine that computes prompts in the steps
that read keys and values can do better than this bound; a limit on running requests below their number makes the
true one worse. Several GPUs have the sum of their ceilings: what they tell each other is not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from minisgl.source.model_config import ModelConfig

ELEMENT_BYTES = 2
"""Of the types that the ceilings hold for, bfloat16 and float16."""


@dataclass(frozen=True)
class Ceiling:
    """What a device reaches at best."""

    bytes_per_s: float  # memory
    flops_per_s: float  # matrix products of bfloat16 or float16, back to back


CEILINGS: Mapping[str, Ceiling] = MappingProxyType({"NVIDIA H200": Ceiling(4.3e12, 790e12)})
"""Measured ones, by the name that the driver gives a device."""


@dataclass(frozen=True)
class Roofline:
    """A model on a device with known ceilings; every answer is in seconds."""

    model: ModelConfig
    ceiling: Ceiling
    gpus: int = 1

    @property
    def body(self) -> int:
        """Weights in the layers' matrices."""
        m = self.model
        attention = 2 * m.hidden_size * (m.num_heads + m.num_kv_heads) * m.head_size
        return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)

    @property
    def head(self) -> int:
        """Weights of the matrix that makes logits."""
        return self.model.hidden_size * self.model.vocab_size

    def prefill_s(self, prompt_lens: Sequence[int]) -> float:
        """All prompts, up to the first token of each answer."""
        m = self.model
        tokens, pairs = sum(prompt_lens), sum(n * (n + 1) // 2 for n in prompt_lens)
        linear = 2 * (self.body * tokens + self.head * len(prompt_lens))
        attention = 4 * m.num_layers * m.num_heads * m.head_size * pairs
        return max(self._weights_s(), self._flops_s(linear + attention))

    def decode_step_s(self, requests: int, context_tokens: int) -> float:
        """A step of so many requests whose contexts, the new tokens included, are that long in sum."""
        m = self.model
        kv_bytes = 2 * m.num_layers * m.num_kv_heads * m.head_size * ELEMENT_BYTES * context_tokens
        linear_s = max(self._weights_s(), self._flops_s(2 * (self.body + self.head) * requests))
        return linear_s + self._bytes_s(kv_bytes)

    def decode_s(self, lengths: Iterable[tuple[int, int]]) -> float:
        """Every token after the first, of requests given as (prompt length, answer length)."""
        running = sorted(lengths, key=lambda each: each[1], reverse=True)
        prompt_tokens = sum(prompt for prompt, _ in running)
        total = 0.0
        for step in range(1, running[0][1]):
            while running[-1][1] <= step:
                prompt_tokens -= running.pop()[0]
            total += self.decode_step_s(len(running), prompt_tokens + step * len(running))
        return total

    def _weights_s(self) -> float:
        return self._bytes_s((self.body + self.head) * ELEMENT_BYTES)

    def _bytes_s(self, count: float) -> float:
        return count / (self.ceiling.bytes_per_s * self.gpus)

    def _flops_s(self, count: float) -> float:
        return count / (self.ceiling.flops_per_s * self.gpus)


def roofline(model: ModelConfig, dtype: str, device: str, gpus: int = 1) -> Roofline | str:
    """The bound of a model on a device, by its name; or why there is none."""
    if device not in CEILINGS:
        return f"the ceilings of {device} are not known; known: {', '.join(CEILINGS)}"
    if dtype not in ("bfloat16", "float16"):
        return f"the ceilings of {device} are known for bfloat16 and float16, not for {dtype}"
    return Roofline(model, CEILINGS[device], gpus)
