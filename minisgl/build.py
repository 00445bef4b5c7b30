"""The composition root: EngineConfig → Engine. The one module that imports runtime, model and attention."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from minisgl.attention.base import KVCache, Shape
from minisgl.attention.choose import PHASES, attention, automatic, best_page_size, named, why_not
from minisgl.attention.flashinfer import compiler_missing
from minisgl.config import EngineConfig
from minisgl.engine import Engine
from minisgl.host import cpu_flags
from minisgl.model.decoder import Decoder
from minisgl.model.weights import dummy_weights, load_weights
from minisgl.request import context_limit
from minisgl.runtime.graphs import graph_sizes
from minisgl.runtime.memory import count_pages, used_bytes
from minisgl.runtime.pieces import piece_sizes
from minisgl.runtime.runner import ModelRunner
from minisgl.runtime.warmup import warm_up, warm_up_graphs
from minisgl.scheduler import Scheduler
from minisgl.source.hub import ModelFolder, Report
from minisgl.source.model_config import ModelConfig

logger = logging.getLogger(__name__)

MOST_GRAPH_ROWS = 512
GRAPH_BYTES = 8 << 20
"""What a CUDA graph takes beside the memory that all share: its launches' arguments."""


def resolve(config: EngineConfig) -> EngineConfig:
    """Replace every "auto" by what this machine has, in a new object; ValueError for what is not there.

    It needs no model, so that a wrong choice is known before anything is downloaded. What a model's shape decides is
    left to `resolve_kernels`.
    """
    if config.tp != 1:
        raise ValueError(f"tp={config.tp}: tensor parallelism is not part of this version; tp must be 1")
    names = named(config.attention_backend)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA device; use --device cpu, or a torch built for your driver")
    if config.cuda_graph and device == "cpu":
        raise ValueError("cuda_graph=True: the device is a CPU, which has none; leave it unset or false")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or _cpu_multiplies_bfloat16() else "float32"
    if config.cuda_graph and not _graph_sizes(config):
        raise ValueError(
            f"cuda_graph=True, but cuda_graph_max_bs={config.cuda_graph_max_bs}, cuda_graph_bs={config.cuda_graph_bs} "
            f"and max_running_requests={config.max_running_requests} leave none"
        )
    config = replace(
        config,
        device=device,
        dtype=dtype,
        overlap=device == "cuda" if config.overlap is None else config.overlap,
        cuda_graph=False if device == "cpu" else config.cuda_graph,
    )
    _check_backends(names, _shape(config, num_heads=1, num_kv_heads=1, head_size=128))  # what any model has
    return config


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    largest = config.cuda_graph_max_bs
    if largest is None:
        largest = max(config.cuda_graph_bs or (min(config.max_running_requests, MOST_GRAPH_ROWS),))
    wanted = graph_sizes(largest) if config.cuda_graph_bs is None else config.cuda_graph_bs
    return tuple(sorted({size for size in wanted if size <= min(largest, config.max_running_requests)}))


def _piece_sizes(config: EngineConfig) -> list[int]:
    return piece_sizes(config.chunked_prefill_size + config.max_running_requests)


def resolve_kernels(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Choose attention kernels, page size and CUDA graphs, in a new object.

    ValueError says why a backend cannot run.
    """
    shape = _shape(config, *_heads(model))
    best, reason = automatic(shape)
    names = named(config.attention_backend)
    prefill, decode = (auto if name == "auto" else name for name, auto in zip(names, best, strict=True))
    if reason and "auto" in names:
        logger.warning("attention runs by plain PyTorch, which is slow: %s", reason)
    shape = replace(shape, page_size=config.page_size or best_page_size((prefill, decode)))
    _check_backends((prefill, decode), shape)
    if "flashinfer" in (prefill, decode) and (missing := compiler_missing()):
        logger.warning("FlashInfer compiles kernels at first use and needs nvcc and ninja: %s", missing)
    graphs = decode != "reference" if config.cuda_graph is None else config.cuda_graph
    sizes = _graph_sizes(config) if graphs else ()
    if config.cuda_graph_bs and config.device == "cuda" and not sizes:
        logger.warning("no CUDA graphs: cuda_graph_bs=%s has none that can be used here", config.cuda_graph_bs)
    return replace(
        config,
        attention_backend=f"{prefill},{decode}",
        page_size=shape.page_size,
        cuda_graph=bool(sizes),
        cuda_graph_max_bs=max(sizes, default=0),
        cuda_graph_bs=sizes,
    )


def _cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for it; without them bfloat16 is slower than float32."""
    return not cpu_flags().isdisjoint({"amx_bf16", "avx512_bf16"})


def model_length(config: EngineConfig, model: ModelConfig) -> int:
    """The context that model and user allow, in tokens, before memory has its say."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model was made for at most {model.max_position} tokens"
        )
    return config.max_model_len


def build_engine(
    config: EngineConfig, folder: ModelFolder, model_config: ModelConfig, report: Report | None = None
) -> Engine:
    """Load a model and put an engine around it; `config` has passed `resolve` and `resolve_kernels`.

    `report` is told of the loading, in bytes, and of what else takes its time. ValueError, with the numbers, for what
    does not fit. When this returns, every kernel that a request can need has run.
    """
    assert config.page_size is not None
    length = model_length(config, model_config)
    model_config = replace(model_config, max_position=length)  # sizes the rope table
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    with _memory_errors(f"the weights of {folder.name} in {config.dtype}", "choose a smaller model or dtype"):
        model = Decoder(model_config, dtype, device)
    _fill(model, config, folder, report)

    held_bytes = 0
    if device.type == "cuda" and config.num_pages is None:
        with _memory_errors(
            "the largest step beside the weights",
            "lower --chunked-prefill-size, --max-running-requests or --cuda-graph-max-bs",
        ):
            held_bytes = _measure(config, model, model_config, length, report)
    pages = count_pages(model_config, config, config.page_size, dtype, device, length, held_bytes)
    context = context_limit(length, pages, config.page_size)
    if context < 2:
        raise ValueError(f"{pages} KV pages of {config.page_size} tokens hold no request: raise --num-pages")
    with _memory_errors(f"{pages} KV pages", "lower --num-pages, or leave it unset"):
        kv = KVCache(_shape(config, *_heads(model_config)), model_config.num_layers, pages, device)
    with _memory_errors(
        f"{config.max_running_requests} running requests",
        f"lower --max-running-requests, --cuda-graph-max-bs or "
        f"{'--gpu-memory-utilization' if config.num_pages is None else '--num-pages'}",
    ):
        runner = _runner(config, model, kv, context)
        if device.type == "cuda" and config.num_pages is not None:
            _warm_up(runner, config, context, pages, report)
        if config.cuda_graph_bs:
            tell = report and partial(report, "capturing CUDA graphs")
            runner.capture(config.cuda_graph_bs, _piece_sizes(config), tell)
            warm_up_graphs(runner, config.cuda_graph_bs, config.page_size)
        scheduler = Scheduler(
            num_slots=config.max_running_requests,
            num_pages=pages,
            page_size=config.page_size,
            context=context,
            chunk_size=config.chunked_prefill_size,
            policy=config.schedule_policy,
            mixed=config.mixed_batch,
            cache=config.cache,
        )
    logger.info(
        "%s on %s in %s, attention by %s: %d KV pages of %d tokens, context %d",
        folder.name, device, dtype, config.attention_backend, pages, config.page_size, context,
    )  # fmt: skip
    if context < length:
        logger.warning("the KV pool limits requests to %d tokens; the model would take %d", context, length)
    return Engine(scheduler, runner, overlap=bool(config.overlap))


def _shape(config: EngineConfig, num_heads: int, num_kv_heads: int, head_size: int) -> Shape:
    capability = torch.cuda.get_device_capability() if config.device == "cuda" else None
    return Shape(config.page_size or 64, num_heads, num_kv_heads, head_size, getattr(torch, config.dtype), capability)


def _heads(model: ModelConfig) -> tuple[int, int, int]:
    return model.num_heads, model.num_kv_heads, model.head_size


def _check_backends(names: tuple[str, str], shape: Shape) -> None:
    for name, phase in zip(names, PHASES, strict=True):
        if name != "auto" and (reason := why_not(name, shape, phase)):
            raise ValueError(f"attention_backend: {name} cannot do {phase} here: {reason}")


def _runner(config: EngineConfig, model: Decoder, kv: KVCache, context: int) -> ModelRunner:
    prefill, decode = named(config.attention_backend)
    kernels = attention((prefill, decode), kv, _shape(config, *_heads(model.config)))
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


def _measure(
    config: EngineConfig, model: Decoder, model_config: ModelConfig, length: int, report: Report | None
) -> int:
    """Bytes that are taken when everything stands but the KV pool: seen in a trial with a pool of one request."""
    assert config.page_size is not None
    device = torch.device(config.device)
    pages = -(-min(length, config.chunked_prefill_size + config.page_size + 1) // config.page_size)
    kv = KVCache(_shape(config, *_heads(model_config)), model_config.num_layers, pages, device)
    runner = _runner(config, model, kv, length)
    _warm_up(runner, config, length, pages, report)
    graphs = 0
    if config.cuda_graph_bs:
        tokens = _piece_sizes(config)
        runner.capture(config.cuda_graph_bs[-1:], tokens[-1:])
        graphs = len(config.cuda_graph_bs) + len(tokens)
    held_bytes = used_bytes(device) - kv.memory.nbytes + GRAPH_BYTES * graphs
    del runner, kv
    gc.collect()
    release_memory()
    return held_bytes


def release_memory() -> None:
    """Give CUDA memory that no engine uses any more back to the device."""
    torch.cuda.empty_cache()


def _fill(model: Decoder, config: EngineConfig, folder: ModelFolder, report: Report | None) -> None:
    if config.load_format == "dummy":
        dummy_weights(model)
    else:
        load_weights(model, folder.path, None if report is None else partial(report, f"loading {folder.name}"))
    model.pack()


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
