"""Whether a machine has what minisgl needs, and what is amiss: facts from `machine`, judged."""

import os
import platform
import shutil
import socket
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from minisgl import __version__, host
from minisgl.doctor import machine
from minisgl.doctor.machine import Nvidia, Torch
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

BACKENDS = {
    "flashinfer": ("flashinfer-python",),
    "flash (prefill)": ("flash-attn-4", "flash-attn"),
    "triton (decode)": ("triton",),
}
"""Attention backends besides the reference, and the packages of each: the first that is installed counts."""

CAPABILITIES: Mapping[str, Container[int]] = {
    "flashinfer-python": (8, 9, 10, 12),
    "flash-attn-4": (9, 10),
    "flash-attn": (8, 9, 10, 12),
    "triton": range(8, 100),
}
"""Major compute capabilities that each runs on."""

AUTO_CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
"""Where `auto` takes FlashInfer."""

OUR_DECODE = ("9.0",)
"""Where it takes our own kernel to decode. All three repeat minisgl.attention, which imports torch: a test says that
they agree."""

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
    yield from toolkit(nvcc, torch, nvidia, needed=host.flashinfer_compiles())
    yield from attention(nvidia, torch)
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
        if name == "triton" and isinstance(torch, Torch) and torch.triton_fault and (version or torch.devices):
            fault = f"{version or 'not installed'}, cannot be imported: {torch.triton_fault}"
            yield Finding("broken" if torch.devices else "warn", name, f"{fault} (nothing runs on a GPU without it)")
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


def toolkit(nvcc: str | None, torch: Torch | str, nvidia: Nvidia | str | None, needed: bool) -> Iterator[Finding]:
    """What kernels are compiled with; `needed` says that FlashInfer does. nvcc fits torch, and is not too new."""
    cuda = None if isinstance(torch, str) else torch.cuda
    missing = "warn" if needed else "ok"
    why = "FlashInfer compiles its kernels at first use" if needed else "only libraries that compile kernels need it"
    if nvcc is None:
        text = f"no nvcc that runs ({why}: install a CUDA toolkit, or set CUDA_HOME to it)"
        yield Finding(missing, "CUDA toolkit", text)
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
    if ninja := shutil.which("ninja"):
        yield Finding("ok", "ninja", ninja)
    else:
        yield Finding(missing, "ninja", f"not on PATH ({why}: pip install ninja)")
    on_gpu = isinstance(torch, Torch) and torch.devices > 0
    if on_gpu and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield Finding("broken", "C compiler", "none, and Triton needs one to run on a GPU: install gcc, or set CC")


def attention(nvidia: Nvidia | str | None, torch: Torch | str) -> Iterator[Finding]:
    """Which backends can compute attention, and which one `auto` takes: a line for each kind of GPU."""
    sees_gpus = isinstance(torch, str) or torch.devices > 0
    if isinstance(nvidia, str) and isinstance(torch, Torch) and sees_gpus:
        yield Finding("warn", "attention", f"reference can be used; whether others can is not known: {nvidia}")
        return
    gpus = nvidia.gpus if isinstance(nvidia, Nvidia) and sees_gpus else []
    for capability in dict.fromkeys(gpu.capability for gpu in gpus):
        yield _attention_on(capability)
    if not gpus:
        yield Finding("ok", "attention", "auto takes reference, the only one for a CPU")


def _attention_on(capability: str) -> Finding:
    usable, missing = ["reference"], []
    for backend, packages in BACKENDS.items():
        package = next((each for each in packages if machine.installed(each)), packages[0])
        if _major(capability) not in CAPABILITIES[package]:
            continue
        if version := machine.installed(package):
            usable.append(f"{backend} by {package} {version}")
        else:
            missing.append(f"; for {backend}: {OPTIONAL[package]}")
    fast = capability in AUTO_CAPABILITIES and machine.installed("flashinfer-python")
    why = "which is slow on a GPU" if capability in AUTO_CAPABILITIES else "for it knows no kernels for this GPU"
    ours = ", with triton to decode," if capability in OUR_DECODE and machine.installed("triton") else ""
    choice = f"flashinfer{ours} where it supports the model" if fast else f"reference, {why}"
    text = f"auto takes {choice}; on capability {capability} can be used: {', '.join(usable)}{''.join(missing)}"
    return Finding("ok" if fast else "warn", "attention", text)


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
