"""`minisgl serve` as its users see it: real processes, the OpenAI client over a socket, and what is left behind."""

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from made_tokenizers import bytes_alone
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_process import PATIENCE_S, ROOT, ServerProcess, free_port, halt, wait_for

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}{% endfor %}"
)
NAME = "tiny"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def folder(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, with a chat template and room for answers that take minutes."""
    made = tmp_path_factory.mktemp(NAME)
    for file in tiny_model("LlamaForCausalLM", max_position_embeddings=60_000).iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    bytes_alone().save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@contextmanager
def serving(factory: pytest.TempPathFactory, *arguments: str, **environment: str) -> Iterator[ServerProcess]:
    if "--port" not in arguments:
        arguments = (*arguments, "--port", "0")
    with ServerProcess(factory.mktemp("s"), *arguments, **environment) as server:
        yield server


@pytest.fixture
def start(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start(*arguments, **environment)`: a server of the tiny model, unless another is named."""
    servers: list[ServerProcess] = []

    def begin(*arguments: str, model: str | None = None, port: int = 0, **environment: str) -> ServerProcess:
        words = (model or str(folder), "--served-model-name", NAME, "--port", str(port), *arguments)
        servers.append(ServerProcess(tmp_path_factory.mktemp("s"), *words, **environment))
        return servers[-1]

    yield begin
    for server in servers:
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def tiny(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server with two frontends, for requests that leave it as it is."""
    arguments = (str(folder), "--served-model-name", NAME, "--frontends", "2", "--max-model-len", "2048")
    with serving(tmp_path_factory, *arguments) as server, client(server.wait_until_ready()) as made:
        yield made


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


# --- the OpenAI client


def chat(tiny: openai.OpenAI, **fields: Any) -> Any:
    return tiny.chat.completions.create(model=NAME, messages=QUESTION, **{"temperature": 0, "max_tokens": 40, **fields})


def joined(stream: Any) -> tuple[dict[int, str], dict[int, str | None], Any]:
    """Of a streamed chat the texts, the reasons and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    for chunk in stream:
        assert isinstance(chunk, ChatCompletionChunk)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons.get(choice.index) is None, "something comes after the reason"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1, "seed": 7},
        {"temperature": 1, "seed": 7, "n": 3},
        {"max_completion_tokens": 9, "max_tokens": None},
        {"logit_bias": {"65": 100}, "stop": ["AAA"]},
        {"logit_bias": {"65": 100}, "stop": "nothing like it"},
        {"extra_body": {"ignore_eos": True, "min_p": 0.01, "top_k": 5}, "temperature": 0.9, "seed": 1},
    ],
)
def test_a_stream_brings_what_the_whole_answer_has(tiny: openai.OpenAI, fields: dict[str, Any]):
    whole = chat(tiny, **fields)
    assert isinstance(whole, ChatCompletion)
    texts, reasons, usage = joined(chat(tiny, stream=True, stream_options={"include_usage": True}, **fields))
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert whole.usage and usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
        whole.usage.total_tokens,
    )
    assert len(whole.choices) == fields.get("n", 1)


def test_an_answer_is_cut_before_its_stop_string(tiny: openai.OpenAI):
    full = chat(tiny, logit_bias={"65": 100}, max_tokens=8)
    letter = full.choices[0].message.content[0]
    assert (full.choices[0].message.content, full.choices[0].finish_reason) == (letter * 8, "length")
    cut = chat(tiny, logit_bias={"65": 100}, max_tokens=8, stop=["?", letter * 5])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "stop")


def test_seeds_give_the_same_answers_and_n_different_ones(tiny: openai.OpenAI):
    first, again = (chat(tiny, temperature=1, seed=3, n=3) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len({*texts}) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_a_prompt_that_was_there_before_is_counted_as_cached(tiny: openai.OpenAI):
    message = {"role": "user", "content": "x" * 100}
    counts = []
    for _ in range(2):
        usage = tiny.chat.completions.create(model=NAME, messages=[message], max_tokens=1).usage
        assert usage and usage.prompt_tokens_details
        counts.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
    (tokens, cold), (same, warm) = counts
    assert tokens == same and cold == 0 and 0 < warm < tokens


def test_logprobs_are_typed_and_streamed_alike(tiny: openai.OpenAI):
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    whole = chat(tiny, **fields).choices[0].logprobs
    streamed = [
        entry
        for chunk in chat(tiny, stream=True, **fields)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert len(whole.content) == 6 and [len(entry.top_logprobs) for entry in whole.content] == [2] * 6
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in whole.content)  # greedy
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([e.logprob for e in whole.content], abs=1e-4)


def test_completions_take_texts_token_ids_and_lists_of_them(tiny: openai.OpenAI):
    def complete(prompt: Any, **fields: Any) -> Completion:
        return tiny.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=8, **fields)

    one = complete("Hello")
    assert isinstance(one, Completion) and one.usage and one.usage.completion_tokens <= 8
    two = complete(["Hello", "world"])
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text
    ids = [10, 20, 30]
    assert complete([ids, ids]).choices[1].text == complete(ids).choices[0].text
    assert complete("Hello", echo=True).choices[0].text == "Hello" + one.choices[0].text
    chunks = [*complete("Hello", stream=True)]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == one.choices[0].text
    scored = complete("Hello", logprobs=2).choices[0].logprobs
    assert scored and len(scored.token_logprobs) == one.usage.completion_tokens


def test_the_model_is_listed_with_its_context(tiny: openai.OpenAI):
    (model,) = tiny.models.list().data
    assert isinstance(model, Model) and model.id == NAME
    assert model.to_dict()["max_model_len"] == 2048
    assert tiny.models.retrieve(NAME).id == NAME


@pytest.mark.parametrize(
    ("fields", "kind", "parts"),
    [
        ({"temperature": -1}, openai.BadRequestError, ["temperature", "-1"]),
        ({"max_tokens": 0}, openai.BadRequestError, ["max_tokens"]),
        ({"messages": []}, openai.BadRequestError, ["messages"]),
        ({"messages": [{"role": "king", "content": "x"}]}, openai.BadRequestError, ["role", "king"]),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, openai.BadRequestError, ["3006", "2048"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, openai.BadRequestError, ["no tools here"]),
        ({"model": "another"}, openai.NotFoundError, ["another", NAME]),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, ["temprature"]),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, ["response_format"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_run_is_an_error_of_the_right_kind(tiny: openai.OpenAI, fields, kind, parts, stream: bool):
    body = {"model": NAME, "messages": QUESTION, "stream": stream, **fields}
    with pytest.raises(kind) as caught:
        tiny.chat.completions.create(**body)
    assert {"message", "type", "param", "code"} <= caught.value.body.keys()
    for part in parts:
        assert part in caught.value.message


WHOLE_NUMBERS = "max_tokens max_completion_tokens min_tokens n seed top_k priority logprobs prompt_logprobs"


@pytest.mark.parametrize("field", WHOLE_NUMBERS.split())
def test_a_number_of_any_size_runs_or_is_refused_and_leaves_others_alone(tiny: openai.OpenAI, field: str):
    other = chat(tiny, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(other))
    for bits in (31, 32, 63, 64, 100):
        for number in (1 << bits, (1 << bits) - 1, -1 << bits):
            with suppress(openai.BadRequestError):
                tiny.completions.create(model=NAME, prompt=[5] * 2040, extra_body={field: number})
    assert next(iter(other)).choices[0].finish_reason is None
    other.close()


def test_a_connection_that_the_client_leaves_frees_the_engine(tiny: openai.OpenAI):
    url = str(tiny.base_url).removesuffix("/v1/")

    def running() -> float:
        text = get(url, "/metrics")[1]
        (line,) = [each for each in text.splitlines() if each.startswith("minisgl:num_requests_running")]
        return float(line.split()[-1])

    streams = [chat(tiny, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}) for _ in range(8)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    wait_for(lambda: running() == 0, "the engine to be idle")


def examples() -> list[str]:
    """The documents' Python blocks that ask a server."""
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [each for path in documents for each in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    return [block for block in blocks if "OpenAI(" in block]


@pytest.mark.real_model
def test_the_default_model_answers_by_the_command_that_is_shown(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
):
    with serving(tmp_path_factory, "smollm2", "--api-key", "s3cret") as server:
        url = server.wait_until_ready()
        words = shlex.split(server.wait_for_text(r"\n(curl .*)\n")[1])
        done = subprocess.run(
            [word.replace("$MINISGL_API_KEY", "s3cret") for word in words], capture_output=True, check=True, timeout=60
        )
        assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
        with client(url, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with client(url, "s3cret") as known:
            question = {"model": "smollm2", "messages": QUESTION, "temperature": 0}
            whole = known.chat.completions.create(**question)
            assert whole.choices[0].message.content == "The capital of France is Paris."
            assert whole.choices[0].finish_reason == "stop" and whole.usage
            options = {"include_usage": True}
            texts, reasons, usage = joined(
                known.chat.completions.create(**question, stream=True, stream_options=options)
            )
            assert (texts, reasons) == ({0: "The capital of France is Paris."}, {0: "stop"})
            assert usage and usage.completion_tokens == whole.usage.completion_tokens == 8
            counted = known.completions.create(
                model="smollm2", prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=12, stop=["8"]
            )
            assert (counted.choices[0].text, counted.choices[0].finish_reason) == (" 6, 7, ", "stop")
            chinese = [{"role": "user", "content": "用中文说你好,加一个 😀。"}]
            fields = {"model": "smollm2", "messages": chinese, "temperature": 1, "seed": 5, "n": 2, "max_tokens": 16}
            whole = known.chat.completions.create(**fields)
            texts, reasons, _ = joined(known.chat.completions.create(**fields, stream=True))
            assert texts == {choice.index: choice.message.content for choice in whole.choices}
            assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        for example in examples():
            exec(example.replace("http://127.0.0.1:8000", url).replace("none", "s3cret"), {})
            assert capsys.readouterr().out.strip()
        assert "s3cret" not in server.stderr
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_the_end() == 0


# --- life and death


def get(url: str, path: str) -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


class Streaming:
    """A completion that is streamed, line by line, in a thread of its own until it ends or its connection does."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
        body = {"model": NAME, "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.events: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_for(lambda: self.events, "the first event")

    def _read(self) -> None:
        try:
            response = self._connection.getresponse()
            for line in response:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
        except (http.client.HTTPException, OSError):
            self.events.append("broken off")
        finally:
            self._connection.close()

    def end(self) -> list[str]:
        """All events, once there are no more."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.events


def assert_failed(events: list[str], why: str | None = None) -> None:
    """The stream does not look like a whole answer: it breaks off, or, as it must where `why` is given, says that."""
    assert not any('"finish_reason":"' in event for event in events)
    if why is not None or events[-1] == "[DONE]":
        assert events[-1] == "[DONE]"
        assert (why or "") in json.loads(events[-2])["error"]["message"]


@pytest.mark.parametrize("victim", ["frontend", "engine", "supervisor"])
def test_kill_nine_in_mid_stream_leaves_nothing(start: Start, victim: str):
    server = start("--frontends", "2")
    url = server.wait_until_ready()
    streams = [Streaming(url, 50_000) for _ in range(4)]
    _, frontend, _, engine = server.parts()
    pid = {"frontend": frontend, "engine": engine, "supervisor": server.process.pid}[victim]
    os.kill(pid, signal.SIGKILL)
    assert server.wait_for_the_end() == (-signal.SIGKILL if victim == "supervisor" else 1)
    for stream in streams:
        # A frontend that lives says why; what the killed one, or the killed supervisor's, had to say breaks off.
        assert_failed(stream.end(), "the engine has died: signal SIGKILL" if victim == "engine" else None)
    if victim != "supervisor":
        name = {"frontend": "frontend 0", "engine": "the engine"}[victim]
        assert server.stderr.splitlines()[-1] == f"Error: {name} has died: signal SIGKILL"


def test_an_engine_that_hangs_in_mid_stream_is_ended_with_all_else(start: Start):
    server = start("--watchdog-timeout", "6")
    url = server.wait_until_ready()
    stream = Streaming(url, 50_000)
    halt(server.parts()[-1])
    wait_for(lambda: get(url, "/health")[0] == 503, "/health to tell")
    assert json.loads(get(url, "/health")[1])["status"] == "stalled"
    assert server.wait_for_the_end() == 1
    assert_failed(stream.end(), "the engine has not finished a step for 6 s")
    assert server.stderr.splitlines()[-1] == "Error: the engine has not finished a step for 6 s"


def test_an_engine_that_goes_on_after_a_while_gets_requests_again(start: Start):
    server = start("--watchdog-timeout", "8")
    url = server.wait_until_ready()
    stream = Streaming(url, 500)
    engine = server.parts()[-1]
    halt(engine)
    wait_for(lambda: get(url, "/health")[0] == 503, "/health to tell")
    os.kill(engine, signal.SIGCONT)
    wait_for(lambda: get(url, "/health")[0] == 200, "/health to be well again")
    assert stream.end()[-1] == "[DONE]"


def test_a_signal_lets_a_stream_end_and_takes_nothing_new(start: Start):
    server = start()
    url = server.wait_until_ready()
    with client(url) as asking:
        asking.models.list()  # a connection that stays open
        stream = Streaming(url, 1500)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_text("stopping")

        def answer() -> int | None:
            try:
                chat(asking, max_tokens=1)
            except openai.APIStatusError as error:
                return error.status_code if "Retry-After" in error.response.headers else None
            except openai.APIConnectionError:
                return 503  # it has closed its port by now
            return 200

        wait_for(lambda: answer() == 503, "a refusal of what is new")
    events = stream.end()
    assert events[-1] == "[DONE]"
    assert '"finish_reason":"length"' in "".join(events)
    assert server.wait_for_the_end() == 0


def test_what_outlasts_the_drain_timeout_ends_with_an_error(start: Start):
    server = start("--drain-timeout", "0.2")
    stream = Streaming(server.wait_until_ready(), 50_000)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for_the_end() == 0
    assert_failed(stream.end(), "drain-timeout")


def test_ctrl_c_twice_stops_a_stream(start: Start):
    server = start()
    stream = Streaming(server.wait_until_ready(), 50_000)
    server.process.send_signal(signal.SIGINT)
    server.wait_for_text("stopping")
    server.process.send_signal(signal.SIGINT)
    assert server.wait_for_the_end() == 130
    assert_failed(stream.end(), "the server was stopped")


def test_four_servers_started_together_do_not_collide_and_a_fifth_on_a_port_says_so(start: Start):
    servers = [start("--served-model-name", f"model-{number}") for number in range(4)]
    for number, server in enumerate(servers):
        listed = json.loads(get(server.wait_until_ready(), "/v1/models")[1])["data"]
        assert f"model-{number}" in [model["id"] for model in listed]
    port = urlsplit(servers[0].url).port
    assert port
    late = start(port=port)
    assert late.wait_for_the_end() == 1
    assert late.stderr.startswith(f"Error: port {port} on 127.0.0.1 is in use")
    assert get(servers[0].url, "/health")[0] == 200
    for server in servers:
        server.process.send_signal(signal.SIGTERM)
    assert [server.wait_for_the_end() for server in servers] == [0] * 4


def test_while_it_loads_it_says_so_and_ctrl_c_leaves_nothing(start: Start):
    port = free_port()
    server = start(port=port)
    url = f"http://127.0.0.1:{port}"

    def says_that_it_loads() -> bool:
        try:
            status, body = get(url, "/health")
        except OSError:
            return False
        assert status == 503 and "loading" in body
        return True

    wait_for(says_that_it_loads, "the frontend to listen")
    assert get(url, "/v1/models")[0] == 503
    server.processes()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait_for_the_end() == 130
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [("supervisor", signal.SIGINT, 130), ("supervisor", signal.SIGKILL, -9), ("engine", signal.SIGKILL, 1)],
)
def test_whatever_ends_it_while_it_downloads_nothing_is_left(
    start: Start, tmp_path: Path, victim: str, number: signal.Signals, code: int
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = start(
            model="smollm2",
            MINISGL_CACHE=str(tmp_path),
            PIP_INDEX_URL=f"http://127.0.0.1:{silent.getsockname()[1]}/simple",
            PIP_EXTRA_INDEX_URL="",
            PIP_FIND_LINKS="",
            PIP_NO_INDEX="",
            NO_PROXY="*",
        )
        server.wait_for_text("downloading")
        server.connections.append(silent.accept()[0])  # pip's
        server.processes()
        os.kill(server.process.pid if victim == "supervisor" else server.parts()[-1], number)
        assert server.wait_for_the_end() == code
    assert "Traceback" not in server.stderr
    if number != signal.SIGKILL:
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "./no-such-folder"], "no-such-folder"),
        (["--chat-template", "no-such-file.jinja"], "no-such-file.jinja"),
        (["--default-chat-template-kwargs", "[1]"], "default_chat_template_kwargs"),
    ],
)
def test_what_cannot_start_is_one_line(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, arguments: list[str], part: str
):
    model = [] if arguments[0] == "--model" else [str(folder)]
    with serving(tmp_path_factory, *model, *arguments) as server:
        assert server.wait_for_the_end() in (1, 2)
        assert part in server.stderr.splitlines()[-1]
        assert "Traceback" not in server.stderr
