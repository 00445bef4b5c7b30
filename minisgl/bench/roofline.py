"""The least time in which a device can do a workload: what must be computed and read, against its ceilings.

What is counted, for a model with L layers, E model width, H query heads, K key heads, D head size, F feed-forward width
and V vocabulary:

* Body: the layers' matrices, `L · (2 E H D + 2 E K D + 3 E F)` weights. Head: `E V` weights, read and multiplied once
  for each token that is drawn. The embedding table of a model whose head is not tied to it is not counted: of that
  a token reads one row. Norms and biases are too small to count.
* Prefill of a prompt of N tokens: `2 · body · N + 2 · head` FLOPs, and causal attention, `4 L H D · N (N + 1) / 2`; all
  prompts together at the matmul ceiling, or one reading of the weights if that takes longer. Of a prompt whose first
  C tokens are in the prefix cache, what those take is not counted. It brings each request's first token.
* Decode: all requests run together from the start, each until its answer is complete, so the batch shrinks. A step
  takes the longer of reading body and head once and of multiplying by them, `2 (body + head)` FLOPs a request; then
  the keys and values of every running request, the new token's included, are read: `2 L K D` elements a token. The
  FLOPs of attention hide behind that reading.

Nothing of it overlaps. An engine that computes prompts in the steps that read keys and values can do better than this
bound; a limit on running requests below their number makes the true one worse. Several GPUs have the sum of their
ceilings: what they tell each other is not counted.

What a phase is bound by is where most of its least time goes: reading, or computing. Attained are the bytes and FLOPs
counted here over the time that it took, and the share, its least time over that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minisgl.bench.record import Ceilings
from minisgl.source.model_config import ModelConfig

ELEMENT_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Need:
    """What work needs at least: FLOPs, bytes, and the seconds in which each of them is what is waited for."""

    flops: float = 0.0
    bytes: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0

    def __add__(self, other: "Need") -> "Need":
        return Need(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, share: float) -> "Need":
        return Need(*(value * share for value in vars(self).values()))

    @property
    def least_s(self) -> float:
        """The bound, in seconds."""
        return self.compute_s + self.memory_s


@dataclass(frozen=True)
class Roofline:
    """A model on devices with known ceilings."""

    model: ModelConfig
    ceilings: Ceilings
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

    def prefill(self, prompts: Sequence[tuple[int, int]]) -> Need:
        """Prompts given as (length, cached tokens), up to the first token of each answer."""
        tokens = sum(length - cached for length, cached in prompts)
        linear = 2 * (self.body * tokens + self.head * len(prompts))
        return self._beside(linear + self._attention_flops(prompts), self._weight_bytes)

    def decode_step(self, requests: int, context_tokens: int) -> Need:
        """A step of so many requests whose contexts, the new tokens included, are that long in sum."""
        return self.products(requests, requests) + self.attention((), context_tokens)

    def products(self, tokens: int, drawn: int) -> Need:
        """The body's matrices times so many tokens, and the head's times those from which a token is drawn."""
        return self._beside(2 * (self.body * tokens + self.head * drawn), self._weight_bytes)

    def attention(self, prompts: Sequence[tuple[int, int]], context_tokens: int) -> Need:
        """Of prompts given as (length, cached tokens), and of rows that decode, whose contexts are that long in sum."""
        m = self.model
        read = context_tokens + sum(cached for _, cached in prompts)
        kv_bytes = 2 * m.num_layers * m.num_kv_heads * m.head_size * self._element_bytes * read
        return self._beside(self._attention_flops(prompts), kv_bytes)

    def decode(self, lengths: Iterable[tuple[int, int]]) -> Need:
        """Every token after the first, of requests given as (prompt length, answer length)."""
        running = sorted(lengths, key=lambda each: each[1], reverse=True)
        prompt_tokens = sum(prompt for prompt, _ in running)
        total = Need()
        for step in range(1, running[0][1]):
            while running[-1][1] <= step:
                prompt_tokens -= running.pop()[0]
            total += self.decode_step(len(running), prompt_tokens + step * len(running))
        return total

    def _attention_flops(self, prompts: Sequence[tuple[int, int]]) -> int:
        pairs = sum(length * (length + 1) // 2 - cached * (cached + 1) // 2 for length, cached in prompts)
        return 4 * self.model.num_layers * self.model.num_heads * self.model.head_size * pairs

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.ceilings.dtype]

    @property
    def _weight_bytes(self) -> int:
        return (self.body + self.head) * self._element_bytes

    def _beside(self, flops: float, count_bytes: float) -> Need:
        """Computing and reading at the same time: the longer of the two is what is waited for."""
        compute_s = flops / (self.ceilings.flops_per_s * self.gpus)
        memory_s = count_bytes / (self.ceilings.bytes_per_s * self.gpus)
        return Need(flops, count_bytes, *((compute_s, 0.0) if compute_s > memory_s else (0.0, memory_s)))
