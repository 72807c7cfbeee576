"""Defines a case of one op at any sizes: ``python -m ckptkern bench --op OP``, and the built-in cases.

An option that the op does not have raises an error that names its options.
"""

from __future__ import annotations

import argparse
import functools
import textwrap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import ops
from .cases import HEADLINE, Case, random_case
from .models import GatedMLP
from .table import OPS, Op

NORMS = ("layer", "rms", "none")


class Option(NamedTuple):
    """An option of the command line. kind: int, float, bool, or the choices. letter: precedes its value in a case's name."""

    kind: Any
    help: str
    letter: str = ""


OPTIONS = {
    "features": Option(int, "width of the input"),
    "tokens": Option(int, "rows of the input, of all sequences together"),
    "length": Option(int, "tokens per sequence"),
    "hidden": Option(int, "width of the hidden layer", "h"),
    "out_features": Option(int, "width of the output", "n"),
    "classes": Option(int, "size of the vocabulary", "V"),
    "reduction": Option(("none", "mean"), "reduction of the loss over rows:"),
    "softcap": Option(float, "softcap c of the logits, c tanh(z / c); 0 for none", "c"),
    "layers": Option(int, "layers of the stack", "L"),
    "experts": Option(int, "experts of the MoE layer", "E"),
    "top_k": Option(int, "experts per token, or a teacher's log-probabilities per token", "k"),
    "heads": Option(int, "query heads", "H"),
    "kv_heads": Option(int, "key and value heads", "K"),
    "head_dim": Option(int, "features per head", "D"),
    "activation": Option(tuple(ops.ACTIVATIONS), "activation:", ""),
    "norm": Option(NORMS, "norm before each sublayer:", ""),
    "gated": Option(bool, "gated MLP, act(gate(x)) * up(x), instead of act(up(x))", "gated"),
    "bias": Option(bool, "biases of the linear layers", "bias"),
    "causal": Option(bool, "causal attention", "causal"),
    "dropout": Option(float, "dropout probability of attention weights and hidden layers; timed, not checked", "p"),
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one op at your own sizes", "the options of each op are listed below")
    group.add_argument("--op", choices=tuple(OPS), metavar="OP", help=f"op to measure: {', '.join(OPS)}")
    for name, (kind, text, _) in OPTIONS.items():
        if kind is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        elif isinstance(kind, tuple):
            group.add_argument(flag(name), choices=kind, metavar=name.upper(), help=f"{text} {', '.join(kind)}".strip())
        else:
            group.add_argument(flag(name), type=kind, metavar="P" if kind is float else "N", help=text)


def epilog() -> str:
    """Returns a text of each op with its options and their defaults."""

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


def values_of(op: str, defaults: dict[str, Any], options: dict[str, Any], kind: str) -> SimpleNamespace:
    """Returns all options; those that the op lacks are 0 or None. Raises ValueError for an option that it does not have, and
    for inconsistent sizes."""
    for name in options:
        if name not in defaults:
            raise ValueError(f"{flag(name)} does not apply to --op {op}, which takes {', '.join(map(flag, defaults))}")
    values = {name: value[kind] if isinstance(value, dict) else value for name, value in defaults.items()} | options
    lacking = {"gated": op == "gated_mlp", "norm": None, "dropout": 0.0, "softcap": 0.0, "top_k": 0, "length": None}
    v = SimpleNamespace(**lacking | values)
    for name, value in values.items():
        if OPTIONS[name].kind is int and value is not None and value < 1:
            raise ValueError(f"{flag(name)}: wanted at least 1 but got {value}")
    if not 0.0 <= v.dropout < 1.0:
        raise ValueError(f"--dropout: wanted a probability in [0, 1) but got {v.dropout}")
    if op == "dropout" and not v.dropout:
        raise ValueError("--dropout: wanted more than 0, because 0 does nothing")
    v.dropout = round(65536 * v.dropout) / 65536  # as ckptkern rounds it, so that torch's scale is ours
    v.norm = None if v.norm == "none" else v.norm
    if "out_features" in values and v.out_features is None:
        v.out_features = v.features
    if "hidden" in values and v.hidden is None:
        v.hidden = GatedMLP.hidden_of(v.features) if v.gated else 4 * v.features
    if "heads" in values:
        _set_heads(v, "head_dim" in values)
    return v


def heads_of(features: int) -> int:
    """Returns the number of heads: of 128 features, or of 16 in narrow models."""
    return max(1, features // (128 if features >= 512 else 16))


def _set_heads(v: SimpleNamespace, alone: bool) -> None:
    """Sets attention's default sizes, and checks them."""
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
    *,
    entry: Op | None = None,
    title: str | None = None,
    priority: int = HEADLINE,
    **options: Any,
) -> Case:
    """Returns the case of an op on a device type. entry: of the table, if not the op's. title: its name without the size.
    options: the op's. Raises ValueError with the reason."""
    entry = entry or OPS[op]
    v = values_of(op, entry.defaults, options, kind)
    if modes and entry.modes == ("",):
        raise ValueError(f"--modes does not apply to --op {op}, which has only one mode")

    size = f"d{v.features}x{v.tokens}" + (f"-s{v.length}" if v.length else "")
    shape = (v.tokens // v.length, v.length, v.features) if v.length else (v.tokens, v.features)
    return Case(
        f"{title or _name(op, entry.defaults, v)}/{size}",
        functools.partial(random_case, lambda: entry.model(v), shape),
        priority=priority,
        modes=modes or entry.modes,
        baselines=entry.baselines(v),
        drops=v.dropout > 0,
    )


def case_of(args: argparse.Namespace, kind: str, modes: Sequence[str] | None) -> Case:
    """Returns the case of --op and its options. Raises ValueError with the reason."""
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    return case(args.op, kind, modes, **options)
