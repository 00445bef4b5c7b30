"""What only a CUDA device can show: memory sizing, asynchronous launches, allocation failures."""

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.runtime.staging import Staging

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def qwen(qwen3):
    return qwen3()


def test_the_pool_fills_the_share_of_the_memory_that_was_asked_for(qwen):
    share, total = 0.3, torch.cuda.mem_get_info()[1]
    with LLM(qwen, load_format="dummy", gpu_memory_utilization=share, max_running_requests=1024) as llm:
        free, _ = torch.cuda.mem_get_info()
        assert 0.8 * share * total < total - free <= share * total
        outs = llm.generate([[5] * 6000] * 20, GREEDY)
        assert all(len(o.outputs[0].token_ids) == 20 for o in outs)
        assert total - torch.cuda.mem_get_info()[0] <= (share + 0.02) * total


def test_auto_is_bfloat16_on_cuda_and_close_gives_the_memory_back(qwen):
    before = torch.cuda.mem_get_info()[0]
    llm = LLM(qwen, load_format="dummy", num_pages=20_000)
    assert (llm.config.device, llm.config.dtype) == ("cuda", "bfloat16")
    assert before - torch.cuda.mem_get_info()[0] > 2**30
    llm.close()
    assert before - torch.cuda.mem_get_info()[0] < 2**28


def test_a_pool_that_does_not_fit_is_one_line_with_the_flag(qwen):
    with pytest.raises(ValueError, match=r"no memory for 100000000 KV pages: lower --num-pages"):
        LLM(qwen, load_format="dummy", num_pages=100_000_000)


def test_buffers_that_are_being_copied_are_not_overwritten():
    staging = Staging(torch.device("cuda"))
    busy = torch.randn(8192, 8192, device="cuda")
    seen = []
    for step in range(40):
        busy = busy @ busy * 1e-4  # the copies queue up behind this
        sent = staging.send({"a": np.full(1000 + step, step, dtype=np.int32), "b": np.arange(step, dtype=np.int32)})
        seen.append((sent["a"].clone(), sent["b"].clone()))
    for step, (a, b) in enumerate(seen):
        assert (a == step).all() and torch.equal(b.cpu(), torch.arange(step, dtype=torch.int32))
