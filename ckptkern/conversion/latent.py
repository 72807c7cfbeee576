"""Reads multi-head latent attention (DeepSeek-V2): k and v are projected from a latent, and a part of k that is rotated is one
for all heads."""

from __future__ import annotations

from typing import Any

from .attention import Projection, of_core, projection, rotary_of
from .core import read_core
from .leaves import Norm
from .reading import Layer, Part, Steps
from .trace import Node, Unreadable

JOINED = ("cat", "concat", "concatenate")
EMPTY = ("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like")


def read_latent(steps: Steps, node: Node) -> Part | None:
    """None for what is not latent attention. Raises Unreadable for latent attention that the op does not compute."""
    after = []
    end = steps.strip(node, after)
    out = steps.linear_of(end)
    try:
        if out is None:
            return None
        core, k = read_core(steps, steps.strip(out.input)), Projection()
        q, v = projection(steps, core.query), projection(steps, core.value)
        for part in parts_of(steps, core.key):
            k = projection(steps, part, k)
    except Unreadable:
        return None
    kv_a = [one for one in k.linears if one not in v.linears]
    if not (len(q.linears) == len(v.linears) == len(kv_a) == 1 and len(k.linears) == 2):
        return None
    arguments, x = _projections(steps, q.linears[0], kv_a[0], v.linears[0])
    if q.norms or k.norms or v.norms or v.outside or v.factor != 1.0:
        raise Unreadable("q, k or v of latent attention are changed between their projections and core attention")
    if len(core.query.shape) != 4:
        raise Unreadable(f"latent attention of queries {list(core.query.shape)}, which do not tell the number of heads")
    rotary, choices = rotary_of(steps, q, k)
    arguments |= {"num_heads": core.query.shape[1], "rotary": rotary}
    if any(layer.update is not None for layer in (out, *_layers(steps, q, k))):
        raise Unreadable("latent attention with low-rank updates")
    arguments |= of_core(steps, core, out, q.factor * k.factor, after)
    return Part(arguments, x, choices)


def parts_of(steps: Steps, node: Node) -> list[Node]:
    """What a tensor is joined of: of a cat, or of what was written to parts of an empty one."""
    node = steps.strip(node)
    if node.is_function(*JOINED):
        return node.inputs
    before, write = node.written or (None, node)
    if before is None and not node.is_function("__setitem__"):
        return [] if node.is_function(*EMPTY) else [node]
    if not write.is_function("copy_", "__setitem__") or len(write.inputs) != 2:
        raise steps.refuse("a part of k is changed by", write)
    place, value = write.inputs
    return [*parts_of(steps, place if before is None else before), value]


def _layers(steps: Steps, *found: Projection) -> list[Layer]:
    return [steps.linear(node, "a projection") for one in found for node in one.linears]


def _projections(steps: Steps, q: Node, kv_a: Node, kv_b: Node) -> tuple[dict[str, Any], Node]:
    """(arguments, the node that the projections read)."""
    layers = {
        "q": steps.linear(q, "q"),
        "kv_a": steps.linear(kv_a, "the latent"),
        "kv_b": steps.linear(kv_b, "k and v"),
    }
    x, norms = layers["kv_a"].input, {}
    latent, norms["kv_a"] = _before_norm(steps, layers["kv_b"].input)
    if latent is not kv_a:
        raise steps.refuse("k and v are not projected from a latent but from", latent)
    if steps.strip(layers["q"].input) is not steps.strip(x):
        latent, norms["q_a"] = _before_norm(steps, layers["q"].input)
        layers["q_a"] = steps.linear(latent, "the latent of q")
        if steps.strip(layers["q_a"].input) is not steps.strip(x):
            raise Unreadable("the latents are projected from different tensors")
        if layers["q_a"].update is not None:
            raise Unreadable("latent attention with low-rank updates")
    found: dict[str, Any] = {}
    for name, layer in layers.items():
        found |= {f"{name}_weight": layer.weight, f"{name}_bias": layer.bias}
    used = {name: norm for name, norm in norms.items() if norm is not None}
    if any(norm.kind != "rms" or norm.bias is not None for norm in used.values()):
        raise Unreadable("a norm of a latent that is not an RMS norm")
    if len({norm.eps for norm in used.values()}) > 1:
        raise Unreadable("norms of latents that differ in their epsilon")
    for name, norm in used.items():
        found |= {f"{name}_norm_weight": norm.weight, "latent_norm_eps": norm.eps}
    if any(norm.weight is None for norm in used.values()):
        raise Unreadable("a norm of a latent without a weight")
    return found, x


def _before_norm(steps: Steps, node: Node) -> tuple[Node, Norm | None]:
    """(what the norm reads, the norm), or the node itself."""
    node = steps.strip(node)
    norm = steps.leaves.norm(node)
    return (node, None) if norm is None else (steps.strip(node.inputs[0]), norm)
