"""The factory that every op is made with: one description becomes two library ops and the Functions around them.

An op is (inputs) -> output, with some tensors kept in between. From its description come
- `ckptkern::NAME_fwd(inputs, statics) -> (y, kept...)` and `ckptkern::NAME_bwd(dy, inputs, kept, statics, needs) ->
  gradients`, raw functional library ops with fakes, vmap rules and FLOP formulas, so that torch.compile, FLOP counters
  and selective checkpointing see them;
- a classic autograd Function for eager mode, the quickest on the host; it calls the op's body directly if nothing
  observes the op;
- a `setup_context` Function with a generated vmap rule for torch.compile and torch.func;
- the classic Function also as the op's Autograd kernel, for graphs that call the op itself, such as torch.export's;
- a Function over the backward op, whose own backward differentiates the plain PyTorch composite, so that second-order
  gradients are right.

`needs` is a bitmask over the inputs (_needs.py). What it leaves out costs no GEMM. Op bodies run with autocast off and
cast weights inside, so that a cast copy never lives from forward to backward; the public function casts x.
"""

from __future__ import annotations

import typing
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, unwrap_if_dead
from torch.types import IntLikeType
from torch.utils.flop_counter import register_flop_formula

from .. import state
from ..subclasses import PLAIN, foreign
from ._batching import in_legacy_vmap, loop_over_batch
from ._choices import autocast_off, compose_of, no_autocast, read_precision
from ._gradients import having_main_grad, into_main_grad, without_main_grad
from ._needs import joined, needed, present, split, wanted

LIBRARY = torch.library.Library("ckptkern", "FRAGMENT")

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    tuple[float, ...]: "float[]",
    IntLikeType: "SymInt",
    IntLikeType | None: "SymInt?",
}


def schema_of(kind: type, prefix: str = "") -> str:
    """The fields of a NamedTuple as arguments of a library op."""
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {prefix}{name}" for name, hint in typing.get_type_hints(kind).items())


class Op:
    """What an op is. Subclasses give the class attributes and the methods; `build()` makes it callable.

    name      the op's word, as users know it
    inputs    schema of its inputs, the one that is read as rows of tokens first
    kept      schema of what backward takes besides dy and the inputs
    statics   schema of the non-tensor arguments: level, backend, precision and so on
    results   schema of forward's results, y first; grads: schema of backward's
    """

    name: str
    inputs: str
    kept: str
    statics: str
    results: str
    grads: str
    inference_level = "full"  # the level at which forward writes nothing for a backward
    constants: frozenset[int] = frozenset()  # inputs without a gradient; torch.func cannot tell and asks for all

    # -- what subclasses define -----------------------------------------------------------------------------------

    @staticmethod
    def forward(*args):
        """(*inputs, *statics) -> (y, kept...); None for what is not kept at this level."""
        raise NotImplementedError

    @staticmethod
    def backward(dy, *args):
        """(dy, *inputs, *kept, *statics, needs) -> a gradient per input, None where it is not needed."""
        raise NotImplementedError

    @staticmethod
    def forward_fake(*args):
        raise NotImplementedError

    @staticmethod
    def backward_fake(dy, *args):
        raise NotImplementedError

    @staticmethod
    def composite(*args):
        """(*inputs, *statics) -> y in differentiable PyTorch ops: the definition of second-order gradients."""
        raise NotImplementedError

    @staticmethod
    def saved(tensors, outputs, statics, needs) -> list:
        """What backward is given after dy: the flat inputs, then what is kept; None where backward does not look."""
        raise NotImplementedError

    @staticmethod
    def forward_flops(*args, out_val=None) -> int:
        """Multiply-adds times two, as torch counts them: matrix products only."""
        raise NotImplementedError

    @staticmethod
    def backward_flops(dy, *args, out_val=None) -> int:
        raise NotImplementedError

    # -- how flat lists of tensors become the ops' arguments: these defaults serve ops without list arguments ------

    @classmethod
    def arguments(cls, tensors: tuple) -> tuple:
        """The forward op's inputs from the Function's flat tensors."""
        return tensors

    @classmethod
    def tensors(cls, inputs: tuple) -> tuple:
        """The Function's flat tensors from the forward op's inputs: the inverse of `arguments`."""
        return inputs

    @classmethod
    def backward_arguments(cls, saved: tuple, statics: tuple) -> tuple:
        """The backward op's inputs and kept tensors from the flat list that `saved` made."""
        return saved

    @classmethod
    def input_count(cls, saved: tuple, statics: tuple) -> int:
        """How many of `saved` are inputs."""
        return cls.inputs.count(",") + 1

    @classmethod
    def flat(cls, results) -> tuple:
        """Flat tensors from the results of either op."""
        return tuple(results)

    @classmethod
    def missing_input(cls, dy: Tensor, saved: tuple, statics: tuple) -> Tensor:
        """Stands in for an input that was not kept, when the composite is differentiated; raises if that needs it."""
        raise RuntimeError(
            f"{cls.name}: second-order gradients need the input, which was not kept because the weight that reads it "
            f"is frozen; use recompute='full', outside of a checkpoint"
        )


def _filled(results, like: Tensor):
    """An op's results with `empty(0)` in place of None: a schema has no optional results."""
    if results is None:
        return like.new_empty(0)
    return results if isinstance(results, Tensor) else type(results)(_filled(result, like) for result in results)


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


def direct(body, x, *args):
    """Runs the op's body as the dispatcher would; the dispatcher itself takes a tenth of a tiny mlp's host time."""
    if no_autocast(x):
        return body(x, *args)
    with torch._C._DisableAutocast():
        return body(x, *args)


def _distinct(tensors: tuple) -> tuple:
    """tensors with a view in place of each repetition: Dynamo refuses one tensor as two arguments of a Function."""
    return tuple(
        t.view_as(t) if t is not None and any(t is earlier for earlier in tensors[:i]) else t
        for i, t in enumerate(tensors)
    )


def _second_order(op, dy, saved, statics, needs, cotangents):
    """d/d(dy, inputs) of <cotangents, backward(dy, inputs)>, from the composite's own second derivative."""
    inputs = list(saved[: op.input_count(saved, statics)])
    if inputs[0] is None:
        inputs[0] = op.missing_input(dy, saved, statics)
    wanted = [i for i in range(len(inputs)) if needed(needs, i)]
    variables = [i for i, t in enumerate(inputs) if t is not None and t.is_floating_point()]

    def first_order(dy, *values):
        filled = list(inputs)
        for i, value in zip(variables, values, strict=True):
            filled[i] = value

        def y(*some):
            arguments = list(filled)
            for i, value in zip(wanted, some, strict=True):
                arguments[i] = value
            return op.composite(*op.arguments(tuple(arguments)), *statics)

        return torch.func.vjp(y, *(filled[i] for i in wanted))[1](dy)

    _, pull = torch.func.vjp(first_order, dy, *(inputs[i] for i in variables))
    picked = [cotangents[i] for i in wanted]
    results = pull(tuple(torch.zeros_like(inputs[i]) if c is None else c for i, c in zip(wanted, picked, strict=True)))
    grads = [None] * len(saved)
    for i, grad in zip(variables, results[1:], strict=True):
        grads[i] = grad if saved[i] is not None else None
    return results[0], grads


def _with_precision(args: tuple, from_end: tuple[int, ...]) -> tuple:
    """args, in which a precision of "auto" (a compiled graph's; a layer has two) is replaced by torch's current setting."""
    for n in from_end:
        if args[-n] == "auto":
            args = (*args[:-n], read_precision(), *args[len(args) - n + 1 :])
    return args


class _Registered(NamedTuple):
    """An op with the two library ops that were made of it."""

    op: type[Op]
    fwd: torch._ops.OpOverload
    bwd: torch._ops.OpOverload
    statics: tuple[str, ...]  # their names


def build(op: type[Op]):
    """Register the op; returns `apply(statics, tensors) -> y`, whose `parts` are for _across."""
    registered = _register(op)
    gradients = _gradients(registered, _backward_function(registered))
    eager = _eager_function(registered, gradients)
    functional, transformed = _functional_functions(registered, gradients)
    bare = _bare_function(registered, eager)
    LIBRARY.impl(f"{op.name}_fwd", _autograd_kernel(registered, bare), "Autograd")
    apply = _apply(registered, eager, functional, transformed)
    apply.parts = registered, gradients
    return apply


def _register(op: type[Op]) -> _Registered:
    """Schemas, bodies, fakes, vmap rules and FLOP formulas of the two library ops."""
    forward_name, backward_name = f"{op.name}_fwd", f"{op.name}_bwd"
    statics = tuple(static.split()[-1] for static in op.statics.split(", "))
    LIBRARY.define(f"{forward_name}({op.inputs}, {op.statics}) -> {op.results}")
    optional = op.inputs.replace("Tensor ", "Tensor? ")
    kept = f"{op.kept}, " if op.kept else ""
    LIBRARY.define(f"{backward_name}(Tensor dy, {optional}, {kept}{op.statics}, int[] needs) -> {op.grads}")
    packets = getattr(torch.ops.ckptkern, forward_name), getattr(torch.ops.ckptkern, backward_name)
    fwd, bwd = (packet.default for packet in packets)
    precisions = tuple(n for n, static in enumerate(reversed(statics), 1) if static.endswith("precision"))
    precisions_before_needs = tuple(n + 1 for n in precisions)

    def forward(*args):
        with torch._C._DisableAutocast():
            return _filled(op.forward(*_with_precision(args, precisions)), args[0])

    def backward(*args):
        with torch._C._DisableAutocast():
            given = _with_precision(joined(args), precisions_before_needs)
            return _filled(op.backward(*without_main_grad(given)), args[0])

    def backward_fake(*args):
        return op.backward_fake(*joined(args))

    def backward_flops(*args, out_val=None):
        return op.backward_flops(*joined(args))

    bodies, fakes = (forward, backward), (op.forward_fake, backward_fake)
    formulas = op.forward_flops, backward_flops
    for packet, body, fake, formula in zip(packets, bodies, fakes, formulas, strict=True):
        name = packet.default._schema.name
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=LIBRARY)
        torch.library.register_vmap(name, loop_over_batch(packet.default), lib=LIBRARY)
        register_flop_formula(packet, get_raw=True)(formula)
    LIBRARY.impl(backward_name, in_legacy_vmap(bwd), "Batched")
    return _Registered(op, fwd, bwd, statics)


def named(function: type, op: type[Op], suffix: str) -> type:
    """Names the Function after the op, and its node too, whose name shows in grad_fn, profiles and anomaly mode."""
    node = function._backward_cls
    function.__name__ = function.__qualname__ = f"{op.__name__}{suffix}Function"
    node.__name__ = node.__qualname__ = f"{function.__name__}Backward"
    return function


def _backward_function(registered: _Registered) -> type:
    """A Function of the backward op, differentiable itself."""
    op, _, bwd, statics = registered
    count = len(statics)

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(needs, *args):
            statics, dy, saved = args[:count], args[count], args[count + 1 :]
            return op.flat(bwd(dy, *op.backward_arguments(saved, statics), *statics, split(needs)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs, ctx.statics = inputs[0], inputs[1 : 1 + count]
            ctx.save_for_backward(*inputs[1 + count :])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, *cotangents):
            dy, *saved = ctx.saved_tensors
            with torch._C._DisableAutocast():  # as in the bodies of the ops
                ddy, grads = _second_order(op, dy, saved, ctx.statics, ctx.needs, cotangents)
            return (None,) * (1 + count) + (ddy, *grads)

    return named(Backward, op, "Backward")


def _gradients(registered: _Registered, second_order: type):
    """What the backward of every Function below calls."""
    op, _, bwd, _ = registered

    def gradients(dy, saved, statics, needs):
        """One gradient per input, None where not needed; with a graph of their own only when one is being made."""
        if torch.is_grad_enabled():
            if saved[0] is None and needed(needs, 0):  # else the gradient of x would come without a graph to x
                op.missing_input(dy, saved, statics)
            grads = second_order.apply(needs, *statics, dy, *saved)
        else:
            arguments = op.backward_arguments(saved, statics)
            if not _watched((dy, *saved)):
                return op.flat(direct(op.backward, dy, *arguments, *statics, needs))
            grads = op.flat(bwd(dy, *arguments, *statics, split(needs)))
            if not _traced(dy):
                grads = [into_main_grad(saved[i], g) if needs >> i & 1 else g for i, g in enumerate(grads)]
        return [g if needs >> i & 1 else None for i, g in enumerate(grads)]

    return gradients


def _no_jvp(op: type[Op]):
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{op.name}: forward-mode AD is not supported; use reverse mode (jacrev, vjp, grad)")

    return staticmethod(jvp)


def _eager_function(registered: _Registered, gradients) -> type:
    """The classic Function: the quickest on the host."""
    op, fwd = registered.op, registered.fwd

    class Eager(torch.autograd.Function):
        jvp = _no_jvp(op)

        @staticmethod
        def forward(ctx, statics, needs, *tensors):
            arguments = op.arguments(tensors)
            results = fwd(*arguments, *statics) if dispatched(tensors) else direct(op.forward, *arguments, *statics)
            outputs = op.flat(results)
            ctx.call = statics, needs, state.Precision(), having_main_grad(tensors)
            ctx.save_for_backward(*op.saved(tensors, outputs, statics, needs))
            return outputs[0]

        @staticmethod
        def backward(ctx, dy):
            statics, needs, precision, weights = ctx.call
            saved = ctx.saved_tensors
            if weights:
                saved = [t if t is None else weights.get(i, t) for i, t in enumerate(saved)]
            with precision:
                return (None, None, *gradients(dy, saved, statics, needs))

    return named(Eager, op, "")


def _bare_function(registered: _Registered, eager: type) -> type:
    """The classic Function around the library op, for graphs that call the op itself."""
    op, fwd = registered.op, registered.fwd

    class Bare(eager):
        @staticmethod
        def forward(ctx, kept, statics, needs, *tensors):
            """`kept` receives what the op returns besides y."""
            with torch._C._AutoDispatchBelowAutograd():
                results = fwd(*op.arguments(tensors), *statics)
            kept += results[1:]
            ctx.call = statics, needs, state.Precision(), having_main_grad(tensors)
            ctx.save_for_backward(*op.saved(tensors, op.flat(results), statics, needs))
            return results[0]

        @staticmethod
        def backward(ctx, dy):
            return (None, *eager.backward(ctx, dy))

    return named(Bare, op, "Op")


def _autograd_kernel(registered: _Registered, bare: type):
    op, fwd, _, statics = registered
    count = len(statics)

    def kernel(*args):
        statics, kept = args[-count:], []
        tensors = op.tensors(args[:-count])
        if needs := wanted(tensors):
            y = bare.apply(kept, statics, needs, *tensors)
            return [y] if op.results == "Tensor[]" else (y, *kept)
        with torch._C._AutoDispatchBelowAutograd():
            return fwd(*args)

    return kernel


def _functional_functions(registered: _Registered, gradients) -> tuple[type, type]:
    """The Function with a setup_context, for torch.compile, and the same for torch.func."""
    op, fwd, _, statics = registered
    count = len(statics)

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(needs, *args):
            statics, tensors = args[:count], args[count:]
            return op.flat(fwd(*op.arguments(tensors), *statics))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.statics, tensors = inputs[1 : 1 + count], inputs[1 + count :]
            ctx.needs = inputs[0]
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*op.saved(tensors, output, ctx.statics, ctx.needs))

        @staticmethod
        def backward(ctx, dy, *_):
            grads = gradients(dy, ctx.saved_tensors, ctx.statics, ctx.needs)
            return (None,) * (1 + count) + tuple(grads)

    class Transformed(Functional):  # Dynamo traces no Function with a jvp
        jvp = _no_jvp(op)

    return named(Functional, op, "Functional"), named(Transformed, op, "Transformed")


def _apply(registered: _Registered, eager: type, functional: type, transformed: type):
    """The op's one entry: the Function that fits the call."""
    op, fwd, _, static_names = registered
    levels = {i for i, static in enumerate(static_names) if static.endswith("recompute")}
    constants = sum(1 << i for i in op.constants)
    # Skips torch's Function.apply, which looks for a setup_context and for transforms (5 % of a tiny mlp's host time).
    apply_eager = super(torch.autograd.Function, eager).apply

    def for_inference(statics: tuple) -> tuple:
        return tuple(op.inference_level if i in levels else static for i, static in enumerate(statics))

    def apply(statics: tuple, *tensors) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if (compiling or not PLAIN.issuperset(map(type, tensors))) and (kind := foreign(tensors)):
            compose_of(op.name, kind)
            with autocast_off(tensors[0]):
                return op.composite(*op.arguments(tensors), *statics)
        if torch._C._are_functorch_transforms_active():
            if compiling:
                raise NotImplementedError(f"{op.name}: torch.compile of a torch.func transform is not supported")
            return transformed.apply(present(tensors) & ~constants, *statics, *tensors)[0]
        if compiling:
            needs = sum(1 << i for i, t in enumerate(tensors) if t is not None and t.requires_grad)
            if not needs or not torch.is_grad_enabled():
                # where nothing needs a gradient, Dynamo hands a ctx to forward(*args), which takes none
                return op.flat(fwd(*op.arguments(tensors), *for_inference(statics)))[0]
            return functional.apply(needs, *statics, *_distinct(tensors))[0]
        tensors = [unwrap_if_dead(t) if type(t) is Tensor else t for t in tensors]
        needs = wanted(tensors)
        return apply_eager(statics if needs else for_inference(statics), needs, *tensors)

    apply.for_inference = for_inference
    return apply
