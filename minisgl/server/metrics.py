"""What the engine process counts, in Prometheus' format and in a log line now and then."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from minisgl.request import FinishReason
from minisgl.scheduler import Stats
from minisgl.server.messages import Observation

logger = logging.getLogger(__name__)

_PREFIX = "minisgl:"
_SHORT_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 40)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_LONG_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Histogram:
    """How many values fell between which bounds."""

    def __init__(self, name: str, documentation: str, bounds: Iterable[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = np.array(tuple(bounds), dtype=np.float64)
        self._counts = np.zeros(len(self._bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike) -> None:
        """Count one value, or an array of them."""
        each = np.atleast_1d(np.asarray(values, dtype=np.float64))
        self._counts += np.bincount(np.searchsorted(self._bounds, each), minlength=len(self._counts))
        self._sum += float(each.sum())

    def family(self, labels: dict[str, str]) -> Metric:
        """The counts as Prometheus has them: of values up to each bound."""
        family = HistogramMetricFamily(_PREFIX + self._name, self._documentation, labels=tuple(labels))
        names = map(floatToGoString, [*self._bounds.tolist(), inf])
        buckets = list(zip(names, self._counts.cumsum().tolist(), strict=True))
        family.add_metric(tuple(labels.values()), buckets=buckets, sum_value=self._sum)
        return family


class Metrics:
    """All counts of a server, kept by the engine; names as vLLM has them, under `minisgl:`.

    Nothing here is global, and nothing is kept in files.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.generation_tokens = 0
        self.aborted = 0  # requests
        self.rejected = 0  # requests that the full queue did not take
        self.busy_s = self.idle_s = 0.0  # in steps, and without anything to do
        self._finished: Counter[str] = Counter()
        self.queue_s = Histogram("request_queue_time_seconds", "From arrival to admission.", _LONG_S)
        self._ttft_s = Histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_S)
        self._gap_s = Histogram("inter_token_latency_seconds", "From a token to the next.", _SHORT_S)
        self._total_s = Histogram("e2e_request_latency_seconds", "From arrival to the end, aborts apart.", _LONG_S)
        self._prompt = Histogram("request_prompt_tokens", "Length of prompts that have ended.", _TOKENS)
        self._output = Histogram("request_generation_tokens", "Tokens of a prompt's answers together.", _TOKENS)

    def observe(self, seen: Observation) -> None:
        """Take in what a client saw of a prompt's answers."""
        self._finished.update(seen.finish_reasons)
        self._prompt.observe(seen.prompt_tokens)
        self._output.observe(seen.completion_tokens)
        self._gap_s.observe(np.frombuffer(seen.gaps_s, dtype="<f4"))
        if seen.ttft_s is not None:
            self._ttft_s.observe(seen.ttft_s)
        if "abort" not in seen.finish_reasons:
            self._total_s.observe(seen.total_s)

    def text(self, stats: Stats) -> str:
        """Everything in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*self._gauges(stats), *self._counters(stats), *self._histograms()]))
        return generate_latest(registry).decode()

    def _gauges(self, stats: Stats) -> Iterator[Metric]:
        pages = {"free": stats.pages_free, "cached": stats.pages_cached, "locked": stats.pages_locked}
        share = stats.pages_locked / sum(pages.values())
        kind = GaugeMetricFamily
        yield self._family(kind, "num_requests_running", "Requests that hold a slot.", stats.running)
        yield self._family(kind, "num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._family(kind, "kv_cache_usage_perc", "KV pages that requests hold, of all: 0 to 1.", share)
        yield self._family(kind, "kv_pages", "KV pages by state.", pages, "state")

    def _counters(self, stats: Stats) -> Iterator[Metric]:
        for name, documentation, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("generation_tokens", "Tokens that were generated.", self.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hit_tokens),
            ("num_preemptions", "Retractions of running requests.", stats.retractions),
            ("num_aborted_requests", "Requests that were aborted.", self.aborted),
            ("admission_rejections", "Requests that the full queue did not take.", self.rejected),
            ("scheduler_steps", "Steps that were launched.", stats.steps),
            ("forward_execution_seconds", "Time in steps.", self.busy_s),
            ("scheduler_idle_seconds", "Time without a request.", self.idle_s),
        ):
            yield self._family(CounterMetricFamily, name, documentation, value)
        ended = {reason: self._finished[reason] for reason in get_args(FinishReason)}
        yield self._family(CounterMetricFamily, "request_success", "Answers that have ended.", ended, "finished_reason")

    def _histograms(self) -> Iterator[Metric]:
        for each in (self._ttft_s, self._gap_s, self._total_s, self.queue_s, self._prompt, self._output):
            yield each.family(self._labels)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        value: float | Mapping[str, float],
        label: str | None = None,
    ) -> Metric:
        """A family of one value, or of one for each value of a label."""
        family = kind(_PREFIX + name, documentation, labels=[*self._labels, *([label] if label else [])])
        for key, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
            family.add_metric([*self._labels.values(), *([key] if key else [])], each)
        return family


@dataclass(frozen=True, eq=False)
class _Families(Collector):
    """Families as a registry takes them."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


class LoadLog:
    """A line about the load every `interval_s` seconds in which the engine worked; 0: none."""

    def __init__(self, metrics: Metrics, stats: Stats, interval_s: float) -> None:
        self._metrics, self._interval_s = metrics, interval_s
        self._since_s = time.monotonic()
        self._stats, self._tokens = stats, metrics.generation_tokens

    @property
    def is_due(self) -> bool:
        return 0 < self._interval_s <= time.monotonic() - self._since_s

    def write(self, stats: Stats) -> None:
        """Log what came since the last time, if anything did."""
        now_s, before = time.monotonic(), self._stats
        elapsed_s, tokens = now_s - self._since_s, self._metrics.generation_tokens - self._tokens
        prompt = stats.prompt_tokens - before.prompt_tokens
        hits = stats.prefix_hit_tokens - before.prefix_hit_tokens
        pages = stats.pages_free + stats.pages_cached + stats.pages_locked
        self._since_s, self._stats, self._tokens = now_s, stats, self._metrics.generation_tokens
        if stats.steps == before.steps:
            return
        logger.info(
            "%d running, %d waiting, %.0f tok/s out, %.0f in, KV %.0f%% locked and %.0f%% cached, prefix hits %.0f%%",
            stats.running, stats.waiting, tokens / elapsed_s, prompt / elapsed_s,
            100 * stats.pages_locked / pages, 100 * stats.pages_cached / pages, 100 * hits / max(prompt, 1),
        )  # fmt: skip
