"""Lets a recompute in backward run with the hooks that were inside of its module in forward.

Some last for a call of the model, such as those by which peft tells adapters which sample is whose (`adapter_names`). They are
gone when backward recomputes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

# what a module keeps of its forward hooks and of how they are called
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
Held = list[tuple[dict, dict]]  # a module's own dict of hooks, and what was in it


def hooks_inside(module: nn.Module) -> Held:
    """Those of the modules in it, without its own, if there are any."""
    held = [getattr(m, name) for m in module.modules() if m is not module for name in HOOKS]
    return [(own, dict(own)) for own in held] if any(held) else []


@contextmanager
def holding(held: Held) -> Iterator[None]:
    """With these hooks, and no others, in those modules."""
    changed = [(own, was, dict(own)) for own, was in held if own != was]
    try:
        for own, was, _ in changed:
            own.clear()
            own.update(was)
        yield
    finally:
        for own, _, now in changed:
            own.clear()
            own.update(now)


def forward_of(module: nn.Module) -> Callable:
    """The class's forward, as it would run now whenever it is called."""
    held = hooks_inside(module)
    if not held:
        return MethodType(type(module).forward, module)
    return functools.partial(MethodType(_with_hooks, module), held)


def _with_hooks(module: nn.Module, held: Held, *args: Any, **kwargs: Any) -> Any:
    with holding(held):
        return type(module).forward(module, *args, **kwargs)
