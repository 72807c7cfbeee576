"""Reads core attention as a module calls it: torch's op, transformers' interface, or softmax(q k^T + mask) v written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .computed import Of, call
from .reading import ADD, DIVIDE, MULTIPLY, PRODUCT, Steps, in_training
from .trace import Node

SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass
class Core:
    """softmax(q k^T scale + mask) v as the module calls it."""

    query: Node
    key: Node
    value: Node
    masks: list[Node]
    dropout_p: Any
    is_causal: bool
    scale: float
    softcap: float | None = None
    window: int | None = None  # of transformers: how many keys a row sees at most
    sinks: Node | None = None
    head_scale: Node | None = None  # a factor for each head
    excludes: bool = False  # does a mask's True hide?


def read_core(steps: Steps, node: Node) -> Core:
    if node.is_function("scaled_dot_product_attention"):
        call = node.called_with(*SDPA)
        scale, D, mask = call.get("scale"), call["query"].shape[-1], call.get("attn_mask")
        return Core(
            call["query"],
            call["key"],
            call["value"],
            [] if mask is None else [mask],
            in_training(call.get("dropout_p", 0.0)),
            bool(call.get("is_causal", False)),
            D**-0.5 if scale is None else float(scale),
        )
    if node.is_function("causal_attention"):
        query, key, value, mask, sinks, dropout_p, scale, window, causal = node.args
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        masks = [] if mask is None else [mask]
        return Core(query, key, value, masks, in_training(dropout_p), causal, scale, window=window, sinks=sinks)
    if node.is_function(*PRODUCT):
        return _written_out(steps, node)
    raise steps.refuse("no core attention but", node)


def _written_out(steps: Steps, node: Node) -> Core:
    """matmul(dropout(softmax(scores)), v)."""
    dropouts = []
    weights, value = steps.strip(node.inputs[0], dropouts), node.inputs[1]
    if not weights.is_function("softmax"):
        raise steps.refuse("a matmul whose left operand is no softmax but", weights)
    sinks, scores = _column(steps, steps.strip(weights.inputs[0]))
    masks, scale, softcap, head_scale, excludes = [], 1.0, None, None, False
    while not scores.is_function(*PRODUCT, "baddbmm"):
        if scores.is_function(*ADD) and len(scores.inputs) == 2:
            a, b = scores.inputs
            a, b = (a, b) if _is_of_matmul(a) else (b, a)
            scores = steps.strip(a)
            masks.append(_over_windows(b, a.shape))
        elif scores.is_function("where") and len(scores.args) == 3 and len(scores.inputs) == 2:
            masks.append(scores.inputs[0])
            scores = steps.strip(scores.inputs[1])
        elif scores.is_function("masked_fill", "masked_fill_") and len(scores.inputs) == 2:
            masks.append(scores.inputs[1])
            scores, excludes = steps.strip(scores.inputs[0]), True
        elif scores.is_function(*MULTIPLY, *DIVIDE) and len(scores.inputs) == 1:
            number = steps.number(scores)
            if softcap is None and (inner := steps.strip(scores.inputs[0])).is_function("tanh"):
                softcap, scores = number, steps.strip(inner.inputs[0])
            else:
                scale, scores = scale * number, steps.strip(scores.inputs[0])
        elif scores.is_function(*MULTIPLY) and head_scale is None and (pair := _factor_of_heads(scores)) is not None:
            head_scale, scores = pair[0], steps.strip(pair[1])
        else:
            raise steps.refuse("scores are formed by", scores)
    if softcap is not None:
        scale *= softcap  # tanh reads scores / softcap
    if scores.is_function("baddbmm"):
        bias, query, key, factor = _with_bias(scores, weights.shape)
        masks, scale = [*masks, bias], scale * factor
    else:
        query, key = scores.inputs
    return Core(
        query,
        key,
        value,
        masks,
        steps.probability(dropouts),
        False,
        scale,
        softcap,
        sinks=sinks,
        head_scale=head_scale,
        excludes=excludes,
    )


def _column(steps: Steps, node: Node) -> tuple[Node | None, Node]:
    """(sinks, scores) of what a softmax reads: scores with a column of sinks, from which their maximum may be taken."""
    if node.is_function("sub", "__sub__") and len(node.inputs) == 2:
        whole, largest = (steps.strip(one) for one in node.inputs)
        largest = steps.strip(largest.inputs[0]) if largest.is_function("detach") else largest
        if largest.is_function("max", "amax") and steps.strip(largest.inputs[0]) is whole:
            node = whole
    if not (node.is_function("cat", "concat", "concatenate") and len(node.inputs) == 2):
        return None, node
    scores, sinks = node.inputs
    return sinks, steps.strip(scores)


def _with_bias(scores: Node, shape: torch.Size) -> tuple[Node, Node, Node, float]:
    """(the bias [B, H, ...], query, key, their scale) of beta * bias + alpha * q k^T of [B H, S, S] (Bloom's ALiBi)."""
    how = {"beta": 1, "alpha": 1} | scores.called_with("input", "batch1", "batch2")
    bias = call(Tensor.unflatten, how["input"], 0, (-1, shape[1]), shape=(*shape[:2], *how["input"].shape[1:]))
    if how["beta"] != 1:
        bias = call(torch.mul, bias, how["beta"], shape=bias.shape)
    return bias, how["batch1"], how["batch2"], float(how["alpha"])


def _factor_of_heads(product: Node) -> tuple[Node, Node] | None:
    """(a factor [H, 1, 1] for each head, the scores that it scales)."""
    for factor, scores in product.pairs:
        if len(scores.shape) == 4 and factor.shape in ((scores.shape[1], 1, 1), (1, scores.shape[1], 1, 1)):
            return factor, scores
    return None


def _over_windows(mask: Node, scores: torch.Size) -> Node:
    """A mask [1, windows, 1, S, S], which meets scores [B / windows, windows, H, S, S], as it meets [B, H, S, S]."""
    if len(scores) != 5 or len(mask.shape) != 5 or mask.shape[0] != 1 or mask.shape[2] != 1:
        return mask
    images, windows, _, *rows = scores
    times = Of("samples", images, images * windows)
    whole = call(Tensor.expand, mask, times, -1, -1, -1, -1)
    return call(Tensor.flatten, whole, 0, 1, shape=(images * windows, 1, *rows))


def _is_of_matmul(node: Node) -> bool:
    """Is a matmul behind it, as there is behind scores and not behind masks?"""
    return node.is_function(*PRODUCT, "baddbmm") or any(map(_is_of_matmul, node.inputs))
