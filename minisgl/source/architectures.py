"""The supported architectures, one row each: what differs, for the one decoder that runs them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only architecture, as config.json names it and as transformers computes it."""

    name: str
    gguf_name: str  # general.architecture in its GGUF files
    gguf_permutes_qk: bool = False  # GGUF files hold the rows of q and k in another order
    qkv_bias: bool = False  # always, whatever config.json says
    qk_norm: bool = False
    defaults: Mapping[str, Any]
    """What a field means that config.json leaves out: the class's defaults in transformers 5.24.

    Only fields that published checkpoints do leave out; any other field must be there. None for num_key_value_heads:
    as many as num_attention_heads; for head_dim: hidden_size / num_attention_heads. Biases (`attention_bias`,
    `mlp_bias`) and a sliding window are for the classes that have those fields here; others do not look at them.
    """


_SHARED: Mapping[str, Any] = MappingProxyType({"head_dim": None, "hidden_act": "silu", "tie_word_embeddings": False})
_QWEN: Mapping[str, Any] = MappingProxyType(
    {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
)

_ROWS = (
    Architecture(  # Llama 2 and 3.x, SmolLM2
        name="LlamaForCausalLM",
        gguf_name="llama",
        gguf_permutes_qk=True,
        defaults={**_SHARED, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    ),
    Architecture(  # its GGUF files say "llama", and are imported as such
        name="MistralForCausalLM",
        gguf_name="llama",
        gguf_permutes_qk=True,
        defaults={**_SHARED, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Architecture(  # Qwen 1.5, 2 and 2.5
        name="Qwen2ForCausalLM",
        gguf_name="qwen2",
        qkv_bias=True,
        defaults={**_SHARED, **_QWEN},
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        gguf_name="qwen3",
        qk_norm=True,
        defaults={**_SHARED, **_QWEN, "head_dim": 128, "attention_bias": False},
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.name: row for row in _ROWS})
GGUF_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.gguf_name: row for row in reversed(_ROWS)})
"""The same by the name in GGUF files; the first row where several share one."""
