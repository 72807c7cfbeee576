"""One op at sizes of one's own: what ``python -m ckptkern bench --op OP`` measures, and what the built-in cases are made of.

OPS is the table: which options an op has, what they default to, and how a case is made of them. An option that an op does not
have is an error that names those which it has.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import eager, ops
from . import baselines
from .cases import CHECKPOINT, HEADLINE, MODES, Case, Function, Maker, random_case
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
    return ops.gated_mlp(
        x,
        model.gate.weight,
        model.up.weight,
        model.down.weight,
        v.activation,
        v.dropout,
        gate_bias=model.gate.bias,
        up_bias=model.up.bias,
        down_bias=model.down.bias,
        training=model.training,
        recompute=mode,
    )


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
    return ops.attention_block(x, **model.arguments(), training=model.training, recompute=mode)


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


def values_of(op: str, defaults: dict[str, Any], given: dict[str, Any], kind: str) -> SimpleNamespace:
    """All options, those that the op lacks as 0 or None. Raises ValueError for one that it does not have, and for sizes that do
    not go together."""
    for name in given:
        if name not in defaults:
            raise ValueError(f"{flag(name)} does not apply to --op {op}, which takes {', '.join(map(flag, defaults))}")
    found = {name: value[kind] if isinstance(value, dict) else value for name, value in defaults.items()} | given
    lacking = {"gated": op == "gated_mlp", "norm": None, "dropout": 0.0, "softcap": 0.0, "top_k": 0, "length": None}
    v = SimpleNamespace(**lacking | found)
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


def heads_of(features: int) -> int:
    """Heads of 128 features, or of 16 in narrow models."""
    return max(1, features // (128 if features >= 512 else 16))


def _set_heads(v: SimpleNamespace, alone: bool) -> None:
    """Defaults and checks of attention's sizes."""
    if not alone:
        v.heads = v.heads or heads_of(v.features)
        if v.features % v.heads:
            raise ValueError(f"--features {v.features} is not a multiple of --heads {v.heads}")
    v.kv_heads = getattr(v, "kv_heads", None) or v.heads
    if v.heads % v.kv_heads:
        raise ValueError(f"--heads {v.heads} is not a multiple of --kv-heads {v.kv_heads}")
    if v.tokens % v.length:
        raise ValueError(f"--tokens {v.tokens} is not a multiple of --length {v.length}")
    if alone:
        v.features = (v.heads + 2 * v.kv_heads) * v.head_dim


def _name(op: str, defaults: dict[str, Any], v: SimpleNamespace) -> str:
    parts = [op]
    for name, (kind, _, letter) in OPTIONS.items():
        value = getattr(v, name) if name in defaults and name not in ("features", "tokens", "length") else None
        if kind is bool and value is not None:
            parts += [letter] if value else [f"no{letter}"] * (name != "gated")
        elif value and value != "none":
            parts.append(f"{letter}{value:g}" if kind in (int, float) else value)
    return "-".join(parts)


def case(
    op: str,
    kind: str,
    modes: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    *,
    entry: Op | None = None,
    title: str | None = None,
    priority: int = HEADLINE,
    **given: Any,
) -> Case:
    """The case of an op on a device type. entry: of the table, if it is not the op's. title: its name without the size. given:
    its options. Raises ValueError with what is wrong with them."""
    entry = entry or OPS[op]
    v = values_of(op, entry.defaults, given, kind)
    if modes and entry.modes == ("",):
        raise ValueError(f"--modes does not apply to --op {op}, which has only one mode")

    def ours(model: nn.Module, mode: str) -> Function:
        return lambda x: entry.run(v, model, x, mode)

    size = f"d{v.features}x{v.tokens}" + (f"-s{v.length}" if v.length else "")
    shape = (v.tokens // v.length, v.length, v.features) if v.length else (v.tokens, v.features)
    return Case(
        f"{title or _name(op, entry.defaults, v)}/{size}",
        functools.partial(random_case, lambda: entry.model(v), shape),
        ours,
        priority,
        modes or entry.modes,
        entry.baselines(v, ours),
        drops=v.dropout > 0 and op != "dropout",
        exact=functools.partial(dropout_exact, v.dropout) if op == "dropout" else None,
        dtype=dtype,
    )


def case_of(args: argparse.Namespace, kind: str, modes: Sequence[str] | None, dtype: torch.dtype | None) -> Case:
    """The case of --op and its options. Raises ValueError with what is wrong with them."""
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    return case(args.op, kind, modes, dtype, **given)
