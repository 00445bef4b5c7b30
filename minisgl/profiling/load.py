"""An engine of our own at work in one phase: built, filled with requests, and kept at it step by step."""

import time
from typing import Any

import numpy as np
import torch

from minisgl.build import build_engine, resolve, resolve_kernels
from minisgl.config import EngineConfig, SamplingParams
from minisgl.generation import NEUTRAL
from minisgl.profiling.facts import SETTLING
from minisgl.profiling.options import ProfileConfig
from minisgl.request import Request
from minisgl.source.hub import Report, locate
from minisgl.source.model_config import read_model_config

WARM_UP = 8
"""Steps of the phase before any is timed."""
TIMED = 20
"""Steps to time where none are to be captured."""
TEMPERATURE = 0.6
"""Tokens are drawn, as most are in practice."""


class Load:
    """Requests with random prompts that keep an engine in a phase."""

    def __init__(self, config: EngineConfig, options: ProfileConfig, report: Report) -> None:
        """Load a model and bring its engine to where steps are what they will be; ValueError for what does not fit.

        `report` is told how downloading and loading go.
        """
        config = resolve(config)
        folder = locate(config.model, config.revision, config.load_format, report)
        self.folder, self._options, model = folder, options, read_model_config(folder.path)
        self.config = resolve_kernels(config, model)
        """The engine's, with nothing left at auto."""
        self.engine, self._vocab_size = build_engine(self.config, folder, model, report), model.vocab_size
        self._random = np.random.default_rng(0)
        self._sampling = SamplingParams(temperature=TEMPERATURE).with_defaults(NEUTRAL)
        self._added = self._ended = 0
        chunks = -(-options.batch * options.input_len // config.chunked_prefill_size)
        decoded = chunks + WARM_UP + 2 * max(options.steps, TIMED) + SETTLING + 2
        self._output_len = {"prefill": 1, "decode": decoded, "serve": options.output_len}[options.phase]
        self._check_fits()
        self.make_steps(WARM_UP + (0 if options.phase == "prefill" else chunks))

    def _check_fits(self) -> None:
        options, scheduler = self._options, self.engine.scheduler
        length = options.input_len + self._output_len
        pages = options.batch * -(-length // scheduler.page_size)
        if options.batch > scheduler.num_slots:
            raise ValueError(f"batch must be at most max_running_requests, {scheduler.num_slots}, got {options.batch}")
        if length > self.engine.context or pages > scheduler.num_pages:
            raise ValueError(
                f"{options.batch} requests of {options.input_len} tokens, and {self._output_len} more, take {pages} KV "
                f"pages of {scheduler.num_pages}, each {length} tokens of the context's {self.engine.context}: lower "
                "batch, input_len or steps, or raise num_pages or max_model_len"
            )

    def make_steps(self, count: int) -> float:
        """Launch so many batches, and wait for the device; the seconds that it took."""
        began_s, end = time.perf_counter(), self.engine.stats().steps + count
        while self.engine.stats().steps < end:
            self._top_up()
            self._ended += len(self.engine.step().ended)
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def _top_up(self) -> None:
        """Prompts come together to be computed together; those that decode come when others have ended."""
        options = self._options
        running = self.engine.num_waiting if options.phase == "prefill" else self._added - self._ended
        if options.phase == "prefill" and running:
            return
        for _ in range(options.batch - running):
            length = self._output_len
            if options.phase == "serve" and self._added < options.batch:
                length = max(length * (self._added + 1) // options.batch, 1)  # so that they do not end together
            key, self._added = self._added, self._added + 1
            prompt = self._random.integers(0, self._vocab_size, options.input_len, dtype=np.int32)
            common: Any = {"sampling": self._sampling, "stop_ids": (), "arrival_s": time.monotonic()}
            self.engine.add(Request(key=key, seed=key, prompt=prompt, max_tokens=length, **common))
