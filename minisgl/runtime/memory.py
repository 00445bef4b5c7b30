"""How many KV pages fit."""

import torch

from minisgl.config import EngineConfig
from minisgl.host import memory
from minisgl.source.model_config import ModelConfig

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB
CPU_SHARE = 0.25


def page_bytes(model: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of keys and values, all layers."""
    return 2 * model.num_layers * page_size * model.num_kv_heads * model.head_size * dtype.itemsize


def step_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """An estimate of what the largest step holds besides weights and KV: its tokens' activations, and its logits'.

    A logit costs up to 36 bytes where rows are sampled with filters.
    """
    tokens = config.chunked_prefill_size + config.max_running_requests
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    width = 4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
    return tokens * width * dtype.itemsize + 36 * config.max_running_requests * model.vocab_size


def count_pages(
    model: ModelConfig, config: EngineConfig, page_size: int, dtype: torch.dtype, device: torch.device, model_len: int
) -> int:
    """Pages for the KV pool, after the weights are in place.

    `config.num_pages` decides where it is set. Else: what is free of `gpu_memory_utilization` on CUDA; on CPU
    2 GiB or a quarter of what is available, whichever is less; never more than every running request at full
    length needs. ValueError with the numbers where not even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes(model, config, dtype)
        way_out = "raise --gpu-memory-utilization, or lower --chunked-prefill-size or --max-running-requests"
    else:
        room = min(CPU_POOL_BYTES, int(CPU_SHARE * memory().free_bytes))
        way_out = "free some memory, or set --num-pages yourself"
    size = page_bytes(model, page_size, dtype)
    full = config.max_running_requests * -(-model_len // page_size)
    pages = min(room // size, full)
    if pages < 1:
        raise ValueError(
            f"no room for KV: a page of {page_size} tokens takes {size:,} bytes and {max(room, 0):,} are left for "
            f"all of them on {device.type}: {way_out}"
        )
    return pages
