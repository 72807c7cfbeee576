"""Reads attention around its core (core.py): projections, output gate, q/k norm, rotary tables, masks and sinks. Also reads
multi-head latent attention (DeepSeek-V2), where k and v are projected from a latent and all heads share the rotated part of
k."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .computed import Computed, call
from .core import Core, read_core
from .reading import (
    VIEWS,
    Argument,
    Layer,
    Reading,
    Steps,
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

    linears: tuple[Node, ...] = ()
    norms: tuple[Node, ...] = ()
    outside: tuple[Node, ...] = ()  # arguments and other tensors on the way: rotary tables
    from_first_row: bool = True  # views of these begin at their first row
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
    core, k = read_core(steps, inner), Projection()
    q, v = (projection(steps, operand, Projection()) for operand in (core.query, core.value))
    for part in joined_of(steps, core.key):
        k = projection(steps, part, k)
    if v.norms or v.outside or v.factor != 1.0:
        raise Unreadable("v is changed between its projection and core attention")
    kv_a = [linear for linear in k.linears if linear not in v.linears]
    if gate is None and len(q.linears) == len(v.linears) == len(kv_a) == 1 and len(k.linears) == 2:
        if q.norms or k.norms:
            raise Unreadable("q or k of latent attention is changed between its projection and core attention")
        if len(core.query.shape) != 4:
            raise Unreadable(
                f"latent attention has queries {list(core.query.shape)}, which do not show the number of heads"
            )
        arguments, x = _latent_projections(steps, q.linears[0], kv_a[0], v.linears[0], out)
        arguments["num_heads"], choices = core.query.shape[1], []
    else:
        arguments, x, choices = _projections(steps, core, q, k, v, out, gate)
        arguments |= _norms(steps, q, k)
    rotary = rotary_of(steps, q, k)
    arguments |= (
        {"out_weight": out.weight, "out_bias": out.bias}
        | core.options
        | rotary[0]
        | {"scale": core.scale * q.factor * k.factor}
        | _masks(steps, core.masks, sliced="key_value" not in arguments)
    )
    return Reading(arguments, x, [*choices, rotary])


# -- projections and what follows them


def projection(steps: Steps, node: Node, result: Projection, apart: bool = False) -> Projection:
    """Adds all linear layers behind a node to `result`, with the norms, outside tensors and factors on the way, and returns
    it. apart: no linear layer is behind the node."""
    view, node = node, steps.strip(node)
    if steps.linear_of(node) is not None:
        if node not in result.linears:
            steps.layers_read += 1
            result.linears += (node,)
        return result
    if node.kind in ("argument", "constant", "parameter"):
        if node not in result.outside:
            result.outside += (node,)
        result.from_first_row &= _from_first_row(view)
        return result
    if steps.norm(node) is not None:
        if node not in result.norms:
            result.norms += (node,)
    elif not node.is_function(*ROTATING):
        raise steps.refuse("an unsupported step between projection and core attention:", node)
    elif (factor := steps.factor(node)) is not None:
        result.factor *= factor
    result.is_complex |= node.is_function("view_as_complex")
    for operand in node.inputs:
        if apart or _reads_linear(steps, operand):
            result = projection(steps, operand, result, apart)
            continue
        try:
            result = projection(steps, operand, replace(result), True)
        except Unreadable:
            result.outside += (operand,)  # a table that is computed
    return result


def _reads_linear(steps: Steps, node: Node) -> bool:
    return steps.linear_of(steps.strip(node)) is not None or any(
        _reads_linear(steps, operand) for operand in node.inputs
    )


def _alike(a: Any, b: Any) -> bool:
    """Returns whether two nodes are the same tensor, or the same function of such nodes."""
    if a is b or not isinstance(a, Node) or not isinstance(b, Node):
        return a == b
    ours, theirs = a.leaves, b.leaves
    same = a.kind == b.kind == "function" and (a.source, a.output, len(ours)) == (b.source, b.output, len(theirs))
    return same and all(map(_alike, ours, theirs))


def _projections(steps: Steps, core: Core, q: Projection, k: Projection, v: Projection, out: Layer, gate: Node | None):
    """Returns (arguments, the node that the projections read, choices). Raises Unreadable."""
    if any(len(part.linears) != 1 for part in (q, k, v)):
        raise Unreadable("q, k and v do not come from one linear layer each")
    nodes = [part.linears[0] for part in (q, k, v)]
    layers = [steps.linear(node, "a projection") for node in nodes]
    crossing = _crossing(*(layer.input for layer in layers))
    x, D, rows = layers[0].input, core.query.shape[-1], layers[0].out_features
    gated = {}
    if gate is nodes[0]:
        if gate in nodes[1:]:
            raise Unreadable("an output gate shares one projection with q and k or v")
        gated, rows = {"gate_in_query": True}, rows // 2
    elif gate is not None:
        layer = steps.linear(gate, "the input of an output gate")
        if layer.update is not None:
            raise Unreadable("an output gate has a low-rank update")
        if layer.input is not x:
            raise Unreadable("an output gate and q's projection read different tensors")
        gated = layers_as(gate=layer)
    if nodes[0] is nodes[1] is nodes[2]:
        # a matmul of [B H, S, D] does not show the number of heads
        H = core.query.shape[1] if len(core.query.shape) == 4 else rows // (3 * D)
        H_kv, rest = divmod(rows // D - H, 2)
        if rows % D or rest or H_kv < 1:
            raise Unreadable(f"a packed projection has {rows} rows, which do not fit {H} heads of {D}")
        arguments = layers_as(qkv=layers[0], out=out)
        choices = [[{}, {"qkv_layout": "heads"}]]
        return arguments | {"num_heads": H, "num_kv_heads": H_kv} | gated, x, choices
    if nodes[1] is nodes[2]:  # q, and k with v
        layers[1:] = layers[1].rows(0, 2), layers[1].rows(1, 2)
    biases = [layer.bias for layer in layers]
    arguments = {
        "qkv_weight": [layer.weight for layer in layers],
        "qkv_bias": biases if any(b is not None for b in biases) else None,
        "num_heads": rows // D,
        "num_kv_heads": layers[1].out_features // D,
        **crossing,
        **gated,
        **updates(**dict(zip("qkv", layers, strict=True)), out=out),
    }
    return arguments, x, []


def _crossing(query: Node, key: Node, value: Node) -> dict[str, Any]:
    """Returns the argument `key_value` if k and v are projected from another tensor than q; {} otherwise. Raises Unreadable."""
    if query is key is value:
        return {}
    if key is not value:
        raise Unreadable("k and v are projected from different tensors")
    if key.kind != "argument":
        raise Unreadable("cross-attention reads a tensor that is computed inside")
    return {"key_value": Argument(key.source)}


def _norms(steps: Steps, q: Projection, k: Projection) -> dict[str, Any]:
    if not q.norms and not k.norms:
        return {}
    if len(q.norms) != 1 or len(k.norms) != 1:
        raise Unreadable("q and k do not have one norm each")
    norms = [steps.norm(part.norms[0]) for part in (q, k)]
    if norms[0].kind != norms[1].kind or norms[0].eps != norms[1].eps:
        raise Unreadable(f"q and k have different norms: {norms[0]} and {norms[1]}")
    if any(norm.weight is None for norm in norms):
        raise Unreadable("the norms of q and k have no weight")
    pairs = tuple(norm.weight if norm.bias is None else (norm.weight, norm.bias) for norm in norms)
    return {"qk_norm": pairs, "qk_norm_eps": norms[0].eps, "qk_norm_kind": norms[0].kind}


def rotary_of(steps: Steps, q: Projection, k: Projection) -> list[dict[str, Any]]:
    """Returns the arguments by which q and k may be rotated, a dict for each way."""
    if len(q.outside) != len(k.outside) or not all(map(_alike, q.outside, k.outside)):
        raise Unreadable("q and k are rotated by different tensors")
    if not q.outside:
        return [{"rotary": None}]
    if len(q.outside) == 2 and all(table.kind == "function" and 1 in table.shape[1:3] for table in q.outside):
        tables = tuple(Computed(call(Tensor.squeeze, table, 1 if table.shape[1] == 1 else 2)) for table in q.outside)
        return [{"rotary": tables, "rotary_interleaved": interleaved} for interleaved in (False, True)]
    kinds = [table.kind for table in q.outside]
    is_complex = q.is_complex and k.is_complex and kinds == ["argument"]
    if not is_complex and (len(kinds) != 2 or not {"argument", "parameter"}.issuperset(kinds)):
        names = ", ".join(map(steps.describe, q.outside))
        raise Unreadable(f"q and k are not rotated by (cos, sin) among arguments and buffers: {names}")
    if not (q.from_first_row and k.from_first_row):
        raise Unreadable("rotary tables are not read from their first row")
    if is_complex:
        tables = tuple(Argument(q.outside[0].source, form) for form in ("real", "imag"))
        return [{"rotary": tables, "rotary_interleaved": True}]
    forms = (("table", False), ("table", True), ("twice", False), ("each twice", True), ("sublayers", True))
    return [
        {
            "rotary": tuple(
                (Argument if table.kind == "argument" else Weight)(table.source, form) for table in q.outside
            ),
            "rotary_interleaved": interleaved,
        }
        for form, interleaved in forms
    ]


def _from_first_row(view: Node) -> bool:
    """Returns whether the view begins at the tensor's first row."""
    while view.inputs:
        if view.is_function("__getitem__"):
            keys = leaves_of(view.args[1])
            if any(isinstance(key, int) or (isinstance(key, slice) and key.start not in (None, 0)) for key in keys):
                return False
        elif view.is_function("narrow", "select", "chunk", "split", "unbind", "tensor_split", "roll"):
            return False
        view = view.inputs[0]
    return True


def is_causal_buffer(steps: Steps, mask: Node) -> bool:
    """Returns whether the mask is a view of a buffer that is causal as a whole, not only in the rows of this example."""
    while mask.is_function(*VIEWS, "eq", "logical_not", "invert", "bool"):
        mask = mask.inputs[0]
    if mask.kind != "parameter" or len(mask.shape) < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    buffer = dict(steps.module.named_buffers()).get(mask.source)
    if buffer is None:
        return False
    hidden = buffer.reshape(-1, *buffer.shape[-2:])
    hidden = hidden < -1e4 if hidden.is_floating_point() and hidden.min() < 0 else hidden != 0
    later = torch.ones_like(hidden[0]).triu(1)
    return bool((hidden == later).all() or (hidden == ~later).all())


def _masks(steps: Steps, seen: list[Node], sliced: bool) -> dict[str, Any]:
    """Returns the arguments attn_mask and is_causal for the masks `seen`, which are added to the scores or hide some.
    Empties `seen`."""
    pairs, causal = [], False
    while seen:
        addend = seen.pop()
        node = steps.strip(addend)
        if is_causal_buffer(steps, addend):
            causal = True
        elif node.is_function("add", of=2):
            seen += node.inputs
        elif node.is_function("where", of=2) and len(node.args) == 3:
            condition, bias = node.inputs
            seen.append(bias)
            if steps.strip(condition).kind == "argument":
                seen.append(condition)
            else:
                causal = True  # a guess, which must hold for another length too
        else:
            alike = any(len(mask.shape) < 3 or mask.shape[-3] == 1 for mask in (addend, node))  # it may be expanded
            pairs.append((alike, _mask(steps, addend, sliced)))
    if len(pairs) > 2:  # computed masks are added up: those that are equal in all heads, and the others
        if any(isinstance(mask, Argument) for _, mask in pairs):
            raise Unreadable(f"{len(pairs)} masks are added")
        sums: dict[bool, Node] = {}
        for alike, mask in pairs:
            sums[alike] = call(torch.add, sums[alike], mask.node) if alike in sums else mask.node
        pairs = [(alike, Computed(node)) for alike, node in sums.items()]
    # of two masks the first may be trained: that is a bias, which differs from head to head
    masks = [mask for _, mask in sorted(pairs, key=lambda pair: pair[0])]
    arguments = {"is_causal": True} if causal else {}
    return arguments | {"attn_mask": tuple(masks) if len(masks) == 2 else masks[0] if masks else None}


def _mask(steps: Steps, seen: Node | None, sliced: bool) -> Argument | Computed | None:
    """Returns a mask as an argument of the call, in the form in which it is viewed, or as a computed tensor. sliced: the
    mask may have more columns than there are keys."""
    if seen is None:
        return None
    mask = steps.strip(seen)
    if mask.kind != "argument":
        return Computed(seen)
    shape = tuple(mask.shape)
    wanted = tuple(seen.shape)
    if (1,) * (len(wanted) - len(shape)) + shape == wanted and (len(shape) != 2 or shape[0] != 1):
        return Argument(mask.source)
    if sliced and len(shape) == 4 == len(wanted) and shape[:2] == wanted[:2]:
        return Argument(mask.source, "columns")
    keys = leaves_of(seen.args[1]) if seen.is_function("__getitem__") and seen.inputs[0] is mask else [None]
    is_shorter = sliced and shape[:-1] == wanted[:-1] and wanted[-1] < shape[-1]
    if is_shorter and keys[-1] == slice(shape[-1] - wanted[-1], None):
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
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        raise Unreadable("nn.MultiheadAttention has kdim, vdim, add_bias_kv or add_zero_attn")
    query, key, value = (steps.strip(call[name]) for name in ("query", "key", "value"))
    crossing = _crossing(query, key, value)
    masks = {name: _mask(steps, call.get(name), sliced=not crossing) for name in ("key_padding_mask", "attn_mask")}
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
        "scale": 1 / math.sqrt(module.head_dim),
        "mask_is_exclusion": True,
        "is_causal": bool(call.get("is_causal", False)),
        "dropout_p": in_training(module.dropout),
        **masks,
        **crossing,
    }
    return Reading(arguments, query)


EMPTY = ("new_empty", "new_zeros", "empty", "zeros", "empty_like", "zeros_like")


def joined_of(steps: Steps, node: Node) -> list[Node]:
    """Returns the tensors that a tensor is joined from, by a cat or by writes into parts of an empty tensor."""
    node = steps.strip(node)
    if node.is_function("cat"):
        return node.inputs
    before, write = node.written or (None, node)
    if before is None and not node.is_function("__setitem__"):
        return [] if node.is_function(*EMPTY) else [node]
    if not write.is_function("copy_", "__setitem__", of=2):
        raise steps.refuse("a part of k is changed by", write)
    place, value = write.inputs
    return [*joined_of(steps, place if before is None else before), value]


def _latent_projections(steps: Steps, q: Node, kv_a: Node, kv_b: Node, out: Layer) -> tuple[dict[str, Any], Node]:
    """Returns (arguments, the node that the projections read). Raises Unreadable."""
    layers = {
        "q": steps.linear(q, "q"),
        "kv_a": steps.linear(kv_a, "the latent"),
        "kv_b": steps.linear(kv_b, "k and v"),
    }
    x, norms = layers["kv_a"].input, {}

    def before_norm(name: str, node: Node) -> Node:
        """Returns what the norm of this latent reads, or the node itself if there is no norm."""
        if (norm := steps.norm(node)) is None:
            return node
        norms[name] = norm
        return steps.input_of(node)

    if (latent := before_norm("kv_a", layers["kv_b"].input)) is not kv_a:
        raise steps.refuse("k and v are not projected from a latent but from", latent)
    if layers["q"].input is not x:
        layers["q_a"] = steps.linear(before_norm("q_a", layers["q"].input), "the latent of q")
        if layers["q_a"].input is not x:
            raise Unreadable("the latents are projected from different tensors")
    if any(layer.update is not None for layer in (*layers.values(), out)):
        raise Unreadable("latent attention has low-rank updates")
    arguments = layers_as(**layers)
    for name, norm in norms.items():
        if norm.kind != "rms" or norm.bias is not None:
            raise Unreadable("the norm of a latent is not an RMS norm")
        if norm.weight is None:
            raise Unreadable("the norm of a latent has no weight")
        if arguments.setdefault("latent_norm_eps", norm.eps) != norm.eps:
            raise Unreadable("the norms of latents differ in their epsilon")
        arguments[f"{name}_norm_weight"] = norm.weight
    return arguments, x
