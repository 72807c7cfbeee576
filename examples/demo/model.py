"""Defines the demo's GPT, in PyTorch's own layers, which ``ckptkern.convert`` turns into the fused variants."""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern import eager
from ckptkern.benchmarks.models import MLP, grouped_experts

from .config import VARIANTS

SAMPLE = 32  # tokens with which convert traces and checks the model


class GroupedExperts(ckptkern.nn.Experts):
    """Gated experts with the parameters of ckptkern's, in torch's ops."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tensors, kind = (hidden_states, self.gate_up_proj, self.down_proj), hidden_states.device.type
        if torch.is_autocast_enabled(kind):  # which grouped_mm does not know
            tensors = [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
        x, *stacks = tensors
        act = eager.ACTIVATIONS[self.activation].act
        return grouped_experts(x, top_k_index, top_k_weights.to(x.dtype), *stacks, act)


class MoE(nn.Module):
    """A mixture of experts: sends every token through the `top_k` experts that the router prefers, weighted by its
    probabilities scaled to a sum of 1 (Mixtral). A token uses as many weights as in the plain MLP of 4 d_model.

    choice: the experts [T, k] of this training step. The first forward stores them, and other models with the same list follow:
    a token between two experts goes either way by a rounding error, after which runs cannot be compared.
    """

    def __init__(self, config: Namespace) -> None:
        super().__init__()
        self.top_k: int = config.top_k
        self.choice: list[Tensor] = []
        hidden = -(-8 * config.d_model // (3 * config.top_k * 8)) * 8
        self.router = nn.Linear(config.d_model, config.experts, bias=False)
        self.experts = GroupedExperts(config.experts, config.d_model, hidden, config.activation)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y [B, S, d] of x [B, S, d], and the router's imbalance."""
        rows = x.flatten(0, -2)
        probabilities = self.router(rows).softmax(-1, dtype=torch.float32)
        index = probabilities.topk(self.top_k, -1).indices
        if self.training:
            self.choice[:] = self.choice or [index]
            (index,) = self.choice
        weights = probabilities.gather(1, index)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(rows, index, weights).view(x.shape), imbalance(probabilities, index)


def imbalance(probabilities: Tensor, index: Tensor) -> Tensor:
    """Computes Switch Transformer's auxiliary loss (arXiv 2101.03961), E sum_e f_e P_e. f_e is expert e's share of the
    token-expert pairs in index [T, k], P_e its mean probability of [T, E]. It is 1 if all experts have equal shares, at most
    E."""
    experts = probabilities.shape[1]
    pairs = (index[..., None] == torch.arange(experts, device=index.device)).sum((0, 1))
    return experts * (pairs / index.numel() * probabilities.mean(0)).sum()


class Block(nn.Module):
    """A pre-norm transformer block: x [B, S, D] -> y alike, or with experts (y, the imbalance of its router)."""

    def __init__(self, config: Namespace) -> None:
        super().__init__()
        width, self.heads = config.d_model, config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = MoE(config) if config.experts else MLP(width, config.activation, dropout_p=config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(o.transpose(1, 2).flatten(2)))
        y = self.mlp(self.norm2(x))
        return (x + self.dropout(y[0]), y[1]) if isinstance(y, tuple) else x + y


class GPT(nn.Module):
    """A decoder: (tokens, next tokens) int64 [B, S] each -> (mean cross-entropy in nats per token, mean imbalance of the
    routers). ``variant`` chooses what is checkpointed, never the ``state_dict``."""

    def __init__(self, config: Namespace, variant: str) -> None:
        super().__init__()
        self.variant = VARIANTS[variant]
        self.token = nn.Embedding(config.vocabulary, config.d_model)
        self.position = nn.Embedding(config.seq_len, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        x, total = self.token(tokens) + self.position.weight[: tokens.shape[1]], 0.0
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.variant.checkpoints else block(x)
            x, imbalance = y if isinstance(y, tuple) else (y, 0.0)
            total = total + imbalance / len(self.blocks)
        x = self.norm(x)
        if self.variant.loss_chunks > 1:
            return chunked_loss(x, self.head, targets, self.variant.loss_chunks), total
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), total


def chunked_loss(x: Tensor, head: nn.Linear, targets: Tensor, chunks: int) -> Tensor:
    """Computes the loss in checkpointed chunks of tokens, as users write it: only one chunk's logits are in memory."""

    def part(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(x), targets, reduction="sum")

    parts = zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
    return sum(checkpoint(part, *chunk, use_reentrant=False) for chunk in parts) / targets.numel()


def build(config: Namespace, variant: str) -> GPT:
    """Returns a variant's model on the device."""
    torch.manual_seed(config.seed)
    model, options = GPT(config, variant).to(config.device), VARIANTS[variant].convert
    if options is not None:
        tokens = torch.randint(config.vocabulary, (1, min(SAMPLE, config.seq_len)), device=config.device)
        ckptkern.convert(model, tokens, tokens, **{name: getattr(config, name) for name in options})
    return model
