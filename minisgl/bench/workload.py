"""What a benchmark asks of an engine: prompts of random tokens, and how long each answer is to be."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_doc import Doc

from minisgl.config import Flag, check_range, check_types

DEFAULT_REQUESTS = 16
WARM_UP = -1
"""The repetition that is not measured."""
WARM_UP_OUTPUT_LEN = 16
TTFT_OUTPUT_LEN = 2
"""As in any answer, the second step may be launched before the first token is read."""

MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Workload

    Raises ValueError, naming the field, its value and what is allowed.
    """

    latency: Annotated[
        bool, Doc("Measure one request at a time: TTFT of a new prompt, and decode speed of one stream.")
    ] = False
    requests: Annotated[
        int | None,
        Doc(f"Requests, all given at once; default: {DEFAULT_REQUESTS}. Not with latency."),
        Flag(aliases=("--num-prompts",)),
    ] = None
    input_len: Annotated[
        int | Sequence[int], Doc("Prompt length in tokens; given twice: drawn from the first to the second.")
    ] = 128
    output_len: Annotated[
        int | Sequence[int], Doc("Answer length in tokens; given twice: drawn from the first to the second.")
    ] = 128
    ttft_input_len: Annotated[
        int | None, Doc("With latency: length of the prompts whose TTFT is measured; default: input_len.")
    ] = None
    max_token_id: Annotated[int, Doc("Prompts are token ids drawn from 0 to this one.")] = 10_000
    workload_seed: Annotated[int, Doc("Same seed, same prompts and lengths.")] = 0
    repeat: Annotated[int, Doc("Times to measure, each with new prompts.")] = 3

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("requests", "ttft_input_len", "repeat"):
            check_range(name, getattr(self, name), least=1, most=MOST_TOKENS)
        check_range("max_token_id", self.max_token_id, least=0, most=MOST_TOKENS)
        for name in ("input_len", "output_len"):
            given = getattr(self, name)
            least, most = _range(name, given)
            check_range(name, least, least=1, most=MOST_TOKENS)
            check_range(name, most, least=1, most=MOST_TOKENS)
            if least > most:
                raise ValueError(f"{name} must have the least length first, got {given}")
            if self.latency and least != most:
                raise ValueError(f"{name} must be one length with latency, got {given}")
        if self.latency and self.requests is not None:
            raise ValueError(f"requests must be unset with latency, which has one at a time, got {self.requests}")
        if self.latency and self.output_range[0] < 2:
            raise ValueError("output_len must be at least 2 with latency, which times what follows the first, got 1")
        if not self.latency and self.ttft_input_len is not None:
            raise ValueError(f"ttft_input_len must be unset without latency, got {self.ttft_input_len}")

    @property
    def input_range(self) -> tuple[int, int]:
        """The shortest and the longest prompt that may be drawn."""
        return _range("input_len", self.input_len)

    @property
    def output_range(self) -> tuple[int, int]:
        """The same for answers."""
        return _range("output_len", self.output_len)


def _range(name: str, given: int | Sequence[int]) -> tuple[int, int]:
    lengths = [given] if isinstance(given, int) else given
    if len(lengths) not in (1, 2):
        raise ValueError(f"{name} must be one length, or the least and the most, got {given}")
    return lengths[0], lengths[-1]


class Job(NamedTuple):
    """One request: a prompt's token ids, and how many tokens to answer."""

    prompt: list[int]
    output_len: int


def throughput_jobs(workload: WorkloadConfig, repetition: int) -> list[Job]:
    """The requests of a repetition: the lengths are the same in all, the prompts in none.

    Those of repetition 0 come from one generator in this order: for each request the prompt's length and then its
    tokens; after all of them, the answers' lengths. The warm-up has shorter answers.
    """
    rng = random.Random(workload.workload_seed)
    count = workload.requests or DEFAULT_REQUESTS
    prompts = [_tokens(rng, rng.randint(*workload.input_range), workload) for _ in range(count)]
    lengths = [rng.randint(*workload.output_range) for _ in range(count)]
    if repetition:
        rng = _later(workload, repetition)
        prompts = [_tokens(rng, len(prompt), workload) for prompt in prompts]
    if repetition == WARM_UP:
        lengths = [min(length, WARM_UP_OUTPUT_LEN) for length in lengths]
    return [Job(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def latency_jobs(workload: WorkloadConfig, repetition: int) -> tuple[Job, Job]:
    """A repetition's requests, one after the other: the one whose TTFT counts, and the stream."""
    rng = _later(workload, repetition)
    input_len, output_len = workload.input_range[0], workload.output_range[0]
    first = Job(_tokens(rng, workload.ttft_input_len or input_len, workload), TTFT_OUTPUT_LEN)
    return first, Job(_tokens(rng, input_len, workload), output_len)


def _later(workload: WorkloadConfig, repetition: int) -> random.Random:
    return random.Random(f"{workload.workload_seed}/{repetition}")


def _tokens(rng: random.Random, count: int, workload: WorkloadConfig) -> list[int]:
    return [rng.randint(0, workload.max_token_id) for _ in range(count)]
