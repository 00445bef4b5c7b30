"""One-time import of a GGUF file into a normal model folder, which everything after that reads.

Weights become float32 with exactly the values that the file's quantised blocks stand for. What cannot be said in a
config.json is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from minisgl.source.architectures import GGUF_ARCHITECTURES, Architecture
from minisgl.source.cache_folder import Report, make_once, require_free, silent
from minisgl.source.fields import Fields, write_json
from minisgl.source.folder import CONFIG, GENERATION_CONFIG
from minisgl.source.gguf_tokenizer import special_token_ids, write_tokenizer
from minisgl.source.model_config import ModelConfig, read_model_config

_ROPE_FACTORS = "rope_freqs.weight"  # [head_dim / 2], by which each rotary frequency is divided
_ROPE_NEUTRAL: Mapping[str, float] = MappingProxyType(  # what keys may say that are not supported
    dict.fromkeys(("rope.scale_linear", *(f"rope.scaling.{n}_factor" for n in ("attn", "yarn_ext", "yarn_attn"))), 1)
    | {"rope.scaling.yarn_log_multiplier": 0}
)

# The name in GGUF and in safetensors; the shape: Vocabulary, model (E), Intermediate, Queries, Keys, heaD.
_OUTER: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "token_embd.weight": ("model.embed_tokens.weight", "VE"),
        "output_norm.weight": ("model.norm.weight", "E"),
        "output.weight": ("lm_head.weight", "VE"),
    }
)
_LAYER = (  # and which of the config's flags says that there is a bias
    ("attn_norm", "input_layernorm", "E", None),
    ("attn_q", "self_attn.q_proj", "QE", "qkv_bias"),
    ("attn_k", "self_attn.k_proj", "KE", "qkv_bias"),
    ("attn_v", "self_attn.v_proj", "KE", "qkv_bias"),
    ("attn_output", "self_attn.o_proj", "EQ", "o_bias"),
    ("attn_q_norm", "self_attn.q_norm", "D", None),
    ("attn_k_norm", "self_attn.k_norm", "D", None),
    ("ffn_norm", "post_attention_layernorm", "E", None),
    ("ffn_gate", "mlp.gate_proj", "IE", "mlp_bias"),
    ("ffn_up", "mlp.up_proj", "IE", "mlp_bias"),
    ("ffn_down", "mlp.down_proj", "EI", "mlp_bias"),
)


def import_gguf(file: Path, folder: Path, report: Report = silent) -> None:
    """Make `folder` from `file`, whole or not at all; nothing is done if it is there already.

    Raises ValueError for a file that is not a complete GGUF, or holds what we cannot run, before anything is converted;
    OSError if the disk is full.
    """

    def make(built: Path) -> Path:
        report(f"reading {file.name}", 0, None)
        row, fields, tensors = _read(file)
        write_json(built / CONFIG, _config(row, fields, tensors))
        write_json(built / GENERATION_CONFIG, special_token_ids(fields))
        config = read_model_config(built)
        tensors = _checked(tensors, config, file)
        write_tokenizer(fields, built, config.vocab_size)
        size_bytes = 4 * sum(tensor.n_elements for tensor in tensors.values())
        require_free(folder.parent, size_bytes, f"importing {file.name}")
        permuted_head_size = config.head_size if row.gguf_permutes_qk else None
        _write_weights(tensors, permuted_head_size, built / "model.safetensors", f"importing {file.name}", report)
        return built

    make_once(folder, make, report)


def _read(file: Path) -> tuple[Architecture, Fields, dict[str, ReaderTensor]]:
    """The architecture, the metadata, in which the architecture's own keys go without its name, and the tensors."""
    try:
        reader = GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, TypeError) as error:  # whatever reading beyond its end leads to
        raise ValueError(f"{file} is not a whole and sound GGUF file: {error}") from error
    if reader.byte_order == "S":
        raise ValueError(f"{file} is a GGUF file in the other byte order, which is not supported")
    name = Fields(metadata, str(file)).get("general.architecture", str)
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise ValueError(f"{file}: GGUF architecture {name} is not supported; supported: {known}")
    if metadata.get("split.count", 1) != 1:
        raise ValueError(f"{file} is one part of a split GGUF: merge the parts first (llama-gguf-split --merge)")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    return GGUF_ARCHITECTURES[name], Fields(own, str(file)), {tensor.name: tensor for tensor in reader.tensors}


def _config(row: Architecture, fields: Fields, tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """What config.json says of the same model."""
    if fields.optional("expert_count", int):
        raise ValueError(f"{fields.where} is a mixture of experts, which is not supported")
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{fields.where} lacks the tensor token_embd.weight")
    hidden_size, num_heads = fields.get("embedding_length", int, 1), fields.get("attention.head_count", int, 1)
    head_size = fields.optional("attention.key_length", int) or hidden_size // num_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.values.get(name, head_size) != head_size:
            raise fields.wrong(name, f"the head size, {head_size}")
    return {
        "architectures": [row.name],
        "model_type": row.gguf_name,
        "vocab_size": _shape(tensors["token_embd.weight"])[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.get("feed_forward_length", int),
        "num_hidden_layers": fields.get("block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.optional("attention.head_count_kv", int) or num_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": fields.get("context_length", int),
        "rms_norm_eps": _shortest(fields.get("attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _rope(fields, head_size, tensors.get(_ROPE_FACTORS)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": "float32",
        **special_token_ids(fields),
    }


def _rope(fields: Fields, head_size: int, factors: ReaderTensor | None) -> dict[str, Any]:
    for name, neutral in _ROPE_NEUTRAL.items():
        if fields.values.get(name, neutral) != neutral:
            raise fields.wrong(name, f"{neutral} (others are not supported)")
    kind = fields.optional("rope.scaling.type", str) or "none"
    theta = _shortest(fields.optional("rope.freq_base", float) or 10_000)  # the format's default
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind not in ("none", "linear", "yarn"):
        raise fields.wrong("rope.scaling.type", "none, linear or yarn")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": _shortest(fields.get("rope.scaling.factor", float))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = fields.get("rope.scaling.original_context_length", int)
        for name in ("beta_fast", "beta_slow"):
            if (value := fields.optional(f"rope.scaling.yarn_{name}", float)) is not None:
                rope[name] = _shortest(value)
    if factors is not None and not (factors.data == 1).all():
        if kind != "none":
            raise ValueError(f"{fields.where} has both {_ROPE_FACTORS} and rope scaling {kind}: not supported")
        rope |= _llama3(fields, theta, head_size, factors.data)
    return rope


def _llama3(fields: Fields, theta: float, head_size: int, factors: NDArray[np.float32]) -> dict[str, Any]:
    """The llama3 rope that the factors come from: they must be those of Llama 3.1 to 3.3, for some factor."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_size, 2) / head_size) / (2 * np.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)  # share of the frequency that is not divided
    expected = 1 / ((1 - kept) / factor + kept)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-4):
        raise ValueError(f"{fields.where}: {_ROPE_FACTORS} are not the factors of a llama3 rope, and not supported")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for a stored 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))


def _checked(tensors: Mapping[str, ReaderTensor], config: ModelConfig, file: Path) -> dict[str, ReaderTensor]:
    """The tensors by the names that safetensors files give them: all that the model has, and no other."""
    expected, found = _expected(config), {}
    for name, tensor in tensors.items():
        if name == _ROPE_FACTORS:
            continue
        if name not in expected:
            raise ValueError(f"{file}: tensor {name} is not part of a {config.architecture} like this")
        try:
            dequantize(np.atleast_2d(tensor.data)[:1], tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{file}: tensor {name} is of type {tensor.tensor_type.name}, which is not supported"
            ) from None
        renamed, shape = expected.pop(name)
        if _shape(tensor) != shape:
            raise ValueError(f"{file}: tensor {name} has shape {_shape(tensor)}, expected {shape}")
        found[renamed] = tensor
    if expected:
        raise ValueError(f"{file} lacks the tensor for {min(expected.values())[0]}")
    return found


def _expected(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a model: name in GGUF → name in safetensors, and shape."""
    sizes = {"V": config.vocab_size, "E": config.hidden_size, "I": config.intermediate_size, "D": config.head_size}
    sizes |= {"Q": config.num_heads * config.head_size, "K": config.num_kv_heads * config.head_size}
    axes = dict(_OUTER)
    if config.tied_embeddings:
        del axes["output.weight"]
    for layer in range(config.num_layers):
        for name, renamed, shape, bias in _LAYER:
            if shape != "D" or config.qk_norm:
                axes[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{renamed}.weight", shape)
            if bias is not None and getattr(config, bias):
                axes[f"blk.{layer}.{name}.bias"] = (f"model.layers.{layer}.{renamed}.bias", shape[0])
    return {name: (renamed, tuple(sizes[axis] for axis in shape)) for name, (renamed, shape) in axes.items()}


def _write_weights(
    tensors: Mapping[str, ReaderTensor], permuted_head_size: int | None, path: Path, what: str, report: Report
) -> None:
    """A float32 safetensors file, one tensor after the other (https://github.com/huggingface/safetensors#format)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.n_elements
        header[name] = {"dtype": "F32", "shape": _shape(tensor), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = dequantize(tensor.data, tensor.tensor_type)
            if permuted_head_size is not None and (".q_proj." in name or ".k_proj." in name):
                values = _unpermuted(values, permuted_head_size)
            out.write(np.ascontiguousarray(values, dtype="<f4").data)
            report(what, header[name]["data_offsets"][1], end)


def _unpermuted(values: NDArray[np.float32], head_size: int) -> NDArray[np.float32]:
    """Rows (or elements) of whole heads in the order of the original checkpoint.

    The file pairs up the dimensions that rotate together: its row 2i + j of a head was row i + j * head_size / 2.
    """
    pairs = values.reshape(-1, head_size // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
