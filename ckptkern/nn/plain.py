"""Which modules an op may stand for."""

from __future__ import annotations

import torch

from ..ops._common import log_composed
from ..subclasses import foreign
from .dropout import Dropout

DROPOUT = (torch.nn.Dropout, Dropout)


def untouched(module: torch.nn.Module) -> bool:
    """Is calling it its class's forward and nothing else: no hooks, no forward of the instance's own?"""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def plain(kinds: type | tuple[type, ...], *modules: torch.nn.Module) -> bool:
    """Do these modules compute what their parameters say? Not in subclasses, in wrappers (LoRA), with hooks, or where a
    parameter has operations of its own (a quantized weight)."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return all(type(module) in kinds and untouched(module) and memory_alone(module) for module in modules)


def memory_alone(module: torch.nn.Module) -> bool:
    """Are its own parameters what their memory says, and no tensor subclass with operations of its own?"""
    kind = foreign(module._parameters.values())
    if kind is not None:
        log_composed(kind)
    return kind is None
