"""Reads core attention as a module calls it: torch's op, transformers' interface, or softmax(q k^T + mask) v written out."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .computed import call
from .masks import causal_attention, window_of
from .reading import Steps, Weight, in_training
from .trace import Node

CALLS = {  # functions that are core attention, with the names of their arguments by place
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "causal_attention": tuple(inspect.signature(causal_attention).parameters),
}


@dataclass
class Core:
    """Describes softmax(q k^T scale + mask) v as the module calls it. options: other arguments of the op, by name;
    sinks: a parameter, which becomes one of the options."""

    query: Node
    key: Node
    value: Node
    masks: list[Node]
    scale: float
    options: dict[str, Any]
    sinks: Node | None = None


def read_core(steps: Steps, node: Node) -> Core:
    if node.kind == "function" and node.source in CALLS:
        call = node.called_with(*CALLS[node.source])
        query, key, value, mask, scale = (call.get(name) for name in ("query", "key", "value", "attn_mask", "scale"))
        options = {
            "dropout_p": in_training(call.get("dropout_p", 0.0)),
            "is_causal": bool(call.get("is_causal", False)),
        }
        if call.get("window") is not None:
            options["window_size"] = window_of(call["window"])
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        core = Core(query, key, value, [] if mask is None else [mask], scale, options, sinks=call.get("sinks"))
    elif node.is_function("matmul", "bmm"):
        core = _written_out(steps, node)
    else:
        raise steps.refuse("core attention expected, found", node)
    if core.sinks is not None:
        sinks = steps.strip(core.sinks)
        if sinks.kind != "parameter" or len(sinks.shape) != 1:
            raise steps.refuse("attention's sinks must be a parameter with a number for each head, found", sinks)
        core.options["sinks"] = Weight(sinks.source)
    return core


def _written_out(steps: Steps, node: Node) -> Core:
    """Reads matmul(dropout(softmax(scores)), v)."""
    dropouts = []
    weights, value = steps.strip(node.inputs[0], dropouts), node.inputs[1]
    if not weights.is_function("softmax"):
        raise steps.refuse("a softmax expected as the left operand of a matmul, found", weights)
    scores, sinks = steps.input_of(weights), None
    if scores.is_function("sub", of=2):  # with a column of sinks they may be without their maximum
        whole, largest = (steps.strip(operand) for operand in scores.inputs)
        largest = steps.input_of(largest) if largest.is_function("detach") else largest
        if largest.is_function("max", "amax") and steps.input_of(largest) is whole:
            scores = whole
    if scores.is_function("cat", of=2):
        scores, sinks = steps.input_of(scores), scores.inputs[1]
    masks, scale, options = [], 1.0, {"is_causal": False}
    while not scores.is_function("matmul", "bmm", "baddbmm"):
        if scores.is_function("add", of=2):
            a, b = scores.inputs
            if not _is_of_matmul(a):
                a, b = b, a
            scores = steps.strip(a)
            masks.append(b)
        elif scores.is_function("where", of=2) and len(scores.args) == 3:
            masks.append(scores.inputs[0])
            scores = steps.strip(scores.inputs[1])
        elif scores.is_function("masked_fill", of=2):
            masks.append(scores.inputs[1])
            options["mask_is_exclusion"] = True
            scores = steps.input_of(scores)
        elif (number := steps.factor(scores)) is not None:
            scores = steps.input_of(scores)
            if "softcap" not in options and scores.is_function("tanh"):
                options["softcap"], scores = number, steps.input_of(scores)
            else:
                scale *= number
        else:
            raise steps.refuse("an unsupported step on attention scores:", scores)
    scale *= options.get("softcap", 1.0)  # tanh reads scores / softcap
    if scores.is_function("baddbmm"):
        # beta * bias + alpha * q k^T of [B H, S, S] (Bloom's ALiBi), whose bias meets [B, H, S, S]
        how = {"beta": 1, "alpha": 1} | scores.called_with("input", "batch1", "batch2")
        bias, query, key, shape = how["input"], how["batch1"], how["batch2"], weights.shape
        bias = call(Tensor.unflatten, bias, 0, (-1, shape[1]), shape=(*shape[:2], *bias.shape[1:]))
        if how["beta"] != 1:
            bias = call(torch.mul, bias, how["beta"], shape=bias.shape)
        masks.append(bias)
        scale *= float(how["alpha"])
    else:
        query, key = scores.inputs
    options["dropout_p"] = steps.probability(dropouts)
    return Core(query, key, value, masks, scale, options, sinks)


def _is_of_matmul(node: Node) -> bool:
    """Returns whether a matmul is behind the node, as behind scores but not behind masks."""
    return node.is_function("matmul", "bmm", "baddbmm") or any(map(_is_of_matmul, node.inputs))
