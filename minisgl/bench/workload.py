"""What a benchmark asks of an engine: prompts as token ids, and how long each answer is to be."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

from annotated_doc import Doc

from minisgl.config import Flag, check_range, check_types

DEFAULT_REQUESTS = 16
DEFAULT_REPEAT = 3
WARM_UP = -1
"""The repetition that is not measured."""
WARM_UP_OUTPUT_LEN = 16

MOST_TOKENS = 2**31 - 1
TEXT_CHARACTERS = 400_000


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Workload

    Raises ValueError, naming the field, its value and what is allowed.
    """

    latency: Annotated[
        bool, Doc("Measure prefill and decode apart, of batches: every batch size with every prompt length.")
    ] = False
    requests: Annotated[
        int | None,
        Doc(f"Requests, or conversations; default: {DEFAULT_REQUESTS}. Not with latency."),
        Flag(aliases=("--num-prompts",)),
    ] = None
    input_len: Annotated[
        int | Sequence[int],
        Doc(
            "Prompt length in tokens; given twice: drawn from the first to the second; with latency, given several "
            "times: one after the other."
        ),
    ] = 128
    output_len: Annotated[
        int | Sequence[int], Doc("Answer length in tokens; given twice: drawn from the first to the second.")
    ] = 128
    batch_size: Annotated[
        int | Sequence[int] | None,
        Doc("With latency: requests at once; given several times: one after the other; default: 1."),
    ] = None
    lengths: Annotated[
        Literal["uniform", "normal"],
        Doc("How lengths are drawn; normal: around the middle, the two ends two standard deviations away."),
    ] = "uniform"
    prompts: Annotated[
        Literal["random", "text"],
        Doc("Of random token ids, or cut out of English text, which needs a tokenizer, at random places."),
    ] = "random"
    max_token_id: Annotated[int, Doc("Random prompts are token ids drawn from 0 to this one.")] = 10_000
    prefix_len: Annotated[int | None, Doc("Tokens that all prompts of a group begin with, before their own.")] = None
    prefix_groups: Annotated[int, Doc("Groups with a prefix of their own, which requests take in turn.")] = 1
    turns: Annotated[
        int, Doc("Requests of a conversation, each with all of it so far as its prompt; only against a server.")
    ] = 1
    dataset: Annotated[
        str | None,
        Doc(
            "File to take requests from in place of drawing them: ShareGPT's JSON, OpenAI's batch JSONL, or a trace of "
            "rows with timestamp, input_length, output_length, hash_ids, as Mooncake and Bailian have them."
        ),
    ] = None
    fresh: Annotated[
        bool, Doc("New prompts in each repetition, or an emptied prefix cache where they cannot be new.")
    ] = True
    workload_seed: Annotated[int, Doc("Same seed, same prompts and lengths.")] = 0
    repeat: Annotated[
        int | None, Doc(f"Times to measure; default: {DEFAULT_REPEAT} in this process, 1 on a server.")
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("requests", "prefix_len", "prefix_groups", "turns", "repeat"):
            check_range(name, getattr(self, name), least=1, most=MOST_TOKENS)
        check_range("max_token_id", self.max_token_id, least=0, most=MOST_TOKENS)
        for name in ("batch_size", "input_len", "output_len"):
            given = getattr(self, name)
            for length in () if given is None else _list(given):
                check_range(name, length, least=1, most=MOST_TOKENS)
        if self.latency:
            self._check_latency()
            return
        if self.batch_size is not None:
            raise ValueError(f"batch_size must be unset without latency, got {self.batch_size}")
        for name in ("input_len", "output_len"):
            least, most = _range(name, given := getattr(self, name))
            if least > most:
                raise ValueError(f"{name} must have the least length first, got {given}")

    def _check_latency(self) -> None:
        if self.requests is not None:
            raise ValueError(f"requests must be unset with latency: batch_size says how many, got {self.requests}")
        if len(_list(self.output_len)) != 1:
            raise ValueError(f"output_len must be one length with latency, got {self.output_len}")
        if self.output_range[0] < 2:
            raise ValueError("output_len must be at least 2 with latency, which times what follows the first, got 1")

    @property
    def input_range(self) -> tuple[int, int]:
        """The shortest and the longest prompt that may be drawn."""
        return _range("input_len", self.input_len)

    @property
    def output_range(self) -> tuple[int, int]:
        """The same for answers."""
        return _range("output_len", self.output_len)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Batch size and prompt length of each batch that is measured with `latency`."""
        return list(product(_list(self.batch_size or 1), _list(self.input_len)))


def _list(given: int | Sequence[int]) -> Sequence[int]:
    return [given] if isinstance(given, int) else given


def _range(name: str, given: int | Sequence[int]) -> tuple[int, int]:
    lengths = _list(given)
    if len(lengths) not in (1, 2):
        raise ValueError(f"{name} must be one length, or the least and the most, got {given}")
    return lengths[0], lengths[-1]


class Job(NamedTuple):
    """One request: a prompt's token ids, and how many tokens to answer."""

    prompt: list[int]
    output_len: int
    at_s: float | None = None
    """When to send it, in a trace: seconds after its first."""
    later: "tuple[Job, ...]" = ()
    """The next turns of a conversation: the prompt of each is what it adds to the prompt and the answer before."""
    body: dict[str, Any] | None = None
    """In place of prompt and length: what to send as it is, to `route`."""
    route: str = "/v1/completions"


Tokenize = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""


def throughput_jobs(workload: WorkloadConfig, repetition: int, tokenize: Tokenize | None = None) -> list[Job]:
    """The requests of a repetition: the lengths are the same in all, the prompts in none if they are to be fresh.

    Those of repetition 0 come from one generator in this order: for each request the prompt's length and then its
    tokens; after all of them, the answers' lengths; then what groups share, and further turns. The warm-up has shorter
    answers, one turn, and prompts that are drawn even where others come from a dataset. Raises ValueError for a dataset
    that cannot be read, and where a tokenizer is needed and there is none.
    """
    if workload.dataset is not None and repetition != WARM_UP:
        from minisgl.bench.dataset import dataset_jobs  # which needs this module

        return dataset_jobs(workload, repetition, tokenize)
    rng, draw = random.Random(workload.workload_seed), _draw(workload, tokenize)
    count = workload.requests or DEFAULT_REQUESTS
    prompts = [draw(rng, _length(rng, workload.input_range, workload)) for _ in range(count)]
    lengths = [_length(rng, workload.output_range, workload) for _ in range(count)]
    again = _later(workload, repetition) if repetition and (workload.fresh or repetition == WARM_UP) else rng
    if again is not rng:
        prompts = [draw(again, len(prompt)) for prompt in prompts]
    if workload.prefix_len is not None:
        prefixes = [draw(again, workload.prefix_len) for _ in range(workload.prefix_groups)]
        prompts = [prefixes[n % len(prefixes)] + prompt for n, prompt in enumerate(prompts)]
    if repetition == WARM_UP:
        return [Job(p, min(n, WARM_UP_OUTPUT_LEN)) for p, n in zip(prompts, lengths, strict=True)]

    def turn(_: int) -> Job:
        length = _length(again, workload.input_range, workload)
        return Job(draw(again, length), _length(again, workload.output_range, workload))

    return [
        Job(prompt, length, later=tuple(map(turn, range(workload.turns - 1))))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def latency_jobs(workload: WorkloadConfig, batch: int, input_len: int, repetition: int) -> list[Job]:
    """A batch of requests of one shape, its prompts new in each repetition."""
    rng = random.Random(f"{workload.workload_seed}/{batch}/{input_len}/{repetition}")
    return [Job(random_tokens(rng, input_len, workload), workload.output_range[0]) for _ in range(batch)]


def _later(workload: WorkloadConfig, repetition: int) -> random.Random:
    return random.Random(f"{workload.workload_seed}/{repetition}")


def _length(rng: random.Random, limits: tuple[int, int], workload: WorkloadConfig) -> int:
    least, most = limits
    if workload.lengths == "uniform" or least == most:
        return rng.randint(least, most)
    while not least <= (length := round(rng.gauss((least + most) / 2, (most - least) / 4))) <= most:
        pass
    return length


def _draw(workload: WorkloadConfig, tokenize: Tokenize | None) -> Callable[[random.Random, int], list[int]]:
    """What makes so many tokens."""
    if workload.prompts == "random":
        return lambda rng, count: random_tokens(rng, count, workload)
    if tokenize is None:
        raise ValueError("prompts must be random for a model without a tokenizer, got text")
    from pydoc_data.topics import topics  # Python's own manual, there wherever Python is

    text = tokenize("\n".join(topics.values())[:TEXT_CHARACTERS])

    def cut(rng: random.Random, count: int) -> list[int]:
        begin = rng.randrange(len(text))
        return [text[at % len(text)] for at in range(begin, begin + count)]

    return cut


def random_tokens(rng: random.Random, count: int, workload: WorkloadConfig) -> list[int]:
    """So many token ids that the workload allows."""
    return [rng.randint(0, workload.max_token_id) for _ in range(count)]
