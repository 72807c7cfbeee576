"""Runs a function in slices of its tensors, each an activation checkpoint: `in_slices`.

Random state, precision, hooks and errors are those of `checkpoint`. Results, and gradients of inputs, are written slice by
slice into whole tensors; gradients of 16-bit tensors that all slices read are summed in float32 (csrc/gradient_sums.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..state import GradientSums
from .axes import Axis
from .checkpoint import checkpoint

Place = tuple[int, int]  # a slice's first entry, and the number of its entries


Wholes = dict[tuple[int, int], Tensor]  # gradients of whole inputs, by backward pass and number of the input


class _Read(torch.autograd.Function):
    """Returns a placeholder for inputs that slices read along an axis; its backward runs after the backward of all slices."""

    @staticmethod
    def forward(ctx, wholes, *inputs):
        ctx.wholes, ctx.count = wholes, len(inputs)
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx, _):
        task = torch._C._current_graph_task_id()
        return None, *(ctx.wholes.pop((task, i), None) for i in range(ctx.count))


class _Slice(torch.autograd.Function):
    """Returns a slice of each input; backward writes the slices' gradients to their places at once. inputs: their shapes and
    axes."""

    @staticmethod
    def forward(ctx, placeholder, wholes, inputs, place, *parts):
        ctx.set_materialize_grads(False)
        ctx.wholes, ctx.inputs, ctx.place, ctx.device = wholes, inputs, place, placeholder.device
        return parts

    @staticmethod
    def backward(ctx, *grads):
        task = torch._C._current_graph_task_id()
        for i, ((shape, axis), grad) in enumerate(zip(ctx.inputs, grads, strict=True)):
            if grad is not None:
                if (task, i) not in ctx.wholes:
                    ctx.wholes[task, i] = grad.new_zeros(shape)
                axis.slice(ctx.wholes[task, i], *ctx.place).add_(grad)  # slices with a halo overlap
        return torch.zeros((), device=ctx.device), None, None, None, *(None for _ in grads)


class _Written(torch.autograd.Function):
    """Writes the results of a slice to their places and returns placeholders, which take no memory."""

    @staticmethod
    def forward(ctx, wholes, axes, place, *parts):
        ctx.set_materialize_grads(False)
        ctx.axes = axes
        for axis, whole, part in zip(axes, wholes, parts, strict=True):
            axis.write(whole, *place, part)
        slices = (axis.slice(whole, *place) for axis, whole in zip(axes, wholes, strict=True))
        return tuple(part.new_zeros(()).expand(part.shape) for part in slices)

    @staticmethod
    def backward(ctx, *grads):
        parts = (grad if grad is None else axis.flat(grad) for axis, grad in zip(ctx.axes, grads, strict=True))
        return None, None, None, *parts


class _Joined(torch.autograd.Function):
    """Returns the whole results for the placeholders of slices. trained: indices of results with gradients. sums: must live as
    long as the graph."""

    @staticmethod
    def forward(ctx, wholes, axes, places, trained, sums, *placeholders):
        ctx.set_materialize_grads(False)
        ctx.axes, ctx.places, ctx.sums = axes, places, sums
        ctx.mark_non_differentiable(*(whole for i, whole in enumerate(wholes) if i not in trained))
        return tuple(wholes)

    @staticmethod
    def backward(ctx, *grads):
        pairs = [*zip(ctx.axes, grads, strict=True)]
        slices = (None if grad is None else axis.slice(grad, *place) for place in ctx.places for axis, grad in pairs)
        return None, None, None, None, None, *slices


def in_slices(
    function_for: Callable[[int], Callable],
    inputs: Sequence[tuple[Tensor, Axis | None]],
    axes: Sequence[Axis],
    n: int,
    length: int,
    results_of: Callable[[Any, int], Sequence[Tensor]],
    new: Callable[[int, Tensor], Tensor],
    **options,
) -> Sequence[Tensor]:
    """Returns the results of a function that runs on `length` of n independent entries at a time.

    function_for(count): returns the function for `count` entries, which takes a slice of each input (`Axis.slice`), or the
    whole input if its axis is None. axes: those of the results. results_of(returned, count): returns the results. new(i, part):
    returns a tensor for the whole result i. options: those of `checkpoint`. Saved for backward: the inputs.
    """
    sums, trained = GradientSums(), set[int]()
    wholes, places, placeholders = list[Tensor](), list[Place](), list[Tensor]()
    cut = [i for i, (x, axis) in enumerate(inputs) if axis is not None and x.requires_grad and torch.is_grad_enabled()]
    own, gradients = [(inputs[i][0].shape, inputs[i][1]) for i in cut], Wholes()
    read = _Read.apply(gradients, *(inputs[i][0] for i in cut)) if cut else None
    inputs = [(x.detach() if i in cut else x, axis) for i, (x, axis) in enumerate(inputs)]
    for first in range(0, max(n, 1), length):
        place = first, min(length, n - first)
        parts = [x if axis is None else axis.slice(x, *place) for x, axis in inputs]
        if cut:
            for i, part in zip(cut, _Slice.apply(read, gradients, own, place, *(parts[i] for i in cut)), strict=True):
                parts[i] = part
            del part
        results = results_of(checkpoint(function_for(place[1]), *parts, **options), place[1])
        del parts
        wholes = wholes or [new(i, result.detach()) for i, result in enumerate(results)]
        written = _Written.apply(wholes, axes, place, *results)
        if with_graph := {i for i, result in enumerate(results) if result.requires_grad}:
            trained |= with_graph
            sums.redirect(written[min(with_graph)])
            places.append(place)
            placeholders += written
        del results, written
    return _Joined.apply(wholes, axes, places, trained, sums, *placeholders) if placeholders else wholes
