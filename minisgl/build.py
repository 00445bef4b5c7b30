"""The composition root: EngineConfig → Engine. The one module that imports runtime, model and attention."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from minisgl.attention.reference import ReferenceAttention, supports
from minisgl.config import EngineConfig
from minisgl.engine import Engine
from minisgl.host import cpu_flags
from minisgl.model.decoder import Decoder
from minisgl.model.weights import dummy_weights, load_weights
from minisgl.request import context_limit
from minisgl.runtime.memory import count_pages
from minisgl.runtime.runner import ModelRunner
from minisgl.scheduler import Scheduler
from minisgl.source.hub import ModelFolder, Report
from minisgl.source.model_config import ModelConfig

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 16


def resolve(config: EngineConfig) -> EngineConfig:
    """Replace every "auto" by what this machine has, in a new object; ValueError for what is not there.

    It needs no model, so that a wrong choice is known before anything is downloaded.
    """
    if config.tp != 1:
        raise ValueError(f"tp={config.tp}: tensor parallelism is not part of this version; tp must be 1")
    if config.cuda_graph:
        raise ValueError("cuda_graph=True: CUDA graphs are not part of this version; leave it unset or false")
    if config.cuda_graph_max_bs:
        raise ValueError(
            f"cuda_graph_max_bs={config.cuda_graph_max_bs}: CUDA graphs are not part of this version; leave it unset"
        )
    names = config.attention_backend.split(",")
    if len(names) > 2:
        raise ValueError(f"attention_backend={config.attention_backend!r}: name one backend, or two as PREFILL,DECODE")
    for name in names:
        if name not in ("auto", "reference"):
            raise ValueError(
                f"attention_backend={config.attention_backend!r}: {name!r} is not part of this version; "
                "auto and reference are"
            )
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: torch sees no CUDA device; use --device cpu, or a torch built for your driver")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or _cpu_multiplies_bfloat16() else "float32"
    return replace(
        config,
        device=device,
        dtype=dtype,
        overlap=device == "cuda" if config.overlap is None else config.overlap,
        attention_backend="reference",
        cuda_graph=False,
        cuda_graph_max_bs=0,
        page_size=config.page_size or DEFAULT_PAGE_SIZE,
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
    """Load a model and put an engine around it; `config` has passed `resolve`.

    `report` is told of the loading, in bytes. ValueError, with the numbers, for what does not fit.
    """
    assert config.page_size is not None
    length = model_length(config, model_config)
    model_config = replace(model_config, max_position=length)  # sizes the rope table
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    capability = torch.cuda.get_device_capability(device) if config.device == "cuda" else None
    group = model_config.num_heads // model_config.num_kv_heads
    if reason := supports(config.page_size, model_config.head_size, group, dtype, capability):
        raise ValueError(f"attention_backend={config.attention_backend}: {reason}")
    with _memory_errors(f"the weights of {folder.name} in {config.dtype}", "choose a smaller model or dtype"):
        model = Decoder(model_config, dtype, device)
    _fill(model, config, folder, report)
    pages = count_pages(model_config, config, config.page_size, dtype, device, length)
    context = context_limit(length, pages, config.page_size)
    if context < 2:
        raise ValueError(f"{pages} KV pages of {config.page_size} tokens hold no request: raise --num-pages")
    with _memory_errors(f"{pages} KV pages", "lower --num-pages, or leave it unset"):
        attention = ReferenceAttention(
            num_layers=model_config.num_layers,
            num_pages=pages,
            page_size=config.page_size,
            num_kv_heads=model_config.num_kv_heads,
            head_size=model_config.head_size,
            dtype=dtype,
            device=device,
        )
    shape = {"num_slots": config.max_running_requests, "page_size": config.page_size, "context": context}
    with _memory_errors(f"{config.max_running_requests} running requests", "lower --max-running-requests"):
        scheduler = Scheduler(
            num_pages=pages,
            chunk_size=config.chunked_prefill_size,
            policy=config.schedule_policy,
            mixed=config.mixed_batch,
            cache=config.cache,
            **shape,
        )
        runner = ModelRunner(model, attention, device=device, **shape)
    size, name = config.page_size, folder.name
    logger.info("%s on %s in %s: %d KV pages of %d tokens, context %d", name, device, dtype, pages, size, context)
    if context < length:
        logger.warning("the KV pool limits requests to %d tokens; the model would take %d", context, length)
    return Engine(scheduler, runner, overlap=bool(config.overlap))


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
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and "allocate memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"no memory for {what}: {way_out} ({reason})") from error
