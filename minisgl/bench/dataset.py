"""Requests from a file: conversations of ShareGPT, batches of OpenAI's, timed traces; what it is, its rows tell."""

import random
from collections.abc import Iterable, Iterator
from itertools import dropwhile, islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from minisgl.bench.workload import DEFAULT_REQUESTS, MOST, Job, Tokenize, WorkloadConfig, random_tokens

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
"""Tokens that a hash id of a trace stands for."""

Row = TypeVar("Row")
Length = Annotated[int, Meta(ge=1, le=MOST)]


class Turn(Struct):
    value: str
    from_: str = msgspec.field(name="from", default="human")


class Conversation(Struct):
    conversations: list[Turn]


class Body(Struct):
    url: Annotated[str, Meta(pattern="^/")]
    body: dict[str, Any]


class Timed(Struct):
    timestamp: float
    input_length: Length
    output_length: Length
    hash_ids: list[int | str] = []
    chat_id: Any = None  # Bailian's have one


def dataset_jobs(workload: WorkloadConfig, repetition: int, tokenize: Tokenize | None) -> list[Job]:
    """The first requests of the file, of ShareGPT's in a random order; ValueError for what makes no sense.

    A trace's rows share a block of tokens where they share a hash id. The tokens are random: new ones in each
    repetition, if they are to be fresh.
    """
    assert workload.dataset is not None
    path = Path(workload.dataset)
    rows = _rows(path)
    keys = rows[0].keys() if rows else set()
    if {"timestamp", "input_length", "output_length"} <= keys:
        jobs = _trace(_each(Timed, rows, path), workload, repetition if workload.fresh else 0)
    elif "conversations" in keys:
        random.Random(workload.workload_seed).shuffle(rows)
        jobs = _conversations(_each(Conversation, rows, path), workload.turns, tokenize)
    elif {"url", "body"} <= keys:
        jobs = (Job([], 0, body=row.body, route=row.url) for row in _each(Body, rows, path))
    else:
        raise ValueError(
            f"{path} has rows with {', '.join(sorted(keys)) or 'nothing'}, which is no known dataset: those have "
            "conversations (ShareGPT), url and body (OpenAI batch), or timestamp, input_length and output_length"
        )
    if workload.turns > 1 and "conversations" not in keys:
        raise ValueError(f"turns must be 1 with requests that are no conversations, in {path}, got {workload.turns}")
    taken = list(islice(jobs, workload.requests or DEFAULT_REQUESTS))
    if not taken:
        raise ValueError(f"{path} has no request in it: a conversation needs a question and an answer")
    return taken


def _rows(path: Path) -> list[dict[str, Any]]:
    """Of a JSON list, or one on each line."""
    try:
        data = path.read_bytes()
        if data.lstrip().startswith(b"["):
            return msgspec.json.decode(data, type=list[dict[str, Any]])
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in data.splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"dataset {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"dataset {path} is neither a JSON list nor JSON lines of objects: {error}") from error


def _each(kind: type[Row], rows: list[dict[str, Any]], path: Path) -> Iterator[Row]:
    for row in rows:
        try:
            yield msgspec.convert(row, kind)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} has a row that is not like its first: {error}: {str(row)[:200]}") from error


def _conversations(rows: Iterable[Conversation], turns: int, tokenize: Tokenize | None) -> Iterator[Job]:
    """Questions as they were asked, from a human's first on; answers as long as they were given."""
    if tokenize is None:
        raise ValueError("a dataset of conversations needs a model with a tokenizer, and this one has none")
    for row in rows:
        texts = [turn.value for turn in dropwhile(lambda turn: turn.from_ not in ("human", "user"), row.conversations)]
        pairs = islice(zip(texts[::2], texts[1::2], strict=False), turns)
        tokens = [(tokenize(ask), tokenize(answer)) for ask, answer in pairs]
        jobs = [Job(ask, len(answer)) for ask, answer in tokens if ask and answer]
        if jobs:
            yield jobs[0]._replace(later=tuple(jobs[1:]))


def _trace(rows: Iterable[Timed], workload: WorkloadConfig, repetition: int) -> Iterator[Job]:
    """Bailian's times are seconds, Mooncake's milliseconds."""
    for number, row in enumerate(rows):
        block, unit_s = (MOONCAKE_BLOCK, 1e-3) if row.chat_id is None else (BAILIAN_BLOCK, 1.0)
        unique = range(len(row.hash_ids), -(-row.input_length // block))  # what has no id is nobody else's
        ids = row.hash_ids + [f"{number}/{n}" for n in unique]
        prompt = [token for each in ids for token in _block(workload, f"{repetition}/{each}", block)]
        yield Job(prompt[: row.input_length], row.output_length, at_s=row.timestamp * unit_s)


def _block(workload: WorkloadConfig, name: str, size: int) -> list[int]:
    return random_tokens(random.Random(f"{workload.workload_seed}/{name}"), size, workload)
