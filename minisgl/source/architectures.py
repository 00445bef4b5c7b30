"""The supported architectures, one row each: what differs, for the one decoder that runs them all."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only architecture, as config.json names it and as transformers computes it."""

    name: str
    model_type: str
    gguf_name: str  # general.architecture in its GGUF files
    gguf_permutes_qk: bool  # GGUF files hold the rows of q and k in another order
    qkv_bias: bool | None  # None: as attention_bias in config.json says
    o_bias: bool | None  # None: likewise
    mlp_bias: bool | None  # None: as mlp_bias in config.json says
    qk_norm: bool
    windowed: Literal["never", "every layer", "some layers"]  # which layers a sliding window applies to
    default_rope_theta: float = 10_000.0
    defaults: Mapping[str, Any]
    """What a field means that config.json leaves out: the class's defaults in transformers 5.24.

    Only fields that published checkpoints do leave out; any other field must be there. None for num_key_value_heads:
    as many as num_attention_heads; for head_dim: hidden_size / num_attention_heads.
    """


_SHARED_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"head_dim": None, "hidden_act": "silu", "tie_word_embeddings": False}
)
_QWEN_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **_SHARED_DEFAULTS,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
)

_ROWS = (
    Architecture(  # Llama 2 and 3.x, SmolLM2
        name="LlamaForCausalLM",
        model_type="llama",
        gguf_name="llama",
        gguf_permutes_qk=True,
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        qk_norm=False,
        windowed="never",
        defaults={**_SHARED_DEFAULTS, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    ),
    Architecture(  # its GGUF files say "llama", and are imported as such
        name="MistralForCausalLM",
        model_type="mistral",
        gguf_name="llama",
        gguf_permutes_qk=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windowed="every layer",
        defaults={**_SHARED_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Architecture(  # Qwen 1.5, 2 and 2.5
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        gguf_name="qwen2",
        gguf_permutes_qk=False,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windowed="some layers",
        defaults=_QWEN_DEFAULTS,
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf_name="qwen3",
        gguf_permutes_qk=False,
        qkv_bias=None,
        o_bias=None,
        mlp_bias=False,
        qk_norm=True,
        windowed="some layers",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.name: row for row in _ROWS})


def architecture(name: str, where: object) -> Architecture:
    """The row of an architecture. ValueError, with `where` it was asked for and what is supported, if there is none."""
    if name not in ARCHITECTURES:
        raise ValueError(f"{where}: architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def gguf_architecture(name: str, where: object) -> Architecture:
    """The row of a GGUF file's `general.architecture`; the first one where several share a name."""
    for row in _ROWS:
        if row.gguf_name == name:
            return row
    known = ", ".join(sorted({row.gguf_name for row in _ROWS}))
    raise ValueError(f"{where}: GGUF architecture {name} is not supported; supported: {known}")
