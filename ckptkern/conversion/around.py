"""Layers that are no fused op: an activation checkpoint around the whole layer, inside of which what was read stays fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.unmodified import runs_class_forward
from ..segments.decisions import decides
from .binding import General, without_caches
from .calls import Call
from .check import TOLERANCE, difference, random_parameters, results, wide
from .protection import drawn_elsewhere, seeded, unmoved
from .report import Row
from .saved import saved_bytes
from .sharding import holds_sharded
from .trace import Unreadable, is_leaf, leaves_of, mapped, recomputed, settings


def is_member(name: str, module: nn.Module) -> bool:
    """Is it one of a list of modules, and made of more than leaves?"""
    return name.rpartition(".")[2].isdigit() and not all(map(is_leaf, module.children()))


def is_marked(module: nn.Module) -> bool:
    """Is its class one that transformers' gradient checkpointing runs as a region?"""
    return isinstance(getattr(type(module), "gradient_checkpointing", None), bool)


def is_layer(name: str, module: nn.Module) -> bool:
    """Is it a layer of a model: no stage with layers in it, none of a layer's experts, and with its class's forward?"""
    if not ((is_member(name, module) or is_marked(module)) and runs_class_forward(module)):
        return False
    inner = [(path, m) for path, m in module.named_modules() if m is not module]
    if is_marked(module):  # lists inside it are its parts, as T5's sublayers are
        return not any(is_marked(m) for _, m in inner)
    return not any(is_member(path, m) for path, m in inner)


def held_by(module: nn.Module) -> list[tuple[str, int]]:
    """The names and lengths of the lists, dicts and sets that modules inside hold, and the names and ids of tensors in tuples:
    a state that the next call reads, which a recompute would find changed."""
    held = [item for m in module.modules() for item in m.__dict__.items()]
    found = [(name, len(value)) for name, value in held if type(value) in (list, dict, set)]
    tuples = [(name, leaf) for name, value in held if type(value) is tuple for leaf in leaves_of(value)]
    return found + [(name, id(leaf)) for name, leaf in tuples if isinstance(leaf, Tensor)]


def general(module: nn.Module, recompute: str, call: Call) -> General:
    """An activation checkpoint around it, which saves its decisions: if it makes any, or if that cannot be tried."""
    if holds_sharded(module):  # a forward that no backward follows would leave their state open
        return General(module, recompute)
    args, kwargs = without_caches(*mapped(lambda one: one, call))  # it may empty a list that it is given
    try:
        with unmoved(module), torch.no_grad():
            module.train()
            return General(module, recompute, decides(module.forward, *args, **kwargs))
    except Exception:  # whatever a forward makes of its call in training
        return General(module, recompute)


class Around:
    """A layer before what is inside it is converted: what a training call of it saves. Raises what that call raises, and
    StopIteration for a call without a floating-point input."""

    def __init__(self, module: nn.Module, call: Call):
        self.module, self.call = module, without_caches(*call)
        self.x = next(i for i, v in enumerate(leaves_of(self.call)) if isinstance(v, Tensor) and v.is_floating_point())
        self.before = self.saved(module.forward)

    def saved(self, run: Callable) -> int:
        return saved_bytes(self.module, run, *self.call, leaves_of(self.call)[self.x])

    def step(self, run: Callable) -> tuple[list[Tensor | None], list[Any]]:
        """(all outputs with a graph, as one, and gradients of a training step of it in float32 at least, from one random state
        and with the same random parameters each time; the buffers and plain attributes that it leaves). Raises Unreadable if
        it fills containers, which a recompute would fill again, or samples elsewhere than in torch."""

        def outputs(flat: list[Any]) -> Tensor:
            args, kwargs = recomputed(call, iter(flat))
            found = leaves_of(run(*args, **kwargs))
            return torch.cat([one.flatten() for one in found if isinstance(one, Tensor) and one.requires_grad])

        with seeded(), unmoved(self.module), random_parameters(self.module):
            self.module.train()
            call, before, states = mapped(wide, self.call), held_by(self.module), drawn_elsewhere()
            trained = [p for p in self.module.parameters() if p.requires_grad]
            found = results(outputs, leaves_of(call), [self.x], trained)
            if filled := dict(set(held_by(self.module)) - set(before)):
                raise Unreadable(f"no activation checkpoint either: its forward fills {next(iter(filled))}")
            if states != drawn_elsewhere():
                raise Unreadable(
                    "no activation checkpoint either: its forward draws from Python's or NumPy's random numbers, and a "
                    "recompute samples others. Draw from torch's"
                )
            left = [b.detach().clone() for b in self.module.buffers() if b.numel() and b.itemsize > 1]
            return found, [*left, *settings(self.module)]

    def check(self, made: General, wanted: tuple[list[Tensor | None], list[Any]] | None = None) -> float:
        """Returns the largest relative error of a training step with this checkpoint. wanted: what `step` returns without it.
        Raises Unreadable if it gives or leaves something else."""
        (theirs, left), (ours, found) = wanted or self.step(self.module.forward), self.step(made)
        error = difference(ours, theirs)
        if not error <= TOLERANCE:
            raise Unreadable(f"as an activation checkpoint it gives other numbers ({error:.1e})")
        for one, other in zip(left, found, strict=True):
            if isinstance(one, dict) and one != other:
                raise Unreadable(
                    f"no activation checkpoint either: its forward changes {dict(one.items() ^ other.items())}"
                )
            if isinstance(one, Tensor) and not torch.allclose(one, other, rtol=TOLERANCE, equal_nan=True):
                raise Unreadable("no activation checkpoint either: its forward changes a buffer")
        return error

    def checkpointed(self, recompute: str) -> tuple[General, int, float]:
        """(the layer's forward as an activation checkpoint, what that saves, its largest relative error). Raises Unreadable if
        it does not save less than what is fused inside, or is not the same."""
        made = general(self.module, recompute, self.call)
        try:
            inside, after = self.saved(self.module.forward), self.saved(made)
            if after >= inside:
                raise Unreadable("an activation checkpoint saves no less")
            return made, after, self.check(made)
        except Unreadable:
            raise
        except Exception as problem:  # whatever a forward makes of it: the layer stays as it is, and the table says why
            raise Unreadable(f"as an activation checkpoint it raises {type(problem).__name__}: {problem}") from problem

    def note(self, row: Row, after: int, error: float, inner: list[Row]) -> None:
        """The checkpoint in the layer's row. inner: the rows of what is inside, whose bytes are then the layer's."""
        row.replaced_by, row.saved_before, row.saved_after, row.error = "checkpoint", self.before, after, error
        for one in inner:
            one.saved_before = one.saved_after = None


def around(module: nn.Module, calls: list[Call]) -> Around | None:
    """None for a layer that was not called, or whose call cannot be measured."""
    try:
        return Around(module, calls[0]) if calls else None
    except Exception:  # whatever a forward makes of a call in training, without its cache: the layer stays as it is
        return None


def error_of(made: General, calls: list[Call]) -> float | None:
    """Returns the error of a checkpoint that need not save less; None if the layer itself cannot be tried. Raises Unreadable if
    the checkpoint is wrong."""
    layer = None if holds_sharded(made.module) else around(made.module, calls)
    if layer is None:
        return None
    try:
        wanted = layer.step(made.module.forward)
    except Unreadable:
        raise
    except Exception:  # whatever a forward makes of random parameters
        return None
    try:
        return layer.check(made, wanted)
    except Unreadable:
        raise
    except Exception as problem:
        raise Unreadable(f"as an activation checkpoint it raises {type(problem).__name__}: {problem}") from problem
