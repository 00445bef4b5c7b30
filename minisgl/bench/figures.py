"""All figures of a pass: those of its requests, which `metrics` computes, and of its phases, roofline and energy.

A phase's bound is what `roofline` says of its requests. Where other requests decoded beside prompts (a mixed phase),
that phase is given decode's bound for the share of decoded tokens that came in it, and decode the rest.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import truediv
from statistics import mean, median

import msgspec

from minisgl.bench.load import parse_slo
from minisgl.bench.metrics import FORMULAS, latencies, spread, totals
from minisgl.bench.nvml import energy, joules
from minisgl.bench.record import GpuSample, Pass, Phase, Run
from minisgl.bench.roofline import Need, Roofline
from minisgl.source.model_config import ModelConfig


@dataclass(frozen=True)
class PhaseFigures:
    """A phase over the repetitions of a pass."""

    name: str
    times_s: list[float]
    tokens_per_s: float  # median; of tokens computed of prompts in a prefill, brought in a decode
    need: Need | None  # mean
    joules_per_token: float | None  # of those repetitions that were long enough to tell


def label(name: str) -> str:
    """How a report calls a figure of `metrics`."""
    return FORMULAS[name].partition(" = ")[0]


def digits(value: float) -> str:
    """A number with four digits, or all that are before its point."""
    places = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(places, 0)}f}"


def roofline_of(run: Run) -> Roofline | str:
    """The roofline of a run's model on its devices; or why there is none."""
    if run.ceilings is None:
        return run.no_ceilings or "the device is not known"
    if run.shape is None:
        return "the model's shape is not known"
    return Roofline(msgspec.convert(run.shape, ModelConfig), run.ceilings, run.devices)


def phase_figures(run: Run, part: Pass) -> list[PhaseFigures]:
    """Of each phase that a pass has, in the order of work."""
    found: dict[str, list[tuple[Phase, Need | None]]] = {}
    for phase, need in _with_needs(run, part):
        found.setdefault(phase.name, []).append((phase, need))
    return [_phase(name, rows, part.samples) for name, rows in found.items()]


def _phase(name: str, rows: Sequence[tuple[Phase, Need | None]], samples: Sequence[GpuSample]) -> PhaseFigures:
    phases, needs = [phase for phase, _ in rows], [need for _, need in rows if need is not None]
    times_s = [phase.ended_s - phase.began_s for phase in phases]
    tokens = [p.tokens_out if name == "decode" else p.tokens_in - p.tokens_cached for p in phases]
    used = [energy(samples, phase.began_s, phase.ended_s) for phase in phases]
    known = [(joules[0], count) for joules, count in zip(used, tokens, strict=True) if joules and count]
    return PhaseFigures(
        name,
        times_s,
        tokens_per_s=median(map(truediv, tokens, times_s)),
        need=sum(needs, Need()) * (1 / len(needs)) if needs else None,
        joules_per_token=sum(j for j, _ in known) / sum(count for _, count in known) if known else None,
    )


def _with_needs(run: Run, part: Pass) -> Iterator[tuple[Phase, Need | None]]:
    roof = roofline_of(run)
    for first in (phase for phase in part.phases if phase.name != "decode"):
        decode = [phase for phase in part.phases if phase.name == "decode" and phase.began_s == first.ended_s]
        needs: list[Need | None] = [None, None]
        if isinstance(roof, Roofline):
            requests = [request for request in part.requests if request.intended_s == first.began_s]
            lengths = [(r.prompt_tokens or 0, r.completion_tokens or 0) for r in requests]
            decoding, decoded = roof.decode(lengths), sum(out - 1 for _, out in lengths)
            share = decode[0].tokens_out / decoded if decode else 0.0
            prefill = roof.prefill([(r.prompt_tokens or 0, r.cached_tokens or 0) for r in requests])
            needs = [prefill + decoding * (1 - share), decoding * share]
        yield from zip([first, *decode], needs, strict=False)


def pass_figures(run: Run, part: Pass) -> dict[str, float]:
    """By name, in seconds, tokens and joules; what is not known is left out.

    `metrics.totals`, `metrics.spread` of each latency like `ttft_s.p99` (offline without ITL: the engine is not read
    token by token), and

    * `steps`, `retractions` of the engine; `mean_batch` = tokens out / steps;
    * `joules` of all GPUs, `mean_power_w` = joules / time, `joules_per_token` = joules / tokens out, and
      `counter_per_power` = energy by the counter / power integrated over the time;
    * `sm_mhz` and `utilization`, means over the samples of GPUs, `temperature_c` and `used_bytes`, maxima;
    * of each phase, like `decode.time_s` (median of the repetitions), `decode.tokens_per_s`, `decode.bound_share`,
      `decode.bytes_per_s` and `decode.flops_per_s` (needed / time), `decode.joules_per_token`;
    * `bound_share`: least time of all phases / time.
    """
    found = totals(part, parse_slo(run.load["slo"]) if run.load.get("slo") else None)
    for name, values in latencies(part.requests).items():
        if run.mode == "online" or name != "itl_s":
            found |= {f"{name}.{statistic}": value for statistic, value in spread(values).items()}
    found |= part.counters
    if found.get("steps"):
        found["mean_batch"] = found["tokens_out"] / found["steps"]
    for name, of in (("sm_mhz", mean), ("temperature_c", max), ("used_bytes", max), ("utilization", mean)):
        if values := [value for sample in part.samples if (value := getattr(sample, name)) is not None]:
            found[name] = of(values)
    return found | _energy(part, found) | _phases(run, part)


def _energy(part: Pass, found: dict[str, float]) -> dict[str, float]:
    ended_s = part.began_s + found["duration_s"]
    used = energy(part.samples, part.began_s, ended_s)
    if used is None:
        return {}
    figures = {"joules": used[0], "mean_power_w": used[0] / found["duration_s"]}
    if found["tokens_out"]:
        figures["joules_per_token"] = used[0] / found["tokens_out"]
    if used[1] == "counter" and (integrated := joules("power", part.samples, part.began_s, ended_s)):
        figures["counter_per_power"] = used[0] / integrated
    return figures


def _phases(run: Run, part: Pass) -> dict[str, float]:
    figures, least_s, time_s = {}, 0.0, 0.0
    for phase in phase_figures(run, part):
        name, mean_s = phase.name, mean(phase.times_s)
        figures |= {f"{name}.time_s": median(phase.times_s), f"{name}.tokens_per_s": phase.tokens_per_s}
        if phase.joules_per_token is not None:
            figures[f"{name}.joules_per_token"] = phase.joules_per_token
        if need := phase.need:
            figures[f"{name}.bound_share"] = need.least_s / mean_s
            figures[f"{name}.bytes_per_s"], figures[f"{name}.flops_per_s"] = need.bytes / mean_s, need.flops / mean_s
            least_s, time_s = least_s + need.least_s, time_s + mean_s
    return figures | ({"bound_share": least_s / time_s} if time_s else {})
