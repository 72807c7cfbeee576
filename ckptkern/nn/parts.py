"""Reads the parts of a module for `from_torch` by name, or raises a TypeError."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .activations import Activation, activation_of
from .share import refuse
from .unmodified import DROPOUT, untouched


def check_parts(cls: type, module: torch.nn.Module, known: tuple[str, ...]) -> None:
    """Raises TypeError if the module has a submodule besides the `known` ones, or a forward of its own."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{cls.__name__}: module must be a torch.nn.Module, not {module!r}")
    if more := sorted({name for name, part in module._modules.items() if part is not None} - {*known}):
        refuse(cls, module, f"has a {more[0]}, which {cls.__name__} has not")
    if "forward" in module.__dict__:
        refuse(cls, module, "has a forward set on the instance")


def check_linear(cls: type, module: torch.nn.Module, *names: str) -> list[torch.nn.Linear]:
    """The submodules of these names. Raises TypeError unless they are nn.Linear."""
    for name in names:
        if not isinstance(module._modules[name], torch.nn.Linear):
            refuse(cls, module, f"has a {name} that is not an nn.Linear: {type(module._modules[name]).__name__}")
    return [module._modules[name] for name in names]


def same_activation(cls: type, activations: list[Callable]) -> str:
    """The one name of all of them."""
    names = {activation_of(cls.__name__, one) for one in activations}
    if len(names) != 1:
        raise TypeError(f"{cls.__name__}: its layers share one activation, but there are {', '.join(sorted(names))}")
    return names.pop()


def activation_in(cls: type, module: torch.nn.Module, activation: Activation | None) -> str:
    """The name of the given activation, or of the one that Hugging Face's modules have as `act_fn`."""
    for name in ("act_fn", "activation", "activation_fn"):
        activation = getattr(module, name, None) if activation is None else activation
    if activation is None:
        refuse(cls, module, "has no act_fn; pass its activation")
    return activation_of(cls.__name__, activation)  # type: ignore[arg-type]


def dropout_in(cls: type, owner: torch.nn.Module, dropout: torch.nn.Module) -> float:
    """The probability of a dropout module that a number can stand for."""
    if type(dropout) not in DROPOUT or not untouched(dropout) or dropout.training != owner.training:
        refuse(
            cls,
            owner,
            f"has a {type(dropout).__name__} that is not an unmodified nn.Dropout in the module's training mode",
        )
    return dropout.p
