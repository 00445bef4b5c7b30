"""The composition root: EngineConfig → Engine. The one module that imports runtime and attention."""

import logging
from dataclasses import replace

import torch

from minisgl.attention.base import Shape
from minisgl.attention.choose import PHASES, automatic, best_page_size, named, why_not
from minisgl.attention.flashinfer import compiler_missing
from minisgl.config import EngineConfig
from minisgl.engine import Engine
from minisgl.host import cpu_flags
from minisgl.parallel.crew import find_place
from minisgl.parallel.leader import Leader
from minisgl.parallel.meeting import lead
from minisgl.parallel.ranks import ALONE
from minisgl.parallel.sharding import check_divisible, per_rank
from minisgl.runtime.graphs import graph_sizes
from minisgl.runtime.rank import Rank, build_rank, release, shape_of, task_of, work
from minisgl.scheduler import Scheduler
from minisgl.source.hub import ModelFolder, Report
from minisgl.source.model_config import ModelConfig

logger = logging.getLogger(__name__)

MOST_GRAPH_ROWS = 512


def resolve(config: EngineConfig) -> EngineConfig:
    """Replace every "auto" by what this machine has, in a new object; ValueError for what is not there.

    It needs no model, so that a wrong choice is known before anything is downloaded. What a model's shape decides is
    left to `resolve_kernels`.
    """
    names = named(config.attention_backend)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA device; use --device cpu, or a torch built for your driver")
    place = find_place(config)
    wanted = place.local_rank + place.local_size
    if device == "cuda" and wanted > 1 and (there := torch.cuda.device_count()) < wanted:
        raise ValueError(
            f"tp={config.tp} wants {wanted} GPUs of this host, and torch sees {there}: lower it, or look at "
            "CUDA_VISIBLE_DEVICES"
        )
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
    _check_backends(names, shape_of(config))
    return config


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    largest = config.cuda_graph_max_bs
    if largest is None:
        largest = max(config.cuda_graph_bs or (min(config.max_running_requests, MOST_GRAPH_ROWS),))
    wanted = graph_sizes(largest) if config.cuda_graph_bs is None else config.cuda_graph_bs
    return tuple(sorted({size for size in wanted if size <= min(largest, config.max_running_requests)}))


def resolve_kernels(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Choose attention kernels, page size and CUDA graphs, in a new object.

    ValueError says why a backend cannot run.
    """
    check_divisible(model, config.tp)
    shape = shape_of(config, per_rank(model, config.tp))
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
    does not fit; ChildProcessError where another rank has ended. When this returns, every kernel that a request can
    need has run. In a process that is another rank than the first, it works for that one, and then raises SystemExit.
    """
    model_config = replace(model_config, max_position=model_length(config, model_config))  # sizes the rope table
    place = find_place(config)
    if place.size == 1:
        built = build_rank(config, folder, model_config, ALONE, report)
        return Engine(_scheduler(config, built), built.runner, bool(config.overlap))
    if report is not None and not place.one_host:
        report("waiting for the other hosts", 0, None)
    if place.rank > 0:
        work(task_of(place, config, folder, model_config))
        raise SystemExit(0)
    with lead(place, config, task_of(place, config, folder, model_config)) as (ranks, crew):

        def note(what: str, done: float, total: float | None) -> None:
            crew.note_step()
            if report is not None:
                report(what, done, total)

        built = build_rank(config, folder, model_config, ranks, note)
    leader = Leader(built.runner, crew, ranks, config.step_timeout)
    return Engine(_scheduler(config, built), leader, bool(config.overlap), leader.close, crew.check)


def _scheduler(config: EngineConfig, built: Rank) -> Scheduler:
    return Scheduler(
        num_slots=config.max_running_requests,
        num_pages=built.num_pages,
        page_size=built.page_size,
        context=built.context,
        chunk_size=config.chunked_prefill_size,
        policy=config.schedule_policy,
        mixed=config.mixed_batch,
        cache=config.cache,
    )


def release_memory(config: EngineConfig) -> None:
    """Give memory of the device that no engine uses any more back to it."""
    release(torch.device(config.device))


def _check_backends(names: tuple[str, str], shape: Shape) -> None:
    for name, phase in zip(names, PHASES, strict=True):
        if name != "auto" and (reason := why_not(name, shape, phase)):
            raise ValueError(f"attention_backend: {name} cannot do {phase} here: {reason}")
