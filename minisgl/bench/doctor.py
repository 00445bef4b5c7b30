"""Whether a machine has what minisgl needs, and what is amiss: facts from `machine`, judged."""

import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from minisgl import __version__, host
from minisgl.bench import machine
from minisgl.bench.machine import Nvidia, Torch
from minisgl.source.cache_folder import cache_folder
from minisgl.source.inventory import folder_bytes

PORT = 8000
GB = 1e9
OPTIONAL = {
    "triton": "comes with CUDA builds of torch",
    "transformers": "only tokenizers without tokenizer.json need it: pip install transformers",
    "flashinfer-python": "pip install 'minisgl[cuda]'",
    "flash-attn-4": "pip install 'minisgl[flash-attn]'",
}
"""Packages that minisgl can do without, and how each is had."""

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One line of the report. Broken is what keeps minisgl from working, not what is merely absent."""

    status: Literal["ok", "warn", "broken"]
    name: str
    text: str


def examine() -> Iterator[Finding]:
    """All findings; torch, which is slow to import, is asked beside the others."""
    with ThreadPoolExecutor(max_workers=1) as beside:
        answer = beside.submit(_or_fault, machine.ask_torch)
        nvidia = _or_fault(machine.ask_nvidia)
        nvcc = machine.nvcc_version()
        torch = answer.result()
    yield from packages(torch)
    yield Finding("ok", "CPU", f"{machine.cpu_model()}, {machine.cores():g} cores, {' '.join(machine.cpu_features())}")
    memory = host.memory()
    status = "ok" if memory.free_bytes > GB else "warn"
    yield Finding(status, "memory", f"{memory.free_bytes / GB:.1f} of {memory.limit_bytes / GB:.1f} GB are free")
    yield from gpus(nvidia, torch)
    yield from toolkit(nvcc, torch, nvidia)
    yield Finding("ok", "attention", "reference, on CPU and CUDA; this version uses no other: flashinfer, flash-attn")
    yield from cache()
    yield port(PORT)


def packages(torch: Torch | str) -> Iterator[Finding]:
    """minisgl, what it cannot do without, and what it can."""
    yield Finding("ok", "minisgl", f"{__version__}, Python {platform.python_version()}")
    for need in machine.unmet_requirements():
        yield Finding("broken", "packages", f"minisgl needs {need}: run pip install minisgl again")
    if isinstance(torch, str):
        yield Finding("broken", "torch", f"{torch}: run pip install minisgl again, in a new environment")
    else:
        build = "a build for CPUs" if torch.cuda is None else f"built for CUDA {torch.cuda}"
        yield Finding("ok", "torch", f"{torch.version}, {build}")
    yield Finding("ok", "tokenizers", machine.installed("tokenizers") or "not installed")
    for name, how in OPTIONAL.items():
        version = machine.installed(name)
        if name == "triton" and version and isinstance(torch, Torch) and torch.triton_fault:
            yield Finding("warn", name, f"{version}, which cannot be imported: {torch.triton_fault}")
        else:
            yield Finding("ok", name, version or f"not installed ({how})")


def gpus(nvidia: Nvidia | str | None, torch: Torch | str) -> Iterator[Finding]:
    """The driver and each GPU, and whether torch can use them."""
    if isinstance(nvidia, str):
        if machine.has_nvidia_driver():
            yield Finding("warn", "GPU", f"not known: {nvidia}")
            return
        nvidia = None
    if nvidia is None or not nvidia.gpus:
        yield Finding("ok", "GPU", "none with an NVIDIA driver; the CPU is used")
        return
    yield Finding("ok", "driver", f"NVIDIA {nvidia.driver}, for CUDA up to {nvidia.cuda}")
    for gpu in nvidia.gpus:
        free = f"{gpu.free_bytes / GB:.1f} of {gpu.memory_bytes / GB:.1f} GB are free"
        yield Finding("ok", "GPU", f"{gpu.name}, capability {gpu.capability}, {free}")
    if isinstance(torch, str) or torch.devices:
        return
    if torch.cuda is None:
        yield Finding("warn", "torch on GPU", "torch is a build for CPUs: install one for CUDA to use the GPU")
    elif _major(torch.cuda) > _major(nvidia.cuda):
        yield Finding(
            "broken",
            "torch on GPU",
            f"torch is built for CUDA {torch.cuda}, and the driver takes {nvidia.cuda} at most: "
            "update the driver, or install a torch for an older CUDA",
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("warn", "torch on GPU", "CUDA_VISIBLE_DEVICES hides the GPUs from torch")
    else:
        yield Finding(
            "broken", "torch on GPU", "torch sees no GPU; python -c 'import torch; torch.cuda.init()' says why"
        )


def toolkit(nvcc: str | None, torch: Torch | str, nvidia: Nvidia | str | None) -> Iterator[Finding]:
    """What kernel libraries compile with: it must be no newer than the driver, and fit torch."""
    cuda = None if isinstance(torch, str) else torch.cuda
    if nvcc is None:
        yield Finding("ok", "CUDA toolkit", "not installed (only libraries that compile kernels need its nvcc)")
    elif isinstance(nvidia, Nvidia) and _major(nvcc) > _major(nvidia.cuda):
        text = (
            f"{nvcc}, and the driver takes CUDA {nvidia.cuda} at most: what it compiles will not run; update the driver"
        )
        yield Finding("warn", "CUDA toolkit", text)
    elif cuda is not None and _major(nvcc) != _major(cuda):
        text = f"{nvcc}, and torch is built for CUDA {cuda}: install a toolkit {_major(cuda)}.x to compile kernels"
        yield Finding("warn", "CUDA toolkit", text)
    else:
        yield Finding("ok", "CUDA toolkit", nvcc)
    ninja = shutil.which("ninja") or "not installed (only libraries that compile kernels need it: pip install ninja)"
    yield Finding("ok", "ninja", ninja)


def cache() -> Iterator[Finding]:
    """Where models are kept, and the room that is left there."""
    try:
        folder = cache_folder()
    except ValueError as error:
        yield Finding("broken", "cache", str(error))
        return
    # Not Path.exists, which fails where a parent may not be looked into.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    size = f"{folder_bytes(folder) / GB:.2f} GB" if existing == folder else "not there yet"
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        yield Finding("ok", "cache", f"{folder}, {size}")
    else:
        yield Finding("broken", "cache", f"{existing} cannot be written: set MINISGL_CACHE to a folder that can")
    free = shutil.disk_usage(existing).free
    yield Finding("ok" if free > 2 * GB else "warn", "disk", f"{free / GB:.1f} GB are free for the cache")


def port(number: int) -> Finding:
    """Whether a server could listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError as error:
            return Finding("warn", f"port {number}", f"cannot be used: {error.strerror}")
    return Finding("ok", f"port {number}", "free")


def _or_fault(ask: Callable[[], T]) -> T | str:
    try:
        return ask()
    except ValueError as error:
        return str(error)
    except ImportError:
        return "nvidia-ml-py is missing: pip install nvidia-ml-py"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
