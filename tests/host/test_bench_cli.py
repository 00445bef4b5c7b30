"""The command line of `minisgl bench` and its config files, before anything is measured."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import app
from minisgl.bench import offline
from minisgl.bench.load import LoadConfig
from minisgl.bench.output import OutputConfig
from minisgl.bench.record import Run
from minisgl.bench.workload import WorkloadConfig, throughput_jobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.source.model_config import read_model_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "bench_configs").glob("*.toml"))
STANDING = WorkloadConfig(requests=256, input_len=[100, 1024], output_len=[100, 1024], max_token_id=10000)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


@dataclass
class Asked:
    """What was to be measured."""

    config: EngineConfig
    workload: WorkloadConfig
    sampling: SamplingParams
    load: LoadConfig | None = None  # None: in this process


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    asked: list[Asked] = []

    def in_process(config: Any, workload: Any, sampling: Any, *rest: Any) -> None:
        asked.append(Asked(config, workload, sampling))
        rest[-1](run())

    def on_a_server(config: Any, workload: Any, load: Any, sampling: Any, *rest: Any) -> None:
        asked.append(Asked(config, workload, sampling, load))
        rest[-1](run())

    def call(*arguments: str | Path) -> Asked:
        app(["bench", *map(str, arguments)], standalone_mode=False)
        return asked.pop()

    monkeypatch.setattr("minisgl.bench.offline.measure", in_process)
    monkeypatch.setattr("minisgl.bench.online.measure", on_a_server)
    monkeypatch.setattr("cli.bench.start_logging", lambda *_: None)
    return call


def run() -> Run:
    return Run(date="", mode="throughput", model="fake", device="Toaster", machine={}, versions={}, workload={})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_a_complete_run(path: Path, bench: Callable[..., Asked]):
    asked = bench("--config", path)
    assert path.name in path.read_text(), "its own command"
    assert (asked.sampling.temperature, asked.sampling.ignore_eos) == (0.6, True)
    if asked.config.load_format == "dummy":
        config = read_model_config(Path(asked.config.model))
        assert config.vocab_size > asked.workload.max_token_id


@pytest.mark.parametrize("name", ["offline-256-qwen3-0.6b", "offline-256-qwen3-14b", "offline-256-qwen3-32b-tp2"])
def test_the_standing_configs_are_the_standing_workload(name: str, bench: Callable[..., Asked]):
    asked = bench("--config", ROOT / "bench_configs" / f"{name}.toml")
    assert throughput_jobs(asked.workload, 0) == throughput_jobs(STANDING, 0)
    assert asked.sampling == SamplingParams(temperature=0.6, ignore_eos=True)
    config = asked.config
    assert (config.max_model_len, config.max_running_requests, config.cache) == (4096, 256, "radix")
    assert (config.load_format, config.dtype) == ("dummy", "bfloat16")


def test_flags_override_the_config(bench: Callable[..., Asked]):
    path = ROOT / "bench_configs" / "offline-256-qwen3-0.6b.toml"
    flags = ["--input-len", "7", "--num-prompts", "3", "--page-size", "64", "--no-ignore-eos", "--model", "./else"]
    asked = bench("--config", path, *flags)
    assert (asked.workload.input_range, asked.workload.requests) == ((7, 7), 3)
    assert (asked.config.page_size, asked.config.model) == (64, "./else")
    assert asked.sampling.ignore_eos is False
    assert asked.workload.output_range == (100, 1024), "the rest stays"


def test_a_relative_model_in_a_config_lies_beside_it(bench: Callable[..., Asked], tmp_path: Path, monkeypatch: Any):
    (tmp_path / "here").mkdir()
    for text in ('model = "../a"', '[engine]\nmodel = "../a"'):
        (tmp_path / "here" / "run.toml").write_text(text)
        monkeypatch.chdir(tmp_path)
        asked = bench("--config", "here/run.toml")
        assert Path(asked.config.model).is_absolute() and Path(asked.config.model).resolve() == tmp_path / "a"
    (tmp_path / "here" / "run.toml").write_text('model = "owner/name"')
    assert bench("--config", "here/run.toml").config.model == "owner/name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[workload]\nrequest = 3", "sets request, which is not an option here; did you mean requests?"),
        ("[engine]\npage_size = 0", "page_size must be from 1 to 2147483647, got 0"),
        ("[workload]\noutput_len = [9, 2]", "output_len must have the least length first, got [9, 2]"),
        ('[workload]\nlatency = "yes"', "latency must be true or false, got 'yes'"),
    ],
)
def test_a_bad_config_is_one_line(text: str, message: str, bench: Callable[..., Asked], tmp_path: Path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(typer.BadParameter) as error:
        bench("--config", tmp_path / "run.toml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_files_of_results_are_known_to_be_writable_before_anything_is_measured(
    bench: Callable[..., Asked], tmp_path: Path
):
    for name in ("output", "plot", "html"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("/dev/null")
        for file in (tmp_path, tmp_path / "nowhere" / "out.png", Path("/dev/null"), tmp_path / "link"):
            with pytest.raises(typer.BadParameter, match=f"{name} must be a file in a folder that is there"):
                bench(f"--{name}", file)
    bench("--output", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["model"] == "fake"
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "out.json")
    (tmp_path / "out.json").write_text("")
    bench("--output", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out.json").read_text()


def test_a_picture_is_a_png_or_an_svg_and_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape("plot must end in .png or .svg, got 'out.jpg'")):
        OutputConfig(plot="out.jpg")
    monkeypatch.setattr("minisgl.bench.output.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=re.escape("plot needs matplotlib: pip install 'minisgl[plot]'")):
        OutputConfig(plot="out.png")


@pytest.mark.parametrize("flags", ["--qps 2", "--qps 1,2,4", "--concurrency 8", "--qps 1 --url http://localhost:1"])
def test_a_load_is_for_a_server_and_none_is_for_this_process(flags: str, bench: Callable[..., Asked]):
    assert bench("--model", "m").load is None
    asked = bench("--model", "m", *flags.split())
    assert asked.load is not None and asked.config.model == "m"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(max_tokens=5), "max_tokens must be unset, got 5: output_len says how long answers are"),
        (SamplingParams(n=2), "n must be 1, got 2: raise requests instead"),
    ],
)
def test_sampling_that_the_workload_decides_is_refused(sampling: SamplingParams, message: str):
    with pytest.raises(ValueError, match=message):
        offline.measure(EngineConfig(), WorkloadConfig(), sampling, None, print, print)  # type: ignore[arg-type]
