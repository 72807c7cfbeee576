"""Which modules an op may stand for."""

from __future__ import annotations

import torch

from ..ops._choices import log_composed
from ..subclasses import foreign
from .dropout import Dropout

DROPOUT = (torch.nn.Dropout, Dropout)


def untouched(module: torch.nn.Module) -> bool:
    """Is calling it its class's forward and nothing else: no hooks, no other forward of the instance's own?"""
    own = module.__dict__.get("forward")
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        # Hugging Face's kernelize binds the class's own forward to the instance
        or (own is not None and not (getattr(own, "__func__", None) is type(module).forward and own.__self__ is module))
    )


def strided(module: torch.nn.Module) -> bool:
    """Are this very module's parameters strided? Pruned ones may be sparse."""
    return all(p is None or p.layout is torch.strided for p in module._parameters.values())


def dense(module: torch.nn.Module) -> bool:
    """Are this very module's parameters what their memory says? Not where one is sparse, or a tensor subclass with operations
    of its own."""
    kind = foreign(module._parameters.values())
    if kind is not None:
        log_composed(kind)
    return kind is None and strided(module)


def plain(kinds: type | tuple[type, ...], *modules: torch.nn.Module) -> bool:
    """Do these modules compute what their parameters say? Not in subclasses, in wrappers (LoRA), with hooks, or where a
    parameter is not dense memory (sparse, quantized)."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return all(type(module) in kinds and untouched(module) and dense(module) for module in modules)
