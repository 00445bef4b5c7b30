"""Figures of requests, from what was recorded of them: pure functions, and the formulas as a report shows them.

t0 is when a request was sent, t1 when its first content came and tN its last, N its output tokens as usage counts them.
TTFT, TPOT, ITL, E2E and goodput are what vLLM's and SGLang's benchmarks call so. Only requests that ended without an
error count, in latencies as in throughput.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from types import MappingProxyType

import numpy as np

from minisgl.bench.load import Slo
from minisgl.bench.record import Pass, RequestRecord

FORMULAS: Mapping[str, str] = MappingProxyType(
    {
        "ttft_s": "TTFT = t1 − t0, t1 at the first event with content",
        "tpot_s": "TPOT = (E2E − TTFT) / (N − 1), of requests with N > 1",
        "itl_s": "ITL = each gap between two events with content, of all requests together",
        "e2e_s": "E2E = tN − t0",
        "late_ttft_s": "TTFT from intended = t1 − when the load meant to send",
        "late_e2e_s": "E2E from intended = tN − when the load meant to send",
        "late_s": "send delay = t0 − when the load meant to send",
        "output_tokens_per_s": "output tok/s = ΣN / duration, from the first intended send to the last end",
        "total_tokens_per_s": "total tok/s = (Σ prompt tokens + ΣN) / duration",
        "requests_per_s": "req/s = requests without an error / duration",
        "offered_per_s": "offered req/s = (requests − 1) / (last intended send − first)",
        "cache_hit_rate": "cache hits = Σ cached / Σ prompt tokens",
        "goodput_per_s": "goodput = requests that keep the SLO / duration, TPOT being 0 where N ≤ 1, ∞ if N is unknown",
        "slo_share": "in SLO = requests that keep the whole SLO / requests, failed ones included",
        "client_lag_s": "client lag = how late the client's event loop noticed moments 10 ms apart, p99",
    }
)
"""Of each figure, how it is computed."""

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "late_ttft_s", "late_e2e_s", "late_s")
SPREAD = ("mean", "median", "p90", "p95", "p99", "max")

LATE_S = 0.02
"""A client that is later than this, in one of a hundred cases, distorts what it measures."""


def succeeded(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that ended without an error, and said something."""
    return [r for r in requests if r.ended_s is not None and r.error is None and r.events and r.sent_s is not None]


def failed(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that ended with an error; one that an interrupt cut off has not ended."""
    return [r for r in requests if r.error is not None]


def latencies(requests: Sequence[RequestRecord]) -> dict[str, np.ndarray]:
    """Of each name of `LATENCIES`, all values in seconds, in the order of the requests; `FORMULAS` says which."""
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for request in succeeded(requests):
        for name, value in of_request(request).items():
            values[name].append(value)
        values["itl_s"] += [b.time_s - a.time_s for a, b in pairwise(request.events)]
    return {name: np.array(each, dtype=np.float64) for name, each in values.items()}


def of_request(request: RequestRecord) -> dict[str, float]:
    """The latencies of one request that succeeded, without ITL, of which it has many."""
    assert request.sent_s is not None
    first_s, last_s = request.events[0].time_s, request.events[-1].time_s
    values = {
        "ttft_s": first_s - request.sent_s,
        "e2e_s": last_s - request.sent_s,
        "late_ttft_s": first_s - request.intended_s,
        "late_e2e_s": last_s - request.intended_s,
        "late_s": request.sent_s - request.intended_s,
    }
    if request.completion_tokens is not None and request.completion_tokens > 1:
        values["tpot_s"] = (last_s - first_s) / (request.completion_tokens - 1)
    return values


def keeps(request: RequestRecord, slo: Slo) -> bool:
    """Whether a request that succeeded keeps every limit."""
    values = {"tpot_s": inf if request.completion_tokens is None else 0.0} | of_request(request)
    return all(values[f"{name}_s"] <= limit_s for name, limit_s in slo.items())


def spread(values: np.ndarray) -> dict[str, float]:
    """Mean, median, percentiles (linear, as numpy's) and maximum; nothing of no values."""
    if not len(values):
        return {}
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99])
    figures = (values.mean(), p50, p90, p95, p99, values.max())
    return {name: float(value) for name, value in zip(SPREAD, figures, strict=True)}


def totals(measured: Pass, slo: Slo | None = None) -> dict[str, float]:
    """The figures of a pass that are one number; those that are not known, or would divide by nothing, are left out.

    `completed`, `failed`, `unfinished` requests, `duration_s`, `tokens_in`, `tokens_cached`, `tokens_out`,
    `tokens_per_event`, and what `FORMULAS` has beside latencies.
    """
    requests = measured.requests
    good, bad = succeeded(requests), failed(requests)
    ends = [r.ended_s for r in requests if r.ended_s is not None] or [measured.began_s]
    duration_s = (measured.ended_s or max(ends)) - measured.began_s
    figures: dict[str, float] = {
        "completed": len(good),
        "failed": len(bad),
        "unfinished": len(requests) - len(good) - len(bad),
        "duration_s": duration_s,
    }
    counts = {"tokens_in": "prompt_tokens", "tokens_cached": "cached_tokens", "tokens_out": "completion_tokens"}
    for name, field in counts.items():
        known = [count for r in good if (count := getattr(r, field)) is not None]
        figures |= {name: sum(known)} if known or not good else {}
    if figures.get("tokens_in") and "tokens_cached" in figures:
        figures["cache_hit_rate"] = figures["tokens_cached"] / figures["tokens_in"]
    if good and "tokens_out" in figures:
        figures["tokens_per_event"] = figures["tokens_out"] / sum(len(r.events) for r in good)
    planned = [r.intended_s for r in requests]
    if _is_timed(measured) and len(planned) > 1 and max(planned) > min(planned):
        figures["offered_per_s"] = (len(planned) - 1) / (max(planned) - min(planned))
    amounts: dict[str, float] = {"requests_per_s": len(good)}
    if "tokens_out" in figures:
        amounts["output_tokens_per_s"] = figures["tokens_out"]
        if "tokens_in" in figures:
            amounts["total_tokens_per_s"] = figures["tokens_in"] + figures["tokens_out"]
    if measured.lags:
        figures["client_lag_s"] = float(np.percentile([lag.lag_s for lag in measured.lags], 99))
    if slo and requests:
        amounts["goodput_per_s"] = sum(keeps(request, slo) for request in good)
        figures["slo_share"] = amounts["goodput_per_s"] / len(requests)
    return figures | ({name: amount / duration_s for name, amount in amounts.items()} if duration_s > 0 else {})


def keeps_slo(measured: Pass, slo: Slo, share: float) -> bool:
    """Whether so many of a whole pass's requests keep the SLO, and none failed."""
    figures = totals(measured, slo)
    return not (measured.interrupted or figures["failed"]) and figures.get("slo_share", 0.0) >= share


def highest_rate(passes: Sequence[Pass], slo: Slo, share: float) -> float | None:
    """The highest rate of those that were tried and kept the SLO."""
    return max((each.load["qps"] for each in passes if keeps_slo(each, slo, share)), default=None)


def _is_timed(measured: Pass) -> bool:
    """Whether its requests had times to be sent at, instead of turns."""
    return "qps" in measured.load or "trace_speed" in measured.load


def doubts(measured: Pass) -> list[str]:
    """Why the latencies of a pass may not be the server's; empty where nothing speaks against them."""
    good, found = succeeded(measured.requests), []
    if (lag_s := totals(measured).get("client_lag_s", 0.0)) > LATE_S:
        found.append(f"the client could not keep up: its event loop was {lag_s * 1e3:.0f} ms late (p99)")
    if _is_timed(measured) and "concurrency" not in measured.load:
        delays = [r.sent_s - r.intended_s for r in measured.requests if r.sent_s is not None]
        if delays and (late_s := float(np.percentile(delays, 99))) > LATE_S:
            found.append(f"the client could not keep up: requests left {late_s * 1e3:.0f} ms after their time (p99)")
    if unknown := sum(r.completion_tokens is None for r in good):
        found.append(f"{unknown} of {len(good)} answers came without usage: their tokens are not counted")
    if other := sum(r.completion_tokens not in (None, r.asked_tokens) for r in good if r.asked_tokens):
        found.append(f"{other} of {len(good)} answers are shorter than was asked for")
    if whole := sum(len(r.events) == 1 and (r.completion_tokens or 0) > 1 for r in good):
        found.append(f"{whole} of {len(good)} answers came in one piece: TTFT and TPOT are not of their tokens")
    return found
