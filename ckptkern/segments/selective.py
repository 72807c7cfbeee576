"""Selective checkpoints: which saved-tensor hooks see the tensors that a region holds besides autograd's.

torch's policies (`create_selective_checkpoint_contexts`) and `saved_decisions` hold tensors outside of the graph. From 2.14 on,
torch's forward context passes them to the hooks on top of the stack if it is told to; it takes hooks with an attribute
`_checkpoint_internal` for a region's own and goes on at `_user_hooks`. Before 2.14 `_packed` passes them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from ..ops.dispatch.choices import RECOMPUTING
from .decisions import Save

Hooks = tuple[Callable, Callable]

LOOKS = hasattr(torch_checkpoint, "_current_user_saved_tensors_hooks")  # torch's own forward context knows hooks
_Caching, _Holder = torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._VersionWrapper
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def with_hooks(contexts: tuple | None, respect: bool | None) -> tuple | None:
    """A region's contexts of forward and recompute, which pass what they hold to the saved-tensor hooks around the region if
    `respect`. The region's own hooks, which come to lie between, see nothing of it, nor of what a region around it holds."""
    if contexts is None and not any(isinstance(mode, _Caching) for mode in _get_current_dispatch_mode_stack()):
        return None
    forward, recompute = contexts or (None, None)
    selective, hooks = isinstance(forward, _Caching), _hooks_around()
    if isinstance(forward, Save):
        forward.hooks = hooks if respect else None
    if LOOKS:
        if selective:
            forward.respect_saved_tensors_hooks = respect
        return _Hidden(forward), _Hidden(recompute)
    return (_packed(forward, recompute, hooks), recompute) if selective and respect and hooks else contexts


def _hooks_around() -> Hooks | None:
    """The innermost saved-tensor hooks that are not those of a region, torch's or ours."""
    regions = []
    while (hooks := _top_hooks(False)) is not None and getattr(hooks[1], "__module__", "") in RECOMPUTING:
        regions.append(hooks)
        _pop_hooks()
    for one in reversed(regions):
        _push_hooks(*one)
    return hooks


class _Hidden:
    """A context that is entered where a region's own hooks are on top: torch finds the hooks around the region in their place,
    in forward and in recompute."""

    def __init__(self, context: Any):
        self.context = nullcontext() if context is None else context
        self.entered: list[Callable] = []

    def __enter__(self) -> None:
        pack, unpack = _top_hooks(True)

        def internal(x: Tensor) -> Any:
            return pack(x)

        internal._checkpoint_internal, internal._user_hooks = True, _hooks_around()
        _push_hooks(internal, unpack)
        self.entered.append(internal)
        try:
            self.context.__enter__()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.context.__exit__(*error)
        finally:
            self.leave()

    def leave(self) -> None:
        _pop_hooks()
        del self.entered.pop()._user_hooks  # the graph holds `internal`, and the hooks might hold the graph


class _Packed:
    """Stands for torch's holder of a tensor, which hooks have packed."""

    def __init__(self, holder: Any, hooks: Hooks, mutable: bool):
        self.holder, self.unpack = type(holder)(hooks[0](holder.get_val(mutable))), hooks[1]

    def get_val(self, mutable: bool) -> Any:
        return self.unpack(self.holder.get_val(mutable))


@contextmanager
def _packed(forward: Any, recompute: Any, hooks: Hooks) -> Iterator[None]:
    """Forward's context of a torch before 2.14, which at its end passes what it holds to the hooks."""
    mutable = recompute.allow_cache_entry_mutation

    def pack(x: Any) -> Any:
        return _Packed(x, hooks, mutable) if isinstance(x, _Holder) and isinstance(x.val, Tensor) else x

    with forward:
        yield
    with torch.no_grad():
        for held in forward.storage.values():  # of an operator: results by number, or in a list before 2.13
            for i, result in list(held.items() if isinstance(held, dict) else enumerate(held)):
                held[i] = tree_map(pack, result)
