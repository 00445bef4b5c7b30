"""Requests from a file: conversations of ShareGPT, batches of OpenAI's, timed traces; what it is, its rows tell."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from minisgl.bench.workload import DEFAULT_REQUESTS, Job, Tokenize, WorkloadConfig, random_tokens

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
"""Tokens that a hash id of a trace stands for."""


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
        jobs = _trace(rows, workload, repetition if workload.fresh else 0)
    elif "conversations" in keys:
        random.Random(workload.workload_seed).shuffle(rows)
        jobs = _conversations(rows, workload.turns, tokenize)
    elif {"url", "body"} <= keys:
        jobs = (Job([], 0, body=row["body"], route=row["url"]) for row in rows)
    else:
        raise ValueError(
            f"{path} has rows with {', '.join(sorted(keys)) or 'nothing'}, which is no known dataset: those have "
            "conversations (ShareGPT), url and body (OpenAI batch), or timestamp, input_length and output_length"
        )
    try:
        taken = list(islice(jobs, workload.requests or DEFAULT_REQUESTS))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a row that is not like its first: {error!r}") from error
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
    except msgspec.MsgspecError as error:
        raise ValueError(f"dataset {path} is neither a JSON list nor JSON lines of objects: {error}") from error


def _conversations(rows: list[dict[str, Any]], turns: int, tokenize: Tokenize | None) -> Iterator[Job]:
    """Questions as they were asked; answers as long as they were given."""
    if tokenize is None:
        raise ValueError("a dataset of conversations needs a model with a tokenizer, and this one has none")
    for row in rows:
        texts = [turn["value"] for turn in row["conversations"]]
        pairs = [(tokenize(ask), tokenize(answer)) for ask, answer in zip(texts[::2], texts[1::2], strict=False)]
        jobs = [Job(ask, len(answer)) for ask, answer in pairs[:turns] if ask and answer]
        if jobs:
            yield jobs[0]._replace(later=tuple(jobs[1:]))


def _trace(rows: list[dict[str, Any]], workload: WorkloadConfig, repetition: int) -> Iterator[Job]:
    """Bailian's times are seconds, Mooncake's milliseconds."""
    block, unit_s = (BAILIAN_BLOCK, 1.0) if "chat_id" in rows[0] else (MOONCAKE_BLOCK, 1e-3)
    began = rows[0]["timestamp"]
    for number, row in enumerate(rows):
        length = row["input_length"]
        ids = list(row.get("hash_ids", ()))
        ids += [f"{number}/{n}" for n in range(len(ids), -(-length // block))]  # what has no id is nobody else's
        prompt = [token for each in ids for token in _block(workload, f"{repetition}/{each}", block)][:length]
        yield Job(prompt, row["output_length"], at_s=(row["timestamp"] - began) * unit_s)


def _block(workload: WorkloadConfig, name: str, size: int) -> list[int]:
    return random_tokens(random.Random(f"{workload.workload_seed}/{name}"), size, workload)
