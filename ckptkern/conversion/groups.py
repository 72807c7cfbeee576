"""Groups of layers that a model calls one by one: several in a row are one checkpointed region."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..ops.dispatch.choices import own_modes
from ..segments.cached import makes_cached
from ..segments.span import Span
from .binding import Forward, Fused, Own, is_cache, without_caches
from .report import Row


class Group:
    """The layers of one region, by their place in it. An object without tensors, so that deepcopy and pickle take it.

    A layer joins the region of the layer before it if it takes what that returned, unchanged. Otherwise, as where the model
    adds something in between, it begins a region, or runs as it is if no layer is known to join that.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.open: tuple[int, Callable[[], Span | None]] = 0, _none  # the place after the last layer's, the region
        self.joined: set[int] = set()  # places of the layers that ever did
        self.apart: set[int] = set()  # of those that once did not, though there was a region to join

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self.names, "open": (0, _none), "joined": set(), "apart": set()}

    def regions(self, ran: bool) -> list[list[str]]:
        """The names of the layers of each region: of those that were formed, if a training call ran."""
        made: list[list[str]] = []
        for place, name in enumerate(self.names):
            if place and (place in self.joined or not ran):
                made[-1].append(name)
            else:
                made.append([name])
        return [names for names in made if len(names) > 1]

    def may_be_joined(self, place: int, before: Span | None) -> bool:
        """Is there a layer behind the one at `place` that may join its region? Not if it once did not join one."""
        if before is not None:
            self.apart.add(place)
        return place + 1 < len(self.names) and place + 1 not in self.apart - self.joined

    def call(self, forward: Forward, place: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        module = forward.module
        caches = [one for one in (*args, *kwargs.values()) if is_cache(one)]
        if (
            not torch.is_grad_enabled()
            or torch.compiler.is_compiling()  # Dynamo does not trace saved-tensor hooks
            or torch._C._are_functorch_transforms_active()
            or makes_cached(module, args, kwargs)
            or module.__dict__.get("forward") is not forward  # TensorParallel's forward gathers what this one reads
            or (caches and not forward.may_leave_empty(caches))
        ):
            return forward.run(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs) if caches else (args, kwargs)
        run = functools.partial(_in_own_mode, forward) if isinstance(forward, (Fused, Own)) else forward.run
        after, open_ = self.open  # perhaps another thread's, whose tensors are not this call's
        span = open_() if place >= after else None
        places = span.takes(args, kwargs) if span is not None else []
        if places:
            self.joined.add(place)
            result = span.next(module, run, args, kwargs, places)
        elif self.may_be_joined(place, span):
            span = Span(module, run, args, kwargs)
            result = span.first(args, kwargs)
        else:
            return forward.run(*args, **kwargs)
        self.open = place + 1, weakref.ref(span)
        return result


def _none() -> None:
    return None


def _in_own_mode(forward: Forward, *args, **kwargs) -> Any:
    """The forward with its op in its own mode, as layers of a region have it: its backward comes long after its recompute."""
    with own_modes():
        return forward.run(*args, **kwargs)


def group_layers(model: nn.Module, rows: list[Row], every: int) -> list[Group]:
    """Makes regions of `every` layers in a row, in each list of converted layers. The last ones run by themselves, because
    their backward comes first."""
    lists: dict[str, list[tuple[str, Forward]]] = {}
    modules = dict(model.named_modules())
    for row in rows:
        parent, _, number = row.name.rpartition(".")
        if not number.isdigit() or row.replaced_by is None or row.name not in modules:
            continue
        module = modules[row.name]
        forward = module.__dict__.get("forward")
        if isinstance(forward, Forward):
            lists.setdefault(parent, []).append((row.name, forward))
    groups = []
    for layers in lists.values():
        for start in range(0, (len(layers) - 1) // every * every, every):
            some = layers[start : start + every]
            groups.append(Group([name for name, _ in some]))
            for place, (_, forward) in enumerate(some):
                forward.group = groups[-1], place
    return groups
