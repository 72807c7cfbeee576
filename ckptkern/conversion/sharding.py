"""Supports models that fully_shard took before convert: gathers parameters for each check, and makes one decision on
all ranks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Hashable, Iterator

import torch
from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Returns whether fully_shard was called on the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here, because it takes a second
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def holds_sharded(module: nn.Module) -> bool:
    """Returns whether fully_shard was called on a module inside, so that a forward gathers parameters."""
    return any(map(is_sharded, list(module.modules())[1:]))


def check_not_fsdp1(model: nn.Module, op: str = "convert") -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            f"{op}: the model is already wrapped in FullyShardedDataParallel, and a trial forward would change its state: "
            f"call {op} first, or use fully_shard"
        )


def announces_backward(hook) -> bool:
    """Returns whether the hook is one of fully_shard, or of FullyShardedDataParallel, on a model's result. Such a hook reads
    no gradient: it gathers parameters before backward."""
    owner, function = getattr(hook, "__self__", None), getattr(hook, "func", hook)
    module = getattr(function if owner is None else type(owner), "__module__", None) or ""
    return module.startswith("torch.distributed.fsdp.")


def _groups(state) -> list:
    """Returns the groups of parameters of a module that fully_shard was called on. torch 2.11 has one, or None."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def shards_of(hook) -> list[torch.Tensor]:
    """Returns this rank's shards of the parameters that a hook of fully_shard gathers; an optimizer changes them."""
    groups = _groups(getattr(hook, "__self__", None))
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def unshard(hooks: list) -> None:
    """Gathers the parameters that these hooks of fully_shard would gather before backward."""
    for hook in hooks:
        for group in _groups(getattr(hook, "__self__", None)):
            group.unshard()
            group.wait_for_unshard()


def stays_gathered(module: nn.Module) -> bool:
    """Returns whether fully_shard was called on the module with reshard_after_forward=False, and the module has no other
    hooks."""
    if not is_sharded(module):
        return False
    state = module._get_fsdp_state()
    hooks = [hook for kind in (module._forward_pre_hooks, module._forward_hooks) for hook in kind.values()]
    own = all(getattr(hook, "__self__", None) is state for hook in hooks)
    backward = module._backward_hooks or module._backward_pre_hooks
    return own and not backward and not any(group._reshard_after_forward for group in _groups(state))


def class_of(module: nn.Module) -> type:
    """Returns the module's class; for a sharded module, the class that it had before."""
    return type(module).__bases__[-1] if is_sharded(module) else type(module)


def set_class(module: nn.Module, kind: type) -> None:
    """Sets the module's class; a sharded module stays sharded."""
    module.__class__ = _sharded(type(module), kind) if is_sharded(module) else kind


@functools.cache
def _sharded(before: type, kind: type) -> type:
    """Returns the class that fully_shard makes of `kind`, as it made `before` of another class."""
    *added, plain = before.__bases__
    name = before.__name__.removesuffix(plain.__name__) + kind.__name__
    return type(name, (*added, kind), {"__deepcopy__": before.__deepcopy__})


class Shards:
    """Gathers the parts of a model on several ranks, which convert it in lockstep.

    All ranks run every collective, whatever each has found: gathers follow the order of the visited modules, which follows
    decisions on which all ranks agree.
    """

    def __init__(self, model: nn.Module):
        self.modules = [m for m in model.modules() if is_sharded(m)]
        for module in self.modules:  # as it is between two steps
            module.reshard()
        meshes = {p.device_mesh: None for p in model.parameters() if hasattr(p, "device_mesh")} if self.modules else {}
        groups = {id(group): group for mesh in meshes for group in mesh.get_all_groups()}
        # the largest group decides last: the whole model's spans those of its parts
        self.groups = sorted(groups.values(), key=lambda group: group.size())

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Gathers what fully_shard distributed over the ranks with this module, not what it distributed with modules inside."""
        if not is_sharded(module):
            yield
            return
        module.unshard()
        try:
            yield
        finally:
            module.reshard()

    def agree(self, outcome: Hashable) -> bool:
        """Returns whether all ranks have the same outcome. Examples, and so checks, may differ."""
        same = True
        for group in self.groups:
            outcomes = [None] * group.size()
            torch.distributed.all_gather_object(outcomes, (outcome, same), group)
            same = set(outcomes) == {(outcome, True)}
        return same
