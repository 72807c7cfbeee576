"""The autograd Functions around an op's two library ops, and the entry point that calls the Function that fits.

| caller | Function |
|---|---|
| eager mode | Eager |
| torch.compile | Functional |
| torch.func | Transformed, which is Functional with an error for forward-mode AD |
| a graph with the library op | Bare |
| backward of any of these under create_graph | Backward |
| a tensor-parallel block | Across: the collectives and the op |

`needs` is the needs_input_grad mask, a bitmask over the tensors. A gradient outside of it costs no GEMM. Eager backward also
leaves out what the running pass does not ask for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch
from torch import _C, Tensor
from torch._C._functorch import is_legacy_batchedtensor, unwrap_if_dead
from torch.compiler import is_compiling

from ... import state
from ...frozen import Frozen
from ...state import Observed
from ...subclasses import PLAIN, own_dispatch
from ..dispatch.choices import autocast_off, compose_of, setting
from .gradients import (
    THREAD,
    Delayed,
    Late,
    Left,
    Process,
    Room,
    Stash,
    arrived,
    formed,
    into_main_grad,
    is_first_of_several,
    is_late,
    is_valid,
    stash_limit,
    versions_of,
)
from .library import LIBRARY, Registered, call_backward, call_forward, register, replaced, unpack, values_of
from .op import Op, OpTensors, asked, call_of, needed, run_backward, run_forward, to_save, wanted

DISPATCHED = int(Observed.MODES | Observed.PROFILER | Observed.SUBCLASS)
_OBSERVED = DISPATCHED | int(Observed.TRANSFORMS | Observed.BATCHED)
_TRANSFORMS, _SUBCLASS = int(Observed.TRANSFORMS), int(Observed.SUBCLASS)
_WRAPPED, _MAIN_GRAD, _HOOKS = int(Observed.WRAPPED), int(Observed.MAIN_GRAD), int(Observed.HOOKS)


def _without_frozen(seen: int, tensors: OpTensors) -> int:
    """Returns what `state.observe` saw, without subclasses if all are Frozen: these need no dispatch, because an op's body
    dequantises them."""
    return seen & ~_SUBCLASS if all(type(t) is Frozen or type(t) in PLAIN for t in tensors) else seen


class Bodies:
    """Process-wide switch: ops run as their bodies, whatever observes them. Backward has threads of its own."""

    seen = False


def bodies_seen() -> contextlib.AbstractContextManager[None]:
    """Shows dispatch modes inside what an op's body calls, instead of the library op around it."""
    return setting("seen", True, Bodies)


def runs_directly(seen: int) -> bool:
    """Returns whether backward runs an op's body without the library op around it. seen: what `observe` saw."""
    return not seen & _OBSERVED or (Bodies.seen and not seen & (_OBSERVED & ~DISPATCHED))


def returned(op: type[Op], results):
    """Returns y, or a tuple of all results that have a gradient."""
    more = op.more_results
    return tuple(results[: 1 + len(more)]) if more else results[0]


def _second_order(op, dy, flat, options, needs, cotangents):
    """Computes the gradients of <cotangents, backward(dy, tensors)> with respect to dy and `flat`: the saved tensors, then the
    gradients of more results.

    backward(dy, t) is the vector-Jacobian product f'(t)^T dy of the reference, for the tensors that `needs` names. So these
    gradients are its vector-Jacobian product, which torch.func forms from the reference's second derivative.
    """
    more = len(op.more_results)
    tensors, saved = call_of(op, flat, options)
    tensors, decided = list(tensors), {name: saved[name] for name in op.decisions}
    if tensors[0] is None:
        tensors[0] = op.missing_input(dy, tensors, options)
    wanted = [i for i in range(len(tensors)) if needed(needs, i)]
    variables = [i for i, t in enumerate(tensors) if t is not None and t.is_floating_point() and type(t) is not Frozen]

    def first_order(dys, *values):
        by_place = dict(enumerate(tensors)) | dict(zip(variables, values, strict=True))

        def y(*some):
            return op.reference([*(by_place | dict(zip(wanted, some, strict=True))).values()], options, **decided)

        return torch.func.vjp(y, *(by_place[i] for i in wanted))[1](dys)

    dys = (dy, *flat[len(flat) - more :]) if more else dy
    _, pull = torch.func.vjp(first_order, dys, *(tensors[i] for i in variables))
    filled = [torch.zeros_like(tensors[i]) if cotangents[i] is None else cotangents[i] for i in wanted]
    ddys, *others = pull(tuple(filled))
    grads = dict(zip(variables, others, strict=True))
    ddy, *ddmore = ddys if more else (ddys,)
    grads |= {len(flat) - more + i: gradient for i, gradient in enumerate(ddmore)}
    return ddy, [None if t is None else grads.get(i) for i, t in enumerate(flat)]


def named(function: type, op: type[Op], suffix: str) -> type:
    """Sets the name of the Function from the op's, and that of its node, which shows in grad_fn, profiles and anomaly mode."""
    node = function._backward_cls
    function.__name__ = function.__qualname__ = f"{op.__name__}{suffix}Function"
    node.stash = None  # where the first of two passes leaves gradients in a ctx
    node.__name__ = node.__qualname__ = f"{function.__name__}Backward"
    return function


def _gradients(registered: Registered):
    """Builds the function that the backward of every Function below calls."""
    op = registered.op

    class Backward(torch.autograd.Function):
        """Autograd Function of the backward op, itself differentiable."""

        generate_vmap_rule = True

        @staticmethod
        def forward(options, needs, dy, *flat):
            return tuple(call_backward(registered, dy, flat, options, needs))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.options, ctx.needs, *tensors = inputs
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, *cotangents):
            dy, *flat = ctx.saved_tensors
            with _C._DisableAutocast():  # as in the bodies of the ops
                ddy, grads = _second_order(op, dy, flat, ctx.options, ctx.needs, cotangents)
            return None, None, ddy, *grads

    second_order = named(Backward, op, "Backward")

    def gradients(dy, flat, options, needs):
        """Computes one gradient per tensor, None where not needed; differentiable only under create_graph."""
        if torch.is_grad_enabled():
            if flat[0] is None and needed(needs, 0):  # else the gradient of x would have no graph to x
                op.missing_input(dy, call_of(op, flat, options)[0], options)
            grads = second_order.apply(options, needs, dy, *flat)
        else:
            compiling = is_compiling()
            seen = _OBSERVED if compiling else state.observe((dy, *flat))
            if seen & _SUBCLASS and not compiling:
                seen = _without_frozen(seen, (dy, *flat))
            if not seen & _OBSERVED or runs_directly(seen):
                return run_backward(op, dy, flat, options, needs, seen)
            grads = call_backward(registered, dy, flat, options, needs)
            # not in a compiled graph or under vmap, where dy is a placeholder or a batch
            if not (compiling or _C._are_functorch_transforms_active() or is_legacy_batchedtensor(dy)):
                grads = [into_main_grad(flat[i], g) if needs >> i & 1 else g for i, g in enumerate(grads)]
        return [g if needs >> i & 1 else None for i, g in enumerate(grads)]

    return gradients


def _eager_function(registered: Registered, gradients) -> type:
    """Builds the classic Function, which takes the least host time."""
    op = registered.op

    class Eager(torch.autograd.Function):
        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(
                f"{op.name}: forward-mode AD is not supported; use reverse mode (jacrev, vjp, grad)"
            )

        @staticmethod
        def forward(ctx, call, *tensors):
            """Runs the op. call: (options, needs, what `observe` saw of the tensors, saved), one argument because each costs
            host time. saved: a list that receives what the library op returns besides its results, where a graph calls it
            (Bare)."""
            options, needs, seen, saved = call
            more = op.more_results
            if saved is not None:
                with _C._AutoDispatchBelowAutograd():
                    results = call_forward(registered, tensors, options)
                saved += results[1 + len(more) :]
            elif seen & DISPATCHED and not Bodies.seen:
                results = call_forward(registered, tensors, options)
            else:
                results = run_forward(op, tensors, options, seen)
            weights = None
            if seen & _MAIN_GRAD:  # by place: saved-tensor hooks, a checkpoint's too, return detached tensors
                weights = {i: t for i, t in enumerate(tensors) if hasattr(t, "main_grad")}
            ctx.call = options, needs, state.Precision(), weights, bool(seen & _HOOKS)
            ctx.save_for_backward(*to_save(op, tensors, results, options, needs))
            if not more:
                return results[0]
            results = tuple(results[: 1 + len(more)])
            ctx.set_materialize_grads(False)  # backward makes zeros for results without a gradient
            ctx.results = [(t.shape, t.dtype, t.device) for t in results]
            return results

        @staticmethod
        def backward(ctx, dy, *more):
            options, needs, precision, weights, _ = ctx.call
            upstream = (dy, *more)
            if ctx.stash is not None:
                with precision:
                    if grads := _from_stash(ctx, upstream):
                        return (None, *grads)
            if more:
                dy, *more = (
                    torch.zeros(shape, dtype=dtype, device=device) if t is None else t
                    for t, (shape, dtype, device) in zip(upstream, ctx.results, strict=True)
                )
            flat = (*ctx.saved_tensors, *more) if more else ctx.saved_tensors
            if weights:
                flat = [t if t is None else weights.get(i, t) for i, t in enumerate(flat)]
            with precision:
                if not is_compiling() and (Process.by_hand or state.asked() is not None):
                    return (None, *_in_parts(ctx, op, gradients, upstream, dy, flat, options, needs))
                return (None, *gradients(dy, flat, options, needs))

    return named(Eager, op, "")


def _from_stash(ctx, upstream: tuple) -> list[Tensor | None] | None:
    """Returns the gradients that the second of two passes asks for, if the first left them for the same gradients of the
    results; else None."""
    left, ctx.stash = ctx.stash, None
    edges = None if is_compiling() or torch.is_grad_enabled() else state.asked()
    if edges is None:
        return None
    places = [i for i, edge in zip(left.edges, edges, strict=True) if edge]
    same = all(
        t is before and versions_of([t]) == version
        for t, (before, version) in zip(upstream, left.upstream, strict=True)
    )
    if not same or not all(i in left.grads and is_valid(left.grads[i]) for i in places):
        return None
    taken = {i: formed(left.grads.pop(i)) for i in places}
    ctx.stash = left if left.grads else None
    return [taken.get(i) for i in range(left.count)]


def _in_parts(
    ctx, op: type[Op], gradients, upstream: tuple, dy: Tensor, flat, options, needs: int
) -> list[Tensor | None]:
    """Computes the gradients of a pass that does not ask for all, or that leaves weights to `flush`.

    upstream: the gradients of the results, None where there is none; dy: the first, zeros if it is None.
    """
    wanted, by_hand = asked(needs, flat), Process.by_hand
    seen = _without_frozen(state.observe((dy, *flat)), (dy, *flat))
    if by_hand is not None and not any(map(by_hand.takes, flat)):
        by_hand = None
    limit = torch.inf if by_hand else stash_limit(values_of(options, "workspace"))
    if (
        torch.is_grad_enabled()
        or not runs_directly(seen)
        or not (by_hand or (limit and wanted & 1 and wanted != needs and is_first_of_several()))
    ):
        return gradients(dy, flat, options, wanted)
    stash = Stash(limit, () if ctx.call[4] else flat)  # tensors from hooks are in memory for this pass alone
    with setting("stash", stash, THREAD):
        grads = list(run_backward(op, dy, flat, options, wanted if by_hand else needs, seen))
    places = [i for i in range(len(grads)) if wanted >> i & 1]
    if not all(is_valid(grads[i]) for i in places):
        return gradients(dy, flat, options, wanted)
    if by_hand:
        for i, grad in enumerate(grads):
            if isinstance(grad, Delayed) and by_hand.takes(flat[i]):
                by_hand.queue.append((flat[i], grad, ctx.call[2]))
                grads[i] = None
        return [formed(grad) for grad in grads]
    others = {i: grad for i, grad in enumerate(grads) if needs & ~wanted & 1 << i}
    if stash.holds(others.values()) and all(map(is_valid, others.values())):
        edges = [i for i, t in enumerate(flat[: len(grads)]) if i == 0 or t is not None]
        ctx.stash = Left([(t, versions_of([t])) for t in upstream], edges, len(grads), others, Room(stash.bytes))
    elif any(isinstance(grads[i], Delayed) for i in places):
        return gradients(dy, flat, options, wanted)
    return [formed(grad) if wanted >> i & 1 else None for i, grad in enumerate(grads)]


def build(op: type[Op]):
    """Registers the op; returns `apply(options, *tensors) -> y`, or a tuple of all results, which calls the Function that fits.
    `parts` is for `across_ranks`. Functional has a setup_context, for torch.compile; Transformed is the same for torch.func."""
    registered = register(op)
    gradients = _gradients(registered)
    eager = _eager_function(registered, gradients)
    bare = named(type("Bare", (eager,), {}), op, "Op")

    def kernel(tensors, *lists):
        """Runs the library op, with a classic Function around it, for graphs that call the op itself."""
        if needs := wanted(tensors):
            saved: list[Tensor] = []
            results = bare.apply((unpack(registered.layout, lists), needs, _MAIN_GRAD | _HOOKS, saved), *tensors)
            return [*(results if isinstance(results, tuple) else (results,)), *saved]
        with _C._AutoDispatchBelowAutograd():
            return registered.fwd(tensors, *lists)

    LIBRARY.impl(f"{op.name}_fwd", kernel, "Autograd")

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(options, needs, *tensors):
            return tuple(call_forward(registered, tensors, options))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.options, ctx.needs, *tensors = inputs
            more = len(op.more_results)
            ctx.mark_non_differentiable(*output[1 + more :])
            ctx.set_materialize_grads(more > 0)  # backward reads zeros for unused results
            ctx.save_for_backward(*to_save(op, tensors, output, ctx.options, ctx.needs))

        @staticmethod
        def backward(ctx, dy, *others):
            more = others[: len(op.more_results)]
            return None, None, *gradients(dy, (*ctx.saved_tensors, *more), ctx.options, ctx.needs)

    class Transformed(Functional):  # Dynamo does not trace a Function with a jvp
        jvp = staticmethod(eager.jvp)

    functional, transformed = named(Functional, op, "Functional"), named(Transformed, op, "Transformed")
    constants = sum(1 << i for i in op.constants)
    # Skips torch's Function.apply, which looks for a setup_context and for transforms (5 % of a tiny mlp's host time).
    apply_eager = super(torch.autograd.Function, eager).apply

    def for_inference(options):
        return replaced(options, recompute=op.inference_recompute)

    def apply(options, *tensors):
        compiling = is_compiling()
        seen = 0 if compiling else state.observe(tensors)
        if seen & _SUBCLASS:
            seen = _without_frozen(seen, tensors)
        if (compiling or seen & _SUBCLASS) and (kind := own_dispatch(tensors)):
            compose_of(op.name, kind)
            with autocast_off(tensors[0]):
                return op.reference(tensors, options)
        if _C._are_functorch_transforms_active() if compiling else seen & _TRANSFORMS:
            if compiling:
                raise NotImplementedError(f"{op.name}: torch.compile of a torch.func transform is not supported")
            present = sum(
                1 << i
                for i, t in enumerate(tensors)
                if t is not None and t.is_floating_point() and type(t) is not Frozen
            )
            return returned(op, transformed.apply(options, present & ~constants, *tensors))
        if compiling:
            needs = wanted(tensors)
            if not needs:
                # without gradients Dynamo would pass a ctx to forward(*args), which does not take it
                return returned(op, call_forward(registered, tensors, for_inference(options)))
            # views replace repeated tensors: Dynamo refuses one tensor as two arguments of a Function
            tensors = tuple(
                t.view_as(t) if t is not None and any(t is earlier for earlier in tensors[:i]) else t
                for i, t in enumerate(tensors)
            )
            return returned(op, functional.apply(options, needs, *tensors))
        if seen & _WRAPPED:
            tensors = [t if t is None else unwrap_if_dead(t) for t in tensors]
            seen = _without_frozen(state.observe(tensors), tensors)
        needs = seen >> state.NEEDS if len(tensors) <= state.MOST_NEEDS else wanted(tensors)
        return apply_eager((options if needs else for_inference(options), needs, seen, None), *tensors)

    apply.parts, apply.for_inference = (registered, gradients), for_inference
    return apply


# -- an op over several ranks, each with a shard of its weights


def across_ranks(apply) -> Callable[..., Tensor]:
    """Builds across(shard, options, residual, x, *tensors) -> y from an op that `build` returned:

        y = [x +] reduced(f(gathered(x))),   dx = [dy +] reduced(f'(gathered(dy)))

    Saves x itself, not the gathered x. The collective of dy runs under what is recomputed from x, that of dx under the matmuls
    of the weights' gradients (as in Megatron-LM's linear layers). Where dx goes to another such Function only, it is passed on
    as `Late`, so that its collective also runs under what that Function recomputes.
    """
    registered, gradients = apply.parts
    op = registered.op

    class Across(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard, options, residual, needs, x, *others):
            tensors, compiling = (shard.gathering(x)(), *others), is_compiling()
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
            if torch.is_grad_enabled():
                raise NotImplementedError(
                    f"{op.name}: second-order gradients are not supported over a tensor-parallel group"
                )
            shard, options, residual, needs, precision = ctx.call
            with contextlib.nullcontext() if precision is None else precision:
                x, *others = ctx.saved_tensors
                observed = x if is_late(dy) else dy, x, *others
                seen = DISPATCHED if is_compiling() else state.observe(observed)
                dtype, directly = options.dtype if residual else dy.dtype, runs_directly(seen)
                gathering = None if x is None else shard.gathering(x)
                if not directly:
                    df = shard.gathering(arrived(dy).to(dtype))()
                elif shard.sequence:  # df is waited for where it is first read
                    shape = *dy.shape[:-2], shard.whole_rows(dy), dy.shape[-1]
                    df = Late(shape, dtype, dy.device, shard.gathering(arrived(dy).to(dtype)))
                else:
                    df = (
                        Late(dy.shape, dtype, dy.device, lambda: arrived(dy).to(dtype)) if is_late(dy) else dy.to(dtype)
                    )
                saved = [None if gathering is None else gathering(), *others]
                needs = asked(needs, saved)
                if directly and needs & 1:
                    return (None, None, None, None, *_overlapped(ctx, dy, df, saved, needs, seen))
                dx, *grads = gradients(arrived(df), saved, options, needs)
                if dx is not None:
                    dx = shard.reducing(dx)()
                    dx = dx + arrived(dy).to(dx.dtype) if residual else dx
                return (None, None, None, None, dx, *grads)

    def _overlapped(ctx, dy, df, saved, needs, seen):
        """Computes the gradients, with the collective of dx under the matmuls of the weights' gradients, which wait as far as
        their operands fit the workspace."""
        shard, options, residual, _, _ = ctx.call
        limit = max(values_of(options, "workspace"), default=0)
        with setting("stash", Stash(limit, saved, spills=True), THREAD):
            dx, *grads = run_backward(op, df, saved, options, needs, seen)
        if not all(map(is_valid, grads)):  # a body overwrote their operands
            dx, *grads = gradients(arrived(df), saved, options, needs)
        reduced, held = shard.reducing(dx), dx.nbytes + dy.nbytes
        grads, added = [formed(grad) for grad in grads], dy if residual else None  # finish() holds dy only to add it

        def finish():
            whole = reduced()
            return whole if added is None else whole.add_(arrived(added).to(whole.dtype))

        # passed on late if x's gradient goes to a node that takes it so, and nothing else sees it: no hook of x, no x.grad, and
        # no pass that asks for some gradients only
        goes_on = (x := ctx.x()) is not None and getattr(ctx.next_functions[0][0], "takes_late", False)
        if held <= limit and goes_on and not (x._backward_hooks or x.retains_grad or state.asked() is not None):
            return [Late(x.shape, dx.dtype, dx.device, finish), *grads]
        return [finish(), *grads]

    function = named(Across, op, "Across")
    function._backward_cls.takes_late = True

    def across(shard, options, residual, *tensors):
        needs = wanted(tensors)
        return function.apply(shard, options if needs else apply.for_inference(options), residual, needs, *tensors)

    return across
