"""One op at sizes of one's own: what ``python -m ckptkern bench --op OP`` measures.

OPS is the table: which options an op has, what they default to, and how a case is made of them. An option that an op does not
have is an error that names those which it has.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import eager, ops
from . import baselines, cases
from .cases import ATTENTION_BASELINES, HEADLINE, MODES, TOKENS, Case, Function, Item, Maker, Size
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
)  # fmt: skip

FEATURES = {"cuda": 1024, "cpu": 128}
LENGTH = {"cuda": 2048, "cpu": 128}
NORMS = ("layer", "rms", "none")


class Option(NamedTuple):
    """kind: int, float, bool, or the choices. letter: its mark in a case's name, before its value."""

    kind: Any
    help: str
    letter: str = ""


OPTIONS = {
    "features": Option(int, "width of the input"),
    "tokens": Option(int, "rows of the input, of all sequences together"),
    "length": Option(int, "tokens per sequence"),
    "hidden": Option(int, "width of the hidden layer", "h"),
    "out_features": Option(int, "width of the output", "n"),
    "classes": Option(int, "of the loss: the vocabulary", "V"),
    "reduction": Option(("none", "mean"), "of the loss over rows: one of"),
    "softcap": Option(float, "of the loss's logits: c tanh(z / c), 0 for none", "c"),
    "layers": Option(int, "of the stack", "L"),
    "experts": Option(int, "of the MoE layer", "E"),
    "top_k": Option(int, "experts, or a teacher's log-probabilities, of a token", "k"),
    "heads": Option(int, "of queries", "H"),
    "kv_heads": Option(int, "of keys and values", "K"),
    "head_dim": Option(int, "features per head", "D"),
    "activation": Option(tuple(ops.ACTIVATIONS), "one of", ""),
    "norm": Option(NORMS, "in front of each sublayer:", ""),
    "gated": Option(bool, "act(gate(x)) * up(x) in place of act(up(x))", "gated"),
    "bias": Option(bool, "of the linear layers", "bias"),
    "causal": Option(bool, "each token sees those before it", "causal"),
    "dropout": Option(float, "probability, of attention's weights and of hidden layers; timed, not checked", "p"),
}


class Act(nn.Module):
    """An activation by its name, in torch's ops."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, z: Tensor) -> Tensor:
        return eager.ACTIVATIONS[self.name].act(z)


# -- how models are made of options, and ours of models


def _linear(v: SimpleNamespace) -> nn.Module:
    return nn.Sequential(nn.Linear(v.features, v.out_features, v.bias), Act(v.activation))


def _stack(v: SimpleNamespace) -> nn.Module:
    layers = [nn.Linear(v.features, v.features, v.bias) for _ in range(v.layers)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)  # keeps the size of activations over the depth
    return nn.Sequential(*itertools.chain.from_iterable((layer, Act(v.activation)) for layer in layers))


def _mlp(v: SimpleNamespace) -> MLP | GatedMLP:
    return (GatedMLP if v.gated else MLP)(v.features, Act(v.activation), v.bias, v.hidden, v.dropout)


def _mlp_block(v: SimpleNamespace) -> MLPBlock:
    return MLPBlock(v.features, _mlp(v), v.activation, v.norm)


def _moe(v: SimpleNamespace) -> MoE:
    return MoE(v.features, Act(v.activation), v.hidden, v.experts, v.top_k)


def _routed_moe(v: SimpleNamespace) -> RoutedMoE:
    return RoutedMoE(v.features, Act(v.activation), v.hidden, v.experts, v.top_k)


def _grouped_rows(v: SimpleNamespace) -> GroupedRows:
    return GroupedRows(v.features, Act(v.activation), v.hidden, v.experts)


def _core(v: SimpleNamespace) -> Core:
    return Core(v.heads, v.kv_heads, v.dropout, v.causal)


def _attention(v: SimpleNamespace) -> Attention:
    return Attention(v.features, v.heads // v.kv_heads, v.dropout, v.heads, v.bias, v.norm, v.causal)


def _latent_attention(v: SimpleNamespace) -> LatentAttention:
    return LatentAttention(v.features, v.heads, v.length, v.dropout, v.bias, v.norm, v.causal)


def _run_linear(v: SimpleNamespace, model: nn.Sequential, mode: str) -> Function:
    return lambda x: ops.linear_act(x, model[0].weight, model[0].bias, v.activation, recompute=mode)


def _run_stack(v: SimpleNamespace, model: nn.Sequential, mode: str) -> Function:
    weights = [layer.weight for layer in model[::2]]
    biases = [layer.bias for layer in model[::2]] if v.bias else None
    return lambda x: ops.linear_stack(x, weights, biases, v.activation, recompute=mode)


def _run_mlp(v: SimpleNamespace, model: MLP, mode: str) -> Function:
    return lambda x: ops.mlp(
        x, model.fc1.weight, model.fc1.bias, model.fc2.weight, model.fc2.bias, v.activation, v.dropout,
        training=model.training, recompute=mode,
    )  # fmt: skip


def _run_gated(v: SimpleNamespace, model: GatedMLP, mode: str) -> Function:
    return lambda x: ops.gated_mlp(
        x, model.gate.weight, model.up.weight, model.down.weight, v.activation, v.dropout, gate_bias=model.gate.bias,
        up_bias=model.up.bias, down_bias=model.down.bias, training=model.training, recompute=mode,
    )  # fmt: skip


def _run_moe(v: SimpleNamespace, model: MoE, mode: str) -> Function:
    return lambda x: ops.moe_mlp(x, *model.routing(x), model.gate_up, model.down, v.activation, recompute=mode)


def _run_routed_moe(v: SimpleNamespace, model: RoutedMoE, mode: str) -> Function:
    return lambda x: ops.moe_block(
        x, model.router.weight, model.gate_up, model.down, v.activation, top_k=model.top_k, score_bias=model.score_bias,
        recompute=mode,
    )[0]  # fmt: skip


def _run_grouped_rows(v: SimpleNamespace, model: GroupedRows, mode: str) -> Function:
    return lambda x: ops.grouped_gated_mlp(
        x, model.ends_there(x), model.gate_up, model.down, v.activation, recompute=mode
    )


def _run_mlp_block(v: SimpleNamespace, model: MLPBlock, mode: str) -> Function:
    return lambda x: ops.mlp_block(x, **model.arguments(), training=model.training, recompute=mode)


def _run_attention(v: SimpleNamespace, model: Attention, mode: str) -> Function:
    return lambda x: ops.attention_block(x, **model.arguments(x), training=model.training, recompute=mode)


def _run_latent_attention(v: SimpleNamespace, model: LatentAttention, mode: str) -> Function:
    return lambda x: ops.latent_attention_block(x, **model.arguments(x), training=model.training, recompute=mode)


def _run_layer(v: SimpleNamespace, model: Layer, mode: str) -> Function:
    return lambda x: ops.transformer_layer(x, *model.arguments(x), training=model.training, recompute=mode)


def _run_core(v: SimpleNamespace, model: Core, mode: str) -> Function:
    def function(x: Tensor) -> Tensor:
        o = ops.scaled_dot_product_attention(
            *model.split(x), None, v.dropout if model.training else 0.0, v.causal, enable_gqa=v.heads != v.kv_heads
        )
        return o.transpose(1, 2).flatten(2)

    return function


def _run_varlen(v: SimpleNamespace, model: Core, mode: str) -> Function:
    def function(x: Tensor) -> Tensor:
        q, k, v_ = (one.transpose(1, 2).flatten(0, 1) for one in model.split(x))
        bounds = torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32, device=x.device)
        o = ops.varlen_attn(
            q, k, v_, bounds, bounds, x.shape[1], x.shape[1], is_causal=v.causal, enable_gqa=v.heads != v.kv_heads
        )
        return o.reshape(*x.shape[:2], -1)

    return function


# -- baselines


def _mlp_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    name = {"relu": "relu", "gelu_tanh": "gelu_approx"}.get(v.activation)
    if name and not v.dropout:
        found["flash-attn FusedMLP"] = functools.partial(baselines.flash_attn_mlp, name)
    if v.activation == "gelu_tanh" and not v.bias and not v.dropout:
        found["QuACK mlp_func"] = functools.partial(baselines.quack_mlp, "gelu_tanh_approx")
    return found


def _gated_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    plain = v.activation == "silu" and not v.dropout
    return {"liger-kernel SwiGLU": baselines.liger_swiglu} if plain else {}


def _attention_baselines(run: Callable, v: SimpleNamespace) -> dict[str, Maker]:
    return ATTENTION_BASELINES if v.dropout else cases.with_own_core(functools.partial(run, v))


def _moe_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    """Liger's last, because it takes half a minute to compile: too long for the cases of the first figures."""
    liger = {"liger-kernel MoE, largest tiles": baselines.liger_moe} if v.activation == "silu" else {}
    return {"torch, experts interleaved": baselines.experts_by_turns, **liger}


def _head_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    """torch's chunks have no softcap."""
    found = cases.HEAD_BASELINES
    return {name: make for name, make in found.items() if not getattr(v, "softcap", 0.0) or name != "torch chunks"}


def _distillation_baselines(v: SimpleNamespace) -> dict[str, Maker]:
    found = {cases.CHUNKS: baselines.in_chunks(cases.CHUNK_ROWS)}
    if v.reduction == "mean" and not v.bias and not hasattr(v, "top_k"):
        found["liger-kernel JSD"] = baselines.liger_distillation
    return found


# -- the table

Make = Callable[[SimpleNamespace], nn.Module]
_ROWS = {"features": FEATURES, "tokens": TOKENS}
_HEAD = {"features": FEATURES, "tokens": {"cuda": 8192, "cpu": 1024}, "classes": {"cuda": 128256, "cpu": 1000}}
_HEADS = {"heads": None, "kv_heads": None, "length": LENGTH, "causal": True}
_HIDDEN = {"hidden": None, "dropout": 0.0}
_EXPERTS = {"hidden": {"cuda": 768, "cpu": 48}, "experts": {"cuda": 128, "cpu": 8}, "activation": "silu"}


@dataclass(frozen=True)
class Op:
    """An op of the table.

    defaults  its options, and what they are if they are not given: a value, one per device type, or None: of other options
    """

    defaults: dict[str, Any]
    model: Make
    run: Callable[[SimpleNamespace, Any, str], Function]
    modes: tuple[str, ...] = MODES
    baselines: Callable[[SimpleNamespace], dict[str, Maker]] = field(default=lambda v: {})


_CORE = {"head_dim": {"cuda": 128, "cpu": 16}, "tokens": TOKENS, **_HEADS, "heads": 8}
OPS = {
    "linear_act": Op({**_ROWS, "out_features": None, "activation": "relu", "bias": True}, _linear, _run_linear),
    "linear_stack": Op({**_ROWS, "layers": 10, "activation": "relu", "bias": True}, _stack, _run_stack),
    "linear_cross_entropy": Op(
        {**_HEAD, "softcap": 0.0, "bias": False, "reduction": "none"},
        lambda v: LMHeadLoss(v.features, v.classes, v.bias, v.softcap or None, v.reduction),
        lambda v, model, mode: cases.lm_head_loss(model, mode), ("none", "full"),
        _head_baselines,
    ),
    "selected_log_probs": Op(
        {**_HEAD, "bias": False}, lambda v: SelectedLogProbs(v.features, v.classes, v.bias),
        lambda v, model, mode: cases.selected_log_probs(model, mode), ("none", "full"), _head_baselines,
    ),
    "linear_distillation": Op(
        {**_HEAD, "bias": False, "reduction": "none"},
        lambda v: Distillation(v.features, v.classes, v.bias, reduction=v.reduction),
        lambda v, model, mode: cases.distillation(model, mode), ("",), _distillation_baselines,
    ),
    "linear_topk_distillation": Op(
        {**_HEAD, "top_k": {"cuda": 64, "cpu": 8}, "bias": False, "reduction": "none"},
        lambda v: Distillation(v.features, v.classes, v.bias, v.top_k, v.reduction),
        lambda v, model, mode: cases.topk_distillation(model, mode), ("",), _distillation_baselines,
    ),
    "mlp": Op(
        {**_ROWS, **_HIDDEN, "activation": "gelu", "bias": True}, _mlp, _run_mlp, baselines=_mlp_baselines
    ),
    "gated_mlp": Op({**_ROWS, **_HIDDEN, "activation": "silu", "bias": False}, _mlp, _run_gated, baselines=_gated_baselines),
    "moe_mlp": Op(
        {**_ROWS, **_EXPERTS, "top_k": {"cuda": 8, "cpu": 2}}, _moe, _run_moe,
        baselines=_moe_baselines,
    ),
    "moe_block": Op({**_ROWS, **_EXPERTS, "top_k": {"cuda": 8, "cpu": 2}}, _routed_moe, _run_routed_moe),
    "grouped_gated_mlp": Op(
        {**_ROWS, **_EXPERTS}, _grouped_rows, _run_grouped_rows,
        baselines=lambda v: {"torch, experts interleaved": baselines.experts_by_turns},
    ),
    "mlp_block": Op(
        {**_ROWS, **_HIDDEN, "activation": "gelu", "gated": False, "norm": "layer", "bias": True}, _mlp_block, _run_mlp_block
    ),
    "attention_block": Op(
        {**_ROWS, **_HEADS, "norm": "layer", "bias": True, "dropout": 0.0}, _attention, _run_attention,
        baselines=functools.partial(_attention_baselines, _run_attention),
    ),
    "latent_attention_block": Op(
        {**_ROWS, "heads": None, "length": LENGTH, "causal": True, "norm": "rms", "bias": False, "dropout": 0.0},
        _latent_attention, _run_latent_attention,
    ),
    "transformer_layer": Op(
        {**_ROWS, **_HIDDEN, **_HEADS, "activation": "gelu", "gated": False, "norm": "layer", "bias": True},
        lambda v: Layer(_attention(v), _mlp_block(v)), _run_layer, baselines=functools.partial(_attention_baselines,
        _run_layer),
    ),
    "scaled_dot_product_attention": Op(
        {**_CORE, "dropout": 0.0}, _core, _run_core, ("",), lambda v: {"SDPA flash": baselines.sdpa_flash}
    ),
    "varlen_attn": Op(_CORE, _core, _run_varlen, ("",), lambda v: {"SDPA flash": baselines.sdpa_flash}),
    "dropout": Op({**_ROWS, "dropout": cases.DROPOUT_P}, lambda v: nn.Dropout(v.dropout),
                  lambda v, model, mode: lambda x: ops.dropout(x, v.dropout), ("",)),
}  # fmt: skip


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("an op at sizes of your own", "which options an op has: see below")
    group.add_argument("--op", choices=tuple(OPS), metavar="OP", help=", ".join(OPS))
    for name, (kind, text, _) in OPTIONS.items():
        if kind is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        elif isinstance(kind, tuple):
            group.add_argument(flag(name), choices=kind, metavar=name.upper(), help=f"{text} {', '.join(kind)}".strip())
        else:
            group.add_argument(flag(name), type=kind, metavar="P" if kind is float else "N", help=text)


def epilog() -> str:
    """Each op with its options and their defaults."""

    def shown(name: str, value: Any) -> str:
        if isinstance(value, dict):
            return f"{flag(name)} {value['cuda']} ({value['cpu']} on a CPU)"
        if isinstance(value, bool):
            return flag(name) if value else f"--no-{flag(name)[2:]}"
        return f"{flag(name)} {DERIVED[name] if value is None else value}"

    lines = ["options of each op, with their defaults:"]
    for op, entry in OPS.items():
        options = ", ".join(shown(name, value).replace(" ", "\xa0") for name, value in entry.defaults.items())
        wrapped = textwrap.wrap(options, 74, break_on_hyphens=False)  # between options alone
        lines += [f"  {op}", *(f"    {line}".replace("\xa0", " ") for line in wrapped)]
    return "\n".join(lines)


DERIVED = {
    "hidden": "(4 features; gated: 8/3 of them, up to a multiple of 256)",
    "out_features": "(features)",
    "heads": "(features / 128; features / 16 below 512)",
    "kv_heads": "(heads)",
}


# -- from arguments to a case


def values_of(op: str, given: dict[str, Any], kind: str) -> SimpleNamespace:
    """All options of the op. Raises ValueError for one that it does not have, and for sizes that do not go together."""
    defaults = OPS[op].defaults
    for name in given:
        if name not in defaults:
            raise ValueError(f"{flag(name)} does not apply to --op {op}, which takes {', '.join(map(flag, defaults))}")
    found = {name: value[kind] if isinstance(value, dict) else value for name, value in defaults.items()} | given
    v = SimpleNamespace(**{"gated": op == "gated_mlp", "norm": None, "dropout": 0.0} | found)
    for name, value in found.items():
        if OPTIONS[name].kind is int and value is not None and value < 1:
            raise ValueError(f"{flag(name)}: wanted at least 1 but got {value}")
    if not 0.0 <= v.dropout < 1.0:
        raise ValueError(f"--dropout: wanted a probability in [0, 1) but got {v.dropout}")
    if op == "dropout" and not v.dropout:
        raise ValueError("--dropout: wanted more than 0, because 0 does nothing")
    v.dropout = round(65536 * v.dropout) / 65536  # as ckptkern rounds it, so that torch's scale is ours
    v.norm = None if v.norm == "none" else v.norm
    if "out_features" in found and v.out_features is None:
        v.out_features = v.features
    if "hidden" in found and v.hidden is None:
        v.hidden = GatedMLP.hidden_of(v.features) if v.gated else 4 * v.features
    if "heads" in found:
        _set_heads(v, "head_dim" in found)
    return v


def _set_heads(v: SimpleNamespace, alone: bool) -> None:
    """Defaults and checks of attention's sizes."""
    if not alone:
        v.heads = v.heads or max(1, v.features // (128 if v.features >= 512 else 16))
        if v.features % v.heads:
            raise ValueError(f"--features {v.features} is not a multiple of --heads {v.heads}")
    v.kv_heads = getattr(v, "kv_heads", None) or v.heads
    if v.heads % v.kv_heads:
        raise ValueError(f"--heads {v.heads} is not a multiple of --kv-heads {v.kv_heads}")
    if v.tokens % v.length:
        raise ValueError(f"--tokens {v.tokens} is not a multiple of --length {v.length}")
    if alone:
        v.features = (v.heads + 2 * v.kv_heads) * v.head_dim


def _name(op: str, v: SimpleNamespace) -> str:
    parts = [op]
    for name, (kind, _, letter) in OPTIONS.items():
        value = getattr(v, name) if name in OPS[op].defaults and name not in ("features", "tokens", "length") else None
        if kind is bool and value is not None:
            parts += [letter] if value else [f"no{letter}"] * (name != "gated")
        elif value and value != "none":
            parts.append(f"{letter}{value:g}" if kind in (int, float) else value)
    return "-".join(parts)


def item(
    op: str, kind: str, modes: tuple[str, ...] | None = None, dtype: torch.dtype | None = None, **given: Any
) -> Item:
    """The case of an op on a device type. given: its options. Raises ValueError with what is wrong with them."""
    entry, v = OPS[op], values_of(op, given, kind)
    if modes and entry.modes == ("",):
        raise ValueError(f"--modes does not apply to --op {op}, which has only one mode")
    size = Size(v.features, v.tokens, getattr(v, "length", None))
    case = Case(
        _name(op, v), lambda width: entry.model(v), functools.partial(entry.run, v), {kind: [size]}, priority=HEADLINE,
        modes=modes or entry.modes, baselines=entry.baselines(v), dtype=dtype, drops=v.dropout > 0 and op != "dropout",
        exact=functools.partial(cases.dropout_exact, v.dropout) if op == "dropout" else None,
    )  # fmt: skip
    return Item(case, size, HEADLINE)


def item_of(args: argparse.Namespace, kind: str, modes: tuple[str, ...] | None, dtype: torch.dtype | None) -> Item:
    """The case of --op and its options. Raises ValueError with what is wrong with them."""
    return item(
        args.op, kind, modes, dtype, **{name: one for name in OPTIONS if (one := getattr(args, name)) is not None}
    )


# Ops of cases.CASES, at the sizes and in the variants that these have
IN_CASES = {
    "linear_act", "linear_stack", "linear_cross_entropy", "mlp", "gated_mlp", "moe_mlp", "attention_block", "transformer_layer",
    "dropout",
}  # fmt: skip


def items(kind: str) -> list[Item]:
    """The mean loss, as training has it, and each op that is in no case, at its defaults."""
    width = {"cuda": 2048, "cpu": FEATURES["cpu"]}[kind]  # Llama-1B's
    loss = item("linear_cross_entropy", kind, reduction="mean", features=width)
    given = {"linear_distillation": {"reduction": "mean"}}
    others = [item(op, kind, **given.get(op, {})) for op in OPS if op not in IN_CASES]
    return [loss._replace(priority=0), *others]
