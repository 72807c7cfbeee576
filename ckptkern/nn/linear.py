"""Defines Linear with an activation in its epilogue, and stacks of them that are one region."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import eager, ops
from ..ops.dispatch.checks import check_count, check_options
from ..ops.dispatch.choices import parse_bytes
from .activations import Activation, activation_of
from .share import check_kind, share
from .unmodified import composed, dense, unmodified


class Linear(torch.nn.Linear):
    """Computes y = act(x weight^T + bias): torch.nn.Linear and, with `activation`, the activation after it as one op.

    activation: None ("identity"), a name in ckptkern.ACTIVATIONS, or a function or module that computes one of them, such as
    F.silu or nn.GELU(), which is recognised at construction. recompute: see ckptkern.linear_act.
    x [..., in_features] -> [..., out_features]; weight [out_features, in_features], bias [out_features].
    """

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
        self.activation = "identity" if activation is None else activation_of(type(self).__name__, activation)
        self.recompute = recompute
        check_options(type(self).__name__, self.activation, recompute)

    @classmethod
    def from_torch(
        cls, module: torch.nn.Linear, activation: Activation | None = None, recompute: str = "selective"
    ) -> Linear:
        """Returns a drop-in replacement of `module`, with an activation after it, that shares its parameters and hooks."""
        check_kind(cls, module, torch.nn.Linear)
        name = "identity" if activation is None else activation_of(cls.__name__, activation)
        check_options(cls.__name__, name, recompute)
        return share(cls, module, activation=name, recompute=recompute)

    def forward(self, input: Tensor) -> Tensor:
        if not dense(self):
            return composed(self._composed, input)
        return ops.linear_act(input, self.weight, self.bias, self.activation, recompute=self.recompute)

    def _composed(self, input: Tensor) -> Tensor:
        return eager.act(super().forward(input), self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}, recompute={self.recompute!r}"


class LinearStack(torch.nn.Module):
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
        if not isinstance(features, Iterable):
            raise TypeError(f"LinearStack: features must be a sequence of widths, the input's first, not {features!r}")
        features = list(features)
        if len(features) < 2:
            raise ValueError(f"LinearStack: features needs at least two widths, the input's first, but is {features}")
        for i, width in enumerate(features):
            check_count("LinearStack", f"features[{i}]", width, least=0)
        activation = activation_of("LinearStack", activation)
        check_options("LinearStack", activation, recompute)
        parse_bytes("LinearStack", workspace)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(k, n, bias, device, dtype) for k, n in itertools.pairwise(features)
        )
        self.activation, self.recompute, self.workspace = activation, recompute, workspace

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self.layers)
        if not unmodified(torch.nn.Linear, *layers) or len({layer.bias is None for layer in layers}) > 1:
            return composed(self._composed, input)
        biases = None if self.layers[0].bias is None else [layer.bias for layer in self.layers]
        return ops.linear_stack(
            input, [layer.weight for layer in self.layers], biases, self.activation, recompute=self.recompute,
            workspace=self.workspace,
        )  # fmt: skip

    def _composed(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = eager.act(layer(input), self.activation)
        return input

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, recompute={self.recompute!r}, workspace={self.workspace!r}"
