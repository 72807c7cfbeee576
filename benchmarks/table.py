"""The table of ops: the model of each in eager PyTorch, ours on its parameters, its options and baselines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .. import eager, ops
from . import baselines
from .cases import CHECKPOINT, MODES, Function, Maker
from .models import (
    MLP,
    Attention,
    Core,
    Distillation,
    GatedMLP,
    GroupedRows,
    LatentAttention,
    Layer,
    LMHeadLoss,
    MLPBlock,
    MoE,
    RoutedMoE,
    SelectedLogProbs,
)

FEATURES = {"cuda": 1024, "cpu": 128}
LENGTH = {"cuda": 2048, "cpu": 128}
TOKENS = {"cuda": 16384, "cpu": 1024}


class Act(nn.Module):
    """An activation by its name, in torch's ops."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, z: Tensor) -> Tensor:
        return eager.ACTIVATIONS[self.name].act(z)


# -- models, and ours of them


def _stack(v: SimpleNamespace) -> nn.Module:
    layers = [nn.Linear(v.features, v.features, v.bias) for _ in range(v.layers)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)  # keeps the size of activations over the depth
    return nn.Sequential(*itertools.chain.from_iterable((layer, Act(v.activation)) for layer in layers))


def _run_stack(v: SimpleNamespace, model: nn.Sequential, x: Tensor, mode: str) -> Tensor:
    weights = [layer.weight for layer in model[::2]]
    biases = [layer.bias for layer in model[::2]] if v.bias else None
    return ops.linear_stack(x, weights, biases, v.activation, recompute=mode)


def _mlp(v: SimpleNamespace) -> MLP | GatedMLP:
    return (GatedMLP if v.gated else MLP)(v.features, Act(v.activation), v.bias, v.hidden, v.dropout)


def _mlp_block(v: SimpleNamespace) -> MLPBlock:
    return MLPBlock(v.features, _mlp(v), v.activation, v.norm)


def _run_mlp(v: SimpleNamespace, model: MLP, x: Tensor, mode: str) -> Tensor:
    up, down, training = model.fc1, model.fc2, model.training
    return ops.mlp(
        x, up.weight, up.bias, down.weight, down.bias, v.activation, v.dropout, training=training, recompute=mode
    )


def _run_gated(v: SimpleNamespace, model: GatedMLP, x: Tensor, mode: str) -> Tensor:
    options = dict(activation=v.activation, training=model.training, recompute=mode)
    return ops.gated_mlp(x, **model.arguments(), **options)


def _run_moe(v: SimpleNamespace, model: MoE, x: Tensor, mode: str) -> Tensor:
    return ops.moe_mlp(x, *model.routing(x), model.gate_up, model.down, v.activation, recompute=mode)


def _run_routed_moe(v: SimpleNamespace, model: RoutedMoE, x: Tensor, mode: str) -> Tensor:
    weights, scores = (model.router.weight, model.gate_up, model.down), dict(score_bias=model.score_bias)
    return ops.moe_block(x, *weights, v.activation, top_k=v.top_k, recompute=mode, **scores)[0]


def _run_grouped_rows(v: SimpleNamespace, model: GroupedRows, x: Tensor, mode: str) -> Tensor:
    ends = model.ends_there(x)
    return ops.grouped_gated_mlp(x, ends, model.gate_up, model.down, v.activation, recompute=mode)


def _attention(v: SimpleNamespace) -> Attention:
    return Attention(v.features, v.heads // v.kv_heads, v.dropout, v.heads, v.bias, v.norm, v.causal)


def _run_attention(v: SimpleNamespace, model: Attention, x: Tensor, mode: str) -> Tensor:
    return ops.attention_block(x, **model.arguments(x), training=model.training, recompute=mode)


def run_layer(v: SimpleNamespace, model: Layer, x: Tensor, mode: str) -> Tensor:
    """mode: one for both sublayers, or "attention's/MLP's"."""
    recompute = tuple(mode.split("/")) if "/" in mode else mode
    return ops.transformer_layer(x, *model.arguments(x), training=model.training, recompute=recompute)


def _core(v: SimpleNamespace) -> Core:
    return Core(v.heads, v.kv_heads, v.dropout, v.causal)


def _run_core(v: SimpleNamespace, model: Core, x: Tensor, mode: str) -> Tensor:
    dropout_p = v.dropout if model.training else 0.0
    o = ops.scaled_dot_product_attention(*model.split(x), None, dropout_p, v.causal, enable_gqa=v.heads != v.kv_heads)
    return o.transpose(1, 2).flatten(2)


def _run_varlen(v: SimpleNamespace, model: Core, x: Tensor, mode: str) -> Tensor:
    batch, length, _ = x.shape
    qkv = (part.transpose(1, 2).flatten(0, 1) for part in model.split(x))
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device)
    shared = v.heads != v.kv_heads
    o = ops.varlen_attn(*qkv, bounds, bounds, length, length, is_causal=v.causal, enable_gqa=shared)
    return o.reshape(batch, length, -1)


def run_lm_head(v: SimpleNamespace | None, model: LMHeadLoss, x: Tensor, mode: str) -> Tensor:
    """The loss of an LM head, of each token or their mean."""
    return ops.linear_cross_entropy(
        x,
        model.linear.weight,
        model.targets(x),
        linear_bias=model.linear.bias,
        softcap=model.softcap,
        reduction=model.reduction,
        recompute=mode,
    )


def _run_log_probs(v: SimpleNamespace, model: LMHeadLoss, x: Tensor, mode: str) -> Tensor:
    head = model.linear
    return ops.selected_log_probs(x, head.weight, model.targets(x), bias=head.bias, recompute=mode)


def _run_distillation(v: SimpleNamespace, model: Distillation, x: Tensor, mode: str) -> Tensor:
    student, teacher = model.linear, model.teacher
    biases = dict(student_bias=student.bias, teacher_bias=teacher.bias)
    return ops.linear_distillation(x, student.weight, x, teacher.weight, **biases, reduction=v.reduction)


def _run_topk_distillation(v: SimpleNamespace, model: Distillation, x: Tensor, mode: str) -> Tensor:
    student, likeliest = model.linear, model.likeliest(x)
    return ops.linear_topk_distillation(x, student.weight, *likeliest, student_bias=student.bias, reduction=v.reduction)


def dropout_exact(p: float, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Dropout by the mask that y shows, since every variant samples its own. Raises if the rate of saved elements is off."""
    saved = y != 0
    rate, sigma = saved.double().mean().item(), (p * (1 - p) / y.numel()) ** 0.5
    if abs(rate - (1 - p)) > 6 * sigma:
        raise ValueError(f"keeps {rate:.4f} of the elements, not {1 - p}")
    return torch.where(saved, x / (1 - p), 0)


# -- baselines

Ours = Callable[[nn.Module, str], Function]
CHUNK_ROWS = 1024  # of a hand-written loop over chunks of rows
CHUNKS = {f"{CHECKPOINT}, {CHUNK_ROWS} rows at a time": baselines.in_chunks(CHUNK_ROWS)}
INTERLEAVED: dict[str, Maker] = {"torch, experts interleaved": baselines.experts_by_turns}


def _mlp_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    name = {"relu": "relu", "gelu_tanh": "gelu_approx"}.get(v.activation)
    if name and not v.dropout:
        found["flash-attn FusedMLP"] = functools.partial(baselines.flash_attn_mlp, name)
    if v.activation == "gelu_tanh" and not v.bias and not v.dropout:
        found["QuACK mlp_func"] = functools.partial(baselines.quack_mlp, "gelu_tanh_approx")
    return found


def _gated_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    has_liger = v.activation == "silu" and not v.dropout
    return {"liger-kernel SwiGLU": baselines.liger_swiglu} if has_liger else {}


def attention_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    found: dict[str, Maker] = {
        f"{CHECKPOINT}, SDPA saved": baselines.SelectiveCheckpoint,
        "SDPA flash": baselines.sdpa_flash,
    }
    if not v.dropout:
        found["own core, selective"] = functools.partial(baselines.own_core, ours)
    return found


def _core_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    return {"SDPA flash": baselines.sdpa_flash}


def _moe_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    return INTERLEAVED | ({"liger-kernel MoE, largest tiles": baselines.liger_moe} if v.activation == "silu" else {})


def _head_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    """torch's chunks have no softcap."""
    found = {"liger-kernel loss": baselines.liger_loss, "cut-cross-entropy, no filter": baselines.cut_cross_entropy}
    return found | CHUNKS | ({} if v.softcap else {"torch chunks": baselines.torch_chunks})


def _distillation_baselines(v: SimpleNamespace, ours: Ours) -> dict[str, Maker]:
    has_liger = v.reduction == "mean" and not v.bias and not v.top_k
    return CHUNKS | ({"liger-kernel JSD": baselines.liger_distillation} if has_liger else {})


# -- the table


@dataclass(frozen=True)
class Op:
    """An op of the table.

    defaults  its options, and what they are if they are not given: a value, one per device type, or None: of other options
    model     options -> the reference module, eager PyTorch
    run       (options, model, x, mode) -> y, by ckptkern
    """

    defaults: dict[str, Any]
    model: Callable[[SimpleNamespace], nn.Module]
    run: Callable[[SimpleNamespace, Any, Tensor, str], Tensor]
    baselines: Callable[[SimpleNamespace, Ours], dict[str, Maker]] = field(default=lambda v, ours: {})
    modes: tuple[str, ...] = MODES


_ROWS = {"features": FEATURES, "tokens": TOKENS}
_HEAD = {"features": FEATURES, "tokens": {"cuda": 8192, "cpu": 1024}, "classes": {"cuda": 128256, "cpu": 1000}}
_HEADS = {"heads": None, "kv_heads": None, "length": LENGTH, "causal": True}
_CORE = {"head_dim": {"cuda": 128, "cpu": 16}, "tokens": TOKENS, **_HEADS, "heads": 8}
_HIDDEN = {"hidden": None, "dropout": 0.0}
_MLP = {"activation": "gelu", "gated": False, "norm": "layer", "bias": True}
_EXPERTS = {"hidden": {"cuda": 768, "cpu": 48}, "experts": {"cuda": 128, "cpu": 8}, "activation": "silu"}
_ROUTED = {**_EXPERTS, "top_k": {"cuda": 8, "cpu": 2}}
_LOSS_MODES = ("none", "full")
OPS = {
    "linear_act": Op(
        {**_ROWS, "out_features": None, "activation": "relu", "bias": True},
        lambda v: nn.Sequential(nn.Linear(v.features, v.out_features, v.bias), Act(v.activation)),
        lambda v, model, x, mode: ops.linear_act(x, model[0].weight, model[0].bias, v.activation, recompute=mode),
    ),
    "linear_stack": Op({**_ROWS, "layers": 10, "activation": "relu", "bias": True}, _stack, _run_stack),
    "linear_cross_entropy": Op(
        {**_HEAD, "softcap": 0.0, "bias": False, "reduction": "none"},
        lambda v: LMHeadLoss(v.features, v.classes, v.bias, v.softcap or None, v.reduction),
        run_lm_head,
        _head_baselines,
        _LOSS_MODES,
    ),
    "selected_log_probs": Op(
        {**_HEAD, "bias": False},
        lambda v: SelectedLogProbs(v.features, v.classes, v.bias),
        _run_log_probs,
        _head_baselines,
        _LOSS_MODES,
    ),
    "linear_distillation": Op(
        {**_HEAD, "bias": False, "reduction": "none"},
        lambda v: Distillation(v.features, v.classes, v.bias, reduction=v.reduction),
        _run_distillation,
        _distillation_baselines,
        ("",),
    ),
    "linear_topk_distillation": Op(
        {**_HEAD, "top_k": {"cuda": 64, "cpu": 8}, "bias": False, "reduction": "none"},
        lambda v: Distillation(v.features, v.classes, v.bias, v.top_k, v.reduction),
        _run_topk_distillation,
        _distillation_baselines,
        ("",),
    ),
    "mlp": Op({**_ROWS, **_HIDDEN, "activation": "gelu", "bias": True}, _mlp, _run_mlp, _mlp_baselines),
    "gated_mlp": Op({**_ROWS, **_HIDDEN, "activation": "silu", "bias": False}, _mlp, _run_gated, _gated_baselines),
    "moe_mlp": Op(
        {**_ROWS, **_ROUTED},
        lambda v: MoE(v.features, Act(v.activation), v.hidden, v.experts, v.top_k),
        _run_moe,
        _moe_baselines,
    ),
    "moe_block": Op(
        {**_ROWS, **_ROUTED},
        lambda v: RoutedMoE(v.features, Act(v.activation), v.hidden, v.experts, v.top_k),
        _run_routed_moe,
    ),
    "grouped_gated_mlp": Op(
        {**_ROWS, **_EXPERTS},
        lambda v: GroupedRows(v.features, Act(v.activation), v.hidden, v.experts),
        _run_grouped_rows,
        lambda v, ours: INTERLEAVED,
    ),
    "mlp_block": Op(
        {**_ROWS, **_HIDDEN, **_MLP},
        _mlp_block,
        lambda v, model, x, mode: ops.mlp_block(x, **model.arguments(), training=model.training, recompute=mode),
    ),
    "attention_block": Op(
        {**_ROWS, **_HEADS, "norm": "layer", "bias": True, "dropout": 0.0},
        _attention,
        _run_attention,
        attention_baselines,
    ),
    "latent_attention_block": Op(
        {**_ROWS, "heads": None, "length": LENGTH, "causal": True, "norm": "rms", "bias": False, "dropout": 0.0},
        lambda v: LatentAttention(v.features, v.heads, v.length, v.dropout, v.bias, v.norm, v.causal),
        lambda v, model, x, mode: ops.latent_attention_block(
            x, **model.arguments(), training=model.training, recompute=mode
        ),
    ),
    "transformer_layer": Op(
        {**_ROWS, **_HIDDEN, **_HEADS, **_MLP},
        lambda v: Layer(_attention(v), _mlp_block(v)),
        run_layer,
        attention_baselines,
    ),
    "scaled_dot_product_attention": Op({**_CORE, "dropout": 0.0}, _core, _run_core, _core_baselines, ("",)),
    "varlen_attn": Op(_CORE, _core, _run_varlen, _core_baselines, ("",)),
    "dropout": Op(
        {**_ROWS, "dropout": 0.125},
        lambda v: nn.Dropout(v.dropout),
        lambda v, model, x, mode: ops.dropout(x, v.dropout),
        modes=("",),
    ),
}
