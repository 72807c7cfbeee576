"""Follows an axis of independent entries (tokens, heads, channels, samples) backwards through ATen operators.

`followed` says of an operator whose result is cut along an axis which of its inputs are cut so too, and where, and which are
needed whole; None if entries of the result depend on other entries of an input, or if the operator is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten


class Axis(NamedTuple):
    """Where n entries are in a tensor: dimension `dim` has size outer * n * inner, in this order."""

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> Axis:
        return self._replace(dim=dim)

    def view(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """Returns the entries [first, first + count) as a view [..., outer, count, inner, ...]."""
        return tensor.unflatten(self.dim, (self.outer, -1, self.inner)).narrow(self.dim + 1, first, count)

    def part(self, tensor: Tensor, first: int, count: int) -> Tensor:
        if self.outer == 1:
            return tensor.narrow(self.dim, first * self.inner, count * self.inner)
        return self.view(tensor, first, count).flatten(self.dim, self.dim + 2)

    def write(self, tensor: Tensor, first: int, count: int, part: Tensor) -> None:
        self.view(tensor, first, count).copy_(part.unflatten(self.dim, (self.outer, count, self.inner)))


class Cut(NamedTuple):
    """Describes how an operator is cut. inputs: each tensor input with its axis, None if it is needed whole. sizes: which
    arguments shrink with the number of entries: (place of the argument, index in it or None, size of an entry)."""

    inputs: list[tuple[fx.Node, Axis | None]]
    sizes: tuple[tuple[int, int | None, int], ...] = ()


def shape_of(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple((value[0] if isinstance(value, (list, tuple)) else value).shape)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    return list(dict.fromkeys(node.all_input_nodes))


VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "alias", "detach"),
        *("select", "slice", "split", "split_with_sizes", "unbind", "getitem"),
    )
)
GEMMS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))


def name_of(node: fx.Node) -> str:
    """Returns the operator's name without its overload; "" for what is no operator."""
    name = node.meta.get("operator")
    if name is None:
        target = node.target
        is_op = isinstance(target, torch._ops.OpOverload)
        name = (
            "" if node.op != "call_function" else target._schema.name.partition("::")[2] if is_op else target.__name__
        )
        node.meta["operator"] = name
    return name


def followed(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    name, target = name_of(node), node.target
    rule = RULES.get(name)
    if rule is None:
        if torch.Tag.pointwise not in getattr(target, "tags", ()):
            return None
        rule = _pointwise
    cut = rule(node, axis, n)
    # an operator that reads one tensor along two axes, as mm(x, x) does, would get the same slice for both
    return cut if cut and len(dict(cut.inputs)) == len(set(cut.inputs)) else None


def _aligned(node: fx.Node, of: fx.Node, axis: Axis) -> tuple[fx.Node, Axis | None]:
    """The axis of an input that is broadcast to the result's shape."""
    shape, result = shape_of(of), shape_of(node)
    dim = axis.dim - (len(result) - len(shape))
    return of, axis.at(dim) if dim >= 0 and shape[dim] == result[axis.dim] else None


def _pointwise(node: fx.Node, axis: Axis, n: int) -> Cut:
    return Cut([_aligned(node, one, axis) for one in tensors_of(node)])


def _view(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    if node.target is aten.view.dtype:
        return None
    source, result = node.args[0], shape_of(node)
    shape, before, skipped = shape_of(source), math.prod(result[: axis.dim]) * axis.outer, 1
    for dim, size in enumerate(shape):
        outer, rest = divmod(before, skipped)
        inner, other = divmod(size, max(outer, 1) * n)
        if not rest and not other and outer and inner:
            after = math.prod(shape[dim + 1 :]) * inner
            if outer * n * inner == size and after == math.prod(result[axis.dim + 1 :]) * axis.inner:
                return Cut([(source, Axis(dim, outer, inner))], ((1, axis.dim, axis.outer * axis.inner),))
        skipped *= size
    return None


def _dim(node: fx.Node, place: int, of: fx.Node | None = None, default: int = 0) -> int:
    """The argument `dim`, counted from the front of a tensor."""
    value = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    return value % len(shape_of(of or node.args[0]))


def _permute(node: fx.Node, axis: Axis, n: int) -> Cut:
    source = node.args[0]
    order = list(range(len(shape_of(source))))
    if name_of(node) == "permute":
        order = [one % len(order) for one in node.args[1]]
    else:
        a, b = (_dim(node, 1), _dim(node, 2)) if name_of(node) == "transpose" else (0, len(order) - 1)
        order[a], order[b] = order[b], order[a]
    return Cut([(source, axis.at(order[axis.dim]))])


def _expand(node: fx.Node, axis: Axis, n: int) -> Cut:
    sizes = () if node.args[1][axis.dim] == -1 else ((1, axis.dim, axis.outer * axis.inner),)
    return Cut([_aligned(node, node.args[0], axis)], sizes)


def _repeat(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    source, repeats = node.args[:2]
    if repeats[axis.dim] == 1:
        return Cut([_aligned(node, source, axis)])
    at = axis.dim - (len(repeats) - len(shape_of(source)))
    if at >= 0 and shape_of(source)[at] != 1:
        return None
    return Cut([(source, None)], ((1, axis.dim, axis.outer * axis.inner),))


def _removed(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """select, unbind, squeeze: an input has dimensions that the result has not."""
    source = node.args[0]
    shape = shape_of(source)
    dims = node.args[1] if len(node.args) > 1 else range(len(shape)) if name_of(node) == "squeeze" else 0
    named = {one % len(shape) for one in (dims if isinstance(dims, (list, tuple, range)) else [dims])}
    gone = {one for one in named if shape[one] == 1} if name_of(node) == "squeeze" else named
    dim = [one for one in range(len(shape)) if one not in gone][axis.dim]
    if dim in named and axis.outer * axis.inner == 1:
        return None  # of a slice of one entry, squeeze would take the dimension away
    return Cut([(source, axis.at(dim))])


def _unsqueeze(node: fx.Node, axis: Axis, n: int) -> Cut:
    return Cut([(node.args[0], axis.at(axis.dim - (axis.dim > _dim(node, 1, node))))])


def _along(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """Operators that work along the dimension that is their second argument, and keep all dimensions."""
    size, inputs = shape_of(node)[axis.dim], tensors_of(node)
    if _dim(node, 1) == axis.dim or any(shape_of(one)[axis.dim] != size for one in inputs):
        return None  # gather may leave out the end of its input
    return Cut([(one, axis) for one in inputs])


def _index_select(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    return None if _dim(node, 1) == axis.dim else Cut([(node.args[0], axis), (node.args[2], None)])


def _slice(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    whole = shape_of(node)[axis.dim] == shape_of(node.args[0])[axis.dim]
    return Cut([(node.args[0], axis)]) if whole or _dim(node, 1) != axis.dim else None


def _split(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    return None if _dim(node, 2) == axis.dim else Cut([(node.args[0], axis)])


def _cat(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    stacks, dim, count = name_of(node) == "stack", _dim(node, 1, node), len(shape_of(node))
    if dim == axis.dim:
        return None
    of = axis.at(axis.dim - (stacks and axis.dim > dim))
    # cat takes empty tensors of one dimension with any others
    return Cut([(one, of if len(shape_of(one)) + stacks == count else None) for one in tensors_of(node)])


def _pad(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    pad, back = node.args[1], len(shape_of(node)) - 1 - axis.dim
    return None if any(pad[2 * back : 2 * back + 2]) else Cut([(node.args[0], axis)])


def _reduction(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    source = node.args[0]
    count = len(shape_of(source))
    place = 2 if name_of(node) == "linalg_vector_norm" else 1  # its order comes first
    dims = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
    dims = range(count) if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
    gone = {one % count for one in dims}
    if len(shape_of(node)) == count:
        return None if axis.dim in gone else Cut([(source, axis)])
    return Cut([(source, axis.at([one for one in range(count) if one not in gone][axis.dim]))])


def _flip(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    dims = {one % len(shape_of(node)) for one in node.args[1]}
    return None if axis.dim in dims else Cut([(node.args[0], axis)])


def _scatter(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """select_scatter and slice_scatter: (input, src, dim, ...)."""
    dim, selects = _dim(node, 2), name_of(node) == "select_scatter"
    if dim == axis.dim:
        return None
    return Cut([(node.args[0], axis), (node.args[1], axis.at(axis.dim - (selects and axis.dim > dim)))])


def _gemm(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """mm and bmm, and both with a bias. Rows of weights are not cut: all rows of their gradient need the whole input."""
    name = name_of(node)
    *bias, a, b = node.args[:3] if name in ("addmm", "baddbmm") else node.args[:2]
    added = [_aligned(node, one, axis) for one in bias]
    if name in ("mm", "addmm"):
        return Cut([*added, (a, axis), (b, None)]) if axis.dim == 0 else None
    return Cut([*added, (a, axis if axis.dim < 2 else None), (b, axis if axis.dim != 1 else None)])


def _convolution(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    x, weight, bias, *_, groups = node.args[:9]
    others = [one for one in (weight, bias) if one is not None]
    if axis.dim == 0:
        return Cut([(x, axis), *((one, None) for one in others)])
    if axis.dim != 1 or axis.outer != 1 or groups % n:
        return None
    cut = [(one, Axis(0, 1, shape_of(one)[0] // n)) for one in others]
    return Cut([(x, Axis(1, 1, shape_of(x)[1] // n)), *cut], ((8, None, groups // n),))


def _norm(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    x, sizes, *others = node.args
    leads = len(shape_of(x)) - len(sizes)
    return Cut([(x, axis), *((o, None) for o in others if isinstance(o, fx.Node))]) if axis.dim < leads else None


def _attention(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """Core attention of q, k, v [B, H, S, D] and a mask that is broadcast to [B, H, S, S]."""
    q, k, v = node.args[:3]
    masks = [one for one in tensors_of(node) if one not in (q, k, v)]
    cut = _by_heads([q, k, v], axis, n)
    return cut and Cut(cut.inputs + [_aligned(node, one, axis) for one in masks])


def _by_heads(tensors: list[fx.Node], axis: Axis, n: int) -> Cut | None:
    if axis.dim > 1:
        return None
    parts = [divmod(shape_of(one)[axis.dim], axis.outer * n) for one in tensors]
    if any(rest for _, rest in parts):
        return None
    return Cut([(one, axis._replace(inner=inner)) for one, (inner, _) in zip(tensors, parts, strict=True)])


def _filled(node: fx.Node, axis: Axis, n: int) -> Cut:
    """zeros(size), new_zeros(input, size) and alike, whose values are one number."""
    place = int(name_of(node).startswith("new_"))
    return Cut([(one, None) for one in tensors_of(node)], ((place, axis.dim, axis.outer * axis.inner),))


def _of_matrices(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """Operators of the last two dimensions."""
    return _pointwise(node, axis, n) if axis.dim < len(shape_of(node)) - 2 else None


def _embedding(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    weight, indices = node.args[:2]
    return Cut([(weight, None), (indices, axis)]) if axis.dim < len(shape_of(indices)) else None


def _index(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """x[:, :, places, ...]: one tensor of indices, of which each entry chooses entries of x."""
    x, (*before, places) = node.args[:2]
    if any(one is not None for one in before) or places.meta["val"].dtype in (torch.bool, torch.uint8):
        return None
    first, count = len(before), len(shape_of(places))
    if first <= axis.dim < first + count:
        return Cut([(x, None), (places, axis.at(axis.dim - first))])
    return Cut([(x, axis if axis.dim < first else axis.at(axis.dim - count + 1)), (places, None)])


def _part(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    """A call of a module for some tokens, or of a function of q, k, v [B, H, S, D] for some heads."""
    tensors, parameters, _, along = node.args
    shape = shape_of(node)
    if along == "heads":
        return _by_heads(list(tensors), axis, n)
    if along != "tokens" or axis.dim >= len(shape) - 1 or any(shape_of(one)[:-1] != shape[:-1] for one in tensors):
        return None
    return Cut([*((one, axis) for one in dict.fromkeys(tensors)), *((one, None) for one in dict.fromkeys(parameters))])


def _item(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    source, place = node.args
    is_list = name_of(source).startswith(("split", "unbind", "part"))
    if name_of(source) == "part" and shape_of(node)[:-1] != shape_of(source)[:-1]:
        return None
    return Cut([(source, axis)]) if is_list or place == 0 else None


Rule = Callable[[fx.Node, Axis, int], "Cut | None"]


def _rules() -> Iterator[tuple[str, Rule]]:
    for rule, names in {
        _pointwise: "clone _to_copy alias detach copy lift_fresh_copy zeros_like ones_like full_like empty_like masked_fill",
        _view: "view _unsafe_view reshape",
        _permute: "permute transpose t",
        _expand: "expand",
        _repeat: "repeat",
        _removed: "select unbind squeeze",
        _unsqueeze: "unsqueeze",
        _along: "cumsum cumprod logcumsumexp _softmax _safe_softmax _log_softmax gather",
        _index_select: "index_select",
        _slice: "slice",
        _split: "split split_with_sizes",
        _cat: "cat stack",
        _pad: "constant_pad_nd",
        _reduction: "sum mean amax amin max min var logsumexp any prod linalg_vector_norm",
        _flip: "flip",
        _scatter: "select_scatter slice_scatter",
        _gemm: "mm addmm bmm baddbmm",
        _convolution: "convolution",
        _norm: "native_layer_norm _fused_rms_norm",
        _attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        _filled: "zeros ones full empty new_zeros new_ones new_full new_empty",
        _of_matrices: "tril triu linalg_solve_triangular",
        _embedding: "embedding",
        _index: "index",
        _part: "part",
        _item: "getitem",
    }.items():
        for name in names.split():
            yield name, rule


RULES: dict[str, Rule] = dict(_rules())


def axes_of(node: fx.Node) -> Iterator[tuple[Axis, int]]:
    """Yields each axis that a tensor may have along one dimension, with its number of entries, the largest first."""
    for dim, size in enumerate(shape_of(node)):
        for inner in range(1, size // 2 + 1):
            if size % inner == 0:
                yield Axis(dim, 1, inner), size // inner
