"""What the ops of sublayers have in common: those of one sublayer alone, by which `transformer_layer` runs it, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..registration.needs import in_order
from ..registration.op import Op
from ..registration.rows import rows_2d, unflattened


class SublayerOp(Op):
    """The op of a sublayer. Subclasses give these, of x [..., d], its other tensors t, a `Tensors`, and its options o.

    Tensors       a NamedTuple of the op's tensors without x
    compute       (x, t, o) -> (y [tokens, e], what it saves by name)
    gradients     (dy [tokens, e], x, t, o, saved, needs) -> those that needs asks for, by name: "x" and the fields of Tensors
    in_torch_ops  (x, t, o) -> y, or a tuple of all results, in differentiable PyTorch ops
    decisions     names of what forward saves that the reference takes, by name, instead of deciding again
    """

    Tensors: type
    compute: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    gradients: Callable[..., dict[str, Any]]
    in_torch_ops: Callable[..., Any]
    decisions: tuple[str, ...] = ()

    @classmethod
    def split(cls, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Any]:
        """(x, t)"""
        x, *others = tensors
        return x, cls.Tensors(*others)

    @classmethod
    def forward(cls, tensors, o):
        x, t = cls.split(tensors)
        y, saved = cls.compute(x, t, o)
        return unflattened(y, x), saved

    @classmethod
    def backward(cls, dy, tensors, saved, o, needs):
        return in_order(cls.gradients(rows_2d(dy), *cls.split(tensors), o, saved, needs), cls.Tensors, needs)

    @classmethod
    def reference(cls, tensors, o, **decided):
        return cls.in_torch_ops(*cls.split(tensors), o, **decided)

    @classmethod
    def reference_of(cls, saved, o):
        return functools.partial(cls.reference, **{name: saved[name] for name in cls.decisions})
