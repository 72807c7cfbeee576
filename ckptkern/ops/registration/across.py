"""An op over several ranks, each with a shard of its weights: the collectives and the op as one autograd Function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from ... import state
from .functions import DISPATCHED, named, runs_directly
from .gradients import Late, Stash, arrived, formed, is_late, is_valid, stashing, workspace_limit
from .library import call_forward, values_of
from .op import asked, run_backward, run_forward, to_save, wanted


def across_ranks(apply) -> Callable[..., Tensor]:
    """across(shard, options, residual, x, *tensors) -> y of an op that `build` made:

        y = [x +] reduced(f(gathered(x))),   dx = [dy +] reduced(f'(gathered(dy)))

    What is saved of x is x itself, not what was gathered of it. The collective of dy runs under what is recomputed from x, that
    of dx under the matmuls that give the weights' gradients (as in Megatron-LM's linear layers). Where dx goes to another such
    Function and to nothing else, it is handed on `Late`, so that its collective also runs under what that one recomputes."""
    registered, gradients = apply.parts
    op = registered.op

    class Across(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard, options, residual, needs, x, *others):
            tensors, compiling = (shard.gathering(x)(), *others), torch.compiler.is_compiling()
            seen = 0 if compiling else state.observe(tensors)
            if compiling or seen & DISPATCHED:
                results = call_forward(registered, tensors, options)
            else:
                results = run_forward(op, tensors, options, seen)
            if not compiling:
                ctx.x = weakref.ref(x)
            ctx.call = shard, options, residual, needs, None if compiling else state.Precision()
            first, *saved = to_save(op, tensors, results, options, needs)
            ctx.save_for_backward(None if first is None else x, *saved)
            y = shard.reducing(results[0])()
            return x + y if residual else y

        @staticmethod
        def backward(ctx, dy):
            precision = ctx.call[-1]
            if torch.is_grad_enabled():
                raise NotImplementedError(f"{op.name}: no second-order gradients over a tensor-parallel group")
            with nullcontext() if precision is None else precision:
                dx, *grads = _backward(ctx, dy)
            return (None, None, None, None, dx, *grads)

    def _backward(ctx, dy: Tensor) -> list[Tensor | None]:
        shard, options, residual, needs, _ = ctx.call
        x, *others = ctx.saved_tensors
        seen = DISPATCHED if torch.compiler.is_compiling() else state.observe((x if is_late(dy) else dy, x, *others))
        dtype, directly = options.dtype if residual else dy.dtype, runs_directly(seen)
        gathering = None if x is None else shard.gathering(x)
        if not directly:
            df = shard.gathering(arrived(dy).to(dtype))()
        elif shard.sequence:  # a collective writes it, which is waited for where it is first read
            shape = *dy.shape[:-2], shard.whole_rows(dy), dy.shape[-1]
            df = Late(shape, dtype, dy.device, shard.gathering(arrived(dy).to(dtype)))
        else:
            df = Late(dy.shape, dtype, dy.device, lambda: arrived(dy).to(dtype)) if is_late(dy) else dy.to(dtype)
        saved = [None if gathering is None else gathering(), *others]
        needs = asked(needs, saved)
        if directly and needs & 1:
            return _overlapped(ctx, dy, df, saved, needs, seen)
        dx, *grads = gradients(arrived(df), saved, options, needs)
        if dx is not None:
            dx = shard.reducing(dx)()
            dx = dx + arrived(dy).to(dx.dtype) if residual else dx
        return [dx, *grads]

    def _overlapped(ctx, dy: Tensor, df: Tensor, saved: list, needs: int, seen: int) -> list[Tensor | None]:
        """The gradients, with the collective of dx under the matmuls of the weights' gradients, whose operands are there. They
        wait as far as they fit the workspace."""
        shard, options, residual, _, _ = ctx.call
        limit = workspace_limit(values_of(options, "workspace"))
        with stashing(Stash(limit, saved, spills=True)):
            dx, *grads = run_backward(op, df, saved, options, needs, seen)
        if not all(map(is_valid, grads)):  # a body used their memory anew
            dx, *grads = gradients(arrived(df), saved, options, needs)
        reduced, held = shard.reducing(dx), dx.nbytes + dy.nbytes
        grads, added = [formed(grad) for grad in grads], dy if residual else None  # finish holds dy only if it reads it

        def finish() -> Tensor:
            whole = reduced()
            return whole if added is None else whole.add_(arrived(added).to(whole.dtype))

        if held <= limit and (x := _handed_on(ctx)) is not None:
            return [Late(x.shape, dx.dtype, dx.device, finish), *grads]
        return [finish(), *grads]

    function = named(Across, op, "Across")
    function._backward_cls.takes_late = True

    def across(shard, options, residual: bool, *tensors: Tensor | None) -> Tensor:
        needs = wanted(tensors)
        return function.apply(shard, options if needs else apply.for_inference(options), residual, needs, *tensors)

    return across


def _handed_on(ctx) -> Tensor | None:
    """x, if its gradient goes to a node that takes late ones, and nothing else sees it: no hook of x, no x.grad, and no call
    that asks for some gradients alone."""
    x = ctx.x()
    if x is None or not getattr(ctx.next_functions[0][0], "takes_late", False):
        return None
    return None if x._backward_hooks or x.retains_grad or state.asked() is not None else x
