"""Defines MLP and gated MLP blocks that save their input and recompute the hidden layer in backward."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import eager, ops
from ..ops.dispatch.checks import check_count, check_options
from ..ops.dispatch.choices import parse_bytes
from .activations import Activation, activation_of
from .unmodified import composed, unmodified


class MLP(torch.nn.Module):
    """Computes y = fc2(dropout(act(fc1(x)))). Parameters: fc1.weight, fc1.bias, fc2.weight, fc2.bias, as in two
    nn.Linear.

    hidden_features defaults to 4 in_features, out_features to in_features. dropout is a probability.
    activation: as Linear's, a name, function or module.
    recompute, workspace: see ckptkern.mlp. If fc1 or fc2 is of another type (LoRA), has hooks or a weight that is not
    plain memory (parametrised, quantised, sharded), the module calls both inside one ckptkern.checkpoint, which saves
    the input.
    """

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
        workspace: int | str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        activation = activation_of(type(self).__name__, activation)
        check_options(type(self).__name__, activation, recompute, dropout)
        parse_bytes(type(self).__name__, workspace)
        check_count(type(self).__name__, "in_features", in_features, least=0)
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        check_count(type(self).__name__, "hidden_features", hidden_features, least=0)
        check_count(type(self).__name__, "out_features", out_features, least=0)
        self.fc1 = torch.nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.fc2 = torch.nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.activation, self.dropout, self.recompute, self.workspace = activation, dropout, recompute, workspace

    def forward(self, input: Tensor) -> Tensor:
        if not unmodified(torch.nn.Linear, self.fc1, self.fc2):
            return composed(self._composed, input)
        return ops.mlp(
            input, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, self.activation, self.dropout,
            training=self.training, recompute=self.recompute, workspace=self.workspace,
        )  # fmt: skip

    def _composed(self, input: Tensor) -> Tensor:
        return self.fc2(ops.dropout(eager.act(self.fc1(input), self.activation), self.dropout, self.training))

    def extra_repr(self) -> str:
        return (
            f"activation={self.activation!r}, dropout={self.dropout}, recompute={self.recompute!r}, "
            f"workspace={self.workspace!r}"
        )


class GatedMLP(torch.nn.Module):
    """Computes y = down_proj(dropout(act(gate_proj(x)) * up_proj(x))): SwiGLU with the parameter names of Hugging
    Face's Llama.

    recompute, workspace: see ckptkern.gated_mlp. If a layer is not an unmodified nn.Linear, the module calls all
    layers, as in MLP.
    """

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
        workspace: int | str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        activation = activation_of(type(self).__name__, activation)
        check_options(type(self).__name__, activation, recompute, dropout)
        parse_bytes(type(self).__name__, workspace)
        out_features = in_features if out_features is None else out_features
        widths = {"in_features": in_features, "hidden_features": hidden_features, "out_features": out_features}
        for name, width in widths.items():
            check_count(type(self).__name__, name, width, least=0)
        self.gate_proj = torch.nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = torch.nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = torch.nn.Linear(hidden_features, out_features, bias, device, dtype)
        self.activation, self.dropout, self.recompute, self.workspace = activation, dropout, recompute, workspace

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_unmodified():
            return composed(self._composed, input)
        return ops.gated_mlp(
            input, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, self.activation, self.dropout,
            gate_bias=self.gate_proj.bias, up_bias=self.up_proj.bias, down_bias=self.down_proj.bias,
            training=self.training, recompute=self.recompute, workspace=self.workspace,
        )  # fmt: skip

    def _composed(self, input: Tensor) -> Tensor:
        h = eager.act(self.gate_proj(input), self.activation) * self.up_proj(input)
        return self.down_proj(ops.dropout(h, self.dropout, self.training))

    def is_unmodified(self) -> bool:
        """Do its parameters alone determine what it computes?"""
        return unmodified(torch.nn.Linear, self.gate_proj, self.up_proj, self.down_proj)

    extra_repr = MLP.extra_repr
