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


def used_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are taken, by whom does not matter; what torch holds for later counts."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def count_pages(
    model: ModelConfig,
    config: EngineConfig,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    model_len: int,
    held_bytes: int = 0,
) -> int:
    """Pages for the KV pool.

    `config.num_pages` decides where it is set. Else: on CUDA what `gpu_memory_utilization` of it leaves beside
    `held_bytes`, which is all but the pool; on CPU 2 GiB or a quarter of what is available, whichever is less, for all
    ranks together; never more than every running request at full length needs. ValueError with the numbers where not
    even one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        room = int(total * config.gpu_memory_utilization) - held_bytes
        way_out = (
            "raise --gpu-memory-utilization, or lower --chunked-prefill-size, --max-running-requests or "
            "--cuda-graph-max-bs"
        )
    else:
        room = min(CPU_POOL_BYTES, int(CPU_SHARE * memory().free_bytes)) // config.tp
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
