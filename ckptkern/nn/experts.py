"""Defines the experts of an MoE layer, without the router: gated MLPs whose weights are stacked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from .activations import Activation, activation_of
from .layer import Layer, check_counts


class Experts(Layer):
    """Computes y[t] = sum_j top_k_weights[t, j] mlp_e(x[t]), e = top_k_index[t, j]: see ckptkern.moe_mlp.

    Parameters: gate_up_proj [num_experts, 2 hidden_features, in_features], down_proj [num_experts, in_features,
    hidden_features] and, with bias, gate_up_proj_bias and down_proj_bias: names and layout of transformers 5. Each matrix is
    initialised as nn.Linear's.

    activation: as Linear's, a name, function or module. recompute, workspace: see ckptkern.moe_mlp.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        activation: Activation = "silu",
        bias: bool = False,
        *,
        recompute: str = "full",
        workspace: int | str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        check_counts(op, least=0, num_experts=num_experts, in_features=in_features, hidden_features=hidden_features)
        self.set_options(recompute, workspace, activation=activation_of(op, activation), num_experts=num_experts)

        def stack(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.gate_up_proj = stack(2 * hidden_features, in_features)
        self.down_proj = stack(in_features, hidden_features)
        self.gate_up_proj_bias = stack(2 * hidden_features) if bias else None
        self.down_proj_bias = stack(in_features) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in ("gate_up_proj", "down_proj"):
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            bound = 1 / math.sqrt(max(weight.shape[2], 1))
            for parameter in (weight, bias):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ops.moe_mlp(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            self.activation,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            **self.modes,
        )
