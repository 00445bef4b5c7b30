"""LLM: the engine for scripts, in this process."""

import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from minisgl.build import build_engine, release_memory, resolve, resolve_kernels
from minisgl.config import EngineConfig, SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL, Front, Generation, Prompt, is_list
from minisgl.request import Request
from minisgl.results import Piece, RequestOutput
from minisgl.scheduler import Committed, Stats
from minisgl.source.hub import Report, locate
from minisgl.source.model_config import read_model_config
from minisgl.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]


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
        self.model_config = model = read_model_config(folder.path)
        self.config = resolve_kernels(self.config, model)
        own = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self._engine: Engine | None = build_engine(self.config, folder, model, report)
        self._front = Front(
            tokenizer=self.tokenizer,
            vocab_size=model.vocab_size,
            context=self._engine.context,
            eos_ids=tuple(sorted({*model.eos_token_ids, *own})),
            defaults={**NEUTRAL, **folder.sampling_defaults},
            model_name=folder.name,
        )
        self._generations: dict[int, Generation] = {}  # by request key
        self.generated_tokens = 0
        """Tokens that all requests together have brought so far."""
        self._next_key = 0
        self._aborts = 0  # times that all were aborted
        self._stepping = False
        self._left: list[Request] = []  # of streams that were closed in the middle of a step
        self._random = random.SystemRandom()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and free the model; safe to call again."""
        answers = self._engine is None or self._engine.close()
        self._engine = None
        self._generations.clear()
        if answers:
            release_memory(self.config)

    @property
    def max_model_len(self) -> int:
        """The longest request in tokens, prompt and answer together."""
        return self._running_engine.context

    def stats(self) -> Stats:
        """Counts of requests, pages, prefix-cache hits, retractions and steps at this moment."""
        return self._running_engine.stats()

    # Text and tokens

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text's token ids; with special tokens as a raw prompt has them."""
        return self._front.need_tokenizer("tokenize").encode(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._front.need_tokenizer("detokenize").decode(token_ids, skip_special_tokens)

    def chat_prompt(self, messages: Sequence[Message], /, **options: Any) -> list[int]:
        """The token ids of a conversation under the model's chat template, ready for the answer.

        `options` go to the template: `add_generation_prompt`, `continue_final_message`, `tools`, and its own.
        """
        return self._front.need_tokenizer("a conversation").chat(messages, **options)

    # Generating

    def generate(
        self,
        prompts: str | Sequence[Prompt] | list[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_finished: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (text, or token ids) and return the results in their order.

        One SamplingParams holds for all; a list has one for each. Prompts beyond what runs at once wait outside
        the engine, so that thousands take no more memory than their results. `on_finished` is told a prompt's number
        and result as soon as it is there.
        """
        given = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: Sequence[SamplingParams] = [sampling_params or SamplingParams()] * len(given)
        elif isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            params = sampling_params
        else:
            raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {sampling_params!r:.80}")
        if len(params) != len(given):
            raise ValueError(f"{len(given)} prompts and {len(params)} sampling_params: give one, or one for each")
        generations = [self._generation(p, s, stream=False) for p, s in zip(given, params, strict=True)]
        outputs: dict[int, RequestOutput] = {}
        with _progress(len(generations), progress) as advance, closing(self._feed(generations)) as steps:
            for ended in steps:
                for number, output in ended:
                    outputs[number] = output
                    advance(1)
                    if on_finished is not None:
                        on_finished(number, output)
        return [outputs[number] for number in range(len(given))]

    def feed(self, prompts: Iterable[tuple[Prompt, SamplingParams]]) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Answer prompts that an iterator brings, taken from it as there is room: only those at work are in memory.

        Yields after every step, so that progress can be shown, the number and the result of each prompt that ended
        in it. A prompt that cannot run is a ValueError when its turn comes (`check` tells before); leaving aborts.
        """
        return self._feed(self._generation(prompt, params, stream=False) for prompt, params in prompts)

    def _feed(self, generations: Iterable[Generation]) -> Generator[list[tuple[int, RequestOutput]], None, None]:
        coming, running = enumerate(generations), dict[Generation, int]()
        ended: list[Generation] = []
        aborts = self._aborts
        try:
            while True:
                # One always: other work, which this call is in the middle of, may leave no room.
                while not running or self._running_engine.num_waiting < 2 * self.config.max_running_requests:
                    number, generation = next(coming, (0, None))
                    if generation is None:
                        break
                    running[generation], generation.ended = number, ended
                    self._start(generation)
                    if self._aborts > aborts:  # all were to end, and so are those that had not begun
                        self._abort(generation)
                if not running:
                    return
                if not ended:  # else other work in this loop's body has ended them
                    if not self._running_engine.has_work:
                        raise RuntimeError("the engine was interrupted, and these prompts with it")
                    self._step()
                done = [(running.pop(each), each.output) for each in ended if each.output is not None]
                ended.clear()
                yield done
        finally:
            self._abandon(list(running))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them; `options` go to the chat template."""
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raise the ValueError that `generate` would raise for a prompt, and do nothing else."""
        self._front.generation(prompt, sampling_params or SamplingParams(), key=0, seed=0, stream=False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """Answer one prompt piece by piece; leaving the loop aborts the request.

        Text is held back while it may be part of a stop string or of a character; the last piece has `.output`.
        """
        return self._stream(self._generation(prompt, sampling_params or SamplingParams(), stream=True))

    def _stream(self, generation: Generation) -> Iterator[Piece]:
        self._start(generation)
        try:
            while True:
                while generation.pieces:
                    piece = generation.pieces.popleft()
                    yield piece
                    if piece.finished:
                        return
                if not self._running_engine.has_work:
                    raise RuntimeError("the engine was interrupted, and this stream with it")
                self._step()
        finally:
            self._abandon([generation])

    def abort(self, request_id: int | None = None) -> None:
        """End a request by its `request_id`, or all, also those that wait; its result comes with the reason `abort`.

        For use inside a `stream` or `feed` loop or `on_finished`. Without effect on one that has ended.
        """
        self._aborts += request_id is None
        for generation in set(self._generations.values()):
            if request_id in (None, generation.request_id):
                self._abort(generation)

    def _abort(self, generation: Generation) -> None:
        for request in generation.requests:
            self._running_engine.finish(request, "abort")

    @property
    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise ValueError("this LLM is closed")
        return self._engine

    def _generation(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Generation:
        assert self._running_engine
        generation = self._front.generation(prompt, params, self._next_key, self._random.getrandbits(63), stream)
        self._next_key += len(generation.requests)
        return generation

    def _start(self, generation: Generation) -> None:
        now_s = time.monotonic()
        for request in generation.requests:
            request.arrival_s = now_s
            self._generations[request.key] = generation
        self._running_engine.add(generation.requests[0])

    def _abandon(self, generations: Sequence[Generation]) -> None:
        """Abort those that have not ended, and step until the engine has let go of them.

        The garbage collector may close a stream in the middle of a step; the next one aborts it then.
        """
        engine = self._engine
        if engine is None:
            return
        left = [g for g in generations if any(r.key in self._generations for r in g.requests)]
        requests = [request for generation in left for request in generation.requests]
        if self._stepping:
            self._left += requests
            return
        try:
            for request in requests:
                engine.finish(request, "abort")
            while engine.has_work and any(r.slot >= 0 or r.key in self._generations for r in requests):
                self._step()
        finally:
            for request in requests:
                self._generations.pop(request.key, None)

    def _step(self) -> None:
        """One engine step, its tokens and results handed to whom they concern.

        An interrupt in the middle may lose text of this step, but never that a request has ended.
        """
        for request in self._left:
            self._running_engine.finish(request, "abort")
        self._left, self._stepping = [], True
        try:
            committed = self._running_engine.step()
            try:
                self._take_tokens(committed)
            finally:
                self._end(committed)
        finally:
            self._stepping = False

    def _take_tokens(self, committed: Committed) -> None:
        now_s = time.monotonic()
        self.generated_tokens += len(committed.tokens)
        self._take_logprobs(committed)
        for key, token in zip(committed.keys.tolist(), committed.tokens.tolist(), strict=True):
            generation = self._generations.get(key)
            if generation is not None and (stopped := generation.take_token(key, token, now_s)):
                self._running_engine.finish(stopped, "stop")

    def _end(self, committed: Committed) -> None:
        for request in committed.ended:
            if generation := self._generations.pop(request.key, None):
                generation.end(request.key, time.monotonic())

    def _take_logprobs(self, committed: Committed) -> None:
        for key, prompt in committed.prompt_logprobs:
            if generation := self._generations.get(key):
                generation.take_prompt_logprobs(prompt.first, prompt.logprobs)
        if committed.logprobs is not None:
            tokens = dict(zip(committed.keys.tolist(), committed.tokens.tolist(), strict=True))
            for row, key in enumerate(committed.logprob_keys.tolist()):
                if (generation := self._generations.get(key)) and key in tokens:
                    generation.take_logprobs(key, tokens[key], committed.logprobs, row)


def _as_list(prompts: str | Sequence[Prompt] | list[int]) -> list[Prompt]:
    """One prompt, as text or as token ids, becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise ValueError(f"prompts must be text, token ids, or a list of them, got {prompts!r:.80}")
    given: list[Any] = list(prompts)
    return [given] if given and all(isinstance(p, int | np.integer) for p in given) else given


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of finished prompts on stderr, where one is wanted."""
    if not show:
        yield lambda ended: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda ended: bar.advance(task, ended)
