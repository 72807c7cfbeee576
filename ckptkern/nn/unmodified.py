"""Decides which modules an op may replace, and runs other modules as activation checkpoints."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..ops.dispatch.choices import choose_mode, log_once
from ..ops.dispatch.shard import ACTIVE, refuse_shard
from ..segments.checkpoint import checkpoint
from ..subclasses import own_dispatch
from .layer import Dropout

DROPOUT = (nn.Dropout, Dropout)
CACHING = "bitsandbytes.nn.parametrize"  # its hooks bound the lifetime of dequantised weights
CAPTURING = (
    "transformers.utils.output_capturing"  # its hooks collect the outputs that a call asks for, as hidden states
)


def runs_class_forward(module: nn.Module) -> bool:
    """Returns whether the module's forward is its class's."""
    own = module.__dict__.get("forward")
    # Hugging Face's kernelize binds the class's own forward to the instance
    return own is None or (getattr(own, "__func__", None) is type(module).forward and own.__self__ is module)


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Disables transformers' output-collecting hooks inside, while a layer is tried in the middle of a model's call."""
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
    """Returns whether each hook only collects the first result of its module, as transformers' hooks do."""
    return all(
        getattr(hook, "__module__", None) == CAPTURING and inspect.getclosurevars(hook).nonlocals.get("index") == 0
        for hook in hooks.values()
    )


def dormant(hooks: dict[int, Callable]) -> bool:
    """Returns whether the hooks do nothing in this call. transformers leaves its hooks in place after a call that asks for
    hidden states."""
    collector = getattr(sys.modules.get(CAPTURING), "_active_collector", None)
    for hook in hooks.values():
        owner = getattr(hook, "__module__", None)
        if owner not in (CACHING, CAPTURING):
            return False
        wanted = collector.get() if owner == CAPTURING and collector is not None else None
        if wanted and inspect.getclosurevars(hook).nonlocals.get("key", next(iter(wanted))) in wanted:
            return False
    return True


def hooked(module: nn.Module) -> bool:
    """Returns whether calling the module runs hooks that do anything."""
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return not (dormant(module._forward_pre_hooks) and dormant(module._forward_hooks))


def untouched(module: nn.Module) -> bool:
    """Returns whether calling the module runs its class's forward only, without hooks."""
    return runs_class_forward(module) and not hooked(module)


def strided(module: nn.Module) -> bool:
    """Returns whether the module's own parameters, not its children's, are strided. A pruned parameter may be sparse."""
    return all(p is None or p.layout is torch.strided for p in module._parameters.values())


def dense(module: nn.Module) -> bool:
    """Returns whether the module's own parameters are plain tensors: not sparse, parametrised, or of a subclass with its own
    dispatch."""
    kind = own_dispatch(module._parameters.values())
    if kind is not None:
        log_once(
            f"{kind.__name__} has operations of its own, so a module calls its submodules as an activation checkpoint"
        )
    return kind is None and strided(module) and "parametrizations" not in module._modules


def unmodified(kinds: type | tuple[type, ...], *modules: nn.Module) -> bool:
    """Returns whether the modules' parameters alone determine their results: each module is exactly of these types, has no
    hooks, and has only plain parameters (not sparse or quantised)."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return all(type(module) in kinds and untouched(module) and dense(module) for module in modules)


def composed(method: Callable, *args, **kwargs):
    """Runs method(*args, **kwargs), which calls a module's submodules, as an activation checkpoint.

    Without a checkpoint it runs at recompute="none", without gradients, inside another region, and on parameters that a
    tensor-parallel block has gathered for this call; also where nothing can be recomputed: in torch.func's transforms and
    torch.export, which allow no saved-tensor hooks, and in a CUDA graph capture, which cannot read torch's random state.
    """
    module = method.__self__  # type: ignore[attr-defined]
    refuse_shard(f"{type(module).__name__} calls its submodules")
    if (
        not torch.is_grad_enabled()
        or ACTIVE.gathered
        or choose_mode(getattr(module, "recompute", "full")) in ("none", ("none", "none"))
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
