"""From a run to its figures of phases and energy, tables, pictures, HTML and comparisons."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cli.main import main
from minisgl.bench import html, plot, record, report
from minisgl.bench.compare import Measure, differences, interval, unlike
from minisgl.bench.figures import pass_figures, phase_figures
from minisgl.bench.output import OutputConfig
from minisgl.bench.record import Ceilings, Event, GpuSample, Pass, Phase, RequestRecord, Run
from minisgl.bench.roofline import Roofline
from minisgl.source.model_config import read_model_config

MODEL = read_model_config(Path(__file__).parents[2] / "bench_configs" / "models" / "qwen3-0.6b")
CEILINGS = Ceilings(bytes_per_s=4e12, flops_per_s=8e14, dtype="bfloat16", source="measured")


def run(mode: Any, *passes: Pass, **changes: Any) -> Run:
    given: dict[str, Any] = {"engine": {"dtype": "bfloat16"}, "shape": asdict(MODEL), "ceilings": CEILINGS}
    fixed: dict[str, Any] = {"date": "", "model": "fake", "device": "Toaster", "machine": {}, "versions": {}}
    return Run(mode=mode, passes=list(passes), workload={}, **(fixed | given | changes))


def power(began_s: float, ended_s: float, watts: Callable[[float], float], **more: Any) -> list[GpuSample]:
    """Samples every 0.1 s, from a second before to a second after; the counter starts at 7 J."""
    times = np.arange(began_s - 1, ended_s + 1.05, 0.1)
    spent = 7 + np.cumsum([0.1 * watts(float(t) - 0.05) for t in times])
    return [
        GpuSample(time_s=float(t), gpu=0, power_w=watts(float(t)), energy_mj=round(1e3 * j), **more)
        for t, j in zip(times, spent, strict=True)
    ]


def repetition(name: str = "1", began_s: float = 100.0, scale: float = 1.0, **more: Any) -> Pass:
    """4 requests of 1000 tokens in, 500 cached of one, 101 out: 2 s of prefill, 8 s of decode, times `scale`."""
    middle_s, ended_s = began_s + 2 * scale, began_s + 10 * scale
    requests = [
        RequestRecord(
            intended_s=began_s,
            sent_s=began_s,
            events=[Event(middle_s, 1), Event(ended_s, 100)],
            ended_s=ended_s,
            asked_tokens=101,
            prompt_tokens=1000,
            completion_tokens=101,
            cached_tokens=500 if number == 0 else 0,
            finish_reason="length",
        )
        for number in range(4)
    ]
    return Pass(
        name=name,
        seed="0/0",
        began_s=began_s,
        ended_s=ended_s,
        requests=requests,
        phases=[
            Phase("prefill", began_s, middle_s, 4, 4000, 500, 4),
            Phase("decode", middle_s, ended_s, 4, 0, 0, 400),
        ],
        steps=[Event(middle_s, 4), *(Event(middle_s + (n + 1) * 0.08 * scale, 4) for n in range(100))],
        counters={"steps": 101.0, "retractions": 0.0},
        **more,
    )


def load(name: str, rate: float, ttfts_s: list[float], failed: int = 0) -> Pass:
    """Requests of 10 tokens, one every 1 / rate s, with these TTFTs, and 0.1 s for each later token."""
    requests = []
    for number, ttft_s in enumerate(ttfts_s):
        sent_s = number / rate
        events = [Event(sent_s + ttft_s + 0.1 * n) for n in range(10)]
        requests.append(
            RequestRecord(
                intended_s=sent_s,
                sent_s=sent_s,
                events=events,
                ended_s=events[-1].time_s,
                prompt_tokens=20,
                completion_tokens=10,
                cached_tokens=0,
            )
        )
    requests += [RequestRecord(intended_s=0.0, sent_s=0.0, ended_s=0.1, error="500: no") for _ in range(failed)]
    ended_s = max(each.ended_s or 0.0 for each in requests)
    return Pass(name=name, load={"qps": rate}, seed="0/0", began_s=0.0, ended_s=ended_s, requests=requests)


def shown(given: Run, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        report.show(given, console)
    return capture.get()


def rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


# Phases


def test_each_phase_has_its_time_its_bound_and_what_it_attained():
    given = run("throughput", repetition())
    roof = Roofline(MODEL, CEILINGS)
    prefill, decode = roof.prefill([(1000, 500), (1000, 0), (1000, 0), (1000, 0)]), roof.decode([(1000, 101)] * 4)
    figures = pass_figures(given, given.passes[0])
    assert (figures["prefill.time_s"], figures["decode.time_s"]) == (2, 8)
    assert (figures["prefill.least_s"], figures["prefill.compute_s"]) == (prefill.least_s, prefill.least_s)
    assert (figures["decode.least_s"], figures["decode.compute_s"]) == (decode.least_s, 0)
    assert (figures["prefill.tokens_per_s"], figures["decode.tokens_per_s"]) == (1750, 50)
    assert figures["decode.bound_share"] == pytest.approx(decode.least_s / 8)
    assert figures["decode.bytes_per_s"] == pytest.approx(decode.bytes / 8)
    assert figures["prefill.flops_per_s"] == pytest.approx(prefill.flops / 2)
    assert figures["bound_share"] == pytest.approx((prefill.least_s + decode.least_s) / 10)
    assert figures["mean_batch"] == pytest.approx(404 / 101)
    text = shown(given)
    assert "compute" in text and "memory" in text and "ceilings: 4,000 GB/s, 800.0 TFLOP/s, measured" in text


def test_a_mixed_phase_is_given_the_bound_of_what_was_decoded_in_it():
    part = repetition()
    part.phases = [Phase("mixed", 100.0, 102.0, 4, 4000, 500, 104), Phase("decode", 102.0, 110.0, 4, 0, 0, 300)]
    phases = phase_figures(run("throughput", part), part)
    roof = Roofline(MODEL, CEILINGS)
    prefill, whole = roof.prefill([(1000, 500), *[(1000, 0)] * 3]), roof.decode([(1000, 101)] * 4)
    assert phases["mixed"]["least_s"] == pytest.approx(prefill.least_s + whole.least_s / 4)
    assert phases["decode"]["least_s"] == pytest.approx(whole.least_s * 3 / 4)


def test_energy_is_told_apart_for_prefill_and_decode():
    state = {"sm_mhz": 1_755, "temperature_c": 61, "used_bytes": 123_400_000_000, "utilization": 0.98}
    part = repetition(samples=power(100.0, 110.0, lambda t: 700.0 if t < 102 else 400.0, **state))
    figures = pass_figures(run("throughput", part), part)
    assert figures["prefill.joules_per_token"] == pytest.approx(1400 / 3500, rel=0.05)
    assert figures["decode.joules_per_token"] == pytest.approx(3200 / 400, rel=0.05)
    assert figures["joules"] == pytest.approx(4600, rel=0.02)
    assert figures["joules_per_token"] == pytest.approx(4600 / 404, rel=0.02)
    assert figures["mean_power_w"] == pytest.approx(460, rel=0.02)
    assert figures["counter_per_power"] == pytest.approx(1, abs=0.05)
    assert re.search(r"1: 4,6\d\d J, 11\.\d+ J per output token, 46\d W \(counter, ", shown(run("throughput", part)))
    assert "1: GPU 1,755 MHz, 98% busy, at most 61 °C, at most 123.4 GB" in shown(run("throughput", part))


def test_repetitions_of_a_shape_are_taken_together():
    part = repetition("4 × 1000")
    for again in (repetition(began_s=200.0, scale=0.5), repetition(began_s=300.0, scale=2.0)):
        part.requests += again.requests
        part.phases += again.phases
        part.ended_s = again.ended_s
    text = rows(shown(run("latency", part)))
    assert next(row for row in text if " prefill " in row).startswith("4 × 1000 prefill 2,000 4,000 1,750 compute")
    assert next(row for row in text if " decode " in row).startswith("4 × 1000 decode 8,000 16,000 50.00 memory")
    assert "found in the prefix cache: 12.5% of a batch's prompt tokens at most" in text, "whatever is measured"


# Tables


def test_the_table_has_each_repetition_and_the_median_of_each_figure():
    passes = [repetition(str(n), began_s=100.0 * n, scale=scale) for n, scale in ((1, 1.0), (2, 4.0), (3, 2.0))]
    text = rows(shown(run("throughput", *passes, ceilings=None, no_ceilings="nobody measured")))
    assert text[0] == "throughput of fake in bfloat16 on Toaster"
    assert text[1] == "run output tok/s total tok/s time s steps mean batch in cached out"
    assert [row for row in text if row.startswith(("1 40", "2 10", "3 20", "median"))] == [
        "1 40.4 440.4 10.000 101 4.0 4,000 500 404",
        "2 10.1 110.1 40.000 101 4.0 4,000 500 404",
        "3 20.2 220.2 20.000 101 4.0 4,000 500 404",
        "median 20.2 220.2 20.000 101 4.0 4,000 500 404",
    ]
    assert "no bound: nobody measured" in text


def test_the_tables_say_what_would_mislead_silently():
    part = repetition(samples=power(100.0, 110.0, lambda _: 700.0, throttle_reasons=["power limit"], other_processes=1))
    part.counters["retractions"] = 3.0
    text = shown(run("throughput", part, no_nvml="nobody asked"))
    assert "SUSPECT 1: clocks were held back by the power limit in 100% of the samples" in text
    assert "SUSPECT 1: 1 other process computed on the same GPU" in text
    assert "1: 3 retractions: the KV pool is too small" in text
    assert "no power, energy and clocks: nobody asked" in text


def test_an_interrupted_run_shows_what_was_measured():
    whole, cut = repetition("1"), Pass(name="2", seed="0/1", began_s=200.0, interrupted=True)
    cut.requests = [RequestRecord(intended_s=200.0, sent_s=200.0)]
    text = shown(run("throughput", whole, cut))
    assert "2: interrupted, 1 requests had not ended" in text
    assert "median 40.4" in " ".join(text.split())
    assert "median" not in shown(run("throughput", cut))


def test_a_load_has_a_row_its_latencies_and_their_formulas():
    given = run("online", load("2 req/s", 2.0, [0.1, 0.2, 0.3, 0.4], failed=1), load={"slo": "ttft=350,tpot=200"})
    text = shown(given)
    assert re.search(r"TTFT +250\.00 +250\.00 +370\.00 +385\.00 +397\.00 +400\.00", text)
    assert re.search(r"ITL +100\.00 +100\.00", text)
    assert "60.0%" in text, "3 of 5 requests keep the SLO"
    assert "FAILED 2 req/s: 1 of 5 requests, the first: 500: no" in text
    for formula in ("TTFT = t1 − t0", "TPOT = (E2E − TTFT) / (N − 1)", "E2E = tN − t0", "goodput = "):
        assert formula in text
    with pytest.raises(ValueError, match="1 of 5 requests failed, the first: 500: no"):
        OutputConfig().keep(Console(quiet=True), given)


def test_every_file_and_the_tables_are_tried_whatever_fails_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    given, console = run("throughput", repetition()), Console(width=200)
    results = OutputConfig(output=str(tmp_path / "out.json"), html=str(tmp_path / "out.html"))
    for module in ("record.write", "report.show"):
        with monkeypatch.context() as patch, console.capture() as capture:
            patch.setattr(f"minisgl.bench.{module}", full)
            with pytest.raises(OSError, match="No space"):
                results.keep(console, given)
        assert (module == "report.show") == ("output tok/s" not in capture.get())
        written = {path.name for path in tmp_path.iterdir()}
        assert written == ({"out.html", "out.json"} if module == "report.show" else {"out.html"})


def test_tokens_that_came_together_and_doubts_are_told():
    part = load("2 req/s", 2.0, [0.1, 0.2])
    part.requests[0].events = part.requests[0].events[:1]
    text = shown(run("online", part))
    assert "2 req/s: 1.82 tokens in an event: ITL is from event to event" in text
    assert "SUSPECT 2 req/s: 1 of 2 answers came in one piece" in text


def test_no_number_of_the_standing_workload_is_cut_on_a_terminal_of_80_columns():
    part = repetition("1", scale=1.5)
    for request in part.requests:
        request.prompt_tokens, request.completion_tokens, request.cached_tokens = 35_707, 33_491, 3_086
    part.counters["steps"] = 1041.0
    text = shown(run("throughput", part), width=80)
    assert "…" not in text
    assert "median 8,930.9 " in " ".join(text.split()) and " 1,041 128.7 142,828 12,344 133,964" in " ".join(
        text.split()
    )


# Pictures and HTML


def pictured() -> list[Run]:
    powered = repetition(samples=power(100.0, 110.0, lambda _: 500.0))
    return [
        run("throughput", powered, repetition("2", 200.0)),
        run("latency", repetition("4 × 1000")),
        run("online", load("1 req/s", 1.0, [0.1, 0.2]), load("2 req/s", 2.0, [0.3, 0.5])),
        run("online", load("1 req/s", 1.0, [], failed=2)),
        run("online", *(load(f"{rate} req/s", rate, [0.1] * 3) for rate in range(1, 20)), model="$x$ \\$ $\\frac"),
        run("online", cut(load("1 req/s", 1.0, [0.1, 0.2]))),
        run("throughput", Pass(name="1", seed=0, began_s=1.0, interrupted=True)),
    ]


def cut(part: Pass) -> Pass:
    """An interrupted pass of one event, whose server counts nothing."""
    first = part.requests[0]
    first.events, first.ended_s, first.completion_tokens = first.events[:1], first.events[0].time_s, None
    part.requests[1].ended_s = None
    part.interrupted, part.ended_s = True, first.ended_s
    return part


@pytest.mark.parametrize("given", pictured())
def test_every_run_can_be_shown_and_drawn(given: Run, tmp_path: Path):
    assert given.model in shown(given)
    plot.draw(given, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    plot.draw(given, tmp_path / "out.svg")
    assert "</svg>" in (tmp_path / "out.svg").read_text()


def test_the_html_report_needs_no_other_file(tmp_path: Path):
    given = run("online", load("<2> req/s", 2.0, [0.1, 0.2]), sampling={"stop": "</pre>"})
    html.write(given, tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "<title>online of fake</title>" in page and "<svg" in page and "TPOT = (E2E − TTFT) / (N − 1)" in page
    assert "&lt;2&gt; req/s" in page and "&lt;/pre&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page)


def test_without_matplotlib_the_html_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minisgl.bench.output.find_spec", lambda _: None)
    html.write(run("latency", repetition()), tmp_path / "out.html")
    assert "needs matplotlib: pip install" in (tmp_path / "out.html").read_text()


# Comparisons


def several(seed: int, mean_s: float, spread_s: float = 0.02, count: int = 200) -> Run:
    ttfts_s = np.random.default_rng(seed).normal(mean_s, spread_s, count).clip(0.01).tolist()
    return run("online", load("2 req/s", 2.0, ttfts_s))


def verdicts(a: Run, b: Run, tolerance: float = 0.05) -> dict[str, str]:
    return {each.figure: each.verdict for each in differences(a, b, tolerance)}


def test_a_slower_run_is_worse_and_a_faster_one_better():
    slow, fast = several(1, 0.4), several(2, 0.2)
    assert verdicts(fast, slow)["TTFT ms, median"] == "worse"
    assert verdicts(slow, fast)["TTFT ms, median"] == "better"
    assert verdicts(fast, slow)["ITL ms, median"] == "", "it has not changed"


def test_a_change_within_the_tolerance_or_within_chance_is_none():
    assert verdicts(several(1, 0.200), several(2, 0.206))["TTFT ms, median"] == ""
    assert verdicts(several(1, 0.200), several(2, 0.206), tolerance=0.001)["TTFT ms, median"] == "worse"
    noisy = verdicts(several(1, 0.2, 0.15, 8), several(3, 0.26, 0.15, 8), tolerance=0.01)
    assert noisy["TTFT ms, median"] == "", "eight requests that differ as much"


def test_the_interval_is_the_bootstraps_and_covers_the_true_change():
    covered = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = (Measure(list(rng.normal(mean, 0.02, 60)), np.median) for mean in (0.2, 0.22))
        low, high = interval(a, b)
        covered += low <= 0.1 <= high
    assert covered >= 16, "95 % of 20 are 19"


def test_the_gaps_of_a_request_are_drawn_together_for_they_are_alike():
    rng = np.random.default_rng(0)
    groups = [np.full(100, gap) for gap in rng.normal(1.0, 0.2, 20)]
    together, apart = Measure(groups, np.mean), Measure(list(np.concatenate(groups)), np.mean)
    (low, high), (low_apart, high_apart) = interval(together, together), interval(apart, apart)
    assert high - low > 5 * (high_apart - low_apart)


def test_requests_that_fail_make_a_run_worse_however_fast_the_others_are():
    fast, broken = run("online", load("2 req/s", 2.0, [0.2] * 4)), run("online", load("2 req/s", 2.0, [0.1], failed=3))
    assert verdicts(fast, broken)["failed, share"] == "worse"
    assert verdicts(broken, fast)["failed, share"] == "better"
    assert verdicts(fast, fast)["failed, share"] == ""


def test_a_figure_that_was_zero_can_become_worse_or_better():
    def rated(ttft_s: float) -> Run:
        return run("online", load("2 req/s", 2.0, [ttft_s] * 4), load={"slo": "ttft=300"})

    assert verdicts(rated(0.4), rated(0.2))["goodput req/s"] == "better"
    assert verdicts(rated(0.2), rated(0.4))["goodput req/s"] == "worse"


def test_throughput_is_better_when_higher_and_phases_when_shorter():
    def repeated(scale: float) -> Run:
        scales = [scale * jitter for jitter in (0.99, 1.0, 1.01)]
        return run("throughput", *(repetition(str(n), 100.0 * n, each) for n, each in enumerate(scales)))

    assert verdicts(repeated(1.0), repeated(1.3)) == {"output tok/s": "worse"}
    assert verdicts(repeated(1.3), repeated(1.0)) == {"output tok/s": "better"}
    once = differences(run("throughput", repetition()), run("throughput", repetition(scale=1.3)), 0.05)
    assert [(each.verdict, each.interval) for each in once] == [("worse", None)]
    shapes = verdicts(run("latency", repetition("4 × 1000")), run("latency", repetition("4 × 1000", scale=0.5)))
    assert shapes == {"prefill ms, median": "better", "decode ms, median": "better"}


def test_runs_without_a_figure_in_common_cannot_be_compared():
    message = "the runs have no figure in common: one is of online: 2 req/s, the other of throughput: all at once"
    with pytest.raises(ValueError, match=re.escape(message)):
        differences(several(1, 0.2), run("throughput", repetition()), 0.05)


def test_what_else_differs_is_told():
    a = run("throughput", repetition(), engine={"dtype": "bfloat16", "tp": 1})
    b = run("throughput", repetition(), engine={"dtype": "bfloat16", "tp": 2}, devices=2)
    assert list(unlike(a, b)) == ["devices: 1 | 2", "engine.tp: 1 | 2"]


def test_the_exit_code_of_compare_says_whether_anything_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(tmp_path / name) for name in ("fast.json", "slow.json", "none.json")]
    for file, mean_s in zip(files, (0.2, 0.4), strict=False):
        record.write(several(1, mean_s), Path(file))
    (tmp_path / "none.json").write_text("{}")
    assert main(["compare", files[0], files[1]]) == 1
    out = capsys.readouterr().out
    assert "worse" in out and re.search(r"TTFT ms, median +\S+ +\S+ +\+9\d\.\d%|\+10\d\.\d%", out)
    assert main(["compare", files[1], files[0]]) == 0
    assert main(["compare", files[0], files[1], "--tolerance", "9"]) == 0
    assert main(["compare", files[0], files[1], "--tolerance", "-1"]) == 1
    assert "tolerance must be a number of at least 0, got -1.0" in capsys.readouterr().err
    assert main(["compare", files[0], files[1], "--tolerance", "nan"]) == 1
    assert "tolerance must be a number of at least 0, got nan" in capsys.readouterr().err
    assert main(["compare", files[0], files[2]]) == 1
    assert "none.json is no run of minisgl bench" in capsys.readouterr().err
