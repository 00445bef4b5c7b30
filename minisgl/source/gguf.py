"""One-time import of a GGUF file into a normal model folder, which everything after that reads.

Weights become float32 with exactly the values that the file's quantised blocks stand for. What cannot be said in a
config.json is refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.source.architectures import Architecture, gguf_architecture
from minisgl.source.cache_folder import Report, publish, require_free, silent, workspace
from minisgl.source.fields import Fields
from minisgl.source.folder import CONFIG, GENERATION_CONFIG
from minisgl.source.gguf_file import GgufTensor, read_gguf
from minisgl.source.gguf_tokenizer import special_token_ids, write_tokenizer
from minisgl.source.model_config import check_model_config

_SHARD_BYTES = 1 << 30  # most bytes of a weight file, unless one tensor is larger
_CHUNK_BYTES = 64 << 20  # float32 bytes converted at a time, whatever the size of the tensor

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Source:
    """An open GGUF file of a supported architecture."""

    file: Path
    row: Architecture
    fields: Fields
    tensors: Mapping[str, GgufTensor]  # by the name that safetensors files give them
    rope_factors: NDArray[np.float32] | None  # [head_dim / 2], by which each rotary frequency is divided

    def key(self, name: str) -> str:
        """The metadata key of one of the architecture's own values."""
        return f"{self.row.gguf_name}.{name}"


def import_gguf(file: Path, folder: Path, report: Report = silent) -> None:
    """Make `folder` from `file`, whole or not at all; nothing is done if it is there already.

    Raises ValueError for a file that is not a complete GGUF, or holds what we cannot run, before anything is converted;
    OSError if the disk is full.
    """
    with workspace(folder, report) as scratch:
        if folder.is_dir():
            return
        report(f"reading {file.name}", 0, None)
        source = _open(file)
        built = scratch / "folder"
        built.mkdir()
        config = _config(source)
        _write_json(built / CONFIG, config)
        _write_json(built / GENERATION_CONFIG, special_token_ids(source.fields))
        check_model_config(built)
        _check_tensors(source, config)
        write_tokenizer(source.fields, built, vocab_size=config["vocab_size"])
        require_free(folder.parent, 4 * sum(t.num_elements for t in source.tensors.values()), f"importing {file.name}")
        _write_weights(source, config["head_dim"], built, report)
        publish(built, folder)


def _open(file: Path) -> _Source:
    gguf = read_gguf(file)
    fields = Fields(gguf.metadata, str(file))
    row = gguf_architecture(fields.text("general.architecture"), file)
    if (fields.optional_integer("split.count") or 1) > 1:
        raise ValueError(f"{file} is one part of a split GGUF: merge the parts first (llama-gguf-split --merge)")
    tensors, rope_factors = {}, None
    for tensor in gguf.tensors:
        try:
            first = tensor.decode(stop=1)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if tensor.name == _ROPE_FACTORS:
            rope_factors = first[0]
        else:
            tensors[_safetensors_name(tensor.name, file)] = tensor
    return _Source(file, row, fields, tensors, rope_factors)


def _safetensors_name(name: str, file: Path) -> str:
    if (found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and found[2] in _LAYER_NAMES:
        return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"
    if (found := re.fullmatch(r"(\w+)\.weight", name)) and found[1] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[found[1]]}.weight"
    raise ValueError(f"{file}: tensor {name} is not one of a supported architecture")


def _config(source: _Source) -> dict[str, Any]:
    """What config.json says of the same model."""
    fields, key, row = source.fields, source.key, source.row
    if fields.optional_integer(key("expert_count")):
        raise ValueError(f"{source.file} is a mixture of experts, which is not supported")
    hidden_size = fields.integer(key("embedding_length"))
    num_heads = fields.integer(key("attention.head_count"))
    head_size = fields.optional_integer(key("attention.key_length")) or hidden_size // num_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if (fields.optional_integer(key(name)) or head_size) != head_size:
            raise fields.wrong(key(name), f"the head size, {head_size}")
    if "model.embed_tokens.weight" not in source.tensors:
        raise ValueError(f"{source.file} lacks the tensor token_embd.weight")
    config = {
        "architectures": [row.name],
        "model_type": row.model_type,
        "vocab_size": source.tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(key("feed_forward_length")),
        "num_hidden_layers": fields.integer(key("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.optional_integer(key("attention.head_count_kv")) or num_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer(key("context_length")),
        "rms_norm_eps": _shortest(fields.positive(key("attention.layer_norm_rms_epsilon"))),
        "rope_parameters": _rope(source, head_size),
        "tie_word_embeddings": "lm_head.weight" not in source.tensors,
        "dtype": "float32",
        **special_token_ids(fields),
    }
    if row.qkv_bias is None:
        config["attention_bias"] = any(".self_attn." in n and n.endswith("bias") for n in source.tensors)
    if row.mlp_bias is None:
        config["mlp_bias"] = any(".mlp." in n and n.endswith("bias") for n in source.tensors)
    return config


def _rope(source: _Source, head_size: int) -> dict[str, Any]:
    fields, key = source.fields, source.key
    base_key = key("rope.freq_base")
    theta = _shortest(fields.positive(base_key)) if base_key in fields.values else 10_000.0  # the format's default
    kind = fields.optional_text(key("rope.scaling.type")) or "none"
    if key("rope.scale_linear") in fields.values:
        raise ValueError(f"{source.file}: {key('rope.scale_linear')} of old GGUF files is not supported: convert anew")
    if kind not in ("none", "linear", "yarn"):
        raise fields.wrong(key("rope.scaling.type"), "none, linear or yarn")
    for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        if fields.optional_number(key(f"rope.scaling.{name}")) not in (None, 1):
            raise fields.wrong(key(f"rope.scaling.{name}"), "1 (others are not supported)")
    if fields.optional_number(key("rope.scaling.yarn_log_multiplier")):
        raise fields.wrong(key("rope.scaling.yarn_log_multiplier"), "0 (others are not supported)")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind != "none":
        rope |= {"rope_type": kind, "factor": _shortest(fields.positive(key("rope.scaling.factor")))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = fields.integer(key("rope.scaling.original_context_length"))
        for name in ("beta_fast", "beta_slow"):
            if (value := fields.optional_number(key(f"rope.scaling.yarn_{name}"))) is not None:
                rope[name] = _shortest(value)
    if source.rope_factors is not None and not (source.rope_factors == 1).all():
        if kind != "none":
            raise ValueError(f"{source.file} has both {_ROPE_FACTORS} and rope scaling {kind}: not supported")
        rope |= _llama3(source, theta, head_size)
    return rope


def _llama3(source: _Source, theta: float, head_size: int) -> dict[str, Any]:
    """The llama3 rope that the file's factors come from: they must be those of Llama 3.1 to 3.3, for some factor."""
    assert source.rope_factors is not None
    factor, low, high, original = float(source.rope_factors.max()), 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_size, 2) / head_size) / (2 * np.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)  # share of the frequency that is not divided
    expected = 1 / ((1 - kept) / factor + kept)
    if expected.shape != source.rope_factors.shape or not np.allclose(expected, source.rope_factors, rtol=1e-4):
        raise ValueError(f"{source.file}: {_ROPE_FACTORS} are not the factors of a llama3 rope, and not supported")
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


def _check_tensors(source: _Source, config: Mapping[str, Any]) -> None:
    """Every tensor of the model is there, in its shape, and no other."""
    expected = _expected_shapes(source.row, config)
    if missing := expected.keys() - source.tensors.keys():
        raise ValueError(f"{source.file} lacks the tensor for {min(missing)}")
    for name, tensor in source.tensors.items():
        if name not in expected:
            raise ValueError(f"{source.file}: tensor {tensor.name} is not part of a {source.row.name} like this")
        if tensor.shape != expected[name]:
            raise ValueError(f"{source.file}: tensor {tensor.name} has shape {tensor.shape}, expected {expected[name]}")


def _expected_shapes(row: Architecture, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    model, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qkv_bias = config["attention_bias"] if row.qkv_bias is None else row.qkv_bias
    o_bias = config["attention_bias"] if row.o_bias is None else row.o_bias
    mlp_bias = config["mlp_bias"] if row.mlp_bias is None else row.mlp_bias
    linears = {
        "self_attn.q_proj": (queries, model, qkv_bias),
        "self_attn.k_proj": (keys, model, qkv_bias),
        "self_attn.v_proj": (keys, model, qkv_bias),
        "self_attn.o_proj": (model, queries, o_bias),
        "mlp.gate_proj": (mlp, model, mlp_bias),
        "mlp.up_proj": (mlp, model, mlp_bias),
        "mlp.down_proj": (model, mlp, mlp_bias),
    }
    norms = {"input_layernorm": model, "post_attention_layernorm": model}
    if row.qk_norm:
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], model),
        "model.norm.weight": (model,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], model)
    for layer in range(config["num_hidden_layers"]):
        for name, size in norms.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
    return shapes


def _write_weights(source: _Source, head_size: int, folder: Path, report: Report) -> None:
    """All tensors as float32 safetensors, in one file or in shards with an index."""
    total_bytes, done_bytes = 4 * sum(tensor.num_elements for tensor in source.tensors.values()), 0
    shards = _shards(source.tensors)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, name)
        with open(folder / name, "wb") as out:
            out.write(_safetensors_header({name: source.tensors[name] for name in names}))
            for tensor_name in names:
                tensor = source.tensors[tensor_name]
                permuted = source.row.gguf_permutes_qk and (".q_proj." in tensor_name or ".k_proj." in tensor_name)
                for values in _values(tensor, head_size if permuted else None):
                    out.write(values.astype("<f4", copy=False).tobytes())
                    done_bytes += values.nbytes
                    report(f"importing {source.file.name}", done_bytes, total_bytes)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: Mapping[str, GgufTensor]) -> list[list[str]]:
    """The tensors of each file, in order."""
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and size_bytes + 4 * tensor.num_elements > _SHARD_BYTES:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += 4 * tensor.num_elements
    return shards


def _safetensors_header(tensors: Mapping[str, GgufTensor]) -> bytes:
    """What stands before the data (https://github.com/huggingface/safetensors#format), so that this can be streamed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.num_elements
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(tensor: GgufTensor, permuted_head_size: int | None) -> Iterator[NDArray[np.float32]]:
    """A tensor's values from the first row to the last, some rows at a time; permuted heads are put in order."""
    step = max(1, _CHUNK_BYTES // (4 * tensor.shape[-1]))
    if permuted_head_size is not None:
        step += -step % permuted_head_size
    for start in range(0, len(tensor.rows), step):
        values = tensor.decode(start, start + step)  # [rows, columns]
        if len(tensor.shape) == 1:
            values = values[0]
        yield values if permuted_head_size is None else _unpermuted(values, permuted_head_size)


def _unpermuted(values: NDArray[np.float32], head_size: int) -> NDArray[np.float32]:
    """Rows (or elements) of whole heads in the order of the original checkpoint.

    The file pairs up the dimensions that rotate together: its row 2i + j of a head was row i + j * head_size / 2.
    """
    pairs = values.reshape(-1, head_size // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
