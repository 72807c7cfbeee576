"""Recognises which activation of ckptkern a function or a module computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .. import eager
from ..ops.dispatch.choices import ACTIVATIONS
from .unmodified import unmodified, untouched

Activation = str | eager.TensorFunction


def named(activation: eager.TensorFunction) -> str | None:
    """Returns ckptkern's name for an activation function or module of torch, or None."""
    for name, entry in eager.ACTIVATIONS.items():
        for known in entry.torchs:
            if activation is known:
                return name
            if type(activation) is known and unmodified((known,), activation):
                return "gelu_tanh" if getattr(activation, "approximate", "none") == "tanh" else name
    return None


def _same(ours: Tensor, theirs) -> bool:
    return (
        isinstance(theirs, Tensor) and ours.shape == theirs.shape and torch.allclose(ours, theirs.to(ours), 1e-7, 1e-7)
    )


def recognised(activation: eager.TensorFunction) -> str | None:
    """Returns the name of the activation that a function or module computes, or None.

    Other functions than torch's must agree in values and slopes at 840 points between -100 and 100. Modules must have no
    parameters, buffers or hooks. Later changes, as of a variable in a closure, are not seen.
    """
    if (name := named(activation)) is not None or not callable(activation):
        return name
    if isinstance(activation, nn.Module) and not (
        all(untouched(part) and not part._parameters and not part._buffers for part in activation.modules())
    ):
        return None
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        ranges = ((4, 640), (100, 200))
        z = torch.cat([torch.linspace(-end, end, n, dtype=torch.float64, device="cpu") for end, n in ranges])
        try:
            trained = activation(z.clone()).requires_grad
            leaf = z.clone().requires_grad_()
            y = activation(leaf * 1)  # not the leaf itself: the function may work in place
            (slope,) = torch.autograd.grad(y.sum(), leaf)
        except Exception:  # the function is not one of a tensor
            return None
        for name, entry in eager.ACTIVATIONS.items():
            if not trained and _same(entry.act(z), y.detach()) and _same(entry.grad(torch.ones_like(z), z), slope):
                return name
    return None


def activation_of(op: str, activation: Activation) -> str:
    """Returns the name of an activation function or module; a name unchanged. Raises ValueError if it is not recognised."""
    if isinstance(activation, str) or not callable(activation):
        return activation
    name = recognised(activation)
    if name is None:
        raise ValueError(
            f"{op}: activation must be one of {', '.join(map(repr, ACTIVATIONS))}, or a function or module without "
            f"parameters and hooks that computes one of them, which {activation!r} does not"
        )
    return name
