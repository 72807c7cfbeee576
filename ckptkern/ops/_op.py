"""The factory that every op is made with: one description becomes two library ops and the Functions around them.

An op is (tensors, options) -> y, with some tensors saved for backward. From its description come
- `ckptkern::NAME_fwd(tensors, options) -> [y, *saved]` and `ckptkern::NAME_bwd(dy, tensors, saved, options, needs) ->
  gradients`, raw functional library ops, so that torch.compile, FLOP counters and selective checkpointing see them. Fakes
  and FLOPs are what the op's own body gives on meta tensors, with PyTorch ops;
- a classic autograd Function for eager mode, the quickest on the host; it calls the op's body directly if nothing
  observes the op;
- a `setup_context` Function with a generated vmap rule for torch.compile and torch.func;
- the classic Function also as the op's Autograd kernel, for graphs that call the op itself, such as torch.export's;
- a Function over the backward op, whose own backward differentiates the op's reference implementation, so that
  second-order gradients are right.

| who calls | Function |
|---|---|
| eager mode | Eager |
| torch.compile | Functional |
| torch.func | Transformed, which is Functional with an error for forward-mode AD |
| a graph with the library op | Bare |
| backward of any of these under create_graph | Backward |

`needs` is the needs_input_grad mask, a bitmask over the tensors (_needs.py). What it leaves out costs no GEMM. Op bodies run
with autocast off and cast weights inside, so that a cast copy never lives from forward to backward; the public function
casts x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, unwrap_if_dead
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from .. import state
from ..subclasses import PLAIN, foreign
from . import _codec
from ._batching import in_legacy_vmap, loop_over_batch
from ._choices import autocast_off, compose_of, no_autocast, read_precision
from ._gradients import having_main_grad, into_main_grad, without_main_grad
from ._needs import joined, needed, present, split, wanted

LIBRARY = torch.library.Library("ckptkern", "FRAGMENT")


class Op:
    """What an op is. Subclasses give these attributes and methods; `build()` makes it callable.

    name       the op's word, as users know it
    Options    a NamedTuple of what is no tensor: recompute, backend, precision and so on (`_codec.pack` says of which types)
    constants  places of tensors without a gradient; torch.func cannot tell and asks for all
    """

    name: str
    Options: type
    constants: frozenset[int] = frozenset()
    inference_recompute = "full"  # the mode in which forward writes nothing for a backward

    @staticmethod
    def saves(options) -> tuple[str, ...]:
        """What forward saves for backward besides tensors: the one declaration of it. "y" is the result itself."""
        return ()

    @staticmethod
    def reads_x(options, needs: int) -> bool:
        """Does backward read the first tensor? If not, it is not saved."""
        return True

    @staticmethod
    def forward(tensors: Sequence[Tensor | None], options) -> tuple[Tensor, dict[str, Tensor]]:
        """(y, what it saves by name, at least what `saves` names)."""
        raise NotImplementedError

    @staticmethod
    def backward(
        dy: Tensor, tensors: Sequence[Tensor | None], saved: dict[str, Tensor], options, needs: int
    ) -> Sequence:
        """A gradient for each tensor; None where it is not needed, or was added to a main_grad."""
        raise NotImplementedError

    @staticmethod
    def made_on_meta(x: Tensor, made: dict[str, Tensor], options) -> dict[str, Tensor]:
        """What forward saves by name, from what it gives in PyTorch ops on meta tensors, if kernels give other shapes."""
        return made

    @staticmethod
    def reference(tensors: Sequence[Tensor | None], options) -> Tensor:
        """y in differentiable PyTorch ops: the definition of second-order gradients."""
        raise NotImplementedError

    @classmethod
    def missing_input(cls, dy: Tensor, tensors: Sequence[Tensor | None], options) -> Tensor:
        """Stands in for an x that was not saved, when the reference is differentiated; raises if that needs it."""
        raise RuntimeError(
            f"{cls.name}: second-order gradients need the input, which was not saved because the weight that reads it "
            f"is frozen; use recompute='full', outside of a checkpoint"
        )


class _Call(NamedTuple):
    """The arguments of an op's backward: what was saved, split into its tensors and what forward made."""

    tensors: Sequence[Tensor | None]
    saved: dict[str, Tensor]


def to_save(op: type[Op], tensors: Sequence, results: Sequence, options, needs: int) -> list:
    """The flat list of tensors that backward is given, from the op's tensors and results [y, *saved]."""
    y, *made = results
    x, *others = tensors
    made = iter(made)
    saved = [y if name == "y" else next(made) for name in op.saves(options)]
    return [x if op.reads_x(options, needs) else None, *others, *saved]


def _call(op: type[Op], flat: Sequence, options) -> _Call:
    """The inverse of `to_save`."""
    names = op.saves(options)
    count = len(flat) - len(names)
    return _Call(flat[:count], dict(zip(names, flat[count:], strict=True)))


def run_forward(op: type[Op], tensors: Sequence, options) -> list[Tensor]:
    """[y, *saved] by the op's body."""
    return _results(op, options, *op.forward(tensors, options))


def _results(op: type[Op], options, y: Tensor, made: dict[str, Tensor]) -> list[Tensor]:
    return [y, *(made[name] for name in op.saves(options) if name != "y")]


def _watched(tensors) -> bool:
    """Does anything observe the op: the compiler, a transform, a mode, the profiler, a tensor subclass?

    The first tensor may be a batch of gradients (torch.autograd.grad's is_grads_batched), which shows in no transform.
    """
    return _traced(tensors[0]) or dispatched(tensors)


def _traced(x: Tensor) -> bool:
    """Does x stand for others: of a graph that is compiled, or of a batch?"""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or is_legacy_batchedtensor(x)


def dispatched(tensors) -> bool:
    """The same where `apply` has ruled out the compiler and transforms."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
        or not PLAIN.issuperset(map(type, tensors))
    )


def direct_forward(op: type[Op], tensors: Sequence, options) -> list[Tensor]:
    """[y, *saved] by the op's body, as the dispatcher would run it, which takes a tenth of a tiny mlp's host time itself."""
    if no_autocast(tensors[0]):
        return run_forward(op, tensors, options)
    with torch._C._DisableAutocast():
        return run_forward(op, tensors, options)


def direct_backward(op: type[Op], dy: Tensor, flat: Sequence, options, needs: int) -> Sequence[Tensor | None]:
    """The gradients, likewise."""
    tensors, saved = _call(op, flat, options)
    if no_autocast(dy):
        return op.backward(dy, tensors, saved, options, needs)
    with torch._C._DisableAutocast():
        return op.backward(dy, tensors, saved, options, needs)


def _distinct(tensors: tuple) -> tuple:
    """tensors with a view in place of each repetition: Dynamo refuses one tensor as two arguments of a Function."""
    return tuple(
        t.view_as(t) if t is not None and any(t is earlier for earlier in tensors[:i]) else t
        for i, t in enumerate(tensors)
    )


def _second_order(op, dy, flat, options, needs, cotangents):
    """Gradients of dy and of `flat` (the saved tensors) of <cotangents, backward(dy, tensors)>.

    backward(dy, t) is the vector-Jacobian product of the reference, f'(t)^T dy, for the tensors that `needs` names; so this is
    the vector-Jacobian product of that, which torch.func forms from the reference's second derivative.
    """
    tensors = list(_call(op, flat, options).tensors)
    if tensors[0] is None:
        tensors[0] = op.missing_input(dy, tensors, options)
    wanted = [i for i in range(len(tensors)) if needed(needs, i)]
    variables = [i for i, t in enumerate(tensors) if t is not None and t.is_floating_point()]

    def filled(places, values) -> list[Tensor | None]:
        by_place = dict(zip(places, values, strict=True))
        return [by_place.get(i, t) for i, t in enumerate(tensors)]

    def first_order(dy, *values):
        tensors = filled(variables, values)

        def y(*some):
            by_place = dict(zip(wanted, some, strict=True))
            return op.reference([by_place.get(i, t) for i, t in enumerate(tensors)], options)

        return torch.func.vjp(y, *(tensors[i] for i in wanted))[1](dy)

    _, pull = torch.func.vjp(first_order, dy, *(tensors[i] for i in variables))
    given = [torch.zeros_like(tensors[i]) if cotangents[i] is None else cotangents[i] for i in wanted]
    ddy, *others = pull(tuple(given))
    grads = dict(zip(variables, others, strict=True))
    return ddy, [None if t is None else grads.get(i) for i, t in enumerate(flat)]


def _on_meta(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]


def _in_torch_ops(options) -> Any:
    """The options with which an op's body runs in PyTorch ops, all tokens at once."""
    return _codec.replaced(options, backend="eager", fused="", workspace=None)


class _Registered(NamedTuple):
    """An op with the two library ops that were made of it."""

    op: type[Op]
    fwd: torch._ops.OpOverload
    bwd: torch._ops.OpOverload
    layout: _codec.Layout  # of its options


def call_forward(registered: _Registered, tensors: Sequence, options) -> Sequence[Tensor]:
    """[y, *saved] by the library op."""
    return registered.fwd(tensors, *_codec.pack(registered.layout, options))


def build(op: type[Op]):
    """Register the op; returns `apply(options, *tensors) -> y`, whose `parts` are for _across."""
    registered = _register(op)
    gradients = _gradients(registered, _backward_function(registered))
    eager = _eager_function(registered, gradients)
    functional, transformed = _functional_functions(registered, gradients)
    LIBRARY.impl(f"{op.name}_fwd", _autograd_kernel(registered, _bare_function(registered, eager)), "Autograd")
    apply = _apply(registered, eager, functional, transformed)
    apply.parts = registered, gradients
    return apply


def _register(op: type[Op]) -> _Registered:
    """Schemas, bodies, fakes, vmap rules and FLOP formulas of the two library ops."""
    names, layout = (f"{op.name}_fwd", f"{op.name}_bwd"), _codec.layout_of(op.Options)
    LIBRARY.define(f"{names[0]}(Tensor?[] tensors, {_codec.SCHEMA}) -> Tensor[]")
    LIBRARY.define(
        f"{names[1]}(Tensor dy, Tensor?[] tensors, Tensor?[] saved, {_codec.SCHEMA}, int[] needs) -> Tensor[]"
    )
    packets = tuple(getattr(torch.ops.ckptkern, name) for name in names)

    def options_of(lists: Sequence) -> Any:
        options = _codec.unpack(layout, lists)
        if "auto" in _codec.values_of(
            options, "precision"
        ):  # a compiled graph's, which reads torch's setting when it runs
            options = _codec.replaced(options, precision=read_precision())
        return options

    def forward(tensors, *lists):
        with torch._C._DisableAutocast():
            return run_forward(op, tensors, options_of(lists))

    def backward(dy, tensors, saved, *lists_and_needs):
        *lists, needs = lists_and_needs
        options = options_of(lists)
        with torch._C._DisableAutocast():
            made = dict(zip(op.saves(options), saved, strict=True))
            grads = op.backward(dy, without_main_grad(tensors), made, options, joined(needs))
            return [dy.new_empty(0) if g is None else g for g in grads]

    def forward_on_meta(tensors, *lists):
        options = _codec.unpack(layout, lists)
        with torch._C._DisableAutocast():
            y, made = op.forward(_on_meta(tensors), _in_torch_ops(options))
            return _results(op, options, y, op.made_on_meta(tensors[0], made, options))

    def backward_on_meta(dy, tensors, saved, *lists_and_needs):
        *lists, needs = lists_and_needs
        options = _in_torch_ops(_codec.unpack(layout, lists))
        (dy,), tensors, saved = _on_meta([dy]), _on_meta(tensors), _on_meta(saved)
        with torch._C._DisableAutocast():
            made = dict(zip(op.saves(options), saved, strict=True))
            return op.backward(dy, tensors, made, options, joined(needs))

    for packet, body, on_meta in zip(packets, (forward, backward), (forward_on_meta, backward_on_meta), strict=True):
        name = packet.default._schema.name
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(name, _fake(on_meta), lib=LIBRARY)
        torch.library.register_vmap(name, loop_over_batch(packet.default), lib=LIBRARY)
        register_flop_formula(packet, get_raw=True)(_flops(on_meta))
    LIBRARY.impl(names[1], in_legacy_vmap(packets[1].default), "Batched")
    return _Registered(op, *(packet.default for packet in packets), layout)


def _fake(on_meta: Callable) -> Callable:
    """The op's results, empty, from its body on meta tensors."""

    def fake(first, *others):
        like = first if isinstance(first, Tensor) else next(t for t in first if t is not None)
        return [
            like.new_empty(0) if t is None else like.new_empty_strided(t.shape, t.stride(), dtype=t.dtype)
            for t in on_meta(first, *others)
        ]

    return fake


def _addmm_flops(total, a, b, *args, out_val=None, **kwargs) -> int:
    """torch counts addmm, and not addmm_."""
    return 2 * a.numel() * b.shape[1]


_addmm_flops._get_raw = True  # tensors, not their shapes


def _flops(on_meta: Callable) -> Callable:
    """The op's FLOPs, from its body on meta tensors: multiply-adds times two, as torch counts them."""

    def flops(*args, out_val=None):
        with (
            _disable_current_modes(),
            FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops}) as counter,
        ):
            on_meta(*args)
        return counter.get_total_flops()

    return flops


def named(function: type, op: type[Op], suffix: str) -> type:
    """Names the Function after the op, and its node too, whose name shows in grad_fn, profiles and anomaly mode."""
    node = function._backward_cls
    function.__name__ = function.__qualname__ = f"{op.__name__}{suffix}Function"
    node.__name__ = node.__qualname__ = f"{function.__name__}Backward"
    return function


def _backward_function(registered: _Registered) -> type:
    """A Function of the backward op, differentiable itself."""
    op, _, bwd, layout = registered

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(options, needs, dy, *flat):
            tensors, saved = _call(op, flat, options)
            return tuple(bwd(dy, tensors, list(saved.values()), *_codec.pack(layout, options), split(needs)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.options, ctx.needs, *tensors = inputs
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, *cotangents):
            dy, *flat = ctx.saved_tensors
            with torch._C._DisableAutocast():  # as in the bodies of the ops
                ddy, grads = _second_order(op, dy, flat, ctx.options, ctx.needs, cotangents)
            return None, None, ddy, *grads

    return named(Backward, op, "Backward")


def _gradients(registered: _Registered, second_order: type):
    """What the backward of every Function below calls."""
    op, _, bwd, layout = registered

    def gradients(dy, flat, options, needs):
        """One gradient per tensor, None where not needed; differentiable only under create_graph."""
        if torch.is_grad_enabled():
            if flat[0] is None and needed(needs, 0):  # else the gradient of x would come without a graph to x
                op.missing_input(dy, _call(op, flat, options).tensors, options)
            grads = second_order.apply(options, needs, dy, *flat)
        else:
            if not _watched((dy, *flat)):
                return direct_backward(op, dy, flat, options, needs)
            tensors, saved = _call(op, flat, options)
            grads = bwd(dy, tensors, list(saved.values()), *_codec.pack(layout, options), split(needs))
            if not _traced(dy):
                grads = [into_main_grad(flat[i], g) if needs >> i & 1 else g for i, g in enumerate(grads)]
        return [g if needs >> i & 1 else None for i, g in enumerate(grads)]

    return gradients


def _no_jvp(op: type[Op]):
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{op.name}: forward-mode AD is not supported; use reverse mode (jacrev, vjp, grad)")

    return staticmethod(jvp)


def _eager_function(registered: _Registered, gradients) -> type:
    """The classic Function: the quickest on the host."""
    op = registered.op

    class Eager(torch.autograd.Function):
        jvp = _no_jvp(op)

        @staticmethod
        def forward(ctx, options, needs, *tensors):
            if dispatched(tensors):
                results = call_forward(registered, tensors, options)
            else:
                results = direct_forward(op, tensors, options)
            ctx.call = options, needs, state.Precision(), having_main_grad(tensors)
            ctx.save_for_backward(*to_save(op, tensors, results, options, needs))
            return results[0]

        @staticmethod
        def backward(ctx, dy):
            options, needs, precision, weights = ctx.call
            flat = ctx.saved_tensors
            if weights:
                flat = [t if t is None else weights.get(i, t) for i, t in enumerate(flat)]
            with precision:
                return (None, None, *gradients(dy, flat, options, needs))

    return named(Eager, op, "")


def _bare_function(registered: _Registered, eager: type) -> type:
    """The classic Function around the library op, for graphs that call the op itself."""
    op = registered.op

    class Bare(eager):
        @staticmethod
        def forward(ctx, made, options, needs, *tensors):
            """`made` receives what the op returns besides y."""
            with torch._C._AutoDispatchBelowAutograd():
                results = call_forward(registered, tensors, options)
            made += results[1:]
            ctx.call = options, needs, state.Precision(), having_main_grad(tensors)
            ctx.save_for_backward(*to_save(op, tensors, results, options, needs))
            return results[0]

        @staticmethod
        def backward(ctx, dy):
            return (None, *eager.backward(ctx, dy))

    return named(Bare, op, "Op")


def _autograd_kernel(registered: _Registered, bare: type):
    _, fwd, _, layout = registered

    def kernel(tensors, *lists):
        if needs := wanted(tensors):
            made: list[Tensor] = []
            return [bare.apply(made, _codec.unpack(layout, lists), needs, *tensors), *made]
        with torch._C._AutoDispatchBelowAutograd():
            return fwd(tensors, *lists)

    return kernel


def _functional_functions(registered: _Registered, gradients) -> tuple[type, type]:
    """The Function with a setup_context, for torch.compile, and the same for torch.func."""
    op = registered.op

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(options, needs, *tensors):
            return tuple(call_forward(registered, tensors, options))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.options, ctx.needs, *tensors = inputs
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*to_save(op, tensors, output, ctx.options, ctx.needs))

        @staticmethod
        def backward(ctx, dy, *_):
            return None, None, *gradients(dy, ctx.saved_tensors, ctx.options, ctx.needs)

    class Transformed(Functional):  # Dynamo traces no Function with a jvp
        jvp = _no_jvp(op)

    return named(Functional, op, "Functional"), named(Transformed, op, "Transformed")


def _apply(registered: _Registered, eager: type, functional: type, transformed: type):
    """The op's one entry: the Function that fits the call."""
    op = registered.op
    constants = sum(1 << i for i in op.constants)
    # Skips torch's Function.apply, which looks for a setup_context and for transforms (5 % of a tiny mlp's host time).
    apply_eager = super(torch.autograd.Function, eager).apply

    def for_inference(options):
        return _codec.replaced(options, recompute=op.inference_recompute)

    def apply(options, *tensors) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if (compiling or not PLAIN.issuperset(map(type, tensors))) and (kind := foreign(tensors)):
            compose_of(op.name, kind)
            with autocast_off(tensors[0]):
                return op.reference(tensors, options)
        if torch._C._are_functorch_transforms_active():
            if compiling:
                raise NotImplementedError(f"{op.name}: torch.compile of a torch.func transform is not supported")
            return transformed.apply(options, present(tensors) & ~constants, *tensors)[0]
        if compiling:
            needs = sum(1 << i for i, t in enumerate(tensors) if t is not None and t.requires_grad)
            if not needs or not torch.is_grad_enabled():
                # where nothing needs a gradient, Dynamo hands a ctx to forward(*args), which takes none
                return call_forward(registered, tensors, for_inference(options))[0]
            return functional.apply(options, needs, *_distinct(tensors))[0]
        tensors = [unwrap_if_dead(t) if type(t) is Tensor else t for t in tensors]
        needs = wanted(tensors)
        return apply_eager(options if needs else for_inference(options), needs, *tensors)

    apply.for_inference = for_inference
    return apply
