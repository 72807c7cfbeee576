"""The demo's GPT: PyTorch's own layers, and the same blocks as fused layers of ckptkern."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ... import eager, ops
from ... import nn as segments
from .config import Config
from .moe import GroupedExperts, MoE

VOCABULARY = 256  # bytes


class TorchMLP(nn.Module):
    """fc2(dropout(activation(fc1(x)))) in torch's own layers, with the parameter names of ``ckptkern.nn.MLP``."""

    def __init__(self, d_model: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, 4 * d_model)
        self.fc2 = nn.Linear(4 * d_model, d_model)
        self.activation = eager.ACTIVATIONS[activation].act
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class Attention(nn.Module):
    """Causal self-attention in torch's own layers. x [B, S, D] -> [B, S, D]."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block: x [B, S, D] -> (y alike, the imbalance of its router, if it has one)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.d_model
        self.norm1 = nn.LayerNorm(d)
        self.attention = Attention(d, config.heads)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = self.make_mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def make_mlp(self, config: Config) -> nn.Module:
        return TorchMLP(config.d_model, config.activation, config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.attention(self.norm1(x)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        x = self.attend(x)
        return x + self.mlp(self.norm2(x)), 0.0

    def last_weights(self) -> list[Tensor]:
        """Those that write to the residual stream."""
        return [self.attention.out.weight, self.mlp.fc2.weight]

    def attention_arguments(self) -> dict[str, Any]:
        """Those of ckptkern.attention_block."""
        qkv, out = self.attention.qkv, self.attention.out
        return {
            "qkv_weight": qkv.weight, "qkv_bias": qkv.bias, "out_weight": out.weight, "out_bias": out.bias,
            "num_heads": self.attention.heads, "is_causal": True, "norm": "layer", "norm_weight": self.norm1.weight,
            "norm_bias": self.norm1.bias, "norm_eps": self.norm1.eps, "resid_dropout_p": self.dropout.p,
        }  # fmt: skip


class SegmentBlock(Block):
    """The same block, the same parameters, as one region of ckptkern."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recompute, self.activation = config.recompute, config.activation

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        fc1, fc2 = self.mlp.fc1, self.mlp.fc2
        mlp = {
            "up_weight": fc1.weight, "up_bias": fc1.bias, "down_weight": fc2.weight, "down_bias": fc2.bias,
            "activation": self.activation, "dropout_p": self.dropout.p, "norm": "layer",
            "norm_weight": self.norm2.weight, "norm_bias": self.norm2.bias, "norm_eps": self.norm2.eps,
        }  # fmt: skip
        attention = self.attention_arguments()
        return ops.transformer_layer(x, attention, mlp, training=self.training, recompute=self.recompute), 0.0


class MoEBlock(Block):
    """A block whose MLP is a mixture of experts; dropout is of what the experts give."""

    experts = GroupedExperts

    def make_mlp(self, config: Config) -> nn.Module:
        return MoE(config, self.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.attend(x)
        y, imbalance = self.mlp(self.norm2(x))
        return x + self.dropout(y), imbalance

    def last_weights(self) -> list[Tensor]:
        return [self.attention.out.weight, self.mlp.experts.down_proj]


class SegmentMoEBlock(MoEBlock):
    """The same block, the same parameters: attention with its norm is one region, the experts are another one."""

    experts = segments.Experts

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recompute, self.dropout = config.recompute, segments.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        return ops.attention_block(
            x, **self.attention_arguments(), residual=True, training=self.training, recompute=self.recompute
        )


class GPT(nn.Module):
    """A byte-level GPT: int64 [B, S] -> logits [B, S, 256]. ``variant`` chooses the layers, never the ``state_dict``."""

    def __init__(self, config: Config, variant: str) -> None:
        super().__init__()
        self.variant, self.fused_head = variant, variant == "ckptkern" and config.head == "fused"
        self.token = nn.Embedding(VOCABULARY, config.d_model)
        self.position = nn.Embedding(config.seq_len, config.d_model)
        unfused, ours = (MoEBlock, SegmentMoEBlock) if config.experts else (Block, SegmentBlock)
        block = ours if variant == "ckptkern" else unfused
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        for block in self.blocks:  # as in GPT-2: smaller with depth, because each adds to the residual stream
            for weight in block.last_weights():
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens)[0])

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        """(mean cross-entropy of the next bytes, mean imbalance of the blocks' routers)."""
        x, imbalance = self.features(tokens)
        if self.fused_head:
            return ops.linear_cross_entropy(x, self.head.weight, targets), imbalance
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), imbalance

    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
        """(what the head reads: [B, S, d_model], mean imbalance of the blocks' routers)."""
        x, total = self.token(tokens) + self.position.weight[: tokens.shape[1]], 0.0
        for block in self.blocks:
            if self.variant == "torch.utils.checkpoint" and torch.is_grad_enabled():
                x, imbalance = checkpoint(block, x, use_reentrant=False)
            else:
                x, imbalance = block(x)
            total = total + imbalance
        return self.norm(x), total / len(self.blocks)
