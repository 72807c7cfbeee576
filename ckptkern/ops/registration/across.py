"""An op over several ranks, each with a shard of its weights: the collectives and the op as one autograd Function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from ... import state
from .codec import values_of
from .delayed import Stash, formed, is_valid, stashing, workspace_limit
from .functions import DISPATCHED, named, runs_directly
from .library import call_forward
from .needs import asked, wanted
from .op import direct_backward, direct_forward, to_save


def across_ranks(apply) -> Callable[..., Tensor]:
    """across(shard, options, x, *tensors) -> y of an op that `build` made:

        y = reduced(f(gathered(x))),   dx = reduced(f'(gathered(dy)))

    What is saved of x is x itself, not what was gathered of it. The collective of dx runs under the matmuls that give the
    weights' gradients (as in Megatron-LM's linear layers)."""
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
                dx, *grads = _overlapped(shard, shard.gathered(dy), saved, options, asked(needs, saved))
            return (None, None, None, dx, *grads)

    def _overlapped(shard, dy: Tensor, saved: list, options, needs: int) -> list[Tensor | None]:
        """The gradients, with the collective of dx under the matmuls of the weights' gradients, whose operands are there. They
        wait as far as they fit the workspace."""
        seen = 0 if torch.compiler.is_compiling() else state.observe((dy, *saved))
        if torch.compiler.is_compiling() or not needs & 1 or not runs_directly(seen):
            dx, *grads = gradients(dy, saved, options, needs)
            return [None if dx is None else shard.reduced(dx), *grads]
        with stashing(Stash(workspace_limit(values_of(options, "workspace")), saved, spills=True)):
            dx, *grads = direct_backward(op, dy, saved, options, needs, seen)
        if not all(map(is_valid, grads)):  # a body used their memory anew
            dx, *grads = gradients(dy, saved, options, needs)
        reduced = shard.reducing(dx)
        grads = [formed(grad) for grad in grads]
        return [reduced(), *grads]

    function = named(Across, op, "Across")

    def across(shard, options, *tensors: Tensor | None) -> Tensor:
        needs = wanted(tensors)
        return function.apply(shard, options if needs else apply.for_inference(options), needs, *tensors)

    return across
