"""Rooflines: what work needs at least, by hand and for published shapes; ceilings are measured once and kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.ceilings import ceilings, in_child
from minisgl.bench.record import Ceilings
from minisgl.bench.roofline import Need, Roofline
from minisgl.bench.workload import WorkloadConfig, throughput_jobs
from minisgl.doctor.machine import Gpu, Nvidia, device_name
from minisgl.source.model_config import ModelConfig, read_model_config

MODELS = Path(__file__).parents[2] / "bench_configs" / "models"
STANDING = WorkloadConfig(requests=256, input_len=[100, 1024], output_len=[100, 1024], max_token_id=10000)
H200 = Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12, dtype="bfloat16", source="measured")


def model(name: str) -> ModelConfig:
    return read_model_config(MODELS / name)


def lengths(workload: WorkloadConfig) -> list[tuple[int, int]]:
    return [(len(job.prompt), job.output_len) for job in throughput_jobs(workload, 0)]


def bound(roof: Roofline, workload: WorkloadConfig) -> float:
    """Output tokens a second."""
    given = lengths(workload)
    need = roof.prefill([(prompt, 0) for prompt, _ in given]) + roof.decode(given)
    return sum(out for _, out in given) / need.least_s


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-14b", 14.768)])
def test_the_model_shapes_have_the_published_number_of_parameters(name: str, billions: float):
    roof = Roofline(model(name), H200)
    embedding = 0 if roof.model.tied_embeddings else roof.head
    assert (roof.body + roof.head + embedding) / 1e9 == pytest.approx(billions, abs=0.0005)


@pytest.mark.parametrize(("name", "rate"), [("qwen3-0.6b", 36_200), ("qwen3-14b", 8_070)])
def test_the_bound_of_the_standing_workload_on_an_h200(name: str, rate: float):
    assert bound(Roofline(model(name), H200), STANDING) == pytest.approx(rate, rel=0.001)


def test_two_gpus_have_twice_the_bound():
    qwen3_32b = replace(model("qwen3-14b"), num_layers=64, num_heads=64, intermediate_size=25600)
    assert bound(Roofline(qwen3_32b, H200, gpus=2), STANDING) == pytest.approx(7_620, rel=0.001)


def test_the_bound_of_one_stream_is_reading_the_weights_and_a_little_kv():
    roof = Roofline(model("qwen3-0.6b"), H200)
    assert 1 / roof.decode_step(1, 0).least_s == pytest.approx(3_600, rel=0.003)
    assert 255 / roof.decode([(128, 256)]).least_s == pytest.approx(3_521, rel=0.001)


def test_the_bound_by_hand_for_a_model_of_a_few_weights():
    tiny = replace(
        model("qwen3-0.6b"), hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_size=8, vocab_size=100
    )
    roof = Roofline(
        replace(tiny, intermediate_size=5), Ceilings(bytes_per_s=1e6, flops_per_s=1e5, dtype="float16", source="")
    )
    body, head = 2 * (4 * 16 + 4 * 8 * 2 + 16 * 4 + 3 * 4 * 5), 4 * 100
    assert (roof.body, roof.head) == (body, head)
    attention = 2 * 2 * (4 * 8) * (1 + 2 + 3)  # layers, heads, FLOPs of a pair, pairs
    assert roof.prefill([(3, 0)]).least_s == pytest.approx((2 * body * 3 + 2 * head + attention) / 1e5)
    kv_bytes = 2 * 2 * 8 * 2  # layers, keys and values, head size, bytes
    steps = [(2, 4 + 2), (1, 5), (1, 6)]  # two requests, the second longer by two tokens
    expected = sum(2 * (body + head) * n / 1e5 + kv_bytes * context / 1e6 for n, context in steps)
    decode = roof.decode([(3, 2), (1, 2)]) + roof.decode_step(1, 5) + roof.decode_step(1, 6)
    assert decode.least_s == pytest.approx(expected)
    assert (decode.compute_s > decode.memory_s, decode.bytes) == (True, 3 * 2 * (body + head) + kv_bytes * (6 + 5 + 6))
    assert roof.decode([(5, 1)]) == Need()


def test_float32_has_twice_the_bytes():
    wide = Roofline(model("qwen3-0.6b"), replace_dtype("float32"))
    assert wide.decode_step(1, 700).bytes == 2 * Roofline(model("qwen3-0.6b"), H200).decode_step(1, 700).bytes


def replace_dtype(dtype: str) -> Ceilings:
    return Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12, dtype=dtype, source="measured")


def test_a_prompt_in_the_prefix_cache_needs_only_its_rest():
    roof = Roofline(model("qwen3-0.6b"), H200)
    whole, begin, rest = (roof.prefill([prompt]).flops for prompt in ((1000, 0), (600, 0), (1000, 600)))
    assert begin + rest == whole + 2 * roof.head, "the head multiplies once for each"


def test_prefill_is_bound_by_computing_and_decode_by_reading():
    roof = Roofline(model("qwen3-14b"), H200)
    assert roof.prefill([(1024, 0)] * 8).memory_s == 0
    assert roof.prefill([(16, 0)]).compute_s == 0
    assert roof.decode([(128, 256)]).compute_s == 0


def answered(device: str, dtype: str) -> str:
    assert (device, dtype) == ("cuda", "bfloat16")
    return json.dumps({"bytes_per_s": 2.0, "flops_per_s": 3.0})


def test_ceilings_are_measured_once_for_a_device_and_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    said: list[str] = []
    first = ceilings("NVIDIA Toaster", "cuda", "bfloat16", said.append, answered)
    assert (first.bytes_per_s, first.flops_per_s, first.dtype) == (2.0, 3.0, "bfloat16")
    assert len(said) == 1 and "NVIDIA Toaster" in said[0]
    again = ceilings("NVIDIA Toaster", "cuda", "bfloat16", said.append, lambda *_: pytest.fail("measured twice"))
    assert again == first and len(said) == 1
    with pytest.raises(AssertionError, match="float32"):
        ceilings("NVIDIA Toaster", "cuda", "float32", said.append, answered)


def test_a_measurement_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    with pytest.raises(ValueError, match="could not be measured: ImportError: no torch today"):
        ceilings("x", "cpu", "float32", lambda _: None, in_child)
    assert not list(tmp_path.glob("ceilings/*.json"))


def gpus(*names: str) -> Nvidia:
    return Nvidia(
        driver="1", cuda="13.0", gpus=[Gpu(name=n, memory_bytes=1, free_bytes=1, capability="") for n in names]
    )


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (lambda: gpus("NVIDIA H200", "NVIDIA H200"), "NVIDIA H200"),
        (lambda: gpus("NVIDIA H200", "NVIDIA T4"), "a GPU of unknown name"),  # which of them is used?
        (lambda: None, "a GPU of unknown name"),
        (lambda: exec("raise ImportError"), "a GPU of unknown name"),
    ],
)
def test_a_gpu_has_the_name_that_its_driver_gives_it(answer: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minisgl.doctor.machine.ask_nvidia", answer)
    assert device_name("cuda") == name
