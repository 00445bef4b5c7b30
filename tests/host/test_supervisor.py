"""The supervisor with parts that stand in for the engine and the frontends, as processes: start, life, and end."""

import json
import os
import shlex
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server_process import ROOT, ServerProcess, free_port, halt, wait_for

from minisgl.server.config import ServerConfig
from minisgl.server.messages import EngineFacts
from minisgl.server.supervisor import example, reserve, url

FAKE = (sys.executable, str(ROOT / "tests/host/fake_parts.py"))
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start(model, *arguments, **environment)`: a server on stand-ins that behave as the model's name says."""
    servers: list[ServerProcess] = []

    def begin(*arguments: str, port: int = 0, **environment: str) -> ServerProcess:
        folder = tmp_path_factory.mktemp("s")
        servers.append(ServerProcess(folder, *arguments, "--port", str(port), program=FAKE, **environment))
        return servers[-1]

    yield begin
    for server in servers:
        server.__exit__(None, None, None)


def ask(server: ServerProcess, words: bytes = b"hello") -> tuple[socket.socket, bytes]:
    """A connection, and what a frontend answers there first."""
    place = urlsplit(server.url)
    assert place.hostname
    client = socket.create_connection((place.hostname, place.port), timeout=60)
    server.connections.append(client)
    client.sendall(words)
    return client, client.recv(1000)


def end_of(client: socket.socket) -> str:
    """What comes until the connection ends; a reset is an end as well."""
    got = b""
    with client:
        try:
            while more := client.recv(1000):
                got += more
        except ConnectionResetError:
            got += b"reset"
    return got.decode()


def test_the_start_is_shown_and_ends_with_a_command_to_copy(start: Start):
    server = start("some-model", "--served-model-name", "it's")
    server.wait_until_ready()
    server.wait_for_text(r"\ncurl .*\n")
    lines = server.stderr.splitlines()
    assert lines[:3] == ["starting …", "loading some-model …", f"ready at {server.url}; try it:"]
    assert shlex.split(lines[3])[:2] == ["curl", f"{server.url}/v1/completions"]
    assert json.loads(shlex.split(lines[3])[-1])["model"] == "it's"
    assert len(lines) == 4
    _, answer = ask(server)
    assert answer.split()[-1] == b"some-model"


def test_frontends_share_the_port(start: Start):
    server = start("some-model", "--frontends", "3")
    server.wait_until_ready()
    answered: set[bytes] = set()

    def all_answered() -> bool:
        _, answer = ask(server)
        answered.add(answer.split()[0])
        return len(answered) == 3

    wait_for(all_answered, "an answer of each frontend")


def test_the_socket_lies_in_a_folder_for_this_user_alone(start: Start):
    server = start("some-model")
    server.wait_until_ready()
    (folder,) = server.sockets.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["engine"]


@pytest.mark.parametrize("victim", ["cleaner", "frontend 0", "frontend 1", "engine"])
def test_if_a_part_is_killed_all_ends_with_a_line_about_it(start: Start, victim: str):
    server = start("some-model", "--frontends", "2")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    pids = dict(zip(["cleaner", "frontend 0", "frontend 1", "engine"], server.parts(), strict=True))
    os.kill(pids[victim], signal.SIGKILL)
    name = victim if victim.startswith("frontend") else f"the {victim}"
    line = f"{name} has died: signal SIGKILL"
    assert end_of(client) in ("", "reset", json.dumps(["fail", line]))
    assert server.wait_for_the_end() == 1
    assert server.stderr.splitlines()[-1] == f"Error: {line}"


def test_who_waits_is_told_why_the_server_ends(start: Start):
    server = start("some-model")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    os.kill(server.parts()[-1], signal.SIGKILL)
    assert json.loads(end_of(client)) == ["fail", "the engine has died: signal SIGKILL"]
    assert server.wait_for_the_end() == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("model", ["some-model", "loading"])
def test_if_the_supervisor_is_killed_nothing_is_left(start: Start, number: signal.Signals, model: str):
    server = start(model, "--frontends", "2")
    if model == "loading":
        server.wait_for_text("loading loading")
        wait_for(lambda: len(server.parts()) == 4, "all parts")
    else:
        server.wait_until_ready()
        client, _ = ask(server, b"wait")
    server.process.send_signal(number)
    assert server.wait_for_the_end() == -number
    if model != "loading":
        end_of(client)


def test_a_part_that_stands_still_ends_with_the_killed_supervisor(start: Start):
    server = start("some-model")
    server.wait_until_ready()
    for pid in server.parts()[1:]:
        halt(pid)
    server.process.kill()
    assert server.wait_for_the_end() == -signal.SIGKILL


def test_parts_that_do_not_end_when_told_to_are_killed(start: Start):
    server = start("stuck", "--frontends", "2")
    server.wait_until_ready()
    os.kill(server.parts()[1], signal.SIGKILL)
    assert server.wait_for_the_end() == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_what_runs_end(start: Start, number: signal.Signals, code: int):
    server = start("late", "--frontends", "2", "--drain-timeout", "45")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    server.process.send_signal(number)
    assert json.loads(end_of(client)) == ["drain", ""]
    assert server.wait_for_the_end() == code
    assert server.stderr.splitlines()[-1] == "stopping; what runs has 45 s to end, and Ctrl-C ends it now"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_terminal_or_a_service_manager_may_signal_the_whole_group(start: Start, number: signal.Signals, code: int):
    server = start("late")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    os.killpg(server.process.pid, number)
    assert json.loads(end_of(client)) == ["drain", ""]
    assert server.wait_for_the_end() == code


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGINT, 130), (signal.SIGTERM, signal.SIGINT, 0), (signal.SIGTERM, signal.SIGTERM, 0)],
)
def test_a_second_signal_stops_at_once(start: Start, first: signal.Signals, second: signal.Signals, code: int):
    server = start("endless")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    server.process.send_signal(first)
    server.wait_for_text("stopping")
    server.process.send_signal(second)
    assert json.loads(end_of(client)) == ["fail", "the server was stopped"]
    assert server.wait_for_the_end() == code


def test_frontends_that_outlast_the_drain_timeout_are_ended(start: Start):
    server = start("endless", "--drain-timeout", "0.1")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    server.process.send_signal(signal.SIGTERM)
    line = "the frontends have not ended 2 s after the drain timeout"
    assert json.loads(end_of(client)) == ["fail", line]
    assert server.wait_for_the_end() == 1
    assert server.stderr.splitlines()[-1] == f"Error: {line}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_it_loads_ends_it_at_once(start: Start, number: signal.Signals, code: int):
    server = start("loading", "--frontends", "2")
    server.wait_for_text("loading loading")
    assert len(server.parts()) == 4
    server.process.send_signal(number)
    assert server.wait_for_the_end() == code
    assert server.stderr == "starting …\nloading loading …\n"


def test_a_model_that_cannot_be_loaded_is_one_line(start: Start):
    server = start("refused")
    assert server.wait_for_the_end() == 1
    assert server.stderr.splitlines()[-1] == "Error: refused is not here"
    assert "Traceback" not in server.stderr


def test_an_engine_that_ends_without_a_word_is_told_of(start: Start):
    server = start("crash")
    assert server.wait_for_the_end() == 1
    assert server.stderr.splitlines()[-1] == "Error: the engine has died: exit code 3"


def test_an_engine_that_hangs_is_told_of_and_ended(start: Start):
    server = start("silent", "--watchdog-timeout", "5")
    server.wait_until_ready()
    client, _ = ask(server, b"wait")
    assert server.wait_for_the_end() == 1
    line = "the engine has not finished a step for"
    assert end_of(client) == json.dumps(["stalled", f"{line} 3 s"]) + json.dumps(["fail", f"{line} 5 s"])
    assert server.stderr.splitlines()[-1] == f"Error: {line} 5 s"


def test_time_in_which_the_whole_server_stood_still_does_not_count_as_a_hang(start: Start):
    server = start("some-model", "--watchdog-timeout", "5")
    server.wait_until_ready()
    halt(server.process.pid)
    threading.Event().wait(5.5)
    server.process.send_signal(signal.SIGCONT)
    client, answer = ask(server, b"wait")
    assert answer == b"waiting"
    server.process.send_signal(signal.SIGTERM)
    assert json.loads(end_of(client))[0] == "drain"
    assert server.wait_for_the_end() == 0


def test_of_two_servers_on_one_port_the_second_says_so(start: Start):
    port = free_port()
    first = start("some-model", port=port)
    first.wait_until_ready()
    second = start("some-model", port=port)
    assert second.wait_for_the_end() == 1
    assert (
        second.stderr.strip() == f"Error: port {port} on 127.0.0.1 is in use: choose another with --port, or 0 for any"
    )
    _, answer = ask(first)
    assert answer.endswith(b"some-model")


def test_a_port_can_be_had_again_at_once_whoever_closed_the_connections(start: Start):
    port = free_port()
    for _ in range(2):
        server = start("some-model", port=port)
        server.wait_until_ready()
        for _ in range(5):
            end_of(ask(server)[0])  # the frontend closes, so the connection lingers on the server's side
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_the_end() == 0


def test_servers_started_together_do_not_collide(start: Start):
    servers = [start(f"model-{number}") for number in range(4)]
    for server in servers:
        server.wait_until_ready()
    for number, server in enumerate(servers):
        _, answer = ask(server)
        assert answer.endswith(f"model-{number}".encode())


def test_of_those_who_want_a_port_at_the_same_moment_one_gets_it():
    for _ in range(50):
        port, held, done = free_port(), [], threading.Barrier(4)

        def want(port=port, held=held, done=done) -> None:
            done.wait()
            try:
                with reserve("127.0.0.1", port):
                    held.append(port)
                    done.wait()
            except ValueError:
                done.wait()

        threads = [threading.Thread(target=want) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert held == [port]


def test_a_reserved_port_takes_no_connection_before_the_frontends_listen():
    with reserve("127.0.0.1", free_port()) as holder, pytest.raises(ConnectionRefusedError):
        socket.create_connection(holder.getsockname(), timeout=10)


@pytest.mark.parametrize(
    ("host", "port", "part"),
    [
        ("192.0.2.1", 0, "cannot listen on 192.0.2.1, port 0"),
        ("no such host", 0, "cannot listen on no such host"),
        ("a..b", 0, "cannot listen on a..b, port 0"),
        ("x" * 64, 0, f"cannot listen on {'x' * 64}, port 0"),
    ],
)
def test_a_place_that_is_not_ours_to_listen_on_is_one_line(start: Start, host: str, port: int, part: str):
    server = start("some-model", "--host", host, port=port)
    assert server.wait_for_the_end() == 1
    assert server.stderr.startswith(f"Error: {part}") and server.stderr.count("\n") == 1


def test_a_folder_too_long_for_a_socket_is_one_line(start: Start, tmp_path: Path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    server = start("some-model", TMPDIR=str(long))
    assert server.wait_for_the_end() == 1
    assert "set TMPDIR to a shorter folder" in server.stderr and server.stderr.count("\n") == 1
    assert not [*long.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [(["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--api-key", "s3cret"], False), (["--host", "::1"], False)],
)
def test_who_listens_to_the_world_without_a_key_is_warned(start: Start, arguments: list[str], warned: bool):
    server = start("some-model", *arguments)
    server.wait_until_ready()
    assert ("may use this server: give --api-key" in server.stderr) == warned
    _, answer = ask(server)
    assert answer.endswith(b"some-model")


def test_a_key_is_not_shown_to_anyone(start: Start):
    server = start("some-model", MINISGL_API_KEY="s3cret")
    server.wait_until_ready()
    server.wait_for_text(r'-H "Authorization: Bearer \$MINISGL_API_KEY"')
    assert "s3cret" not in server.stderr
    for pid in server.parts():
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_options_come_from_the_environment_and_a_file_too(start: Start, tmp_path: Path):
    options = tmp_path / "serve.toml"
    options.write_text('[server]\nfrontends = 2\nserved_model_name = ["from-the-file"]\n')
    server = start("--config", str(options), MINISGL_MODEL="from-the-environment")
    server.wait_until_ready()
    assert len(server.parts()) == 4
    assert "from-the-file" in server.stderr and "loading from-the-environment" in server.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--frontends", "0"], "frontends must be from 1 to 64, got 0"),
        (["--drain-timeout", "soon"], "drain_timeout must be a finite number, got 'soon'"),
        (["--watchdog-timeout", "1"], "watchdog_timeout must be from 5 to 86400, got 1.0"),
        (["one", "--model", "two"], "give the model once"),
        (["--prot", "1"], "--port"),
    ],
)
def test_wrong_usage_ends_with_2_and_starts_nothing(start: Start, arguments: list[str], part: str):
    server = start(*arguments)
    assert server.wait_for_the_end() == 2
    assert part in server.stderr.splitlines()[-1]
    assert "starting" not in server.stderr


def test_what_lies_in_the_current_folder_is_not_what_the_parts_import(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("msgspec", "selectors", "minisgl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    start("some-model").wait_until_ready()


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("192.0.2.7", "http://192.0.2.7:80"),
    ],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, shown: str):
    assert url(host, 80) == shown


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", None])
def test_the_command_asks_what_the_model_can_answer(file: str | None, tmp_path: Path):
    facts = EngineFacts(
        model_name="a/b",
        folder=str(tmp_path),
        context=1,
        vocab_size=1,
        eos_ids=[],
        sampling_defaults={},
        config={},
        page_size=1,
        num_pages=1,
    )
    plain = ServerConfig()
    assert "/v1/completions " in example("http://h", facts, plain) and '"prompt": [0]' in example(
        "http://h", facts, plain
    )
    (tmp_path / "tokenizer.json").touch()
    assert '"prompt": "Once' in example("http://h", facts, plain)
    if file is not None:
        (tmp_path / file).write_text('{"chat_template": "…"}')
    server = plain if file is not None else ServerConfig(chat_template="a file")
    assert "/v1/chat/completions " in example("http://h", facts, server)
