"""`minisgl profile` before an engine is there: what it refuses, traces of earlier, and a server that others run."""

import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from served import Served, served, write_model
from server_process import ENVIRONMENT, MINISGL, PATIENCE_S

from cli.main import main
from minisgl.profiling.options import ProfileConfig


@pytest.fixture(autouse=True)
def somewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"phase": "training"}, "phase must be prefill, decode or serve, got 'training'"),
        ({"batch": 0}, "batch must be from 1 to 65536, got 0"),
        ({"input_len": -1}, "input_len must be from 1 to 2147483647, got -1"),
        ({"output_len": 0}, "output_len must be from 1"),
        ({"steps": -1}, "steps must be from 0 to 990, got -1"),
        ({"seconds": 0.0}, "seconds must be from 0.1 to 3600, got 0.0"),
        ({"output": "none/report.json"}, "output must be a file in a folder that is there"),
        ({"trace": "/"}, "trace must be a file"),
        ({"url": "localhost:8000"}, "url must be like http://127.0.0.1:8000, got 'localhost:8000'"),
        ({"url": "http://"}, "url must be like http://127.0.0.1:8000, got 'http://'"),
        ({"url": "http://x:99999"}, "url must be like http://127.0.0.1:8000"),
        ({"url": "http://x", "nsys": "a"}, "nsys must be unset beside url, got a"),
        ({"url": "http://x", "batch": 2}, "batch must be unset beside url, got 2"),
        ({"url": "http://x", "steps": 0}, "steps must be from 1 to 990, got 0"),
        ({"read": ["a"], "memory": "m"}, "memory must be unset beside read"),
        ({"nsys": "a", "html": "b"}, "html must be unset beside nsys"),
        ({"steps": 0, "output": "b"}, "output must be unset with steps 0, which capture nothing, got b"),
        ({"steps": 0, "ops": True}, "ops must be unset with steps 0"),
        ({"seconds": 1.0}, "seconds must be unset without url, got 1.0"),
        ({"api_key": "k"}, "api_key must be unset without url"),
        ({"output_len": 5}, "output_len must be unset with phase decode, got 5"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        ProfileConfig(**given)


@pytest.mark.parametrize("arguments", [["--read", "none.json"], ["--compare", "a.json", "b.json"]])
def test_a_file_that_is_not_there_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["profile", *arguments]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# --- a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its engine is a fake: what it calls a trace is none."""
    with served(write_model(tmp_path_factory.mktemp("model"))) as found:
        yield found


def post(url: str, body: bytes = b"") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_server_is_profiled_by_one_at_a_time(server: Served):
    assert post(f"{server.url}/stop_profile")[0] == 409
    assert post(f"{server.url}/start_profile?steps=5") == (200, b'{"steps":5}')
    assert post(f"{server.url}/start_profile")[0] == 409
    assert post(f"{server.url}/stop_profile") == (200, b"a trace")
    assert post(f"{server.url}/stop_profile")[0] == 409


@pytest.mark.parametrize("steps", ["0", "1001", "-1", "five", "", "9" * 5000])
def test_a_server_profiles_a_sensible_number_of_steps(server: Served, steps: str):
    status, body = post(f"{server.url}/start_profile?steps={steps}")
    assert status == 400 and f"only steps may be given, 1 to 1000, got 'steps={steps[:73]}".encode() in body


def test_a_server_refuses_what_it_would_not_heed(server: Served):
    for query, body in ("?num_steps=5", b""), ("?steps=5&seconds=1", b""), ("", b'{"num_steps": 5}'):
        assert post(f"{server.url}/start_profile{query}", body)[0] == 400
    assert post(f"{server.url}/stop_profile")[0] == 409


def test_what_is_wrong_with_a_server_is_one_line(server: Served, capsys: pytest.CaptureFixture[str]):
    cases = {
        server.url: "is no trace of torch.profiler",
        f"{server.url}/v1/": "is no trace of torch.profiler",
        f"{server.url}/nowhere": "/nowhere does not answer as it should: 404: ",
        "http://127.0.0.1:1": "http://127.0.0.1:1 does not answer as it should: Cannot connect",
    }
    for url, message in cases.items():
        assert main(["profile", "--url", url, "--seconds", "0.1"]) == 1
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("Error: ") and message in last


def test_what_is_interrupted_leaves_the_server_as_it_was(server: Served):
    command = [*MINISGL, "profile", "--url", server.url, "--seconds", "60"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr
        for line in process.stderr:
            if "watching" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert post(f"{server.url}/stop_profile")[0] == 409


def test_the_key_goes_to_the_server():
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_error(401, "no")

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        assert main(["profile", "--url", f"http://127.0.0.1:{other.server_port}", "--api-key", "secret"]) == 1
        thread.join(PATIENCE_S)
    assert seen == ["Bearer secret"]
