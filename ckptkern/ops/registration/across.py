"""An op over several ranks, each with a shard of its weights: the collectives and the op as one autograd Function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from ... import state
from .functions import DISPATCHED, named
from .library import call_forward
from .needs import asked, wanted
from .op import direct_forward, to_save


def across_ranks(apply) -> Callable[..., Tensor]:
    """across(shard, options, x, *tensors) -> y of an op that `build` made:

        y = reduced(f(gathered(x))),   dx = reduced(f'(gathered(dy)))

    What is saved of x is x itself, not what was gathered of it."""
    registered, gradients = apply.parts
    op = registered.op

    class Across(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard, options, needs, x, *others):
            tensors, compiling = (shard.gathered(x), *others), torch.compiler.is_compiling()
            seen = 0 if compiling else state.observe(tensors)
            if compiling or seen & DISPATCHED:
                results = call_forward(registered, tensors, options)
            else:
                results = direct_forward(op, tensors, options, seen)
            ctx.call = shard, options, needs, None if compiling else state.Precision()
            first, *saved = to_save(op, tensors, results, options, needs)
            ctx.save_for_backward(None if first is None else x, *saved)
            return shard.reduced(results[0])

        @staticmethod
        def backward(ctx, dy):
            shard, options, needs, precision = ctx.call
            if torch.is_grad_enabled():
                raise NotImplementedError(f"{op.name}: no second-order gradients over a tensor-parallel group")
            x, *others = ctx.saved_tensors
            saved = [None if x is None else shard.gathered(x), *others]
            with nullcontext() if precision is None else precision:
                dx, *grads = gradients(shard.gathered(dy), saved, options, asked(needs, saved))
            return (None, None, None, None if dx is None else shard.reduced(dx), *grads)

    function = named(Across, op, "Across")

    def across(shard, options, *tensors: Tensor | None) -> Tensor:
        needs = wanted(tensors)
        return function.apply(shard, options if needs else apply.for_inference(options), needs, *tensors)

    return across
