"""Defines Linear with an activation in its epilogue, and stacks of them that are one region."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import eager, ops
from ..ops.dispatch.choices import check_count, check_options
from .activations import Activation, activation_of
from .layer import Layer
from .unmodified import composed, dense, unmodified


class Linear(Layer, torch.nn.Linear):
    """Computes y = act(x weight^T + bias): torch.nn.Linear and, with `activation`, the activation after it as one op.

    activation: None ("identity"), a name in ckptkern.ACTIVATIONS, or a function or module that computes one of them, such as
    F.silu or nn.GELU(), which is recognised at construction. recompute: see ckptkern.linear_act.
    x [..., in_features] -> [..., out_features]; weight [out_features, in_features], bias [out_features].
    """

    torch_class = torch.nn.Linear
    shown = ("activation", "recompute")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
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
        return f"{torch.nn.Linear.extra_repr(self)}, {super().extra_repr()}"


class LinearStack(Layer):
    """Runs k Linear + activation layers of the given widths as ONE region that saves only its input.

    features: k + 1 widths, input first. Parameters: layers.0.weight, layers.0.bias, layers.1.weight, ...
    activation: as Linear's. workspace: bytes of transient memory in each pass. recompute: see ckptkern.linear_stack.
    If a layer is of another type (LoRA), has hooks or a weight that is no plain memory, all layers are called, as one
    ckptkern.checkpoint.
    """

    def __init__(
        self,
        features: Sequence[int],
        activation: Activation = "relu",
        bias: bool = True,
        *,
        recompute: str = "full",
        workspace: int | str | None = None,
        device: torch.device | str | int | None = None,
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
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(k, n, bias, device, dtype) for k, n in itertools.pairwise(features)
        )

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self.layers)
        if not unmodified(torch.nn.Linear, *layers) or len({layer.bias is None for layer in layers}) > 1:
            return composed(self._composed, input)
        biases = None if layers[0].bias is None else [layer.bias for layer in layers]
        return ops.linear_stack(input, [layer.weight for layer in layers], biases, self.activation, **self.modes)

    def _composed(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = eager.act(layer(input), self.activation)
        return input
