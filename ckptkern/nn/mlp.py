"""Linear with an activation, stacks of such layers, MLPs, gated MLPs, and the experts of an MoE layer, without the router:
gated MLPs with stacked weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import eager, ops
from ..ops.dispatch.choices import Bytes, check_count, check_options
from .activations import Activation, activation_of
from .layer import Layer, check_counts, weights
from .unmodified import composed, dense, unmodified


class Linear(Layer, nn.Linear):
    """Computes y = act(x weight^T + bias), torch.nn.Linear with an activation, as one op.

    x [..., in_features] -> y [..., out_features].
    activation: None for identity, a name in ckptkern.ACTIVATIONS, or a function or module that computes one of these, such as
    F.silu or nn.GELU(). See ckptkern.linear_act for recompute.
    """

    torch_class = nn.Linear
    shown = ("activation", "recompute")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        recompute: str = "selective",
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_options(activation, recompute)

    def set_options(self, activation: Activation | None = None, recompute: str = "selective") -> None:  # type: ignore[override]
        name = "identity" if activation is None else activation_of(type(self).__name__, activation)
        check_options(type(self).__name__, name, recompute)
        self.activation, self.recompute = name, recompute

    def forward(self, input: Tensor) -> Tensor:
        if not dense(self):
            return composed(self._composed, input)
        return ops.linear_act(input, self.weight, self.bias, self.activation, recompute=self.recompute)

    def _composed(self, input: Tensor) -> Tensor:
        return eager.act(super().forward(input), self.activation)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {super().extra_repr()}"


class LinearStack(Layer):
    """Runs k Linear + activation layers as one region: see ckptkern.linear_stack.

    features: k + 1 widths, the input's first. Parameters: layers.0.weight, layers.0.bias, layers.1.weight, ...
    """

    def __init__(
        self,
        features: Sequence[int],
        activation: Activation = "relu",
        bias: bool = True,
        *,
        recompute: str = "full",
        workspace: Bytes = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        if not isinstance(features, Iterable):
            raise TypeError(f"{op}: features must be a sequence of widths, the input's first, not {features!r}")
        features = list(features)
        if len(features) < 2:
            raise ValueError(f"{op}: features needs at least two widths, the input's first, but is {features}")
        for i, width in enumerate(features):
            check_count(op, f"features[{i}]", width, least=0)
        self.set_options(recompute, workspace, activation=activation_of(op, activation))
        self.layers = nn.ModuleList(nn.Linear(k, n, bias, device, dtype) for k, n in itertools.pairwise(features))

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self.layers)
        if not unmodified(nn.Linear, *layers) or len({layer.bias is None for layer in layers}) > 1:
            return composed(self._composed, input)
        biases = [layer.bias for layer in layers]
        return ops.linear_stack(input, [layer.weight for layer in layers], biases, self.activation, **self.modes)

    def _composed(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = eager.act(layer(input), self.activation)
        return input


class _FeedForward(Layer):
    """Two or three linear layers, an activation and a dropout probability. layers: names of submodules by role."""

    layers: ClassVar[dict[str, str]]

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        *,
        recompute: str = "full",
        workspace: Bytes = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        check_counts(op, 0, in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        self.set_options(recompute, workspace, activation=activation_of(op, activation), dropout=dropout)
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        for role, name in self.layers.items():
            sizes = (hidden_features, out_features) if role == "down" else (in_features, hidden_features)
            setattr(self, name, nn.Linear(*sizes, bias, device, dtype))

    def block_arguments(self) -> dict[str, Tensor | None]:
        """Returns the parameters as arguments of ckptkern.mlp_block."""
        return weights(self, **self.layers)

    def is_unmodified(self) -> bool:
        """Returns whether the parameters alone determine the result."""
        return unmodified(nn.Linear, *(getattr(self, name) for name in self.layers.values()))

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_unmodified():
            return composed(self._composed, input)
        options = {"activation": self.activation, "dropout_p": self.dropout, "training": self.training, **self.modes}
        if "gate" in self.layers:
            return ops.gated_mlp(input, **self.block_arguments(), **options)
        return ops.mlp(input, *self.block_arguments().values(), **options)

    def _composed(self, input: Tensor) -> Tensor:
        """Computes forward by calling the layers."""
        *first, down = (getattr(self, name) for name in self.layers.values())
        h = eager.act(first[0](input), self.activation)
        h = h * first[1](input) if "gate" in self.layers else h
        return down(ops.dropout(h, self.dropout, self.training))


class MLP(_FeedForward):
    """Computes y = fc2(dropout(act(fc1(x)))), where fc1 and fc2 are nn.Linear: see ckptkern.mlp.

    hidden_features defaults to 4 in_features, out_features to in_features.
    """

    layers: ClassVar = {"up": "fc1", "down": "fc2"}
    fc1: nn.Linear
    fc2: nn.Linear


class GatedMLP(_FeedForward):
    """Computes y = down_proj(dropout(act(gate_proj(x)) * up_proj(x))), Llama's SwiGLU: see ckptkern.gated_mlp."""

    layers: ClassVar = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: Activation = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        *,
        recompute: str = "full",
        workspace: Bytes = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        sizes = in_features, hidden_features, out_features
        factory = {"recompute": recompute, "workspace": workspace, "device": device, "dtype": dtype}
        super().__init__(*sizes, activation, bias, dropout, **factory)


class Experts(Layer):
    """Computes y[t] = sum_j top_k_weights[t, j] mlp_e(x[t]) with e = top_k_index[t, j]: see ckptkern.moe_mlp.

    Parameters, as in transformers 5: gate_up_proj [num_experts, 2 hidden_features, in_features], down_proj [num_experts,
    in_features, hidden_features], gate_up_proj_bias, down_proj_bias.
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
        workspace: Bytes = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        check_counts(op, least=0, num_experts=num_experts, in_features=in_features, hidden_features=hidden_features)
        self.set_options(recompute, workspace, activation=activation_of(op, activation), num_experts=num_experts)

        def stack(*shape):
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

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
