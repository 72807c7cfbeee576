"""Layers that are no fused op: an activation checkpoint around the whole layer, inside of which what was read stays fused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.unmodified import runs_class_forward
from .binding import General, without_caches
from .calls import Call
from .check import TOLERANCE, difference, results, unmoved, was_written
from .fuse import saved_bytes
from .report import Row
from .trace import is_leaf, leaves_of, recomputed, settings


def is_member(name: str, module: nn.Module) -> bool:
    """Is it one of a list of modules, and made of more than leaves?"""
    return name.rpartition(".")[2].isdigit() and not all(map(is_leaf, module.children()))


def is_layer(name: str, module: nn.Module) -> bool:
    """Is it a layer of a model: no stage with layers in it, none of a layer's experts, and with its class's forward?"""
    return (
        is_member(name, module)
        and not any(is_member(inner, m) for inner, m in module.named_modules() if m is not module)
        and runs_class_forward(module)
    )


class Around:
    """A layer before what is inside it is converted: what a training call of it saves."""

    def __init__(self, module: nn.Module, call: Call):
        self.module, self.call = module, without_caches(*call)
        self.x = next(i for i, v in enumerate(leaves_of(self.call)) if isinstance(v, Tensor) and v.is_floating_point())
        self.before = self.saved(module.forward)

    def saved(self, run: Callable) -> int:
        return saved_bytes(self.module, run, *self.call, leaves_of(self.call)[self.x])

    def changes(self) -> str:
        """What a forward in training changes, which a recompute would change again; "" for nothing."""
        module = self.module
        with unmoved(module), torch.no_grad():
            module.train()
            before, buffers = settings(module), [(b, b._version, b.detach().clone()) for b in module.buffers()]
            module.forward(*self.call[0], **self.call[1])
            for was, now in zip(before, settings(module), strict=True):
                if was != now:
                    return f"the attribute {next(iter(dict(was.items() ^ now.items())))}"
            return "a buffer" if any(was_written(*one) for one in buffers) else ""

    def results(self, run: Callable) -> list[Tensor | None]:
        """Output and gradients of a training step of it, from one random state."""

        def first(flat: list[Any]) -> Tensor:
            args, kwargs = recomputed(self.call, iter(flat))
            found = leaves_of(run(*args, **kwargs))
            return next(one for one in found if isinstance(one, Tensor) and one.requires_grad)

        with unmoved(self.module):
            self.module.train()
            torch.manual_seed(0)
            trained = [p for p in self.module.parameters() if p.requires_grad]
            return results(first, leaves_of(self.call), [self.x], trained)

    def checkpointed(self, row: Row, recompute: str, inner: list[Row]) -> General | None:
        """The layer's forward as an activation checkpoint, if it saves less than what is fused inside, and gives the same
        numbers; None, with the reason in the row. inner: the rows of what is inside, whose bytes are then the layer's."""
        made = General(self.module, recompute)
        inside, after = self.saved(self.module.forward), self.saved(made)
        if after >= inside:
            return None
        if changed := self.changes():
            row.reason += f"; no activation checkpoint either: its forward changes {changed}"
            return None
        error = difference(self.results(made), self.results(self.module.forward))
        if not error <= TOLERANCE:
            row.reason += f"; as an activation checkpoint it gives other numbers ({error:.1e})"
            return None
        row.replaced_by, row.saved_before, row.saved_after, row.error = "checkpoint", self.before, after, error
        row.reason = f"no fused op: {row.reason}" if row.reason else "no fused op"
        for one in inner:
            one.saved_before = one.saved_after = None
        return made


def around(module: nn.Module, calls: list[Call]) -> Around | None:
    """None for a layer that no training call can be measured of."""
    for call in itertools.islice(calls, 1):
        try:
            return Around(module, call)
        except Exception:  # whatever a forward makes of a call in training; StopIteration: no floating-point input
            return None
    return None
