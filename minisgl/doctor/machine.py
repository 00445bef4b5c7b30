"""What this machine is: packages, CPU, memory, GPUs, CUDA. Facts only, without torch in this process."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from minisgl.host import cpu_field, cpu_flags, nvcc, read

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
"""What makes matrix products fast, by the kernel's names: x86's first, then Arm's."""

TORCH_TIMEOUT_S = 60.0
_ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch
try:
    import triton
    fault = None
except ImportError as error:
    fault = str(error)
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "triton_fault": fault,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says of itself."""

    version: str
    cuda: str | None  # the version that it was built for; None: a build for CPUs
    devices: int  # GPUs that it can use
    triton_fault: str | None  # why Triton cannot be imported


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as its driver sees it."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: str  # like 9.0


@dataclass(frozen=True, kw_only=True)
class Nvidia:
    """The NVIDIA driver and its GPUs."""

    driver: str
    cuda: str  # the newest CUDA that the driver takes, like 13.0
    gpus: list[Gpu]


def installed(package: str) -> str | None:
    """The version of an installed package, None where it is not there; it is not imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def unmet_requirements() -> list[str]:
    """Packages that minisgl's own metadata asks for and this environment does not have in that version."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in requires("minisgl") or []]
    except PackageNotFoundError:  # run from its source tree
        return []
    return [
        f"{need.name}{need.specifier} (here: {installed(need.name) or 'none'})"
        for need in needed
        if need.marker is None
        and not ((found := installed(need.name)) and need.specifier.contains(found, prereleases=True))
    ]


def ask_torch() -> Torch:
    """Import torch in another process and ask it; raises ValueError with the reason where that fails."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH]  # -P: what lies in this folder is not what is installed
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"importing torch takes more than {TORCH_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(f"torch cannot be imported: {lines[-1]}")
    return Torch(**json.loads(done.stdout.splitlines()[-1]))


def ask_nvidia() -> Nvidia | None:
    """The driver's answer through NVML, None where there is no driver.

    Raises ImportError where the package that asks it is missing, ValueError where the driver fails.
    """
    import pynvml  # pyright: ignore[reportMissingImports]  # nvidia-ml-py

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as error:
        raise ValueError(f"the NVIDIA driver does not answer: {error}") from error
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Nvidia(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=[_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())],
        )
    except pynvml.NVMLError as error:
        raise ValueError(f"the NVIDIA driver does not answer: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        capability=f"{major}.{minor}",
    )


def device_name(device: str) -> str:
    """What the processor or the GPU calls itself; GPUs that NVML cannot tell apart from others are not guessed at."""
    if device == "cpu":
        return cpu_model()
    try:
        nvidia = ask_nvidia()
    except (ImportError, ValueError):
        nvidia = None
    names = {gpu.name for gpu in nvidia.gpus} if nvidia else set()
    return names.pop() if len(names) == 1 else "a GPU of unknown name"


def has_nvidia_driver() -> bool:
    """Whether the kernel has an NVIDIA driver loaded."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"))


def nvcc_version() -> str | None:
    """The CUDA toolkit's version; None where its compiler is not found or fails."""
    found = nvcc()
    if found is None:
        return None
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release[1] if release else None


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name; on Arm, where the kernel has none, its architecture."""
    return cpu_field("model name", root) or os.uname().machine


def cpu_features(root: Path = Path("/")) -> list[str]:
    """Those of CPU_FEATURES that the processor has."""
    flags = cpu_flags(root)
    return [name for name in CPU_FEATURES if name in flags]


def cores(root: Path = Path("/")) -> float:
    """Processors that this process may use: its affinity, and less where a cgroup says so."""
    quota, _, period = read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else allowed
