"""Every figure of `minisgl bench` about requests, computed once more from the raw file, in another way."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.bench.load import parse_slo
from minisgl.bench.metrics import (
    FORMULAS,
    LATENCIES,
    SPREAD,
    doubts,
    highest_rate,
    keeps_slo,
    latencies,
    spread,
    totals,
)
from minisgl.bench.record import Event, Lag, Pass, RequestRecord, Run, machine_facts, read, versions, write

SLO = {"ttft": 0.3, "tpot": 0.06, "e2e": 3.0}


def made_up(seed: int, count: int = 60) -> Pass:
    """A pass with everything in it that happens."""
    rng = random.Random(seed)
    measured = Pass(name="1", load={"qps": 20.0}, seed=seed, began_s=100.0)
    for number in range(count):
        intended_s = 100.0 + number / 20
        sent_s = intended_s + rng.random() / 50
        times = [sent_s + rng.uniform(0.05, 0.5)]
        for _ in range(rng.randrange(30)):
            times.append(times[-1] + rng.uniform(0.01, 0.2))
        request = RequestRecord(
            intended_s=intended_s,
            sent_s=sent_s,
            events=[Event(at) for at in times],
            ended_s=times[-1] + 0.001,
            prompt_tokens=rng.randint(1, 900),
            completion_tokens=len(times) + rng.randrange(3),
            cached_tokens=rng.choice([None, 16, 0]),
        )
        match number % 10:
            case 3:
                request.error = "broke off"
            case 5:
                request.ended_s = None
            case 7:
                request.completion_tokens = None
            case 8:
                request.events = request.events[:1]
                request.completion_tokens = 1
        measured.requests.append(request)
    measured.requests.append(RequestRecord(intended_s=103.0, sent_s=103.0, ended_s=103.1, error="refused"))
    measured.lags = [Lag(100.0 + n / 10, rng.random() / 100) for n in range(50)]
    measured.ended_s = max(r.ended_s for r in measured.requests if r.ended_s is not None)
    return measured


def a_run(*passes: Pass) -> Run:
    return Run(
        date="2026-01-01",
        mode="online",
        model="m",
        device="d",
        machine=machine_facts(),
        versions=versions(),
        workload={"requests": 60},
        passes=list(passes),
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_figure_follows_from_the_raw_file(seed: int, tmp_path: Path):
    measured = made_up(seed)
    write(a_run(measured), tmp_path / "run.json")
    (raw,) = json.loads((tmp_path / "run.json").read_text())["passes"]
    good = [r for r in raw["requests"] if r["error"] is None and r["ended_s"] is not None]
    t0, t1, tn, meant = (
        np.array(each)
        for each in zip(
            *((r["sent_s"], r["events"][0][0], r["events"][-1][0], r["intended_s"]) for r in good), strict=True
        )
    )
    tokens = np.array([math.nan if r["completion_tokens"] is None else r["completion_tokens"] for r in good])
    several = tokens > 1
    tpot = (tn - t1)[several] / (tokens[several] - 1)
    expected: dict[str, Any] = {
        "ttft_s": t1 - t0,
        "tpot_s": tpot,
        "itl_s": np.concatenate([np.diff([at for at, _ in r["events"]]) for r in good]),
        "e2e_s": tn - t0,
        "late_ttft_s": t1 - meant,
        "late_e2e_s": tn - meant,
        "late_s": t0 - meant,
    }
    found = latencies(measured.requests)
    assert found.keys() == expected.keys() == set(LATENCIES)
    for name, each in expected.items():
        assert found[name] == pytest.approx(each), name
        ordered = np.sort(each)
        shown = spread(found[name])
        assert shown["mean"] == pytest.approx(ordered.sum() / len(ordered))
        assert shown["max"] == ordered[-1]
        for label, share in (("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
            place = share * (len(ordered) - 1)
            below, above = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
            assert shown[label] == pytest.approx(below + (above - below) * (place - int(place)))

    ends = [r["ended_s"] for r in raw["requests"] if r["ended_s"] is not None]
    duration = max(ends) - raw["began_s"]
    sums = {n: np.nansum(np.array([r[n] for r in good], dtype=float)) for n in ("prompt_tokens", "cached_tokens")}
    worst_tpot = np.zeros(len(good))
    worst_tpot[several] = tpot
    worst_tpot[np.isnan(tokens)] = np.inf
    kept = ((t1 - t0 <= 0.3) & (worst_tpot <= 0.06) & (tn - t0 <= 3.0)).sum()
    assert 0 < kept < len(good)
    planned = [r["intended_s"] for r in raw["requests"]]
    assert totals(measured, SLO) == pytest.approx(
        {
            "completed": 48,
            "failed": 7,
            "unfinished": 6,
            "duration_s": duration,
            "tokens_in": sums["prompt_tokens"],
            "tokens_cached": sums["cached_tokens"],
            "tokens_out": np.nansum(tokens),
            "cache_hit_rate": sums["cached_tokens"] / sums["prompt_tokens"],
            "tokens_per_event": np.nansum(tokens) / sum(len(r["events"]) for r in good),
            "offered_per_s": (len(planned) - 1) / (max(planned) - min(planned)),
            "requests_per_s": len(good) / duration,
            "output_tokens_per_s": np.nansum(tokens) / duration,
            "total_tokens_per_s": (np.nansum(tokens) + sums["prompt_tokens"]) / duration,
            "client_lag_s": np.quantile([lag for _, lag in raw["lags"]], 0.99),
            "slo_share": kept / len(planned),
            "goodput_per_s": kept / duration,
        }
    )


def test_every_figure_has_its_formula():
    figures = {*latencies([]), *totals(made_up(0), SLO)}
    counted = {"completed", "failed", "unfinished", "duration_s", "tokens_in", "tokens_cached", "tokens_out"}
    assert figures - counted - {"tokens_per_event"} == set(FORMULAS)
    assert tuple(spread(np.array([1.0]))) == SPREAD


def test_of_nothing_there_are_no_figures_that_divide():
    empty = Pass(name="1", seed=0, began_s=1.0)
    figures = totals(empty, SLO)
    assert set(figures.values()) == {0}
    assert not any(name.endswith("per_s") for name in figures)
    assert [spread(each) for each in latencies([]).values()] == [{}] * len(LATENCIES)
    assert (doubts(empty), keeps_slo(empty, SLO, 0.1)) == ([], False)


def test_a_run_comes_back_from_its_file_as_it_was(tmp_path: Path):
    run = a_run(made_up(1), made_up(2))
    write(run, tmp_path / "run.json")
    assert read(tmp_path / "run.json") == run
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no run of minisgl bench --output: Object missing required field `mode`"),
        ("", "is no run of minisgl bench --output"),
        (None, "cannot read"),
    ],
)
def test_another_file_is_refused(text: str | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "run.json")


def test_a_file_of_another_format_is_refused(tmp_path: Path):
    run = a_run()
    run.format = 1
    write(run, tmp_path / "run.json")
    with pytest.raises(ValueError, match="has format 1, and this minisgl reads format 2: measure again"):
        read(tmp_path / "run.json")


def test_an_slo_is_in_milliseconds():
    assert parse_slo("ttft=500, tpot=2.5") == {"ttft": 0.5, "tpot": 0.0025}
    assert parse_slo("e2e=1000") == {"e2e": 1.0}


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=-1", "ttft=0", "ttft=nan", "itl=5", "ttft=5,ttft=6", "=5"])
def test_an_slo_that_makes_no_sense_is_refused(text: str):
    with pytest.raises(ValueError, match="slo must be like ttft=500,tpot=50, in ms, of ttft, tpot, e2e, got"):
        parse_slo(text)


def good_pass(rate: float, *ttfts_s: float) -> Pass:
    requests = [
        RequestRecord(
            intended_s=0.0,
            sent_s=0.0,
            events=[Event(ttft_s)],
            ended_s=ttft_s,
            asked_tokens=1,
            prompt_tokens=1,
            completion_tokens=1,
        )
        for ttft_s in ttfts_s
    ]
    return Pass(name="", load={"qps": rate}, seed=0, began_s=0.0, requests=requests)


def test_the_highest_rate_is_that_of_enough_good_requests_and_no_failed_one():
    three, two, one = good_pass(4, 0.1, 0.1, 0.1), good_pass(8, 0.1, 0.1, 0.9), good_pass(16, 0.1, 0.9, 0.9)
    passes = [one, three, two]
    assert highest_rate(passes, {"ttft": 0.1}, 0.6) == 8
    assert highest_rate(passes, {"ttft": 0.1}, 0.7) == 4
    assert highest_rate(passes, {"ttft": 0.05}, 0.1) is None
    two.requests[0].error = "no"
    assert highest_rate(passes, {"ttft": 0.1}, 0.3) == 16
    assert highest_rate(passes, {"ttft": 0.1}, 0.6) == 4
    three.interrupted = True
    assert highest_rate(passes, {"ttft": 0.1}, 0.6) is None, "its later requests might not have kept it"


def test_a_pass_says_what_speaks_against_it():
    measured = good_pass(4, *[0.1] * 100)
    assert doubts(measured) == []
    measured.requests[0].completion_tokens = None
    measured.requests[1].asked_tokens = 2
    measured.lags = [Lag(0.0, 0.0)] * 90 + [Lag(1.0, 0.5)] * 10
    for request in measured.requests[2:5]:
        request.sent_s = 0.025
    assert doubts(measured) == [
        "the client could not keep up: its event loop was 500 ms late (p99)",
        "the client could not keep up: requests left 25 ms after their time (p99)",
        "1 of 100 answers came without usage: their tokens are not counted",
        "1 of 100 answers are shorter than was asked for",
    ]
    measured.load["concurrency"] = 4
    assert len(doubts(measured)) == 3, "who waits for room leaves late"
