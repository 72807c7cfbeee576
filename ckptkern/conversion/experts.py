"""transformers' interface for experts: a model's experts run by `ckptkern.moe_mlp`, chosen by name as its attention is."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import nn, ops
from ..extras import missing
from ..nn.experts import BIASES, check_layout
from ..nn.twin import activation_in
from ..ops._checks import check_level


def _activation(module: torch.nn.Module) -> str:
    """The name of its activation; the module is looked at once, and again if it has another one."""
    seen, name = module.__dict__.get("_ckptkern_activation", (None, ""))
    if seen is None or seen is not module.act_fn:
        check_layout(nn.Experts, module)
        name = activation_in(nn.Experts, module, None)
        module.__dict__["_ckptkern_activation"] = module.act_fn, name
    return name


def experts_forward(
    recompute: str, module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """forward of transformers' experts. Raises TypeError if they are of another kind than ours."""
    gate_up_bias, down_bias = (getattr(module, name, None) for name in BIASES)
    return ops.moe_mlp(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, _activation(module),
        gate_up_bias=gate_up_bias, down_bias=down_bias, recompute=recompute,
    )  # fmt: skip


def register_experts(name: str = "ckptkern", recompute: str = "full") -> None:
    """Registers `ckptkern.moe_mlp` with transformers 5 as an implementation of experts, under `name`.

    Then `from_pretrained(..., experts_implementation=name)` or `model.set_experts_implementation(name)` choose it. Under expert
    parallelism each rank has its experts, and slots of others' are dropped, in backward too. Experts of another kind (a gate
    of their own, interleaved or transposed weights) raise TypeError when they are called.

    recompute: the level, see ckptkern.moe_mlp. Raises ImportError, which says what to install, ValueError (level).
    """
    check_level("register_experts", recompute)
    if hint := missing("transformers"):
        raise ImportError(hint)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, recompute))
