"""Any server that speaks OpenAI's API, over HTTP."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from minisgl.bench.answer import ServerFault, Usage
from minisgl.bench.chat_stream import Chosen, chunks, is_too_long, message, models
from minisgl.bench.client import connect
from minisgl.chat.backend import Backend, ContextFull, Parts
from minisgl.chat.config import ChatConfig
from minisgl.config import EngineConfig, SamplingParams
from minisgl.openai.conversation import End, Messages, Part, Score, Turn, request_body
from minisgl.openai.protocol import CHAT
from minisgl.source.cache_folder import Report
from minisgl.tokenizer.thinking import ThinkingSplitter


async def open_backend(config: ChatConfig, engine: EngineConfig, report: Report) -> Backend:
    """See `Opener`; the model is the server's first unless one is named."""
    server = Server(config.url or "", config.api_key)
    await server.use("" if engine == EngineConfig() else engine.model)
    return server


class Server(Backend):
    """`Backend` by a server at a URL, which may end in /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name, self.context = "", None
        self._url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"Content-Type": "application/json"} | key

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
                return await models(server)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Says what goes wrong, or what the server says of it, in one line."""
        try:
            yield
        except ServerFault as error:
            kind = ContextFull if is_too_long(error) else ValueError
            raise kind(f"{self._url} does not answer: {message(error)}") from error

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


async def _parts(stream: AsyncIterator[bytes]) -> AsyncIterator[Part]:
    """What comes of an answer; thoughts have a field of their own, or stand in the text."""
    splitter, reason, usage = ThinkingSplitter(), "stop", Usage()
    async for chunk in chunks(stream):
        usage = chunk.usage or usage
        for choice in chunk.choices or ():
            reason = choice.finish_reason or reason
            text, thoughts = splitter.push(choice.said("content"))
            thoughts += choice.said("reasoning_content", "reasoning")
            yield Part(text, thoughts, scores=[_score(each) for each in choice.chosen])
    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    yield Part(*splitter.finish(), end=End(reason, usage.prompt_tokens, cached, usage.completion_tokens))


def _score(chosen: Chosen) -> Score:
    return Score(chosen.token, chosen.logprob, [(each.token, each.logprob) for each in chosen.top_logprobs or ()])
