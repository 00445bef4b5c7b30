"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them is in ModelConfig.

Modules carry the names that checkpoints use, so that `weights.py` needs no table of names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention import base
from minisgl.kernels.one_row import project
from minisgl.kernels.rotary import Rotation, rotate_and_store
from minisgl.model.layers import Embedding, Linear, RMSNorm, SummedLinear, normed_projection
from minisgl.model.packed import PackedWeight, can_pack
from minisgl.model.rope import rope_table
from minisgl.parallel.ranks import ALONE, Ranks
from minisgl.parallel.sharding import Vocabulary, heads, shards, whole
from minisgl.source.model_config import ModelConfig


class Decoder(nn.Module):
    """Token ids to hidden states to logits; the past lives in the attention backend that each call is given.

    Each of several ranks has some heads, some of the feed-forward network's width, and the scores of some tokens;
    hidden states are the same on all.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = Vocabulary.of(config.vocab_size, ranks)
        self.num_heads = heads(config.num_heads, ranks).size
        """This rank's."""
        self.embed_tokens = Embedding(self.vocabulary, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype, device, ranks) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.lm_head = None
        self._packed_head: PackedWeight | None = None
        if not config.tied_embeddings:
            outputs = {"": self.vocabulary.mine}
            self.lm_head = Linear(whole(config.hidden_size), outputs, dtype, device, bias=False)
        self.cos_sin = rope_table(config.rope, config.head_size, config.max_position, device)  # [max_position, D]

    def forward(self, input_ids: Tensor, positions: Tensor, attention: base.Attention) -> Tensor:
        """Hidden states after the final norm, [T, E]; `attention` has planned the step that these tokens belong to.

        input_ids is [T] int32 or int64, positions [T] int64.
        """
        rotation = Rotation(self.cos_sin, positions)
        x, delta = self.embed_tokens(input_ids), None  # [T, E] each; the residual stream is their sum
        for layer in self.layers:
            x, delta = layer(x, delta, rotation, attention)
        return self.norm(x, delta)[1]  # [T, E]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Scores of this rank's tokens as the next, [S, v], for hidden states [S, E]; written to `out`, if given."""
        if out is not None:
            weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
            if hidden.is_cuda and len(hidden) == 1:
                return out.copy_(project(hidden, weight)[1])
            return torch.mm(hidden, weight.t(), out=out)
        if self.lm_head is not None:
            return self.lm_head(hidden)
        if self._packed_head is not None:
            return self._packed_head.linear(hidden, None)
        return F.linear(hidden, self.embed_tokens.weight)  # [S, v]

    def pack(self) -> None:
        """Once loaded: lay weights out for the CPU where that pays. They can't be loaded again after that."""
        if not can_pack(self.embed_tokens.weight):
            return
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.lm_head is None:
            self._packed_head = PackedWeight(self.embed_tokens.weight)  # beside the one that is looked up in


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.self_attn = Attention(config, layer, dtype, device, ranks)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device, ranks)

    def forward(
        self, x: Tensor, delta: Tensor | None, rotation: Rotation, attention: base.Attention
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x + delta, [T, E] each, to the next layer's x and delta: norms add as they read."""
        x, delta = self.self_attn(self.input_layernorm, x, delta, rotation, attention)
        return self.mlp(self.post_attention_layernorm, x, delta)

    __call__ = forward


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key and value heads, both this rank's."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.head_size
        q, kv = (heads(n, ranks).of_heads(config.head_size) for n in (config.num_heads, config.num_kv_heads))
        self.qkv_proj = Linear(
            whole(config.hidden_size),
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            dtype,
            device,
            bias=config.qkv_bias,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_size, config.norm_eps, dtype, device)
            self.k_norm = RMSNorm(config.head_size, config.norm_eps, dtype, device)
        self.o_proj = SummedLinear(q, config.hidden_size, dtype, device, ranks, bias=config.o_bias)

    def forward(
        self, norm: RMSNorm, x: Tensor, delta: Tensor | None, rotation: Rotation, attention: base.Attention
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x + delta, [T, E] each, and what attention to its norm adds to it."""
        x, qkv = normed_projection(norm, self.qkv_proj, x, delta)
        heads = qkv.view(len(x), -1, self.head_size)  # [T, H + 2 K, D]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        keys, values = attention.kv.entries(self.layer)
        q = rotate_and_store(heads, rotation, norms, keys, values, attention.entries)  # [T, H, D]
        out = attention.forward(self.layer, q)  # [T, H, D]
        return x, self.o_proj(out.flatten(1))

    __call__ = forward


class MLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        super().__init__()
        width = shards(config.intermediate_size, ranks)[ranks.rank]
        self.gate_up_proj = Linear(
            whole(config.hidden_size),
            {"gate_proj": width, "up_proj": width},
            dtype,
            device,
            bias=config.mlp_bias,
        )
        self.down_proj = SummedLinear(width, config.hidden_size, dtype, device, ranks, bias=config.mlp_bias)

    def forward(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream x + delta, [T, E] each, and what the network adds to it."""
        x, hidden = normed_projection(norm, self.gate_up_proj, x, delta, gated=True)
        return x, self.down_proj(hidden)

    __call__ = forward
