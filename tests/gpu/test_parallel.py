"""Two ranks on GPUs say what one says, with and without graphs; and whichever is lost, and when, all end.

Where there is one GPU both ranks are on it (one_gpu/sitecustomize.py), which shows all but NCCL and times.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from server_process import is_alive, listening, wait_for

from minisgl import LLM, SamplingParams

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
SMALL = {"vocab_size": 1001, "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 528, "head_dim": 64}
PROMPTS = [[(7 * i + j * j) % 1000 for j in range(3 + 11 * i)] for i in range(12)]
SMALL_STEPS = {"max_model_len": 512, "num_pages": 100, "max_running_requests": 16, "chunked_prefill_size": 256}

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch):
    """Two GPUs, or one that is taken for two, by this process and by those that it starts."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if GPUS == 1:
        spec = importlib.util.spec_from_file_location("one_gpu", HERE / "one_gpu/sitecustomize.py")
        assert spec is not None and spec.loader is not None
        one_gpu = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(one_gpu)
        one_gpu.share_one_gpu(monkeypatch.setattr)
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        path.insert(0, str(HERE / "one_gpu"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def answers(folder: str, *params, **fields):
    """The answers of one engine to each of several ways to ask."""
    with LLM(folder, load_format="dummy", device="cuda", **SMALL_STEPS, **fields) as llm:
        return [[out.outputs[0] for out in llm.generate(PROMPTS, each)] for each in params]


@pytest.mark.parametrize(
    ("kv_heads", "graphs", "most"),
    [(8, True, 40), (1, True, 40), (8, False, 5)],  # without graphs, processes that share a GPU take long
    ids=["graphs", "one key head", "eager"],
)
def test_float32_tokens_are_those_of_one_gpu(qwen3, kv_heads, graphs, most):
    folder = qwen3(**SMALL, num_key_value_heads=kv_heads)
    greedy = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    top_p = [0.9 if i % 2 else None for i in range(12)]
    drawn = [SamplingParams(temperature=0.9, seed=i, max_tokens=most // 2, top_p=top_p[i]) for i in range(12)]
    alone = answers(folder, greedy, drawn, dtype="float32", cuda_graph=False)
    both = answers(folder, greedy, drawn, dtype="float32", cuda_graph=graphs, tp=2)
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


def test_engines_of_one_process_follow_each_other_and_keep_no_port(stored_qwen3, started):
    """Torch keeps some of what it knows of an engine for as long as the process lives."""
    before, params = listening(os.getpid()), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    said = []
    for _ in range(2):
        ((answer, *_),) = answers(stored_qwen3, params, dtype="bfloat16", cuda_graph=False, tp=2)
        said.append(answer.token_ids)
        assert listening(os.getpid()) == before
    assert said[0] == said[1]
    assert [process.returncode for process in started] == [0, 0]  # they were done, and neither killed nor broken


def test_all_reduce_over_memory_that_both_see_is_measured_and_right():
    """An engine takes only the ways whose sum is NCCL's; here both must be."""
    script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "scripts/all_reduce.py"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "one shot" in done.stdout and "two shots" in done.stdout


LOST = """
import os, signal, sys
from collections import Counter
from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.parallel import crew, meeting

model, rank, moment, number = *sys.argv[1:4], getattr(signal, sys.argv[4])
ranks, seen = [], Counter()

def come_to(now):
    seen[now] += 1
    if now.startswith(moment) and seen[now] == 2:
        os.kill([os.getpid(), *ranks][int(rank)], number)

def start(task, words, own=crew._start):
    process = own(task, words)
    ranks.append(process.pid)
    print(process.pid, flush=True)
    for _ in range(2):
        come_to("start")
    return process

crew._start = start
meeting.START_S = 20.0
fields = dict(dtype="bfloat16", device="cuda", tp=2, max_model_len=4096, num_pages=300, max_running_requests=16)
config = EngineConfig(model=model, step_timeout=5, cuda_graph_bs=[1, 4, 16], chunked_prefill_size=256, **fields)
with LLM.from_config(config, lambda what, *_: come_to(what)) as llm:
    for piece in llm.stream([3, 4, 5], SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)):
        come_to("steps")
"""


@pytest.mark.parametrize("moment", ["start", "loading", "warming up", "capturing CUDA graphs", "steps"])
@pytest.mark.parametrize(("rank", "signal"), [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGSTOP")])
def test_whichever_rank_is_lost_and_when_all_end_and_free_the_gpus(rank, signal, moment, stored_qwen3):
    command = [sys.executable, "-c", LOST, stored_qwen3, str(rank), moment, signal]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    if rank == 0:
        assert done.returncode == -9
    else:
        assert done.returncode == 1
        said = "ended with signal SIGKILL" if signal == "SIGKILL" else "the ranks have stood still for"
        assert said in done.stderr.splitlines()[-1], done.stderr
    (pid,) = map(int, done.stdout.split())
    wait_for(lambda: not is_alive(pid), "the end of rank 1")
    for device in range(GPUS):
        free, total = torch.cuda.mem_get_info(device)
        assert total - free < 8 << 30, f"GPU {device} holds {(total - free) >> 20} MiB"
