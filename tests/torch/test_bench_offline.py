"""`minisgl bench` to its end, on a tiny model with random weights."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from cli.main import main

ROOT = Path(__file__).parents[2]
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
ENGINE = '[engine]\nmodel = "./model"\nload_format = "dummy"\ndevice = "cpu"\ndtype = "bfloat16"\nnum_pages = 64\n'
THROUGHPUT = "[workload]\nrequests = 4\ninput_len = [20, 40]\noutput_len = 5\nmax_token_id = 319\nrepeat = 2\n"
LATENCY = "[workload]\nlatency = true\ninput_len = 20\noutput_len = 6\nttft_input_len = 33\nmax_token_id = 319\n"
SAMPLING = "[sampling]\ntemperature = 0.6\n"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    """`config(workload)`: a complete config file, its model beside it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))

    def write(workload: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(ENGINE + workload + SAMPLING)
        return path

    return write


def bench(path: Path, *arguments: str) -> dict[str, Any]:
    output = path.with_suffix(".json")
    assert main(["bench", "--config", str(path), "--output", str(output), *arguments]) == 0
    return json.loads(output.read_text())


def test_throughput_is_counted_step_by_step(config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    result = bench(config(THROUGHPUT))
    assert (result["mode"], result["model"], result["format"]) == ("throughput", "model", 1)
    assert result["engine"]["page_size"] == 16 and result["engine"]["overlap"] is False, "auto is resolved"
    assert result["sampling"]["temperature"] == 0.6 and result["sampling"]["ignore_eos"] is True
    assert result["versions"].keys() >= {"python", "torch", "minisgl"}
    assert len(result["repetitions"]) == 2
    for run in result["repetitions"]:
        # one step computes all prompts and brings the first tokens, four more bring the others
        assert (run["steps"], run["tokens_out"], run["mean_batch"]) == (5, 20, 4)
        assert run["tokens_cached"] == run["retractions"] == 0
        assert 80 <= run["tokens_in"] <= 160
        assert run["output_tokens_per_s"] == pytest.approx(20 / run["time_s"])
        assert run["total_tokens_per_s"] == pytest.approx((run["tokens_in"] + 20) / run["time_s"])
    rates = [run["output_tokens_per_s"] for run in result["repetitions"]]
    assert result["median"]["output_tokens_per_s"] == pytest.approx(median(rates))
    out, err = capsys.readouterr()
    assert f"{result['median']['output_tokens_per_s']:,.1f}" in out and "no bound" in out
    assert "warming up" in err and "2 of 2" in err and "output tok/s" in err


def test_latency_is_of_one_request_at_a_time(config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    result = bench(config(LATENCY))
    assert result["mode"] == "latency"
    assert len(result["repetitions"]) == 3
    for run in result["repetitions"]:
        assert (run["ttft_tokens_in"], run["tokens_in"], run["tokens_out"]) == (33, 20, 6)
        assert run["ttft_s"] > 0
        assert run["output_tokens_per_s"] == pytest.approx(5 / run["decode_s"])
    assert f"{result['median']['ttft_s'] * 1e3:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize("workload", [THROUGHPUT, LATENCY])
def test_a_device_with_known_ceilings_has_a_share_of_its_bound(
    workload: str, config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("minisgl.bench.machine.cpu_model", lambda: "NVIDIA H200")
    result = bench(config(workload))
    assert result["no_bound"] is None and "of bound" in capsys.readouterr().out
    for run in result["repetitions"]:
        for name, time_s in (("", run.get("time_s", run.get("decode_s"))), ("ttft_", run.get("ttft_s"))):
            if time_s is not None:
                assert 0 < run[f"{name}bound_s"] < time_s
                assert run[f"{name}bound_share"] == pytest.approx(run[f"{name}bound_s"] / time_s)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-token-id 320", "max_token_id must be at most 319 for this model, got 320"),
        ("--output-len 300", "input_len and output_len ask for 3"),
        ("--max-tokens 3", "max_tokens must be unset, got 3"),
        ("--model ./nothing", "there is no file or folder"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(
    flags: str, message: str, config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "--config", str(config(THROUGHPUT)), *flags.split()]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith(f"Error: {message}")


def test_a_stream_that_ends_at_once_has_no_rate(config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    every_token = [flag for token in range(320) for flag in ("--stop-token-ids", str(token))]
    assert main(["bench", "--config", str(config(LATENCY)), *every_token]) == 1
    assert "ended with its first token" in capsys.readouterr().err


def test_an_interrupt_ends_it_without_a_traceback(config: Callable[[str], Path]):
    path = config(THROUGHPUT.replace("repeat = 2", "repeat = 1000000"))
    script = "import sys; from cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "bench", "--config", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while not process.stderr.readline().startswith("1 of"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "" and all("output tok/s" in line for line in err.splitlines())
