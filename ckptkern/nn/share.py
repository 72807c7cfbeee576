"""Creates a module that shares parameters, buffers, hooks and settings with an existing one, for `from_torch`."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def share(cls: type[Module], module: torch.nn.Module, **own: Any) -> Module:
    """A `cls` with the module's parameters, buffers, hooks and settings. own: what it has instead of the module's."""
    one = cls.__new__(cls)
    one.__dict__.update({**module.__dict__, "_modules": dict(module._modules), **own})
    return one


def refuse(cls: type, module: object, reason: str) -> NoReturn:
    raise TypeError(f"{cls.__name__}: {type(module).__name__} {reason}")


def check_kind(cls: type, module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Raises TypeError unless the module computes what a `kind` does."""
    if type(module) not in (kind, cls):
        kinds = f"torch.nn.{kind.__name__}, not {type(module).__name__}"
        raise TypeError(f"{cls.__name__}: module must be a {kinds}")
    if "forward" in module.__dict__:
        refuse(cls, module, "has a forward set on the instance")
