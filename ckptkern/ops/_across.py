"""An op over several ranks, each with a shard of its weights: the collectives and the op as one autograd Function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .. import state
from ._needs import wanted
from ._op import direct, dispatched, named


def across_ranks(apply) -> Callable[..., Tensor]:
    """across(shard, statics, x, *tensors) -> y of an op that `build` made:

        y = reduced(f(gathered(x))),   dx = reduced(f'(gathered(dy)))

    What is kept of x is x itself, not what was gathered of it."""
    registered, gradients = apply.parts
    op, fwd, *_ = registered

    class Across(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard, statics, needs, x, *others):
            tensors, compiling = (shard.gathered(x), *others), torch.compiler.is_compiling()
            arguments = op.arguments(tensors)
            at_once = not (compiling or dispatched(tensors))
            outputs = op.flat(direct(op.forward, *arguments, *statics) if at_once else fwd(*arguments, *statics))
            saved = op.saved(tensors, outputs, statics, needs)
            ctx.call = shard, statics, needs, None if compiling else state.Precision()
            ctx.save_for_backward(None if saved[0] is None else x, *saved[1:])
            return shard.reduced(outputs[0])

        @staticmethod
        def backward(ctx, dy):
            shard, statics, needs, precision = ctx.call
            if torch.is_grad_enabled():
                raise NotImplementedError(f"{op.name}: no second-order gradients over a tensor-parallel group")
            x, *others = ctx.saved_tensors
            saved = [None if x is None else shard.gathered(x), *others]
            with nullcontext() if precision is None else precision:
                dx, *grads = gradients(shard.gathered(dy), saved, statics, needs)
            return (None, None, None, None if dx is None else shard.reduced(dx), *grads)

    function = named(Across, op, "Across")

    def across(shard, statics: tuple, *tensors: Tensor | None) -> Tensor:
        needs = wanted(tensors)
        return function.apply(shard, statics if needs else apply.for_inference(statics), needs, *tensors)

    return across
