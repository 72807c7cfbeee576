"""What a forward returns around its one result: None, its own arguments, and attention's probabilities, which hardly any caller
reads. Placeholders stand for these; the original forward computes them when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .leaves import Leaves
from .reading import Argument, Steps
from .trace import Node, mapped

# What a placeholder answers without values: data parallelism asks all outputs, to hook those that require a gradient.
ANSWERED = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "dtype", "grad_fn", "is_leaf", "requires_grad")
)


class Probabilities:
    """Stands for attention's probabilities in what a forward returns."""


def are_probabilities(leaves: Leaves, node: Node) -> bool:
    """Is it a softmax, with a dropout or without?"""
    return Steps(leaves).strip(node, []).is_function("softmax")


class Original(NamedTuple):
    """One call of an original forward, which runs when the first of its other results is read. versions: of the tensors that it
    reads, as they were."""

    forward: Callable[[], object]
    reads: list[Tensor]
    versions: list[int]
    made: list[list[Any]]

    @classmethod
    def of(cls, forward: Callable[[], object], module: nn.Module, flat: list[Any]) -> Original:
        reads = [one for one in (*module.parameters(), *flat) if isinstance(one, Tensor) and not one.is_inference()]
        return cls(forward, reads, [one._version for one in reads], [])

    def leaf(self, at: int) -> Tensor:
        if not self.made:
            if [one._version for one in self.reads] != self.versions:
                raise RuntimeError(
                    "convert: attention's probabilities are computed when they are read, but a parameter or an argument of "
                    "their layer has changed since the call; read them before the optimizer's step"
                )
            self.made.append(tree_flatten(self.forward())[0])
        return self.made[0][at]


class Unread(Tensor):
    """Attention's probabilities until they are read: any function that takes them gets values, which a gradient flows through.
    Their dropout samples anew."""

    original: Original
    at: int

    @staticmethod
    def __new__(cls, original: Original, at: int, like: Tensor) -> Unread:
        made = Tensor._make_wrapper_subclass(cls, (0,), dtype=like.dtype, device=like.device)
        made.original, made.at = original, at
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        args, kwargs = mapped(lambda one: one if type(one) is not Unread else values_of(one), (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = mapped(lambda one: one if type(one) is not Unread else values_of(one), (args, kwargs or {}))
        return function(*args, **kwargs)


def values_of(one: Unread) -> Tensor:
    return one.__dict__["original"].leaf(one.__dict__["at"])


def returned(
    y: Tensor, flat: list[Any], spec: TreeSpec, leaves: list[Any], at: int, module: nn.Module,
    forward: Callable[[], object] | None,
) -> object:  # fmt: skip
    """y among what else the module's forward returns. forward: runs the original one; without it nothing stands for
    probabilities."""
    unread = forward is not None and any(isinstance(one, Probabilities) for one in leaves)
    original = Original.of(forward, module, flat) if unread else None
    made: list[Any] = []
    for i, one in enumerate(leaves):
        if isinstance(one, Argument):
            made.append(flat[one.index])
        elif isinstance(one, Probabilities):
            made.append(None if original is None else Unread(original, i, y))
        else:
            made.append(y if i == at else one)
    return tree_unflatten(made, spec)
