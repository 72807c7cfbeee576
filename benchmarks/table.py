"""Lists the ops: the options of each, its model in eager PyTorch, and its baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from . import baselines, heads, models
from .cases import CHECKPOINT, MODES, Maker
from .models import MLP, Attention, GatedMLP, MLPBlock

FEATURES = {"cuda": 1024, "cpu": 128}
LENGTH = {"cuda": 2048, "cpu": 128}
TOKENS = {"cuda": 16384, "cpu": 1024}


def _mlp(v: SimpleNamespace) -> MLP | GatedMLP:
    return (GatedMLP if v.gated else MLP)(v.features, v.activation, v.bias, v.hidden, v.dropout)


def _mlp_block(v: SimpleNamespace) -> MLPBlock:
    return MLPBlock(v.features, _mlp(v), v.norm)


def _attention(v: SimpleNamespace) -> Attention:
    return Attention(v.features, v.heads // v.kv_heads, v.dropout, v.heads, v.bias, v.norm, v.causal)


# -- baselines

CHUNK_ROWS = 1024  # of a hand-written loop over chunks of rows
CHUNKS = {f"{CHECKPOINT}, {CHUNK_ROWS} rows at a time": baselines.in_chunks(CHUNK_ROWS)}
INTERLEAVED: dict[str, Maker] = {"torch, experts interleaved": baselines.experts_by_turns}


def _mlp_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    makers: dict[str, Maker] = {}
    name = {"relu": "relu", "gelu_tanh": "gelu_approx"}.get(v.activation)
    if name and not v.dropout:
        makers["flash-attn FusedMLP"] = functools.partial(baselines.flash_attn_mlp, name)
    if v.activation == "gelu_tanh" and not v.bias and not v.dropout:
        makers["QuACK mlp_func"] = functools.partial(baselines.quack_mlp, "gelu_tanh_approx")
    return makers


def _gated_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    has_liger = v.activation == "silu" and not v.dropout
    return {"liger-kernel SwiGLU": baselines.liger_swiglu} if has_liger else {}


def attention_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    makers: dict[str, Maker] = {
        f"{CHECKPOINT}, SDPA saved": baselines.SelectiveCheckpoint,
        "SDPA flash": baselines.sdpa_flash,
    }
    if not v.dropout:
        makers["own core, selective"] = baselines.own_core
    return makers


def _core_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    return {"SDPA flash": baselines.sdpa_flash}


def _moe_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    return INTERLEAVED | ({"liger-kernel MoE, largest tiles": baselines.liger_moe} if v.activation == "silu" else {})


def _head_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    """Returns the head's baselines; torch's chunks have no softcap."""
    makers = {"liger-kernel loss": baselines.liger_loss, "cut-cross-entropy, no filter": baselines.cut_cross_entropy}
    return makers | CHUNKS | ({} if v.softcap else {"torch chunks": baselines.torch_chunks})


def _distillation_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    has_liger = v.reduction == "mean" and not v.bias and not v.top_k
    return CHUNKS | ({"liger-kernel JSD": baselines.liger_distillation} if has_liger else {})


# -- the table


class Op(NamedTuple):
    """An op of the table.

    defaults  its options and their defaults: a value, one per device type, or None if it follows from other options
    model     options -> the module in eager PyTorch, whose `ours` is the op
    """

    defaults: dict[str, Any]
    model: Callable[[SimpleNamespace], nn.Module]
    baselines: Callable[[SimpleNamespace], dict[str, Maker]] = lambda v: {}
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
        lambda v: models.Linear([v.features, v.out_features], v.activation, v.bias),
    ),
    "linear_stack": Op(
        {**_ROWS, "layers": 10, "activation": "relu", "bias": True},
        lambda v: models.Stack([v.features] * (v.layers + 1), v.activation, v.bias),
    ),
    "linear_cross_entropy": Op(
        {**_HEAD, "softcap": 0.0, "bias": False, "reduction": "none"},
        lambda v: heads.LMHeadLoss(v.features, v.classes, v.bias, v.softcap or None, v.reduction),
        _head_baselines,
        _LOSS_MODES,
    ),
    "selected_log_probs": Op(
        {**_HEAD, "bias": False},
        lambda v: heads.SelectedLogProbs(v.features, v.classes, v.bias),
        _head_baselines,
        _LOSS_MODES,
    ),
    "linear_distillation": Op(
        {**_HEAD, "bias": False, "reduction": "none"},
        lambda v: heads.Distillation(v.features, v.classes, v.bias, reduction=v.reduction),
        _distillation_baselines,
        ("",),
    ),
    "linear_topk_distillation": Op(
        {**_HEAD, "top_k": {"cuda": 64, "cpu": 8}, "bias": False, "reduction": "none"},
        lambda v: heads.Distillation(v.features, v.classes, v.bias, v.top_k, v.reduction),
        _distillation_baselines,
        ("",),
    ),
    "mlp": Op({**_ROWS, **_HIDDEN, "activation": "gelu", "bias": True}, _mlp, _mlp_baselines),
    "gated_mlp": Op({**_ROWS, **_HIDDEN, "activation": "silu", "bias": False}, _mlp, _gated_baselines),
    "moe_mlp": Op(
        {**_ROWS, **_ROUTED},
        lambda v: models.MoE(v.features, v.activation, v.hidden, v.experts, v.top_k),
        _moe_baselines,
    ),
    "moe_block": Op(
        {**_ROWS, **_ROUTED}, lambda v: models.RoutedMoE(v.features, v.activation, v.hidden, v.experts, v.top_k)
    ),
    "grouped_gated_mlp": Op(
        {**_ROWS, **_EXPERTS},
        lambda v: models.GroupedRows(v.features, v.activation, v.hidden, v.experts),
        lambda v: INTERLEAVED,
    ),
    "mlp_block": Op({**_ROWS, **_HIDDEN, **_MLP}, _mlp_block),
    "attention_block": Op(
        {**_ROWS, **_HEADS, "norm": "layer", "bias": True, "dropout": 0.0}, _attention, attention_baselines
    ),
    "latent_attention_block": Op(
        {**_ROWS, "heads": None, "length": LENGTH, "causal": True, "norm": "rms", "bias": False, "dropout": 0.0},
        lambda v: models.LatentAttention(v.features, v.heads, v.length, v.dropout, v.bias, v.norm, v.causal),
    ),
    "transformer_layer": Op(
        {**_ROWS, **_HIDDEN, **_HEADS, **_MLP},
        lambda v: models.Layer(_attention(v), _mlp_block(v)),
        attention_baselines,
    ),
    "scaled_dot_product_attention": Op(
        {**_CORE, "dropout": 0.0},
        lambda v: models.Core(v.heads, v.kv_heads, v.dropout, v.causal),
        _core_baselines,
        ("",),
    ),
    "varlen_attn": Op(_CORE, lambda v: models.PackedCore(v.heads, v.kv_heads, 0.0, v.causal), _core_baselines, ("",)),
    "dropout": Op({**_ROWS, "dropout": 0.125}, lambda v: models.Dropout(v.dropout), modes=("",)),
}
