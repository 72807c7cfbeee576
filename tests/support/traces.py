"""Sees all that a call may leave in a model and in random states."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn

DEPTH = 6
ATTENTION = "_attn_implementation_internal"  # of a configuration; convert sets it until revert

# ends of the names of what convert changes
REPLACED = (".forward", "attention implementation", ".__class__", "._ckptkern_class", ".recompute", ".workspace")


def seen(model: nn.Module) -> dict[str, Any]:
    """Returns what can be compared of random states and of each attribute of each module: which object it is, and what that
    holds."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    state: dict[str, Any] = {
        "random state of torch": [numbers.tolist() for numbers in (torch.get_rng_state(), *devices)],
        "random state of Python": random.getstate(),
        "random state of NumPy": repr(numpy.random.get_state()),
    }
    for path, module in model.named_modules(remove_duplicate=False):
        state[f"{path}.__class__"] = type(module)
        state[f"{path} attention implementation"] = getattr(getattr(module, "config", None), ATTENTION, None)
        state |= {f"{path}.{name}": _inside(value, 0) for name, value in vars(module).items()}
    return state


def _inside(value: Any, depth: int) -> Any:
    """Returns its identity with what it holds; an immutable value itself."""
    if value is None or isinstance(value, (bool, int, float, str, type)) or depth > DEPTH:
        return value
    if isinstance(value, nn.Module):
        return id(value)
    if isinstance(value, Tensor):
        grad = value.grad if value.is_leaf else None
        values = [None if t is None else t.detach().flatten().tolist() for t in (value, grad)]
        return (
            id(value),
            id(grad),
            value.data_ptr(),
            value.dtype,
            value.requires_grad,
            str(values),
            value._backward_hooks,
        )
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    items = list(value.items() if isinstance(value, dict) else value) if hasattr(value, "__iter__") else []
    if isinstance(value, set):
        items = sorted(items, key=id)
    held = {name: item for name, item in getattr(value, "__dict__", {}).items() if name != ATTENTION}
    identity = None if isinstance(value, tuple) else id(value)
    return identity, [_inside(item, depth + 1) for item in (*items, *sorted(held.items()))]


def changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Returns the names of what differs."""
    return {name for name in before.keys() | after.keys() if before.get(name, seen) != after.get(name, seen)}


def traces(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Returns the names of what differs, but what convert replaces."""
    return {name for name in changes(before, after) if not name.endswith(REPLACED)}
