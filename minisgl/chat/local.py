"""An engine of one's own: a child process, loaded while the user types, and a new one when it has died."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from minisgl.bench.nvml import Gpus, Sampler, energy, open_gpus
from minisgl.chat.backend import Backend, Parts
from minisgl.chat.config import ChatConfig
from minisgl.config import EngineConfig, SamplingParams
from minisgl.doctor.machine import ask_torch, has_nvidia_driver
from minisgl.openai.conversation import End, Messages, Part, Score, Turn
from minisgl.results import TokenLogprob
from minisgl.server.client import EngineClient, EngineDead
from minisgl.source.cache_folder import Report
from minisgl.source.hub import locate
from minisgl.tokenizer.thinking import ThinkingSplitter, opens_thinking

NOT_FINITE = "ended early: the model's scores were not finite numbers"
SCORED = 10
"""Alternatives to a token that are found out afterwards."""


async def open_backend(config: ChatConfig, engine: EngineConfig, report: Report) -> Backend:
    """See `Opener`."""
    own = OwnEngine(engine, report)
    try:
        own.gpus, _ = await asyncio.gather(asyncio.to_thread(_gpus, engine), own.ready())
    except BaseException:
        await own.close()
        raise
    return own


class OwnEngine:
    """`Backend` by an engine process."""

    def __init__(self, config: EngineConfig, report: Report) -> None:
        self.name, self.context = config.model, None
        self._config, self._report = config, report
        self._client: EngineClient | None = None
        self._tokenizer: Any = None
        self.gpus: Gpus | str = "unknown"

    async def ready(self) -> str:
        """See `Backend`; if there is no engine, or it has died, there will be a new one."""
        news = ""
        try:
            if self._client is not None:
                await self._client.stats()
        except EngineDead as error:
            news = f"{error}; this is a new one"
            self._report(f"{error}; starting a new one", 0, None)
            await self.close()
        if self._client is None:
            self._client = await EngineClient.launch(self._config, self._report)
            self.name, self.context = self._client.front.model_name, self._client.front.context
            self._tokenizer = self._client.front.need_tokenizer("a conversation")
            self._render([{"role": "user", "content": "Hello"}], None)  # fails now, or never
        return news

    async def _engine(self) -> EngineClient:
        await self.ready()
        assert self._client is not None
        return self._client

    def _render(self, messages: Messages, thinking: bool | None) -> str:
        wish = {} if thinking is None else {"enable_thinking": thinking}
        return self._tokenizer.apply_chat_template(messages, **wish)

    async def answer(self, messages: Messages, sampling: SamplingParams, thinking: bool | None) -> Parts:
        """See `Backend`."""
        client = await self._engine()
        text = self._render(messages, thinking)
        prompt = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=False)
        yield Part(prompt_ids=prompt)
        splitter = ThinkingSplitter(opens_thinking(text))
        with Sampler(self.gpus) as sampler:
            began_s = time.monotonic()
            async with aclosing(client.generate(prompt, sampling)) as pieces:
                async for piece in pieces:
                    scores = [self._score(each) for each in piece.logprobs or ()]
                    yield Part(*splitter.push(piece.text), piece.token_ids, scores)
                    if piece.output is not None:
                        ended_s, done = time.monotonic(), piece.output.outputs[0]
                        samples = await asyncio.to_thread(sampler.between, began_s, ended_s)
                        counts = len(prompt), piece.output.cached_tokens, len(done.token_ids)
                        joules, _ = energy(samples, began_s, ended_s) or (None, None)
                        reason = NOT_FINITE if done.finish_reason == "error" else done.finish_reason
                        yield Part(*splitter.finish(), end=End(reason, *counts, joules))

    async def score(self, turn: Turn) -> list[Score]:
        """See `Backend`; one pass over the conversation, whose tokens are known."""
        if turn.model != self.name or not turn.token_ids:
            raise ValueError("the last answer was not made by this engine: /regen makes it anew")
        client = await self._engine()
        tokens = [*turn.prompt_ids, *turn.token_ids][: client.front.context - 1]
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=SCORED)
        *_, last = [piece async for piece in client.generate(tokens, asked)]
        assert last.output is not None and last.output.prompt_logprobs is not None
        return [self._score(each) for each in last.output.prompt_logprobs[len(turn.prompt_ids) :] if each is not None]

    def _score(self, scored: TokenLogprob) -> Score:
        ids = scored.token_id, *scored.top
        text, *others = (self._tokenizer.token_bytes(token).decode(errors="replace") for token in ids)
        return Score(text, scored.logprob, list(zip(others, scored.top.values(), strict=True)))

    async def facts(self) -> Mapping[str, Any]:
        """See `Backend`."""
        client, plain = await self._engine(), asdict(EngineConfig())
        stats, defaults = await client.stats(), client.front.defaults
        return {
            **{name: value for name, value in asdict(self._config).items() if name == "model" or value != plain[name]},
            "context": f"{self.context} tokens",
            "sampling": ", ".join(f"{name} {defaults[name]}" for name in ("temperature", "top_k", "top_p", "min_p")),
            "prompts": f"{stats.prompt_tokens} tokens, {stats.prefix_hit_tokens} of them from the prefix cache",
            "KV pages": f"{stats.pages_cached} keep what was said, {stats.pages_free} are free",
        }

    async def use(self, model: str) -> None:
        """See `Backend`."""
        config, old = replace(self._config, model=model, revision=None), self._config
        await asyncio.to_thread(locate, model, None, "dummy", self._report)  # without weights
        await self.close()
        try:
            self._config = config
            await self.ready()
        except BaseException:
            self._config = old
            await self.close()
            raise

    async def close(self) -> None:
        """See `Backend`."""
        if self._client is not None:
            await self._client.close()
        self._client = None


def _gpus(config: EngineConfig) -> Gpus | str:
    """NVML's view of the GPUs that the engine uses, or why there is none; torch is asked what auto stands for."""
    cuda = config.device != "cpu" and has_nvidia_driver() and (config.device == "cuda" or ask_torch().devices)
    return open_gpus("cuda" if cuda else "cpu", config.tp)
