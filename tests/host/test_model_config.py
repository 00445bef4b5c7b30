"""config.json in every spelling, what absent fields mean, and one clear line for what cannot be run."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl.source.architectures import ARCHITECTURES
from minisgl.source.model_config import (
    ModelConfig,
    RopeConfig,
    read_model_config,
    sampling_defaults,
)

# As published: the parts that matter.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
GONE = object()  # as a value: leave the field out


def write(folder: Path, config: dict[str, Any], generation: Any = None, **changes: Any) -> Path:
    merged = {name: value for name, value in {**config, **changes}.items() if value is not GONE}
    (folder / "config.json").write_text(json.dumps(merged))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def rope(folder: Path, **changes: Any) -> RopeConfig:
    return read_model_config(write(folder, SMALL, **changes)).rope


def complaint(folder: Path, config: dict[str, Any] = SMALL, **changes: Any) -> str:
    with pytest.raises(ValueError, match=re.escape(str(folder / "config.json"))) as caught:
        read_model_config(write(folder, config, **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_published_llama_3_1_config_is_read(tmp_path):
    assert read_model_config(write(tmp_path, LLAMA_3_1_8B)) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        norm_eps=1e-5,
        rope=RopeConfig(
            type="llama3",
            theta=500000.0,
            factor=8.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        max_position=131072,
        tied_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_a_published_qwen3_config_keeps_its_own_head_size(tmp_path):
    config = read_model_config(write(tmp_path, QWEN3_0_6B))
    assert (config.head_size, config.num_heads, config.hidden_size) == (128, 16, 1024)
    assert config.qk_norm and config.tied_embeddings and not config.qkv_bias
    assert config.rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_size", "qkv_bias", "o_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", 32, 16, False, False, False),
        ("MistralForCausalLM", 8, 16, False, False, False),
        ("Qwen2ForCausalLM", 32, 16, True, False, False),
        ("Qwen3ForCausalLM", 32, 128, False, False, True),
    ],
)
def test_an_absent_field_has_its_class_default(tmp_path, name, kv_heads, head_size, qkv_bias, o_bias, qk_norm):
    config = read_model_config(
        write(tmp_path, SMALL, architectures=[name], num_attention_heads=32, hidden_size=512, sliding_window=GONE)
    )
    assert (config.num_kv_heads, config.head_size) == (kv_heads, head_size)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (qkv_bias, o_bias, False, qk_norm)
    assert not config.tied_embeddings and config.rope == RopeConfig(theta=10_000.0)
    assert config.dtype is None and config.bos_token_id is None and config.eos_token_ids == ()


def test_a_null_key_value_head_count_means_one_for_each_query_head(tmp_path):
    config = write(tmp_path, SMALL, architectures=["MistralForCausalLM"], num_key_value_heads=None, sliding_window=None)
    assert read_model_config(config).num_kv_heads == 4


def test_biases_are_as_the_config_says_where_the_architecture_leaves_them_open(tmp_path):
    config = read_model_config(write(tmp_path, SMALL, attention_bias=True, mlp_bias=True))
    assert config.qkv_bias and config.o_bias and config.mlp_bias


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(type="linear", theta=1e4, factor=2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, RopeConfig(type="linear", theta=1e4, factor=2.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
            RopeConfig(type="linear", theta=1e4, factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            RopeConfig(type="linear", theta=7.0, factor=2.0),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            RopeConfig(type="yarn", theta=1e4, factor=4.0, original_max_position=512),
        ),
        (  # the original context at the top, and transformers' meaning of leaving it out
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512},
            RopeConfig(type="yarn", theta=1e4, factor=4.0, original_max_position=512),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": None}},
            RopeConfig(type="yarn", theta=1e4, factor=4.0, original_max_position=2048),
        ),
        (
            {
                "rope_parameters": {
                    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4, "original_max_position_embeddings": 512},
                    **{"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.5},
                    **{"truncate": False, "finetuned": True},
                }
            },
            RopeConfig(
                type="yarn",
                theta=1e6,
                factor=4.0,
                original_max_position=512,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
                mscale=0.7,
                mscale_all_dim=0.5,
                truncate=False,
            ),
        ),
        ({"partial_rotary_factor": 1.0}, RopeConfig(theta=1e4)),
    ],
)
def test_rope_is_read_in_every_spelling(tmp_path, changes, expected):
    assert rope(tmp_path, **changes) == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"factor": 2.0}}, "no rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, "orig"),
        ({"rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "high_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "spread": 1}}, "spread"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2}}, "differ"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, "partial_rotary_factor"),
    ],
)
def test_rope_that_cannot_be_run_or_would_be_guessed_is_refused_by_name(tmp_path, changes, says):
    assert says in complaint(tmp_path, **changes)


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "Lfm2ForCausalLM"])
def test_an_unsupported_architecture_is_named_with_all_that_are_supported(tmp_path, name):
    message = complaint(tmp_path, architectures=[name])
    assert name in message and all(supported in message for supported in ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": GONE}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        *[({name: GONE}, name) for name in SMALL if name != "architectures"],
        ({"hidden_size": "64"}, "hidden_size must be a whole number of at least 1, got '64'"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads 3, got 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"hidden_size": 66}, "66"),
        ({"head_dim": 15}, "15"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"compression_config": {"format": "int"}}, "compression_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "bfloat16"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [1, True]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"bos_token_id": [1]}, "bos_token_id"),
        ({"layer_types": ["sliding_attention"] * 2}, "full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": [[], {}]}, "layer_types"),
    ],
)
def test_a_missing_or_wrong_field_is_one_line_with_its_name(tmp_path, changes, says):
    assert says in complaint(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "\udcff"}', "[" * 100_000])
def test_a_config_that_is_no_json_object_is_one_line_with_its_name(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_config_is_one_line_with_its_name(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)


def test_both_spellings_of_the_dtype_are_read(tmp_path):
    assert read_model_config(write(tmp_path, SMALL, dtype="float16")).dtype == "float16"
    assert read_model_config(write(tmp_path, SMALL, torch_dtype="float32")).dtype == "float32"


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (GONE, None, ()),
        (None, {}, ()),
        (2, None, (2,)),
        ([2, 3], {"eos_token_id": 3}, (2, 3)),
        (128001, {"eos_token_id": [128001, 128009]}, (128001, 128009)),  # Llama 3 Instruct
        (GONE, {"eos_token_id": [4, 5]}, (4, 5)),
    ],
)
def test_eos_is_the_union_of_config_and_generation_config(tmp_path, config_eos, generation, expected):
    folder = write(tmp_path, SMALL, generation, eos_token_id=config_eos)
    assert read_model_config(folder).eos_token_ids == expected


def test_a_wrong_eos_in_the_generation_config_is_reported_of_that_file(tmp_path):
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        read_model_config(write(tmp_path, SMALL, {"eos_token_id": "</s>"}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, 512),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 2048),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 2048),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}, 2048),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}, 2048),
        (
            {
                **{"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512},
                **{"use_sliding_window": True, "max_window_layers": 1},
            },
            512,
        ),
        (
            {
                **{"architectures": ["Qwen3ForCausalLM"], "sliding_window": 512, "use_sliding_window": True},
                "layer_types": ["sliding_attention", "full_attention"],
            },
            512,
        ),
        (
            {
                **{"architectures": ["Qwen3ForCausalLM"], "sliding_window": 512, "use_sliding_window": True},
                **{"layer_types": ["full_attention"] * 2, "max_window_layers": 0},
            },
            2048,
        ),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 512}, 2048),  # the class has no window
    ],
)
def test_a_sliding_window_in_use_caps_the_context_with_one_warning(tmp_path, caplog, changes, expected):
    folder = write(tmp_path, SMALL, num_key_value_heads=2, **changes)
    with caplog.at_level(logging.WARNING):
        read_model_config(folder, warn=False)
        assert not caplog.records
        assert read_model_config(folder).max_position == expected
    assert len(caplog.records) == (expected == 512)


def test_sampling_defaults_are_the_generation_config_values_that_are_given(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    write(tmp_path, SMALL, {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2})
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 2.0}, {"top_k": 1.5}, {"temperature": -1}])
def test_a_wrong_sampling_default_is_one_line_with_the_file_and_the_name(tmp_path, bad):
    write(tmp_path, SMALL, bad)
    with pytest.raises(ValueError, match=rf"generation_config\.json: {next(iter(bad))}"):
        sampling_defaults(tmp_path)


def test_a_sampling_default_that_is_not_supported_is_logged_unless_neutral(tmp_path, caplog):
    write(tmp_path, SMALL, {"repetition_penalty": 1.1, "min_p": 0.0, "typical_p": 1.0, "top_p": 0.8})
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(tmp_path) == {"top_p": 0.8}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'generation_config.json'}: repetition_penalty=1.1 is not supported and not applied"
    ]
