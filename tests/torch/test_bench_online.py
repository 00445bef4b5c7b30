"""`minisgl bench` on a server that it starts itself, with a tiny model of random weights and no tokenizer."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ENVIRONMENT, MINISGL, PATIENCE_S, wait_for

from minisgl.bench import record
from minisgl.bench.metrics import totals

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "eos_token_id": 2,
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    engine = ["--model", str(folder), "--load-format", "dummy", "--device", "cpu", "--num-pages", "200"]
    return [*MINISGL, "bench", *engine, "--max-token-id", "319", "--output", str(tmp_path / "run.json")]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """With a folder for what is temporary whose path is short: there will be a socket in it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield {**ENVIRONMENT, "TMPDIR": folder}


def servers(environment: dict[str, str]) -> Iterator[int]:
    """Processes that were given a file in the folder for what is temporary."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if environment["TMPDIR"].encode() in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:
            continue


def test_it_measures_a_server_of_its_own_and_ends_it(command: list[str], environment: dict[str, str], tmp_path: Path):
    flags = ["--qps", "50", "--requests", "6", "--input-len", "20", "--output-len", "8", "--temperature", "0"]
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "online of tiny in float32" in done.stdout or "online of tiny in bfloat16" in done.stdout
    run = record.read(tmp_path / "run.json")
    assert run.engine is not None
    assert (run.engine["device"], run.engine["model"], run.device != "unknown") == ("cpu", str(tmp_path / "tiny"), True)
    (part,) = run.passes
    assert totals(part)["tokens_out"] == 48 and part.counters["steps"] >= 8
    assert all(request.events and request.finish_reason == "length" for request in part.requests)
    assert list(servers(environment)) == list(Path(environment["TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_its_server_ends_with_it_however_it_ends(
    number: int, code: int, command: list[str], environment: dict[str, str]
):
    flags = ["--concurrency", "1", "--requests", "1000", "--output-len", "200"]
    with subprocess.Popen([*command, *flags], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any("1: 1 at once" in line for line in process.stderr)
        assert list(servers(environment))
        os.kill(process.pid, number)
        assert process.wait(PATIENCE_S) == code
    wait_for(lambda: not list(servers(environment)), "the server's end")
