"""The experts of an MoE layer, as `ckptkern.moe_mlp`: read from a module's layout, and by transformers' interface,
where they are chosen by name as attention is."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..eager import ACTIVATIONS
from ..extras import missing
from ..nn.activations import activation_of
from ..ops.dispatch.checks import check_mode
from ..ops.dispatch.choices import parse_bytes
from .layouts import experts_layout
from .leaves import Weight
from .moe import experts_call, updates_of_experts
from .reading import Argument, Reading


def layout_of(module: torch.nn.Module) -> dict[str, Weight]:
    """moe_mlp's parameters among the module's own; {} for a module that is laid out otherwise."""
    return {name: Weight(own) for name, own in experts_layout(module).items()}


def read_experts(module: torch.nn.Module, flat: list[Any]) -> Reading:
    """Its call with x [..., d], indices [..., k] and weights [..., k], as moe_mlp. The numerical check decides which
    activation it has.

    What experts do cannot be traced: which rows each of them reads is a matter of values. Raises Unreadable.
    """
    x, index, weights = experts_call(flat)
    arguments = {"top_k_index": Argument(index), "top_k_weights": Argument(weights)} | layout_of(module)
    lora = updates_of_experts(module)
    arguments |= {"lora": lora} if lora else {}
    return Reading("moe_mlp", arguments, x, [[{("activation",): name} for name in ACTIVATIONS]])


def routed(reading: dict[str, Any], x: int, flat: list[Any], rows: int = 512) -> Iterator[tuple[str, list[Any]]]:
    """The arguments of calls with inputs so large that a clamp shows, and of one whose rows all go to the first experts, of
    which some forwards take no more than so many."""
    index, weights = (reading[name].index for name in ("top_k_index", "top_k_weights"))
    for scale in (30, 1000):
        yield f"inputs {scale} times as large", [scale * v if i == x else v for i, v in enumerate(flat)]
    lead, top_k = (*flat[x].shape[:-2], rows), flat[index].shape[-1]
    pairs = (*(lead if flat[index].dim() == flat[x].dim() else (math.prod(lead),)), top_k)
    many = {
        x: flat[x].new_empty((*lead, flat[x].shape[-1])).normal_(),
        index: torch.arange(top_k, device=flat[index].device).to(flat[index].dtype).expand(pairs),
        weights: flat[weights].new_empty(pairs).uniform_(),
    }
    yield f"{rows} rows at one expert", [many.get(i, v) for i, v in enumerate(flat)]


# What transformers' experts have. How they say that they are of another kind, and what they say if they are of ours.
PARAMETERS = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
KIND = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_post_expert_norm": False}


def _activation(module: torch.nn.Module) -> str:
    """The name of its activation; the module is looked at once, and again if it has another one."""
    seen, name = module.__dict__.get("_ckptkern_activation", (None, ""))
    if seen is None or seen is not module.act_fn:
        kind = type(module)
        for attribute, value in KIND.items():
            if getattr(module, attribute, value) != value:
                raise TypeError(f"register_experts: {kind.__name__} has {attribute}={not value}")
        gate = getattr(kind, "_apply_gate", None)
        if gate is not None and gate.__name__ != "_default_apply_gate":
            raise TypeError(f"register_experts: {kind.__name__} has another gate than act(g) * u")
        if more := {name for name, p in module._parameters.items() if p is not None} - PARAMETERS:
            raise TypeError(f"register_experts: {kind.__name__} has a {min(more)}, which moe_mlp has not")
        name = activation_of("register_experts", module.act_fn)
        module.__dict__["_ckptkern_activation"] = module.act_fn, name
    return name


def experts_forward(
    recompute: str, workspace: int | str | None, module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    """forward of transformers' experts. Raises TypeError if they are of another kind than ours."""
    gate_up_bias, down_bias = (getattr(module, f"{name}_proj_bias", None) for name in ("gate_up", "down"))
    return ops.moe_mlp(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, _activation(module),
        gate_up_bias=gate_up_bias, down_bias=down_bias, recompute=recompute, workspace=workspace,
    )  # fmt: skip


def register_experts(name: str = "ckptkern", recompute: str = "full", workspace: int | str | None = None) -> None:
    """Registers `ckptkern.moe_mlp` with transformers 5 as an implementation of experts, under `name`.

    Select it with `from_pretrained(..., experts_implementation=name)` or `model.set_experts_implementation(name)`.
    Under expert parallelism each rank has its own experts and drops the token-expert pairs of other ranks, in backward,
    too. Experts of another kind (a gate of their own, interleaved or transposed weights) raise TypeError when they are
    called.

    recompute, workspace: see ckptkern.moe_mlp. Raises ImportError, which says what to install, ValueError (mode, workspace).
    """
    check_mode("register_experts", recompute)
    parse_bytes("register_experts", workspace)
    if hint := missing("transformers"):
        raise ImportError(hint)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(experts_forward, recompute, workspace))
