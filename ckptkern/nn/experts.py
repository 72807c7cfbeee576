"""Defines the experts of an MoE layer, without the router: gated MLPs whose weights are stacked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from ..ops.dispatch.checks import check_count, check_options
from ..ops.dispatch.choices import parse_bytes
from ..ops.experts import check_experts
from .activations import Activation, activation_of
from .parts import activation_in, check_parts
from .share import refuse, share

# How transformers' experts say that they are of another kind, and what they say if they are of ours.
KIND = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_post_expert_norm": False}
BIASES = ("gate_up_proj_bias", "down_proj_bias")


def check_layout(cls: type, module: torch.nn.Module) -> None:
    """Raises TypeError unless the module's parameters, by name and shape, are those of Experts, and its gate is act(g) * u."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    for name in ("gate_up_proj", "down_proj"):
        if name not in parameters:
            refuse(cls, module, f"has no parameter {name}")
    if more := sorted(parameters.keys() - {"gate_up_proj", "down_proj", *BIASES}):
        refuse(cls, module, f"has a {more[0]}, which {cls.__name__} has not")
    for name, value in KIND.items():
        if getattr(module, name, value) != value:
            refuse(cls, module, f"has {name}={not value}")
    if getattr(type(module), "_apply_gate", cls).__name__ not in ("_default_apply_gate", cls.__name__):
        refuse(cls, module, "has another gate than act(g) * u")
    w = parameters["gate_up_proj"]
    x = w.new_empty((0, w.shape[-1]))
    check_experts(cls.__name__, x, w, *(parameters.get(name) for name in (BIASES[0], "down_proj", BIASES[1])))


def _agree(module: torch.nn.Module, drop_in: Experts) -> bool:
    """Do both give the same for rows of several sizes, each of which goes to two experts?"""
    w, eps = drop_in.gate_up_proj, torch.finfo(drop_in.gate_up_proj.dtype).eps
    scale = torch.tensor([1e-2, 1.0, 30.0, 1e3], device=w.device).repeat_interleave(4)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(16, w.shape[2], generator=generator).to(w.device) * scale[:, None]).to(w.dtype)
    index = (torch.arange(32, device=w.device) * 7 % len(w)).view(16, 2)
    weights = torch.tensor([[0.75, -0.5]], device=w.device).repeat(16, 1).to(w.dtype)
    with torch.no_grad():
        ours = drop_in.forward(x, index, weights).double()
        try:
            theirs = module.forward(x, index, weights).double()
        except Exception:  # someone else's forward may raise anything; then the caller refuses it
            return False
    return bool(((theirs - ours).norm(dim=1) <= 16 * eps * ours.norm(dim=1)).all())


class Experts(torch.nn.Module):
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
        activation = activation_of(type(self).__name__, activation)
        check_options(type(self).__name__, activation, recompute)
        parse_bytes(type(self).__name__, workspace)
        for name, count in (
            ("num_experts", num_experts),
            ("in_features", in_features),
            ("hidden_features", hidden_features),
        ):
            check_count(type(self).__name__, name, count, least=0)
        self.activation, self.recompute, self.workspace = activation, recompute, workspace

        def stack(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.gate_up_proj = stack(2 * hidden_features, in_features)
        self.down_proj = stack(in_features, hidden_features)
        self.gate_up_proj_bias = stack(2 * hidden_features) if bias else None
        self.down_proj_bias = stack(in_features) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight, bias in (
            (self.gate_up_proj, self.gate_up_proj_bias),
            (self.down_proj, self.down_proj_bias),
        ):
            bound = 1 / math.sqrt(max(weight.shape[2], 1))
            for parameter in (weight, bias):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_torch(
        cls,
        module: torch.nn.Module,
        activation: Activation | None = None,
        recompute: str = "full",
        workspace: int | str | None = None,
    ) -> Experts:
        """Returns a drop-in replacement of a module with these parameters, such as the experts of transformers' Mixtral
        or Qwen3-MoE, that shares them. Raises TypeError if both differ on 16 rows.

        activation: by default the module's own `act_fn`.
        """
        check_parts(cls, module, ("act_fn",))
        check_layout(cls, module)
        name = activation_in(cls, module, activation)
        check_options(cls.__name__, name, recompute)
        parse_bytes(cls.__name__, workspace)
        own = {"activation": name, "recompute": recompute, "workspace": workspace, "_modules": {}}
        one = share(cls, module, _parameters=dict.fromkeys(BIASES) | module._parameters, **own)
        if module._parameters["gate_up_proj"].is_meta or not _agree(module, one):
            refuse(cls, module, "does not compute what ckptkern.moe_mlp does")
        return one

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ops.moe_mlp(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, self.activation,
            gate_up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias, recompute=self.recompute,
            workspace=self.workspace,
        )  # fmt: skip

    def extra_repr(self) -> str:
        experts, features, hidden = self.down_proj.shape
        return (
            f"num_experts={experts}, in_features={features}, hidden_features={hidden}, activation={self.activation!r}, "
            f"bias={self.down_proj_bias is not None}, recompute={self.recompute!r}, workspace={self.workspace!r}"
        )
