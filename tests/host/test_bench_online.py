"""`minisgl bench` against a server: a real frontend on a fake engine, over HTTP."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from served import CONTEXT, MODEL, Served, served, write_model
from server_process import ENVIRONMENT, MINISGL, PATIENCE_S

from cli.main import main
from cli.options import command
from cli.terminal import LogConfig
from minisgl.bench import online, record
from minisgl.bench.asking import Asking, Said
from minisgl.bench.metrics import totals
from minisgl.bench.own_server import own_server, serve_options, write_word_tokenizer
from minisgl.bench.workload import Job
from minisgl.config import EngineConfig
from minisgl.server.config import ServerConfig

Bench = Callable[..., record.Run]
MOST_ID = 300


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(write_model(tmp_path_factory.mktemp(MODEL)), "--step-s", "0.005", api_key="sesame") as running:
        yield running


@pytest.fixture
def bench(server: Served, tmp_path: Path) -> Bench:
    """`bench(arguments…)` is the run; `code` is what it must exit with."""

    def run(*arguments: str | int | Path, code: int = 0) -> record.Run:
        output = tmp_path / "run.json"
        common = ["--url", server.url, "--api-key", "sesame", "--max-token-id", MOST_ID, "--output", output]
        assert main(["bench", *map(str, [*common, *arguments])]) == code
        return record.read(output)

    return run


def test_a_sweep_is_a_pass_for_each_rate(bench: Bench, capsys: pytest.CaptureFixture[str]):
    run = bench("--qps", "50,100", "--requests", 12, "--input-len", 20, "--output-len", 6)
    assert (run.mode, run.model, run.device, run.engine) == ("online", MODEL, "unknown", None)
    assert [part.load for part in run.passes] == [{"qps": 50.0}, {"qps": 100.0}]
    assert "sesame" not in json.dumps(run.load)
    for part in run.passes:
        assert not part.interrupted and part.lags
        for request in part.requests:
            assert (request.error, request.finish_reason) == (None, "length")
            assert (request.prompt_tokens, request.completion_tokens, request.asked_tokens) == (20, 6, 6)
            assert sum(event.tokens or 0 for event in request.events) == 6
    out = capsys.readouterr().out
    assert "50 req/s" in out and "100 req/s" in out and "TPOT = (E2E − TTFT) / (N − 1)" in out


def test_a_setting_of_zero_is_sent_and_one_that_is_off_is_not(bench: Bench):
    asked = dict[str, Any]()

    class Spy(Asking):
        def body(self, job: Job, said: Sequence[Said]) -> bytes:
            body = super().body(job, said)
            asked.update(json.loads(body))
            return body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minisgl.bench.online.Asking", Spy)
        bench("--concurrency", 1, "--requests", 1, "--temperature", 0, "--no-ignore-eos")
    assert asked["temperature"] == 0 and "ignore_eos" not in asked and "top_p" not in asked


def test_repetitions_have_prompts_of_their_own(bench: Bench):
    run = bench("--concurrency", 3, "--requests", 6, "--repeat", 2, "--output-len", 3)
    assert [part.seed for part in run.passes] == ["0/0", "0/1"]
    assert all(totals(part)["completed"] == 6 for part in run.passes)


def test_conversations_and_text_go_through_the_servers_tokenizer(bench: Bench):
    run = bench("--concurrency", 2, "--requests", 2, "--turns", 3, "--prompts", "text", "--output-len", 4)
    lengths = sorted(request.prompt_tokens or 0 for request in run.passes[0].requests)
    assert lengths == sorted([128, 128 + 4 + 128, 2 * (128 + 4) + 128] * 2)


def test_a_chat_is_measured_like_a_completion(bench: Bench):
    run = bench("--concurrency", 2, "--requests", 2, "--turns", 2, "--endpoint", "chat", "--prompts", "text")
    (part,) = run.passes
    assert totals(part)["tokens_out"] == 4 * 128
    lengths = [request.prompt_tokens or 0 for request in part.requests]
    assert min(lengths) >= 128 and max(lengths) > 2 * 128 + 128


def test_a_batch_file_is_sent_as_it_is(bench: Bench, tmp_path: Path):
    body = {"model": "other", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    rows = [{"custom_id": "1", "url": "/v1/chat/completions", "body": body}] * 2
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = bench("--qps", 50, "--dataset", tmp_path / "batch.jsonl")
    assert [request.completion_tokens for request in run.passes[0].requests] == [3, 3]


def test_a_trace_is_sent_at_its_times(bench: Bench, tmp_path: Path):
    rows = [{"timestamp": t, "input_length": 9, "output_length": 2, "hash_ids": [1]} for t in (0, 900, 300)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (part,) = bench("--trace-speed", 3, "--dataset", tmp_path / "trace.jsonl").passes
    assert [r.intended_s - part.began_s for r in part.requests] == pytest.approx([0.0, 0.1, 0.3])
    assert totals(part)["offered_per_s"] == pytest.approx(2 / 0.3)


def test_the_highest_rate_is_searched(bench: Bench, capsys: pytest.CaptureFixture[str]):
    limits = ("--slo", "ttft=60000,tpot=60000", "--find-max")
    run = bench("--qps", 4, "--requests", 8, "--output-len", 2, *limits)
    assert [part.load["qps"] for part in run.passes] == [4.0, 8.0]
    captured = capsys.readouterr()
    assert "even the highest rate keeps the slo" in captured.err
    assert "the highest rate that keeps the slo: 8 req/s" in captured.out
    bench("--qps", 640, "--requests", 40, "--output-len", 2, "--slo", "ttft=0.001", "--find-max")
    assert "no rate keeps the slo" in capsys.readouterr().out


def test_requests_that_fail_make_the_exit_code_1_and_are_shown(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    bad = {"messages": [{"role": "user", "content": "refuse"}], "max_tokens": 3}
    rows = [{"url": "/v1/chat/completions", "body": body} for body in (good, bad, good)]
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = bench("--qps", 50, "--dataset", tmp_path / "batch.jsonl", code=1)
    assert "I take no such conversation" in str(run.passes[0].requests[1].error)
    assert totals(run.passes[0])["completed"] == 2
    assert "1 of 3 requests failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--qps", "9", "--max-token-id", "500"], "the server does not answer as it should: 400: "),
        (["--qps", "9", "--api-key", "wrong"], r"the server does not answer as it should: http://\S+/v1/models: 401: "),
        (
            ["--qps", "9", "--url", "http://127.0.0.1:9"],
            "the server does not answer as it should: http://127.0.0.1:9/v1/models: Cannot connect to host",
        ),
        (["--qps", "9", "--model", "other"], f"model must be one of the server's, {MODEL}, got 'other'"),
        (["--qps", "9", "--slo", "ttft=9", "--find-max", "--repeat", "2"], "repeat must be unset with find_max"),
        (["--qps", "9", "--max-tokens", "5"], "max_tokens must be unset, got 5"),
        (["--qps", "9", "--latency"], "latency must be unset with a load on a server"),
        (["--trace-speed", "1"], "trace_speed needs a trace: give its file as dataset"),
        (["--qps", "9", "--input-len", str(CONTEXT)], "the server does not answer as it should: 400: "),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, server: Served, capsys: pytest.CaptureFixture[str]
):
    common = {"--url": server.url, "--api-key": "sesame", "--max-token-id": "300"}
    rest = [word for name, value in common.items() if name not in arguments for word in (name, value)]
    assert main(["bench", *arguments, *rest]) == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert re.match(f"Error: {message}", last)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_was_measured(number: int, code: int, server: Served, tmp_path: Path):
    output = tmp_path / "run.json"
    flags = ["--url", server.url, "--api-key", "sesame", "--max-token-id", str(MOST_ID), "--output", str(output)]
    flags += ["--concurrency", "1", "--requests", "5000", "--output-len", "2", "--input-len", "2"]
    with subprocess.Popen([*MINISGL, "bench", *flags], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        assert any("1: 1 at once" in line for line in lines)
        said: list[str] = []
        reader = threading.Thread(target=said.extend, args=(lines,))
        reader.start()
        time.sleep(2)
        process.send_signal(number)
        ended = process.wait(PATIENCE_S)
        reader.join()
        assert ended == code, said
    (part,) = record.read(output).passes
    assert part.interrupted and totals(part)["completed"] > 0 and totals(part)["failed"] == 0


def test_a_signal_at_the_last_moment_is_not_lost():
    async def work(_: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE_S)
        return "done"

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as ended:
        online.OneAtATime("http://127.0.0.1:9", None, None).run(work)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


# Servers of others


class Peer(BaseHTTPRequestHandler):
    """Answers each route with its bytes, by any method; 404 where there are none."""

    answers: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.answers.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Length", str(len(answer or b"")))
        self.end_headers()
        self.wfile.write(answer or b"")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


class PeerServer(ThreadingHTTPServer):
    request_queue_size = 128


MODELS = b'{"data": [{"id": "theirs"}]}'
STREAM = (
    b'data: {"choices": [{"text": "a", "delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, bytes]], str]]:
    """`peer(answers)` is the URL of a server that has these."""
    with PeerServer(("127.0.0.1", 0), Peer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def start(answers: dict[str, bytes]) -> str:
            monkeypatch.setattr(Peer, "answers", answers)
            return f"http://127.0.0.1:{server.server_port}"

        yield start
        server.shutdown()
        thread.join()


LOAD = ("--concurrency", "2", "--requests", "3", "--input-len", "5", "--output-len", "1")


def test_a_server_that_has_only_the_chat_is_measured_by_it(peer: Any, capsys: pytest.CaptureFixture[str]):
    url = peer({"/v1/models": MODELS, "/v1/chat/completions": STREAM})
    assert main(["bench", "--url", url, *LOAD]) == 1
    assert "Error: the server does not answer as it should: 404: " in capsys.readouterr().err
    assert main(["bench", "--url", f"{url}/v1/", *LOAD, "--endpoint", "chat"]) == 0


def test_an_emptied_cache_may_be_told_in_any_words(peer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = {"timestamp": 0, "input_length": 5, "output_length": 1}
    (tmp_path / "trace").write_text(json.dumps(row))
    answers = {"/v1/models": MODELS, "/v1/completions": STREAM, "/reset_prefix_cache": b"Cache flushed."}
    flags = ["--concurrency", "1", "--dataset", str(tmp_path / "trace")]
    assert main(["bench", "--url", peer(answers), *flags]) == 0
    assert "cannot be emptied" not in capsys.readouterr().err
    del answers["/reset_prefix_cache"]
    assert main(["bench", "--url", peer(answers), *flags]) == 0
    assert "the server's prefix cache cannot be emptied" in capsys.readouterr().err


@pytest.mark.parametrize(
    "models", [b"", b"[]", b"{}", b'{"data": []}', b'{"data": ["m"]}', b'{"data": "\xff"}', b"\xff"]
)
def test_a_list_of_models_that_is_none_is_one_line(models: bytes, peer: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--url", peer({"/v1/models": models}), *LOAD]) == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert re.match(
        r"Error: the server does not answer as it should: http://\S+/v1/models is not as OpenAI's API", last
    )


def test_settings_for_a_proxy_are_not_looked_at(peer: Any, monkeypatch: pytest.MonkeyPatch):
    url = peer({"/v1/models": MODELS, "/v1/completions": STREAM})
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert main(["bench", "--url", url, *LOAD]) == 0


def test_there_may_be_more_connections_than_files_are_allowed_at_first(peer: Any):
    url = peer({"/v1/models": MODELS, "/v1/completions": STREAM})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 30, hard))
    try:
        assert main(["bench", "--url", url, "--concurrency", "60", "--requests", "60"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# A server of its own


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        EngineConfig(
            model='./x "y\\ ü😀',
            dtype="float32",
            load_format="dummy",
            max_model_len=99,
            gpu_memory_utilization=0.25,
            mixed_batch=False,
            overlap=False,
            cuda_graph=True,
            cuda_graph_bs=[1, 8],
            cache="none",
            attention_backend="flash,triton",
            tp=2,
        ),
    ],
)
def test_the_server_gets_the_engines_options(config: EngineConfig, tmp_path: Path):
    app, got = typer.Typer(), []

    def serve(engine: EngineConfig, server: ServerConfig, logs: LogConfig) -> None:
        got.append(engine)

    (tmp_path / "serve.toml").write_text(serve_options(config), encoding="utf-8")
    command(app, serve)
    app(["--config", str(tmp_path / "serve.toml")], standalone_mode=False)
    assert got == [replace(config, cuda_graph_bs=None if config.cuda_graph_bs is None else list(config.cuda_graph_bs))]


def test_a_server_that_does_not_start_is_an_error_with_its_reason(tmp_path: Path):
    said: list[str] = []

    missing = EngineConfig(model=str(tmp_path / "nothing"))
    with (
        pytest.raises(ValueError, match="the server has not started: there is no file or folder") as error,
        own_server(missing, 1, said.append),
    ):
        raise AssertionError("it has started")
    assert "nothing" in str(error.value) and not any("Error" in line for line in said)


def test_a_made_up_tokenizer_gives_every_token_a_word(tmp_path: Path):
    import tokenizers

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400}))
    write_word_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.get_vocab_size() == 400
    texts = [backend.decode([token]) for token in range(256, 400)]
    assert len(set(texts)) == 144 and all(text.strip() for text in texts)
