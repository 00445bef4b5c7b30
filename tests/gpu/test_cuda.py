"""What only a CUDA device can show: memory sizing, asynchronous launches, allocation failures."""

import json

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.runtime.runner import Staging

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def qwen(tmp_path):
    """A config with the shape of a small Qwen3; weights are random."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 151645,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


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


def test_overlap_and_settings_change_nothing_in_float32(qwen):
    prompts = [[(i * 7 + j) % 1000 for j in range(10 + 90 * i)] for i in range(12)]
    base = {"load_format": "dummy", "dtype": "float32"}
    got = []
    for options in (
        {},
        {"overlap": False},
        {"chunked_prefill_size": 100, "num_pages": 80},
        {"cache": "none", "page_size": 64},
    ):
        with LLM(qwen, **base, **{"num_pages": 4000, **options}) as llm:
            got.append([o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)])
    assert got[1:] == got[:1] * 3
