"""What the server answers on each of its routes."""

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from minisgl import __version__
from minisgl.config import SamplingParams
from minisgl.generation import Generation
from minisgl.openai.answers import TokenBytes, build_response, build_usage, error_body
from minisgl.openai.protocol import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    ApiRequest,
    RequestError,
    parse_detokenize,
    parse_request,
    parse_tokenize,
    read_variables,
)
from minisgl.request import PromptTooLong
from minisgl.results import RequestOutput
from minisgl.server.client import EngineBusy, EngineClient, EngineDead, Ticket
from minisgl.server.config import ServerConfig
from minisgl.server.messages import EngineFacts
from minisgl.server.openapi import openapi
from minisgl.server.streaming import DONE, Stream, event

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOTES: web.RequestKey[dict[str, Any]] = web.RequestKey("notes", dict)
"""What the log says about a request, beside its status and time."""

STALLED_S = 60.0
"""How long a client may send nothing of a body that it has begun, or read nothing of what waits for it."""

QUESTION_S = 30.0
"""How long the engine may take to answer a question."""

EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Service:
    """One model, served: its engine, its names, and whether it takes requests now."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.state = "loading"
        """What /health calls it: loading, ok, draining or failed."""
        self.reason = "the model is being loaded"
        """Why it takes no requests."""
        self.names: tuple[str, ...] = tuple(config.served_model_name or ())
        self._variables = read_variables(config.default_chat_template_kwargs)
        self._client: EngineClient | None = None
        self._facts: EngineFacts | None = None
        self._started_s = int(time.time())
        self._threads = ThreadPoolExecutor(4, "tokenizer")  # what takes long there lets other threads run
        self._token_bytes: TokenBytes = lambda token: b""

    def open(self, client: EngineClient, facts: EngineFacts) -> None:
        """The engine is ready."""
        self._client, self._facts = client, facts
        if self.state == "loading":
            self.state, self.reason = "ok", ""
        self.names = self.names or tuple(dict.fromkeys((facts.model_name, str(facts.config["model"]))))
        if client.front.tokenizer:
            self._token_bytes = functools.cache(client.front.tokenizer.token_bytes)

    def refuse(self, state: str, reason: str) -> None:
        """Take no further requests."""
        self.state, self.reason = state, reason

    def pause(self, reason: str) -> None:
        """Take no requests as long as there is a reason for that, unless there is another one."""
        if self.state in ("ok", "stalled"):
            self.state, self.reason = ("stalled" if reason else "ok"), reason

    def routes(self) -> list[web.RouteDef]:
        """Every route; `docs/api.md` says what each is for."""
        return [
            web.post(CHAT, self._generate),
            web.post(COMPLETIONS, self._generate),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._model),
            web.post(TOKENIZE, self._tokenize),
            web.post(DETOKENIZE, self._detokenize),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/metrics", self._metrics),
            web.get("/server_info", self._server_info),
            web.post("/flush_cache", self._flush_cache),
            web.post("/start_profile", self._start_profile),
            web.post("/stop_profile", self._stop_profile),
            web.get("/openapi.json", self._openapi),
        ]

    @property
    def client(self) -> EngineClient:
        """The engine; raises RequestError where it takes no requests."""
        if self._client is None or self.state != "ok":
            raise RequestError(f"the server takes no requests now: {self.reason}", status=503, code=self.state)
        return self._client

    # Generating

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation, or continue prompts."""
        client = self.client
        deadline_s = self._deadline_s()
        async with asyncio.timeout_at(deadline_s):
            body = await _body(request)
            asked, generations = await self._in_thread(self._prepare, request.path, body)
        client = self.client  # which may have begun to drain meanwhile
        notes = request[NOTES]
        notes["answers"] = sum(len(generation.requests) for generation in generations)
        notes["tokens_in"] = sum(len(generation.requests[0].prompt) for generation in generations)
        if asked.stream is not None:
            return await self._stream(request, client, asked, generations, deadline_s)
        tickets: list[Ticket] = []
        try:
            async with asyncio.timeout_at(deadline_s):
                tickets += [client.submit(generation) for generation in generations]
                outputs = await _outputs(tickets)
        finally:
            _leave(client, tickets)
        _note(notes, asked, outputs)
        return _json(build_response(asked, outputs, self.names[0], int(time.time()), self._token_bytes))

    def _deadline_s(self) -> float | None:
        limit_s = self.config.request_timeout
        return None if limit_s is None else asyncio.get_running_loop().time() + limit_s

    def _prepare(self, route: str, body: bytes) -> tuple[ApiRequest, list[Generation]]:
        """What is asked for, tokenized and found to be right; raises RequestError."""
        asked = parse_request(route, _parse(body), self.names, streams=True)
        prompts: Sequence[str | list[int]] = asked.prompts
        if route == CHAT:
            prompts = [self._chat_prompt(asked.messages, asked.template_options)]
        param = "messages" if route == CHAT else "prompt"
        count, most = len(prompts) * (asked.sampling.n or 1), self.config.max_queued_requests
        if count > most:
            raise RequestError(f"{count} answers are asked for, and --max-queued-requests is {most}", param=param)
        try:
            return asked, [
                self.client.prepare(prompt, asked.sampling, stream=asked.stream is not None) for prompt in prompts
            ]
        except PromptTooLong as error:
            raise RequestError(str(error), param=param, code="context_length_exceeded") from error

    def _chat_prompt(self, messages: list[Any], options: Any, add_special_tokens: bool = False) -> list[int]:
        tokenizer = self.client.front.need_tokenizer("a conversation")
        try:
            text = tokenizer.apply_chat_template(messages, **(self._variables | options))
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        return tokenizer.encode(text, add_special_tokens)

    async def _stream(
        self,
        request: web.Request,
        client: EngineClient,
        asked: ApiRequest,
        generations: list[Generation],
        deadline_s: float | None,
    ) -> web.StreamResponse:
        """Answer in pieces. What fails before the first one has an error's status, what fails later is an event."""
        stream = Stream(asked, generations, self.names[0], int(time.time()), self._token_bytes)
        response = web.StreamResponse(headers=EVENT_STREAM)
        tickets: list[Ticket] = []
        try:
            async with asyncio.timeout_at(deadline_s):
                for number, generation in enumerate(generations):
                    sink = functools.partial(stream.take, number * len(generation.requests))
                    tickets.append(client.submit(generation, sink))
                    tickets[-1].done.add_done_callback(lambda _: stream.begun.set())
                await stream.begun.wait()
                _raise_failed(tickets)
                chunked = request.version >= HttpVersion11
                if not chunked:
                    response.force_close()  # that is how the client sees where the stream ends
                await response.prepare(request)
                await response.write(stream.events())
                assert request.transport is not None
                stream.open(request.transport, chunked)
                outputs = await _outputs(tickets)
            rest = stream.end(outputs)
            _note(request[NOTES], asked, outputs)
        except Exception as error:
            if not response.prepared or isinstance(error, ConnectionError):
                raise
            stream.close()
            refused = as_refusal(error)
            request[NOTES]["error"] = repr(str(refused))
            rest = stream.events() + event(error_body(refused)) + DONE
        finally:
            _leave(client, tickets)
        await response.write(rest)
        return response

    # Around it

    async def _models(self, request: web.Request) -> web.Response:
        """The names that the model is served under, and its longest request in tokens."""
        return _json({"object": "list", "data": [self._card(name) for name in self._served()]})

    async def _model(self, request: web.Request) -> web.Response:
        """One of these names."""
        name = request.match_info["name"]
        if name not in self._served():
            raise RequestError(f"model {name!r:.200} is not loaded", param="model", code="model_not_found", status=404)
        return _json(self._card(name))

    def _served(self) -> tuple[str, ...]:
        assert self.client
        return self.names if self.config.served_model_name else self.names[:1]

    def _card(self, name: str) -> dict[str, Any]:
        made = {"created": self._started_s, "owned_by": "minisgl"}
        return {"id": name, "object": "model", **made, "max_model_len": self.client.front.context}

    async def _tokenize(self, request: web.Request) -> web.Response:
        """The token ids of a text or of a conversation."""
        return _json(await self._in_thread(self._tokens, await _body(request)))

    def _tokens(self, body: bytes) -> dict[str, Any]:
        front = self.client.front
        asked = parse_tokenize(_parse(body), self.names)
        if asked.prompt is None:
            tokens = self._chat_prompt(asked.messages, asked.template_options, asked.add_special_tokens)
        else:
            tokens = front.need_tokenizer("tokenize").encode(asked.prompt, asked.add_special_tokens)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": front.context, "tokens": tokens}
        if asked.return_token_strs:
            answer["token_strs"] = [self._token_bytes(token).decode(errors="replace") for token in tokens]
        return answer

    async def _detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids."""
        return _json(await self._in_thread(self._text, await _body(request)))

    def _text(self, body: bytes) -> dict[str, str]:
        tokenizer = self.client.front.need_tokenizer("detokenize")
        tokens, skip_special_tokens = parse_detokenize(_parse(body), self.names)
        return {"prompt": tokenizer.decode(tokens, skip_special_tokens)}

    async def _health(self, request: web.Request) -> web.Response:
        """Whether requests are taken: 200, or 503 with the reason."""
        if self.state == "ok":
            return _json({"status": "ok"})
        return _json({"status": self.state, "message": self.reason}, status=503)

    async def _health_generate(self, request: web.Request) -> web.Response:
        """Make one token, through every process."""
        client, began_s = self.client, time.monotonic()
        one = SamplingParams(n=1, max_tokens=1, temperature=0.0)
        tickets = []
        try:
            async with asyncio.timeout(self.config.request_timeout or QUESTION_S):
                tickets.append(client.submit(client.prepare([0], one, stream=False)))
                await _outputs(tickets)
        finally:
            _leave(client, tickets)
        return _json({"status": "ok", "seconds": round(time.monotonic() - began_s, 4)})

    async def _metrics(self, request: web.Request) -> web.Response:
        """The engine's metrics, in Prometheus' text format."""
        text = await asyncio.wait_for(self.client.metrics(), QUESTION_S)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _server_info(self, request: web.Request) -> web.Response:
        """How the server is configured, and what its engine does now."""
        client, facts = self.client, self._facts
        assert facts
        stats = await asyncio.wait_for(client.stats(), QUESTION_S)
        server = dataclasses.asdict(self.config) | {"api_key": bool(self.config.api_key)}
        return _json(
            {
                "version": __version__,
                "status": self.state,
                "model": facts.model_name,
                "served_model_names": self._served(),
                "max_model_len": facts.context,
                "page_size": facts.page_size,
                "num_pages": facts.num_pages,
                "sampling_defaults": facts.sampling_defaults,
                "engine": facts.config,
                "server": server,
                "stats": dataclasses.asdict(stats),
                "frontend": {"open_requests": client.num_open},
            }
        )

    async def _flush_cache(self, request: web.Request) -> web.Response:
        """Drop cached pages that no running request holds; whether those were all."""
        return _json({"flushed": await asyncio.wait_for(self.client.flush_cache(), QUESTION_S)})

    async def _start_profile(self, request: web.Request) -> web.Response:
        """Profile the engine's next steps, up to `?steps=`, 100 unless it is given; they take longer."""
        steps = request.query.get("steps", "100")
        if steps not in map(str, range(1, 1001)) or request.query.keys() - {"steps"} or request.can_read_body:
            raise RequestError(f"only steps may be given, 1 to 1000, got {request.query_string!r:.80}", param="steps")
        if not await asyncio.wait_for(self.client.profile(int(steps)), QUESTION_S):
            raise RequestError("the engine is being profiled already: POST /stop_profile ends that", status=409)
        return _json({"steps": int(steps)})

    async def _stop_profile(self, request: web.Request) -> web.Response:
        """The trace of the steps since then, gzipped JSON that `minisgl profile --read` and Perfetto read."""
        if (trace := await self.client.profile(0)) is None:
            raise RequestError("no profile was begun: POST /start_profile", status=409)
        return web.Response(body=trace, content_type="application/gzip")

    async def _openapi(self, request: web.Request) -> web.Response:
        """This description."""
        return _json(openapi(self.routes()))

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def as_refusal(error: Exception) -> RequestError:
    """What went wrong in the terms of the API; what should not have is logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValueError):
        return RequestError(str(error))
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply")
    if isinstance(error, EngineBusy):
        return RequestError(
            f"{error.waiting} requests wait for the engine, and no more may: try again later",
            status=503,
            code="queue_full",
        )
    if isinstance(error, EngineDead):
        return RequestError(f"the answer was ended: {error}", status=503, code="ended")
    if isinstance(error, TimeoutError):
        return RequestError("the request has taken longer than it may", status=504, code="request_timeout")
    logger.error("a request has failed", exc_info=error)
    return RequestError("a fault of the server's own; its log says more", status=500)


async def _body(request: web.Request) -> bytes:
    """What a client sends, as long as it goes on sending."""
    body, clock = bytearray(), asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(STALLED_S) as patience:
            async for part in request.content.iter_any():
                patience.reschedule(clock() + STALLED_S)
                body += part
                if len(body) > request.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))
    except TimeoutError:
        raise RequestError(f"nothing more of the body has come for {STALLED_S:g} s", status=408) from None
    return bytes(body)


def _parse(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _outputs(tickets: Sequence[Ticket]) -> list[RequestOutput]:
    """The outputs of prompts, in their order; raises as soon as one of them fails."""
    await asyncio.wait([ticket.done for ticket in tickets], return_when=asyncio.FIRST_EXCEPTION)
    _raise_failed(tickets)
    return [ticket.done.result() for ticket in tickets]


def _raise_failed(tickets: Sequence[Ticket]) -> None:
    """Raise what a prompt has failed with: EngineBusy, EngineDead, or RequestError for an answer that is none."""
    for output in [ticket.done.result() for ticket in tickets if ticket.done.done()]:
        reasons = {answer.finish_reason for answer in output.outputs}
        if "error" in reasons:
            raise RequestError("the model's scores were not finite numbers, or a step failed: see the log", status=500)
        if "abort" in reasons:
            raise RequestError("the request was aborted", status=503, code="aborted")


def _leave(client: EngineClient, tickets: Sequence[Ticket]) -> None:
    """Whatever has happened, nothing goes on for this request."""
    for ticket in tickets:
        client.abort(ticket.generation)
        ticket.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may look


def _note(notes: dict[str, Any], asked: ApiRequest, outputs: Sequence[RequestOutput]) -> None:
    usage = build_usage(asked, outputs)
    notes["tokens_out"] = usage["completion_tokens"]
    notes["cached"] = usage["prompt_tokens_details"]["cached_tokens"]
    notes["finish"] = ",".join(sorted({answer.finish_reason for output in outputs for answer in output.outputs}))
