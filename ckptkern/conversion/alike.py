"""Compares layers with a checked layer: a model repeats its layers, so most of the check need not be repeated.

Two modules are alike if they have the same classes, the same attributes, except for the layer's index, and parameters
of the same shapes. Such a module must have a trace with the same log, and equal outputs; its gradients, masks and
unread arguments are assumed to be those of the first.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from .calls import pattern_of
from .guard import OF_EVERY_MODULE
from .protection import FULLY_SHARD
from .trace import PLAIN_VALUES, Call, tensors_in


class Numbers(NamedTuple):
    """Layer indices of two modules; attributes may differ only by these."""

    ours: int | None
    theirs: int | None

    def same(self, x, y) -> bool:
        """Returns whether x and y are equal, except that numbers, also in paths, may differ as these layer indices do."""
        if x is y:
            return True
        if type(x) is type(y) is partial and all(
            type(value) in PLAIN_VALUES for value in (*x.args, *x.keywords.values())
        ):
            x, y = ((f.func, f.args, f.keywords, vars(f)) for f in (x, y))  # as of GELU with its approximation
        if type(x) is not type(y) or callable(x):  # functions without attributes may still differ
            return False
        if isinstance(x, (list, tuple)):
            return len(x) == len(y) and all(map(self.same, x, y))
        if isinstance(x, dict):
            return list(x) == list(y) and all(map(self.same, x.values(), y.values()))
        if type(x) is int:
            return x == y or (x, y) == self
        if isinstance(x, str):
            return x == y or x.split(".") == [str(self.ours) if p == str(self.theirs) else p for p in y.split(".")]
        if type(x).__eq__ is not object.__eq__:
            return not hasattr(x, "__array__") and bool(x == y)
        held = getattr(x, "__dict__", None)
        return bool(held) and self.same(held, vars(y))


def same_inside(name: str, module: nn.Module, other_name: str, other: nn.Module) -> bool:
    """Returns whether both modules have the same class and the same inside, except for layer indices and the values of
    parameters and buffers."""
    return (
        type(module) is type(other)
        and description(module) == description(other)
        and Numbers(number_in(name), number_in(other_name)).same(attributes_of(module), attributes_of(other))
    )


def differing(module: nn.Module, other: nn.Module) -> set[str]:
    """Returns the names of the attributes in which modules with the same inside differ."""
    pairs = zip(attributes_of(module), attributes_of(other), strict=True)
    return {name for ours, theirs in pairs for name in ours if not Numbers(None, None).same(ours[name], theirs[name])}


def number_in(name: str) -> int | None:
    """Returns the last number in a module's name, its layer index: 3 for "layers.3.mlp"."""
    return next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)


def call_kinds(calls: list[Call]) -> list[tuple]:
    """Returns the pattern of each call's arguments, with the shapes of its tensors."""
    return [(pattern_of(call, []), *(t.shape for t in tensors_in(call))) for call in calls]


def description(module: nn.Module) -> list[tuple]:
    """Returns the classes of the modules inside, and their parameters and buffers, each with the first path of the tensor."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    tensors = [(p, first.setdefault(id(t), p), t.shape, t.dtype, t.device, t.requires_grad) for p, t in named]
    return [*((path, type(m)) for path, m in module.named_modules()), *tensors]


def attributes_of(module: nn.Module) -> list:
    """Returns the attributes of all modules inside that are not tensors: plain values, functions, lists, configurations."""
    return [
        {
            name: value
            for name, value in vars(m).items()
            if type(value) in PLAIN_VALUES
            or not (
                name in (*OF_EVERY_MODULE, "quant_state") or isinstance(value, Tensor) or name.startswith(FULLY_SHARD)
            )
        }
        for m in module.modules()
    ]
