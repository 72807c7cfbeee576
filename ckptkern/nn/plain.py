"""Which modules an op may stand for."""

from __future__ import annotations

import torch

from ..ops._choices import log_composed
from ..subclasses import foreign
from .dropout import Dropout

DROPOUT = (torch.nn.Dropout, Dropout)


def runs_class_forward(module: torch.nn.Module) -> bool:
    """Is its forward that of its class?"""
    own = module.__dict__.get("forward")
    # Hugging Face's kernelize binds the class's own forward to the instance
    return own is None or (getattr(own, "__func__", None) is type(module).forward and own.__self__ is module)


def untouched(module: torch.nn.Module) -> bool:
    """Does calling the module run its class's forward and nothing else: no hooks, no forward set on the instance?"""
    return runs_class_forward(module) and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def strided(module: torch.nn.Module) -> bool:
    """Are the module's own parameters, not its children's, strided? A pruned one may be sparse."""
    return all(p is None or p.layout is torch.strided for p in module._parameters.values())


def dense(module: torch.nn.Module) -> bool:
    """Are the module's own parameters plain memory? Not if one is sparse or of a tensor subclass with operations of its
    own."""
    kind = foreign(module._parameters.values())
    if kind is not None:
        log_composed(kind)
    return kind is None and strided(module)


def plain(kinds: type | tuple[type, ...], *modules: torch.nn.Module) -> bool:
    """Do the parameters of these modules alone determine what they compute? Not if one is a subclass or a wrapper (LoRA),
    has hooks, or has a parameter that is not plain memory (sparse, quantized)."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return all(type(module) in kinds and untouched(module) and dense(module) for module in modules)
