"""The report on recorded traces whose every time is known: figures, tables, HTML, comparison."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from minisgl.bench.record import write_whole
from minisgl.config import EngineConfig
from minisgl.profiling import report, trace
from minisgl.profiling.figures import Figures, Line, PhaseFigures, _lines, figures
from minisgl.profiling.groups import group_of, short
from minisgl.source.model_config import read_model_config

HOST, DEVICE = {"pid": 100, "tid": 1}, {"pid": 0, "tid": 7}
BODY, HEAD = 2 * 8 * (2 + 1) * 4 + 3 * 8 * 16, 8 * 32  # weights of the model below
WEIGHT_BYTES, KV_BYTES = 2 * (BODY + HEAD), 2 * 1 * 4 * 2  # all of them, and a token's
BYTES_PER_S = WEIGHT_BYTES / 12e-6  # so that they are read in 12 µs
FLOPS_PER_S = 1e12


def event(cat: str, name: str, begin: float, end: float, where: dict[str, int], **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args, **where}


def part(name: str, begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"minisgl.{name}", begin, end, HOST)


def kernel(number: int, name: str, asked: float, begin: float, end: float, **more: Any) -> list[dict[str, Any]]:
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event("cuda_runtime", "cudaLaunchKernel", asked, asked + 1, HOST, correlation=number),
        event(cat, name, begin, end, DEVICE, correlation=number, device=0, stream=7, **more),
    ]


def step(tokens: int = 6, **more: Any) -> dict[str, Any]:
    rows = {"decode_rows": tokens, "decode_context": 0, "prompts": [], "samples": tokens}
    return {"tokens": tokens, **rows, **more}


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    rest = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | rest))
    return {
        "model": "tiny",
        "device": "a device",
        "versions": {"torch": "2"},
        "engine": asdict(EngineConfig(dtype="bfloat16", cuda_graph=True)),
        "shape": asdict(read_model_config(tmp_path)),
        "ceilings": {"bytes_per_s": BYTES_PER_S, "flops_per_s": FLOPS_PER_S, "dtype": "bfloat16", "source": "made up"},
        "settling": 1,
        "plain_step_us": 100.0,
        "steps": [step(), step(decode_context=100, graph_tokens=8), step(decode_context=104, graph_tokens=8)],
    }


@pytest.fixture
def recorded(facts: dict[str, Any]) -> dict[str, Any]:
    """Three decode steps: the first is not counted.

    In the second, attention begins while GEMM still runs, and sampling beside attention on another stream. In the third
    the device runs dry while the host waits for it, and then has a copy between kernels.
    """
    return {
        "minisgl": facts,
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "args": {"name": "python"}},
            *(part("step#0", 0, 100), part("schedule#0", 0, 10), part("launch#0 decode of 6 rows", 20, 60)),
            *kernel(1, "nvjet_tst_64x8", 30, 50, 90),
            *kernel(2, "_decode_attention_kernel", 40, 90, 120),
            *(part("step#1", 100, 200), part("schedule#1", 100, 110), part("launch#1", 120, 160)),
            *(part("wait#1", 160, 185), part("commit#1", 185, 195)),
            *kernel(3, "nvjet_tst_64x8", 130, 140, 180),
            *kernel(4, "_decode_attention_kernel", 135, 170, 230),
            *kernel(5, "_candidates_kernel", 140, 200, 240),
            *(part("step#2", 200, 300), part("schedule#2", 200, 210), part("launch#2", 220, 261)),
            part("commit#2", 290, 300),
            event("cuda_runtime", "cudaEventSynchronize", 235, 255, HOST, correlation=90),
            *kernel(6, "nvjet_tst_64x8", 258, 262, 282),
            *kernel(7, "Memcpy DtoH (Device -> Pinned)", 259, 290, 295),
            *kernel(8, "_norm_kernel", 260, 299, 309),
            *kernel(9, "_decode_attention_kernel", 260.5, 311, 321),
        ],
    }


def phase_of(found: dict[str, Any]) -> PhaseFigures:
    (phase,) = figures(trace.understand(found)).phases
    return phase


def times(lines: list[Line]) -> dict[str, float]:
    return {line.name: line.us for line in lines}


def test_lines_of_the_same_time_stay_in_their_order_however_it_adds_up():
    assert 0.1 + 0.2 > 0.3
    parts = [("whole", 0.3), ("in two", 0.1), ("in two", 0.2), ("long", 0.4)]
    assert [line.name for line in _lines(parts, 1.0)] == ["long", "whole", "in two"]


def test_time_is_counted_once_and_adds_up(recorded: dict[str, Any]):
    phase = phase_of(recorded)
    assert (phase.phase, phase.steps, phase.tokens) == ("decode", 2, 6)
    assert times(phase.groups) == {
        "GEMM": (40 + 20) / 2,
        "attention": (50 + 10) / 2,  # 10 of 60 beside GEMM
        "sampling": 10 / 2,  # 30 of 40 beside attention
        "norm, rope, activation": 10 / 2,
        "copies": 5 / 2,
    }
    assert phase.step_us == pytest.approx(((240 - 120) + (321 - 240)) / 2)
    assert [(line.name, line.calls) for line in phase.kernels[:2]] == [
        ("nvjet_tst_64x8", 1),
        ("_decode_attention_kernel", 1),
    ]


def test_idle_time_has_a_cause(recorded: dict[str, Any]):
    phase = phase_of(recorded)
    idle = {
        "host late": (10 + 3) / 2,  # up to the launches at 130 and 258, but for
        "synchronisation": (255 - 240) / 2,
        "launch": (10 + 4 + 2) / 2,  # from there on
        "copy": (8 + 4) / 2,
    }
    assert times(phase.idle) == pytest.approx(idle)
    assert times(phase.gaps)["synchronisation: sampling → GEMM"] == 7.5
    assert times(phase.gaps)["host late: launch"] == 6.5
    assert sum(idle.values()) + sum(times(phase.groups).values()) == pytest.approx(phase.step_us)


def test_time_between_steps_is_nobodys_fault(recorded: dict[str, Any]):
    for each in recorded["traceEvents"]:
        if each.get("ts", 0) >= 200 and each["name"] != "cudaEventSynchronize" and "step#1" not in each["name"]:
            each["ts"] += 10_000
    recorded["traceEvents"] = [e for e in recorded["traceEvents"] if e["args"].get("correlation") not in (5, 90)]
    assert times(phase_of(recorded).idle)["outside of steps"] == pytest.approx((10_200 - 230) / 2)
    assert "idle, outside of steps" in times(phase_of(recorded).budget)


def test_host_time_is_that_of_the_innermost_part(recorded: dict[str, Any]):
    phase = phase_of(recorded)
    assert times(phase.host) == {
        "launch": (40 + 21) / 2,
        "step": (15 + 39) / 2,
        "wait": (25 + 20) / 2,  # the call in the middle of the launch too
        "schedule": 10,
        "commit": 10,
    }
    assert phase.host_while_busy == pytest.approx(1 - 6.5 / (30.5 + 27 + 20))
    assert (phase.graphs, phase.padding) == (1, 1 - 12 / 16)


def test_a_decode_step_against_the_roofline(recorded: dict[str, Any]):
    phase = phase_of(recorded)
    kv_us = 102 * KV_BYTES / BYTES_PER_S * 1e6
    assert times(phase.budget) == pytest.approx(
        {
            "weights": 12,
            "KV": kv_us,
            "GEMM beyond": 30 - 12,
            "attention beyond": 30 - kv_us,
            "sampling": 5,
            "norm, rope, activation": 5,
            "copies": 2.5,
            "idle, synchronisation": 7.5,
            "idle, host late": 6.5,
            "idle, copy": 6,
            "idle, launch": 8,
        }
    )
    assert sum(times(phase.budget).values()) == pytest.approx(phase.step_us)
    assert [line.us for line in phase.savings] == pytest.approx([30 - kv_us, 18, 8])
    gemm = phase.kernels[0].need  # as the only kernel of its group it has what the group needs
    assert gemm and (gemm.bytes, gemm.flops) == (WEIGHT_BYTES, 2 * (BODY + HEAD) * 6)


def test_a_prefill_step_is_bound_by_computing(recorded: dict[str, Any]):
    recorded["minisgl"]["ceilings"]["flops_per_s"] = 1e9
    prompts = {"decode_rows": 0, "prompts": [(20, 0), (30, 10)], "samples": 1}
    recorded["minisgl"]["steps"][1:] = [step(40, **prompts)] * 2
    phase = phase_of(recorded)
    pairs = 20 * 21 / 2 + 30 * 31 / 2 - 10 * 11 / 2
    needs = {line.name: line.need for line in phase.groups if line.need}
    assert phase.phase == "prefill"
    assert needs["GEMM"].flops == 2 * BODY * 40 + 2 * HEAD
    assert needs["attention"].flops == pytest.approx(4 * 1 * 2 * 4 * pairs)
    assert needs["attention"].bytes == 10 * KV_BYTES
    assert list(times(phase.budget))[:2] == ["products with weights", "products of attention"]


def test_without_ceilings_there_are_no_bounds(recorded: dict[str, Any]):
    recorded["minisgl"] |= {"ceilings": None, "no_ceilings": "nobody measured"}
    phase = phase_of(recorded)
    assert times(phase.budget)["GEMM"] == 30
    assert "no bound: nobody measured" in printed(recorded)


def test_ranks_are_merged_and_count_as_one(recorded: dict[str, Any]):
    second = recorded | {"baseTimeNanoseconds": 1_005_000}
    merged = trace.merge([recorded, second])
    both, one = trace.understand(merged), phase_of(recorded)
    assert {work.rank for work in both.work} == {0, 1}
    assert min(work.begin_us for work in both.work if work.rank == 1) == 55
    assert times(phase_of(merged).groups) == times(one.groups)
    assert phase_of(merged).step_us == pytest.approx(one.step_us)
    pids = {each["pid"] for each in merged["traceEvents"]}
    assert len(pids) == 4


def test_on_a_cpu_operations_are_what_runs(facts: dict[str, Any]):
    facts["steps"] = [step(1)] * 2

    def op(name: str, begin: float, end: float) -> dict[str, Any]:
        return event("cpu_op", f"aten::{name}", begin, end, HOST)

    events = [
        *(part("step#0", 0, 20), part("forward#0", 0, 20), op("linear", 0, 20)),
        *(part("step#1", 20, 100), part("forward#1", 30, 90), part("attention#1 layer 0", 60, 80)),
        *(op("linear", 30, 50), op("mm", 32, 49), op("mul", 50, 55), op("bmm", 61, 75)),
        event("cpu_op", "aten::other_thread", 30, 1000, HOST | {"tid": 2}),
    ]
    phase = phase_of({"minisgl": facts, "traceEvents": events})
    assert times(phase.groups) == {"GEMM": 20, "attention": 14, "norm, rope, activation": 5}
    assert times(phase.kernels) == {"aten::mm": 17, "aten::bmm": 14, "aten::mul": 5, "aten::linear": 3}
    assert times(phase.idle) == {"host late": 10 + 6}
    assert times(phase.gaps) == {"host late: step": 10, "host late: forward": 5, "host late: attention": 1}
    assert times(phase.host)["attention"] == 20 and times(phase.host)["forward"] == 40


def test_a_trace_is_split_by_phase(recorded: dict[str, Any]):
    parts = trace.split(recorded, ["decode", "mixed", "decode"])
    found = {phase: {e["args"].get("correlation") for e in part["traceEvents"]} for phase, part in parts.items()}
    assert found["decode"] - {None} == {1, 2, 6, 7, 8, 9, 90}
    assert found["mixed"] - {None} == {3, 4, 5}
    assert all(part["traceEvents"][0]["ph"] == "M" for part in parts.values())


@pytest.mark.parametrize(
    ("name", "part", "group"),
    [
        ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "launch", "GEMM"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<float> >(Params)", "launch", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "launch", "attention"),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<int>(Params)", "launch", "attention"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<512>(float*)", "launch", "sampling"),
        ("_decode_attention_kernel", "launch", "attention"),
        ("kernel_mha", "launch", "attention"),
        ("_project_kernel", "launch", "GEMM"),
        ("_rotate_and_store_kernel", "forward", "norm, rope, activation"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "launch", "communication"),
        ("fused_moe_kernel", "launch", "MoE"),
        ("_winners_kernel", "sample", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "sample", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "launch", "other"),
        ("aten::bmm", "attention", "attention"),
        ("aten::embedding", "forward", "other"),
        ("aten::_weight_int4pack_mm_for_cpu", "forward", "GEMM"),
        ("Memset (Device)", "launch", "copies"),
    ],
)
def test_names_say_what_a_kernel_is_for(name: str, part: str, group: str):
    assert group_of(name, part) == group


def test_names_are_short():
    assert short("void at::native::(anonymous namespace)::cat<4, (int)2>(Args, int)") == "at::native::cat<4, (int)2>"
    assert short("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD"
    assert len(short("k" * 500)) == 90


# --- tables, files, comparison


def printed(recorded: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=200)
    report.show(figures(trace.understand(recorded)), console)
    return console.file.getvalue()


def test_the_report_says_what_a_step_is_made_of(recorded: dict[str, Any]):
    text = printed(recorded)
    assert "tiny in bfloat16 on a device" in text
    assert "a step takes 0.100 ms, and +0.5% while it is profiled" in text
    assert "0.101 ms = weights 0.012 + KV 0.012 + GEMM beyond 0.018 + attention beyond 0.018" in text
    assert "CUDA graphs in 100% of the steps, of whose tokens 25.0% only fill up" in text
    assert "1. at most 0.018 ms (18.1%) to save: another --attention-backend" in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["GEMM"]]
    assert row == ["GEMM", "30.0", "29.9%", "1.0", "0", "0.00", "memory", "40.0%"]


def test_the_html_needs_nothing_else(recorded: dict[str, Any], tmp_path: Path):
    recorded["minisgl"]["model"] = "<b>odd"
    report.write_html(figures(trace.understand(recorded)), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<title>&lt;b&gt;odd, profiled</title>" in page and "<b>odd" not in page
    assert not any(word in page for word in ("src=", "href=", "@import", "<script"))
    widths = [float(each.partition("%")[0]) for each in page.split('<div style="width:')[1:]]
    assert sum(widths) == pytest.approx(100, abs=0.1)


def kept(recorded: dict[str, Any], path: Path) -> Path:
    path.write_bytes(msgspec.json.encode(figures(trace.understand(recorded))))
    return path


def test_what_is_written_is_read_again(recorded: dict[str, Any], tmp_path: Path):
    path = kept(recorded, tmp_path / "a.json")
    again = report.read(path)
    assert isinstance(again, Figures) and msgspec.json.encode(again) == path.read_bytes()
    assert [file.name for file in tmp_path.glob("*.json") if file != path] == ["config.json"]


def test_a_comparison_says_what_got_slower(recorded: dict[str, Any], tmp_path: Path):
    a = kept(recorded, tmp_path / "a.json")
    for each in recorded["traceEvents"]:
        if each["args"].get("correlation") == 9 and each["cat"] == "kernel":
            each["dur"] += 40
    b = kept(recorded, tmp_path / "b.json")
    console = Console(file=StringIO(), width=200)
    assert report.compare(a, b, console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "the whole step 100.5 120.5 +20.0 +19.9% slower" in lines
    assert "attention 30.0 50.0 +20.0 +66.7% slower" in lines
    assert "GEMM 30.0 30.0 +0.0 +0.0%" in lines
    assert not report.compare(b, a, console)
    assert not report.compare(a, a, console)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "no trace of torch.profiler"),
        (b"", "no trace of torch.profiler"),
        (b"\x1f\x8b1234", "no trace of torch.profiler"),
        (gzip.compress(b'{"traceEvents": [1]}', mtime=0), "no trace of torch.profiler"),
        (b'{"traceEvents": []}', "not of minisgl profile"),
        (b'{"traceEvents": [], "minisgl": {"steps": [], "settling": 1}}', "not of minisgl profile: Object missing"),
        (b'{"traceEvents": [{"ph": "X", "ts": "now"}]}', "no trace of torch.profiler"),
        (b'{"traceEvents": [], "minisgl": {"steps": 5}}', "not of minisgl profile"),
        (b"[" * 100_000, "no trace of torch.profiler"),
    ],
)
def test_what_is_no_trace_of_ours_is_refused(data: bytes, message: str):
    with pytest.raises(ValueError, match=message):
        figures(trace.understand(trace.read(data, "some.json")))


def test_a_rank_whose_trace_is_of_other_steps_does_not_count(recorded: dict[str, Any]):
    parts = trace.split(recorded, ["decode", "mixed", "decode"])
    recorded["minisgl"]["steps"][1]["prompts"] = [[5, 0]]
    assert phase_of(trace.merge([parts["decode"], parts["mixed"]])) == phase_of(parts["decode"])


def test_an_engine_that_did_nothing_is_told_of(recorded: dict[str, Any]):
    recorded["traceEvents"] = []
    with pytest.raises(ValueError, match="the engine did nothing while the trace was taken"):
        phase_of(recorded)


def test_what_runs_behind_the_last_step_is_not_counted(recorded: dict[str, Any]):
    before = phase_of(recorded)
    recorded["traceEvents"] += [part("commit#3", 330, 340), *kernel(10, "_norm_kernel", 335, 336, 338)]
    assert phase_of(recorded) == before


def test_too_few_steps_are_refused(recorded: dict[str, Any]):
    del recorded["minisgl"]["steps"][1:]
    with pytest.raises(ValueError, match="1 steps were captured, and figures need two that ran"):
        phase_of(recorded)


def test_a_file_that_is_no_report_is_refused(tmp_path: Path):
    for text in ("{}", "[" * 100_000):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match=r"b\.json is no report of minisgl profile"):
            report.read(tmp_path / "b.json")


def test_a_file_that_cannot_be_written_is_named():
    with pytest.raises(ValueError, match=r"cannot write /proc/none\.json: No such file"):
        write_whole(Path("/proc/none.json"), b"")


def test_reports_need_no_torch():
    modules = "trace, groups, figures, report, options, facts, profile"
    script = f"import sys; sys.modules['torch'] = None; from minisgl.profiling import {modules}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_trace_of_an_h200_adds_up():
    """Six steps of Qwen3-0.6B for one request, of which the last kernels run after the next step has begun."""
    data = (Path(__file__).parent / "data" / "h200_decode.json.gz").read_bytes()
    (found,) = figures(trace.understand(trace.read(data, "it"))).phases
    events = json.loads(gzip.decompress(data))["traceEvents"]
    calls = {e["args"]["correlation"]: e["ts"] for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    spans = [
        (e["ts"], e["ts"] + e["dur"], int(e["name"].split("#")[1]))
        for e in events
        if e["name"].startswith("minisgl.step#")
    ]
    until, busy, idle = 0.0, 0.0, 0.0
    count: Counter[str] = Counter()
    of_kernel: Counter[str] = Counter()
    for e in sorted((e for e in events if e["cat"] in ("kernel", "gpu_memcpy")), key=lambda e: (e["ts"], e["dur"])):
        begin, end, asked = e["ts"], e["ts"] + e["dur"], calls[e["args"]["correlation"]]
        if any(a <= asked <= b and number >= 3 for a, b, number in spans):
            busy += max(end - max(begin, until), 0)
            idle += max(begin - until, 0)
            count[e["name"]] += 1
            of_kernel[e["name"]] += max(end - max(begin, until), 0)
        until = max(until, end)
    assert (found.phase, found.steps, found.tokens, found.graphs) == ("decode", 6, 1, 1)
    assert sum(line.us for line in found.groups) == pytest.approx(busy / 6, rel=1e-4)
    assert sum(line.us for line in found.idle) == pytest.approx(idle / 6, rel=1e-4)
    assert found.step_us == pytest.approx((busy + idle) / 6, rel=1e-4)
    for line in found.kernels:
        if line.name in count:  # not shortened
            assert (line.calls, line.us) == (
                pytest.approx(count[line.name] / 6),
                pytest.approx(of_kernel[line.name] / 6),
            )
    assert (
        count["_project_kernel"] == 6 * (4 * 28 + 1)
        and sum(count[name] for name in count if "kernel_mha" in name) == 6 * 28
    )
    assert {line.name for line in found.groups} == {
        *("GEMM", "attention", "sampling", "norm, rope, activation", "copies", "other"),
    }
    weights = next(line.us for line in found.budget if line.name == "weights")
    assert weights == pytest.approx(1_191_968_768 / 4_220e9 * 1e6, rel=0.02), "596 M numbers of 2 bytes, at 4.2 TB/s"
