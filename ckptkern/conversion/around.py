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
from .fuse import saved_bytes
from .protection import seeded, unmoved, was_written
from .report import Row
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


def held_by(module: nn.Module) -> list[dict[str, Any]]:
    """The plain attributes of each module in it, and the lengths of its lists, dicts and sets."""
    lengths = (
        {name: len(value) for name, value in m.__dict__.items() if type(value) in (list, dict, set)}
        for m in module.modules()
    )
    return [plain | counts for plain, counts in zip(settings(module), lengths, strict=True)]


def general(module: nn.Module, recompute: str, call: Call) -> General:
    """An activation checkpoint around it, which saves its decisions: if it makes any, or if that cannot be tried."""
    if holds_sharded(module):  # a forward that no backward follows would leave their state open
        return General(module, recompute)
    args, kwargs = without_caches(*call)
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

    def changes(self) -> str:
        """What a forward in training changes, which a recompute would change again; "" for nothing."""
        module = self.module
        with unmoved(module), torch.no_grad():
            module.train()
            # recompute updates no running statistics, and training does not read them
            owners = [m for m in module.modules() if not isinstance(m, nn.modules.batchnorm._BatchNorm)]
            own = [b for m in owners for b in m.buffers(recurse=False)]
            before, buffers = held_by(module), [(b, b._version, b.detach().clone()) for b in own]
            module.forward(*self.call[0], **self.call[1])
            for was, now in zip(before, held_by(module), strict=True):
                if was != now:
                    return f"the attribute {next(iter(dict(was.items() ^ now.items())))}"
            return "a buffer" if any(was_written(*one) for one in buffers) else ""

    def results(self, run: Callable) -> list[Tensor | None]:
        """All outputs with a graph, as one, and gradients of a training step of it in float32 at least, from one random state
        and with the same random parameters each time."""

        def outputs(flat: list[Any]) -> Tensor:
            args, kwargs = recomputed(call, iter(flat))
            found = leaves_of(run(*args, **kwargs))
            return torch.cat([one.flatten() for one in found if isinstance(one, Tensor) and one.requires_grad])

        with seeded(), unmoved(self.module), random_parameters(self.module):
            self.module.train()
            call = mapped(wide, self.call)
            trained = [p for p in self.module.parameters() if p.requires_grad]
            return results(outputs, leaves_of(call), [self.x], trained)

    def checkpointed(self, recompute: str) -> tuple[General, int, float]:
        """(the layer's forward as an activation checkpoint, what that saves, its largest relative error). Raises Unreadable if
        it does not save less than what is fused inside, or is not the same."""
        made = general(self.module, recompute, self.call)
        try:
            inside, after = self.saved(self.module.forward), self.saved(made)
            if after >= inside:
                raise Unreadable("an activation checkpoint saves no less")
            if changed := self.changes():
                raise Unreadable(f"no activation checkpoint either: its forward changes {changed}")
            error = difference(self.results(made), self.results(self.module.forward))
        except Unreadable:
            raise
        except Exception as problem:  # whatever a forward makes of it: the layer stays as it is, and the table says why
            raise Unreadable(f"as an activation checkpoint it raises {type(problem).__name__}: {problem}") from problem
        if not error <= TOLERANCE:
            raise Unreadable(f"as an activation checkpoint it gives other numbers ({error:.1e})")
        return made, after, error

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
