"""Finds what convert set in a model, and undoes it."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import masks
from .binding import Forward, forward_of
from .sharding import set_class

ORIGINAL_CLASS = "_ckptkern_class"  # where a module that became its drop-in replacement keeps the class that it had
OF_DROP_IN = (ORIGINAL_CLASS, "recompute", "workspace")


def bound(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns (the attributes of a module or a configuration, those among them that convert set) of each."""
    found = [(vars(config), (masks.ATTRIBUTE,)) for _, config in masks.configurations(model) if masks.has_ours(config)]
    for module in model.modules():
        attributes = vars(module)
        names = OF_DROP_IN if ORIGINAL_CLASS in attributes else ()
        if isinstance(attributes.get("forward"), (Forward, masks.Unpacked)):
            names = (*names, "forward")
        found.append((attributes, names))
    return [
        (attributes, {name: attributes[name] for name in names if name in attributes}) for attributes, names in found
    ]


def check_not_split(op: str, model: nn.Module) -> None:
    """Raises ValueError if ckptkern.parallel split a block, whose forward stands around what convert would set."""
    for module in model.modules():
        for name, style in (("shard", "TensorParallel"), ("context", "ContextParallel")):
            if hasattr(module.__dict__.get("forward"), name):
                raise ValueError(f"{op}: the model is already sharded by {style}: convert first, then shard")


def revert(model: nn.Module) -> nn.Module:
    """Undoes convert: every module runs the forward that it had. Returns the model. ValueError after a parallel style."""
    check_not_split("revert", model)
    masks.give_back(model)
    for module in model.modules():
        if forward := forward_of(module):
            forward.unbind()
        if ORIGINAL_CLASS in module.__dict__:
            set_class(module, module.__dict__.pop(ORIGINAL_CLASS))
            for name in OF_DROP_IN[1:]:
                module.__dict__.pop(name, None)
    return model
