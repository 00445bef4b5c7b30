"""LLM: the engine for scripts, in this process."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from minisgl.build import build_engine, release_memory, resolve
from minisgl.config import EngineConfig, SamplingParams
from minisgl.engine import Engine
from minisgl.request import FinishReason, Request, room_for
from minisgl.scheduler import Stats
from minisgl.source.hub import Report, locate
from minisgl.source.model_config import read_model_config
from minisgl.tokenizer.stream import StreamDecoder
from minisgl.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "ignore_eos": False, "priority": 0}
"""Sampling where neither user nor model says anything."""

Prompt = str | list[int]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]  # with the end-of-text or stop token that ended it
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string, or the user's stop token; None for the model's own end


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When things happened to a request, in seconds."""

    ttft_s: float | None  # from arrival to the first token
    total_s: float  # from arrival to the end
    decode_tokens_per_s: float | None  # after the first token; None where there is no second


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All that came of a prompt."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    cached_tokens: int  # prompt tokens whose KV was found in the prefix cache
    outputs: list[Completion]
    timing: Timing

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an answer as it streams; the last one carries the whole."""

    text: str
    token_ids: list[int]
    output: RequestOutput | None = None

    @property
    def finished(self) -> bool:
        return self.output is not None


@dataclass(eq=False, kw_only=True)
class _Job:
    """A request and what its reader needs: text as it comes, where there are stop strings or someone streams."""

    request: Request
    prompt: str | None
    decoder: StreamDecoder | None
    pieces: deque[Piece] | None  # None: nobody streams
    text: list[str] = field(default_factory=list)
    first_token_s: float | None = None
    output: RequestOutput | None = None


class LLM:
    """A model, ready to generate. Not thread-safe; `close` (or `with`) gives the memory back.

    Keyword arguments are `EngineConfig`'s fields. ValueError says what is wrong with a value, a model or a
    prompt, before anything is queued.
    """

    def __init__(self, model: str = "smollm2", **fields: Any) -> None:
        self._open(EngineConfig(model=model, **fields), None)

    @classmethod
    def from_config(cls, config: EngineConfig, report: Report | None = None) -> Self:
        """The same from a complete configuration; `report` is told how downloading and loading go."""
        llm = cls.__new__(cls)
        llm._open(config, report)
        return llm

    def _open(self, config: EngineConfig, report: Report | None) -> None:
        self.config = resolve(config)
        folder = locate(config.model, config.revision, config.load_format, report)
        self.model_name = folder.name
        self.tokenizer = Tokenizer.find(folder.path)
        model = read_model_config(folder.path)
        self._vocab_size = model.vocab_size
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self._eos_ids = tuple(sorted({*model.eos_token_ids, *own}))
        self._defaults = {**NEUTRAL, **folder.sampling_defaults}
        self._engine: Engine | None = build_engine(self.config, folder, report)
        self._jobs: dict[int, _Job] = {}
        self._next_key = 0
        self._random = random.SystemRandom()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and free the model; safe to call again."""
        self._engine = None
        self._jobs.clear()
        if self.config.device == "cuda":
            release_memory()

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and answer together."""
        return self._running_engine.context

    def stats(self) -> Stats:
        """Counts of requests, pages, prefix-cache hits, retractions and steps at this moment."""
        return self._running_engine.stats()

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation under the model's chat template, ready for the answer."""
        return self._need_tokenizer("a conversation").chat(list(messages))

    def generate(
        self,
        prompts: str | Sequence[Prompt] | list[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts (text, or token ids) and return the results in their order.

        One SamplingParams holds for all; a list has one for each. Prompts beyond what runs at once wait outside
        the engine, so that thousands take no more memory than their results.
        """
        given = _as_list(prompts)
        params = self._params_for(given, sampling_params)
        jobs = [self._job(p, s, stream=False) for p, s in zip(given, params, strict=True)]
        waiting, unfinished = deque(jobs), {job.request.key for job in jobs}
        engine = self._running_engine
        most_waiting = 2 * self.config.max_running_requests
        with _progress(len(jobs), progress) as advance:
            try:
                while unfinished:
                    while waiting and engine.num_waiting < most_waiting:
                        self._start(waiting.popleft())
                    ended = unfinished.intersection(self._step())
                    unfinished -= ended
                    advance(len(ended))
            finally:
                self._abandon(jobs)
        return [job.output for job in jobs if job.output is not None]

    def stream(self, prompt: Prompt | list[int], sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """Answer one prompt piece by piece; leaving the loop aborts the request.

        Text is held back while it may be part of a stop string or of a character; the last piece has `.output`.
        """
        job = self._job(prompt, sampling_params or SamplingParams(), stream=True)
        return self._stream(job)

    def _stream(self, job: _Job) -> Iterator[Piece]:
        assert job.pieces is not None
        self._start(job)
        try:
            while True:
                while job.pieces:
                    piece = job.pieces.popleft()
                    yield piece
                    if piece.finished:
                        return
                self._step()
        finally:
            self._abandon([job])

    # Requests

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling_params: give one, or one for each")
        return params

    def _job(self, prompt: Prompt, sampling: SamplingParams, stream: bool) -> _Job:
        """Everything about a request that can be wrong is found here."""
        ids = self._token_ids(prompt)
        sampling = sampling.with_defaults(self._defaults)
        user_stops = tuple(sampling.stop_token_ids or ())
        if bad := [t for t in user_stops if t >= self._vocab_size]:
            raise ValueError(f"stop_token_ids: {bad[0]} is not in the model's vocabulary of {self._vocab_size}")
        room = room_for(len(ids), sampling.max_tokens, self._running_engine.context)
        if sampling.max_tokens is not None and room < sampling.max_tokens:
            logger.info("max_tokens %d cut to %d, which is what the context leaves", sampling.max_tokens, room)
        decoder = None
        if sampling.stop_strings or (stream and self.tokenizer):
            decoder = StreamDecoder(self._need_tokenizer("a stop string"), sampling.stop_strings)
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(63)
        request = Request(
            key=self._next_key,
            prompt=np.array(ids, dtype=np.int32),
            max_tokens=room,
            sampling=sampling,
            stop_ids=tuple({*user_stops, *(() if sampling.ignore_eos else self._eos_ids)}),
            seed=seed,
            arrival_s=time.monotonic(),
        )
        self._next_key += 1
        text = prompt if isinstance(prompt, str) else None
        return _Job(request=request, prompt=text, decoder=decoder, pieces=deque() if stream else None)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self._need_tokenizer("a text prompt").encode(prompt)
        else:
            ids = list(prompt)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise ValueError(f"a prompt must be text or token ids, got {token!r} in it")
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"token id {token} is not in the model's vocabulary of {self._vocab_size}")
        return ids

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and {self.model_name} has none: give token ids")
        return self.tokenizer

    @property
    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise ValueError("this LLM is closed")
        return self._engine

    def _start(self, job: _Job) -> None:
        job.request.arrival_s = time.monotonic()
        self._jobs[job.request.key] = job
        self._running_engine.add(job.request)

    def _abandon(self, jobs: Sequence[_Job]) -> None:
        """Abort those that have not ended, and step until the engine has let go of them."""
        engine = self._engine
        if engine is None:
            return
        left = [job for job in jobs if job.output is None and job.request.key in self._jobs]
        for job in left:
            engine.finish(job.request, "abort")
        while engine.has_work and any(job.output is None or job.request.slot >= 0 for job in left):
            self._step()
        for job in left:
            self._jobs.pop(job.request.key, None)

    # Steps

    def _step(self) -> list[int]:
        """One engine step, its tokens handed to whom they concern; returns the keys of requests that ended."""
        committed = self._running_engine.step()
        now = time.monotonic()
        for key, token in zip(committed.keys.tolist(), committed.tokens.tolist(), strict=True):
            self._take_token(self._jobs[key], token, now)
        for request in committed.ended:
            if job := self._jobs.pop(request.key, None):
                self._finish(job)
        return [request.key for request in committed.ended]

    def _take_token(self, job: _Job, token: int, now: float) -> None:
        if job.first_token_s is None:
            job.first_token_s = now
        text = ""
        if job.decoder is not None and token not in job.request.stop_ids:
            text = job.decoder.push([token])
            job.text.append(text)
            if job.decoder.matched is not None:
                self._running_engine.finish(job.request, "stop")
        if job.pieces is not None:
            job.pieces.append(Piece(text=text, token_ids=[token]))

    def _finish(self, job: _Job) -> None:
        request, decoder = job.request, job.decoder
        assert request.finish_reason is not None
        ids: list[int] = request.output.tolist()
        shown = ids[:-1] if ids and ids[-1] in request.stop_ids else ids
        reason, stop_reason, rest = request.finish_reason, None, ""
        if len(shown) < len(ids) and ids[-1] in (request.sampling.stop_token_ids or ()):
            stop_reason = ids[-1]
        if decoder is not None:
            rest = decoder.finish()
            text = "".join([*job.text, rest])
            if decoder.matched is not None:
                ids, reason, stop_reason = ids[: decoder.num_tokens_kept], "stop", decoder.matched
        else:
            # Not `decode`, which refuses ids that a padded vocabulary has and the tokenizer has not.
            text = self.tokenizer.detokenizer.decode(shown, True) if self.tokenizer else ""
        answer = Completion(index=0, text=text, token_ids=ids, finish_reason=reason, stop_reason=stop_reason)
        job.output = RequestOutput(
            prompt=job.prompt,
            prompt_token_ids=request.prompt.tolist(),
            cached_tokens=request.cached_tokens or 0,
            outputs=[answer],
            timing=_timing(request.arrival_s, job.first_token_s, time.monotonic(), len(ids)),
        )
        if job.pieces is not None:
            job.pieces.append(Piece(text=rest, token_ids=[], output=job.output))


def _as_list(prompts: str | Sequence[Prompt] | list[int]) -> list[Prompt]:
    """One prompt, as text or as token ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    given: list[Any] = list(prompts)
    return [given] if given and all(isinstance(p, int) for p in given) else given


def _timing(arrival_s: float, first_token_s: float | None, ended_s: float, num_tokens: int) -> Timing:
    decode_s = 0.0 if first_token_s is None else ended_s - first_token_s
    return Timing(
        ttft_s=None if first_token_s is None else first_token_s - arrival_s,
        total_s=ended_s - arrival_s,
        decode_tokens_per_s=(num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else None,
    )


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of finished requests on stderr, where one is wanted."""
    if not show:
        yield lambda ended: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(
        "requests", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda ended: bar.advance(task, ended)
