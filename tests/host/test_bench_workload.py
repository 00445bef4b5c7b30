"""`minisgl bench` before an engine is there: workloads, bounds, configs, the command line, the report."""

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from cli.app import app
from minisgl.bench import offline
from minisgl.bench.machine import Gpu, Nvidia
from minisgl.bench.report import Measurement
from minisgl.bench.roofline import CEILINGS, Roofline, roofline
from minisgl.bench.workload import WARM_UP, WorkloadConfig, latency_jobs, throughput_jobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.source.model_config import ModelConfig, read_model_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "bench_configs").glob("*.toml"))
MODELS = ROOT / "bench_configs" / "models"
STANDING = WorkloadConfig(requests=256, input_len=[100, 1024], output_len=[100, 1024], max_token_id=10000)
H200 = CEILINGS["NVIDIA H200"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


def model(name: str) -> ModelConfig:
    return read_model_config(MODELS / name)


def lengths(workload: WorkloadConfig) -> list[tuple[int, int]]:
    return [(len(job.prompt), job.output_len) for job in throughput_jobs(workload, 0)]


def bound(roof: Roofline, workload: WorkloadConfig) -> float:
    """Output tokens a second."""
    given = lengths(workload)
    return sum(out for _, out in given) / (roof.prefill_s([prompt for prompt, _ in given]) + roof.decode_s(given))


# Workloads


def test_the_standing_workload_is_the_one_that_others_publish():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    answers = [random.randint(100, 1024) for _ in range(256)]
    jobs = throughput_jobs(STANDING, 0)
    assert [job.prompt for job in jobs] == prompts
    assert [job.output_len for job in jobs] == answers
    assert (sum(map(len, prompts)), sum(answers)) == (142_827, 133_966)


def test_every_repetition_and_the_warm_up_have_prompts_of_their_own():
    first, second, warm_up = (throughput_jobs(STANDING, n) for n in (0, 1, WARM_UP))
    assert [(len(j.prompt), j.output_len) for j in second] == [(len(j.prompt), j.output_len) for j in first]
    assert [len(job.prompt) for job in warm_up] == [len(job.prompt) for job in first]
    assert max(job.output_len for job in warm_up) == 16
    beginnings = [tuple(job.prompt[:16]) for jobs in (first, second, warm_up) for job in jobs]
    assert len(set(beginnings)) == 3 * 256, "a page of 16 tokens comes twice"
    assert second == throughput_jobs(STANDING, 1)


def test_latency_has_two_requests_with_new_prompts_each_time():
    workload = WorkloadConfig(latency=True, input_len=128, output_len=256, ttft_input_len=512)
    repetitions = [latency_jobs(workload, n) for n in (WARM_UP, 0, 1)]
    for first, stream in repetitions:
        assert (len(first.prompt), len(stream.prompt), stream.output_len) == (512, 128, 256)
    assert len({tuple(job.prompt[:16]) for pair in repetitions for job in pair}) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": [3, 2]}, "input_len must have the least length first, got [3, 2]"),
        ({"input_len": [1, 2, 3]}, "input_len must be one length, or the least and the most, got [1, 2, 3]"),
        ({"output_len": 0}, "output_len must be from 1 to 2147483647, got 0"),
        ({"input_len": "long"}, "input_len must be a whole number or a list of whole numbers, got 'long'"),
        ({"requests": 0}, "requests must be from 1 to 2147483647, got 0"),
        ({"repeat": 0}, "repeat must be from 1 to 2147483647, got 0"),
        ({"latency": True, "requests": 3}, "requests must be unset with latency, which has one at a time, got 3"),
        ({"latency": True, "input_len": [1, 2]}, "input_len must be one length with latency, got [1, 2]"),
        ({"latency": True, "output_len": 1}, "output_len must be at least 2 with latency"),
        ({"ttft_input_len": 5}, "ttft_input_len must be unset without latency, got 5"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        WorkloadConfig(**options)


# Bounds


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-14b", 14.768)])
def test_the_model_shapes_have_the_published_number_of_parameters(name: str, billions: float):
    roof = Roofline(model(name), H200)
    embedding = 0 if roof.model.tied_embeddings else roof.head
    assert (roof.body + roof.head + embedding) / 1e9 == pytest.approx(billions, abs=0.0005)


@pytest.mark.parametrize(("name", "rate"), [("qwen3-0.6b", 36_200), ("qwen3-14b", 8_070)])
def test_the_bound_of_the_standing_workload_on_an_h200(name: str, rate: float):
    assert bound(Roofline(model(name), H200), STANDING) == pytest.approx(rate, rel=0.001)


def test_two_gpus_have_twice_the_bound():
    qwen3_32b = replace(model("qwen3-14b"), num_layers=64, num_heads=64, intermediate_size=25600)
    assert bound(Roofline(qwen3_32b, H200, gpus=2), STANDING) == pytest.approx(7_620, rel=0.001)


def test_the_bound_of_one_stream_is_reading_the_weights_and_a_little_kv():
    roof = Roofline(model("qwen3-0.6b"), H200)
    assert 1 / roof.decode_step_s(1, 0) == pytest.approx(3_600, rel=0.003)
    assert 255 / roof.decode_s([(128, 256)]) == pytest.approx(3_521, rel=0.001)


def test_the_bound_by_hand_for_a_model_of_a_few_weights():
    tiny = replace(
        model("qwen3-0.6b"), hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_size=8, vocab_size=100
    )
    roof = Roofline(replace(tiny, intermediate_size=5), replace(H200, bytes_per_s=1e6, flops_per_s=1e5))
    body, head = 2 * (4 * 16 + 4 * 8 * 2 + 16 * 4 + 3 * 4 * 5), 4 * 100
    assert (roof.body, roof.head) == (body, head)
    attention = 2 * 2 * (4 * 8) * (1 + 2 + 3)  # layers, heads, FLOPs of a pair, pairs
    assert roof.prefill_s([3]) == pytest.approx((2 * body * 3 + 2 * head + attention) / 1e5)
    kv_bytes = 2 * 2 * 8 * 2  # layers, keys and values, head size, bytes
    steps = [(2, 4 + 2), (1, 5), (1, 6)]  # two requests, the second longer by two tokens
    expected = sum(2 * (body + head) * n / 1e5 + kv_bytes * context / 1e6 for n, context in steps)
    assert roof.decode_s([(3, 2), (1, 2)]) + roof.decode_step_s(1, 5) + roof.decode_step_s(1, 6) == pytest.approx(
        expected
    )
    assert roof.decode_s([(5, 1)]) == 0


def test_where_ceilings_are_not_known_there_is_no_bound():
    shape = model("qwen3-0.6b")
    assert isinstance(roofline(shape, "bfloat16", "NVIDIA H200"), Roofline)
    assert roofline(shape, "bfloat16", "Toaster") == "the ceilings of Toaster are not known; known: NVIDIA H200"
    assert "not for float32" in str(roofline(shape, "float32", "NVIDIA H200"))


def gpus(*names: str) -> Nvidia:
    return Nvidia(
        driver="1", cuda="13.0", gpus=[Gpu(name=n, memory_bytes=1, free_bytes=1, capability="") for n in names]
    )


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (lambda: gpus("NVIDIA H200", "NVIDIA H200"), "NVIDIA H200"),
        (lambda: gpus("NVIDIA H200", "NVIDIA T4"), "a GPU of unknown name"),  # which of them is used?
        (lambda: None, "a GPU of unknown name"),
        (lambda: exec("raise ImportError"), "a GPU of unknown name"),
    ],
)
def test_a_gpu_has_the_name_that_its_driver_gives_it(answer: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minisgl.bench.machine.ask_nvidia", answer)
    assert offline.device_name("cuda") == name


# The command line


@dataclass
class Asked:
    """What `measure` was called with."""

    config: EngineConfig
    workload: WorkloadConfig
    sampling: SamplingParams


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    asked: list[Asked] = []

    def measure(*given: Any) -> Measurement:
        asked.append(Asked(*given[:3]))
        return measurement()

    def run(*arguments: str | Path) -> Asked:
        app(["bench", *map(str, arguments)], standalone_mode=False)
        return asked.pop()

    monkeypatch.setattr("cli.bench.measure", measure)
    monkeypatch.setattr("cli.bench.start_logging", lambda *_: None)
    return run


def measurement(**changes: Any) -> Measurement:
    repetitions = [
        {"output_tokens_per_s": rate, "bound_share": rate / 1000, "time_s": 10 / rate, "retractions": 0.0}
        for rate in (300.0, 100.0, 250.0)
    ]
    given = Measurement(
        mode="throughput",
        model="fake",
        device="Toaster",
        engine={"dtype": "bfloat16"},
        workload={},
        sampling={},
        shape={},
        repetitions=repetitions,
        no_bound=None,
    )
    return replace(given, **changes)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_a_complete_run(path: Path, bench: Callable[..., Asked]):
    asked = bench("--config", path)
    assert path.name in path.read_text(), "its own command"
    assert (asked.sampling.temperature, asked.sampling.ignore_eos) == (0.6, True)
    if asked.config.load_format == "dummy":
        config = read_model_config(Path(asked.config.model))
        assert config.vocab_size > asked.workload.max_token_id


@pytest.mark.parametrize("name", ["offline-256-qwen3-0.6b", "offline-256-qwen3-14b"])
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


def test_the_results_file_is_known_to_be_writable_before_anything_is_measured(
    bench: Callable[..., Asked], tmp_path: Path
):
    for output in (tmp_path, tmp_path / "nowhere" / "out.json"):
        with pytest.raises(ValueError, match="cannot write"):
            bench("--output", output)
    bench("--output", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["median"]["output_tokens_per_s"] == 250


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(max_tokens=5), "max_tokens must be unset, got 5: output_len says how long answers are"),
        (SamplingParams(n=2), "n must be 1, got 2: raise requests instead"),
    ],
)
def test_sampling_that_the_workload_decides_is_refused(sampling: SamplingParams, message: str):
    with pytest.raises(ValueError, match=message):
        offline.measure(EngineConfig(), WorkloadConfig(), sampling, None, print)  # type: ignore[arg-type]


# The report


def table(given: Measurement, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        given.show(console)
    return capture.get()


def test_the_table_has_each_repetition_and_the_median_of_each_figure():
    rows = [" ".join(line.split()) for line in table(measurement()).splitlines() if line.strip()]
    assert rows[:2] == ["throughput of fake in bfloat16 on Toaster", "run output tok/s of bound time s"]
    assert rows[3:] == ["1 300.0 30.0% 0.033", "2 100.0 10.0% 0.100", "3 250.0 25.0% 0.040", "median 250.0 25.0% 0.040"]


def test_the_table_says_what_would_mislead_silently():
    repetitions = [{"output_tokens_per_s": 1.0, "retractions": 3.0}]
    text = table(measurement(no_bound="the ceilings are not known", repetitions=repetitions))
    assert "of bound" not in text
    assert "no bound: the ceilings are not known" in text
    assert "3 retractions: the KV pool is too small" in text


def test_no_number_of_the_standing_workload_is_cut_on_a_terminal_of_80_columns():
    figures = {"output_tokens_per_s": 27_512.3, "bound_share": 0.761, "total_tokens_per_s": 56_841.0, "time_s": 14.869}
    figures |= {
        "steps": 1041,
        "mean_batch": 128.7,
        "tokens_in": 142_827,
        "tokens_cached": 12_345,
        "tokens_out": 133_966,
    }
    text = table(measurement(repetitions=[figures]), width=80)
    assert "…" not in text
    assert "median 27,512.3 76.1% 56,841.0 14.869 1,041 128.7 142,827 12,345 133,966" in " ".join(text.split())
