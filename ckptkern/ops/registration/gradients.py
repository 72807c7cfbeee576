"""How gradients are summed: chunks of tokens that fit the workspace, and the sums of weights and biases over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...eager import upcasts
from .delayed import Delayed, Sum, accumulates
from .op import cast_parameter

Place = slice | tuple[slice, ...]  # of a part of a tensor

IN_GRAD = "grad"  # a main_grad that stands for the parameter's .grad


def accumulate_in_place(model: torch.nn.Module, enabled: bool = True) -> None:
    """Let fused ops add weights' gradients to the `.grad` that exists, without memory for a second gradient beside it.

        ckptkern.accumulate_in_place(model)
        for micro_batch in micro_batches:       # from the second on
            model(micro_batch).backward()

    Autograd adds a gradient to `.grad` when it is whole: a language model's head then holds V d floats twice. With this, an
    op's backward adds to `.grad` itself, where nobody can tell: in an eager `backward()` that accumulates in this parameter,
    whose `.grad` is dense, in its dtype and float32 or float64, and that has no hook of `register_hook`. Elsewhere, such as in
    `torch.autograd.grad`, with `create_graph=True`, in compiled graphs and where `.grad` is None, gradients go as in torch.
    Hooks that run after accumulation, as DistributedDataParallel has, find the sum.

    enabled: False undoes it. Parameters that have a `main_grad` keep it. Sums differ from torch's by rounding.
    """
    for parameter in model.parameters():
        if enabled and getattr(parameter, "main_grad", None) is None:
            parameter.main_grad = IN_GRAD
        elif not enabled and isinstance(getattr(parameter, "main_grad", None), str):
            del parameter.main_grad


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The float32 buffer in which Megatron-LM sums a parameter's gradients over micro-batches, if it has one; or its `.grad`
    (`accumulate_in_place`).

    Only a Parameter that is given to the op itself has it: no view, no cast copy, no tensor of a compiled graph or a transform.
    """
    main = getattr(weight, "main_grad", None)
    if isinstance(main, str):  # weight.grad, if this backward accumulates there and nothing asks for what is added
        grad = weight.grad
        if (
            type(grad) is not Tensor
            or grad.layout is not torch.strided
            or grad.dtype != weight.dtype
            or grad.dtype.itemsize < 4
            or grad.requires_grad
            or weight._backward_hooks
            or torch.is_grad_enabled()
        ):
            return None
        return grad if accumulates(weight) else None
    if main is not None and (main.dtype != torch.float32 or main.shape != weight.shape or weight.dtype.itemsize > 4):
        raise TypeError(
            f"main_grad must be float32 and of its parameter's shape {tuple(weight.shape)}, but is {main.dtype} of shape "
            f"{tuple(main.shape)} beside a parameter in {weight.dtype}"
        )
    return main


def into_main_grad(weight: Tensor | None, grad: Tensor) -> Tensor | None:
    """None if the gradient that a library op gave was added to the weight's main_grad."""
    main = None if weight is None else main_grad_of(weight)
    if main is None:
        return grad
    main.add_(grad)
    weight.grad_added_to_main_grad = True
    return None


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor, *, wide: bool) -> Tensor:
    """total + a b, in total if there is one. wide: in float32, where operands of 16 bits would give their own dtype."""
    if wide and a.dtype.itemsize < 4:
        if a.is_cuda:
            if total is None:
                return torch.mm(a, b, out_dtype=torch.float32)
            return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        a, b = a.float(), b.float()  # a CPU has no such matmul
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


class WeightGrad(Sum):
    """Sum over chunks of a^T b, accumulated in float32 (float64 for float64) and rounded once to the weight's dtype.

    place: of the part of the weight whose gradient this is, as an index; whole: gives the tensor of the whole weight's
    gradient, at whose `place` this one is written. If the weight has a main_grad, that is the sum, and the result is None.
    """

    def __init__(
        self, weight: Tensor, chunks: int, *, place: Place | None = None, whole: Callable[[], Tensor] | None = None
    ):
        self.weight, self.dtype, self.chunks, self.place, self.whole = weight, weight.dtype, chunks, place, whole
        self.into: Tensor | None = None
        main = main_grad_of(weight)
        self.main = self.sum = main if main is None or place is None else main[place]

    def matmul(self, a: Tensor, b: Tensor) -> None:
        """a [m, N], b [m, K] -> sum [N, K]."""
        sums = self.chunks > 1 or self.main is not None
        wide = sums or (a.dtype != self.dtype if a.is_cuda else a.is_cpu and upcasts(a.dtype))
        if self.sum is None and self.whole is not None and not wide and a.dtype == self.dtype:
            self.sum = torch.mm(a.t(), b, out=self.part())
        else:
            self.sum = add_matmul(self.sum, a.t(), b, wide=wide)

    def total(self) -> Tensor | None:
        total, self.sum = self.sum, None  # at most one float32 sum is alive beside its result
        if self.main is not None:
            self.weight.grad_added_to_main_grad = True
            return None
        if self.whole is None:
            return cast_parameter(total, self.dtype)
        if total is not self.part():
            self.part().copy_(total)
        return self.whole()

    def part(self) -> Tensor:
        """Returns where in the whole weight's gradient this one is."""
        if self.into is None:
            self.into = self.whole()[self.place]
        return self.into


class BiasGrad:
    """Sum over chunks, rounded once. part: the dtype of a chunk's sums, float32 unless there is one chunk."""

    def __init__(self, bias: Tensor, chunks: int):
        self.dtype, self.total = bias.dtype, None
        self.part = bias.dtype if chunks == 1 else True

    def add(self, part: Tensor) -> None:
        self.total = part if self.total is None else self.total.add_(part)

    def result(self) -> Tensor:
        return cast_parameter(self.total, self.dtype)


class PartGrads:
    """Gradients, by name, of parameters whose parts are read one after another: the part of each at its `place` in one tensor,
    or, where all read the same, a sum in float32, rounded once.

    t: the parameters, a NamedTuple; parts: how often a sum is added to. A gradient that was added to a main_grad is None.
    """

    def __init__(self, t: Any, parts: int):
        self.t, self.parts = t, parts
        self.sums: dict[str, WeightGrad] = {}
        self.grads: dict[str, Any] = {}
        self.wholes: dict[str, Tensor] = {}

    def whole(self, name: str) -> Tensor:
        """The tensor in which parts of a gradient are written."""
        if name not in self.wholes:
            parameter = getattr(self.t, name)
            self.wholes[name] = parameter.new_empty(parameter.shape)
        return self.wholes[name]

    def of_weight(self, name: str, place: Place | None, chunks: int = 1) -> WeightGrad:
        """What sums the gradient of the weight's part over chunks; `written` when it is complete."""
        weight = getattr(self.t, name)
        whole = None if place is None or main_grad_of(weight) is not None else functools.partial(self.whole, name)
        return WeightGrad(weight, chunks, place=place, whole=whole)

    def written(self, sums: dict[str, WeightGrad]) -> None:
        """Takes those of the sums that nothing more is added to."""
        for name, grad in sums.items():
            if name not in self.sums:
                result, before = grad.result(), self.grads.get(name)
                if isinstance(result, Delayed) and before is not None:
                    before.sums.extend(result.sums)
                else:
                    self.grads[name] = result

    def sum_of(self, name: str) -> WeightGrad:
        """What sums the gradient of a weight that all parts read."""
        if name not in self.sums:
            self.sums[name] = WeightGrad(getattr(self.t, name), self.parts)
        return self.sums[name]

    def put(self, name: str, grad: Tensor | None, place: Place | None) -> None:
        """The gradient of the part at `place`."""
        if place is None or grad is None:
            self.grads[name] = grad
        else:
            self.grads[name] = whole = self.whole(name)
            whole[place] = grad

    def add(self, name: str, grad: Tensor | None) -> None:
        """Adds to a sum that is not rounded here."""
        before = self.grads.get(name)
        self.grads[name] = grad if before is None else before.add_(grad)

    def results(self) -> dict[str, Any]:
        return self.grads | {name: total.result() for name, total in self.sums.items()}
