"""Models with the shapes of published ones and random weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QWEN3 = {
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


@pytest.fixture
def qwen3(tmp_path: Path) -> Callable[..., str]:
    """`qwen3(**config_overrides)`: a folder with the config of a small Qwen3, for dummy weights."""

    def make(**overrides: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(QWEN3 | overrides))
        return str(tmp_path)

    return make


@pytest.fixture(scope="session")
def stored_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small Qwen3 with random weights in it."""
    import transformers  # here: whoever collects these tests without a GPU does not wait for it

    config = transformers.Qwen3Config(**QWEN3 | {"num_hidden_layers": 2, "vocab_size": 2048, "eos_token_id": 1})
    folder = tmp_path_factory.mktemp("stored")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)
