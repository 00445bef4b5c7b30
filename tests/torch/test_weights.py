"""Loading: every parameter set once, from any spelling of a checkpoint, or a clear refusal; and dummy weights."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl.model.decoder import Decoder
from minisgl.model.weights import dummy_weights, load_weights
from minisgl.source.model_config import read_model_config

CPU = torch.device("cpu")
TinyModel = Callable[..., Path]
Tensors = dict[str, Tensor]


@pytest.fixture
def llama(tiny_model: TinyModel) -> Path:
    return tiny_model("LlamaForCausalLM")


@pytest.fixture
def tied(tiny_model: TinyModel) -> Path:
    return tiny_model("LlamaForCausalLM", tie_word_embeddings=True)


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def load(config_from: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """The parameters that a checkpoint gives; NaN wherever nothing was written."""
    model = Decoder(read_model_config(config_from), dtype, CPU)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, folder)
    return dict(model.named_parameters())


def load_saved(config_from: Path, tensors: Tensors, folder: Path) -> Tensors:
    save_file(tensors, folder / "model.safetensors")
    return load(config_from, folder)


def save_shards(folder: Path, tensors: Tensors, count: int) -> list[Path]:
    names = list(tensors)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::count]}, folder / file)
    weight_map = {name: files[i % count] for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file for file in files]


def assert_same(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_separate_projections_become_slices_of_the_fused_ones(tiny_model: TinyModel) -> None:
    folder = tiny_model("Qwen2ForCausalLM")  # has biases on q, k and v
    tensors, got = tensors_of(folder), load(folder, folder)
    for layer in range(2):
        there, here = f"model.layers.{layer}.", f"layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [tensors[f"{there}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            assert torch.equal(got[f"{here}self_attn.qkv_proj.{kind}"], torch.cat(parts))
        parts = [tensors[f"{there}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(got[f"{here}mlp.gate_up_proj.weight"], torch.cat(parts))
    for name in ("embed_tokens.weight", "norm.weight", "layers.1.self_attn.o_proj.weight"):
        assert torch.equal(got[name], tensors[f"model.{name}"])
    assert torch.equal(got["lm_head.weight"], tensors["lm_head.weight"])


def test_shards_give_what_one_file_gives(llama: Path, tmp_path: Path) -> None:
    save_shards(tmp_path, tensors_of(llama), count=3)
    assert_same(load(llama, tmp_path), load(llama, llama))


def test_names_without_the_model_prefix_are_the_same_names(llama: Path, tmp_path: Path) -> None:
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors_of(llama).items()}
    assert_same(load_saved(llama, bare, tmp_path), load(llama, llama))


def test_a_checkpoint_may_be_fused_already(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("Qwen2ForCausalLM")
    fused = {name: tensor.clone() for name, tensor in load(folder, folder).items()}
    assert_same(load_saved(folder, fused, tmp_path), load(folder, folder))


def test_weights_are_cast_to_the_dtype_of_the_model(llama: Path) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in load(llama, llama).items()}
    assert_same(load(llama, llama, torch.bfloat16), expected)


def test_tensors_that_follow_from_the_config_are_skipped(llama: Path, tmp_path: Path) -> None:
    old = tensors_of(llama) | {
        "model.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    assert_same(load_saved(llama, old, tmp_path), load(llama, llama))


def test_a_tied_model_takes_the_embedding_and_skips_a_redundant_head(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tensors_of(tied)
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert_same(load_saved(tied, both, tmp_path), load(tied, tied))
    assert not caplog.records


def test_a_tied_model_says_so_when_it_skips_a_head_of_another_value(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tensors_of(tied) | {"lm_head.weight": torch.randn(320, 64)}
    assert_same(load_saved(tied, other, tmp_path), load(tied, tied))
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_a_tied_model_takes_its_embedding_from_the_head_if_that_is_all_there_is(tied: Path, tmp_path: Path) -> None:
    tensors = tensors_of(tied)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    assert_same(load_saved(tied, tensors, tmp_path), load(tied, tied))


def test_an_untied_model_without_a_head_is_refused(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lacks .* lm_head\.weight; without it, tie_word_embeddings must be true"):
        load_saved(llama, tensors, tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path, name: str) -> None:
    tensors = tensors_of(llama)
    del tensors[name]
    with pytest.raises(ValueError, match=f"lacks tensors that the model needs: {re.escape(name[6:])}$"):
        load_saved(llama, tensors, tmp_path)


def test_of_many_missing_tensors_some_are_named_and_the_rest_counted(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs: embed_tokens\.weight, layers\.0\..* and 16 more"):
        load_saved(llama, {}, tmp_path)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"])
def test_a_tensor_without_a_place_is_named(llama: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"no place for: {re.escape(name)}$"):
        load_saved(llama, tensors_of(llama) | {name: torch.zeros(4)}, tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    wrong = tensors_of(llama) | {name: torch.zeros(16, 64)}
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has shape \[16, 64\] .* asks for \[32, 64\]"):
        load_saved(llama, wrong, tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_tensor_that_is_not_plain_floating_point_is_named(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = tensors_of(llama)
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is [UIF]8.*; weights must be one of F64, F32, F16, BF16"):
        load_saved(llama, tensors, tmp_path)


def test_a_tensor_in_two_files_is_named_with_both(llama: Path, tmp_path: Path) -> None:
    first, second = save_shards(tmp_path, tensors_of(llama), count=2)
    save_file(load_file(second) | {"model.norm.weight": torch.ones(64)}, second)
    save_file(load_file(first) | {"model.norm.weight": torch.ones(64)}, first)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is there twice: in .*00001-of.* and in .*00002-of"):
        load(llama, tmp_path)


def test_a_tensor_with_and_without_prefix_is_there_twice(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"norm\.weight is there twice"):
        load_saved(llama, tensors_of(llama) | {"norm.weight": torch.ones(64)}, tmp_path)


def test_a_projection_both_fused_and_in_parts_is_refused(llama: Path, tmp_path: Path) -> None:
    fused = tensors_of(llama) | {"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(192, 64)}
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\..*_proj\.weight sets what another tensor of .* sets too"):
        load_saved(llama, fused, tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1], ids=["empty", "5 bytes", "half a header", "all but a byte"])
def test_a_truncated_file_is_named(llama: Path, tmp_path: Path, kept: int) -> None:
    whole = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file .*fetch it again"):
        load(llama, tmp_path)


def test_a_file_that_is_something_else_is_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        load(llama, tmp_path)


def test_a_shard_that_is_missing_is_named(llama: Path, tmp_path: Path) -> None:
    save_shards(tmp_path, tensors_of(llama), count=3)[1].unlink()
    with pytest.raises(ValueError, match=r"index\.json names 'model-00002-of-00003\.safetensors', which is not a file"):
        load(llama, tmp_path)


def test_an_index_may_not_point_outside_its_folder(llama: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": str(llama / "model.safetensors")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is not a file in"):
        load(llama, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_named(llama: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load(llama, tmp_path)


def test_a_folder_without_weights_says_what_is_missing(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"):
        load(llama, tmp_path)


def test_pickled_weights_are_refused_and_told_what_to_do(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ValueError, match=r"pickled weights .* convert them to safetensors"):
        load(llama, tmp_path)


def test_nothing_is_written_before_everything_is_checked(llama: Path, tmp_path: Path) -> None:
    save_file(tensors_of(llama) | {"z": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = Decoder(read_model_config(llama), torch.float32, CPU)
    dummy_weights(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="no place for: z"):
        load_weights(model, tmp_path)
    assert_same(dict(model.named_parameters()), before)


def test_progress_counts_bytes_up_to_all_of_them(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    save_shards(tmp_path, tensors, count=2)
    seen: list[tuple[int, int]] = []
    load_weights(
        Decoder(read_model_config(llama), torch.float32, CPU), tmp_path, lambda done, total: seen.append((done, total))
    )
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert len(seen) == len(tensors)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {of for _, of in seen} == {seen[-1][0]} == {total}


PRINT_PEAK = """
import sys
from pathlib import Path
import torch
from minisgl.model.decoder import Decoder
from minisgl.model.weights import load_weights
from minisgl.source.model_config import read_model_config

def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
model = Decoder(read_model_config(folder), torch.float32, torch.device("cpu"))
before = peak_kib()
load_weights(model, folder)
print((peak_kib() - before) * 1024)
"""


def test_loading_holds_the_model_and_one_tensor(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = json.loads((tiny_model("LlamaForCausalLM") / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Decoder(read_model_config(tmp_path), torch.float32, CPU)
    dummy_weights(model)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert sum(sizes) > 150e6
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")

    done = subprocess.run(
        [sys.executable, "-c", PRINT_PEAK, tmp_path],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < sum(sizes) + max(sizes) + 32e6  # the file is as large as the model


def test_dummy_weights_are_the_same_for_a_seed_and_fill_every_parameter(tiny_model: TinyModel) -> None:
    config = read_model_config(tiny_model("Qwen2ForCausalLM"))

    def made(seed: int) -> Tensors:
        model = Decoder(config, torch.bfloat16, CPU)
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        dummy_weights(model, seed)
        return dict(model.named_parameters())

    first = made(seed=0)
    assert_same(made(seed=0), first)
    other = made(seed=1)
    for name, tensor in first.items():
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert tensor.float().mean().abs() < 0.01, name
            assert 0.015 < tensor.float().std() < 0.025, name
            assert not torch.equal(tensor, other[name])
