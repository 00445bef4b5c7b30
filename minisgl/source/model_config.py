"""A model's shape, read from its config.json. No torch.

Every spelling that transformers 4 and 5 write is read, and nothing is guessed: what a file leaves out means what
`architectures.py` says, or is an error. All errors are ValueErrors of one line that name the file.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from minisgl.config import SamplingParams
from minisgl.source.architectures import Architecture, architecture
from minisgl.source.fields import Fields, read_json

logger = logging.getLogger(__name__)

RopeType = Literal["default", "linear", "llama3", "yarn"]

_DTYPES = ("float32", "float16", "bfloat16")
_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate", "finetuned"),
}
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


def read_model_config(folder: Path) -> ModelConfig:
    """The config of a model folder, from config.json and the EOS tokens of generation_config.json too.

    A sliding window caps the context, with one logged warning: up to its length full attention is the same.
    Raises ValueError for what is missing, of the wrong type, or cannot be run (and then says what can).
    """
    config, window = _read(folder)
    if window is not None:
        logger.warning(
            "%s has a sliding window: the context is capped at %d tokens, where full attention is exact", folder, window
        )
    return config


def check_model_config(folder: Path) -> None:
    """Raise ValueError as `read_model_config` would; say nothing else."""
    _read(folder)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What generation_config.json sets of `SamplingParams`: temperature, top_k, top_p; empty if there is no such file.

    The values count wherever they are given; `do_sample`, which says how transformers' `generate` would use them by
    default, is not asked. A field that would change the output and is not supported is logged.
    """
    path = folder / "generation_config.json"
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


def _read(folder: Path) -> tuple[ModelConfig, int | None]:
    """The config, and the sliding window that cut its context, if one did."""
    path = folder / "config.json"
    raw = read_json(path)
    row = architecture(_architecture_name(raw, path), path)
    fields = Fields({**row.defaults, **raw}, str(path))
    _refuse_unsupported(fields)
    num_heads, num_kv_heads, head_size = _heads(fields)
    max_position = fields.integer("max_position_embeddings", least=2)
    window = _window(fields, row, max_position)
    eos, bos = _special_tokens(folder, fields)
    config = ModelConfig(
        architecture=row.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=fields.positive("rms_norm_eps"),
        rope=_rope(fields, row.default_rope_theta),
        max_position=max_position if window is None else window,
        tied_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=fields.boolean("attention_bias") if row.qkv_bias is None else row.qkv_bias,
        o_bias=fields.boolean("attention_bias") if row.o_bias is None else row.o_bias,
        mlp_bias=fields.boolean("mlp_bias") if row.mlp_bias is None else row.mlp_bias,
        qk_norm=row.qk_norm,
        dtype=_dtype(fields),
        bos_token_id=bos,
        eos_token_ids=eos,
    )
    return config, window


def _architecture_name(raw: Mapping[str, Any], path: Path) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"{path}: architectures must be a list that names the model's class, got {names!r}")
    return names[0]


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if quantization := fields.values.get(name):
            method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
            raise ValueError(
                f"{fields.where}: quantised weights ({name}: {method}) are not supported; "
                f"supported: plain {', '.join(_DTYPES)}"
            )
    if fields.text("hidden_act") != "silu":
        raise fields.wrong("hidden_act", "silu, the one that is supported")


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Query heads, key heads and head size."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads", least=1) or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{fields.where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_size = fields.optional_integer("head_dim", least=1)
    if head_size is None:
        hidden_size = fields.integer("hidden_size")
        if hidden_size % num_heads:
            raise ValueError(
                f"{fields.where}: there is no head_dim, and hidden_size {hidden_size} "
                f"is not a multiple of num_attention_heads {num_heads}"
            )
        head_size = hidden_size // num_heads
    if head_size % 2:
        raise ValueError(f"{fields.where}: rotary embedding needs an even head_dim, got {head_size}")
    return num_heads, num_kv_heads, head_size


def _window(fields: Fields, row: Architecture, max_position: int) -> int | None:
    """The sliding window, if one is in use and shorter than the context."""
    num_layers = fields.integer("num_hidden_layers")
    layer_types = fields.values.get("layer_types")
    if layer_types is not None:
        known = ("full_attention", "sliding_attention") if row.windowed == "some layers" else ("full_attention",)
        if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(known):
            raise fields.wrong("layer_types", f"a list with one of {', '.join(known)} for each layer")
    if row.windowed == "never":
        return None
    if row.windowed == "some layers":
        if not fields.boolean("use_sliding_window"):
            return None
        if layer_types is None:
            slides = fields.integer("max_window_layers", least=0) < num_layers
        else:
            slides = "sliding_attention" in layer_types
        if not slides:
            return None
    window = fields.optional_integer("sliding_window", least=2)
    return window if window is not None and window < max_position else None


def _rope(fields: Fields, default_theta: float) -> RopeConfig:
    """Rotary embedding, from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    values = {"rope_theta": default_theta} | _rope_values(fields)
    table = Fields(values, f"{fields.where}: rope")
    rope_type = _same(table, "rope_type", "type") or "default"
    if rope_type not in get_args(RopeType):
        raise ValueError(
            f"{fields.where}: rope type {rope_type!r} is not supported; supported: {', '.join(get_args(RopeType))}"
        )
    if "rope_type" not in values and "type" not in values and "factor" in values:
        raise ValueError(f"{table.where} has a factor, but no rope_type")
    theta = table.positive("rope_theta")
    match rope_type:
        case "linear":
            return RopeConfig(type="linear", theta=theta, factor=table.positive("factor"))
        case "llama3":
            return _llama3(table, theta)
        case "yarn":
            return _yarn(table, theta, fields.integer("max_position_embeddings"))
        case _:
            return RopeConfig(theta=theta)


def _rope_values(fields: Fields) -> dict[str, Any]:
    """All that the config says of rope in one table, without nulls. Two places may not differ."""
    nested, scaling = fields.values.get("rope_parameters"), fields.values.get("rope_scaling")
    for name, table in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if table is not None and not isinstance(table, dict):
            raise fields.wrong(name, "an object")
    if nested and scaling and nested != scaling:
        raise ValueError(f"{fields.where}: rope_parameters and rope_scaling differ: {nested} and {scaling}")
    table = {name: value for name, value in (nested or scaling or {}).items() if value is not None}
    if unknown := table.keys() - _ROPE_FIELDS:
        raise ValueError(
            f"{fields.where}: rope fields {', '.join(sorted(unknown))} are not supported (rope by layer type neither)"
        )
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        outer = fields.values.get(name)
        if outer is not None and table.setdefault(name, outer) != outer:
            raise ValueError(f"{fields.where}: {name} is {outer} at the top, and {table[name]} in the rope table")
    if table.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{fields.where}: partial_rotary_factor must be 1 (partial rotary embedding is not supported), "
            f"got {table['partial_rotary_factor']}"
        )
    return table


def _same(fields: Fields, name: str, other: str) -> str | None:
    """A string that may be under either of two names; under both, it must be the same."""
    value, again = fields.optional_text(name), fields.optional_text(other)
    if value is not None and again is not None and value != again:
        raise ValueError(f"{fields.where}: {name} is {value!r}, but {other} is {again!r}")
    return again if value is None else value


def _llama3(table: Fields, theta: float) -> RopeConfig:
    low, high = table.positive("low_freq_factor"), table.positive("high_freq_factor")
    if high <= low:
        raise table.wrong("high_freq_factor", f"above low_freq_factor, which is {low}")
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=table.positive("factor"),
        original_max_position=table.integer("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(table: Fields, theta: float, max_position: int) -> RopeConfig:
    """YaRN; where the original context is not given, it is max_position_embeddings, as in transformers."""
    given = table.values
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=table.positive("factor"),
        original_max_position=table.optional_integer("original_max_position_embeddings", least=1) or max_position,
        beta_fast=table.positive("beta_fast") if "beta_fast" in given else RopeConfig.beta_fast,
        beta_slow=table.positive("beta_slow") if "beta_slow" in given else RopeConfig.beta_slow,
        attention_factor=table.positive("attention_factor") if "attention_factor" in given else None,
        mscale=table.optional_number("mscale"),
        mscale_all_dim=table.optional_number("mscale_all_dim"),
        truncate=table.boolean("truncate") if "truncate" in given else RopeConfig.truncate,
    )


def _dtype(fields: Fields) -> str | None:
    """The type the weights were saved in: `dtype` in transformers 5, `torch_dtype` before."""
    name = _same(fields, "dtype", "torch_dtype")
    if name is not None and name not in _DTYPES:
        raise ValueError(f"{fields.where}: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return name


def _special_tokens(folder: Path, fields: Fields) -> tuple[tuple[int, ...], int | None]:
    """EOS tokens, the union of config and generation config, and BOS, the config's first."""
    sources = [fields]
    path = folder / "generation_config.json"
    if path.exists():
        sources.append(Fields(read_json(path), str(path)))
    eos: dict[int, None] = {}  # a set that keeps the order
    bos = None
    for source in sources:
        given = source.values.get("eos_token_id")
        for token in given if isinstance(given, list) else [given] if given is not None else []:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise source.wrong("eos_token_id", "a token id or a list of them")
            eos[token] = None
        if bos is None:
            bos = source.optional_integer("bos_token_id")
    return tuple(eos), bos
