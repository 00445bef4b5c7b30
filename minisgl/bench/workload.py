"""What a benchmark asks of an engine: prompts as token ids, and how long each answer is to be."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple

from annotated_doc import Doc

from minisgl.config import Flag, check_range, check_types

DEFAULT_REQUESTS = 16
DEFAULT_REPEAT = 3
WARM_UP = -1
"""The repetition that is not measured."""
WARM_UP_OUTPUT_LEN = 16

Lengths = Literal["uniform", "normal"]
Prompts = Literal["random", "text"]

MOST = 10_000_000
"""For every number that is counted in requests, tokens or repetitions."""
MOST_PROMPT_TOKENS = 100_000_000
"""Of a repetition: they are all in memory before it begins."""
TEXT_CHARACTERS = 400_000


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Workload

    Raises ValueError, naming the field, its value and what is allowed.
    """

    latency: Annotated[bool, Doc("Measure prefill and decode apart: every batch size with every input_len.")] = False
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
    output_len: Annotated[int | Sequence[int], Doc("Answer length in tokens; given twice: drawn as well.")] = 128
    batch_size: Annotated[
        int | Sequence[int] | None,
        Doc("With latency: requests at once; given several times: one after the other; default: 1."),
    ] = None
    lengths: Annotated[Lengths, Doc("How they are drawn; normal: the ends two standard deviations away.")] = "uniform"
    prompts: Annotated[Prompts, Doc("Random token ids, or pieces of English text by the tokenizer.")] = "random"
    max_token_id: Annotated[int, Doc("Random prompts are token ids drawn from 0 to this one.")] = 10_000
    prefix_len: Annotated[int | None, Doc("Tokens that all prompts of a group begin with, before their own.")] = None
    prefix_groups: Annotated[int, Doc("Groups with a prefix of their own, which requests take in turn.")] = 1
    turns: Annotated[int, Doc("Requests of a conversation, each with all before it; only on a server.")] = 1
    dataset: Annotated[
        str | None,
        Doc(
            "File to take requests from in place of drawing them: ShareGPT's JSON, OpenAI's batch JSONL, or a trace of "
            "rows with timestamp, input_length, output_length, hash_ids, as Mooncake and Bailian have them."
        ),
    ] = None
    fresh: Annotated[bool, Doc("New prompts in each repetition, or else an emptied prefix cache.")] = True
    workload_seed: Annotated[int, Doc("Same seed, same prompts and lengths.")] = 0
    repeat: Annotated[int | None, Doc(f"Times to measure; default: {DEFAULT_REPEAT}, on a server 1.")] = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("requests", "prefix_len", "prefix_groups", "turns", "repeat"):
            check_range(name, getattr(self, name), least=1, most=MOST)
        check_range("max_token_id", self.max_token_id, least=0, most=2**31 - 1)
        for name in ("batch_size", "input_len", "output_len"):
            for length in _list(getattr(self, name)):
                check_range(name, length, least=1, most=MOST)
        drawing = ("lengths", "prompts", "prefix_len", "prefix_groups")
        for is_so, unused, why in (
            (self.latency, (*drawing, "requests", "turns", "dataset", "fresh"), "with latency, of equal batches"),
            (not self.latency, ("batch_size",), "without latency"),
            (self.dataset is not None, drawing, "with a dataset, which has the requests"),
            (self.prefix_len is None, ("prefix_groups",), "without prefix_len"),
        ):
            if is_so:
                check_unset(self, unused, why)
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.latency:
            if len(_list(self.output_len)) != 1 or self.output_range[0] < 2:
                raise ValueError(f"output_len must be one length of 2 or more with latency, got {self.output_len}")
            if not self.shapes:
                raise ValueError("batch_size and input_len must have a value each with latency, got none")
            count, longest = map(max, zip(*self.shapes, strict=True))
        else:
            for name in ("input_len", "output_len"):
                least, most = _range(name, given := getattr(self, name))
                if least > most:
                    raise ValueError(f"{name} must have the least length first, got {given}")
            count = self.requests or DEFAULT_REQUESTS
            longest = self.input_range[1] * self.turns + (self.prefix_len or 0)
        if count * longest > MOST_PROMPT_TOKENS:
            raise ValueError(f"{count:,} prompts of {longest:,} tokens are more than {MOST_PROMPT_TOKENS:,} tokens")

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
        return list(product(_list(1 if self.batch_size is None else self.batch_size), _list(self.input_len)))


def check_unset(config: Any, names: Iterable[str], why: str) -> None:
    """Raise ValueError for a field among these that has another value than its default: it would have no effect."""
    for field in fields(config):
        if field.name in names and (given := getattr(config, field.name)) != field.default:
            raise ValueError(f"{field.name} must be unset {why}, got {given}")


def _list(given: int | Sequence[int] | None) -> Sequence[int]:
    return [] if given is None else [given] if isinstance(given, int) else given


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
    """When to send it, by a trace's own clock."""
    later: "tuple[Job, ...]" = ()
    """The next turns of a conversation: the prompt of each is what it adds to the prompt and the answer before."""
    body: dict[str, Any] | None = None
    """In place of prompt and length: what to send as it is, to `route`."""
    route: str | None = None


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
    rng, draw = random.Random(workload.workload_seed), _drawing(workload, tokenize)
    count = workload.requests or DEFAULT_REQUESTS
    prompts = [draw(rng, _length(rng, workload.input_range, workload)) for _ in range(count)]
    lengths = [_length(rng, workload.output_range, workload) for _ in range(count)]
    again = _later(workload, repetition) if repetition and (workload.fresh or repetition == WARM_UP) else rng
    if again is not rng:
        prompts = [draw(again, len(prompt)) for prompt in prompts]
    if workload.prefix_len is not None:
        prefixes = [draw(again, workload.prefix_len) for _ in range(min(workload.prefix_groups, count))]
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


def _drawing(workload: WorkloadConfig, tokenize: Tokenize | None) -> Callable[[random.Random, int], list[int]]:
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
