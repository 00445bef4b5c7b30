"""`minisgl profile` on a CUDA device: kernels, also those of graphs, find their steps."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from minisgl import EngineConfig
from minisgl.profiling import report, trace
from minisgl.profiling.figures import Figures
from minisgl.profiling.options import ProfileConfig
from minisgl.profiling.profile import profile
from minisgl.source.cache_folder import silent

pytestmark = pytest.mark.gpu
MODELS = Path(__file__).parents[2] / "bench_configs" / "models"


@pytest.fixture
def config(qwen3: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.chdir(tmp_path)
    return EngineConfig(model=qwen3(), load_format="dummy", max_model_len=4096, max_running_requests=16, num_pages=2000)


def profiled(config: EngineConfig, **options: object) -> Figures:
    asked = ProfileConfig(output="report.json", **{"steps": 10} | options)
    profile(config, asked, nullcontext(silent), lambda _: None, Console(file=StringIO()))
    return report.read(Path("report.json"))


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-14b"])
@pytest.mark.parametrize(
    ("phase", "batch", "input_len"),
    [("decode", 1, 600), ("decode", 256, 600), ("prefill", 1, 4096), ("prefill", 256, 32)],
)
def test_all_of_a_step_is_told(model: str, phase: str, batch: int, input_len: int, config: EngineConfig):
    fields = {"max_running_requests": 256, "num_pages": 3500, "cuda_graph_bs": (1, 256), "max_model_len": 8192}
    config = replace(config, model=str(MODELS / model), **fields)
    found = profiled(config, phase=phase, batch=batch, input_len=input_len, steps=20)
    (phase_figures,) = found.phases
    assert (phase_figures.phase, phase_figures.steps) == (phase, 20)
    lines = (*phase_figures.groups, *phase_figures.idle)
    assert sum(line.us for line in lines) == pytest.approx(phase_figures.step_us)
    assert sum(line.us for line in phase_figures.budget) == pytest.approx(phase_figures.step_us)
    assert phase_figures.graphs == 1
    if phase == "decode":
        (other,) = [line.us for line in phase_figures.groups if line.name == "other"] or [0.0]
        assert other < 0.03 * phase_figures.step_us, phase_figures.kernels
        assert phase_figures.padding == 0


@pytest.mark.parametrize(
    ("phase", "batch", "input_len"), [("decode", 1, 100), ("decode", 12, 300), ("prefill", 2, 500)]
)
def test_kernels_belong_to_steps_and_groups(config: EngineConfig, phase: str, batch: int, input_len: int):
    (found,) = profiled(config, phase=phase, batch=batch, input_len=input_len).phases
    assert (found.phase, found.steps, found.tokens) == (phase, 10, batch * (1 if phase == "decode" else input_len))
    assert {"GEMM", "attention", "sampling"} <= {line.name for line in found.groups}
    work = trace.understand(trace.read(Path("profile.json.gz").read_bytes(), "it")).work
    assert {each.step for each in work} == set(range(13)), "every kernel was launched in some step"
    assert found.graphs == 1 and 0 < found.host_while_busy <= 1
    if phase == "decode" and batch == 12:
        assert found.padding == pytest.approx(1 - 12 / 16)


def test_the_allocator_is_seen(config: EngineConfig):
    profiled(config, memory="snapshot.pickle")
    assert Path("snapshot.pickle").stat().st_size > 10_000


@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs Nsight Systems")
def test_nsight_systems_sees_the_same_steps(config: EngineConfig):
    command = ["-m", "minisgl", "profile", "--model", config.model, "--load-format", "dummy", "--num-pages", "2000"]
    command += ["--max-running-requests", "16", "--max-model-len", "4096", "--steps", "5", "--nsys", "out"]
    subprocess.run([sys.executable, "-P", *command], check=True)
    assert Path("out.nsys-rep").stat().st_size > 1000
