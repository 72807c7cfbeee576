"""Reads attention around its core (core.py): projections, output gate, q/k norm, rotary tables, masks and sinks. Also reads
multi-head latent attention (DeepSeek-V2), where k and v are projected from a latent and all heads share the rotated part of
k."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .computed import Computed, call
from .core import Core, read_core
from .reading import (
    VIEWS,
    Argument,
    Choices,
    Layer,
    Norm,
    Reading,
    Steps,
    Template,
    Weight,
    in_training,
    layers_as,
    updates,
)
from .trace import Node, Unreadable, leaves_of

# Functions of rotary embeddings. Any other, such as a clamp, may have no effect on the numbers of a check.
ROTATING = (
    "add",
    "mul",
    "div",
    "sub",
    "neg",
    "cat",
    "stack",
    "roll",
    "repeat_interleave",
    "view_as_complex",
    "view_as_real",
)


@dataclass
class Projection:
    """Lists what lies between an operand of core attention and the linear layers that it comes from."""

    linears: dict[Node, Layer] = field(default_factory=dict)
    norms: dict[Node, Norm] = field(default_factory=dict)
    tables: dict[Node, bool] = field(default_factory=dict)  # of rotary embeddings: is each read from its first row?
    factor: float = 1.0
    is_complex: bool = False  # pairs are rotated as complex numbers


def read_attention(steps: Steps, node: Node) -> Reading:
    """Returns the attention sublayer, whose q, k and v are projected from its input or from a latent. Raises Unreadable."""
    if isinstance(steps.leaf(node), nn.MultiheadAttention):
        return _of_module(steps, node)
    out = steps.linear(node, "the branch's end")
    gate, inner = None, out.input
    for operand, o in inner.pairs if inner.is_function("mul") else ():
        sigmoid = steps.strip(operand)
        if sigmoid.is_function("sigmoid") or isinstance(steps.leaf(sigmoid), nn.Sigmoid):
            gate, inner = steps.input_of(sigmoid), steps.strip(o)  # o * sigmoid(linear(x))
            break
    core = read_core(steps, inner)
    q, k, v = (projection(steps, nodes) for nodes in ([core.query], joined_of(steps, core.key), [core.value]))
    if v.norms or v.tables or v.factor != 1.0:
        raise Unreadable("v is changed between its projection and core attention")
    latents = [layer for linear, layer in k.linears.items() if linear not in v.linears]
    if gate is None and len(q.linears) == len(v.linears) == len(latents) == 1 and len(k.linears) == 2:
        arguments, x, choices = _latent_projections(steps, core, q, *latents, v, out)
    else:
        arguments, x, choices = _projections(steps, core, q, k, v, out, gate)
    rotary = rotary_of(steps, q, k)
    arguments |= core.options | rotary[0] | {"scale": core.scale * q.factor * k.factor} | _masks(steps, core.masks)
    return Reading(arguments, x, [*choices, rotary])


# -- projections and what follows them


def projection(steps: Steps, views: list[Node]) -> Projection:
    """Returns all linear layers behind these nodes, with the norms, tables and factors on the way. Raises Unreadable."""
    result, seen = Projection(), set()
    while views:
        view, *views = views
        node = steps.strip(view)
        if not _reads_linear(steps, node):
            for table, is_first in _tables(steps, view).items():
                result.tables[table] = is_first and result.tables.get(table, True)
            continue
        if node in seen:
            continue
        seen.add(node)
        if (layer := steps.linear_of(node)) is not None:
            steps.layers_read += 1
            result.linears[node] = layer
        elif (norm := steps.norm(node)) is not None:
            result.norms[node] = norm
            views = [node.inputs[0], *views]
        elif not node.is_function(*ROTATING):
            raise steps.refuse("an unsupported step between projection and core attention:", node)
        else:
            number, behind = steps.scaled(node)
            result.factor *= number
            result.is_complex |= node.is_function("view_as_complex")
            views = [*(node.inputs if behind is node else [behind]), *views]
    return result


def _reads_linear(steps: Steps, node: Node) -> bool:
    return steps.linear_of(steps.strip(node)) is not None or any(
        _reads_linear(steps, operand) for operand in node.inputs
    )


def _tables(steps: Steps, view: Node) -> dict[Node, bool]:
    """Returns the arguments and other tensors that are rotated or joined to this one, and whether each is read from its
    first row; the node itself if it is computed otherwise."""
    tables, views = {}, [view]
    while views:
        part, *views = views
        node = steps.strip(part)
        if node.kind in ("argument", "constant", "parameter"):
            tables[node] = _from_first_row(part) and tables.get(node, True)
        elif node.is_function(*ROTATING):
            views = [*node.inputs, *views]
        else:
            return {view: True}
    return tables


def _alike(a: Any, b: Any) -> bool:
    """Returns whether two nodes are the same tensor, or the same function of such nodes."""
    if a is b or not isinstance(a, Node) or not isinstance(b, Node):
        return a == b
    ours, theirs = a.leaves, b.leaves
    same = a.kind == b.kind == "function" and (a.source, a.output, len(ours)) == (b.source, b.output, len(theirs))
    return same and all(map(_alike, ours, theirs))


def _projections(
    steps: Steps, core: Core, q: Projection, k: Projection, v: Projection, out: Layer, gate: Node | None
) -> tuple[Template, Node, Choices]:
    """Returns (arguments, the node that the projections read, choices). Raises Unreadable."""
    if any(len(part.linears) != 1 for part in (q, k, v)):
        raise Unreadable("q, k and v do not come from one linear layer each")
    nodes, layers = map(list, zip(*(item for part in (q, k, v) for item in part.linears.items()), strict=True))
    x, D, rows = layers[0].input, core.query.shape[-1], layers[0].out_features
    arguments, others = _crossing(*(layer.input for layer in layers)) | _norms(q, k), {"out": out}
    if gate is nodes[0]:
        arguments["gate_in_query"], rows = True, rows // 2
    elif gate is not None:
        others["gate"] = steps.linear(gate, "the input of an output gate")
        if others["gate"].input is not x:
            raise Unreadable("an output gate and q's projection read different tensors")
    if nodes[0] is nodes[1] is nodes[2]:
        # a matmul of [B H, S, D] does not show the number of heads
        H = core.query.shape[1] if len(core.query.shape) == 4 else rows // (3 * D)
        arguments |= layers_as(qkv=layers[0], **others) | {"num_heads": H, "num_kv_heads": (rows // D - H) // 2}
        return arguments, x, [[{}, {"qkv_layout": "heads"}]]
    if nodes[1] is nodes[2]:  # q, and k with v
        layers[1:] = layers[1].rows(0, 2), layers[1].rows(1, 2)
    arguments |= layers_as(**others) | updates(**dict(zip("qkv", layers, strict=True)), **others)
    arguments["qkv_weight"], arguments["qkv_bias"] = (
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
    )
    return arguments | {"num_heads": rows // D, "num_kv_heads": layers[1].out_features // D}, x, []


def _latent_projections(
    steps: Steps, core: Core, q: Projection, latent: Layer, v: Projection, out: Layer
) -> tuple[Template, Node, Choices]:
    """Returns what `_projections` does, if k and v are projected from a latent, and maybe q from another. Raises
    Unreadable."""
    (q_layer,), (kv_b,), x = q.linears.values(), v.linears.values(), latent.input
    layers, arguments = {"q": q_layer, "kv_b": kv_b, "out": out}, {"num_heads": core.query.shape[1]}
    for name, reader in (("kv_a", kv_b), ("q_a", q_layer)):
        node = reader.input
        if node is x:
            continue
        if (norm := steps.norm(node)) is not None:
            arguments[f"{name}_norm_weight"], node = norm.weight, steps.input_of(node)
            if arguments.setdefault("latent_norm_eps", norm.eps) != norm.eps:
                raise Unreadable("the norms of latents differ in their epsilon")
        layers[name] = steps.linear(node, "a latent")
        if layers[name].input is not x:
            raise Unreadable("the latents are projected from different tensors")
    if layers.get("kv_a") != latent:
        raise Unreadable("k and v are not projected from one latent")
    return arguments | layers_as(**layers), x, []


def _crossing(query: Node, key: Node, value: Node) -> Template:
    """Returns the argument `key_value` if k and v are projected from another tensor than q; {} otherwise. Raises Unreadable."""
    if query is key is value:
        return {}
    if key is not value:
        raise Unreadable("k and v are projected from different tensors")
    if key.kind != "argument":
        raise Unreadable("cross-attention reads a tensor that is computed inside")
    return {"key_value": Argument(key.source)}


def _norms(q: Projection, k: Projection) -> Template:
    norms = [*q.norms.values(), *k.norms.values()]
    if not norms:
        return {}
    if len(q.norms) != 1 or len(k.norms) != 1 or norms[0].eps != norms[1].eps:
        raise Unreadable("q and k do not have one norm each, with one epsilon")
    pairs = tuple(norm.weight if norm.bias is None else (norm.weight, norm.bias) for norm in norms)
    return {"qk_norm": pairs, "qk_norm_eps": norms[0].eps, "qk_norm_kind": norms[0].kind}


def rotary_of(steps: Steps, q: Projection, k: Projection) -> list[Template]:
    """Returns the arguments by which q and k may be rotated, a dict for each way."""
    tables = [*q.tables]
    if len(tables) != len(k.tables) or not all(map(_alike, tables, k.tables)):
        raise Unreadable("q and k are rotated by different tensors")
    if not tables:
        return [{"rotary": None}]
    if len(tables) == 2 and all(table.kind == "function" and 1 in table.shape[1:3] for table in tables):
        computed = tuple(Computed(call(Tensor.squeeze, table, 1 if table.shape[1] == 1 else 2)) for table in tables)
        return [{"rotary": computed, "rotary_interleaved": interleaved} for interleaved in (False, True)]
    kinds = ("argument", "parameter")[: len(tables)]  # one complex table is an argument
    if not 2 - q.is_complex <= len(tables) <= 2 or any(table.kind not in kinds for table in tables):
        names = ", ".join(map(steps.describe, tables))
        raise Unreadable(f"q and k are not rotated by (cos, sin) among arguments and buffers: {names}")
    if not all((*q.tables.values(), *k.tables.values())):
        raise Unreadable("rotary tables are not read from their first row")
    ways = (("table", False), ("table", True), ("twice", False), ("each twice", True), ("sublayers", True))
    forms = [("real", "imag", True)] if len(tables) == 1 else [(form, form, interleaved) for form, interleaved in ways]
    cos, sin = (
        partial(Argument if table.kind == "argument" else Weight, table.source) for table in (tables[0], tables[-1])
    )
    return [{"rotary": (cos(a), sin(b)), "rotary_interleaved": interleaved} for a, b, interleaved in forms]


def _from_first_row(view: Node) -> bool:
    """Returns whether the view begins at the tensor's first row."""
    while view.inputs:
        if view.is_function("__getitem__"):
            keys = leaves_of(view.args[1])
            if any(isinstance(key, int) or (isinstance(key, slice) and key.start not in (None, 0)) for key in keys):
                return False
        elif view.is_function("narrow", "select", "chunk", "split", "unbind", "tensor_split"):
            return False
        view = view.inputs[0]
    return True


def is_causal_buffer(steps: Steps, mask: Node) -> bool:
    """Returns whether the mask is a view of a buffer that is causal as a whole, not only in the rows of this example."""
    while mask.is_function(*VIEWS, "eq", "logical_not", "invert", "bool"):
        mask = mask.inputs[0]
    buffer = dict(steps.module.named_buffers()).get(mask.source) if mask.kind == "parameter" else None
    if buffer is None or buffer.dim() < 2:
        return False
    hidden = buffer < -1e4 if buffer.is_floating_point() and buffer.min() < 0 else buffer != 0
    later = torch.ones_like(hidden).triu(1)
    return torch.equal(hidden, later) or torch.equal(hidden, ~later)


def _masks(steps: Steps, seen: list[Node]) -> Template:
    """Returns the arguments attn_mask and is_causal for the masks `seen`, which are added to the scores or hide some.
    Empties `seen`."""
    pairs, causal = [], {}
    while seen:
        addend = seen.pop()
        node = steps.strip(addend)
        if is_causal_buffer(steps, addend):
            causal = {"is_causal": True}
        elif node.is_function("add", of=2):
            seen += node.inputs
        elif node.is_function("where", of=2) and len(node.args) == 3:
            condition, bias = node.inputs
            seen.append(bias)
            if steps.strip(condition).kind == "argument":
                seen.append(condition)
            else:
                causal = {"is_causal": True}  # a guess, which must hold for another length too
        else:
            alike = any(len(mask.shape) < 3 or mask.shape[-3] == 1 for mask in (addend, node))  # it may be expanded
            pairs.append((alike, _mask(steps, addend)))
    # of two masks the first may be trained: that is a bias, which differs from head to head
    masks = [mask for _, mask in sorted(pairs, key=lambda pair: pair[0])]
    return causal | {"attn_mask": tuple(masks) if len(masks) > 1 else next(iter(masks), None)}


def _mask(steps: Steps, seen: Node | None) -> Argument | Computed | None:
    """Returns a mask as an argument of the call, in the form in which it is viewed, or as a computed tensor."""
    if seen is None:
        return None
    mask = steps.strip(seen)
    if mask.kind != "argument":
        return Computed(seen)
    shape, wanted = tuple(mask.shape), tuple(seen.shape)
    is_broadcast = all(size in (1, other) for size, other in zip(shape[::-1], wanted[::-1], strict=False))
    if is_broadcast and len(shape) <= len(wanted) and (len(shape) != 2 or shape[0] != 1):
        return Argument(mask.source)
    is_cut = seen.is_function("__getitem__") and seen.inputs[0] is mask and shape[:-1] == wanted[:-1]
    if is_cut and leaves_of(seen.args[1])[-1] == slice(shape[-1] - wanted[-1], None):
        return Argument(mask.source, "last columns")
    if len(shape) in (2, 3) and wanted == (shape[0], *(1,) * (4 - len(shape)), *shape[1:]):
        return Argument(mask.source, "all heads")
    return Computed(seen)


# -- torch's own module


def _of_module(steps: Steps, node: Node) -> Reading:
    """Returns attention by an nn.MultiheadAttention inside the module. Raises Unreadable."""
    module: nn.MultiheadAttention = steps.leaf(node)
    call, path = node.called_with(*list(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]), node.source
    if node.output or call.get("need_weights", True) or not module.batch_first:
        raise Unreadable("nn.MultiheadAttention is called with need_weights, or is not batch_first")
    query, key, value = (steps.strip(call[name]) for name in ("query", "key", "value"))
    masks = {name: _mask(steps, call.get(name)) for name in ("key_padding_mask", "attn_mask")}
    if call.get("is_causal", False):  # the hint stands for attn_mask
        masks["attn_mask"] = None
    if isinstance(call.get("attn_mask"), Node) and len(call["attn_mask"].shape) != 2:
        raise Unreadable("nn.MultiheadAttention gets a mask for each head")
    bias = module.in_proj_bias is not None
    arguments = {
        "qkv_weight": Weight(f"{path}.in_proj_weight"),
        "qkv_bias": Weight(f"{path}.in_proj_bias") if bias else None,
        "out_weight": Weight(f"{path}.out_proj.weight"),
        "out_bias": Weight(f"{path}.out_proj.bias") if bias else None,
        "num_heads": module.num_heads,
        "mask_is_exclusion": True,
        "is_causal": bool(call.get("is_causal", False)),
        "dropout_p": in_training(module.dropout),
        **masks,
        **_crossing(query, key, value),
    }
    return Reading(arguments, query)


EMPTY = ("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like")


def joined_of(steps: Steps, node: Node) -> list[Node]:
    """Returns the tensors that were written into parts of an empty tensor; the tensor itself if it was not made so."""
    node = steps.strip(node)
    before, write = node.written or (None, node)
    if before is None and not node.is_function("__setitem__"):
        return [] if node.is_function(*EMPTY) else [node]
    if not write.is_function("copy_", "__setitem__", of=2):
        raise steps.refuse("a part of k is changed by", write)
    place, value = write.inputs
    return [*joined_of(steps, place if before is None else before), value]
