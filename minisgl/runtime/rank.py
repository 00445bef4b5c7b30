"""One rank's part of an engine: its weights, its KV pool, and the runner around them, as large as memory allows.

As a module to be run, it is the process of a rank that another has started.
"""

import faulthandler
import gc
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from minisgl.attention.base import KVCache, Shape
from minisgl.attention.choose import attention, named
from minisgl.config import EngineConfig
from minisgl.host import end_with
from minisgl.model.decoder import Decoder
from minisgl.model.weights import dummy_weights, load_weights
from minisgl.parallel.crew import Place, Task, leave
from minisgl.parallel.leader import follow, note_step
from minisgl.parallel.meeting import join
from minisgl.parallel.ranks import Ranks
from minisgl.parallel.sharding import per_rank
from minisgl.request import context_limit
from minisgl.runtime.memory import count_pages, used_bytes
from minisgl.runtime.pieces import piece_sizes
from minisgl.runtime.runner import ModelRunner
from minisgl.runtime.warmup import warm_up, warm_up_graphs
from minisgl.source.hub import ModelFolder, Report
from minisgl.source.model_config import ModelConfig

if TYPE_CHECKING:
    from minisgl.profiling.capture import RankRecording

logger = logging.getLogger(__name__)

GRAPH_BYTES = 8 << 20
"""What a CUDA graph takes beside the memory that all share: its launches' arguments."""


@dataclass(frozen=True)
class Rank:
    """What is built, and what all ranks have agreed on."""

    runner: ModelRunner
    num_pages: int
    page_size: int
    context: int  # the longest request in tokens


def build_rank(
    config: EngineConfig,
    folder: ModelFolder,
    model_config: ModelConfig,
    ranks: Ranks,
    report: Report | None = None,
) -> Rank:
    """Load this rank's part of the model in `folder`; `config` and `model_config` are complete, and all ranks' own.

    All ranks do the same, step by step: they warm up and capture together. `report` is told of the loading, in bytes,
    and of what else takes its time. ValueError, with the numbers, for what does not fit. When this returns, every
    kernel that a request can need has run.
    """
    assert config.page_size is not None
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    length, mine = model_config.max_position, per_rank(model_config, ranks.size)
    with _memory_errors(f"the weights of {folder.name} in {config.dtype}", "choose a smaller model or dtype"):
        model = Decoder(model_config, dtype, device, ranks)
        if config.load_format == "dummy":
            dummy_weights(model)
            release(device)
    if config.load_format != "dummy":
        load_weights(model, folder.path, report and partial(report, f"loading {folder.name}"))
    model.pack()

    held_bytes = 0
    if device.type == "cuda" and config.num_pages is None:
        with _memory_errors(
            "the largest step beside the weights",
            "lower --chunked-prefill-size, --max-running-requests or --cuda-graph-max-bs",
        ):
            held_bytes = _measure(config, model, mine, report)
    pages = count_pages(mine, config, config.page_size, dtype, device, length, held_bytes)
    pages = ranks.least(pages, device)
    context = context_limit(length, pages, config.page_size)
    if context < 2:
        raise ValueError(f"{pages} KV pages of {config.page_size} tokens hold no request: raise --num-pages")
    with _memory_errors(f"{pages} KV pages", "lower --num-pages, or leave it unset"):
        kv = KVCache(shape_of(config, mine), mine.num_layers, pages, device)
    with _memory_errors(
        f"{config.max_running_requests} running requests",
        f"lower --max-running-requests, --cuda-graph-max-bs or "
        f"{'--gpu-memory-utilization' if config.num_pages is None else '--num-pages'}",
    ):
        runner = _runner(config, model, mine, kv, context)
        if device.type == "cuda" and config.num_pages is not None:
            _warm_up(runner, config, context, pages, report)
        if config.cuda_graph_bs:
            tell = report and partial(report, "capturing CUDA graphs")
            runner.capture(config.cuda_graph_bs, _piece_sizes(config), tell)
            warm_up_graphs(runner, config.cuda_graph_bs, config.page_size)
    ranks.least(0, device)  # all have come as far
    logger.info(
        "%s on %s%s in %s, attention by %s: %d KV pages of %d tokens, context %d",
        folder.name, f"{ranks.size} × " if ranks.size > 1 else "", device, dtype, config.attention_backend, pages,
        config.page_size, context,
    )  # fmt: skip
    if context < length and ranks.rank == 0:
        logger.warning("the KV pool limits requests to %d tokens; the model would take %d", context, length)
    return Rank(runner, pages, config.page_size, context)


def shape_of(config: EngineConfig, model: ModelConfig | None = None) -> Shape:
    """What decides which attention kernels can run; without a model, with a shape that all can do."""
    heads = (1, 1, 128) if model is None else (model.num_heads, model.num_kv_heads, model.head_size)
    capability = torch.cuda.get_device_capability() if config.device == "cuda" else None
    return Shape(config.page_size or 64, *heads, getattr(torch, config.dtype), capability)


def _piece_sizes(config: EngineConfig) -> list[int]:
    return piece_sizes(config.chunked_prefill_size + config.max_running_requests)


def _runner(config: EngineConfig, model: Decoder, mine: ModelConfig, kv: KVCache, context: int) -> ModelRunner:
    kernels = attention(named(config.attention_backend), kv, shape_of(config, mine))
    device = torch.device(config.device)
    return ModelRunner(model, kernels, num_slots=config.max_running_requests, context=context, device=device)


def _warm_up(runner: ModelRunner, config: EngineConfig, context: int, pages: int, report: Report | None) -> None:
    steps = warm_up(
        runner,
        num_slots=config.max_running_requests,
        context=context,
        page_size=config.page_size or 1,
        chunk=config.chunked_prefill_size,
        num_pages=pages,
    )
    for done, total in steps:
        if report is not None:
            report("warming up", done, total)


def _measure(config: EngineConfig, model: Decoder, mine: ModelConfig, report: Report | None) -> int:
    """Bytes that are taken when everything stands but the KV pool: seen in a trial with a pool of one request."""
    assert config.page_size is not None
    device, length = torch.device(config.device), mine.max_position
    pages = -(-min(length, config.chunked_prefill_size + config.page_size + 1) // config.page_size)
    kv = KVCache(shape_of(config, mine), mine.num_layers, pages, device)
    runner = _runner(config, model, mine, kv, length)
    _warm_up(runner, config, length, pages, report)
    graphs = 0
    if config.cuda_graph_bs:
        tokens = _piece_sizes(config)
        runner.capture(config.cuda_graph_bs[-1:], tokens[-1:])
        graphs = len(config.cuda_graph_bs) + len(tokens)
    held_bytes = used_bytes(device) - kv.memory.nbytes + GRAPH_BYTES * graphs
    del runner, kv
    gc.collect()
    release(device)
    return held_bytes


def release(device: torch.device) -> None:
    """Give CUDA memory that nothing uses any more back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _memory_errors(what: str, way_out: str) -> Iterator[None]:
    """Turn an allocation that fails into one line that says what did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is the first; on a CPU only the text tells
        cause = error.__cause__ or error  # the runner has its own words for those who meet it later
        known = isinstance(cause, torch.OutOfMemoryError | MemoryError)
        if not known and "allocate memory" not in str(cause):
            raise
        reason = str(cause).splitlines()[0]
        raise ValueError(f"no memory for {what}: {way_out} ({reason})") from error


def task_of(place: Place, config: EngineConfig, folder: ModelFolder, model: ModelConfig) -> Task:
    """What a process must know to be one of the ranks."""
    return Task(place, asdict(config), str(folder.path), folder.name, model)


def work(task: Task) -> None:
    """Be another rank than the first: build what it builds, and run what it sends, until it has no more."""
    config, folder = EngineConfig(**task.config), ModelFolder(Path(task.folder), task.name, sampling_defaults={})
    with join(task.place, config, task) as (ranks, line):
        runner = build_rank(config, folder, task.model, ranks, lambda *_: note_step(line)).runner

        @cache
        def recording() -> "RankRecording":
            from minisgl.profiling.capture import RankRecording  # with much that a rank needs for nothing else

            return RankRecording(runner, ranks, config.device)

        follow(runner, line, lambda order: recording().obey(order))
        ranks.end()


def main() -> None:
    """The process of a rank: it ends with the one that has started it."""
    faulthandler.enable()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    end_with(task.owner)
    try:
        work(task)
    except BaseException as error:
        traceback.print_exception(error)
        print(f"{type(error).__name__}: {error}".partition("\n")[0], file=sys.stderr)  # its last words
        leave(1)
    leave(0)  # at once: what the device still holds goes with the process, and to free it might be to wait for it


if __name__ == "__main__":
    main()
