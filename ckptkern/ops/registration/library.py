"""An op as two library ops, `ckptkern::NAME_fwd(tensors, options) -> [y, *more, *saved]` and `ckptkern::NAME_bwd(dy, tensors,
saved, options, needs) -> gradients`, so that torch.compile, FLOP counters and selective checkpointing see it.

They are functional and raw: torch.library.custom_op takes more host time. Fakes and FLOPs come from the op's own body on meta
tensors, in PyTorch ops.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.types import IntLikeType
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from ...frozen import regrouped
from ...memory import meta_like
from ...state import Observed
from ..dispatch.choices import read_precision
from .op import Op, OpTensors, call_of, run_backward, run_forward

aten = torch.ops.aten
_AUTOCAST = int(Observed.AUTOCAST)

LIBRARY = torch.library.Library("ckptkern", "FRAGMENT")


class Registered(NamedTuple):
    """An op with its two library ops."""

    op: type[Op]
    fwd: torch._ops.OpOverload
    bwd: torch._ops.OpOverload
    layout: Layout  # of its options


def call_forward(registered: Registered, tensors: Sequence, options) -> Sequence[Tensor]:
    """Runs the library op; returns [y, *more, *saved]."""
    return registered.fwd(tensors, *pack(registered.layout, options))


def call_backward(registered: Registered, dy: Tensor, flat: Sequence, options, needs: int) -> list[Tensor]:
    """Runs the library op; returns the gradients, empty where not needed. needs goes as places: a stack of 31 layers has more
    inputs than an int64 has bits."""
    tensors, saved = call_of(registered.op, flat, options)
    places = [i for i in range(needs.bit_length()) if needs >> i & 1]
    return registered.bwd(dy, tensors, list(saved.values()), *pack(registered.layout, options), places)


def _on_meta(tensors: OpTensors) -> list[Tensor | None]:
    return [t if t is None else meta_like(t) for t in tensors]


def register(op: type[Op]) -> Registered:
    """Registers the op's two library ops: schemas, bodies, fakes, vmap rules and FLOP formulas."""
    names, layout = (f"{op.name}_fwd", f"{op.name}_bwd"), layout_of(op.Options)
    LIBRARY.define(f"{names[0]}(Tensor?[] tensors, {SCHEMA}) -> Tensor[]")
    LIBRARY.define(f"{names[1]}(Tensor dy, Tensor?[] tensors, Tensor?[] saved, {SCHEMA}, int[] needs) -> Tensor[]")
    packets = tuple(getattr(torch.ops.ckptkern, name) for name in names)

    def options_of(lists, on_meta):
        options = unpack(layout, lists)
        if on_meta:  # in PyTorch ops, all tokens at once
            return replaced(options, backend="eager", fused="", workspace=None)
        if "auto" in values_of(options, "precision"):  # a compiled graph reads torch's setting when it runs
            options = replaced(options, precision=read_precision())
        return options

    def forward(tensors, *lists, on_meta=False):
        options = options_of(lists, on_meta)
        if not on_meta:
            return run_forward(op, regrouped(tensors, lists[2]), options, _AUTOCAST)
        with torch._C._DisableAutocast():
            y, saved = op.forward(regrouped(_on_meta(tensors), lists[2]), options)
        options = unpack(layout, lists)
        saved = op.made_on_meta(tensors[0], saved, options)
        return [y, *[saved[name] for name in (*op.more_results, *op.saves(options)) if name != "y"]]

    def backward(dy, tensors, saved, *lists_and_needs, on_meta=False):
        *lists, places = lists_and_needs
        needs = sum(1 << i for i in places)
        if on_meta:
            (dy,), tensors, saved = _on_meta([dy]), _on_meta(tensors), _on_meta(saved)
        # the op is functional: it changes no main_grad
        tensors = [t.detach() if hasattr(t, "main_grad") else t for t in regrouped(tensors, lists[2])]
        grads = run_backward(op, dy, (*tensors, *saved), options_of(lists, on_meta), needs, _AUTOCAST)
        return [dy.new_empty(0) if g is None else g for g in grads]

    for packet, body in zip(packets, (forward, backward), strict=True):
        name, on_meta = packet.default._schema.name, functools.partial(body, on_meta=True)
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(name, functools.partial(_fake, on_meta), lib=LIBRARY)
        torch.library.register_vmap(name, loop_over_batch(packet.default), lib=LIBRARY)
        register_flop_formula(packet, get_raw=True)(functools.partial(_flops, on_meta))
    LIBRARY.impl(names[1], in_legacy_vmap(packets[1].default), "Batched")
    return Registered(op, *(packet.default for packet in packets), layout)


def _fake(on_meta: Callable, first, *others) -> list[Tensor]:
    """Returns the op's results as empty tensors, from its body on meta tensors."""
    like = first if isinstance(first, Tensor) else next(t for t in first if t is not None)
    return [like.new_empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in on_meta(first, *others)]


def _addmm_flops(total, a, b, *args, out_val=None, **kwargs) -> int:
    """Counts addmm_, and addmm with an out_dtype, which torch does not count."""
    return 2 * a.numel() * b.shape[1]


def _grouped_mm_flops(a, b, *args, out_val=None, **kwargs) -> int:
    """Counts FLOPs: each row of a [R, k] meets one matrix of b [E, k, n], or each column of a [k, R] one row of b [R, n]."""
    return 2 * b.numel() * a.shape[-2] if a.dim() > b.dim() else 2 * a.numel() * b.shape[-1]


def _of_all_heads(formula: Callable, query: int) -> Callable:
    """Wraps an attention's FLOP formula for fewer heads of k and v than of q, which torch 2.11's formula refuses. query: the
    place of q among the arguments; k and v follow."""

    def flops(*args, **kwargs):
        heads, arguments = args[query].shape[1], list(args)
        for place in (query + 1, query + 2):
            arguments[place] = args[place][:, :1].expand(-1, heads, -1, -1)
        return formula(*arguments, **kwargs)

    return flops


_LACKING = {  # formulas that torch lacks, of ops in the bodies
    aten.addmm: _addmm_flops,
    aten.addmm_: _addmm_flops,
    aten._grouped_mm: _grouped_mm_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _of_all_heads(
        flop_registry[aten._scaled_dot_product_flash_attention], query=0
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_all_heads(
        flop_registry[aten._scaled_dot_product_flash_attention_backward], query=1
    ),
}
for _formula in _LACKING.values():
    _formula._get_raw = True  # it reads tensors, not their shapes
FLOPS = flop_registry | _LACKING


def _flops(on_meta: Callable, *args, out_val=None) -> int:
    """Counts the op's FLOPs, from its body on meta tensors: multiply-adds times two, as torch counts them."""
    with _disable_current_modes(), FlopCounterMode(display=False, custom_mapping=_LACKING) as counter:
        on_meta(*args)
    return counter.get_total_flops()


# -- options as arguments

SCHEMA = "int[] ints, float[] floats, str[] strings, SymInt[] sizes"
_LISTS = {bool: 0, int: 0, float: 1, str: 2, torch.dtype: 2, IntLikeType: 3}
_NAMES = {
    dtype: name
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}


class Layout(NamedTuple):
    """The place of a type's values in the lists, as plain data, which torch.compile can trace.

    kind: "value", "dtype", "bool", "fields" of a NamedTuple, "many" of one type, or "optional". place: the list's. type: the
    NamedTuple, None for others.
    """

    kind: str
    place: int
    type: type | None
    inner: tuple[Layout, ...]


def layout_of(hint) -> Layout:
    """Returns the Layout of a type. hint: a NamedTuple of bool, int, float, str, torch.dtype and IntLikeType, of such
    NamedTuples, of tuple[X, ...] of any of these, or of any of these or None."""
    if hint in _LISTS:
        kind = {bool: "bool", torch.dtype: "dtype"}.get(hint, "value")
        return Layout(kind, _LISTS[hint], None, ())
    if hasattr(hint, "_fields"):
        return Layout("fields", 0, hint, tuple(map(layout_of, typing.get_type_hints(hint).values())))
    if typing.get_origin(hint) is tuple:
        return Layout("many", 0, None, (layout_of(typing.get_args(hint)[0]),))
    # not only unions with None: IntLikeType is a union, too
    others = tuple(member for member in typing.get_args(hint) if member is not types.NoneType)
    if len(others) == len(typing.get_args(hint)):
        raise TypeError(f"options of type {hint!r} fit none of the schema's lists; see layout_of")
    return Layout("optional", 0, None, (layout_of(typing.Union[others]),))  # noqa: UP007 (of a tuple)


def _write(layout: Layout, value, lists: tuple[list, ...]) -> None:
    kind, place, _, inner = layout
    if kind == "fields":
        for field, part in zip(inner, value, strict=True):
            _write(field, part, lists)
    elif kind in ("many", "optional"):
        parts = value if kind == "many" else () if value is None else (value,)
        lists[0].append(len(parts))
        for part in parts:
            _write(inner[0], part, lists)
    elif kind == "dtype":
        lists[place].append(_NAMES[value])
    else:
        lists[place].append((1 if value else 0) if kind == "bool" else value)


def _read(layout: Layout, lists: tuple[Iterator, ...]):
    kind, place, type_, inner = layout
    if kind == "fields":
        return type_(*(_read(field, lists) for field in inner))
    if kind == "many":
        return tuple(_read(inner[0], lists) for _ in range(next(lists[0])))
    if kind == "optional":
        return _read(inner[0], lists) if next(lists[0]) else None
    value = next(lists[place])
    return getattr(torch, value) if kind == "dtype" else bool(value) if kind == "bool" else value


def pack(layout: Layout, options) -> tuple[list, list, list, list]:
    """Packs options into the four lists of SCHEMA."""
    lists: tuple[list, list, list, list] = ([], [], [], [])
    _write(layout, options, lists)
    return lists


def unpack(layout: Layout, lists: Sequence):
    """Unpacks options from the lists that `pack` returned."""
    return _read(layout, tuple(map(iter, lists)))


def replaced(options, **values):
    """Returns options with new values for the fields of these names, its own and those of the NamedTuples in it."""
    if not hasattr(options, "_fields"):
        return tuple(replaced(item, **values) for item in options) if isinstance(options, tuple) else options
    fields = zip(options._fields, options, strict=True)
    inner = {name: replaced(field, **values) for name, field in fields if isinstance(field, tuple)}
    return options._replace(**inner | {name: value for name, value in values.items() if name in options._fields})


def values_of(options, name: str) -> list:
    """Returns the values of the fields of this name, its own and those of the NamedTuples in it."""
    if not isinstance(options, tuple):
        return []
    own = [getattr(options, name)] if name in getattr(options, "_fields", ()) else []
    return own + [value for field in options for value in values_of(field, name)]


# -- under vmap: once per sample


def loop_over_batch(op):
    """Returns a vmap rule that calls the op per sample: gradients of weights are per sample, so nothing could be shared."""

    def rule(info, in_dims, *args):
        def sample(i):
            return op(*tree_map(lambda dim, arg: arg if dim is None else arg.select(dim, i), in_dims, args))

        results = [torch.stack(column) for column in zip(*map(sample, range(info.batch_size)), strict=True)]
        return results, [0] * len(results)

    return rule


def in_legacy_vmap(op):
    """Returns the rule for the older vmap behind torch.autograd.grad's is_grads_batched, whose own fallback takes no lists."""
    rule = loop_over_batch(op)

    def call(*args):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()

        def is_batched(arg):
            return isinstance(arg, Tensor) and is_legacy_batchedtensor(arg)

        dims = tree_map(lambda arg: 0 if is_batched(arg) else None, args)
        values = tree_map(lambda arg: torch._remove_batch_dim(arg, level, 1, 0) if is_batched(arg) else arg, args)
        results, _ = rule(types.SimpleNamespace(batch_size=values[0].shape[0]), dims, *values)
        return [torch._add_batch_dim(result, 0, level) for result in results]

    return call
