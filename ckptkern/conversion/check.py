"""Compares a replacement of a forward with that forward (`Check`): output, input gradient and every parameter's gradient, on
random parameters."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from ..eager import TensorFunction
from ..frozen import Frozen
from ..ops.dispatch.choices import setting
from .protection import seeded
from .quantized import is_quantised, multiplies_dequantised, packed_in
from .trace import Unreadable

ROUNDING = 1e-3  # sums over many tokens in float32 may differ so much
TOLERANCE = 2e-5  # of rounding in float32; a wrong reading differs by percents


def wide(tensor: Tensor) -> Tensor:
    """Returns a float16 or bfloat16 tensor as float32; any other unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a floating-point tensor or parameter in this dtype; any other unchanged."""
    if not tensor.is_floating_point():
        return tensor
    other = tensor.detach().to(dtype)
    return nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other


double = functools.partial(in_dtype, dtype=torch.float64)


@contextlib.contextmanager
def replacing(module: nn.Module, parameter: TensorFunction, buffer: TensorFunction | None = None) -> Iterator[None]:
    """Puts parameter(p), and buffer(b) if given, in place of each for a while. Shared tensors stay shared."""
    before = [
        (own, dict(own), other)
        for m in module.modules()
        for own, other in ((m._parameters, parameter), (m._buffers, buffer))
        if other is not None
    ]
    others: dict[int, Tensor] = {}
    try:
        for own, tensors, other in before:
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in others:
                        others[id(tensor)] = other(tensor)
                    own[name] = others[id(tensor)]
        yield
    finally:
        for own, tensors, _ in before:
            own.update(tensors)


@contextlib.contextmanager
def random_parameters(module: nn.Module) -> Iterator[None]:
    """Sets random parameters for a while. Parameters and buffers are then in float32 at least."""

    def random_like(parameter):
        """Returns random values at which scores and activations are of order 1, so that a wrong scale shows."""
        parameter = Frozen(parameter) if is_quantised(parameter) else stood_for.get(id(parameter), parameter)
        values = parameter.detach()
        if parameter.is_floating_point():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            values = torch.randn(parameter.shape, dtype=dtype, device=parameter.device)
            values = values * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5 + 0.5 * values
        return nn.Parameter(values, values.is_floating_point())

    packed = packed_in(module)
    stood_for = {id(parametrization.original): Frozen(parametrization) for parametrization in packed}
    # these subclasses of nn.Linear compute as nn.Linear, because their own forward takes no other weights
    dequantised = list(filter(multiplies_dequantised, module.modules()))
    with (
        replacing(module, random_like, wide),
        setting("__class__", nn.Linear, *dequantised),
        setting("__class__", nn.Identity, *(parametrization[0] for parametrization in packed)),
    ):
        yield


def in_float64(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Converts the floating-point parameters and buffers to float64 for a while."""
    return replacing(module, double, double)


def varied(value, excludes: bool):
    """Returns another mask of the same kind, because an example's mask rarely hides anything. excludes: True hides."""
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
    run: Callable[[list], Tensor],
    flat: list,
    inputs: list[int] | None,
    parameters: Iterable[nn.Parameter] = (),
) -> list[Tensor | None]:
    """Returns y and, for one fixed gradient of y, the gradients of the arguments `inputs` and of the parameters; y alone if
    inputs is None."""
    if inputs is None:
        with torch.no_grad():
            return [run(flat)]
    leaves = {i: flat[i].detach().requires_grad_() for i in inputs}
    with torch.enable_grad():
        y = run([leaves.get(i, value) for i, value in enumerate(flat)])
    seed = torch.Generator(y.device).manual_seed(0)
    dy = torch.randn(y.shape, generator=seed, dtype=y.dtype, device=y.device)
    return [y.detach(), *torch.autograd.grad(y, [*leaves.values(), *parameters], dy, allow_unused=True)]


def difference(ours: list[Tensor | None], theirs: list[Tensor | None]) -> float:
    """Returns the largest relative error. A gradient is compared with its own size plus a hundredth of the largest gradient,
    because that of a key's bias is rounding alone."""
    floor = 1e-2 * max(map(rms, theirs[1:]), default=0.0)
    worst = 0.0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is not None and b is not None and a.shape != b.shape:
            return math.inf
        error = rms(a if b is None else b if a is None else a - b)
        if math.isnan(error):
            return math.inf
        worst = max(worst, error / max(rms(b) + (floor if i else 0.0), 1e-30))
    return worst


class Check:
    """Compares a replacement of a forward with that forward, on the same values.

    original, ours: functions of a call's flat values that return a tensor.
    """

    def __init__(self, original: Callable[[list], Tensor], ours: Callable[[list], Tensor]):
        self.original, self.ours = original, ours

    def error(self, flat: list, inputs: list[int] | None = None, parameters: Iterable[nn.Parameter] = ()) -> float:
        """Returns the largest relative error of our result and of the gradients that `results` computes."""
        return difference(*(results(run, flat, inputs, parameters) for run in (self.ours, self.original)))

    def require(self, calls: Iterable[tuple[str, list]], tolerance: float = TOLERANCE, pick: Callable | None = None):
        """Raises Unreadable for the first call in which the results differ, or which ours refuses. calls: (where, its
        values) of each. pick(ours, theirs): the parts of both to compare."""
        for where, flat in calls:
            try:
                with seeded():  # for computed tensors that sample
                    (theirs,) = results(self.original, flat, None)
            except Exception:  # the module refuses the size, or arguments were enlarged wrongly
                continue
            try:
                with seeded():
                    (ours,) = results(self.ours, flat, None)
            except (ValueError, TypeError, RuntimeError) as refusal:
                raise Unreadable(f"{where} the op refuses it: {refusal}") from None
            if pick is not None:
                ours, theirs = pick(ours, theirs)
            if (error := difference([wide(ours)], [wide(theirs)])) > tolerance:
                raise Unreadable(f"{where} the numbers differ by {error:.1e}")
