"""Frozen quantised weights as arguments of the ops, in the place of a weight.

A `Frozen` has the shape and dtype of the weight that it stands for, and holds only the quantised tensors of the library that
made them. `kinds` says how each kind is read and dequantised. An op saves it for backward as it is, and dequantises it in each
pass; in other PyTorch operations it is dequantised where it is read.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .kinds import Layout, dequantized, layout_of, transient_bytes

aten = torch.ops.aten
VIEWS = frozenset(
    (
        aten.t.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.select.int,
        aten.unbind.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unsqueeze.default,
    )
)
SAME = frozenset((aten.detach.default, aten.alias.default, aten.lift_fresh.default))
_MARK = "frozen:"  # begins the string in which an op's options say which of its tensors are parts of a Frozen


class Frozen(Tensor):
    """Stands for a frozen quantised weight where an op takes a weight: `ckptkern.gated_mlp(x, Frozen(q1), Frozen(q2), ...)`.

    data: a quantised weight with its own numbers,

        bitsandbytes' Params4bit (NF4 and FP4, with and without double quantisation) [n, k];
        torchao's Int8Tensor, IntxUnpackedToInt8Tensor (int1 to int8) and Float8Tensor, weight-only, [n, k] or [E, n, k];

    or raw tensors of a `kind`,

        "block_fp8"  float8 data [n, k] or [E, n, k], scales [ceil(n / 128), ceil(k / 128)] or [E, ...] (DeepSeek-V3's
                     weight_scale_inv): w = data * scale of its 128 x 128 block;
        "mxfp4"      uint8 data [n, k / 32, 16] or [E, n, k / 32, 16] of two 4-bit floats, the low one first, uint8 scales
                     [n, k / 32] or [E, ...]: w = value * 2 ** (scale - 127) (OCP Microscaling Formats 1.0; GPT-OSS's blocks
                     and scales).

    dtype: that of the weight that it stands for; by default what the library dequantises to, and bfloat16 for raw tensors.
    The library's own function dequantises (`dequantize`); of raw tensors it is ours. Only references are held: a state_dict,
    merging and saving are the library's. An op saves the quantised memory for backward, dequantises in forward and again in
    backward, counts that against its workspace, and forms no gradient. Any other operation dequantises, too.

    Raises TypeError for data of an unknown class, a torchao tensor that quantises activations too, and a `kind` without scales;
    ValueError for an unknown kind or number; ShapeError and DtypeError for tensors that do not fit the kind.
    """

    layout_: Layout
    part_names: tuple[str, ...]

    @staticmethod
    def __new__(
        cls, data: Tensor, scales: Tensor | None = None, *, kind: str | None = None, dtype: torch.dtype | None = None
    ) -> Frozen:
        return _made(*layout_of(data, scales, kind, dtype))

    @property
    def kind(self) -> str:
        """The kind of quantisation: "nf4", "fp4", "int8", "intx", "float8", "block_fp8" or "mxfp4"."""
        return self.layout_.kind

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The library's tensors."""
        return tuple(getattr(self, name) for name in self.part_names)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the weight that it stands for, as a plain tensor in `dtype`, by default its own."""
        layout, parts, views = self.layout_, self.parts, self.layout_.views
        dtype = dtype or layout.dtype
        if views and len(layout.shape) == 3 and views[0][0] == "select.int" and views[0][1][0] == 0:  # of one expert
            expert = views[0][1][1]
            parts = tuple(part[expert] if part.dim() and len(part) == layout.shape[0] else part for part in parts)
            layout, views = layout._replace(shape=layout.shape[1:]), views[1:]
        if parts[0].is_meta:
            whole = parts[0].new_empty(layout.shape, dtype=dtype)
        else:
            with torch.no_grad():
                whole = dequantized(parts, layout, dtype)
        return viewed(whole.to(dtype), views)

    def whole(self) -> tuple[Frozen, tuple]:
        """(the whole weight, the views of it that this one is)."""
        return _made(self.layout_._replace(views=()), self.parts), self.layout_.views

    def data_ptr(self) -> int:
        raise RuntimeError(
            "ckptkern.Frozen has no address, because its numbers are quantised; take that of dequantize()"
        )

    def requires_grad_(self, requires_grad: bool = True) -> Frozen:
        if requires_grad:
            raise RuntimeError(
                "ckptkern.Frozen has no gradient, because its numbers are quantised; train a low-rank update of it "
                "(ckptkern.LoRA), or dequantize()"
            )
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Frozen({self.kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _made, (self.layout_, self.parts)

    def __deepcopy__(self, memo: dict) -> Frozen:
        return self  # frozen: what a copy reads is the same

    def __tensor_flatten__(self) -> tuple[list[str], Layout]:
        return list(self.part_names), self.layout_

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], layout: Layout, outer_size: Any, outer_stride: Any) -> Frozen:
        return _made(layout, tuple(inner.values()))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if function.namespace == "ckptkern":
            return function(*flattened(function, args, kwargs))
        if type(first) is Frozen and function in SAME:
            return _made(first.layout_, first.parts)
        if type(first) is Frozen and function in VIEWS and not kwargs:
            return first.viewed(function, args[1:])
        if function is aten._to_copy.default and type(first) is Frozen:
            dtype, device = kwargs.get("dtype") or first.dtype, kwargs.get("device")
            parts = first.parts if device is None else tuple(part.to(device) for part in first.parts)
            return _made(first.layout_._replace(dtype=dtype), parts)
        changed = [a for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
        if any(type(given.get(a.name)) is Frozen for a in changed):
            raise RuntimeError(f"ckptkern.Frozen cannot be changed in place by {function}; change its library's tensor")
        args, kwargs = tree_map(lambda one: one.dequantize() if type(one) is Frozen else one, (args, kwargs))
        return function(*args, **kwargs)

    def viewed(self, function: Any, args: tuple) -> Frozen | list[Frozen]:
        """What a view operation gives: the view is taken of what is dequantised."""
        layout, step = self.layout_, (f"{function._schema.name.removeprefix('aten::')}.{function._overloadname}", args)
        results = function(_like(layout), *args)
        if isinstance(results, Tensor):
            return _made(layout._replace(views=(*layout.views, (*step, None))), self.parts)
        return [_made(layout._replace(views=(*layout.views, (*step, i))), self.parts) for i in range(len(results))]


def viewed(tensor: Tensor, views: Iterable[tuple]) -> Tensor:
    """tensor after views, each (operation, arguments, which of several results)."""
    for name, args, place in views:
        packet, overload = name.split(".")
        tensor = getattr(getattr(aten, packet), overload)(tensor, *args)
        tensor = tensor if place is None else tensor[place]
    return tensor


def _like(layout: Layout) -> Tensor:
    return viewed(torch.empty(layout.shape, dtype=layout.dtype, device="meta"), layout.views)


def _made(layout: Layout, parts: Sequence[Tensor]) -> Frozen:
    like = _like(layout)
    made = Tensor._make_wrapper_subclass(
        Frozen, like.shape, strides=like.stride(), dtype=layout.dtype, device=parts[0].device, requires_grad=False
    )
    made.layout_, made.part_names = layout, tuple(f"part{i}" for i in range(len(parts)))
    for name, part in zip(made.part_names, parts, strict=True):
        setattr(made, name, part)
    return made


def frozen_bytes(weights: Iterable[Any], dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of all Frozen among the weights dequantised at once for an op that computes in `dtype`, of the largest alone, of
    experts one expert), each with what is transient while one is dequantised."""
    found = [w for w in weights if type(w) is Frozen]
    if not found:
        return 0, 0
    transient = [transient_bytes(w.layout_) for w in found]
    whole = sum(math.prod(w.layout_.shape[-w.dim() :]) for w in found) * dtype.itemsize
    singles = (math.prod(w.layout_.shape[-2:]) * dtype.itemsize for w in found)
    return whole + max(transient), max(map(operator.add, singles, transient))


# -- in the arguments of a library op


def flattened(function: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a library op of ours with the parts of each Frozen in its place, and a string that says so."""
    given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
    flat: list[Tensor | None] = []
    places = []
    for i, tensor in enumerate(given["tensors"]):
        if type(tensor) is Frozen:
            layout = tensor.layout_._asdict() | {"dtype": str(tensor.layout_.dtype).removeprefix("torch.")}
            places.append((i, len(tensor.parts), tuple(layout.values())))
            flat += tensor.parts
        else:
            flat.append(tensor)
    return list((given | {"tensors": flat, "strings": [*given["strings"], f"{_MARK}{places!r}"]}).values())


def regrouped(tensors: Sequence[Tensor | None], strings: Sequence[str]) -> Sequence[Tensor | None]:
    """The inverse of `flattened`."""
    if not strings or not strings[-1].startswith(_MARK):
        return tensors
    rest, made, done = iter(tensors), [], 0
    for place, count, (kind, shape, dtype, numbers, views) in ast.literal_eval(strings[-1].removeprefix(_MARK)):
        made += [next(rest) for _ in range(place - done)]
        layout = Layout(kind, shape, getattr(torch, dtype), numbers, views)
        made.append(_made(layout, [next(rest) for _ in range(count)]))
        done = place + 1
    return [*made, *rest]


def only_frozen(tensors: Iterable[Any], plain: Callable[[type], bool]) -> bool:
    """Is every tensor that is not plain a Frozen?"""
    return all(type(t) is Frozen or plain(type(t)) for t in tensors)
