"""A model's shape, read from its config.json. No torch.

Every spelling that transformers 4 and 5 write is read, and nothing is guessed: what a file leaves out means what
`architectures.py` says, or is an error. All errors are ValueErrors of one line that name the file.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from minisgl.config import SamplingParams
from minisgl.source.architectures import ARCHITECTURES, Architecture
from minisgl.source.fields import Fields, read_json
from minisgl.source.folder import CONFIG, GENERATION_CONFIG

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=str)

RopeType = Literal["default", "linear", "llama3", "yarn"]

_DTYPES = ("float32", "float16", "bfloat16")
_DEFAULT_THETA = 10_000.0
_ROPE_FIELDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": (
            *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    }
)
"""What each type has. All of it is needed, but by yarn, which needs the factor only."""
_OTHER_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
_SAMPLING = ("temperature", "top_k", "top_p")
_NEUTRAL_SAMPLING = {"repetition_penalty": 1, "min_p": 0, "typical_p": 1, "no_repeat_ngram_size": 0}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields beyond `theta` matter only to the types named."""

    type: RopeType = "default"
    theta: float
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int | None = None  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the decoder needs to know of a checkpoint, every value concrete."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    rope: RopeConfig
    max_position: int  # longest context the model allows, tokens
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None  # "bfloat16", …, as the checkpoint says
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_model_config(folder: Path, *, warn: bool = True) -> ModelConfig:
    """The config of a model folder, from config.json and the EOS tokens of generation_config.json too.

    A sliding window caps the context, with one logged warning: up to its length full attention is the same.
    Raises ValueError for what is missing, of the wrong type, or cannot be run (and then says what can).
    """
    path = folder / CONFIG
    raw = read_json(path)
    row = _architecture(raw, path)
    fields = Fields({**row.defaults, **raw}, str(path))
    _refuse_unsupported(fields)
    num_heads, num_kv_heads, head_size = _heads(fields)
    max_position = fields.get("max_position_embeddings", int, 2)
    window = _window(fields, row)
    if window is not None and window < max_position:
        max_position = window
        if warn:
            capped = "%s has a sliding window: the context is capped at %d tokens, where full attention is exact"
            logger.warning(capped, folder, window)
    attention_bias = "attention_bias" in row.defaults and fields.get("attention_bias", bool)
    eos, bos = _special_tokens(folder, fields)
    return ModelConfig(
        architecture=row.name,
        vocab_size=fields.get("vocab_size", int, 1),
        hidden_size=fields.get("hidden_size", int, 1),
        intermediate_size=fields.get("intermediate_size", int, 1),
        num_layers=fields.get("num_hidden_layers", int, 1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.get("rms_norm_eps", float),
        rope=_rope(fields),
        max_position=max_position,
        tied_embeddings=fields.get("tie_word_embeddings", bool),
        qkv_bias=row.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias="mlp_bias" in row.defaults and fields.get("mlp_bias", bool),
        qk_norm=row.qk_norm,
        dtype=_one_of(fields, ("dtype", "torch_dtype"), _DTYPES),
        bos_token_id=bos,
        eos_token_ids=eos,
    )


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What generation_config.json sets of `SamplingParams`: temperature, top_k, top_p; empty if there is no such file.

    The values count wherever they are given; `do_sample`, which says how transformers' `generate` would use them by
    default, is not asked. A field that would change the output and is not supported is logged.
    """
    path = folder / GENERATION_CONFIG
    if not path.exists():
        return {}
    values = read_json(path)
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if values.get(name) not in (None, neutral):
            logger.warning("%s: %s=%r is not supported and not applied", path, name, values[name])
    defaults = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return defaults


def _architecture(raw: Mapping[str, Any], path: Path) -> Architecture:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"{path}: architectures must be a list that names the model's class, got {names!r}")
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if fields.values.get(name):
            raise fields.wrong(name, f"absent: quantised weights are not supported, plain {', '.join(_DTYPES)} are")
    if fields.values["hidden_act"] != "silu":
        raise fields.wrong("hidden_act", "silu, the one that is supported")


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key heads and head size."""
    hidden_size, num_heads = fields.get("hidden_size", int, 1), fields.get("num_attention_heads", int, 1)
    num_kv_heads = fields.optional("num_key_value_heads", int, 1) or num_heads
    if num_heads % num_kv_heads:
        raise fields.wrong("num_attention_heads", f"a multiple of num_key_value_heads {num_kv_heads}")
    head_size = fields.optional("head_dim", int, 1)
    if head_size is None and hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads {num_heads}, as there is no head_dim")
    head_size = head_size or hidden_size // num_heads
    if head_size % 2:
        raise ValueError(f"{fields.where}: rotary embedding needs an even head_dim, got {head_size}")
    return num_heads, num_kv_heads, head_size


def _window(fields: Fields, row: Architecture) -> int | None:
    """The sliding window, if one is in use."""
    num_layers = fields.get("num_hidden_layers", int, 1)
    switchable = "use_sliding_window" in row.defaults
    known = ("full_attention", "sliding_attention") if switchable else ("full_attention",)
    kinds = fields.values.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == num_layers and all(kind in known for kind in kinds)
    ):
        raise fields.wrong("layer_types", f"a list with one of {', '.join(known)} for each layer")
    if switchable:
        if kinds is None:
            slides = fields.get("max_window_layers", int) < num_layers
        else:
            slides = "sliding_attention" in kinds
        if not fields.get("use_sliding_window", bool) or not slides:
            return None
    return fields.optional("sliding_window", int, 2) if "sliding_window" in row.defaults else None


def _rope(fields: Fields) -> RopeConfig:
    """Rotary embedding, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before).

    YaRN's original context, where it is not given, is max_position_embeddings, as in transformers.
    """
    table = _rope_table(fields)
    rope_type = _one_of(table, ("rope_type", "type"), get_args(RopeType))
    if rope_type is None and "factor" in table.values:
        raise ValueError(f"{table.where} has a factor, but no rope_type")
    if rope_type == "yarn":
        context = {"original_max_position_embeddings": fields.get("max_position_embeddings", int)}
        table = Fields({**context, **table.values}, table.where)
    kinds: Mapping[str, type] = {"original_max_position_embeddings": int, "truncate": bool}
    found: dict[str, Any] = {
        name.removesuffix("_embeddings"): table.get(name, kinds.get(name, float), 1)
        for name in _ROPE_FIELDS[rope_type or "default"]
        if name == "factor" or name in table.values or rope_type != "yarn"
    }
    if rope_type == "llama3" and found["high_freq_factor"] <= found["low_freq_factor"]:
        raise table.wrong("high_freq_factor", f"above low_freq_factor, which is {found['low_freq_factor']}")
    return RopeConfig(type=rope_type or "default", theta=table.get("rope_theta", float), **found)


def _rope_table(fields: Fields) -> Fields:
    """All that the config says of rope in one table, without nulls. Two places may not differ."""
    nested, scaling = (fields.optional(name, dict) or {} for name in ("rope_parameters", "rope_scaling"))
    if nested and scaling and nested != scaling:
        raise ValueError(f"{fields.where}: rope_parameters and rope_scaling differ: {nested} and {scaling}")
    table = {name: value for name, value in (nested or scaling).items() if value is not None}
    if unknown := table.keys() - set(_OTHER_ROPE_FIELDS).union(*_ROPE_FIELDS.values()):
        raise ValueError(
            f"{fields.where}: rope fields {', '.join(sorted(unknown))} are not supported (rope by layer type neither)"
        )
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        outer = fields.values.get(name)
        if outer is not None and table.setdefault(name, outer) != outer:
            raise ValueError(f"{fields.where}: {name} is {outer} at the top, and {table[name]} in the rope table")
    found = Fields({"rope_theta": _DEFAULT_THETA, **table}, f"{fields.where}: rope")
    if table.get("partial_rotary_factor", 1) != 1:
        raise found.wrong("partial_rotary_factor", "1 (partial rotary embedding is not supported)")
    return found


def _one_of(fields: Fields, names: Sequence[str], allowed: Sequence[T]) -> T | None:
    """A value that may be under any of these names; under several, it must be the same."""
    given = {name: fields.values[name] for name in names if fields.values.get(name) is not None}
    for name, value in given.items():
        if value not in allowed:
            raise fields.wrong(name, f"one of {', '.join(allowed)}, which are supported")
        if value != next(iter(given.values())):
            raise ValueError(f"{fields.where}: {' and '.join(names)} differ: {given}")
    return next(iter(given.values()), None)


def _special_tokens(folder: Path, fields: Fields) -> tuple[tuple[int, ...], int | None]:
    """EOS tokens, the union of config and generation config, and BOS, the config's first."""
    sources = [fields]
    if (path := folder / GENERATION_CONFIG).exists():
        sources.append(Fields(read_json(path), str(path)))
    eos: list[int] = []
    for source in sources:
        given = source.values.get("eos_token_id")
        tokens = given if isinstance(given, list) else [given] if given is not None else []
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise source.wrong("eos_token_id", "a token id or a list of them")
        eos += tokens
    bos = [source.optional("bos_token_id", int) for source in sources]
    return tuple(dict.fromkeys(eos)), next((token for token in bos if token is not None), None)
