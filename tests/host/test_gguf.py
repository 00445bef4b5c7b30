"""The one-time import of a GGUF file: exact weights, the same config and tokenizer, refusals before any work."""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from minisgl.source.gguf import import_gguf
from minisgl.source.hub import locate
from minisgl.source.model_config import RopeConfig, read_model_config

HEADS, KV_HEADS, HEAD, MODEL, MLP, LAYERS = 4, 2, 32, 64, 96, 2
GONE = object()  # as a metadata value: leave it out
CONTROL, USER_DEFINED = 3, 4

CORPUS = """The quick brown fox jumps over the lazy dog. It's 1234567 times, isn't it? They'RE here!
    def f(x): return x ** 2  # naïve café, 数字 123, ½ ٣ 😀

\tTabs,  two spaces   and three; trailing space \r\n"""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Written(NamedTuple):
    """A GGUF file, and what it was written from: the checkpoint's own names and row order."""

    file: Path
    tensors: dict[str, NDArray[np.float32]]


def split_by(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def digits_alone() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])


ORIGINALS: Mapping[str, tuple[Callable[[], pre_tokenizers.PreTokenizer], bool, bool]] = {
    # name in the file: as the published tokenizer.json splits words, normalises to NFC, prefers whole words
    "smollm": (digits_alone, False, False),
    "gpt-2": (lambda: pre_tokenizers.ByteLevel(False), False, False),
    "llama-bpe": (split_by(rf"{CONTRACTIONS}|\p{{N}}{{1,3}}|{TAIL}"), False, True),
    "qwen2": (split_by(rf"{CONTRACTIONS}|\p{{N}}|{TAIL}"), True, False),
}


def original_tokenizer(name: str) -> Tokenizer:
    """A byte-level tokenizer of one of the known kinds, trained on a few lines."""
    splits, nfc, whole_words = ORIGINALS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = splits()
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def tokenizer_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [1] * (len(tokens) - 4) + [USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


SMOLLM = tokenizer_metadata(original_tokenizer("smollm"), "smollm")
VOCAB = len(SMOLLM["tokenizer.ggml.tokens"])


def shapes(arch: str, vocab: int, tied: bool, biases: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """A checkpoint's tensors, written out once more."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, MODEL), "model.norm.weight": (MODEL,)}
    if not tied:
        found["lm_head.weight"] = (vocab, MODEL)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        linears = {
            **{"self_attn.q_proj": (HEADS * HEAD, MODEL), "self_attn.k_proj": (KV_HEADS * HEAD, MODEL)},
            **{"self_attn.v_proj": (KV_HEADS * HEAD, MODEL), "self_attn.o_proj": (MODEL, HEADS * HEAD)},
            **{"mlp.gate_proj": (MLP, MODEL), "mlp.up_proj": (MLP, MODEL), "mlp.down_proj": (MODEL, MLP)},
        }
        for name, shape in linears.items():
            found[f"{at}.{name}.weight"] = shape
            if name.split(".")[1] in biases:
                found[f"{at}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}.{name}.weight"] = (MODEL,)
        if arch == "qwen3":
            found |= {f"{at}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    return found


def permuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The order of rows in llama GGUF files, as llama.cpp's converter documents it."""
    half = HEAD // 2
    order = [head * HEAD + (row % 2) * half + row // 2 for head in range(heads) for row in range(HEAD)]
    return values[order]


def write_gguf(
    file: Path,
    arch: str = "llama",
    *,
    kinds: Sequence[Kind] = (Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.F32),
    tied: bool = True,
    biases: Sequence[str] = (),
    extra: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    drop: Sequence[str] = (),
    **metadata: Any,
) -> Written:
    """A small model; matrices take the kinds in turn. `metadata`: __ for a dot, the architecture's prefix left out."""
    values: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": MODEL,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": HEAD,
        **SMOLLM,
        **{name.replace("__", "."): value for name, value in metadata.items()},
    }
    writer = gguf.GGUFWriter(file, arch)
    for name, value in values.items():
        key = name if name.startswith(("tokenizer.", "split.", "general.")) else f"{arch}.{name}"
        if value is not GONE:
            add_value(writer, key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), LAYERS)
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[np.float32]] = {}
    vocab = len(values["tokenizer.ggml.tokens"])
    for number, (name, shape) in enumerate(shapes(arch, vocab, tied, biases).items()):
        kind = kinds[number % len(kinds)] if len(shape) == 2 else Kind.F32
        stored = original = rng.standard_normal(shape, dtype=np.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            stored = permuted(original, shape[0] // HEAD)
        tensors[name] = dequantize(quantize(original, kind), kind)  # each row by itself, so the order is no matter
        base, _, ending = name.rpartition(".")
        if name not in drop:
            writer.add_tensor(f"{names.get_name(base)}.{ending}", quantize(stored, kind), raw_dtype=kind)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(file, tensors)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def read_weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def assert_same_weights(folder: Path, expected: Mapping[str, NDArray[np.float32]]) -> None:
    found = read_weights(folder)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def imported(tmp_path: Path, *args: Any, **kwargs: Any) -> Path:
    written = write_gguf(tmp_path / "m.gguf", *args, **kwargs)
    import_gguf(written.file, tmp_path / "out")
    return tmp_path / "out"


def refusal(tmp_path: Path, *args: Any, **kwargs: Any) -> str:
    """The one line that an import is refused with, before anything is made."""
    written = write_gguf(tmp_path / "m.gguf", *args, **kwargs)
    with pytest.raises(ValueError, match=re.escape(str(written.file))) as caught:
        import_gguf(written.file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["m.gguf"]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("arch", "biases"),
    [
        ("llama", ()),
        ("llama", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("qwen2", ("q_proj", "k_proj", "v_proj")),
        ("qwen3", ()),
    ],
)
def test_weights_are_exactly_what_the_blocks_stand_for_in_the_checkpoints_own_order(tmp_path, arch, biases, tied):
    written = write_gguf(tmp_path / "m.gguf", arch, tied=tied, biases=biases)
    import_gguf(written.file, tmp_path / "out")
    assert_same_weights(tmp_path / "out", written.tensors)
    config = read_model_config(tmp_path / "out")
    assert config.tied_embeddings == tied
    assert (config.qkv_bias, config.o_bias) == (bool(biases), "o_proj" in biases)
    assert config.mlp_bias == ("gate_proj" in biases)


@pytest.mark.parametrize(
    ("arch", "architecture"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_the_config_says_the_same_as_the_metadata(tmp_path, arch, architecture):
    biases = ("q_proj", "k_proj", "v_proj") if arch == "qwen2" else ()
    folder = imported(tmp_path, arch, biases=biases, tokenizer__ggml__eot_token_id=0, rope__freq_base=1e6)
    config = read_model_config(folder)
    assert (config.architecture, config.vocab_size, config.hidden_size) == (architecture, VOCAB, MODEL)
    assert (config.intermediate_size, config.num_layers, config.max_position) == (MLP, LAYERS, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (HEADS, KV_HEADS, HEAD)
    assert config.norm_eps == 1e-5  # not the float32's longer decimal
    assert config.rope == RopeConfig(theta=1e6)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2, 0), "float32")
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == arch and raw["architectures"] == [architecture]


def test_absent_metadata_means_what_the_format_says(tmp_path):
    folder = imported(
        tmp_path,
        **dict.fromkeys(("rope__freq_base", "rope__dimension_count", "attention__value_length"), GONE),
    )
    assert read_model_config(folder).rope == RopeConfig(theta=10_000.0)


def llama3_factors(factor: float, original: float = 8192, theta: float = 5e5) -> NDArray[np.float32]:
    """As llama.cpp's converter computes them."""
    factors = []
    for i in range(HEAD // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / HEAD)
        smooth = (original / wavelength - 1) / (4 - 1)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope__scaling__type": "none"}, RopeConfig(theta=1e4)),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.5},
            RopeConfig(type="linear", theta=1e4, factor=2.5),
        ),
        (
            {
                **{"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
                **{"rope__scaling__original_context_length": 128, "rope__scaling__yarn_beta_slow": 2.0},
            },
            RopeConfig(type="yarn", theta=1e4, factor=4.0, original_max_position=128, beta_slow=2.0),
        ),
    ],
)
def test_rope_scaling_is_carried_over(tmp_path, metadata, expected):
    assert read_model_config(imported(tmp_path, **metadata)).rope == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recovered_from_its_factors(tmp_path, factor):
    extra = {"rope_freqs.weight": llama3_factors(factor)}
    folder = imported(tmp_path, extra=extra, rope__freq_base=5e5, context_length=131072)
    assert read_model_config(folder).rope == RopeConfig(
        type="llama3",
        theta=5e5,
        factor=factor,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert "rope_freqs.weight" not in read_weights(folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"arch": "gemma2"}, "gemma2 is not supported; supported: llama, qwen2, qwen3"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"split__count": 3}, "split"),
        ({"rope__dimension_count": HEAD // 2}, "rope.dimension_count"),
        ({"attention__value_length": HEAD * 2}, "attention.value_length"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.factor"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0}, "original_context_length"),
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor"),
        ({"rope__scale_linear": 2.0}, "scale_linear"),
        ({"extra": {"rope_freqs.weight": llama3_factors(8.0, original=4096)}, "rope__freq_base": 5e5}, "rope_freqs"),
        ({"block_count": LAYERS + 1}, "model.layers.2"),
        ({"block_count": "two"}, "block_count"),
        ({"context_length": GONE}, "context_length"),
        ({"feed_forward_length": MLP * 2}, "expected (192, 64)"),
        ({"drop": ["model.norm.weight"]}, "model.norm.weight"),
        ({"drop": ["model.embed_tokens.weight"]}, "token_embd.weight"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(HEADS * HEAD, np.float32)}}, "k_proj.bias"),
        ({"extra": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, "attn_sinks"),
        ({"extra": {"blk.2.attn_norm.weight": np.zeros(MODEL, np.float32)}}, "blk.2.attn_norm.weight"),
        ({"tokenizer__ggml__model": "bert"}, "gpt2 or llama"),
        ({"tokenizer__ggml__pre": "default"}, "tokenizer.ggml.pre: default"),
        ({"tokenizer__ggml__pre": GONE}, "tokenizer.ggml.pre: none"),
        ({"tokenizer__ggml__pre": "starcoder"}, "known: gpt-2, smollm"),
        ({"tokenizer__ggml__merges": ["a b", "nowhere x"]}, "merges"),
        ({"tokenizer__ggml__merges": ["ab"]}, "merges"),
        ({"tokenizer__ggml__tokens": ["a"] * VOCAB}, "inconsistent"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "a list of str"),
        ({"tokenizer__ggml__merges": "a b"}, "a list of str"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": [0.5]}, "scores"),
        ({"tokenizer__ggml__token_type": [1]}, "inconsistent"),
        ({"tokenizer__ggml__bos_token_id": VOCAB}, "bos_token_id"),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": GONE}, "BOS"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name_before_anything_is_made(tmp_path, arguments, says):
    assert says in refusal(tmp_path, **arguments)


def test_a_quantisation_that_cannot_be_read_is_refused_by_name(tmp_path):
    written = write_gguf(tmp_path / "m.gguf", kinds=[Kind.F16])
    content = written.file.read_bytes()
    start = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    assert content[start : start + 4] == Kind.F16.to_bytes(4, "little")
    written.file.write_bytes(content[:start] + Kind.I16.to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight is of type I16"):
        import_gguf(written.file, tmp_path / "out")


def test_a_file_that_is_no_gguf_or_not_whole_is_one_clear_line(tmp_path):
    written = write_gguf(tmp_path / "m.gguf")
    content = written.file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 200, 7), *range(200, len(content) - 1, len(content) // 60), len(content) - 33]:
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=re.escape(str(cut))):
            import_gguf(cut, tmp_path / "out")
    for start in (b"GGUF" + (4).to_bytes(4, "little"), b"GGUF" + (3).to_bytes(4, "big"), b"PK\3\4"):
        cut.write_bytes(start + content[8:])
        with pytest.raises(ValueError, match=re.escape(str(cut))):
            import_gguf(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for what it takes for numbers
def test_a_damaged_list_of_tensors_is_never_worse_than_a_value_error(tmp_path):
    content = write_gguf(tmp_path / "m.gguf").file.read_bytes()
    start, end = content.index(b"token_embd.weight"), content.index(b"blk.1.ffn_down.weight")
    damaged, rng = tmp_path / "damaged.gguf", random.Random(0)
    for _ in range(25):
        changed = bytearray(content)
        changed[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        damaged.write_bytes(changed)
        with contextlib.suppress(ValueError):
            import_gguf(damaged, tmp_path / "out")
            shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("pre", ORIGINALS)
def test_the_tokenizer_encodes_and_decodes_as_the_original(tmp_path, pre):
    original = original_tokenizer(pre)
    folder = imported(tmp_path, **tokenizer_metadata(original, pre), tokenizer__ggml__add_bos_token=False)
    rebuilt = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(0)
    characters = [chr(c) for c in range(1, 0x2100) if not 0x80 <= c < 0xA0] + [*"数字😀e\u0301"] + [" ", "\n", "9"] * 50
    texts = [CORPUS, *("".join(rng.choices(characters, k=30)) for _ in range(200))]
    texts += ["<|im_start|>user\nhi<|im_end|>", "a<tool>b </tool>", ""]
    for text in texts:
        assert rebuilt.encode(text).ids == original.encode(text).ids, text
        assert rebuilt.decode(rebuilt.encode(text).ids) == original.decode(original.encode(text).ids)


def test_special_tokens_are_one_id_and_digits_stand_alone(tmp_path):
    tokenizer = Tokenizer.from_file(str(imported(tmp_path) / "tokenizer.json"))
    encoding = tokenizer.encode("<|im_start|>in 2024<tool><|im_end|>")
    assert encoding.ids[0] == 1 and encoding.ids[-1] == 2
    assert encoding.tokens[-6:-2] == ["2", "0", "2", "4"]
    assert tokenizer.decode(encoding.ids) == "in 2024<tool>"  # user-defined tokens are text, control tokens are not


@pytest.mark.parametrize(
    ("pre", "says", "expected"),
    [("smollm", GONE, []), ("smollm", True, [1]), ("llama-bpe", GONE, [1]), ("llama-bpe", False, [])],
)
def test_bos_is_put_in_front_where_the_file_or_its_kind_says_so(tmp_path, pre, says, expected):
    folder = imported(tmp_path, tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=says)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = tokenizer.encode("dog", add_special_tokens=False).ids
    assert 1 not in plain and tokenizer.encode("dog").ids == expected + plain
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] == bool(expected)
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages[0].content }}"


PIECES = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁h", "▁hell", "▁hello", "lo", "o▁"]
"""After <unk>, <s>, </s> and the bytes; the earlier, the better the score."""


def sentencepiece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": GONE,
        "tokenizer.ggml.merges": GONE,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{n}]" for n in range(VOCAB - len(tokens))],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(VOCAB - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4, *[5] * (VOCAB - len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(tmp_path):
    tokenizer = Tokenizer.from_file(str(imported(tmp_path, **sentencepiece()) / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer.encode("helo").tokens == ["<s>", "▁", "he", "lo"]  # "he" before "▁h", then nothing joins "▁"
    assert tokenizer.encode("lo he", add_special_tokens=False).tokens == ["▁", "lo", "▁", "he"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("<tool></s>", add_special_tokens=False).ids == [259 + len(PIECES), 2]
    for text in ("hello hello", "  two", "é😀\n", "ell "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_sentencepiece_vocabulary_without_space_prefix_adds_none(tmp_path):
    changes = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.from_file(str(imported(tmp_path, **sentencepiece(**changes)) / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hell", "o"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


def test_progress_rises_to_the_size_of_the_weights(tmp_path):
    written = write_gguf(tmp_path / "m.gguf")
    reports: list[tuple[str, float, float | None]] = []
    import_gguf(written.file, tmp_path / "out", lambda *report: reports.append(report))
    total = sum(values.nbytes for values in written.tensors.values())
    assert reports[0] == ("reading m.gguf", 0, None)
    done = [report[1] for report in reports[1:]]
    assert done == sorted(done) and reports[-1] == ("importing m.gguf", total, total)


def test_an_interrupted_import_leaves_nothing_that_the_next_one_would_trust(tmp_path):
    written = write_gguf(tmp_path / "m.gguf")

    def interrupt(what: str, done_bytes: float, total_bytes: float | None) -> None:
        if what.startswith("importing") and total_bytes and done_bytes > total_bytes / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(written.file, tmp_path / "out", interrupt)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["m.gguf"]
    import_gguf(written.file, tmp_path / "out")
    assert_same_weights(tmp_path / "out", written.tensors)


def test_what_a_killed_import_left_is_cleared_by_the_next(tmp_path):
    written = write_gguf(tmp_path / "m.gguf")
    left = tmp_path / ".out.partial" / "folder"
    left.mkdir(parents=True)
    (left / "model-00001-of-00009.safetensors").write_bytes(b"half")
    import_gguf(written.file, tmp_path / "out")
    assert_same_weights(tmp_path / "out", written.tensors)
    assert not left.parent.exists()


def test_a_disk_without_room_is_noticed_before_anything_is_converted(tmp_path, monkeypatch):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    written = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=99))
    with pytest.raises(ValueError, match=r"importing m\.gguf needs .* GB of disk"):
        locate(str(written.file))
    assert [path.suffix for path in (tmp_path / "cache" / "imported").iterdir()] == [".lock"]


def test_a_disk_that_fills_up_on_the_way_is_one_line_and_leaves_nothing(tmp_path):
    written = write_gguf(tmp_path / "m.gguf")
    limited = """
import resource, sys
from minisgl.source.hub import locate
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    locate(sys.argv[1])
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", limited, str(written.file)],
        env=os.environ | {"MINISGL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"cannot get {written.file}: File too large") and done.stdout.count("\n") == 1
    assert [path.suffix for path in (tmp_path / "cache" / "imported").iterdir()] == [".lock"]


def test_a_local_file_is_imported_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    written = write_gguf(tmp_path / "tiny.gguf")
    first = locate(str(written.file))
    assert first.name == "tiny" and first.path.parent == tmp_path / "cache" / "imported"
    assert_same_weights(first.path, written.tensors)

    stat = written.file.stat()
    written.file.write_bytes(b"\0" * stat.st_size)  # the second start does not open the file
    os.utime(written.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert locate(str(written.file)) == first

    changed = write_gguf(written.file, context_length=256)
    second = locate(str(changed.file))
    assert second.path != first.path and read_model_config(second.path).max_position == 256
