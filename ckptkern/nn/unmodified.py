"""Decides which modules an op may replace, and runs the others."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..ops.dispatch.choices import choose_mode, log_once
from ..ops.dispatch.shard import ACTIVE, refuse_shard
from ..segments.checkpoint import checkpoint
from ..subclasses import own_dispatch
from .layer import Dropout

DROPOUT = (torch.nn.Dropout, Dropout)
CACHING = "bitsandbytes.nn.parametrize"  # has hooks that bound how long a weight stands that is dequantised
CAPTURING = "transformers.utils.output_capturing"  # has hooks that collect what a call asks for, such as hidden states


def runs_class_forward(module: torch.nn.Module) -> bool:
    """Is its forward that of its class?"""
    own = module.__dict__.get("forward")
    # Hugging Face's kernelize binds the class's own forward to the instance
    return own is None or (getattr(own, "__func__", None) is type(module).forward and own.__self__ is module)


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Inside, transformers' hooks collect nothing: of a layer that is tried in the middle of a model's call."""
    collector = getattr(sys.modules.get(CAPTURING), "_active_collector", None)
    if collector is None or collector.get() is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)


def collects_first(hooks: dict[int, Callable]) -> bool:
    """Does each of these only collect the first result of its module, as transformers' hooks do?"""
    return all(
        getattr(hook, "__module__", None) == CAPTURING and inspect.getclosurevars(hook).nonlocals.get("index") == 0
        for hook in hooks.values()
    )


def dormant(hooks: dict[int, Callable]) -> bool:
    """Do none of these change anything in this call? After a call that asks for hidden states, transformers leaves hooks, which
    collect what a call asks for."""
    collector = getattr(sys.modules.get(CAPTURING), "_active_collector", None)
    for hook in hooks.values():
        owner = getattr(hook, "__module__", None)
        if owner not in (CACHING, CAPTURING):
            return False
        wanted = collector.get() if owner == CAPTURING and collector is not None else None
        if wanted and inspect.getclosurevars(hook).nonlocals.get("key", next(iter(wanted))) in wanted:
            return False
    return True


def hooked(module: torch.nn.Module) -> bool:
    """Does calling the module run hooks that do anything?"""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return not (dormant(module._forward_pre_hooks) and dormant(module._forward_hooks))


def untouched(module: torch.nn.Module) -> bool:
    """Does calling the module run its class's forward and nothing else: no hooks, no forward set on the instance?"""
    return runs_class_forward(module) and not hooked(module)


def strided(module: torch.nn.Module) -> bool:
    """Are the module's own parameters, not its children's, strided? A pruned one may be sparse."""
    return all(p is None or p.layout is torch.strided for p in module._parameters.values())


def dense(module: torch.nn.Module) -> bool:
    """Are the module's own parameters plain memory? Not if one is sparse, parametrised, or of a tensor subclass with
    operations of its own."""
    kind = own_dispatch(module._parameters.values())
    if kind is not None:
        log_once(f"{kind.__name__} has operations of its own, so a module calls its submodules, as a general region")
    return kind is None and strided(module) and "parametrizations" not in module._modules


def unmodified(kinds: type | tuple[type, ...], *modules: torch.nn.Module) -> bool:
    """Returns whether the parameters of these modules alone determine their results: no module is a subclass or a
    wrapper (LoRA), has hooks, or has a parameter that is not plain memory (sparse, quantized)."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return all(type(module) in kinds and untouched(module) and dense(module) for module in modules)


def composed(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """method(*args, **kwargs), which calls its module's submodules because no op stands for them, as an activation checkpoint.

    It runs as it is at recompute="none", without gradients, inside another region, and on parameters that a tensor-parallel
    block has gathered for this call. Also where a recompute is impossible: in torch.func's transforms and torch.export, which
    take no hooks on saved tensors, and in a CUDA graph capture, which cannot read torch's random state.
    """
    module = method.__self__  # type: ignore[attr-defined]
    refuse_shard(f"{type(module).__name__} calls its submodules")
    if (
        not torch.is_grad_enabled()
        or ACTIVE.gathered
        or choose_mode(module.recompute) in ("none", ("none", "none"))
        or torch._C._are_functorch_transforms_active()
        or torch.compiler.is_exporting()
        or (torch.compiler.is_compiling() and parametrize._cache_enabled)
    ):
        return method(*args, **kwargs)
    if not torch.compiler.is_compiling():
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return method(*args, **kwargs)
        forward = module.__dict__.get("forward")
        if hasattr(forward, "is_composed"):
            forward.is_composed = True  # convert counts what ran
    return checkpoint(method, *args, **kwargs)
