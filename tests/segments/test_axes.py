"""Where `ckptkern.segments.axes` follows an axis: the operator on slices of its inputs makes a slice of its result."""

import functools
import operator
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckptkern.segments.axes import RULES, VIEWS, Axis, axes_of, followed, name_of, shape_of
from ckptkern.segments.parts import Parts, run
from ckptkern.segments.recorded import is_traced, traced_call

aten = torch.ops.aten
LISTS = ("split", "split_with_sizes", "unbind", "part")
MOVES = VIEWS | {"clone", "copy", "repeat", "cat", "stack", "flip", "constant_pad_nd", "gather"}
SIZES = {"different": (4, 6, 8, 10), "equal": (4, 4, 4, 4)}


class Case(NamedTuple):
    """Says how an operator is cut: the last of this name in what is recorded of `f`, or `f` itself, if it is an operator.

    inputs: arguments, or shapes of random ones. dims: dimensions of the result whose entries are independent. cuts: the axes of
    the inputs, for an axis of the result; None where it is not followed.
    """

    operator: str
    f: object
    inputs: tuple
    dims: set
    cuts: Mapping = MappingProxyType({})

    def arguments(self):
        torch.manual_seed(0)
        return [torch.randn(item, dtype=torch.float64) if isinstance(item, tuple) else item for item in self.inputs]


def indices(*shape, below):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def part(tensors, parameters, place, along):
    """Stands for what is called: a module, which works on the last dimension, or attention."""
    if along == "heads":
        return [sdpa(*tensors)]
    return [F.layer_norm(functools.reduce(operator.mul, tensors), parameters[0].shape, *parameters), tensors[0].clone()]


def core(q, k, v, *mask, **options):
    return (sdpa(q, k, v, attn_mask=mask[0] if mask and isinstance(mask[0], torch.Tensor) else None),)


REPLACED = {"part": part, "_scaled_dot_product_flash_attention": core}
REPLACED |= dict.fromkeys(("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"), core)


def written(x, y, of):
    x = x.clone()
    of(x).copy_(y)
    return x


def pointwise(b, s, h, d):
    x = (b, s, d)
    yield Case("add", torch.add, (x, (d,)), {0, 1, 2}, {Axis(1): [Axis(1), None], Axis(2): [Axis(2), Axis(0)]})
    yield Case("mul", torch.mul, (x, (s, 1)), {0, 1, 2}, {Axis(1): [Axis(1), Axis(0)], Axis(2): [Axis(2), None]})
    yield Case("sub", torch.sub, ((s, d), x), {0, 1, 2}, {Axis(0): [None, Axis(0)], Axis(1): [Axis(0), Axis(1)]})
    yield Case("mul", lambda x: x * x, (x,), {0, 1, 2}, {Axis(0): [Axis(0)]})
    yield Case("where", lambda x, y: torch.where(x > 0, x, y), (x, (b, 1, d)), {0, 1, 2})
    yield Case("div", lambda x, y: x / y, (x, ()), {0, 1, 2}, {Axis(1): [Axis(1), None]})
    yield Case("gelu", F.gelu, (x,), {0, 1, 2})
    yield Case("clamp", lambda x: x.clamp(-0.5, 0.5), (x,), {0, 1, 2})
    yield Case("pow", lambda x: x.abs().pow(1.5), (x,), {0, 1, 2})
    yield Case("maximum", torch.maximum, (x, (b, s, 1)), {0, 1, 2})
    yield Case("clone", lambda x: x.transpose(0, 1).clone(), (x,), {0, 1, 2})
    yield Case("_to_copy", lambda x: x.float(), (x,), {0, 1, 2})
    yield Case("copy", lambda x, y: written(x, y, lambda x: x), (x, (s, d)), {0, 1, 2}, {Axis(0): [Axis(0), None]})
    yield Case("masked_fill", lambda x, y: x.masked_fill(y > 0, 2.0), (x, (s, 1)), {0, 1, 2})
    yield Case("masked_fill", lambda x, y, z: x.masked_fill(y > 0, z), (x, (b, s, 1), ()), {0, 1, 2})
    for op in ("alias", "detach"):
        yield Case(op, getattr(aten, op).default, (x,), {0, 1, 2})
    for op in (torch.zeros_like, torch.ones_like, torch.empty_like):
        yield Case(op.__name__, op, (x,), {0, 1, 2})
    yield Case("full_like", lambda x: torch.full_like(x, 3.0), (x,), {0, 1, 2})
    yield Case("getitem", lambda x: torch.frexp(x).mantissa, (x,), {0, 1, 2})


def views(b, s, h, d):
    x, heads = (b, s, d), (b, s, h, d)
    split = {
        Axis(2): [Axis(2, 1, d)],
        Axis(3): [Axis(2, h)],
        Axis(2, 2): [Axis(2, 2, d)],
        Axis(2, 1, 2): [Axis(2, 1, 2 * d)],
    }
    yield Case("view", lambda x: x.view(heads), ((b, s, h * d),), {0, 1, 2, 3}, split)
    yield Case("view", lambda x: x.view(b, -1, h, d), ((b, s, h * d),), {0, 1, 2, 3}, split)
    yield Case("view", lambda x: x.view(b, s, -1), (heads,), {0, 1}, {Axis(2, 1, d): [Axis(2)], Axis(2, h): [Axis(3)]})
    rows = {Axis(0, 1, s): [Axis(0)], Axis(0, b): [Axis(1)], Axis(0, 2, s): [Axis(0, 2)]}
    yield Case("view", lambda x: x.view(-1, d), (x,), {1}, rows)
    yield Case(
        "view", lambda x: x.view(b, s, d), ((b * s, d),), {0, 1, 2}, {Axis(0): [Axis(0, 1, s)], Axis(1): [Axis(0, b)]}
    )
    yield Case(
        "view",
        lambda x: x.view(d, s),
        ((s, d),),
        {0, 1} if s == d else set(),
        {Axis(0, 1, d // 2): [Axis(0, 1, s // 2)]},
    )
    yield Case("view", lambda x: x.view(1, b, 1, s * d, 1), (x,), {1}, {Axis(3, 1, d): [Axis(1)]})
    yield Case("view", lambda x: x.view(torch.int64), (x,), set())
    yield Case("_unsafe_view", lambda x: aten._unsafe_view(x, heads), ((b, s, h * d),), {0, 1, 2, 3}, split)
    permuted = {Axis(0): [Axis(1)], Axis(2): [Axis(3)], Axis(3): [Axis(0)]}
    yield Case("permute", lambda x: x.permute(1, 2, -1, 0), (heads,), {0, 1, 2, 3}, permuted)
    yield Case(
        "transpose", lambda x: x.transpose(1, -1), (heads,), {0, 1, 2, 3}, {Axis(1): [Axis(3)], Axis(2): [Axis(2)]}
    )
    yield Case("t", lambda x: x.t(), ((s, d),), {0, 1}, {Axis(0): [Axis(1)], Axis(1, 2): [Axis(0, 2)]})
    yield Case("t", lambda x: x.t(), ((s,),), {0}, {Axis(0): [Axis(0)]})
    yield Case("expand", lambda x: x.expand(b, s, d), ((b, 1, d),), {0, 1, 2}, {Axis(0): [Axis(0)], Axis(1): [None]})
    spread = {Axis(0): [None], Axis(1): [Axis(0)], Axis(3, 2): [Axis(2, 2)]}
    yield Case("expand", lambda x: x.expand(b, -1, h, d), ((s, 1, d),), {0, 1, 2, 3}, spread)
    yield Case("repeat", lambda x: x.repeat(1, 3, 1), (x,), {0, 2})
    yield Case("repeat", lambda x: x.repeat(b, s, 1), ((1, d),), {0, 1, 2}, {Axis(0): [None], Axis(2): [Axis(1)]})
    yield Case("repeat", lambda x: x.repeat(b, s, 3), ((1, d),), {0, 1}, {Axis(2, 1, d): None, Axis(2, 3): None})
    yield Case("select", lambda x: x.select(1, 2), (heads,), {0, 1, 2}, {Axis(0): [Axis(0)], Axis(1): [Axis(2)]})
    yield Case(
        "select", lambda x: x.select(-2, -1), (heads,), {0, 1, 2}, {Axis(1): [Axis(1)], Axis(2, 2): [Axis(3, 2)]}
    )
    yield Case("unbind", lambda x: x.unbind(), (x,), {0, 1}, {Axis(0): [Axis(1)]})
    yield Case("unbind", lambda x: x.unbind(-2), (x,), {0, 1}, {Axis(0): [Axis(0)], Axis(1): [Axis(2)]})
    yield Case("getitem", lambda x: x.unbind(1)[2], (x,), {0, 1}, {Axis(1): [Axis(1)]})
    yield Case("squeeze", lambda x: x.squeeze(1), ((b, 1, d),), {0, 1}, {Axis(0): [Axis(0)], Axis(1): [Axis(2)]})
    # of one entry it would take the dimension away
    yield Case("squeeze", lambda x: x.squeeze(1), (x,), {0, 2}, {Axis(1, 1, 2): [Axis(1, 1, 2)], Axis(1): None})
    yield Case("squeeze", lambda x: x.squeeze(), ((b, 1, d, 1),), set(), {Axis(1, 1, 2): [Axis(2, 1, 2)]})
    yield Case(
        "squeeze", lambda x: x.squeeze((0, -2)), ((1, b, 1, d),), {0, 1}, {Axis(0): [Axis(1)], Axis(1): [Axis(3)]}
    )
    yield Case("unsqueeze", lambda x: x.unsqueeze(1), (x,), {0, 2, 3}, {Axis(0): [Axis(0)], Axis(2): [Axis(1)]})
    yield Case("unsqueeze", lambda x: x.unsqueeze(-1), (x,), {0, 1, 2}, {Axis(2): [Axis(2)]})


def moves(b, s, h, d):
    x = (b, s, d)
    yield Case(
        "gather", lambda x, i: x.gather(1, i), (x, indices(b, 3, d, below=s)), {0, 2}, {Axis(0): [Axis(0), Axis(0)]}
    )
    # of the rest of the input no slice would make a gradient
    yield Case("gather", lambda x, i: x.gather(1, i), (x, indices(b - 2, 3, d, below=s)), {2}, {Axis(0): None})
    places = indices(2, 3, below=s)
    yield Case("index", lambda x, i: x[i], (x, indices(5, below=b)), {0, 1, 2}, {Axis(0): [None, Axis(0)]})
    chosen = {Axis(0): [Axis(0), None], Axis(2): [None, Axis(1)], Axis(3): [Axis(2), None]}
    yield Case("index", lambda x, i: x[:, i], (x, places), {0, 1, 2, 3}, chosen)
    chosen = {Axis(0): [Axis(0), None], Axis(2): [None, Axis(0)]}
    yield Case("index_select", lambda x, i: x.index_select(-1, i), (x, indices(5, below=d)), {0, 1, 2}, chosen)
    yield Case(
        "embedding",
        lambda w, i: F.embedding(i, w),
        ((7, d), indices(b, s, below=7)),
        {0, 1},
        {Axis(1): [None, Axis(1)]},
    )
    yield Case("slice", lambda x: x[:, 1:3], (x,), {0, 2})
    yield Case("slice", lambda x: x[..., ::2], (x,), {0, 1})
    yield Case("slice", lambda x: aten.slice(x, 1, 0, 2**63 - 1), (x,), {0, 1, 2})
    yield Case("slice", lambda x: aten.slice(x, -2, -s, s), (x,), {0, 1, 2})
    yield Case("slice", lambda x: aten.slice(x)[1:], (x,), {1, 2})
    yield Case("split", lambda x: x.split(3, 1), (x,), {0, 2})
    yield Case("split", lambda x: x.split(3), (x,), {1, 2})
    yield Case("split_with_sizes", lambda x: x.split([1, s - 1], -2), (x,), {0, 2})
    yield Case("getitem", lambda x: x.split([1, s - 1], -2)[1], (x,), {0, 2}, {Axis(0): [Axis(0)]})
    yield Case("cat", lambda x, y: torch.cat([x, y], -2), (x, (b, 3, d)), {0, 2}, {Axis(2): [Axis(2), Axis(2)]})
    yield Case("cat", lambda x: torch.cat([x, x]), (x,), {1, 2})
    empty = torch.zeros(0, dtype=torch.float64)  # which torch skips, whatever the others' number of dimensions
    yield Case(
        "cat",
        lambda x, y: torch.cat([x, y, y], -2),
        (empty, x),
        {0, 2},
        {Axis(0): [None, Axis(0)], Axis(1, 1, s): None},
    )
    no_columns = {Axis(0): [Axis(0), Axis(0)], Axis(2, 1, d): None}  # a piece that is cut all the same
    yield Case("cat", lambda x, y: torch.cat([x, y], -1), (x, (b, s, 0)), {0, 1}, no_columns)
    stacked = {Axis(0): [Axis(0), Axis(0)], Axis(2): [Axis(1), Axis(1)], Axis(1): None}
    yield Case("stack", lambda x, y: torch.stack([x, y], 1), (x, x), {0, 2, 3}, stacked)
    yield Case("stack", lambda x, y: torch.stack([x, y], -1), (x, x), {0, 1, 2}, {Axis(2): [Axis(2), Axis(2)]})
    yield Case("constant_pad_nd", lambda x: F.pad(x, (1, 2)), (x,), {0, 1})
    yield Case("constant_pad_nd", lambda x: F.pad(x, (0, 0, 3, 0)), (x,), {0, 2})
    yield Case("constant_pad_nd", lambda x: F.pad(x, (0, 0, 1, -1)), (x,), {0, 2})
    yield Case("flip", lambda x: x.flip(1, -1), (x,), {0})
    taken = {Axis(0): [Axis(0), Axis(0)], Axis(2): [Axis(2), Axis(1)]}
    yield Case("select_scatter", lambda x, y: x.select_scatter(y, 1, 2), (x, (b, d)), {0, 2}, taken)
    yield Case("select_scatter", lambda x, y: written(x, y, lambda x: x[:, :, -1]), (x, (b, s)), {0, 1})
    yield Case("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 1, 3), (x, (b, 2, d)), {0, 2})
    yield Case("slice_scatter", lambda x, y: written(x, y, lambda x: x[1:]), (x, (b - 1, s, d)), {1, 2})
    yield Case("tril", torch.tril, (x,), {0})
    yield Case("triu", lambda x: x.triu(1), ((b, h, s, d),), {0, 1})
    for op in ("zeros", "ones", "empty"):
        yield Case(op, lambda x, op=op: getattr(torch, op)(b, s, dtype=x.dtype), (x,), {0, 1})
        yield Case(f"new_{op}", lambda x, op=op: getattr(x, f"new_{op}")(b, s, h), (x,), {0, 1, 2}, {Axis(1): [None]})
    yield Case("full", lambda x: torch.full((s, d), 3.0, dtype=x.dtype), (x,), {0, 1})
    yield Case("new_full", lambda x: x.new_full((s, d), 3.0), (x,), {0, 1})


def mixtures(b, s, h, d):
    x = (b, s, d)
    for op in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
        yield Case(op.__name__, lambda x, op=op: op(x, -2), (x,), {0, 2})
    yield Case("_softmax", lambda x: x.softmax(-1), (x,), {0, 1})
    yield Case("_safe_softmax", lambda x: aten._safe_softmax(x, -1), (x,), {0, 1})
    yield Case("_log_softmax", lambda x: x.log_softmax(1), (x,), {0, 2})
    for op in (torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.prod, torch.linalg.vector_norm):
        name = op.__name__
        yield Case(name, lambda x, op=op: op(x, dim=1), (x,), {0, 1}, {Axis(0): [Axis(0)], Axis(1): [Axis(2)]})
        yield Case(name, lambda x, op=op: op(x, dim=0, keepdim=True), (x,), {1, 2}, {Axis(2): [Axis(2)]})
        yield Case(name, lambda x, op=op: op(x, dim=-1), (x,), {0, 1})
    yield Case("max", lambda x: x.max(1)[0], (x,), {0, 1}, {Axis(0): [Axis(0)], Axis(1): [Axis(2)]})
    yield Case("min", lambda x: x.min(-1, keepdim=True)[0], (x,), {0, 1})
    yield Case("sum", lambda x: x.sum((0, -1)), ((b, s, h, d),), {0, 1}, {Axis(0): [Axis(1)], Axis(1): [Axis(2)]})
    yield Case(
        "var", lambda x: x.var((0, 2), correction=1), ((b, s, h, d),), {0, 1}, {Axis(0): [Axis(1)], Axis(1): [Axis(3)]}
    )
    yield Case("std", lambda x: x.std(1, keepdim=True), (x,), {0, 2}, {Axis(2): [Axis(2)]})
    yield Case("any", lambda x: (x > 2).any(1), (x,), {0, 1}, {Axis(1): [Axis(2)]})
    yield Case("mm", torch.mm, ((s, d), (d, h)), {0}, {Axis(0): [Axis(0), None], Axis(0, 1, 2): [Axis(0, 1, 2), None]})
    yield Case("mm", lambda x: x @ x, ((s, s),), set())
    yield Case("add", lambda x: x + x.t() * x.sum(), ((s, s),), {0, 1})
    yield Case("mm", lambda x: x.t() @ x, ((s, d),), {0})
    yield Case("addmm", torch.addmm, ((h,), (s, d), (d, h)), {0}, {Axis(0): [None, Axis(0), None]})
    yield Case("addmm", torch.addmm, ((s, 1), (s, d), (d, h)), {0}, {Axis(0): [Axis(0), Axis(0), None]})
    matrices = {Axis(0): [Axis(0)] * 2, Axis(1): [Axis(1), None], Axis(2, 2): [None, Axis(2, 2)]}
    yield Case("bmm", torch.bmm, (x, (b, d, h)), {0, 1, 2}, matrices)
    yield Case("bmm", lambda x: torch.bmm(x, x), ((b, s, s),), {0}, {Axis(1): None, Axis(2): None})
    yield Case("baddbmm", torch.baddbmm, ((b, 1, h), x, (b, d, h)), {0, 1, 2}, {Axis(1): [None, Axis(1), None]})
    yield Case("baddbmm", lambda x, y: torch.baddbmm(x, y, x), ((b, s, s), (b, s, s)), {0, 2})
    sample, channels = {0}, {0, 1}
    wide = {Axis(0, 2): [Axis(0, 2), None, None], Axis(1): [None, Axis(0), Axis(0)]}
    yield Case("convolution", F.conv1d, (x, (h, s, 1), (h,)), {0, 1, 2}, wide)
    yield Case(
        "convolution", lambda x, w, c: F.conv1d(x, w, c, stride=3), (x, (h, s, 1), (h,)), {0, 2}, {Axis(1): None}
    )
    yield Case("convolution", lambda x, w: F.conv_transpose1d(x, w), (x, (s, h, 3)), sample)
    yield Case("convolution", lambda x, w: F.conv1d(x, w, padding=1), (x, (1, s, 3)), sample, {Axis(2): None})
    halo = {Axis(2): [Axis(2, 1, 1, 2), None], Axis(2, 1, 2): [Axis(2, 1, 2, 2), None]}
    yield Case("convolution", F.conv1d, ((b, s, 8), (1, s, 3)), {0, 2}, halo)
    rows = {Axis(2): [Axis(2, 1, 2, 3), None], Axis(3): [Axis(3, 1, 3, -1), None]}
    uneven = lambda x, w: F.conv2d(x, w, stride=(2, 3), dilation=(2, 1))  # noqa: E731
    yield Case("convolution", uneven, ((b, s, 12, 12), (1, s, 3, 2)), {0, 2, 3}, rows)
    depthwise = {
        Axis(1): [Axis(1), Axis(0), Axis(0)],
        Axis(1, 1, 2): [Axis(1, 1, 2), Axis(0, 1, 2), Axis(0, 1, 2)],
        Axis(2): [Axis(2, 1, 1, 2), None, None],
    }
    yield Case("convolution", lambda x, w, c: F.conv1d(x, w, c, groups=s), (x, (s, 1, 3), (s,)), {0, 1, 2}, depthwise)
    groups = {Axis(1, 1, 3): [Axis(1, 1, s // 2), Axis(0, 1, 3)], Axis(1): None, Axis(1, 2): None}
    yield Case("convolution", lambda x, w: F.conv1d(x, w, groups=2), (x, (6, s // 2, 3)), {0, 2}, groups)
    up = lambda x, w, c: F.conv_transpose1d(x, w, c, stride=2, groups=s)  # noqa: E731
    yield Case("convolution", up, (x, (s, 3, 2), (3 * s,)), sample, {Axis(1, 1, 3): [Axis(1), Axis(0), Axis(0, 1, 3)]})
    yield Case("convolution", lambda x, w: F.conv2d(x, w, padding=1, groups=s), ((b, s, h, d), (s, 1, 3, 3)), channels)
    yield Case(
        "native_layer_norm",
        lambda x, w, c: F.layer_norm(x, (d,), w, c),
        (x, (d,), (d,)),
        {0, 1},
        {Axis(1): [Axis(1), None, None]},
    )
    yield Case("getitem", lambda x: F.layer_norm(x, (s, d)), ((b, h, s, d),), {0, 1}, {Axis(1): [Axis(1)]})
    yield Case("getitem", lambda x: aten.native_layer_norm(x, (d,), None, None, 1e-5)[1], (x,), set())
    norm = lambda groups: lambda x, w, c: F.group_norm(x, groups, w, c)  # noqa: E731
    yield Case("native_group_norm", norm(s), (x, (s,), (s,)), channels, {Axis(1): [Axis(1), Axis(0), Axis(0)]})
    pairs = {Axis(0): [Axis(0), None, None], Axis(1, 1, 2): [Axis(1, 1, 2), Axis(0, 1, 2), Axis(0, 1, 2)]}
    yield Case("native_group_norm", norm(s // 2), (x, (s,), (s,)), sample, pairs)
    yield Case("getitem", lambda x: F.group_norm(x, s), (x,), channels, {Axis(1): [Axis(1)]})
    norm = aten._fused_rms_norm.default
    yield Case("_fused_rms_norm", norm, (torch.randn(x), [d], torch.randn(d), 1e-5), {0, 1}, {Axis(1): [Axis(1), None]})
    solve = functools.partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
    yield Case(
        "linalg_solve_triangular",
        solve,
        ((b, 1, s, s), (b, h, s, d)),
        {0, 1},
        {Axis(0): [Axis(0)] * 2, Axis(1): [None, Axis(1)]},
    )


def attentions(b, s, h, d):
    q, k = (b, h, s, d), (b, h // 2, s, d)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    yield Case(
        name,
        sdpa,
        (q, q, q),
        {0, 1},
        {Axis(1): [Axis(1)] * 3, Axis(0, 2): [Axis(0, 2)] * 3, Axis(2): None},
    )
    yield Case(name, functools.partial(sdpa, is_causal=True), ((b, h, 3, d), q, q), {0, 1})
    grouped = {Axis(1): None, Axis(1, 1, 2): [Axis(1, 1, 2), Axis(1), Axis(1)], Axis(1, h // 2): None}
    yield Case(name, sdpa, (q, k, k), {0}, grouped)
    yield Case(name, lambda x: sdpa(x, x, x), (q,), {0, 1}, {Axis(1): [Axis(1)]})
    masked = lambda q, k, v, mask: sdpa(q, k, v, attn_mask=mask)  # noqa: E731
    for mask, axes in {
        (s, s): (None, None, Axis(0)),
        (b, 1, s, s): (Axis(0), None, Axis(2)),
        (1, h, s, s): (None, Axis(1), Axis(2)),
        (b, 1, 1, s): (Axis(0), None, None),
    }.items():
        cuts = [[Axis(0)] * 3, [Axis(1)] * 3, [Axis(2), None, None]]
        expected = {Axis(i): [*cuts[i], mask_axis] for i, mask_axis in enumerate(axes)}
        yield Case(name, masked, (q, q, q, mask), {0, 1, 2}, expected)
    yield Case(
        name, lambda x, mask: masked(x, x, x, mask), (q, (s, s)), {0, 1}, {Axis(1): [Axis(1), None], Axis(2): None}
    )
    two = {Axis(2, 1, 2): [Axis(2, 1, 2), None, Axis(0, 1, 2)]}
    yield Case(name, lambda x, y, mask: masked(x, y, y, mask), (q, q, (s, s)), {0, 1, 2}, two)
    causal = aten._scaled_dot_product_efficient_attention.default
    yield Case("_scaled_dot_product_efficient_attention", causal, (q, k, k, (s, s), False, 0.0, True), {0})
    for kind, rest, mask in (
        ("flash", (), []),
        ("efficient", ((b, 1, s, s), False), [Axis(0)]),
        ("cudnn", ((1, h, s, s), False), [None]),
    ):
        name = f"_scaled_dot_product_{kind}_attention"
        queries = {Axis(2): [Axis(2), None, None, Axis(2)] if mask else None}
        cuts = {Axis(0): [Axis(0)] * 3 + mask, Axis(1): None} | queries
        yield Case(name, getattr(aten, name).default, (q, k, k, *rest), {0, 2} if mask else {0}, cuts)
    target, x = torch.ops.ckptkern.part.default, torch.randn(b, s, d)
    heads = [torch.randn(q), torch.randn(k), torch.randn(k)]
    yield Case(
        "part", target, (heads, [], 0, "heads"), {0}, {Axis(1): None, Axis(1, 1, 2): [Axis(1, 1, 2), Axis(1), Axis(1)]}
    )
    yield Case(
        "part", target, ([x, x.cos()], [torch.randn(d)], 0, "tokens"), {0, 1}, {Axis(1): [Axis(1), Axis(1), None]}
    )
    yield Case("part", target, ([x, x[:, :1]], [torch.randn(d)], 0, "tokens"), set())
    yield Case("part", target, ([x, x.cos()], [torch.randn(d)], 0, "nothing"), set())

    yield Case("stopped", torch.ops.ckptkern.stopped.default, (x,), {0, 1, 2})


def others(b, s, h, d):
    x = (b, s, d)
    for name, f in {
        "roll": lambda x: x.roll(1, 1),
        "sort": lambda x: x.sort(-1)[0],
        "topk": lambda x: x.topk(2)[0],
        "cummax": lambda x: x.cummax(1)[0],
        "argmax": lambda x: x.argmax(-1),
        "scatter": lambda x: x.scatter(1, x.argsort(1), x),
        "scatter_add": lambda x: x.scatter_add(1, x.argsort(1), x),
        "index": lambda x: x[x.argmax(0) % b, x.argmax(0) % s],
    }.items():
        yield Case(name, f, (x,), set())


KINDS = (pointwise, views, moves, mixtures, attentions, others)


def node_of(target, *args):
    """An operator of a graph that has nothing else than its tensors."""
    graph, values = fx.Graph(), {}

    def placed(tensor):
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = values[node] = tensor
        return node

    args = tree_map_only(torch.Tensor, placed, args)
    node = graph.call_function(target, args)
    node.meta["val"] = values[node] = computed(node, values.__getitem__)
    node.meta["values"] = values
    return node


def computed(node, value, sizes=(), count=0):
    target = REPLACED.get(name_of(node), node.target)
    return run(SimpleNamespace(args=node.args, kwargs=node.kwargs, target=target), value, sizes, count)


def recorded(case):
    """The operators of a function, with what each of them computes."""
    args = case.arguments()
    if isinstance(case.f, torch._ops.OpOverload):
        values = node_of(case.f, *args).meta["values"]
    else:
        f = torch.func.functionalize(lambda *args: case.f(*args))
        graph = make_fx(f, tracing_mode="fake")(*args).graph
        graph.eliminate_dead_code()
        tensors, values = iter(args), {}
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(tensors)
            elif node.op == "call_function":
                values[node] = computed(node, values.__getitem__)
    return {node: value for node, value in values.items() if node.op == "call_function"}, values


def axes_along(node):
    """All axes that a result may have, with their numbers of entries."""
    for dim, size in enumerate(shape_of(node)):
        for n in range(2, size + 1):
            for outer in range(1, size // n + 1):
                if size % (n * outer) == 0:
                    yield Axis(dim, outer, size // (n * outer)), n


def cut_of(node, axis, n):
    """How it is cut; an item of several results only if what makes them is."""
    cut = followed(node, axis, n)
    return cut if node.target is not operator.getitem or (cut and followed(*cut.inputs[0], n)) else None


def slices_of(n):
    return {(0, 1), (1, n - 1), (0, n - n // 3), (n - n // 3, n // 3), (1, n - 2)} - {
        (first, 0) for first in range(n + 1)
    }


def part_of(value, axis, first, count, is_list):
    if isinstance(value, (list, tuple)):
        return [axis.part(item, first, count) for item in (value if is_list else value[:1])]
    return axis.part(value, first, count)


def check_cut(node, axis, n, cut, values):
    inputs = dict(cut.inputs)
    assert set(inputs) == set(node.all_input_nodes), "an input is left out"
    assert len(inputs) == len(set(cut.inputs)), "an input is read along two axes at once"
    for arg, of in inputs.items():
        most = of and of.outer * n * of.inner + of.halo
        assert of is None or (most <= shape_of(arg)[of.dim] if of.halo else most == shape_of(arg)[of.dim]), str(of)
    for first, count in sorted(slices_of(n)):

        def value(arg, first=first, count=count):
            is_list = name_of(arg) in LISTS
            return values[arg] if inputs[arg] is None else part_of(values[arg], inputs[arg], first, count, is_list)

        actual = computed(node, value, cut.sizes, count)
        expected = part_of(values[node], axis, first, count, name_of(node) in LISTS)
        if isinstance(actual, (list, tuple)):
            actual = list(actual)[: len(expected)]
        if name_of(node).endswith(("empty", "empty_like")):
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
            continue
        tolerance = (
            0 if name_of(node) in MOVES else 1e-5 if "attention" in name_of(node) or name_of(node) == "part" else 1e-10
        )
        torch.testing.assert_close(
            actual,
            expected,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{node.target} along {axis} of {n}: {text}",
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_operators_on_slices_make_slices_of_their_results(sizes, kind):
    for case in kind(*SIZES[sizes]):
        operators, values = recorded(case)
        assert case.operator in map(name_of, operators), case.operator
        for node in operators:
            for axis, n in axes_along(node):
                if (cut := cut_of(node, axis, n)) is not None:
                    check_cut(node, axis, n, cut, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_axes_of_independent_entries_are_followed_and_no_others(sizes, kind):
    for i, case in enumerate(kind(*SIZES[sizes])):
        operators, _ = recorded(case)
        node = [operator for operator in operators if name_of(operator) == case.operator][-1]
        shape = shape_of(node)
        dims = {dim for dim, size in enumerate(shape) if size > 1 and cut_of(node, Axis(dim), size) is not None}
        assert dims == case.dims, f"{kind.__name__} {i}: {node.target} of {shape}"
        for axis, expected in case.cuts.items():
            cut = cut_of(node, axis, shape[axis.dim] // (axis.outer * axis.inner))
            actual = cut and [of for _, of in cut.inputs]
            assert actual == expected, f"{kind.__name__} {i}: {node.target} of {shape} along {axis}"


def test_every_rule_is_tested():
    assert RULES.keys() - {case.operator for kind in KINDS for case in kind(*SIZES["equal"])} == set()


def test_candidates_are_blocks_of_each_dimension():
    node = node_of(aten.clone.default, torch.zeros(6, 1, 4))
    axes = list(axes_of(node))
    assert set(axes) == {(axis, n) for axis, n in axes_along(node) if axis.outer == 1}
    assert axes[0] == (Axis(0), 6)


@pytest.mark.parametrize(
    ("name", "shapes"),
    {"mm": [(6, 4), (4, 2)], "bmm": [(3, 6, 4), (3, 4, 2)], "addmm": [(2,), (6, 4), (4, 2)]}.items(),
)
def test_matmuls_with_a_dtype_are_cut_like_others(name, shapes):
    """On meta tensors: no CPU runs them."""
    tensors = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    plain = node_of(getattr(aten, name).default, *tensors)
    typed = node_of(getattr(aten, name).dtype, *tensors, torch.float32)
    for axis, n in axes_along(plain):
        ours, theirs = (
            [of for _, of in cut.inputs] if (cut := followed(node, axis, n)) else None for node in (typed, plain)
        )
        assert ours == theirs
    assert followed(typed, Axis(0), shape_of(typed)[0]) is not None


@pytest.mark.parametrize("axis", [Axis(1), Axis(1, 3), Axis(1, 1, 4), Axis(1, 3, 2)])
def test_parts_are_written_where_they_are_read(axis):
    x = torch.arange(2 * 24 * 5).view(2, 24, 5)
    n = 24 // (axis.outer * axis.inner)
    joined = torch.zeros_like(x)
    numbers = x.view(2, axis.outer, n, axis.inner, 5)
    for first, count in ((0, 1), (1, n - 2), (n - 1, 1)):
        part = axis.part(x, first, count)
        assert part.shape == (2, axis.outer * count * axis.inner, 5)
        assert torch.equal(part, numbers[:, :, first : first + count].reshape(part.shape))
        axis.write(joined, first, count, part)
    assert torch.equal(joined, x)


def test_results_of_a_call_that_are_cut_otherwise_are_not_followed():
    node = node_of(torch.ops.ckptkern.part.default, [torch.zeros(2, 6, 4)], [torch.zeros(4)], 0, "tokens")
    graph, shapes = node.graph, ((2, 6, 4), (2, 6, 3), (2, 8, 6), (12, 3))
    node.meta["val"] = [torch.zeros(shape) for shape in shapes]
    items = [graph.call_function(operator.getitem, (node, i)) for i in range(len(shapes))]
    for item, shape in zip(items, shapes, strict=True):
        item.meta["val"] = torch.zeros(shape)
    assert all(cut_of(item, axis, n) for item in items[:2] for axis, n in ((Axis(0), 2), (Axis(1), 6)))
    assert not any(cut_of(item, axis, n) for item in items[2:] for axis, n in axes_of(item))


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
def test_attention_computes_what_its_backward_reads(name):
    """Attention on a GPU is recorded without gradients, and then leaves its log-sum-exp out."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(args[4])
            return func(*args, **(kwargs or {}))

    q = torch.empty(2, 4, 8, 16, device="meta")
    target = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    node = SimpleNamespace(args=(q, q, q, None, False, 0.0, True), kwargs={}, target=target)
    with Watch():
        for is_trained in (True, False):
            with torch.set_grad_enabled(is_trained):
                run(node, lambda operand: operand)
    assert seen == [True, False]


# -- whole functions, with gradients ----------------------------------------------------------------------------------


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


def check_in_slices(module, args, name, slices=3):
    """Compares results and gradients with those of the forward at once. Returns the stages, None if it is not cut."""
    parts = Parts()
    parts.slices = slices
    expected, actual = (tree_leaves(outputs) for outputs in (module(*args), parts(module, 2**20, tuple(args), {})))
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{name}: {parts.why} {text}")
    trained = [
        tensor for tensor in (*args, *module.parameters()) if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    pairs = [
        (ours, theirs, torch.randn_like(ours))
        for ours, theirs in zip(actual, expected, strict=True)
        if theirs.requires_grad
    ]
    if pairs:
        ours, theirs, grads = zip(*pairs, strict=True)
        ours, theirs = (
            torch.autograd.grad(outputs, trained, grads, materialize_grads=True, allow_unused=True)
            for outputs in (ours, theirs)
        )
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"gradients of {name}: {text}")
    (plan,) = parts.plans.values()
    return plan and plan.stages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_functions_in_slices_have_the_gradients_of_the_whole(sizes, kind):
    for case in kind(*SIZES[sizes]):
        if not isinstance(case.f, torch._ops.OpOverload) and "empty" not in case.operator:
            args = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in case.arguments()]
            stages = check_in_slices(Function(case.f), args, case.operator)
            is_given = case.operator in ("zeros", "ones", "full")  # computed of nothing
            assert not case.dims or is_given or any(stage.axes for stage in stages), case.operator


@pytest.mark.parametrize("other", [(4, 6, 10), (4, 1, 10), (10,)])
def test_a_call_that_cannot_be_cut_runs_whole(other):
    class Scaled(nn.Linear):
        def forward(self, x, y):
            if is_traced():
                return traced_call(self, self.scaled, (x, y), {}, "tokens")
            return self.scaled(x, y)

        def scaled(self, x, y):
            return super().forward(x) * y, x.sum(-1).t() * 2

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scaled = Scaled(10, 10)

        def forward(self, x, y):
            x, sums = self.scaled(x.sin(), y)
            return x.cos() * sums.t().unsqueeze(-1)

    torch.manual_seed(0)
    stages = check_in_slices(
        Layer(), [torch.randn(4, 6, 10, requires_grad=True), torch.randn(other, requires_grad=True)], "a call"
    )
    assert any("part" in map(name_of, stage.nodes) and not stage.axes for stage in stages)
    assert any(stage.axes for stage in stages)
