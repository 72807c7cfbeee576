"""Quantised weights of the libraries that convert reads: what stands for them in a fused call, while a module is checked, and what
keeps a module from being fused.

Frozen tells which weights can be dequantised. A layer whose own forward does something else with its weight, such as quantising
its input, is not fused: its forward is compared with the dequantised weight's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..frozen import Frozen, why_not
from ..subclasses import own_dispatch
from .trace import Unreadable

LIBRARIES = ("bitsandbytes", "torchao")
LIKE_TORCH = 0.02  # relative error of a 16-bit forward that rounds elsewhere; a wrong scale or layout differs by more


def is_quantised(parameter: object) -> bool:
    """Is it a quantised weight of a library that Frozen knows?"""
    return type(parameter).__module__.partition(".")[0] in LIBRARIES


def why_unreadable(module: nn.Module) -> str:
    """Which of its parameters no op takes, and why; "" if none."""
    for name, parameter in module.named_parameters():
        if is_quantised(parameter):
            if reason := why_not(parameter):
                return f"{name} is a {type(parameter).__name__}. {reason}"
        elif kind := own_dispatch((parameter,)):
            return f"a parameter is a {kind.__name__}"
        elif parameter.is_floating_point() and parameter.dtype.itemsize == 1:
            return f"{name} is {parameter.dtype}, whose scale only its module knows; pass ckptkern.Frozen to the op instead"
    return ""


def in_op(parameter: Tensor) -> Tensor:
    """A parameter as an op takes it."""
    return Frozen(parameter) if is_quantised(parameter) else parameter


def plain_like(parameter: Tensor) -> Tensor:
    """An empty plain tensor of the weight that a quantised one stands for; any other as it is."""
    if not is_quantised(parameter):
        return parameter
    frozen = Frozen(parameter)
    return torch.empty(frozen.shape, dtype=frozen.dtype, device=frozen.device)


@contextlib.contextmanager
def as_linear(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Those of bitsandbytes compute as nn.Linear for a while, whose subclass they are, because theirs take no other weights."""
    changed = [(m, type(m)) for m in modules if is_quantised(m) and isinstance(m, nn.Linear)]
    for m, _ in changed:
        m.__class__ = nn.Linear
    try:
        yield
    finally:
        for m, kind in changed:
            m.__class__ = kind


@contextlib.contextmanager
def not_repacked(model: nn.Module) -> Iterator[None]:
    """Keeps bitsandbytes from packing weights anew for inference, which it does in place in a call without gradients on a CPU with
    AVX512-BF16: training cannot read them then."""
    name = "support_avx512bf16_for_cpu"
    changed = [m for m in model.modules() if m.__dict__.get(name)]
    for m in changed:
        setattr(m, name, False)
    try:
        yield
    finally:
        for m in changed:
            setattr(m, name, True)


def check_weights(module: nn.Module) -> None:
    """Compares the library's own forward of each quantised linear layer inside with the dequantised weight's. Raises Unreadable."""
    for path, leaf in module.named_modules():
        weight = leaf._parameters.get("weight")
        if weight is None or not is_quantised(weight) or not isinstance(leaf, nn.Linear):
            continue
        frozen, dtype = Frozen(weight), getattr(leaf, "compute_dtype", None)
        x = torch.randn(4, frozen.shape[1], dtype=dtype or frozen.dtype, device=frozen.device).requires_grad_()
        theirs = leaf(x).detach().double()
        ours = F.linear(x.detach(), frozen.dequantize(x.dtype), None if leaf.bias is None else leaf.bias.to(x.dtype))
        error = float((ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-30))
        if not error <= LIKE_TORCH:
            raise Unreadable(
                f"the forward of {path or type(leaf).__name__} differs from its dequantised weight's by {error:.1e}: its library "
                f"multiplies otherwise"
            )
