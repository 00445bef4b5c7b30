from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.config import EngineConfig
from minisgl.host import Memory, memory
from minisgl.runtime.memory import count_pages, page_bytes
from minisgl.runtime.rank import _memory_errors
from minisgl.runtime.runner import ModelRunner
from minisgl.source.model_config import ModelConfig, RopeConfig

CPU = torch.device("cpu")


def shape(**changes) -> ModelConfig:
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_size": 64,
        "norm_eps": 1e-5,
        "rope": RopeConfig(theta=1e5),
        "max_position": 8192,
        "tied_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "dtype": None,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return ModelConfig(**(values | changes))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:    8000000 kB\n"


def test_a_page_holds_keys_and_values_of_all_layers():
    assert page_bytes(shape(), 16, torch.bfloat16) == 16 * 22.5 * 1024


def test_without_a_cgroup_the_system_says_what_is_available(tmp_path):
    assert memory(write(tmp_path, {"proc/meminfo": MEMINFO})).free_bytes == 8_000_000 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_around_this_one_limits_it(tmp_path, version):
    if version == 2:
        files = {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "3000000000\n",
            "sys/fs/cgroup/a/memory.current": "2500000000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 1000000000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "10\n",
        }
    else:
        files = {
            "proc/self/cgroup": "4:cpu:/\n7:memory:/a/b\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "3000000000\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "2500000000\n",
            "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 1000000000\n",
        }
    assert memory(write(tmp_path, {"proc/meminfo": MEMINFO, **files})).free_bytes == 1_500_000_000


def pages(monkeypatch, available, **config):
    monkeypatch.setattr("minisgl.runtime.memory.memory", lambda: Memory(free_bytes=available, limit_bytes=available))
    return count_pages(shape(), EngineConfig(**config), 16, torch.float32, CPU, 8192)


def test_on_cpu_the_pool_is_a_quarter_of_what_is_available_and_two_gib_at_most(monkeypatch):
    size = page_bytes(shape(), 16, torch.float32)
    assert pages(monkeypatch, 100 * 2**30) == 2 * 2**30 // size
    assert pages(monkeypatch, 2**30) == 2**28 // size


def test_no_more_pages_than_every_running_request_at_full_length_needs(monkeypatch):
    assert pages(monkeypatch, 100 * 2**30, max_running_requests=2) == 2 * 8192 // 16


def test_the_user_has_the_last_word(monkeypatch):
    assert pages(monkeypatch, 0, num_pages=77) == 77


def test_where_no_page_fits_the_error_has_the_numbers_and_the_way_out(monkeypatch):
    with pytest.raises(ValueError, match=r"16 tokens takes 737,280 bytes and 250,000 are left.*--num-pages"):
        pages(monkeypatch, 1_000_000)


def test_a_trial_that_does_not_fit_says_which_flags_to_change_and_not_what_the_runner_would_say_later():
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore")
    said = r"^no memory for the largest step: lower --a \(CUDA out of memory. Tried to allocate 20.00 GiB\)$"
    with pytest.raises(ValueError, match=said), _memory_errors("the largest step", "lower --a"):
        raise RuntimeError("a step does not fit: lower --b") from cause


def test_other_faults_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="something else"), _memory_errors("a", "b"):
        raise RuntimeError("something else")


def test_a_device_out_of_memory_in_a_step_names_the_flags(tiny_model, monkeypatch):
    def launch(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with LLM(str(tiny_model("LlamaForCausalLM")), device="cpu") as llm:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "_launch", launch)
            message = r"lower --gpu-memory-utilization, --chunked-prefill-size or .*2.00 GiB"
            with pytest.raises(RuntimeError, match=message):
                llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
