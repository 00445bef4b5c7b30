"""Tiny random checkpoints, and steps for the model and the attention backend without an engine."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from minisgl.attention.base import Step
from minisgl.batch import Batch, Joins

Row = tuple[int, Sequence[int], int]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(architecture, **config_overrides)`: the folder of a random 2-layer checkpoint in float32.

    Overrides are config.json's own keys. The same arguments give the same folder: nobody may write to it.
    """
    made: dict[str, Path] = {}

    def make(architecture: str, **config_overrides: Any) -> Path:
        key = json.dumps([architecture, config_overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(architecture)
            _write_tiny_model(made[key], architecture, config_overrides)
        return made[key]

    return make


def _write_tiny_model(folder: Path, architecture: str, overrides: dict[str, Any]) -> None:
    model_class = getattr(transformers, architecture)
    config = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**config | overrides))
        for name, parameter in model.named_parameters():  # nothing at a neutral value: a mistake must show
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_step() -> Callable[[Tensor, int, Sequence[Row], int], tuple[Step, Tensor]]:
    """`make_step(page_table, page_size, rows, num_decode)`: a Step on the table's device, and all its tokens' ids [T].

    A row is (slot, new tokens, length with them); decode rows come first.
    """
    return _make_step


def _make_step(page_table: Tensor, page_size: int, rows: Sequence[Row], num_decode: int) -> tuple[Step, Tensor]:
    slots, new_tokens, kv_lens = zip(*rows, strict=True)
    q_lens = [len(tokens) for tokens in new_tokens]
    batch = Batch(
        slots=np.array(slots, np.int32),
        q_len=np.array(q_lens, np.int32),
        kv_len=np.array(kv_lens, np.int32),
        num_decode=num_decode,
        input_ids=np.array([token for tokens in new_tokens[num_decode:] for token in tokens], np.int32),
        samples=np.ones(len(rows), np.bool_),
        page_writes=np.zeros((0, 3), np.int32),
        joins=Joins.greedy(np.empty(0, np.int32)),
    )
    device = page_table.device
    positions = torch.cat([torch.arange(k - q, k) for q, k in zip(q_lens, kv_lens, strict=True)]).to(device)
    pages = page_table[torch.tensor(np.repeat(slots, q_lens), device=device), positions // page_size].long()
    step = Step(
        batch=batch,
        tables=page_table[list(slots)],
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        positions=positions,
        entries=pages * page_size + positions % page_size,
    )
    return step, torch.tensor([token for tokens in new_tokens for token in tokens], device=device)
