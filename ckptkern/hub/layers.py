"""Layers of a kernels repository: stateless forwards for modules of transformers.

Each computes what its module's own forward computes. A module that differs (adapters, hooks, quantised weights, another
activation) runs its own forward as an activation checkpoint.
"""

from __future__ import annotations

from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.core_model_loading import WeightRenaming

from ..conversion.moe import experts_forward
from ..nn.activations import recognised
from ..nn.unmodified import composed, unmodified, untouched
from ..ops import gated_mlp, mlp, mlp_block
from .functions import causal_lm_loss

_activations: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def activation_in(module: nn.Module) -> str | None:
    """Returns ckptkern's name of the module's activation, None if there is none; it is recognised once."""
    function = next(
        (getattr(module, name) for name in ("act_fn", "activation_fn", "act") if hasattr(module, name)), None
    )
    if function not in _activations:
        _activations[function] = recognised(function)
    return _activations[function]


def own_forward(module: nn.Module, *args: Any) -> Any:
    return composed(MethodType(type(module).forward, module), *args)


class SwiGLUMLP(nn.Module):
    """Computes down_proj(act_fn(gate_proj(x)) * up_proj(x)) as one region that saves x: `ckptkern.gated_mlp`."""

    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        activation, linears = activation_in(self), (self.gate_proj, self.up_proj, self.down_proj)
        if activation is None or not unmodified(nn.Linear, *linears):
            return own_forward(self, x)
        weights, biases = zip(*((linear.weight, linear.bias) for linear in linears), strict=True)
        return gated_mlp(x, *weights, activation, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2])


class GeGLUMLP(nn.Module):
    """Computes the same as `SwiGLUMLP`, whose activation is the module's own."""

    has_backward = True
    forward = SwiGLUMLP.forward


class SwiGLUMLPLayout(nn.Module):
    """Takes the place of a model's gated MLP class, such as LlamaMLP, when `from_pretrained` builds the model."""

    def __init__(self, config: Any):
        super().__init__()
        d, n, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_proj, self.up_proj = (nn.Linear(d, n, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(n, d, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    """Computes fc2(activation_fn(fc1(hidden_states))) as one region that saves its input: `ckptkern.mlp`."""

    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        activation, linears = activation_in(self), (self.fc1, self.fc2)
        if activation is None or not unmodified(nn.Linear, *linears):
            return own_forward(self, hidden_states)
        return mlp(hidden_states, *(p for linear in linears for p in (linear.weight, linear.bias)), activation)


class RMSNormMLP(nn.Module):
    """Computes an RMSNorm and the gated MLP behind it as one region that saves the norm's input: `ckptkern.mlp_block`."""

    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        norm, mlp = self.norm, self.mlp
        activation, linears = activation_in(mlp), (mlp.up_proj, mlp.down_proj, mlp.gate_proj)
        # "RMSNormZeroCentered" multiplies by 1 + weight
        fits = type(norm).kernel_layer_name == "RMSNorm" and untouched(norm) and untouched(mlp)
        if activation is None or not fits or not unmodified(nn.Linear, *linears):
            return own_forward(self, hidden_states)
        up, down, gate = linears
        return mlp_block(
            hidden_states,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            activation,
            gate_weight=gate.weight,
            gate_bias=gate.bias,
            norm="rms",
            norm_weight=norm.weight,
            norm_eps=norm.variance_epsilon,
            residual=False,
        )


class RMSNormMLPLayout(nn.Module):
    """Holds the norm and the MLP of a decoder layer in the norm's place; the MLP's place is empty.

    Checkpoints keep the names of Llama's layers."""

    conversion_mapping = (
        WeightRenaming(r"post_attention_layernorm\.weight", "post_attention_layernorm.norm.weight"),
        WeightRenaming(r"(?<!layernorm)\.mlp\.", ".post_attention_layernorm.mlp."),
    )

    def __init__(self, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.mlp(self.norm(hidden_states))


class Experts(nn.Module):
    """Computes the experts of an MoE layer for the token-expert pairs, saving the input: `ckptkern.moe_mlp`."""

    has_backward = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class ForCausalLMLoss(nn.Module):
    """Computes a language model's loss from hidden states: `causal_lm_loss`."""

    has_backward = True

    def forward(self, hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, **kwargs):
        return causal_lm_loss(hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch, **kwargs)
