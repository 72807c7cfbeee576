"""Follows an axis of independent entries (tokens, heads, channels, samples) backwards through ATen operators.

For an operator whose result is cut along an axis, `followed` returns the axes along which its inputs are cut, and the inputs
that it needs whole; None if entries of the result depend on other entries of an input, or if the operator is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def even(n: int, most: int) -> int:
    """Returns the length of the fewest, most even slices of n entries with at most `most` entries each."""
    return max(1, -(-n // max(1, -(-n // max(1, most)))))


class Axis(NamedTuple):
    """An axis of n entries in a tensor: dimension `dim` has size outer * n * inner, in this order. halo: values after a slice
    that it reads too, as a convolution's do."""

    dim: int
    outer: int = 1
    inner: int = 1
    halo: int = 0

    def at(self, dim: int) -> Axis:
        return self._replace(dim=dim)

    def slice(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """Returns the entries [first, first + count) as a view, [..., count * inner + halo, ...] if outer is 1, else
        [..., outer, count, inner, ...]."""
        if self.outer == 1:
            return tensor.narrow(self.dim, first * self.inner, count * self.inner + self.halo)
        return tensor.unflatten(self.dim, (self.outer, -1, self.inner)).narrow(self.dim + 1, first, count)

    def flat(self, part: Tensor) -> Tensor:
        """Returns a slice as [..., outer * count * inner, ...]."""
        return part if self.outer == 1 else part.flatten(self.dim, self.dim + 2)

    def part(self, tensor: Tensor, first: int, count: int) -> Tensor:
        return self.flat(self.slice(tensor, first, count))

    def write(self, tensor: Tensor, first: int, count: int, part: Tensor) -> None:
        place = self.slice(tensor, first, count)
        place.copy_(part.reshape(place.shape))


Sizes = tuple[tuple[int, int | None, int], ...]


class Cut(NamedTuple):
    """The cut of an operator. inputs: each tensor input with its axis, None if it is needed whole. sizes: the arguments that
    scale with the number of entries: (position of the argument, index in it or None, size of an entry)."""

    inputs: list[tuple[fx.Node, Axis | None]]
    sizes: Sizes = ()


def resized(node: fx.Node, sizes: Sizes, count: int) -> tuple:
    """Returns an operator's arguments for a slice of `count` entries. sizes: those of its Cut."""
    if not sizes:
        return node.args
    args = list(node.args)
    for place, index, size in sizes:
        if index is None:
            args[place] = count * size
        else:
            args[place] = [count * size if i == index else value for i, value in enumerate(args[place])]
    return tuple(args)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple((value[0] if isinstance(value, (list, tuple)) else value).shape)


ALONG_DIM = ("select", "slice", "split", "split_with_sizes", "squeeze", "unbind")  # views along an argument `dim`
GEMMS = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))


def name_of(node: fx.Node) -> str:
    """Returns the operator's name without its overload; "" for nodes that are not operators."""
    return getattr(node.target, "overloadpacket", node.target).__name__ if node.op == "call_function" else ""


def followed(node: fx.Node, axis: Axis, n: int) -> Cut | None:
    rule = RULES.get(name_of(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _broadcast
    cut = rule and not axis.halo and rule(node, axis, n)
    # an operator that reads one tensor along two axes, as mm(x, x) does, would get the same slice for both
    return cut if cut and len(dict(cut.inputs)) == len(set(cut.inputs)) else None


def _aligned(node: fx.Node, of: fx.Node, axis: Axis) -> tuple[fx.Node, Axis | None]:
    """Returns an input that is broadcast to the result's shape, with its axis."""
    shape, result = shape_of(of), shape_of(node)
    dim = axis.dim - (len(result) - len(shape))
    return of, axis.at(dim) if dim >= 0 and shape[dim] == result[axis.dim] else None


def argument(node: fx.Node, *names: str):
    """Returns an operator's argument of one of these names, or its default; None if there is none."""
    for i, parameter in enumerate(node.target._schema.arguments):
        if parameter.name in names:
            return node.args[i] if i < len(node.args) else node.kwargs.get(parameter.name, parameter.default_value)
    return None


def _dims(node: fx.Node, count: int) -> set[int]:
    """Returns the dimensions, of `count`, in an operator's argument `dim`; all dimensions without that argument."""
    value = argument(node, "dim", "dims")
    dims = range(count) if value is None else value if isinstance(value, (list, tuple)) else [value]
    return {dim % count for dim in dims}


Rule = Callable[[fx.Node, Axis, int], "Cut | None"]  # each takes (node, axis, n) and returns the cut of `node`, if any


def _broadcast(node, axis, n):
    """Cuts an operator whose inputs are broadcast to the result's shape."""
    return Cut([_aligned(node, source, axis) for source in node.all_input_nodes])


def _along(node, axis, n):
    """Cuts an operator that mixes entries along its argument `dim`, which the result (sum) or inputs (stack) may lack."""
    count = max(len(shape_of(tensor)) for tensor in (node, *node.all_input_nodes))
    mixed = _dims(node, count)
    others = [dim for dim in range(count) if dim not in mixed]
    dim = axis.dim if len(shape_of(node)) == count else others[axis.dim]
    if dim in mixed:
        return None
    inputs = []
    for source in node.all_input_nodes:
        shape = shape_of(source)
        at = dim if len(shape) == count else others.index(dim)
        if shape == (0,):  # cat skips it
            inputs.append((source, None))
        elif shape[at] != shape_of(node)[axis.dim]:
            return None  # gather may leave out the end of its input
        else:
            inputs.append((source, axis.at(at)))
    return Cut(inputs)


def _trailing(node, axis, n):
    """Cuts an operator that mixes entries along its last dimensions, or that pads some."""
    name, back = name_of(node), len(shape_of(node)) - axis.dim
    if name == "constant_pad_nd":
        is_mixed = any(node.args[1][2 * back - 2 : 2 * back])
    else:
        is_mixed = back <= (len(node.args[1]) if name.endswith("norm") else 2)
    return None if is_mixed else _broadcast(node, axis, n)


def _view(node, axis, n):
    """Cuts a view by its strides in a contiguous source."""
    if node.target is aten.view.dtype:
        return None
    source, name = node.args[0], name_of(node)
    shape = shape_of(source)
    if "layout" not in node.meta:  # of a view (of several, the first), and of its source
        whole = torch.empty(shape, device="meta")
        shown = node.target(whole, *node.args[1:], **node.kwargs)
        shown = shown if isinstance(shown, Tensor) else shown[0]
        node.meta["layout"] = shown.stride(), shown.storage_offset(), whole.stride()
    strides, offset, of_source = node.meta["layout"]
    sizes = ((1, axis.dim, axis.outer * axis.inner),) if name in ("view", "_unsafe_view", "expand") else ()
    if strides[axis.dim] == 0:  # expanded
        return Cut([(source, None)], sizes)
    step = strides[axis.dim] * axis.inner  # from one entry to the next
    steps = [*zip(strides, shape_of(node), strict=True), (strides[axis.dim], axis.inner)]
    del steps[axis.dim]
    # all other dimensions stay within an entry, or span all n entries
    if offset % (step * n) + sum(stride * (size - 1) for stride, size in steps if stride % (step * n)) >= step:
        return None
    for dim, (size, stride) in enumerate(zip(shape, of_source, strict=True)):
        inner, rest = divmod(step, stride)
        if inner and not rest and size % (inner * n) == 0:
            along = name in ALONG_DIM and dim in _dims(node, len(shape))
            # squeeze would drop the dimension of a slice with one entry
            if along and (size == n if name == "squeeze" else name != "slice" or size != shape_of(node)[axis.dim]):
                return None
            return Cut([(source, Axis(dim, size // (inner * n), inner))], sizes)
    return None


def _repeat(node, axis, n):
    source, repeats = node.args[:2]
    if repeats[axis.dim] == 1:
        return Cut([_aligned(node, source, axis)])
    at = axis.dim - (len(repeats) - len(shape_of(source)))
    if at >= 0 and shape_of(source)[at] != 1:
        return None
    return Cut([(source, None)], ((1, axis.dim, axis.outer * axis.inner),))


def _gemm(node, axis, n):
    """Cuts mm and bmm, with or without a bias. Rows of weights are not cut: their gradient needs the whole input."""
    *bias, a, b = node.args[: 3 if "add" in name_of(node) else 2]  # mm.dtype has a third
    added = [_aligned(node, tensor, axis) for tensor in bias]
    if len(shape_of(node)) == 2:
        return Cut([*added, (a, axis), (b, None)]) if axis.dim == 0 else None
    return Cut([*added, (a, axis if axis.dim < 2 else None), (b, axis if axis.dim != 1 else None)])


def _convolution(node, axis, n):
    x, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args[:9]
    whole = [(tensor, None) for tensor in (weight, bias) if tensor is not None]
    if axis.dim == 0:
        return Cut([(x, axis), *whole])
    if axis.outer != 1:
        return None
    if axis.dim > 1:
        step, pad, apart = (values[(axis.dim - 2) % len(values)] for values in (stride, padding, dilation))
        if is_transposed or pad:
            return None
        along = Axis(axis.dim, 1, axis.inner * step, apart * (shape_of(weight)[axis.dim] - 1) + 1 - step)
        return Cut([(x, along), *whole])
    cut = [(tensor, Axis(0, 1, shape_of(tensor)[0] // n)) for tensor, _ in whole]
    # an input that is smaller than the result, as a waveform, may be whole: each slice has a gradient of all of it
    if groups == 1 and not is_transposed and x.meta["val"].numel() <= node.meta["val"].numel():
        return Cut([(x, None), *cut])
    if groups % n:
        return None
    return Cut([(x, Axis(1, 1, shape_of(x)[1] // n)), *cut], ((8, None, groups // n),))


def _group_norm(node, axis, n):
    x, weight, bias, _, channels, _, groups = node.args[:7]
    whole = [(tensor, None) for tensor in (weight, bias) if tensor is not None]
    if axis.dim == 0:
        return Cut([(x, axis), *whole], ((3, None, axis.outer * axis.inner),))
    if axis.dim != 1 or axis.outer != 1 or groups % n:
        return None
    cut = [(tensor, Axis(0, 1, channels // n)) for tensor, _ in whole]
    return Cut([(x, axis), *cut], ((4, None, channels // n), (6, None, groups // n)))


def _attention(node, axis, n):
    """Cuts core attention of q, k, v [B, H, S, D], or another function of such tensors, and a mask that is broadcast to
    [B, H, S, S]: along samples or heads; core attention with a mask also along queries."""
    is_part = name_of(node) == "part"
    by_heads = node.args[0] if is_part else node.args[:3]
    masks = [_aligned(node, source, axis) for source in node.all_input_nodes if source not in by_heads]
    # without a mask it saves nothing: each slice has a gradient of all keys and values
    if axis.dim == 2 and masks and not is_part and not argument(node, "is_causal"):
        q, *others = by_heads
        return Cut([(q, axis), *dict.fromkeys(others).items(), *masks])
    if axis.dim > 1:
        return None
    inputs = []
    for tensor in dict.fromkeys(by_heads):
        inner, rest = divmod(shape_of(tensor)[axis.dim], axis.outer * n)
        if rest:
            return None
        inputs.append((tensor, axis._replace(inner=inner)))
    return Cut(inputs + masks)


def _filled(node, axis, n):
    """Cuts zeros(size), new_zeros(input, size) and other constant tensors."""
    place = int(name_of(node).startswith("new_"))
    return Cut([(source, None) for source in node.all_input_nodes], ((place, axis.dim, axis.outer * axis.inner),))


def _embedding(node, axis, n):
    weight, indices = node.args[:2]
    return Cut([(weight, None), (indices, axis)]) if axis.dim < len(shape_of(indices)) else None


def _index(node, axis, n):
    """Cuts x[:, :, places, ...] with one tensor of indices, or index_select(x, dim, places)."""
    x, where, *last = node.args
    *before, places = (*([None] * (where % len(shape_of(x)))), *last) if last else where
    if any(index is not None for index in before) or places.meta["val"].dtype in (torch.bool, torch.uint8):
        return None
    first, count = len(before), 1 if last else len(shape_of(places))
    if first <= axis.dim < first + count:
        return Cut([(x, None), (places, axis.at(axis.dim - first))])
    return Cut([(x, axis if axis.dim < first else axis.at(axis.dim - count + 1)), (places, None)])


def _part(node, axis, n):
    """Cuts a call of a module by tokens, or of a function of q, k, v [B, H, S, D] by heads."""
    tensors, parameters, _, along = node.args
    shape = shape_of(node)
    if along == "heads":
        return _attention(node, axis, n)
    if along != "tokens" or axis.dim >= len(shape) - 1 or any(shape_of(x)[:-1] != shape[:-1] for x in tensors):
        return None
    return Cut([*((x, axis) for x in dict.fromkeys(tensors)), *((p, None) for p in dict.fromkeys(parameters))])


def _item(node, axis, n):
    source, place = node.args
    is_list = name_of(source).startswith(("split", "unbind", "part"))
    if name_of(source) == "part" and shape_of(node)[:-1] != shape_of(source)[:-1]:
        return None
    return Cut([(source, axis)]) if is_list or place == 0 else None


# operators by torch's names; other operators that torch tags as pointwise are broadcast
TABLE: dict[Rule, str] = {
    _broadcast: "clone _to_copy copy stopped zeros_like ones_like full_like empty_like masked_fill",
    _along: "cumsum cumprod logcumsumexp _softmax _safe_softmax _log_softmax gather cat flip slice_scatter stack "
    "select_scatter sum mean amax amin max min var std logsumexp any prod linalg_vector_norm",
    _trailing: "tril triu linalg_solve_triangular native_layer_norm _fused_rms_norm constant_pad_nd",
    _view: "view _unsafe_view expand permute transpose t unsqueeze squeeze select slice split split_with_sizes unbind alias "
    "detach",
    _repeat: "repeat",
    _gemm: "mm addmm bmm baddbmm",
    _convolution: "convolution",
    _group_norm: "native_group_norm",
    _attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    _filled: "zeros ones full empty new_zeros new_ones new_full new_empty",
    _embedding: "embedding",
    _index: "index index_select",
    _part: "part",
    _item: "getitem",
}
RULES = {name: rule for rule, names in TABLE.items() for name in names.split()}
VIEWS = frozenset(("getitem", *TABLE[_view].split()))


def axes_of(node: fx.Node) -> Iterator[tuple[Axis, int]]:
    """Yields each possible axis along one dimension, with its number of entries, the largest number first."""
    for dim, size in enumerate(shape_of(node)):
        for inner in range(1, size // 2 + 1):
            if size % inner == 0:
                yield Axis(dim, 1, inner), size // inner
