"""Reads the parts of a module for `from_torch` by name, or raises a TypeError."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .activations import Activation, activation_of
from .share import refuse, share
from .unmodified import DROPOUT, untouched


def check_parts(
    cls: type,
    module: torch.nn.Module,
    needed: tuple[str, ...],
    known: tuple[str, ...] = (),
    *,
    parameters: bool = False,
) -> None:
    """Raises TypeError unless the module has the `needed` submodules, and none but these and the `known` ones; nor any
    parameters of its own, unless `parameters`."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{cls.__name__}: module must have the submodules {', '.join(needed)}, not be {module!r}")
    parts = {name for name, part in module._modules.items() if part is not None}
    if missing := [name for name in needed if name not in parts]:
        refuse(cls, module, f"has no submodule {missing[0]}")
    own = [] if parameters else [name for name, p in module._parameters.items() if p is not None]
    if more := sorted(parts - {*needed, *known}) or own:
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


def _agree(norm: torch.nn.Module, drop_in: torch.nn.RMSNorm) -> bool:
    """Do both give the same for rows of several sizes, of which the smallest shows eps?"""
    weight = drop_in.weight
    rows = torch.linspace(-2, 3, 4 * weight.numel(), device=weight.device).view(4, -1)
    x = (rows * torch.tensor([[1.0], [1e-3], [1e-2], [10.0]], device=weight.device)).to(weight.dtype)
    tolerance = 4 * torch.finfo(weight.dtype).eps
    try:
        with torch.no_grad():
            return torch.allclose(norm.forward(x), drop_in.forward(x), tolerance, tolerance)
    except Exception:  # another kind of module
        return False


def rms_norm(cls: type, owner: torch.nn.Module, norm: torch.nn.Module, width: int | None = None) -> torch.nn.RMSNorm:
    """A torch.nn.RMSNorm with the weight of `norm`, which must compute the same: one that scales by 1 + weight does not."""
    if type(norm) is torch.nn.RMSNorm:
        return norm
    weight, eps = norm._parameters.get("weight"), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if [*norm._parameters] == ["weight"] and weight is not None and not weight.is_meta and not norm._modules:
        drop_in = share(torch.nn.RMSNorm, norm, normalized_shape=tuple(weight.shape), eps=eps, elementwise_affine=True)
        if weight.shape == (width or weight.numel(),) and _agree(norm, drop_in):
            return drop_in
    refuse(cls, owner, f"has a {type(norm).__name__} that does not compute the RMS norm x / rms(x) * weight")
