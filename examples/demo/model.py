"""The demo's GPT, in PyTorch's own layers; ``ckptkern.convert`` makes the fused variants of it."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern import eager

from .config import OURS, Config
from .moe import MoE

LOSS_CHUNKS = 16  # of the variant "chunked"
SAMPLE = 32  # tokens with which convert traces and checks the model


class MLP(nn.Module):
    """fc2(dropout(activation(fc1(x))))."""

    def __init__(self, d_model: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, 4 * d_model)
        self.fc2 = nn.Linear(4 * d_model, d_model)
        self.activation = eager.ACTIVATIONS[activation].act
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class Attention(nn.Module):
    """Causal self-attention. x [B, S, D] -> [B, S, D]."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block: x [B, S, D] -> y alike, or with experts (y, the imbalance of its router)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.d_model
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, config.heads)
        self.mlp = MoE(config) if config.experts else MLP(d, config.activation, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = x + self.dropout(self.attention(self.norm1(x)))
        if isinstance(self.mlp, MLP):
            return x + self.mlp(self.norm2(x))
        y, imbalance = self.mlp(self.norm2(x))
        return x + self.dropout(y), imbalance


class GPT(nn.Module):
    """A decoder: (tokens, next tokens) int64 [B, S] each -> (mean cross-entropy in nats a token, mean imbalance of its
    routers). ``variant`` chooses what is checkpointed, never the ``state_dict``."""

    def __init__(self, config: Config, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.token = nn.Embedding(config.vocabulary, config.d_model)
        self.position = nn.Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        for block in self.blocks:  # as in GPT-2: smaller with depth, because each adds to the residual stream
            last = block.mlp.fc2.weight if isinstance(block.mlp, MLP) else block.mlp.experts.down_proj
            for weight in (block.attention.out.weight, last):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        x, total = self.token(tokens) + self.position.weight[: tokens.shape[1]], 0.0
        for block in self.blocks:
            run = functools.partial(checkpoint, block, use_reentrant=False) if self.checkpoints else block
            y = run(x)
            x, imbalance = y if isinstance(y, tuple) else (y, 0.0)
            total = total + imbalance
        x = self.norm(x)
        if self.variant == "chunked":
            return chunked_loss(x, self.head, targets), total / len(self.blocks)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), total / len(self.blocks)

    @property
    def checkpoints(self) -> bool:
        return self.variant in ("checkpointing", "chunked")


def chunked_loss(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """The loss in checkpointed chunks of tokens, as users write it: one chunk's logits are in memory at a time."""

    def part(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(x), targets, reduction="sum")

    parts = zip(x.flatten(0, 1).chunk(LOSS_CHUNKS), targets.flatten().chunk(LOSS_CHUNKS), strict=True)
    return sum(checkpoint(part, *one, use_reentrant=False) for one in parts) / targets.numel()


def build(config: Config, variant: str) -> GPT:
    """A variant's model on the device. "convert" has convert's defaults; "bounded" has the run's mode and workspace."""
    torch.manual_seed(config.seed)
    model = GPT(config, variant).to(config.device)
    if variant in OURS:
        tokens = torch.randint(config.vocabulary, (1, min(SAMPLE, config.seq_len)), device=config.device)
        options = {"recompute": config.recompute, "workspace": config.workspace} if variant == "bounded" else {}
        ckptkern.convert(model, tokens, tokens, **options)
    return model
