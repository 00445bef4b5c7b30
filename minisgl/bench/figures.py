"""All figures of a pass: those of its requests, which `metrics` computes, and of its phases, roofline and energy.

A phase's bound is what `roofline` says of its requests. Where other requests decoded beside prompts (a mixed phase),
that phase is given decode's bound for the share of decoded tokens that came in it, and decode the rest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import truediv
from statistics import mean, median

import msgspec

from minisgl.bench import metrics, nvml
from minisgl.bench.load import parse_slo
from minisgl.bench.metrics import FORMULAS, latencies, spread, totals
from minisgl.bench.nvml import energy, joules
from minisgl.bench.record import GpuSample, Pass, Phase, Run
from minisgl.bench.roofline import Need, Roofline
from minisgl.source.model_config import ModelConfig

Figures = Mapping[str, float]


def label(name: str) -> str:
    """How a report calls a figure of `metrics`."""
    return FORMULAS[name].partition(" = ")[0]


def digits(value: float | None) -> str:
    """A number with four digits, or all that are before its point; a dash for what is not known."""
    if value is None:
        return "–"
    places = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(places, 0)}f}"


def roofline_of(run: Run) -> Roofline | str:
    """The roofline of a run's model on its devices; or why there is none."""
    if run.ceilings is None:
        return run.no_ceilings or "the device is not known"
    if run.shape is None:
        return "the model's shape is not known"
    return Roofline(msgspec.convert(run.shape, ModelConfig), run.ceilings, run.devices)


def phase_figures(run: Run, part: Pass) -> dict[str, Figures]:
    """Of each phase that a pass has, in the order of work, over its repetitions.

    `time_s` and `tokens_per_s`, medians, `mean_s` and `max_s`; tokens are those computed of prompts in a prefill,
    brought in a decode. Where the roofline is known: `least_s`, of which `compute_s` by computing (means),
    `bound_share` = `least_s` / `mean_s`, and `bytes_per_s` and `flops_per_s`, needed / time. `joules_per_token`, of
    repetitions that were long enough to tell.
    """
    found: dict[str, list[tuple[Phase, Need | None]]] = {}
    for phase, need in _with_needs(run, part):
        found.setdefault(phase.name, []).append((phase, need))
    return {name: dict(_phase(rows, part.samples)) for name, rows in found.items()}


def _phase(rows: Sequence[tuple[Phase, Need | None]], samples: Sequence[GpuSample]) -> Iterator[tuple[str, float]]:
    times_s = [phase.ended_s - phase.began_s for phase, _ in rows]
    tokens = [p.tokens_out if p.name == "decode" else p.tokens_in - p.tokens_cached for p, _ in rows]
    yield from {"time_s": median(times_s), "mean_s": mean(times_s), "max_s": max(times_s)}.items()
    yield "tokens_per_s", median(map(truediv, tokens, times_s))
    if needs := [need for _, need in rows if need is not None]:
        need, mean_s = sum(needs, Need()) * (1 / len(needs)), mean(times_s)
        yield from {"least_s": need.least_s, "compute_s": need.compute_s, "bound_share": need.least_s / mean_s}.items()
        yield from {"bytes_per_s": need.bytes / mean_s, "flops_per_s": need.flops / mean_s}.items()
    used = [energy(samples, phase.began_s, phase.ended_s) for phase, _ in rows]
    if known := [(joules[0], count) for joules, count in zip(used, tokens, strict=True) if joules and count]:
        yield "joules_per_token", sum(j for j, _ in known) / sum(count for _, count in known)


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


def doubts(run: Run, part: Pass) -> Iterator[str]:
    """What speaks against the figures of a pass."""
    found = [*(metrics.doubts(part) if run.mode == "online" else ()), *nvml.doubts(part.samples)]
    yield from (f"SUSPECT {part.name}: {doubt}" for doubt in found)
    if bad := metrics.failed(part.requests):
        yield f"FAILED {part.name}: {len(bad)} of {len(part.requests)} requests, the first: {bad[0].error}"


def pass_figures(run: Run, part: Pass) -> dict[str, float]:
    """By name, in seconds, tokens and joules; what is not known is left out.

    `metrics.totals`, `metrics.spread` of each latency like `ttft_s.p99` (offline without ITL: the engine is not read
    token by token), and

    * `steps`, `retractions` of the engine; `mean_batch` = tokens out / steps;
    * `joules` of all GPUs, `mean_power_w` = joules / time, `joules_per_token` = joules / tokens out, and
      `counter_per_power` = energy by the counter / power integrated over the time;
    * `sm_mhz` and `utilization`, means over the samples of GPUs, `temperature_c` and `used_bytes`, maxima;
    * those of each phase, like `decode.time_s`; `bound_share`: least time of all phases / time.
    """
    found = totals(part, parse_slo(run.load["slo"]) if run.load.get("slo") else None)
    for name, values in latencies(part.requests).items():
        if run.mode == "online" or name != "itl_s":
            found |= {f"{name}.{statistic}": value for statistic, value in spread(values).items()}
    found |= part.counters
    if found.get("steps") and "tokens_out" in found:
        found["mean_batch"] = found["tokens_out"] / found["steps"]
    for name, of in (("sm_mhz", mean), ("temperature_c", max), ("used_bytes", max), ("utilization", mean)):
        if values := [value for sample in part.samples if (value := getattr(sample, name)) is not None]:
            found[name] = of(values)
    phases = phase_figures(run, part)
    found |= {f"{phase}.{name}": value for phase, figures in phases.items() for name, value in figures.items()}
    if bounds := [(each["least_s"], each["mean_s"]) for each in phases.values() if "least_s" in each]:
        found["bound_share"] = truediv(*map(sum, zip(*bounds, strict=True)))
    return found | _energy(part, found)


def _energy(part: Pass, found: dict[str, float]) -> dict[str, float]:
    ended_s = part.began_s + found["duration_s"]
    used = energy(part.samples, part.began_s, ended_s)
    if used is None:
        return {}
    figures = {"joules": used[0], "mean_power_w": used[0] / found["duration_s"]}
    if found.get("tokens_out"):
        figures["joules_per_token"] = used[0] / found["tokens_out"]
    if used[1] == "counter" and (integrated := joules("power", part.samples, part.began_s, ended_s)):
        figures["counter_per_power"] = used[0] / integrated
    return figures
