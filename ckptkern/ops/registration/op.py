"""The base classes of ops: an op is (tensors, options) -> y, with some tensors saved for backward. `functions.build` makes it
callable.

Op bodies run with autocast off and cast weights inside, so that no cast copy lives from forward to backward; the public
function casts x. Bodies read x as rows of tokens. `needs` is the needs_input_grad mask: a bitmask of any length over an op's
tensors, set for those whose gradients are wanted.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import state
from ...frozen import Frozen, frozen_bytes

_AUTOCAST = int(state.Observed.AUTOCAST)
OpTensors = Sequence[Tensor | None]  # in the order of an op
Names = tuple[str, ...]
Named = dict[str, Tensor]  # tensors by name
Grads = dict[str, Tensor | None]  # gradients by name


class Op:
    """Base class of an op. Subclasses define these attributes and methods; `build()` makes the op callable.

    name       the op's name, as users know it
    Options    a NamedTuple of the arguments that are not tensors: recompute, backend, precision and so on (of types that
               `library.layout_of` takes)
    forward    (tensors, options) -> (y, what it saves by name, at least what `saves` names)
    backward   (dy, tensors, saved by name, options, needs) -> a gradient for each tensor; None where it is not needed, or was
               added to a main_grad
    reference  (tensors, options) -> y, or a tuple of all results, in differentiable PyTorch ops: the reference implementation,
               for second order
    constants  places of tensors without a gradient; torch.func cannot tell and asks for all
    decisions  names of saved tensors that the reference takes, by name, instead of deciding again
    kernels    whether the op has Triton kernels
    more_results  names of the results besides y, which `forward` returns among what it saves. Backward gets the gradient of
               each among what was saved, as "d" and its name
    """

    name: str
    Options: type
    constants: frozenset[int] = frozenset()
    decisions: Names = ()
    kernels = True
    more_results: Names = ()
    inference_recompute = "full"  # the mode in which forward saves nothing

    @staticmethod
    def saves(options) -> Names:
        """Returns the names of what forward saves for backward besides tensors. "y" is the result itself."""
        return ()

    @staticmethod
    def reads_x(options, needs: int) -> bool:
        """Returns whether backward reads the first tensor; if not, it is not saved."""
        return True

    @staticmethod
    def made_on_meta(x: Tensor, saved: Named, options) -> Named:
        """Returns what kernels save, by name, from what forward in PyTorch ops saves on meta tensors, if shapes differ."""
        return saved

    @classmethod
    def missing_input(cls, dy: Tensor, tensors: OpTensors, options) -> Tensor:
        """Returns a replacement for an x that was not saved, to differentiate the reference; raises RuntimeError if x is
        needed."""
        raise RuntimeError(
            f"{cls.name}: second-order gradients need the input, which was not saved because the weight that reads it "
            f"is frozen; use recompute='full', outside of a checkpoint"
        )


class SublayerOp(Op):
    """Base class of a sublayer's op, which `transformer_layer` also runs. Subclasses define these, for x [..., d], its other
    tensors t, a `Tensors`, and its options o.

    Tensors       a NamedTuple of the op's tensors without x
    compute       (x, t, o) -> (y [tokens, e], what it saves by name)
    gradients     (dy [tokens, e], x, t, o, saved, needs) -> those that needs asks for, by name: "x" and the fields of Tensors
    in_torch_ops  (x, t, o) -> y, or a tuple of all results, in differentiable PyTorch ops
    """

    Tensors: type

    @classmethod
    def forward(cls, tensors, o):
        x, *others = tensors
        y, saved = cls.compute(x, cls.Tensors(*others), o)
        return unflattened(y, x), saved

    @classmethod
    def backward(cls, dy, tensors, saved, o, needs):
        x, *others = tensors
        return in_order(cls.gradients(rows_2d(dy), x, cls.Tensors(*others), o, saved, needs), cls.Tensors, needs)

    @classmethod
    def reference(cls, tensors, o, **decided):
        x, *others = tensors
        return cls.in_torch_ops(x, cls.Tensors(*others), o, **decided)


def with_fields(*parts) -> Callable[[type], type]:
    """Decorates a NamedTuple with the fields and defaults of others. `...` among the parts is the place of its own fields,
    whose names are in `own`."""

    def decorated(own):
        kinds = [own if part is ... else part for part in parts]
        hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
        defaults = {name: value for kind in kinds for name, value in kind._field_defaults.items()}
        extended = collections.namedtuple(own.__name__, hints, defaults=defaults.values(), module=own.__module__)
        extended.__annotations__, extended.__doc__, extended.own = hints, own.__doc__, own._fields
        for name in vars(own).keys() - vars(extended).keys():  # properties, and values that are not fields
            setattr(extended, name, vars(own)[name])
        return extended

    return decorated


# -- a call's results, and the tensors that backward gets


def run_forward(op: type[Op], tensors: Sequence, options, seen: int = 0) -> list[Tensor]:
    """Runs the op's body; returns [y, *more, *saved]. The dispatcher itself would take a tenth of a tiny mlp's host time.

    seen: what `observe` saw.
    """
    if seen & _AUTOCAST:
        with torch._C._DisableAutocast():
            return run_forward(op, tensors, options)
    y, saved = op.forward(tensors, options)
    return [y, *[saved[name] for name in (*op.more_results, *op.saves(options)) if name != "y"]] if saved else [y]


def run_backward(op: type[Op], dy: Tensor, flat: Sequence, options, needs: int, seen: int = 0) -> OpTensors:
    """Runs the body of the op's backward; returns the gradients. flat: what `to_save` returned, and the gradients of more
    results."""
    if seen & _AUTOCAST:
        with torch._C._DisableAutocast():
            return run_backward(op, dy, flat, options, needs)
    return op.backward(dy, *call_of(op, flat, options), options, needs)


def to_save(op: type[Op], tensors: Sequence, results: Sequence, options, needs: int) -> list:
    """Returns the flat list of tensors that backward gets, from the op's tensors and results [y, *more, *saved]."""
    flat = [*tensors, *results[1 + len(op.more_results) :]]
    names = op.saves(options)
    if "y" in names:
        flat.insert(len(tensors) + names.index("y"), results[0])
    if not op.reads_x(options, needs):
        flat[0] = None
    return flat


def call_of(op: type[Op], flat: Sequence, options) -> tuple[OpTensors, Named]:
    """Inverts `to_save`: returns tensors and saved, by name, as the op's backward takes them. Gradients of more results follow
    in `flat`."""
    names = op.saves(options)
    if op.more_results:
        names = (*names, *("d" + name for name in op.more_results))
    count = len(flat) - len(names)
    return flat[:count], dict(zip(names, flat[count:], strict=True)) if names else {}


# -- needs


def needed(needs: int, index: int) -> bool:
    return bool(needs >> index & 1)


@functools.cache
def needed_names(kind: type, needs: int) -> frozenset[str]:
    """Returns the names that needs asks for, among "x" and the fields of a NamedTuple `kind`, in this order."""
    return frozenset(name for i, name in enumerate(("x", *kind._fields)) if needs >> i & 1)


def mask(kind: type, *names: str) -> int:
    """Returns needs of these names: a constant for methods that torch.compile traces, unlike `needed_names`."""
    return sum(1 << i for i, name in enumerate(("x", *kind._fields)) if name in names)


def in_order(grads: Grads, kind: type, needs: int) -> list[Tensor | None]:
    """Returns gradients by name as a list in the order of "x" and the fields of `kind`; None where not needed."""
    ordered: list[Tensor | None] = []
    for name in ("x", *kind._fields):
        ordered.append(grads[name] if needs & 1 else None)
        needs >>= 1
    return ordered


def asked(needs: int, tensors: OpTensors) -> int:
    """Returns the part of needs that the running backward pass asks the node of these tensors for: all, except in
    `torch.autograd.grad` and `backward(inputs=...)`; in a compiled graph always all. The first tensor has an edge, saved or
    not; None has none."""
    edges = None if torch.compiler.is_compiling() else state.asked()
    if edges is None:
        return needs
    places = (i for i, t in enumerate(tensors) if i == 0 or t is not None)
    return needs & sum(1 << i for i, edge in zip(places, edges, strict=False) if edge)


def wanted(tensors) -> int:
    """Returns needs of a call that autograd records."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << i for i, t in enumerate(tensors) if t is not None and t.requires_grad)


# -- tensors as the bodies read them


def row_count(x: Tensor) -> int:
    """Counts the rows of [..., K]. torch.Size.numel() would fix a symbolic batch at the size that is traced."""
    return math.prod(x.shape[:-1])


def rows_2d(x: Tensor) -> Tensor:
    """Reshapes [..., K] to [rows, K]; a view where the strides allow it."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unflattened(rows: Tensor, like: Tensor) -> Tensor:
    """Reshapes [rows, K] to [..., K] as `like`; not a view, because autograd refuses to change a view that a Function returned
    in place."""
    return rows if like.dim() == 2 else torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[1]))


def cast_parameter(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns the parameter in a dtype; dequantises a Frozen one."""
    if type(parameter) is Frozen:
        return parameter.dequantize(dtype)
    return parameter if parameter is None or parameter.dtype == dtype else parameter.to(dtype)


def beside_frozen(weights: Iterable, o, dtype: torch.dtype) -> tuple[Any, bool]:
    """Returns the options with the workspace that the dequantised Frozen weights leave, and whether these are held for the
    pass.

    They are held if they take half the workspace at most. Otherwise each is dequantised where it is read, and dropped.
    """
    if Frozen not in map(type, weights) or o.workspace is None:  # first, because sizes may be symbols
        return o, True
    at_once, largest = frozen_bytes(weights, dtype)
    holds = 2 * at_once <= o.workspace
    return o._replace(workspace=max(o.workspace - (at_once if holds else largest), 1)), holds


# -- chunks of rows that fit the workspace

Chunks = list[tuple[int, int]]  # [start, stop) of each
CHUNK_ROWS = 128  # chunks start at multiples of every kernel's BLOCK_M, so that a row keeps its place in the tile


def token_chunks(
    rows: int, bytes_per_row: int | Callable[[], int], workspace: int | None, unit: int = CHUNK_ROWS
) -> Chunks:
    """Returns [start, stop) row ranges whose transient tensors fit `workspace`: at least `unit` rows each, and as equal as
    multiples of it can be.

    Without a workspace there is one range, and no comparison depends on a symbolic number of rows. A function bytes_per_row is
    called only with a workspace and more rows than one unit. Callers handle a range in a function of its own, so that its
    tensors are freed before the next range.
    """
    if workspace is None or rows <= unit:
        return [(0, rows)]
    bytes_per_row = bytes_per_row() if callable(bytes_per_row) else bytes_per_row
    if rows * bytes_per_row <= workspace:
        return [(0, rows)]
    units = -(-rows // unit)
    count = -(-units // max(workspace // bytes_per_row // unit, 1))
    bounds = [i * units // count * unit for i in range(count)]
    return list(itertools.pairwise([*bounds, rows]))


def by_chunks(
    chunks: Chunks,
    of_rows: Callable[[int, int], Named],
    into: Mapping[str, Tensor] | None = None,
) -> Named:
    """Returns what of_rows(start, stop) returns, for all rows. Each chunk's part is written to its place, in a tensor of `into`
    or a new one, and freed."""
    if len(chunks) == 1:
        return of_rows(*chunks[0])
    whole = dict(into or {})
    for start, stop in chunks:
        for name, part in of_rows(start, stop).items():
            if name not in whole:
                whole[name] = part.new_empty((chunks[-1][1], *part.shape[1:]))
            whole[name][start:stop] = part
            part = None
    return whole


def row_bytes(dtype: torch.dtype, on_gpu: bool, tensors: int, masks: int, summed: int, beside: int) -> int:
    """Returns the bytes of a row's transient tensors of a dtype in a backward pass.

    tensors, masks: elements of that dtype, and bools, that are alive at the worst moment. summed: elements of the two operands
    of the largest weight gradient; beside: elements that are alive while it is formed. A CPU has no float32 matmul of 16-bit
    operands: both are copied to float32, and an eighth of the rows for the sums of columns. torch's float16 matmul was measured
    to take up to one more copy there.
    """
    size = dtype.itemsize
    bytes_ = tensors * size + masks
    if size >= 4 or on_gpu:
        return bytes_
    copies = summed * (8 if dtype == torch.float16 else 4)
    return max(bytes_ + summed // 2, beside * size + copies)
