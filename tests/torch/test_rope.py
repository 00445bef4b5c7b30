"""Rotary embedding: the numbers of transformers, for every type and the factors of published models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minisgl.kernels.rotary import Rotation, rotate
from minisgl.model.rope import attention_factor, inverse_frequencies, rope_table
from minisgl.source.model_config import RopeConfig

LLAMA_31 = RopeConfig(
    type="llama3", theta=5e5, factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
QWEN_YARN = RopeConfig(type="yarn", theta=1e6, factor=4.0, original_max_position=32768)
SHORT_YARN = RopeConfig(type="yarn", theta=1e4, factor=16.0, original_max_position=4096)

ROPES = {
    "SmolLM2": (RopeConfig(theta=1e5), 64),
    "Qwen3": (RopeConfig(theta=1e6), 128),
    "linear": (RopeConfig(type="linear", theta=1e4, factor=2.5), 128),
    "Llama 3.1": (LLAMA_31, 128),
    "Llama 3.2": (replace(LLAMA_31, factor=32.0), 64),
    "llama3, other bounds": (replace(LLAMA_31, factor=6.0, low_freq_factor=2.0, high_freq_factor=9.0), 128),
    "yarn, Qwen": (QWEN_YARN, 128),
    "yarn, other betas": (replace(SHORT_YARN, factor=10.0, beta_fast=8.0, beta_slow=0.5), 64),
    "yarn, attention_factor": (replace(SHORT_YARN, attention_factor=1.25), 64),
    "yarn, mscale": (replace(SHORT_YARN, mscale=1.0, mscale_all_dim=0.707), 64),
    "yarn, only one mscale": (replace(SHORT_YARN, mscale=0.707), 64),
    "yarn, not truncated": (replace(SHORT_YARN, truncate=False), 64),
    "yarn, factor 1": (replace(SHORT_YARN, factor=1.0), 64),
    "yarn, ramp of no width": (replace(SHORT_YARN, original_max_position=4, theta=1e4), 16),
}


def transformers_config(rope: RopeConfig, head_size: int) -> LlamaConfig:
    parameters: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        parameters["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.type == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    elif rope.type == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    else:
        names = ()
    parameters |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return LlamaConfig(
        head_dim=head_size, hidden_size=256, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters=parameters,
    )  # fmt: skip


@pytest.mark.parametrize(("rope", "head_size"), ROPES.values(), ids=ROPES)
def test_frequencies_and_attention_factor_are_those_of_transformers(rope: RopeConfig, head_size: int) -> None:
    config = transformers_config(rope, head_size)
    if rope.type == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.type](config)
    torch.testing.assert_close(inverse_frequencies(rope, head_size), expected, rtol=3e-7, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("rope", "head_size"), ROPES.values(), ids=ROPES)
def test_rotated_heads_are_those_of_transformers(rope: RopeConfig, head_size: int) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 63, 500, 2047])
    q = torch.randn(6, 3, head_size)
    cos, sin = LlamaRotaryEmbedding(transformers_config(rope, head_size))(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q[None], q[None], cos, sin, unsqueeze_dim=2)

    table = rope_table(rope, head_size, 2048, torch.device("cpu"))
    assert table.shape == (2048, head_size)
    assert table.dtype == torch.float32
    torch.testing.assert_close(rotate(q, Rotation(table, positions).factors), expected[0], rtol=0, atol=2e-5)


def test_half_precision_is_rotated_in_float32_and_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 64, dtype=torch.bfloat16)
    cos_sin = Rotation(rope_table(RopeConfig(theta=1e4), 64, 5, torch.device("cpu")), torch.arange(5)).factors
    rotated = rotate(x, cos_sin)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated, rotate(x.float(), cos_sin).bfloat16(), rtol=0, atol=0)
