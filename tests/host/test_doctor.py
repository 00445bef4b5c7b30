"""`minisgl doctor`: what it finds here, and how it judges what it cannot find here."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl import __version__, host
from minisgl.doctor import checks, machine
from minisgl.doctor.checks import Finding
from minisgl.doctor.machine import Gpu, Nvidia, Torch

ROOT = Path(__file__).parents[2]
CPU_TORCH = Torch(version="2.13.0+cpu", cuda=None, devices=0, triton_fault=None)
CUDA_TORCH = Torch(version="2.11.0", cuda="13.0", devices=1, triton_fault=None)
BLIND_TORCH = Torch(version="2.11.0", cuda="13.0", devices=0, triton_fault=None)
H200 = Gpu(name="NVIDIA H200", memory_bytes=150_000_000_000, free_bytes=149_000_000_000, capability="9.0")


def nvidia(cuda: str = "13.0") -> Nvidia:
    return Nvidia(driver="580.1", cuda=cuda, gpus=[H200])


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "import sys; from cli.main import main; sys.exit(main())", "doctor", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def test_every_question_has_its_line_with_a_status(tmp_path: Path):
    done = run(MINISGL_CACHE=str(tmp_path / "cache"))
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {status for status, _ in lines} <= {"ok", "warn"} and done.returncode == 0
    names = ("minisgl", "torch", "tokenizers", "triton", "transformers", "flashinfer-python", "flash-attn-4", "CPU")
    names += ("memory", "GPU", "CUDA toolkit", "ninja", "attention", "cache", "disk", "port 8000")
    assert not [name for name in names if not any(text.startswith(f"{name} ") for _, text in lines)]
    assert f"{__version__}, Python {sys.version.split()[0]}" in lines[0][1]


def test_json_has_the_same_and_a_verdict(tmp_path: Path):
    done = run("--json", MINISGL_CACHE=str(tmp_path))
    report = json.loads(done.stdout)
    assert (report["ok"], done.returncode) == (True, 0)
    assert all(finding.keys() == {"status", "name", "text"} for finding in report["findings"])
    assert {"CPU", "memory", "attention"} <= {finding["name"] for finding in report["findings"]}


def test_something_broken_is_exit_code_1(tmp_path: Path):
    (tmp_path / "file").touch()
    done = run("--json", MINISGL_CACHE=str(tmp_path / "file" / "cache"))
    report = json.loads(done.stdout)
    assert (report["ok"], done.returncode) == (False, 1)
    (broken,) = [finding for finding in report["findings"] if finding["status"] == "broken"]
    assert broken["name"] == "cache" and "set MINISGL_CACHE" in broken["text"]


def test_a_cache_in_a_home_that_there_is_not_is_broken_and_all_else_is_told():
    done = run("--json", MINISGL_CACHE="~no-such-user/cache")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and len(report["findings"]) > 10
    (broken,) = [finding for finding in report["findings"] if finding["status"] == "broken"]
    assert broken["name"] == "cache" and "set MINISGL_CACHE" in broken["text"]


def test_a_cache_in_a_folder_that_may_not_be_looked_into_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stat = os.stat

    def refuse(path: Any, *rest: Any, **options: Any) -> os.stat_result:  # as for whoever is not root
        if "shut" in Path(path).parts[:-1]:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *rest, **options)

    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "shut" / "cache"))
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (tmp_path / "shut").mkdir()
    finding = next(checks.cache())
    assert (finding.status, finding.name) == ("broken", "cache") and f"{tmp_path / 'shut'} cannot" in finding.text


def test_what_lies_in_the_working_folder_is_not_taken_for_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torch.py").write_text("raise ImportError('not the real one')")
    monkeypatch.chdir(tmp_path)
    assert machine.ask_torch().version == machine.installed("torch")


def test_torch_is_asked_in_a_process_of_its_own():
    assert machine.ask_torch().version == machine.installed("torch")


def test_a_torch_that_cannot_be_imported_is_broken(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('undefined symbol: ncclCommWindow')")
    done = run("--json", PYTHONPATH=f"{tmp_path}:{ROOT}")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1 and findings["torch"]["status"] == "broken"
    assert "undefined symbol: ncclCommWindow" in findings["torch"]["text"]


def test_a_package_in_another_version_than_needed_is_broken(monkeypatch: pytest.MonkeyPatch):
    needs = ["tokenizers>=99", "rich>=1", "no-such-package", "flashinfer-python==0.6; extra == 'cuda'"]
    monkeypatch.setattr(machine, "requires", lambda _: needs)
    here = machine.installed("tokenizers")
    assert machine.unmet_requirements() == [f"tokenizers>=99 (here: {here})", "no-such-package (here: none)"]
    broken = [finding.text for finding in checks.packages(CPU_TORCH) if finding.status == "broken"]
    assert len(broken) == 2 and f"minisgl needs tokenizers>=99 (here: {here})" in broken[0]


@pytest.mark.parametrize(
    ("version", "devices", "status", "part"),
    [
        ("3.6.0", 0, "warn", "3.6.0, cannot be imported: libfoo.so is missing"),
        ("3.6.0", 1, "broken", "3.6.0, cannot be imported: libfoo.so is missing"),
        (None, 1, "broken", "not installed, cannot be imported"),
        (None, 0, "ok", "not installed (comes with CUDA builds of torch)"),
    ],
)
def test_a_triton_that_cannot_be_imported_is_broken_where_there_is_a_gpu(
    version: str | None, devices: int, status: str, part: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "installed", lambda _: version)
    torch = Torch(version="2.13.0", cuda=None, devices=devices, triton_fault="libfoo.so is missing")
    (triton,) = [finding for finding in checks.packages(torch) if finding.name == "triton"]
    assert triton.status == status and part in triton.text


@pytest.mark.parametrize(
    ("asked", "torch", "status", "part"),
    [
        (None, CPU_TORCH, "ok", "none with an NVIDIA driver"),
        (nvidia(), CUDA_TORCH, "ok", "NVIDIA H200, capability 9.0, 149.0 of 150.0 GB are free"),
        (nvidia(), CPU_TORCH, "warn", "torch is a build for CPUs"),
        (nvidia("12.4"), BLIND_TORCH, "broken", "torch is built for CUDA 13.0, and the driver takes 12.4 at most"),
        (nvidia("13.1"), BLIND_TORCH, "broken", "torch sees no GPU"),
        (nvidia("12.8"), CUDA_TORCH, "ok", "for CUDA up to 12.8"),  # compatibility packages are no concern of ours
        (nvidia(), "torch cannot be imported", "ok", "driver"),
    ],
)
def test_gpus_are_judged_by_driver_and_torch_together(
    asked: Nvidia | None, torch: Torch | str, status: str, part: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    findings = list(checks.gpus(asked, torch))
    assert any(part in f"{finding.name} {finding.text}" and finding.status == status for finding in findings)
    assert max(findings, key=lambda finding: ["ok", "warn", "broken"].index(finding.status)).status == status


def test_gpus_that_the_user_hides_are_not_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [finding.status for finding in checks.gpus(nvidia(), BLIND_TORCH)] == ["ok", "ok", "warn"]


@pytest.mark.parametrize(("driver", "statuses"), [(True, ["warn"]), (False, ["ok"])])
def test_without_the_package_that_asks_the_driver_it_says_so_where_there_is_one(
    driver: bool, statuses: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: driver)
    findings = list(checks.gpus("nvidia-ml-py is missing: pip install nvidia-ml-py", CPU_TORCH))
    assert [finding.status for finding in findings] == statuses
    assert ("pip install nvidia-ml-py" in findings[0].text) == driver


@pytest.mark.parametrize(
    ("nvcc", "status", "part"),
    [("13.2", "ok", "13.2"), ("12.4", "warn", "install a toolkit 13.x"), (None, "ok", "only libraries that compile")],
)
def test_a_toolkit_of_another_cuda_than_torchs_is_warned_of(nvcc: str | None, status: str, part: str):
    finding = next(checks.toolkit(nvcc, CUDA_TORCH, None, needed=False))
    assert finding.status == status and part in finding.text


@pytest.mark.parametrize(("nvcc", "status"), [("13.2", "warn"), ("12.8", "ok"), ("12.2", "ok")])
def test_a_toolkit_newer_than_the_driver_is_warned_of(nvcc: str, status: str):
    torch = Torch(version="2.11.0", cuda=f"{nvcc[:2]}.0", devices=1, triton_fault=None)
    finding = next(checks.toolkit(nvcc, torch, nvidia("12.4"), needed=True))
    assert finding.status == status and ("the driver takes CUDA 12.4 at most" in finding.text) == (status == "warn")


@pytest.mark.parametrize(("needed", "status"), [(True, "warn"), (False, "ok")])
def test_a_missing_compiler_is_warned_of_where_flashinfer_compiles(
    needed: bool, status: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "")
    nvcc, ninja = checks.toolkit(None, CPU_TORCH, None, needed=needed)
    assert (nvcc.status, ninja.status) == (status, status)
    assert "set CUDA_HOME" in nvcc.text and "pip install ninja" in ninja.text
    assert ("FlashInfer compiles" in nvcc.text + ninja.text) == needed


def test_a_gpu_without_a_c_compiler_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert [f.name for f in checks.toolkit("13.2", CUDA_TORCH, None, needed=False) if f.status == "broken"] == [
        "C compiler"
    ]
    assert not [f for f in checks.toolkit("13.2", CPU_TORCH, None, needed=False) if f.status == "broken"]
    monkeypatch.setenv("CC", "/opt/cc")
    assert not [f for f in checks.toolkit("13.2", CUDA_TORCH, None, needed=False) if f.status == "broken"]


@pytest.mark.parametrize(
    ("capability", "packages", "status", "parts"),
    [
        (
            "9.0",
            (),
            "warn",
            ["auto takes reference, which is slow", "pip install 'minisgl[cuda]'", "minisgl[flash-attn]"],
        ),
        ("9.0", ("flashinfer-python",), "ok", ["auto takes flashinfer", "flashinfer by flashinfer-python 1.2"]),
        ("9.0", ("flash-attn-4", "flash-attn"), "warn", ["flash (prefill) by flash-attn-4 1.2; for flashinfer: pip"]),
        ("8.0", ("flash-attn-4", "flashinfer-python"), "ok", ["reference, flashinfer by flashinfer-python 1.2"]),
        (
            "8.7",
            ("flashinfer-python", "flash-attn"),
            "warn",
            ["knows no kernels for this GPU", "(prefill) by flash-attn 1.2"],
        ),
        ("7.5", ("flashinfer-python",), "warn", ["on capability 7.5 can be used: reference"]),
    ],
)
def test_attention_backends_are_told_apart_by_package_and_capability(
    capability: str, packages: tuple[str, ...], status: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "installed", lambda name: "1.2" if name in packages else None)
    other = Nvidia(driver="580.1", cuda="13.0", gpus=[dataclasses.replace(H200, capability=capability)] * 2)
    (finding,) = checks.attention(other, CUDA_TORCH)
    assert finding.status == status and all(part in finding.text for part in parts)


@pytest.mark.parametrize(
    ("asked", "torch", "status", "part"),
    [
        (None, CPU_TORCH, "ok", "auto takes reference, the only one for a CPU"),
        (nvidia(), BLIND_TORCH, "ok", "auto takes reference, the only one for a CPU"),
        ("nvidia-ml-py is missing", CPU_TORCH, "ok", "auto takes reference, the only one for a CPU"),
        ("nvidia-ml-py is missing", CUDA_TORCH, "warn", "not known: nvidia-ml-py is missing"),
        (nvidia(), "torch cannot be imported", "warn", "on capability 9.0 can be used"),
    ],
)
def test_attention_on_a_gpu_that_torch_does_not_see_is_that_of_a_cpu(
    asked: Nvidia | str | None, torch: Torch | str, status: str, part: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "installed", lambda _: None)
    (finding,) = checks.attention(asked, torch)
    assert finding.status == status and part in finding.text


def test_a_port_in_use_is_warned_of():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        number = server.getsockname()[1]
        assert checks.port(number) == Finding("warn", f"port {number}", "cannot be used: Address already in use")
    assert checks.port(number).status == "ok"


# The machine, as its kernel tells


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_cpu_is_told_from_what_its_kernel_says(tmp_path: Path):
    intel = files(tmp_path / "x86", proc__cpuinfo="model name\t: Xeon\nflags\t\t: fpu avx2 amx_bf16 avx512f\n")
    assert machine.cpu_model(intel) == "Xeon"
    assert machine.cpu_features(intel) == ["avx2", "avx512f", "amx_bf16"]
    arm = files(tmp_path / "arm", proc__cpuinfo="Features\t: fp asimd bf16\nCPU part\t: 0xd4f\n")
    assert machine.cpu_model(arm) == os.uname().machine
    assert machine.cpu_features(arm) == ["asimd", "bf16"]


def test_cores_are_those_that_this_process_may_use(tmp_path: Path):
    allowed = len(os.sched_getaffinity(0))
    assert machine.cores(tmp_path) == allowed
    limited = files(tmp_path, **{"sys__fs__cgroup__cpu.max": "50000 100000\n"})
    assert machine.cores(limited) == 0.5
    assert machine.cores(files(tmp_path, **{"sys__fs__cgroup__cpu.max": "max 100000\n"})) == allowed


def test_memory_is_what_a_cgroup_leaves_of_it(tmp_path: Path):
    root = files(tmp_path, proc__meminfo="MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    assert host.memory(root) == host.Memory(free_bytes=600 * 1024, limit_bytes=1000 * 1024)
    files(root, **{"sys__fs__cgroup__memory.max": "5000", "sys__fs__cgroup__memory.current": "2000"})
    assert host.memory(root) == host.Memory(free_bytes=3000, limit_bytes=5000)


def program(path: Path, content: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_is_looked_for_where_kernel_libraries_do(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_home, on_path = program(tmp_path / "cuda" / "bin" / "nvcc"), program(tmp_path / "bin" / "nvcc")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert host.nvcc() == str(on_path)
    monkeypatch.setenv(variable, str(tmp_path / "cuda"))
    assert host.nvcc() == str(in_home)
    in_home.unlink()  # a home without it is not passed over: the libraries do not, either
    assert host.nvcc() is None


@pytest.mark.parametrize(
    ("files_there", "compiles"),
    [
        ((), False),
        (("flashinfer/__init__.py",), True),
        (("flashinfer/__init__.py", "flashinfer/data/aot/xqa/xqa.so"), False),
        (("flashinfer/__init__.py", "flashinfer_jit_cache/__init__.py"), False),
    ],
)
def test_flashinfer_compiles_where_its_kernels_are_not_there(
    files_there: tuple[str, ...], compiles: bool, tmp_path: Path
):
    for name in files_there:
        program(tmp_path / name, "raise ImportError('not to be imported')")
    script = "from minisgl.host import flashinfer_compiles; print(flashinfer_compiles())"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-S", "-c", script]  # -S: whatever is installed here
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{compiles}\n"


def test_nvcc_is_asked_for_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program(tmp_path / "bin" / "nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert machine.nvcc_version() == "12.4"


@pytest.mark.parametrize("content", ["", "no program", "#!/no/such/shell\n", "#!/bin/sh\nexit 1\n"])
def test_an_nvcc_that_does_not_run_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program(tmp_path / "bin" / "nvcc", content)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert machine.nvcc_version() is None


NVML = """
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
class Memory: total, free = 8_000_000_000, 7_000_000_000
def nvmlInit():
    if FAULT: raise FAULT("driver is asleep")
def nvmlShutdown(): pass
def nvmlSystemGetCudaDriverVersion_v2(): return 12040
def nvmlSystemGetDriverVersion(): return "550.1"
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetCudaComputeCapability(handle): return 8, 6
def nvmlDeviceGetName(handle): return "A10"
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("None", "Nvidia(driver='550.1', cuda='12.4', gpus=[Gpu(name='A10', memory_bytes=8000000000, "),
        ("NVMLError_LibraryNotFound", "None"),
        ("NVMLError", "ValueError('the NVIDIA driver does not answer: driver is asleep')"),
    ],
)
def test_the_driver_is_asked_through_nvml(fault: str, said: str, tmp_path: Path):
    (tmp_path / "pynvml.py").write_text(f"{NVML}\nFAULT = {fault}")
    script = (
        "from minisgl.doctor.machine import ask_nvidia\n"
        "try: print(ask_nvidia())\n"
        "except ValueError as error: print(repr(error))"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)
