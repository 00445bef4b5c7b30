"""Run every path that a request can take once, so that no request waits for a kernel to be compiled or loaded."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from minisgl.batch import Batch, Int32, Joins, Ragged
from minisgl.runtime.runner import ModelRunner


def warm_up(
    runner: ModelRunner, *, num_slots: int, context: int, page_size: int, chunk: int, num_pages: int
) -> Iterator[tuple[int, int]]:
    """Launch made-up batches, the largest possible one among them; yields how many are done, and of how many.

    No request may run. All rows share the pool's first `num_pages` pages, over and over: what comes out does not
    matter. What is left in the slots is overwritten when requests join.
    """
    longest = min(chunk, context - 1)
    prompts = [longest] * (chunk // longest) + [chunk % longest] * bool(chunk % longest)
    prompts = prompts[: max(1, num_slots - 1)]
    decodes = num_slots - len(prompts)
    last_chunk = [(min(chunk, context, 256), context)]
    few = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    every = {**few, "presence": 0.1, "repetition": 1.1, "logprobs": 5, "prompt_logprobs": 5}
    kinds = [  # decode rows, prefill rows as (query tokens, length), how they are sampled
        (0, [(n, n) for n in prompts], {}),
        (0, last_chunk, {"temperature": 1.0}),
        (decodes, [(n, n) for n in prompts], few),
        (0, [(min(n, context - 1), min(n, context - 1)) for n in (1, 2)][:num_slots], every),
        (num_slots, [], {"temperature": 1.0, "top_p": 0.9}),
        (num_slots, [], {"temperature": 1.0}),
        (1, [], {}),
    ]
    for done, (num_decode, rows, sampling) in enumerate(kinds):
        runner.launch(_batch(num_decode, rows, sampling, page_size, num_pages)).wait()
        yield done + 1, len(kinds)


def warm_up_graphs(runner: ModelRunner, sizes: Iterable[int], page_size: int) -> None:
    """Replay the graphs of these numbers of decode rows once, and sample behind each."""
    for size in sizes:
        runner.launch(_batch(size, [], {"temperature": 1.0}, page_size, 1)).wait()


def _batch(
    num_decode: int, rows: list[tuple[int, int]], sampling: dict[str, float], page_size: int, num_pages: int
) -> Batch:
    q_len = np.array([1] * num_decode + [q for q, _ in rows], np.int32)
    kv_len = np.array([1] * num_decode + [kv for _, kv in rows], np.int32)
    slots = np.arange(len(q_len), dtype=np.int32)
    joins = Joins.greedy(slots)
    given: dict[str, Any] = {name: np.full_like(getattr(joins, name), value) for name, value in sampling.items()}
    if "presence" in sampling:
        zeros: list[Int32] = [np.zeros(n, np.int32) for n in kv_len]
        given |= {"history": Ragged.of(zeros), "prompt_len": kv_len, "bad_words": Ragged.of([(1, 0)] * len(slots))}
        given |= {"bias_ids": Ragged.of([(0,)] * len(slots)), "bias": Ragged.of([(1.0,)] * len(slots), np.float32)}
    return Batch(
        slots=slots,
        q_len=q_len,
        kv_len=kv_len,
        num_decode=num_decode,
        input_ids=np.zeros(int(q_len[num_decode:].sum()), np.int32),
        samples=np.ones(len(slots), np.bool_),
        page_writes=_writes(kv_len, page_size, num_pages),
        joins=replace(joins, **given),
    )


def _writes(kv_len: Int32, page_size: int, num_pages: int) -> Int32:
    """Page table entries of rows 0, 1, …: each has the pages 0, 1, …, and from the first on again."""
    pages = -(-kv_len // page_size)
    slots = np.repeat(np.arange(len(pages)), pages)
    index = np.arange(len(slots)) - np.repeat(np.cumsum(pages) - pages, pages)
    return np.stack([slots, index, index % num_pages], axis=1).astype(np.int32)
