"""The demo's mixture of experts: a router, and experts by torch's grouped matmuls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ckptkern import eager
from ckptkern.benchmarks.models import grouped_experts
from ckptkern.nn import Experts

from .config import Config


class GroupedExperts(Experts):
    """The parameters of ckptkern's experts, by torch's ops alone."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tensors, kind = (hidden_states, self.gate_up_proj, self.down_proj), hidden_states.device.type
        if torch.is_autocast_enabled(kind):  # which grouped_mm does not know
            tensors = [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
        x, *stacks = tensors
        act = eager.ACTIVATIONS[self.activation].act
        return grouped_experts(x, top_k_index, top_k_weights.to(x.dtype), *stacks, act)


class MoE(nn.Module):
    """Every token through the `top_k` experts that the router likes best, weighted by its probabilities, which are scaled to a
    sum of 1 (Mixtral). A token passes as many weights as in the plain MLP of 4 d_model.

    choice: the experts [T, k] of this step of training. The first forward puts them there, and others with the list follow,
    because a token between two experts goes either way by a rounding, and from there on no two runs compare.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k: int = config.top_k
        self.choice: list[Tensor] = []
        hidden = -(-8 * config.d_model // (3 * config.top_k * 8)) * 8
        self.router = nn.Linear(config.d_model, config.experts, bias=False)
        self.experts = GroupedExperts(config.experts, config.d_model, hidden, config.activation)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, d] -> (y alike, the router's imbalance)."""
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
    """The auxiliary loss of Switch Transformer (arXiv 2101.03961), E sum_e f_e P_e: f_e is the part of the token-expert
    pairs index [T, k] that expert e has, P_e its mean of probabilities [T, E]. 1 where all experts have alike, at most E."""
    experts = probabilities.shape[1]
    pairs = torch.zeros(experts, device=index.device).scatter_add_(
        0, index.flatten(), torch.ones(index.numel(), device=index.device)
    )
    return experts * (pairs / index.numel() * probabilities.mean(0)).sum()
