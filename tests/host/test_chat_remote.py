"""`minisgl chat --url`: on our own server's frontends, and on one that answers what a test wants."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from served import CONTEXT, MODEL, Served, served, write_model
from server_process import ENVIRONMENT, MINISGL, free_port
from terminal import Terminal

from minisgl.chat.backend import ContextFull
from minisgl.chat.remote import Server
from minisgl.config import SamplingParams
from minisgl.openai.conversation import End, Score, Turn

HELLO = [{"role": "user", "content": "Hello"}]
TWENTY = SamplingParams(max_tokens=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served(model, "--step-s", "0.002") as server:
        yield server


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def answer(server: Server, sampling: SamplingParams = TWENTY, thinking: bool | None = None) -> tuple[Turn, End]:
    turn, end = Turn(question="Hello"), None
    async for part in server.answer(HELLO, sampling, thinking):
        assert end is None, "the end is last"
        turn.add(part)
        end = part.end
    assert end is not None
    return turn, end


async def opened(url: str, model: str = "", key: str | None = None) -> Server:
    server = Server(url, key)
    await server.use(model)
    return server


# --- our own server


@in_loop
async def test_a_server_of_ours_tells_its_model_and_answers(server: Served):
    for url in (server.url, f"{server.url}/v1/", server.url.removeprefix("http://")):
        assert (await opened(url)).context == CONTEXT
    backend = await opened(server.url)
    turn, end = await answer(backend)
    assert backend.name == MODEL and turn.answer.startswith("user\nHello")
    assert end.reason == "stop" and end.tokens_in and end.tokens_out and end.cached is not None
    assert (await backend.facts())["model"] == MODEL
    with pytest.raises(ValueError, match=f"has no model other, but {MODEL}"):
        await backend.use("other")
    assert backend.name == MODEL


@in_loop
async def test_log_probabilities_come_with_the_answer_where_asked_for(server: Served):
    backend = await opened(server.url)
    turn, _ = await answer(backend, SamplingParams(max_tokens=5, logprobs=2))
    assert len(turn.scores) == 5 and all(len(score.top) == 2 for score in turn.scores)
    assert "".join(score.text for score in turn.scores if score.text.isascii()).strip()
    with pytest.raises(ValueError, match="/set logprobs 5, and /regen"):
        await backend.score(turn)


@in_loop
async def test_a_conversation_that_is_too_long_is_said_with_the_numbers(server: Served):
    backend = await opened(server.url)
    long = [{"role": "user", "content": "word " * CONTEXT}]
    with pytest.raises(ContextFull, match=rf"400: the prompt has \d+ tokens; the context holds {CONTEXT}"):
        async for _ in backend.answer(long, TWENTY, None):
            pass


def test_a_question_that_is_stopped_is_ended_on_the_server_and_the_next_is_answered(server: Served):
    command = (*MINISGL, "chat", "--url", server.url, "--no-history", "--ignore-eos")
    with Terminal(command, columns=200) as terminal:
        terminal.wait_for(rf"^{MODEL} · 0 of {CONTEXT} tokens")
        terminal.type("abc\r")
        terminal.wait_for("assistant")
        terminal.type("\x03")
        terminal.wait_for("TTFT .*; stopped")
        terminal.type("/set max_tokens 3\r")
        terminal.wait_for("^max_tokens: 3")
        terminal.type("and?\r")
        terminal.wait_for(r"tokens in \d+ \(cached \d\), out 3, .*; cut at max_tokens")
        terminal.type("/model\r")
        terminal.wait_for(f"^server +{server.url}")
        terminal.type("\x04")
        assert terminal.wait_for_the_end() == 0


def test_a_server_that_has_gone_is_one_line_and_the_conversation_stays(model: Path):
    arguments = ("--no-history", "--max-tokens", "4")
    with (
        served(model) as server,
        Terminal((*MINISGL, "chat", "--url", server.url, *arguments), columns=200) as terminal,
    ):
        terminal.wait_for(rf"^{MODEL} · 0 of")
        terminal.type("first\r")
        terminal.wait_for("out 4")
        for frontend in server.frontends:
            frontend.process.kill()
            frontend.process.wait()
        terminal.type("second\r")
        terminal.wait_for(rf"^Error: {server.url} does not answer: .*onnect.*")
        terminal.wait_for("^the conversation is kept, and /regen asks again")
        terminal.type("/show\r")
        terminal.wait_for("^turn 1 +first")
        terminal.type("/save /dev/null/x\r")
        terminal.wait_for("^Error: .*Not a directory")
        terminal.type("\x04")
        assert terminal.wait_for_the_end() == 0
        assert "Traceback" not in terminal.text


def piped(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a question through a pipe."""
    command = [*MINISGL, "chat", *arguments]
    done = subprocess.run(command, input=b"Hello\n", env=ENVIRONMENT, capture_output=True, timeout=60, check=False)
    return done.returncode, done.stderr.decode()


def test_a_server_that_is_not_there_ends_it_with_one_line():
    url = f"http://127.0.0.1:{free_port()}"
    code, err = piped("--url", url)
    assert code == 1 and err.startswith(f"Error: {url} does not answer: ") and err.count("\n") == 1


# --- a server that answers what a test wants


@asynccontextmanager
async def answering(
    *events: object, status: int = 200, models: Any = ({"id": "m"},), done: bool = True, stays: bool = False
):
    """A server; what it was sent is in the list beside its URL. One that `stays` leaves connections open."""
    got: list[tuple[Any, Any]] = []
    over = asyncio.Event()

    async def chat(request: web.Request) -> web.StreamResponse:
        got.append((await request.json(), request.headers.get("Authorization")))
        if status != 200:
            return web.Response(status=status, text=str(events[0]))
        response = web.StreamResponse()
        await response.prepare(request)
        lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
        for line in [*lines, *["[DONE]"] * done]:
            data = f": comment\r\ndata: {line}\r\n\r\n".encode()
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                await response.write(half)
                await asyncio.sleep(0)
        if stays:
            await over.wait()
        return response

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response({"data": list(models)} if isinstance(models, tuple) else models)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", list_models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        over.set()
        await runner.cleanup()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}}


@in_loop
async def test_thoughts_come_from_their_own_field_or_from_the_text():
    apart = (delta(role="assistant", content=""), delta(reasoning_content="h"), delta(reasoning="m", content=None))
    for events in ((*apart, delta(content="so")), (delta(content="<think>h"), delta(content="m</think>so"))):
        async with answering(*events, STOP, USAGE) as (url, _):
            turn, end = await answer(await opened(url))
            assert (turn.thinking, turn.answer) == ("hm", "so")
            assert end == End("stop", 7, None, 3)


@in_loop
async def test_an_answer_is_over_when_the_server_says_so():
    async with answering(delta(content="x"), STOP, stays=True) as (url, _):
        turn, end = await answer(await opened(url))
        assert (turn.answer, end.reason) == ("x", "stop")


@in_loop
async def test_what_is_sent_is_what_was_set_and_the_key():
    async with answering(delta(content="x"), STOP) as (url, got):
        backend = await opened(url, key="secret")
        await answer(backend, SamplingParams(temperature=0.5, logprobs=0), thinking=False)
        await answer(backend)
    sent = {"model": "m", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    settings = {
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert got == [(sent | settings, "Bearer secret"), (sent | {"max_tokens": 20}, "Bearer secret")]


@in_loop
async def test_scores_are_read_as_the_api_has_them():
    entry = {"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "y", "logprob": -0.1}]}
    event = {"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [entry]}}]}
    async with answering(event, STOP) as (url, _):
        turn, _ = await answer(await opened(url))
    assert turn.scores == [Score("x", -0.5, [("y", -0.1)])]


@pytest.mark.parametrize(
    ("events", "more", "line"),
    [
        ((delta(content="half"),), {"done": False}, "the answer broke off"),
        ((delta(content="half"), {"error": {"message": "out of\nmemory"}}), {}, "out of memory"),
        (("{not json",), {}, "not as OpenAI's API has it"),
        (("[1]",), {}, "not as OpenAI's API has it"),
        (("[" * 100_000,), {}, "not as OpenAI's API has it"),
        ((delta(content="x"), {"usage": {"prompt_tokens": "7"}}), {}, "not as OpenAI's API has it"),
        (({"choices": [{"delta": {}, "finish_reason": ["stop"]}]},), {}, "not as OpenAI's API has it"),
        (({"choices": [{"logprobs": {"content": [{"token": "x", "logprob": None}]}}]},), {}, "not as OpenAI's API"),
        (('{"error": {"message": "no key: \\"x\\""}}',), {"status": 401}, '401: no key: "x'),
        (('{"error": {"message": "cut \\u12',), {"status": 400}, "400: cut "),
        (("<html>\nbad gateway</html>",), {"status": 502}, "502: <html> bad gateway"),
    ],
)
def test_a_server_that_answers_otherwise_is_one_line(events, more, line):
    async def ask() -> str:
        async with answering(*events, **more) as (url, _):
            backend = await opened(url)
            with pytest.raises(ValueError, match=line) as raised:
                await answer(backend)
            return str(raised.value)

    assert "\n" not in asyncio.run(asyncio.wait_for(ask(), 60))


@in_loop
async def test_what_other_servers_say_of_a_full_context_is_understood():
    body = '{"error": {"message": "This model\'s maximum context length is 10 tokens.", "code": 400}}'
    async with answering(body, status=400) as (url, _):
        backend = await opened(url)
        with pytest.raises(ContextFull, match="maximum context length is 10 tokens"):
            await answer(backend)


@pytest.mark.parametrize(
    "models",
    [
        *({"data": [{"name": "x"}]}, {"models": []}, [1], ()),
        *(({"id": 3},), ({"id": None},), ({"id": "m", "max_model_len": "4096"},)),
    ],
)
def test_a_list_of_models_that_is_none_is_refused(models):
    async def ask() -> None:
        async with answering(models=models) as (url, _):
            await opened(url)

    with pytest.raises(ValueError, match=r"OpenAI's API|has no model"):
        asyncio.run(asyncio.wait_for(ask(), 60))


def test_the_shell_needs_no_torch_for_a_server():
    script = "import sys, minisgl.chat.remote, minisgl.chat.shell; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=False).returncode == 0
