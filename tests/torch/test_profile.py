"""`minisgl profile` on engines: in this process and behind a server, on a tiny model on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import bytes_alone
from rich.console import Console
from server_process import ENVIRONMENT, MINISGL, PATIENCE_S, ServerProcess

from minisgl import EngineConfig
from minisgl.bench.record import Ceilings
from minisgl.profiling import report, trace
from minisgl.profiling.capture import PARTS, Recording, allocations
from minisgl.profiling.facts import SETTLING, Facts, engine_facts
from minisgl.profiling.load import Load
from minisgl.profiling.options import ProfileConfig
from minisgl.profiling.profile import UNDER_NSYS, _become_nsys, profile
from minisgl.source.cache_folder import silent


@pytest.fixture
def config(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EngineConfig:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    known = Ceilings(bytes_per_s=1e10, flops_per_s=1e11, dtype="float32", source="made up")
    monkeypatch.setattr("minisgl.profiling.facts.ceilings", lambda *_: known)  # which takes seconds
    monkeypatch.chdir(tmp_path)
    model = str(tiny_model("LlamaForCausalLM"))
    return EngineConfig(model=model, device="cpu", dtype="float32", num_pages=400, max_running_requests=8)


def facts(load: Load) -> Facts:
    return engine_facts("tiny", str(load.folder.path), load.config)


def profiled(config: EngineConfig, **options: Any) -> str:
    """What is printed."""
    console = Console(file=StringIO(), width=200)
    profile(config, ProfileConfig(**options), nullcontext(silent), lambda _: None, console)
    return console.file.getvalue()


def test_decode_steps_are_profiled_and_the_engine_is_as_before(config: EngineConfig, tmp_path: Path):
    text = profiled(config, batch=3, input_len=20, steps=4, output="report.json", html="report.html")
    assert "in float32" in text and "decode: 4 steps of 3.0 tokens" in text and " = weights " in text
    (phase,) = report.read(tmp_path / "report.json").phases
    assert {line.name for line in phase.host} == {part for part, *_ in PARTS} - {"send"} | {"step", "launch", "wait"}
    assert {"GEMM", "attention", "sampling"} <= {line.name for line in phase.groups}
    assert sum(line.us for line in phase.budget) == pytest.approx(phase.step_us)
    assert sum(line.us for line in (*phase.groups, *phase.idle)) == pytest.approx(phase.step_us)
    # On a CPU the host's own time is all there is, but for what lies between steps.
    outside_us = sum(line.us for line in phase.idle if line.name == "outside of steps")
    assert sum(line.us for line in phase.host) == pytest.approx(phase.step_us - outside_us, rel=0.5)
    assert "decode: 4 steps" in (tmp_path / "report.html").read_text()
    again = profiled(config, read=["profile.json.gz"])
    assert again == text


def test_the_steps_are_those_that_the_engine_made(config: EngineConfig):
    load = Load(config, ProfileConfig(batch=3, input_len=20, steps=2), silent)
    runner: Any = load.engine.runner
    objects = [load.engine, load.engine.scheduler, runner, runner._staging, runner._attention, runner._model]
    before = [dict(vars(each)) for each in objects]
    recording = Recording(load.engine, facts(load), 4)
    assert "step" in vars(load.engine) and "schedule" in vars(load.engine.scheduler)
    load.make_steps(6)  # two more than it records
    shadows = [{k: v for k, v in vars(each).items() if isinstance(v, partial)} for each in objects]
    assert [vars(each).keys() for each in objects] == [each.keys() for each in before] and shadows == [{}] * 6
    found = trace.understand(trace.read(recording.trace(), "it"))
    steps = found.facts.steps
    assert [(step.phase, step.tokens, step.decode_rows, step.samples) for step in steps] == [("decode", 3, 3, 3)] * 4
    contexts = [step.decode_context for step in steps]
    assert contexts == list(range(contexts[0], contexts[0] + 12, 3)) and contexts[0] > 3 * 20
    assert {stretch.step for stretch in found.host} == {0, 1, 2, 3}


def test_what_cannot_be_written_or_shown_keeps_nothing_else_back(config: EngineConfig, tmp_path: Path):
    closed = Console(file=StringIO())
    closed.file.close()
    options = ProfileConfig(steps=2, input_len=10, output="report.json", html="report.html", trace="/proc/none.gz")
    with pytest.raises(ValueError, match=r"cannot write /proc/none\.gz|closed file"):
        profile(config, options, nullcontext(silent), lambda _: None, closed)
    assert {file.name for file in tmp_path.glob("report.*")} == {"report.json", "report.html"}


@pytest.mark.parametrize("overlap", [True, False])
def test_prefill_steps_compute_nothing_but_prompts(config: EngineConfig, overlap: bool):
    text = profiled(replace(config, overlap=overlap), phase="prefill", batch=2, input_len=30, steps=3)
    assert "prefill: 3 steps of 60.0 tokens" in text and "decode" not in text


def test_steps_that_serve_are_split_by_phase(config: EngineConfig, tmp_path: Path):
    text = profiled(
        config, phase="serve", batch=4, input_len=10, output_len=6, steps=12, trace="t.json.gz", output="report.json"
    )
    assert "mixed: " in text and "decode: " in text
    assert {file.name for file in tmp_path.glob("t*")} == {"t-mixed.json.gz", "t-decode.json.gz"}
    whole = [trace.read(file.read_bytes(), "it") for file in sorted(tmp_path.glob("t-*"))]
    assert len({step["tokens"] for step in whole[0]["minisgl"]["steps"]}) > 1
    both = {phase.phase: phase for phase in report.read(tmp_path / "report.json").phases}
    again = profiled(config, read=["t-decode.json.gz"], output="decode.json")
    (decode,) = report.read(tmp_path / "decode.json").phases
    assert "mixed" not in again and decode.groups == both["decode"].groups and decode.host == both["decode"].host
    assert decode.step_us <= both["decode"].step_us  # but for the time between it and mixed ones


def test_traces_of_ranks_are_read_together(config: EngineConfig, tmp_path: Path):
    profiled(config, steps=3, trace="a.json.gz")
    text = profiled(config, read=["a.json.gz", "a.json.gz"], trace="both.json.gz")
    one, both = (trace.read((tmp_path / name).read_bytes(), "it") for name in ("a.json.gz", "both.json.gz"))
    assert len(both["traceEvents"]) == 2 * len(one["traceEvents"])
    assert profiled(config, read=["both.json.gz"]) == text == profiled(config, read=["a.json.gz"])


def test_a_step_of_two_ranks_has_all_parts_and_communicates(tiny_model: Any, config: EngineConfig, tmp_path: Path):
    two = replace(config, model=str(tiny_model("LlamaForCausalLM", num_key_value_heads=4)), tp=2)
    profiled(two, batch=3, input_len=20, steps=4, output="report.json")
    (phase,) = report.read(tmp_path / "report.json").phases
    assert {line.name for line in phase.host} == {part for part, *_ in PARTS} | {"step", "launch", "wait"}
    (communication,) = (line for line in phase.groups if line.name == "communication")
    sums = {line.name: line.calls for line in phase.kernels if line.name.startswith(("gloo:", "c10d::"))}
    assert sums["gloo:all_reduce"] == sums["c10d::allreduce_"] == 2 * 2 + 1  # of each layer, and the embedding
    assert communication.us > 0 and communication.calls == sum(sums.values())
    found = trace.understand(trace.read((tmp_path / "profile.json.gz").read_bytes(), "it"))
    assert {(work.rank, work.step) for work in found.work} == {(rank, step) for rank in (0, 1) for step in range(7)}


def test_two_ranks_go_on_behind_a_recording(tiny_model: Any, config: EngineConfig):
    two = replace(config, model=str(tiny_model("LlamaForCausalLM", num_key_value_heads=4)), tp=2)
    load = Load(two, ProfileConfig(batch=3, input_len=20, steps=4), silent)
    with closing(load.engine):
        for _ in range(2):
            recording = Recording(load.engine, facts(load), 3)
            load.make_steps(5)  # two more than it records
            steps = [work.step for work in trace.understand(trace.read(recording.trace(), "it")).work if work.rank]
            assert set(steps) == {0, 1, 2}
        load.make_steps(2)


def test_an_interrupt_leaves_nothing(config: EngineConfig, tmp_path: Path):
    engine = ("--model", config.model, "--device", "cpu", "--num-pages", "400")
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [*MINISGL, "profile", *engine, "--input-len", "20", "--batch", "4", "--steps", "10", "--phase", "serve"],
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path / "temporary"), "MINISGL_CACHE": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr
        for line in process.stderr:
            if "while nothing is captured" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert list((tmp_path / "temporary").iterdir()) == [] and list(tmp_path.glob("*.gz")) == []


def test_no_steps_are_only_timed(config: EngineConfig, tmp_path: Path):
    assert profiled(config, steps=0) == ""
    assert list(tmp_path.glob("*.gz")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 9}, "batch must be at most max_running_requests, 8, got 9"),
        ({"input_len": 2040}, "each 2[0-9]+ tokens of the context's 2048: lower batch, input_len or steps"),
        (
            {"batch": 8, "input_len": 1900, "phase": "prefill"},
            "8 requests of 1900 .* take .* KV pages of 400",
        ),
        ({"memory": "snapshot"}, "memory must be unset on cpu"),
        ({"nsys": "out"}, "nsys is not installed"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match=message):
        profiled(config, **options)


def test_a_failing_step_ends_the_recording(config: EngineConfig, monkeypatch: pytest.MonkeyPatch):
    load = Load(config, ProfileConfig(batch=1, input_len=20, steps=2), silent)
    recording = Recording(load.engine, facts(load), 100)
    monkeypatch.setattr(load.engine.scheduler, "_next_decode", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load.make_steps(1)
    recording.stop()
    assert "step" not in vars(load.engine)
    Recording(load.engine, facts(load), 1).stop()  # nothing of the first is left


def test_memory_is_of_cuda_alone():
    with allocations(None, "cpu"):
        pass
    with pytest.raises(ValueError, match="memory must be unset on cpu"), allocations("file", "cpu"):
        pass


def test_nsys_is_put_around_the_same_command(config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nsys").touch(mode=0o755)
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(UNDER_NSYS, raising=False)
    with pytest.raises(ValueError, match="nsys needs a CUDA device"):
        profiled(config, nsys="out")
    monkeypatch.setattr(os, "execv", lambda *given: became.append(given))
    _become_nsys("out", "cuda")
    ((program, command),) = became
    assert program == str(tmp_path / "nsys") and command[:3] == ["nsys", "profile", "--output=out"]
    assert "--capture-range=cudaProfilerApi" in command and command[-len(sys.orig_argv) + 1 :] == sys.orig_argv[1:]
    assert os.environ[UNDER_NSYS]


def test_a_server_is_profiled_while_it_answers(config: EngineConfig, tmp_path: Path):
    folder, over = tmp_path / "tiny", threading.Event()
    shutil.copytree(config.model, folder)
    bytes_alone().save(str(folder / "tokenizer.json"))

    def ask(url: str) -> None:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
        asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        while not over.is_set():
            urllib.request.urlopen(asked).close()

    arguments = (str(folder), "--device", "cpu", "--num-pages", "400", "--port", "0", "--served-model-name", "tiny")
    fresh = {"MINISGL_CACHE": str(tmp_path / "cache")}  # where no ceilings are kept
    with tempfile.TemporaryDirectory(prefix="p-") as place, ServerProcess(Path(place), *arguments, **fresh) as server:
        url = server.wait_until_ready()
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        try:
            text = profiled(EngineConfig(), url=url, steps=15, seconds=2.0)
            assert "profiler" not in server.stderr
        finally:
            over.set()
            asking.join()
    assert "tiny in float32" in text or "tiny in bfloat16" in text
    assert "decode: " in text and "no bound: " in text
    for file in tmp_path.glob("profile*.json.gz"):
        assert len(trace.read(file.read_bytes(), "it")["minisgl"]["steps"]) == 15 + SETTLING
    decode = "-decode" if len(list(tmp_path.glob("profile*"))) > 1 else ""
    assert profiled(config, read=[f"profile{decode}.json.gz"]).partition("\n")[0] in text


def test_a_server_without_work_has_nothing_to_show(config: EngineConfig, tmp_path: Path):
    load = Load(config, ProfileConfig(steps=2, input_len=10), silent)
    recording = Recording(load.engine, facts(load), 4)
    with pytest.raises(ValueError, match="the engine did nothing while the trace was taken"):
        trace.understand(trace.read(recording.trace(), "it"))
