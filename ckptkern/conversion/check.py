"""Checks numerically that a fused call computes what a module's forward computes: output, input gradient and every parameter's
gradient, on random parameters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .quantized import as_linear, multiplies_dequantised, plain_like

ROUNDING = 1e-3  # that of sums over many tokens in float32 may be, and is looked at in float64
TOLERANCE = 2e-5  # of rounding in float32; a wrong reading differs by percents


def _random_like(parameter: Tensor) -> Tensor:
    """In float32 at least. Scores and activations are of order 1, so that a wrong scale shows."""
    parameter = plain_like(parameter)
    if not parameter.is_floating_point():
        return parameter.detach()
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    made = torch.randn(parameter.shape, dtype=dtype, device=parameter.device)
    return made * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5 + 0.5 * made


def wide(tensor: Tensor | None) -> Tensor | None:
    """A float16 or bfloat16 tensor as float32."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@contextlib.contextmanager
def random_parameters(module: nn.Module) -> Iterator[None]:
    """Other parameters for a while, in float32 at least; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    dequantised = list(filter(multiplies_dequantised, module.modules()))
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        for m, parameters, buffers in before:
            for name, p in parameters.items():
                if p is not None:
                    if id(p) not in made:
                        random_ = _random_like(p)
                        made[id(p)] = nn.Parameter(random_, random_.is_floating_point())
                    m._parameters[name] = made[id(p)]
            for name, b in buffers.items():
                m._buffers[name] = wide(b)
        with as_linear(dequantised):
            yield
    finally:
        for m, parameters, buffers in before:
            m._parameters.update(parameters)
            m._buffers.update(buffers)


@contextlib.contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """The floating-point parameters and buffers in float64 for a while."""
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    made: dict[int, Tensor] = {}

    def double(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if id(tensor) not in made:
            wider = tensor.detach().double()
            made[id(tensor)] = nn.Parameter(wider, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wider
        return made[id(tensor)]

    try:
        for m, parameters, buffers in before:
            m._parameters.update({name: double(one) for name, one in parameters.items()})
            m._buffers.update({name: double(one) for name, one in buffers.items()})
        yield
    finally:
        for m, parameters, buffers in before:
            m._parameters.update(parameters)
            m._buffers.update(buffers)


def varied(value: Any, excludes: bool = False) -> Any:
    """Another mask of the same kind: with few exceptions those of an example hide nothing. excludes: does True hide?"""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if value.dtype == torch.bool:
        other = torch.rand(value.shape, device=value.device) < 0.7
        other[..., 0] = True
        return ~other if excludes else other
    return torch.randn_like(value) if value.is_floating_point() else value


def rms(tensor: Tensor | None) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor is not None and tensor.numel() else 0.0


def results(
    run: Callable[[list[Any]], Tensor], flat: list[Any], inputs: list[int], parameters: list[nn.Parameter]
) -> list[Tensor | None]:
    """y, and the gradients of the arguments `inputs` and of the parameters for one fixed gradient of y."""
    given = {i: flat[i].detach().requires_grad_() for i in inputs}
    with torch.enable_grad():
        y = run([given.get(i, value) for i, value in enumerate(flat)])
    seed = torch.Generator(y.device).manual_seed(0)
    dy = torch.randn(y.shape, generator=seed, dtype=y.dtype, device=y.device)
    return [y.detach(), *torch.autograd.grad(y, [*given.values(), *parameters], dy, allow_unused=True)]


def difference(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """The largest relative error. A gradient is compared with at least a hundredth of the largest one: that of a key's bias
    is rounding alone."""
    floor = 1e-2 * max((rms(one) for one in theirs[1:]), default=0.0)
    worst = 0.0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is not None and b is not None and a.shape != b.shape:
            return math.inf
        error = rms(a if b is None else b if a is None else a - b)
        if math.isnan(error):
            return math.inf
        worst = max(worst, error / max(rms(b) + (floor if i else 0.0), 1e-30))
    return worst
