"""Any server that speaks OpenAI's API, over HTTP."""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from minisgl.bench.answer import ServerFault
from minisgl.bench.client import connect
from minisgl.chat.backend import Backend, ContextFull, End, Part, Parts
from minisgl.chat.config import ChatConfig
from minisgl.config import EngineConfig, SamplingParams
from minisgl.openai.conversation import Messages, Score, Turn, request_body
from minisgl.openai.protocol import CHAT
from minisgl.source.cache_folder import Report
from minisgl.tokenizer.thinking import ThinkingSplitter

TOO_LONG = ("context_length_exceeded", "maximum context length")
"""Signs in what servers answer to a conversation that is longer than the context."""


async def open_backend(config: ChatConfig, engine: EngineConfig, report: Report) -> Backend:
    """See `Opener`; the model is the server's first unless one is named."""
    server = Server(config.url or "", config.api_key)
    await server.use("" if engine == EngineConfig() else engine.model)
    return server


class Server:
    """`Backend` by a server at a URL, which may end in /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name, self.context = "", None
        self._url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    async def use(self, model: str) -> None:
        """See `Backend`; without a name, the first that the server has."""
        models = await self._models()
        name = model or next(iter(models), "")
        if name not in models:
            raise ValueError(f"{self._url} has no model {name}, but {', '.join(models) or 'none'}")
        self.name, self.context = name, models[name]

    async def _models(self) -> dict[str, int | None]:
        """Their names, with their contexts where the server tells."""
        with self._faults():
            async with connect(self._url, self._headers) as server:
                data = msgspec.json.decode(await server.ask("/v1/models"))["data"]
            return {each["id"]: each.get("max_model_len") for each in data}

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Says what goes wrong, or what the server says of it, in one line."""
        try:
            yield
        except (ServerFault, msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            text = str(error) if isinstance(error, ServerFault) else f"that is not OpenAI's API: {error!r}"
            status, said = re.match(r"(\d+: )?", text), re.search(r'"message":\s*"((?:[^"\\]|\\.)*)', text)
            line = f"{status[0]}{said[1]}" if status and said else text
            kind = ContextFull if any(sign in text for sign in TOO_LONG) else ValueError
            raise kind(f"{self._url} does not answer: {' '.join(line.split())}") from error

    async def answer(self, messages: Messages, sampling: SamplingParams, thinking: bool | None) -> Parts:
        """See `Backend`."""
        body = request_body(self.name, messages, sampling, thinking)
        data = msgspec.json.encode(body | {"stream": True, "stream_options": {"include_usage": True}})
        with self._faults():
            async with connect(self._url, self._headers) as server, aclosing(server.answer(CHAT, data)) as stream:
                async for part in _parts(stream):
                    yield part

    async def score(self, turn: Turn) -> list[Score]:
        """See `Backend`."""
        raise ValueError("a server tells how likely tokens are only with the answer: /set logprobs 5, and /regen")

    async def facts(self) -> Mapping[str, Any]:
        """See `Backend`."""
        models = await self._models()
        return {"model": self.name, "context": self.context or "unknown", "server": self._url, "has": ", ".join(models)}

    async def close(self) -> None:
        """See `Backend`; nothing is kept open."""


async def _parts(stream: AsyncIterator[bytes]) -> AsyncIterator[Part]:
    """The server-sent events of an answer as they come; thoughts have a field of their own, or stand in the text."""
    splitter, reason, usage, over, rest = ThinkingSplitter(), "", {}, False, b""
    async for data in stream:
        *lines, rest = (rest + data).split(b"\n")
        for payload in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
            chunk = {} if payload == b"[DONE]" else msgspec.json.decode(payload)
            over = over or not chunk
            if error := chunk.get("error"):
                raise ServerFault(str(error.get("message") if isinstance(error, dict) else error))
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                delta, reason = choice.get("delta") or {}, choice.get("finish_reason") or reason
                text, thoughts = splitter.push(delta.get("content") or "")
                thoughts += delta.get("reasoning_content") or delta.get("reasoning") or ""
                scores = [_score(each) for each in (choice.get("logprobs") or {}).get("content") or ()]
                yield Part(text, thoughts, scores=scores)
    if not (over or reason):
        raise ServerFault("the answer broke off")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    end = End(reason or "stop", usage.get("prompt_tokens"), cached, usage.get("completion_tokens"))
    yield Part(*splitter.finish(), end=end)


def _score(entry: Mapping[str, Any]) -> Score:
    top = entry.get("top_logprobs") or ()
    return Score(entry["token"], entry["logprob"], [(each["token"], each["logprob"]) for each in top])
