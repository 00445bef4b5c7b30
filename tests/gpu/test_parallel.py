"""Two GPUs: what one GPU says, with and without graphs, and what happens when a rank ends while graphs are captured."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SMALL = {"vocab_size": 1001, "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 528, "head_dim": 64}
PROMPTS = [[(7 * i + j * j) % 1000 for j in range(3 + 11 * i)] for i in range(12)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


SMALL_STEPS = {"max_model_len": 512, "num_pages": 100, "max_running_requests": 16, "chunked_prefill_size": 256}


def answers(folder: str, *params, **fields):
    """The answers of one engine to each of several ways to ask."""
    with LLM(folder, load_format="dummy", device="cuda", **SMALL_STEPS, **fields) as llm:
        return [[out.outputs[0] for out in llm.generate(PROMPTS, each)] for each in params]


@pytest.mark.parametrize(("kv_heads", "graphs"), [(8, True), (1, False)], ids=["graphs", "one key head, eager"])
def test_float32_tokens_are_those_of_one_gpu(qwen3, kv_heads, graphs):
    folder = qwen3(**SMALL, num_key_value_heads=kv_heads)
    drawn = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, top_p=0.9 if i % 2 else None) for i in range(12)]
    alone = answers(folder, GREEDY, drawn, dtype="float32", cuda_graph=False)
    both = answers(folder, GREEDY, drawn, dtype="float32", cuda_graph=graphs, tp=2)
    for one, other in zip(alone, both, strict=True):
        assert [answer.token_ids for answer in other] == [answer.token_ids for answer in one]


def test_bfloat16_log_probabilities_are_within_the_spread_of_one_gpu(qwen3):
    """Of the first token that a decode step draws; the spread is that of one GPU in bfloat16 to float32."""
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, ignore_eos=True)

    def seen(**fields):
        (said,) = answers(qwen3(num_hidden_layers=8), params, **fields)
        return [answer.logprobs[1].top for answer in said]

    def distance(one, other):
        return np.mean([abs(a[t] - b[t]) for a, b in zip(one, other, strict=True) for t in a.keys() & b.keys()])

    exact, alone, both = seen(dtype="float32"), seen(dtype="bfloat16"), seen(dtype="bfloat16", tp=2)
    print(f"mean distance to float32: {distance(alone, exact):.5f} on one GPU, {distance(both, exact):.5f} on two")
    assert distance(both, exact) <= 1.5 * distance(alone, exact)


def test_all_reduce_over_memory_that_both_see_is_measured_and_right():
    """An engine takes only the ways whose sum is NCCL's; here both must be."""
    script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "scripts/all_reduce.py"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "one shot" in done.stdout and "two shots" in done.stdout


KILLED_IN_CAPTURE = """
import os, signal, subprocess
from minisgl import LLM, EngineConfig

def kill(what, done, total):
    if what == "capturing CUDA graphs" and done == 3:
        found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "minisgl.runtime.rank"], capture_output=True)
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)

fields = dict(load_format="dummy", device="cuda", tp=2, max_model_len=512, num_pages=100, max_running_requests=64)
LLM.from_config(EngineConfig(model={model!r}, **fields), kill)
"""


def test_a_rank_that_is_killed_while_graphs_are_captured_ends_all(qwen3):
    script = KILLED_IN_CAPTURE.replace("{model!r}", repr(qwen3()))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "ended with signal SIGKILL" in done.stderr, done.stderr


LOST_IN_A_STEP = """
import os, signal, subprocess, time
from minisgl import LLM, SamplingParams

fields = dict(load_format="dummy", device="cuda", max_model_len=4096, num_pages=300, max_running_requests=16)
with LLM({model!r}, tp=2, step_timeout=5, cuda_graph_bs=[1, 16], **fields) as llm:
    long = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    for number, piece in enumerate(llm.stream([3, 4, 5], long)):
        if number == 20:
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "minisgl.runtime.rank"], capture_output=True)
            os.kill(int(found.stdout.split()[0]), signal.{signal})
"""


@pytest.mark.parametrize(
    ("signal", "said"), [("SIGKILL", "ended with signal SIGKILL"), ("SIGSTOP", "stood still for 5 s")]
)
def test_a_rank_that_is_lost_in_the_middle_of_steps_ends_all_and_frees_the_gpus(signal, said, qwen3):
    script = LOST_IN_A_STEP.replace("{model!r}", repr(qwen3())).replace("{signal}", signal)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert said in done.stderr, done.stderr
    for device in range(2):
        free, total = torch.cuda.mem_get_info(device)
        assert total - free < 8 << 30, f"GPU {device} holds {(total - free) >> 20} MiB"
