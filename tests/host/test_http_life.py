"""How requests and a frontend live and end: disconnects, full queues, deadlines, keys, draining, death."""

import asyncio
import http.client
import io
import json
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from served import MODEL, Frontend, Served, served, write_model

from minisgl.openai.protocol import CHAT, COMPLETIONS, OWN
from minisgl.server.app import LAST_WORDS_S
from minisgl.server.messages import Control

ROUTES = (
    *OWN,
    *("/health", "/health_generate", "/v1/models", "/v1/models/tiny", "/metrics", "/server_info"),
    *("/flush_cache", "/start_profile", "/stop_profile", "/openapi.json", "/nothing"),
)
PACED = ("--step-s", "0.005")
ENDLESS = {"prompt": "Hello", "max_tokens": 4000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def paced(model: Path) -> Iterator[Served]:
    """A server whose answers take their time."""
    with served(model, *PACED) as server:
        yield server


Answered = tuple[int, Any, str]


async def ask(session: aiohttp.ClientSession, server: Served, path: str, body: Any = None, **headers: str) -> Answered:
    """Status, headers and text of an answer."""
    method = "GET" if body is None else "POST"
    sent = {"data": body} if isinstance(body, io.BytesIO) else {"json": body}
    async with session.request(method, server.url + path, headers=headers, **sent) as response:
        return response.status, response.headers, await response.text()


def asking(server: Served, path: str, body: Any = None, **headers: str) -> Answered:
    async def run() -> Answered:
        async with aiohttp.ClientSession() as session:
            return await ask(session, server, path, body, **headers)

    return asyncio.run(run())


def events(text: str) -> list[Any]:
    """What a stream's events hold, without the [DONE] that must end it."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def counts(server: Served) -> tuple[int, int, int]:
    """Requests that are running and waiting in the engine, and open in the frontend."""
    info = json.loads(asking(server, "/server_info")[2])
    return info["stats"]["running"], info["stats"]["waiting"], info["frontend"]["open_requests"]


def until(condition: Callable[[], bool], limit_s: float = 15) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it has not come about"
        time.sleep(0.02)


# Disconnects


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(paced: Served, stream: bool):
    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            work = asyncio.create_task(ask(session, paced, COMPLETIONS, ENDLESS | {"stream": stream, "n": 3}))
            while json.loads((await ask(session, paced, "/server_info"))[2])["stats"]["running"] != 3:
                assert not work.done()
            work.cancel()

    asyncio.run(leave())
    until(lambda: counts(paced) == (0, 0, 0))


def test_a_thousand_disconnects_leave_nothing_behind(model: Path):
    dice = random.Random(0)

    async def visit(session: aiohttp.ClientSession, server: Served) -> None:
        body = ENDLESS | {"stream": dice.random() < 0.7, "n": dice.choice([1, 1, 2]), "stop": dice.choice([None, "zz"])}
        try:
            async with (
                asyncio.timeout(dice.random() * 0.3),
                session.post(server.url + COMPLETIONS, json=body) as response,
            ):
                async for _ in response.content.iter_any():
                    pass
        except TimeoutError:
            return
        raise AssertionError("it had ended by itself")

    async def visit_often(server: Served) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(crowd(session, server) for _ in range(50)))

    async def crowd(session: aiohttp.ClientSession, server: Served) -> None:
        for _ in range(20):
            await visit(session, server)

    with served(model, *PACED, "--max-running", "64", "--max-queued", "1000") as server:
        asyncio.run(visit_often(server))
        until(lambda: counts(server) == (0, 0, 0))
        status, _, text = asking(server, COMPLETIONS, {"prompt": "Hello", "max_tokens": 5})
        assert status == 200 and json.loads(text)["choices"][0]["text"] == "Hello"
        assert server.frontends[0].logged() == ""


def test_a_client_that_does_not_read_costs_no_more_than_its_text(model: Path):
    """Its pieces are held, and come as larger ones once it reads."""
    with served(model) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = {"prompt": "Hello", "max_tokens": 4000, "stream": True, "n": 20}
        connection.request("POST", COMPLETIONS, json.dumps(body).encode())
        answered = connection.getresponse()  # it has begun
        until(lambda: counts(server) == (0, 0, 0))
        choices = [event["choices"][0] for event in events(answered.read().decode())]
        connection.close()
    texts = Counter[int]()
    for choice in choices:
        texts[choice["index"]] += len(choice["text"])
    assert texts == dict.fromkeys(range(20), 4000)  # each token is a letter
    assert len(choices) < 70_000


IMPATIENT = (
    "-c",
    "from minisgl.server import app, routes; app.STALLED_S = routes.STALLED_S = 0.3; app.main()",
)


@pytest.fixture(scope="module")
def impatient(model: Path) -> Iterator[Served]:
    with served(model, program=IMPATIENT) as server:
        yield server


LARGE = {"prompt": "x" * 4000, "echo": True, "logprobs": 20, "n": 20, "max_tokens": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hello", "max_tokens": 4000, "stream": True, "n": 20},  # its end is large
        LARGE | {"stream": True},  # its beginning
        LARGE,
    ],
)
def test_a_client_that_never_reads_loses_its_connection(model: Path, body: dict[str, Any]):
    with served(model, program=IMPATIENT, log_requests=True) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", COMPLETIONS, json.dumps(body).encode())
        until(lambda: "POST /v1/completions" in server.frontends[0].logged())
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            connection.getresponse().read()
        connection.close()
        assert counts(server) == (0, 0, 0)


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"Content-Length: 9", b"{"),
        (b"Transfer-Encoding: chunked", b"1\r\n{\r\n"),
        (b"Transfer-Encoding: chunked", b"1\r\n{\r\nnot a length\r\n"),
    ],
)
def test_a_client_that_does_not_go_on_with_its_body_is_told_so(impatient: Served, path: str, head: bytes, part: bytes):
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=20) as connection:
        connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % (path.encode(), head))
        time.sleep(0.1)  # what comes with the head is read with it
        connection.sendall(part)
        answered = connection.recv(1 << 16)
    assert answered.startswith(b"HTTP/1.1 408 ") and b"nothing more of the body has come" in answered


# Full queues


def test_each_of_five_thousand_requests_gets_one_answer(model: Path):
    async def offer(server: Served) -> Counter[Any]:
        connector = aiohttp.TCPConnector(limit=1000)
        async with aiohttp.ClientSession(connector=connector) as session:
            body = {"prompt": "Hello", "max_tokens": 5}
            bodies = [body | {"stream": number % 2 == 0} for number in range(5000)]
            answers = await asyncio.gather(*(ask(session, server, COMPLETIONS, each) for each in bodies))
        found = Counter[Any]()
        for (status, headers, text), each in zip(answers, bodies, strict=True):
            if status == 503:
                error = json.loads(text)["error"]
                assert (error["code"], error["type"], headers["Retry-After"]) == (
                    "queue_full",
                    "unavailable_error",
                    "1",
                )
            elif each["stream"]:
                assert "".join(event["choices"][0]["text"] for event in events(text)) == "Hello"
            else:
                assert json.loads(text)["choices"][0]["text"] == "Hello"
            found[status] += 1
        return found

    with served(model, "--max-queued", "100", "--max-running", "8", "--step-s", "0.002") as server:
        found = asyncio.run(offer(server))
        assert found.keys() == {200, 503} and found.total() == 5000
        assert counts(server) == (0, 0, 0)
        assert server.frontends[0].logged() == ""


# Deadlines


def test_a_request_that_takes_too_long_ends_with_an_error(model: Path):
    with served(model, *PACED, request_timeout=1.0) as server:
        status, _, text = asking(server, COMPLETIONS, ENDLESS)
        assert status == 504 and json.loads(text)["error"]["code"] == "request_timeout"
        status, _, text = asking(server, COMPLETIONS, ENDLESS | {"stream": True})
        assert status == 200
        *pieces, last = events(text)
        assert pieces and last["error"]["type"] == "timeout_error"
        until(lambda: counts(server) == (0, 0, 0))


def test_tokenizing_a_long_text_stops_nobody_else(paced: Served):
    async def run() -> list[str]:
        done: list[str] = []

        async def note(name: str, path: str, body: Any = None) -> None:
            assert (await ask(session, paced, path, body))[0] == 200
            done.append(name)

        async with aiohttp.ClientSession() as session:
            text = json.dumps({"prompt": "Hello, how are you? " * 200_000}).encode()
            long = asyncio.create_task(note("long", "/tokenize", io.BytesIO(text)))
            await asyncio.sleep(0.3)
            await note("short", "/health")
            await note("short", COMPLETIONS, {"prompt": "Hello", "max_tokens": 2})
            await long
        return done

    assert asyncio.run(run()) == ["short", "short", "long"]


# Who may ask


def test_only_who_has_a_key_is_answered_except_about_health(model: Path):
    with served(model, api_key=["first-key", "sécond"], log_requests=True) as server:
        for path in ROUTES:
            body = {} if path in OWN else None
            for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": "first-key"}):
                status, headers, text = asking(server, path, body, **given)
                if path == "/health":
                    assert status == 200
                    continue
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
                assert json.loads(text)["error"]["code"] == "invalid_api_key"
        for key in ("first-key", "sécond"):
            assert asking(server, "/v1/models", Authorization=f"Bearer {key}")[0] == 200
        log = server.frontends[0].logged()
        assert "GET /v1/models 200" in log and "first-key" not in log and "Bearer other" not in log


def test_browsers_may_call_from_the_origins_that_are_allowed(model: Path):
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def look(server: Served, origin: str) -> list[str | None]:
        async with aiohttp.ClientSession() as session:
            async with session.options(server.url + CHAT, headers={"Origin": origin, **preflight}) as response:
                before = response
            _, headers, _ = await ask(session, server, "/health", Origin=origin)
        assert before.status == (204 if "Access-Control-Allow-Origin" in headers else 401)
        assert before.headers.get("Access-Control-Allow-Headers") in (None, "authorization")
        allowed = [each.get("Access-Control-Allow-Origin") for each in (before.headers, headers)]
        # What is kept for one origin must not be shown to another.
        assert all((each.get("Vary") == "Origin") == (allowed != ["*"] * 2) for each in (before.headers, headers))
        return allowed

    with served(model, allowed_origins=["https://a.example"], api_key=["k"]) as server:
        assert asyncio.run(look(server, "https://a.example")) == ["https://a.example"] * 2
        assert asyncio.run(look(server, "https://b.example")) == [None] * 2
    with served(model, allowed_origins=["*"], api_key=["k"]) as server:
        assert asyncio.run(look(server, "https://b.example")) == ["*"] * 2


def test_a_line_is_logged_for_every_request_where_it_is_wanted(model: Path):
    with served(model, log_requests=True) as server:
        asking(server, CHAT, {"messages": [{"role": "user", "content": "Hello"}]}, **{"X-Request-Id": "one"})
        asking(server, COMPLETIONS, {"prompt": "x", "max_tokens": -1, "stream": True})
        asking(server, "/line%0Abreak" + "x" * 4000)
        lines = server.frontends[0].logged().splitlines()
    assert len(lines) == 3
    assert "POST /v1/chat/completions 200" in lines[0]
    assert lines[0].endswith("id=one answers=1 tokens_in=22 tokens_out=12 cached=0 finish=stop")
    assert "POST /v1/completions 400" in lines[1] and "max_tokens must be at least 1, got -1" in lines[1]
    assert "GET /line%0Abreakxx" in lines[2] and "xx 404" in lines[2] and len(lines[2]) < 1000


# Start


def test_while_the_model_loads_it_says_so(model: Path):
    with served(model, ready=False) as server:
        status, headers, text = asking(server, "/health")
        assert (status, json.loads(text)["status"]) == (503, "loading")
        asked = {"model": MODEL, "prompt": "x"}
        for path, body in ((COMPLETIONS, asked), ("/v1/models", None), ("/tokenize", asked), ("/detokenize", asked)):
            status, headers, text = asking(server, path, body)
            assert (status, headers["Retry-After"]) == (503, "1"), path
            assert json.loads(text)["error"]["code"] == "loading"
        server.open()
        assert asking(server, "/health")[0] == 200


def test_a_model_has_the_names_that_it_is_given(model: Path):
    with served(model, served_model_name=["a", "b"]) as server:
        cards = json.loads(asking(server, "/v1/models")[2])["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        for name in ("a", "b"):
            status, _, text = asking(server, COMPLETIONS, {"prompt": "x", "max_tokens": 1, "model": name})
            assert (status, json.loads(text)["model"]) == (200, "a")
        assert asking(server, COMPLETIONS, {"prompt": "x", "model": "tiny"})[0] == 404


def test_a_template_of_the_users_own_takes_the_place_of_the_models(model: Path, tmp_path: Path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with served(model, chat_template=str(tmp_path / "own.jinja")) as server:
        tokens = json.loads(asking(server, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[2])["tokens"]
        assert json.loads(asking(server, "/detokenize", {"tokens": tokens})[2]) == {"prompt": "[Hi]"}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"chat_template": "/no/such/file"}, "cannot read the chat template /no/such/file"),
        ({"chat_template": "BROKEN"}, "the chat template is broken at line 2"),
        ({"default_chat_template_kwargs": "{"}, "default_chat_template_kwargs"),
        ({"default_chat_template_kwargs": "[1]"}, "default_chat_template_kwargs"),
    ],
)
def test_what_it_cannot_start_with_is_reported_in_one_line(
    model: Path, tmp_path: Path, config: dict[str, Any], part: str
):
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content")
    config = {name: value.replace("BROKEN", str(broken)) for name, value in config.items()}
    server = Served(model, (), config)
    try:
        report = server.frontends[0].reports.get(timeout=20)
        assert report and report.kind == "fatal" and part in report.text and "\n" not in report.text
        assert server.frontends[0].process.wait(timeout=20) == 1
        assert server.frontends[0].logged() == ""
    finally:
        server.close()


# End


def ended(frontend: Frontend) -> int:
    return frontend.process.wait(timeout=10)


async def start_streams(
    session: aiohttp.ClientSession, server: Served, bodies: list[Any]
) -> list[asyncio.Task[Answered]]:
    """Requests that are being answered."""
    tasks = [asyncio.create_task(ask(session, server, COMPLETIONS, body)) for body in bodies]
    async with asyncio.timeout(10):
        running = 0
        while running < len(bodies):
            running = json.loads((await ask(session, server, "/server_info"))[2])["stats"]["running"]
    return tasks


def test_draining_finishes_what_runs_and_takes_nothing_new(model: Path):
    async def run(server: Served) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"prompt": "Hello", "max_tokens": 200}
            tasks = await start_streams(session, server, [body, body | {"stream": True}])
            server.tell(Control(do="drain"))
            while (await ask(session, server, "/health"))[0] == 200:
                pass
            status, headers, text = await ask(session, server, COMPLETIONS, body)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert json.loads(text)["error"]["code"] == "draining"
            assert json.loads((await ask(session, server, "/health"))[2])["status"] == "draining"
            whole, streamed = await asyncio.gather(*tasks)
        text = "Hello" * 40
        assert json.loads(whole[2])["choices"][0]["text"] == text
        assert "".join(event["choices"][0]["text"] for event in events(streamed[2])) == text

    with served(model, *PACED) as server:
        asyncio.run(run(server))
        assert ended(server.frontends[0]) == 0
        assert server.frontends[0].logged() == ""


def test_draining_waits_for_who_still_reads_an_answer(model: Path):
    with served(model) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", COMPLETIONS, json.dumps(LARGE).encode())
        response = connection.getresponse()
        server.tell(Control(do="drain"))
        time.sleep(2 * LAST_WORDS_S)
        assert len(json.loads(response.read())["choices"]) == 20
        connection.close()
        assert ended(server.frontends[0]) == 0


@pytest.mark.parametrize("how", ["drain", "fail", "owner", "engine"])
def test_what_cannot_finish_ends_with_an_error_in_both_modes(model: Path, how: str):
    async def run(server: Served) -> None:
        async with aiohttp.ClientSession() as session:
            tasks = await start_streams(session, server, [ENDLESS, ENDLESS | {"stream": True}])
            if how == "drain":
                server.tell(Control(do="drain"))
            elif how == "owner":
                stdin = server.frontends[0].process.stdin
                assert stdin
                stdin.close()
            else:
                if how == "engine":
                    os.kill(server.engine.pid, signal.SIGKILL)
                server.tell(Control(do="fail", reason="the engine has died: signal SIGKILL"))
            whole, streamed = await asyncio.gather(*tasks)
        assert whole[0] == 503 and json.loads(whole[2])["error"]["code"] == "ended"
        *pieces, last = events(streamed[2])
        assert pieces and last["error"]["code"] == "ended"
        if how in ("fail", "engine"):
            assert "the engine has died: signal SIGKILL" in last["error"]["message"]

    with served(model, *PACED, drain_timeout=0.3) as server:
        asyncio.run(run(server))
        assert ended(server.frontends[0]) == (0 if how == "drain" else 1)
        with socket.socket() as connection:
            assert connection.connect_ex(("127.0.0.1", server.port)) != 0


def test_frontends_share_a_port(model: Path):
    async def run(server: Served) -> None:
        for _ in range(40):
            async with aiohttp.ClientSession() as session:  # a connection each
                status, _, text = await ask(session, server, COMPLETIONS, {"prompt": "Hello", "max_tokens": 5})
                assert status == 200 and json.loads(text)["choices"][0]["text"] == "Hello"

    with served(model, frontends=2, log_requests=True) as server:
        asyncio.run(run(server))

        def served_by_each() -> list[int]:
            return [frontend.logged().count("POST") for frontend in server.frontends]

        until(lambda: sum(served_by_each()) >= 40)  # a line comes behind its answer
        assert sum(served_by_each()) == 40 and min(served_by_each()) > 0


def test_an_engine_that_hangs_hangs_nobody_who_asks_for_health(model: Path):
    with served(model, "--hang-after", "3", request_timeout=0.5) as server:
        assert asking(server, COMPLETIONS, ENDLESS)[0] == 504
        assert asking(server, "/health_generate")[0] == 504
        assert asking(server, "/health")[0] == 200


def test_an_engine_that_stalls_is_given_no_requests_until_it_goes_on(model: Path):
    with served(model) as server:
        server.tell(Control(do="stalled", reason="the engine has not finished a step for 9 s"))
        until(lambda: asking(server, "/health")[0] == 503)
        assert json.loads(asking(server, "/health")[2]) == {
            "status": "stalled",
            "message": "the engine has not finished a step for 9 s",
        }
        status, headers, text = asking(server, COMPLETIONS, {"prompt": "Hello", "max_tokens": 1})
        assert (status, headers["Retry-After"], json.loads(text)["error"]["code"]) == (503, "1", "stalled")
        server.tell(Control(do="stalled"))
        until(lambda: asking(server, "/health")[0] == 200)
        assert asking(server, COMPLETIONS, {"prompt": "Hello", "max_tokens": 1})[0] == 200
