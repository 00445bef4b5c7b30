"""`minisgl bench` to its end, on a tiny model with random weights."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from recorded_gpus import RecordedGpus, made_up

from cli.main import main
from minisgl.bench.figures import pass_figures
from minisgl.bench.record import Ceilings, Run, read

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
LATENCY = (
    "[workload]\nlatency = true\nbatch_size = [1, 3]\ninput_len = [20, 33]\noutput_len = 6\nmax_token_id = 319\n"
    "repeat = 2\n"
)
SAMPLING = "[sampling]\ntemperature = 0.6\n"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no device: measuring them takes long."""

    def known(name: str, device: str, dtype: str, say: object) -> Ceilings:
        return Ceilings(bytes_per_s=1e12, flops_per_s=1e15, dtype=dtype, source="made up")

    monkeypatch.setattr("minisgl.bench.offline.ceilings", known)


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


def bench(path: Path, *arguments: str) -> Run:
    output = path.with_suffix(".json")
    assert main(["bench", "--config", str(path), "--output", str(output), *arguments]) == 0
    return read(output)


def test_throughput_is_counted_step_by_step(config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    run = bench(config(THROUGHPUT))
    assert run.engine and (run.mode, run.model) == ("throughput", "model")
    assert run.engine["page_size"] == 16 and run.engine["overlap"] is False, "auto is resolved"
    assert run.sampling["temperature"] == 0.6 and run.sampling["ignore_eos"] is True
    assert run.versions.keys() >= {"python", "torch", "minisgl"}
    assert len({part.seed for part in run.passes}) == 2
    for part in run.passes:
        # one step computes all prompts and brings the first tokens, four more bring the others
        assert part.counters == {"steps": 5, "retractions": 0}
        assert [step.tokens for step in part.steps] == [4] * 5
        assert part.ended_s and not part.interrupted
        times_s = [part.began_s, *(step.time_s for step in part.steps), part.ended_s]
        assert times_s == sorted(times_s)
        prefill, decode = part.phases
        assert (prefill.name, prefill.requests, prefill.tokens_out) == ("prefill", 4, 4)
        assert 80 <= prefill.tokens_in <= 160 and prefill.tokens_cached == 0
        assert (decode.name, decode.tokens_out) == ("decode", 16)
        assert part.began_s < prefill.ended_s == decode.began_s == part.steps[0].time_s
        assert decode.ended_s == part.steps[-1].time_s
        for request in part.requests:
            assert (request.completion_tokens, request.asked_tokens, request.error) == (5, 5, None)
            assert [event.tokens for event in request.events] == [1, 4]
            assert request.events[0].time_s == pytest.approx(prefill.ended_s, abs=0.1)
    rates = [20 / (part.ended_s - part.began_s) for part in run.passes if part.ended_s]
    out, err = capsys.readouterr()
    assert f"{median(rates):,.1f}" in out and "1,000 GB/s" in out and "memory" in out
    assert "no power, energy and clocks: the engine runs on the CPU" in out
    assert "warming up" in err and "2: " in err and "output tok/s" in err


def test_the_energy_of_gpus_is_told(
    config: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        "minisgl.bench.offline.open_gpus", lambda *_: RecordedGpus(made_up(lambda _: 500.0, seconds=60))
    )
    monkeypatch.setattr("minisgl.bench.nvml.LEAST_STRETCH_S", 0.0)  # this takes milliseconds
    run = bench(config(THROUGHPUT))
    for part in run.passes:
        assert part.ended_s and part.samples[0].time_s <= part.began_s < part.ended_s <= part.samples[-1].time_s
        figures = pass_figures(run, part)
        assert figures["joules"] == pytest.approx(500 * figures["duration_s"], rel=1e-3)
        assert figures["decode.joules_per_token"] > 0 and figures["prefill.joules_per_token"] > 0
    assert "J per output token, 500 W (counter, 1.000 of power × time)" in capsys.readouterr().out


def test_latency_is_of_batches_of_every_size_and_length(
    config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    run = bench(config(LATENCY))
    assert run.mode == "latency"
    assert [part.name for part in run.passes] == ["1 × 20", "1 × 33", "3 × 20", "3 × 33"]
    for part in run.passes:
        batch, input_len = part.load["batch"], part.load["input_len"]
        assert [(phase.name, phase.tokens_in, phase.tokens_out) for phase in part.phases] == [
            ("prefill", batch * input_len, batch),
            ("decode", 0, batch * 5),
        ] * 2
        assert len(part.requests) == 2 * batch and all(request.cached_tokens == 0 for request in part.requests)
    assert "1 × 20" in capsys.readouterr().out


def test_a_prompt_of_several_steps_beside_others_is_a_mixed_phase(config: Callable[[str], Path]):
    run = bench(config(THROUGHPUT), "--chunked-prefill-size", "16", "--repeat", "1")
    first, decode = run.passes[0].phases
    assert first.name == "mixed" and first.tokens_out > 4
    assert first.tokens_out + decode.tokens_out == 20


def test_a_trace_has_its_own_lengths_and_shares_what_its_hashes_share(config: Callable[[str], Path], tmp_path: Path):
    rows = [{"timestamp": n, "input_length": 40, "output_length": 3 + n, "hash_ids": [1, 2, 7 + n]} for n in range(3)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = bench(config(THROUGHPUT), "--dataset", str(tmp_path / "trace.jsonl"), "--requests", "3")
    for part in run.passes:
        assert sorted((r.prompt_tokens, r.completion_tokens) for r in part.requests) == [(40, 3), (40, 4), (40, 5)]


def test_bodies_of_requests_are_for_a_server(
    config: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    row = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(row))
    assert main(["bench", "--config", str(config(THROUGHPUT)), "--dataset", str(tmp_path / "batch.jsonl")]) == 1
    assert "Error: dataset has requests for a server, in " in capsys.readouterr().err


def test_what_was_drawn_and_written_is_there(config: Callable[[str], Path], tmp_path: Path):
    bench(config(LATENCY), "--plot", str(tmp_path / "out.svg"), "--html", str(tmp_path / "out.html"))
    assert "</svg>" in (tmp_path / "out.svg").read_text()
    assert "</svg>" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-token-id 320", "max_token_id must be at most 319 for this model, got 320"),
        ("--output-len 300", "input_len and output_len ask for 3"),
        ("--max-tokens 3", "max_tokens must be unset, got 3"),
        ("--turns 2", "turns must be 1 without a server to talk to, got 2"),
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
    assert "ended with their first token" in capsys.readouterr().err


def test_an_interrupt_shows_and_writes_what_was_measured(config: Callable[[str], Path]):
    path = config(THROUGHPUT.replace("repeat = 2", "repeat = 1000000"))
    script = "import sys; from cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "bench", "--config", str(path), "--output", str(path.with_suffix(".json"))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while not (line := process.stderr.readline()).startswith("1: ") or "tok/s" not in line:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "median" in out and all("output tok/s" in line for line in err.splitlines())
    run = read(path.with_suffix(".json"))
    assert not run.passes[0].interrupted and len(run.passes[0].requests) == 4
    assert all(part.ended_s or part.interrupted for part in run.passes)
