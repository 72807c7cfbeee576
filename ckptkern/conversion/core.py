"""Reads core attention as a module calls it: torch's op, transformers' interface, or softmax(q k^T + mask) v written out."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import Tensor

from .computed import call
from .masks import causal_attention, window_of
from .reading import Steps, Weight, in_training
from .trace import Node

CALLS = {  # functions that are core attention, with the names of their arguments by place
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "causal_attention": tuple(inspect.signature(causal_attention).parameters),
}
MATMULS = ("matmul", "bmm", "baddbmm")


class Core(NamedTuple):
    """Describes softmax(q k^T scale + mask) v as the module calls it. options: other arguments of the op, by name."""

    query: Node
    key: Node
    value: Node
    masks: list[Node]
    scale: float
    options: dict


def read_core(steps: Steps, node: Node) -> Core:
    if node.is_function("matmul", "bmm"):
        return _written_out(steps, node)
    if node.kind != "function" or node.source not in CALLS:
        raise steps.refuse("core attention expected, found", node)
    call = node.called_with(*CALLS[node.source])
    query, mask, scale, sinks = call["query"], *map(call.get, ("attn_mask", "scale", "sinks"))
    options = {"dropout_p": in_training(call.get("dropout_p", 0.0)), "is_causal": bool(call.get("is_causal", False))}
    if call.get("window") is not None:
        options["window_size"] = window_of(call["window"])
    if sinks is not None:
        options["sinks"] = _sinks(steps, sinks)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return Core(query, call["key"], call["value"], [] if mask is None else [mask], scale, options)


def _written_out(steps: Steps, node: Node) -> Core:
    """Reads matmul(dropout(softmax(scores)), v)."""
    dropouts = []
    weights, value = steps.strip(node.inputs[0], dropouts), node.inputs[1]
    if not weights.is_function("softmax"):
        raise steps.refuse("a softmax expected as the left operand of a matmul, found", weights)
    scores, masks, scale, options = steps.input_of(weights), [], 1.0, {"is_causal": False}
    if scores.is_function("sub", of=2):  # with a column of sinks they may be without their maximum
        whole, largest = map(steps.strip, scores.inputs)
        largest = steps.input_of(largest) if largest.is_function("detach") else largest
        if largest.is_function("max", "amax") and steps.input_of(largest) is whole:
            scores = whole
    if scores.is_function("cat", of=2):
        options["sinks"], scores = _sinks(steps, scores.inputs[1]), steps.input_of(scores)
    while not scores.is_function(*MATMULS):
        number, behind = steps.scaled(scores)
        if behind.is_function("tanh") and "softcap" not in options:
            options["softcap"], scores = number, steps.input_of(behind)
        elif behind is not scores:
            scale, scores = scale * number, behind
        elif scores.is_function("add", of=2):
            scores, mask = sorted(scores.inputs, key=_is_of_matmul, reverse=True)
            scores = steps.strip(scores)
            masks.append(mask)
        elif scores.is_function("where", of=2) and len(scores.args) == 3:
            masks.append(scores.inputs[0])
            scores = steps.strip(scores.inputs[1])
        elif scores.is_function("masked_fill", of=2):
            masks.append(scores.inputs[1])
            options["mask_is_exclusion"] = True
            scores = steps.input_of(scores)
        else:
            raise steps.refuse("an unsupported step on attention scores:", scores)
    scale *= options.get("softcap", 1.0)  # tanh reads scores / softcap
    if scores.is_function("baddbmm"):
        # bias + alpha * q k^T of [B H, S, S] (Bloom's ALiBi), whose bias meets [B, H, S, S]
        bias = scores.inputs[0]
        shape = (*weights.shape[:2], *bias.shape[1:])
        masks.append(call(Tensor.unflatten, bias, 0, (-1, shape[1]), shape=shape))
        scale *= scores.kwargs.get("alpha", 1.0)
    options["dropout_p"] = steps.probability(dropouts)
    query, key = scores.inputs[-2:]
    return Core(query, key, value, masks, scale, options)


def _sinks(steps: Steps, node: Node) -> Weight:
    sinks = steps.strip(node)
    if sinks.kind != "parameter" or len(sinks.shape) != 1:
        raise steps.refuse("attention's sinks must be a parameter with a number for each head, found", sinks)
    return Weight(sinks.source)


def _is_of_matmul(node: Node) -> bool:
    """Returns whether a matmul is behind the node, as behind scores but not behind masks."""
    return node.is_function(*MATMULS) or any(map(_is_of_matmul, node.inputs))
