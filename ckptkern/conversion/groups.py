"""Runs several layers in a row, which a model calls one by one, as one checkpointed region."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.compiler import is_compiling

from ..ops.dispatch.choices import own_modes
from ..segments.reachable import makes_cached
from ..segments.segment import Span
from ..segments.unread import read
from .binding import Forward, Fused, Own, forward_of, is_cache, without_caches
from .report import Row


class Group:
    """Describes the layers of one region, by their place in it. It holds no tensors, so that deepcopy and pickle work.

    A layer joins the region of the layer before it if it takes that layer's result unchanged. Otherwise, as where the model
    adds something in between, it begins a region, or runs alone if no layer is known to join it.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        # (the place after the last layer's, the region)
        self.open: tuple[int, Callable[[], Span | None]] = 0, lambda: None
        self.joined: set[int] = set()  # places of layers that have joined a region
        self.apart: set[int] = set()  # places of layers that once did not join an open region

    def __reduce__(self) -> tuple:
        return Group, (self.names,)

    def regions(self, ran: bool) -> list[list[str]]:
        """Returns the names of the layers of each region: of the regions that were formed, if a training call ran."""
        regions: list[list[str]] = []
        for place, name in enumerate(self.names):
            if place and (place in self.joined or not ran):
                regions[-1].append(name)
            else:
                regions.append([name])
        return [names for names in regions if len(names) > 1]

    def call(self, forward: Forward, place: int, args: tuple, kwargs: dict):
        module = forward.module
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if (
            not torch.is_grad_enabled()
            or is_compiling()  # Dynamo does not trace saved-tensor hooks
            or torch._C._are_functorch_transforms_active()
            or makes_cached(module, args, kwargs)
            or module.__dict__.get("forward") is not forward  # TensorParallel's forward gathers what this one reads
            or (caches and not forward.may_leave_empty(caches))
        ):
            return forward.run(*args, **kwargs)
        # a recompute of the region would not read again what its forward has read
        args, kwargs = read(without_caches((args, kwargs)) if caches else (args, kwargs))
        # a layer's op in its own mode: its backward comes long after its recompute
        run = own_modes()(forward.run) if isinstance(forward, (Fused, Own)) else forward.run
        after, open_ = self.open  # perhaps another thread's, whose tensors are not this call's
        span = open_() if place >= after else None
        places = span.takes(args, kwargs) if span is not None else []
        if places:
            self.joined.add(place)
            result = span.next(module, run, args, kwargs, places)
        else:
            if span is not None:
                self.apart.add(place)
            if place + 1 == len(self.names) or place + 1 in self.apart - self.joined:  # no layer is known to join it
                return forward.run(*args, **kwargs)
            span = Span(module, run, args, kwargs)
            result = span.first(args, kwargs)
        self.open = place + 1, weakref.ref(span)
        return result


def group_layers(model: nn.Module, rows: list[Row], every: int) -> list[Group]:
    """Forms regions of `every` layers in a row, in each list of converted layers. The last layers run alone, because their
    backward comes first."""
    lists: dict[str, list[tuple[str, Forward]]] = {}
    modules = dict(model.named_modules())
    for row in rows:
        parent, _, number = row.name.rpartition(".")
        forward = forward_of(modules[row.name]) if row.name in modules else None
        if number.isdigit() and row.replaced_by is not None and forward is not None:
            lists.setdefault(parent, []).append((row.name, forward))
    groups = []
    for layers in lists.values():
        for start in range(0, (len(layers) - 1) // every * every, every):
            some = layers[start : start + every]
            groups.append(Group([name for name, _ in some]))
            for place, (_, forward) in enumerate(some):
                forward.group = groups[-1], place
    return groups
