"""The decoder against transformers: the same logits in float32, and the same greedy tokens, however the work is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minisgl.attention.base import KVCache, PagedAttention, Shape, Step
from minisgl.attention.choose import attention
from minisgl.model.decoder import Decoder
from minisgl.model.layers import rms_norm
from minisgl.model.weights import load_weights
from minisgl.source.model_config import read_model_config

MakeStep = Callable[..., tuple[Step, Tensor]]
CPU = torch.device("cpu")
NEW_TOKENS = 6

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama, tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama, attention bias": (LLAMA, {"attention_bias": True}),
    "llama, mlp bias": (LLAMA, {"mlp_bias": True}),
    "llama, head size not width / heads": (LLAMA, {"head_dim": 24}),
    "llama, one key head": (LLAMA, {"num_key_value_heads": 1}),
    "llama, a key head per query head": (LLAMA, {"num_key_value_heads": 4}),
    "llama, norm eps": (LLAMA, {"rms_norm_eps": 0.1}),
    "llama, theta": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama, linear": (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, llama3": (
        LLAMA,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": (MISTRAL, {}),
    "qwen2": (QWEN2, {}),
    "qwen2, tied": (QWEN2, {"tie_word_embeddings": True}),
    "qwen2, yarn": (
        QWEN2,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "qwen3": (QWEN3, {"head_dim": 32}),
    "qwen3, tied": (QWEN3, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3, attention bias": (QWEN3, {"attention_bias": True, "head_dim": 16}),
}


@pytest.fixture(params=MODELS.values(), ids=list(MODELS))
def checkpoint(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    architecture, overrides = request.param
    return tiny_model(architecture, **overrides)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(read_model_config(folder), dtype, CPU)
    load_weights(model, folder)
    return model


def backend(model: Decoder, num_pages: int, page_size: int) -> PagedAttention:
    config, dtype = model.config, model.norm.weight.dtype
    shape = Shape(page_size, config.num_heads, config.num_kv_heads, config.head_size, dtype, None)
    return attention(("reference", "reference"), KVCache(shape, config.num_layers, num_pages, CPU), shape)


@dataclass
class Generation:
    """A request that the test drives: its tokens, how many have KV, and the logits after each of those."""

    tokens: list[int]
    prompt_len: int
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


def generate(
    model: Decoder, make_step: MakeStep, prompts: Sequence[Sequence[int]], chunk: int, page_size: int
) -> list[Generation]:
    """Greedy tokens of all prompts run together, `chunk` prompt tokens of each a step, beside those that decode."""
    requests = [Generation(list(prompt), len(prompt)) for prompt in prompts]
    width = -(-max(len(prompt) + NEW_TOKENS for prompt in prompts) // page_size)
    generator = torch.Generator().manual_seed(1)
    num_pages = width * len(prompts)
    page_table = torch.randperm(num_pages, generator=generator).int().view(len(prompts), width)
    paged = backend(model, num_pages, page_size)
    while running := [r for r in requests if len(r.tokens) < r.prompt_len + NEW_TOKENS]:
        decodes = [r for r in running if r.done >= r.prompt_len]
        prefills = [r for r in running if r.done < r.prompt_len]
        ends = [min(r.done + chunk, r.prompt_len) if r in prefills else r.done + 1 for r in decodes + prefills]
        rows = [
            (requests.index(r), r.tokens[r.done : end], end) for r, end in zip(decodes + prefills, ends, strict=True)
        ]
        step, input_ids = make_step(page_table, page_size, rows, len(decodes))
        paged.begin(step)
        logits = model.logits(model(input_ids, step.positions, paged))  # [T, V]
        sizes = [len(tokens) for _, tokens, _ in rows]
        for request, end, rows_logits in zip(decodes + prefills, ends, logits.split(sizes), strict=True):
            request.done = end
            request.logits += rows_logits
            if end == len(request.tokens):
                request.tokens.append(int(rows_logits[-1].argmax()))
    return requests


@pytest.mark.parametrize(("chunk", "page_size"), [(1000, 16), (7, 4), (1, 1)], ids=["whole", "chunks", "single"])
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoint: Path, make_step: MakeStep, chunk: int, page_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(320, (n,), generator=generator).tolist() for n in (23, 1, 60, 8)]
    requests = generate(loaded(checkpoint), make_step, prompts, chunk, page_size)

    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for request in requests:
        with torch.inference_mode():
            expected = reference(torch.tensor([request.tokens[:-1]])).logits[0]
        torch.testing.assert_close(torch.stack(request.logits), expected, rtol=0, atol=1e-4)
        assert request.tokens[request.prompt_len :] == expected[request.prompt_len - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (QWEN3, {"head_dim": 16}),
        (QWEN2, {"tie_word_embeddings": True}),
        (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    tiny_model: Callable[..., Path], make_step: MakeStep, architecture: str, changes: dict[str, Any], packed: bool
) -> None:
    folder = tiny_model(architecture, **changes)
    prompt = torch.randint(320, (60,), generator=torch.Generator().manual_seed(0))
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.inference_mode():
        exact, theirs = (load(folder, dtype=d)(prompt[None]).logits[0] for d in (torch.float32, torch.bfloat16))
    model = loaded(folder, torch.bfloat16)
    if packed:
        model.pack()
    for chunk in (1000, 1):
        ours = torch.stack(generate(model, make_step, [prompt.tolist()], chunk, 16)[0].logits)[:60]
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).abs().mean() < 1.5 * (theirs.float() - exact).abs().mean()


def test_packing_leaves_float32_as_it_is(tiny_model: Callable[..., Path]) -> None:
    model = loaded(tiny_model(LLAMA))
    model.pack()
    assert all(p.numel() for p in model.parameters())


def test_token_ids_may_be_32_bit(tiny_model: Callable[..., Path], make_step: MakeStep) -> None:
    model = loaded(tiny_model(LLAMA))
    step, input_ids = make_step(torch.arange(4, dtype=torch.int32)[None], 16, [(0, [5, 300, 7], 3)], 0)
    paged = backend(model, 4, 16)
    paged.begin(step)
    wide = model(input_ids, step.positions, paged)
    torch.testing.assert_close(model(input_ids.int(), step.positions, paged), wide, rtol=0, atol=0)


def test_norms_round_to_bfloat16_where_transformers_does() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    theirs = Qwen3RMSNorm(64, eps=1e-5).bfloat16()
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), theirs(x).detach(), rtol=0, atol=0)
