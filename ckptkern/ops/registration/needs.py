"""`needs`: a bitmask of any length over an op's inputs, set for those whose gradients are wanted."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ... import state
from ...frozen import Frozen

_WORD = 62


def needed(needs: int, index: int) -> bool:
    return bool(needs >> index & 1)


@functools.cache
def flags(needs: int, count: int) -> tuple[bool, ...]:
    """The lowest `count` bits of needs."""
    return tuple(needed(needs, i) for i in range(count))


@functools.cache
def needed_names(kind: type, needs: int) -> frozenset[str]:
    """The names that needs asks for, among "x" and the fields of a NamedTuple `kind`, in this order."""
    return frozenset(name for i, name in enumerate(("x", *kind._fields)) if needed(needs, i))


def mask(kind: type, *names: str) -> int:
    """needs that ask for these names; a constant of an op whose method torch.compile traces, as it does not `needed_names`."""
    return sum(1 << i for i, name in enumerate(("x", *kind._fields)) if name in names)


def in_order(grads: Mapping[str, Tensor | None], kind: type, needs: int) -> list[Tensor | None]:
    """Gradients by name as a list of the same order; None where not needed."""
    return [grads[name] if needed(needs, i) else None for i, name in enumerate(("x", *kind._fields))]


def asked(needs: int, tensors: Sequence[Tensor | None]) -> int:
    """The part of needs that the running backward pass asks the node of these tensors for: all, except in
    `torch.autograd.grad` and `backward(inputs=...)`; in a graph that is compiled always all. The first tensor has an
    edge, saved or not; None has none."""
    edges = None if torch.compiler.is_compiling() else state.asked()
    if edges is None:
        return needs
    places = (i for i, t in enumerate(tensors) if i == 0 or t is not None)
    return needs & sum(1 << i for i, edge in zip(places, edges, strict=False) if edge)


def split(needs: int) -> list[int]:
    """needs in words of 62 bits, lowest first: a stack of 31 layers has more inputs than an int64 has bits."""
    words = [needs & (1 << _WORD) - 1]
    while needs := needs >> _WORD:
        words.append(needs & (1 << _WORD) - 1)
    return words


def joined(words: Sequence[int]) -> int:
    """The inverse of `split`."""
    return sum(word << _WORD * i for i, word in enumerate(words))


def present(tensors) -> int:
    """needs that ask for everything that can have a gradient."""
    return sum(
        1 << i for i, t in enumerate(tensors) if t is not None and t.is_floating_point() and type(t) is not Frozen
    )


def wanted(tensors) -> int:
    """needs of a call that autograd records."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << i for i, t in enumerate(tensors) if t is not None and t.requires_grad)
