"""Reads the parts of a module for `from_torch` by name, or raises a TypeError."""

from __future__ import annotations

import torch

from .activations import Activation, activation_of
from .share import refuse


def check_parts(cls: type, module: torch.nn.Module, known: tuple[str, ...]) -> None:
    """Raises TypeError if the module has a submodule besides the `known` ones, or a forward of its own."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{cls.__name__}: module must be a torch.nn.Module, not {module!r}")
    if more := sorted({name for name, part in module._modules.items() if part is not None} - {*known}):
        refuse(cls, module, f"has a {more[0]}, which {cls.__name__} has not")
    if "forward" in module.__dict__:
        refuse(cls, module, "has a forward set on the instance")


def activation_in(cls: type, module: torch.nn.Module, activation: Activation | None) -> str:
    """The name of the given activation, or of the one that Hugging Face's modules have as `act_fn`."""
    for name in ("act_fn", "activation", "activation_fn"):
        activation = getattr(module, name, None) if activation is None else activation
    if activation is None:
        refuse(cls, module, "has no act_fn; pass its activation")
    return activation_of(cls.__name__, activation)  # type: ignore[arg-type]
