"""moe_block: [norm ->] router, the experts that it chooses and shared experts, and what is around them, as one region."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import ShapeError
from ..dispatch.choices import (
    check_choice,
    check_count,
    check_flags,
    check_input,
    check_number,
    check_options,
    check_tensor,
    check_weight,
    choose_impl,
    compute_dtype,
)
from ..dispatch.shard import ACTIVE, NotSharded
from ..experts import LAYERS as EXPERT_LAYERS
from ..experts import check_experts
from ..mlp.block import MLPTensors
from ..mlp.branch import LAYERS as MLP_LAYERS
from ..mlp.branch import check_branch
from ..registration.functions import build
from ..sublayer.lora import NO_UPDATES, LoRA, gather_lora
from ..sublayer.residual import RowsOp, around, called
from .sublayer import (
    GROUP_SCORES,
    LOGITS,
    SCORINGS,
    MoEOptions,
    MoESublayer,
    MoETensors,
    RouterOptions,
    moe_reference,
    saves,
)


class MoEBlock(RowsOp):
    name = "moe_block"
    Tensors, Options, Sublayer = MoETensors, MoEOptions, MoESublayer
    constants = frozenset({1 + MoETensors._fields.index("score_bias")})
    decisions, more_results = ("index",), (LOGITS,)
    saves = staticmethod(saves)
    in_torch_ops = staticmethod(moe_reference)


_apply = build(MoEBlock)


def check_router(
    op: str, x: Tensor, experts: int, router_weight: Tensor, router_bias, score_bias, routing: RouterOptions
) -> RouterOptions:
    """Checks the arguments of the choice; returns its options."""
    top_k, scoring, normalize, num_groups, top_groups, group_score, factor = routing
    check_weight(op, "router_weight", router_weight, router_bias, x, x.shape[-1], "input")
    if router_weight.shape[0] != experts:
        raise ShapeError(
            f"{op}: router_weight must have {experts} rows, one for each expert of gate_up_weight, but it has "
            f"{router_weight.shape[0]}"
        )
    if score_bias is not None:
        check_tensor(op, "score_bias", score_bias, x)
        if tuple(score_bias.shape) != (experts,):
            raise ShapeError(f"{op}: score_bias must have shape ({experts},), but has {tuple(score_bias.shape)}")
        if score_bias.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: score_bias gets no gradient; detach it")
    check_choice(op, "scoring", scoring, SCORINGS)
    check_choice(op, "group_score", group_score, GROUP_SCORES)
    check_flags(op, normalize=normalize)
    check_number(op, "routed_scaling_factor", factor)
    check_count(op, "top_k", top_k)
    check_count(op, "num_groups", num_groups)
    if num_groups > 1 and top_groups is None:
        raise ValueError(f"{op}: num_groups={num_groups} needs top_groups, how many of them a token may choose from")
    top_groups = num_groups if top_groups is None else top_groups
    check_count(op, "top_groups", top_groups)
    if experts % num_groups or top_groups > num_groups:
        raise ValueError(
            f"{op}: num_groups must divide the {experts} experts, and top_groups be at most num_groups, but they are "
            f"{num_groups} and {top_groups}"
        )
    if top_k > top_groups * (experts // num_groups):
        raise ValueError(
            f"{op}: top_k={top_k} is more than the {top_groups * (experts // num_groups)} experts that a token may choose from"
        )
    return routing._replace(top_groups=top_groups, routed_scaling_factor=float(factor))


def check_shared(op: str, x: Tensor, t: dict[str, Tensor | None], gate: Tensor | None) -> str:
    """Checks the shared expert's tensors; returns which kind it is."""
    features = x.shape[-1]
    if t["up_weight"] is None:
        given = next((name for name, one in (*t.items(), ("expert_gate", gate)) if one is not None), None)
        if given is not None:
            raise ValueError(f"{op}: shared_{given} needs shared_up_weight")
        return ""
    if t["down_weight"] is None:
        raise ValueError(f"{op}: shared_up_weight needs shared_down_weight")
    check_branch(op, x, t, "shared_", "the shared hidden layer")
    if t["down_weight"].shape[0] != features:
        raise ShapeError(
            f"{op}: shared_down_weight must have {features} rows, as many as the input has features, but it has "
            f"{t['down_weight'].shape[0]}"
        )
    if gate is not None:
        check_weight(op, "shared_expert_gate", gate, None, x, features, "input")
        if gate.shape[0] != 1:
            raise ShapeError(f"{op}: shared_expert_gate must have one row, but has {gate.shape[0]}")
    return "plain" if t["gate_weight"] is None else "gated"


def gather(op, x, *, activation, router_dtype, lora, **given) -> tuple[MoETensors, MoEOptions]:
    """Checks all arguments of moe_block; returns the sublayer's tensors, still without random states, and its options."""
    if ACTIVE.shard is not None:
        raise NotSharded("moe_block has no sharded form")
    check_options(op, activation, given["recompute"])
    check_input(op, x)
    t, features = {name: given.pop(name) for name in MoETensors.own}, x.shape[-1]
    shared, w, wd = {name: t[f"shared_{name}"] for name in MLPTensors.own}, t["gate_up_weight"], t["down_weight"]
    check_experts(op, x, w, t["gate_up_bias"], wd, t["down_bias"])
    routing = RouterOptions(**{name: given.pop(name) for name in RouterOptions._fields})
    routing = check_router(op, x, len(w), t["router_weight"], t["router_bias"], t["score_bias"], routing)
    if router_dtype not in (None, torch.float32):
        raise ValueError(
            f"{op}: router_dtype must be torch.float32, or None for the compute dtype, not {router_dtype!r}"
        )
    kind = check_shared(op, x, shared, t["shared_expert_gate"])
    weights = {"gate_up": w, "down": wd} | {f"shared_{layer}": shared[f"{layer}_weight"] for layer in MLP_LAYERS}
    updates, numbers = NO_UPDATES if lora is None else gather_lora(op, x, lora, weights)
    of_shared = {name: one for name, one in updates.items() if name.startswith("shared_")}
    router = t["router_weight"] if router_dtype is None else None
    probe = x.new_empty(0, dtype=compute_dtype(op, x, router, *weights.values()))
    own = of_shared, numbers[2 * len(EXPERT_LAYERS) :] if of_shared else ()
    tensors, options = around(op, x, probe, "down_weight", features, own, w.numel(), **given)
    o = MoEOptions(
        **routing._asdict(),
        activation=activation,
        shared=kind,
        router_dtype=torch.promote_types(probe.dtype, router_dtype or probe.dtype),
        # of the experts, which run most matmuls; the shared expert's follow
        backend=choose_impl(op, probe, features, wd.shape[2], features, name="moe_mlp"),
        experts_lora=numbers[: 2 * len(EXPERT_LAYERS) : 2],
        **options,
    )
    return MoETensors(**t, **updates | tensors), o


@called(gather, _apply)
def moe_block(
    x: Tensor,
    router_weight: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    score_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    group_score: str = "top2",
    routed_scaling_factor: float = 1.0,
    router_bias: Tensor | None = None,
    router_dtype: torch.dtype | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared_gate_weight: Tensor | None = None,
    shared_gate_bias: Tensor | None = None,
    shared_up_weight: Tensor | None = None,
    shared_up_bias: Tensor | None = None,
    shared_down_weight: Tensor | None = None,
    shared_down_bias: Tensor | None = None,
    shared_expert_gate: Tensor | None = None,
    lora: Mapping[str, LoRA] | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_scale: Tensor | None = None,
    norm_shift: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    post_norm: str | None = None,
    post_norm_weight: Tensor | None = None,
    post_norm_bias: Tensor | None = None,
    post_norm_eps: float = 1e-5,
    layer_scale: Tensor | float | None = None,
    resid_dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    residual: bool = True,
    training: bool = True,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes an MoE layer with its router and everything around it, as one region; returns (y, router_logits).

        h = norm(x) * (1 + norm_scale) + norm_shift;  logits = h router_weight^T + router_bias;  s = scoring(logits)
        index = top_k of s + score_bias;  w = s[index] [/ sum of these] * routed_scaling_factor
        f = moe_mlp(h, index, w, ...) + sigmoid(h shared_expert_gate^T) * shared(h)
        z = drop_path(layer_scale * post_norm(dropout(f)))
        y = [x +] z                                           norm_first=False: y = norm([x +] z), h = x

    x [..., d], router_weight [E, d], router_bias [E] or None -> y [..., d], router_logits [tokens, E] in router_dtype, both
    with gradients: those of a load-balancing loss or a z-loss of the logits are added to those of y. Experts as in moe_mlp:
    gate_up_weight [E, 2 n, d], down_weight [E, d, n], biases [E, 2 n] and [E, d]. float16, bfloat16, float32; float64 in
    PyTorch ops; autocast's dtype inside torch.autocast.

    scoring: "softmax" over all experts, or "sigmoid" of each; in float32. normalize: the k weights are divided by their sum;
    with a softmax they are then the softmax of the chosen logits (Mixtral, arXiv 2401.04088). score_bias: [E], added for the
    choice alone; it gets no gradient (DeepSeek-V3, arXiv 2412.19437). num_groups, top_groups: a token chooses within the
    top_groups best of num_groups groups of equal size, by the sum of a group's two best scores (group_score "top2",
    DeepSeek-V3) or by its best ("max", DeepSeek-V2). router_dtype: torch.float32 upcasts h and router_weight before the
    matmul; None: the compute dtype. shared_*: a gated MLP of all tokens, of any width, or without shared_gate_weight a plain
    one; shared_expert_gate: [1, d] (Qwen2-MoE). lora: low-rank updates of the experts' "gate_up" and "down", as in moe_mlp, and
    of "shared_gate", "shared_up" and "shared_down", as in mlp_block.
    Norms, layer_scale, residual and dropouts: as in mlp_block.

    recompute: what is saved for backward besides parameters:

        "none"       x, g and u of the chosen experts, the shared expert's g, u and h, routing
        "selective"  the same without the shared h
        "full"       x, routing

    Routing is the choice itself, int16 for each token-expert pair (int32 from 32,768 experts on): it is saved, because a
    matmul that rounds otherwise in recompute could turn it. Norm, logits and weights are always recomputed. Backward
    recomputes the shared expert's result for its gate, and f for a norm behind it and a trained layer_scale, by one matmul
    of each, at "full" by all. Second order takes forward's choice, too. Nothing waits for the host on a GPU.
    workspace: bytes of transient memory in each pass, tokens in equal chunks of 128 at least. Default: ckptkern.workspace.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (choices, counts), RuntimeError
    (backend).
    """
