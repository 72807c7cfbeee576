"""The factory that every op is made with: one description of a segment becomes two library ops and two Functions.

A segment is (inputs) -> output, with some tensors kept in between. From its description come
- `ckptkern::NAME_fwd(inputs, statics) -> (y, kept...)` and `ckptkern::NAME_bwd(dy, inputs, kept, statics, needs) ->
  gradients`, raw functional library ops with fakes, vmap rules and FLOP formulas, so that torch.compile, FLOP counters
  and selective checkpointing see them;
- a classic autograd Function for eager mode, the quickest on the host; it calls the op's body itself where nothing
  would see the op;
- a `setup_context` Function with a generated vmap rule for torch.compile and torch.func;
- the classic one as the op's Autograd kernel, too, for graphs that call the op itself: torch.export's;
- a Function over the backward op, whose own backward differentiates the plain PyTorch composite: second order is right.

`needs` is a bitmask over the inputs, of any length: the library ops take it in words of 62 bits, because a stack of 31
layers has more inputs than an int64 has bits. What it leaves out costs no GEMM. Op bodies run with autocast off and
cast weights inside, so that a cast copy never lives from forward to backward; the public function casts x.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, unwrap_if_dead
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from .. import state
from ..subclasses import PLAIN, foreign
from ._common import autocast_off, compose_of, no_autocast, read_precision

LIBRARY = torch.library.Library("ckptkern", "FRAGMENT")


class Segment:
    """What an op is. Subclasses give the class attributes and the methods; `build()` makes it callable.

    name      the op's word
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
    inference_level = "full"  # that at which forward writes nothing for a backward
    constants: frozenset[int] = frozenset()  # inputs without a gradient; torch.func, which cannot tell, asks for all

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


def needed(needs: int, index: int) -> bool:
    return bool(needs >> index & 1)


@functools.cache
def flags(needs: int, count: int) -> tuple[bool, ...]:
    """The lowest bits of needs."""
    return tuple(needed(needs, i) for i in range(count))


def _filled(results, like: Tensor):
    """An op's results with `empty(0)` in place of None: a schema has no optional results."""
    if results is None:
        return like.new_empty(0)
    return results if isinstance(results, Tensor) else type(results)(_filled(result, like) for result in results)


def _watched(tensors) -> bool:
    """Does anything see the op besides its body: the compiler, a transform, a mode, the profiler, a tensor subclass?

    The first tensor may be a batch of gradients (torch.autograd.grad's is_grads_batched), which no transform tells of.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or is_legacy_batchedtensor(tensors[0])
        or _dispatched(tensors)
    )


def _dispatched(tensors) -> bool:
    """The same where `apply` has ruled out the compiler and transforms."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
        or not PLAIN.issuperset(map(type, tensors))
    )


def _direct(body, x, *args):
    """The op's body, as the dispatcher runs it. The way through the dispatcher is a tenth of a tiny mlp's host time."""
    if no_autocast(x):
        return body(x, *args)
    with torch._C._DisableAutocast():
        return body(x, *args)


_WORD = 62


def _split(needs: int) -> list[int]:
    """needs in words of 62 bits, lowest first."""
    words = [needs & (1 << _WORD) - 1]
    while needs := needs >> _WORD:
        words.append(needs & (1 << _WORD) - 1)
    return words


def _joined(args: tuple) -> tuple:
    """The backward op's args with the words of needs, which come last, as one int."""
    return *args[:-1], sum(word << _WORD * i for i, word in enumerate(args[-1]))


def _distinct(tensors: tuple) -> tuple:
    """tensors with a view in place of each repetition: Dynamo refuses one tensor as two arguments of a Function."""
    return tuple(
        t.view_as(t) if t is not None and any(t is earlier for earlier in tensors[:i]) else t
        for i, t in enumerate(tensors)
    )


def _present(tensors) -> int:
    return sum(1 << i for i, t in enumerate(tensors) if t is not None and t.is_floating_point())


def _wanted(tensors) -> int:
    """needs of a call that autograd records."""
    needs = 0
    if torch.is_grad_enabled():
        for i, t in enumerate(tensors):
            if t is not None and t.requires_grad:
                needs |= 1 << i
    return needs


def _loop_over_batch(op):
    """A vmap rule that calls the op per sample: gradients of weights are per sample, so nothing could be shared."""

    def rule(info, in_dims, *args):
        def sample(i):
            def pick(arg, dim):
                if isinstance(arg, (list, tuple)):
                    dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(arg)
                    return [pick(a, d) for a, d in zip(arg, dims, strict=True)]
                return arg if dim is None or not isinstance(arg, Tensor) else arg.select(dim, i)

            return op(*(pick(arg, dim) for arg, dim in zip(args, in_dims, strict=True)))

        def stack(column):
            if isinstance(column[0], Tensor):
                return torch.stack(column), 0
            stacked = [stack(list(inner)) for inner in zip(*column, strict=True)]
            kind = type(column[0])
            return kind(value for value, _ in stacked), kind(dim for _, dim in stacked)

        return stack([sample(i) for i in range(info.batch_size)])

    return rule


def _in_legacy_vmap(op):
    """The same for the vmap that is behind torch.autograd.grad's is_grads_batched, whose own fallback takes no lists."""
    rule = _loop_over_batch(op)

    def call(*args):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()

        def split(arg):
            """(physical tensor, dimension of the batch)"""
            if isinstance(arg, (list, tuple)):
                return tuple(map(list, zip(*map(split, arg), strict=True))) if arg else (arg, None)
            if isinstance(arg, Tensor) and is_legacy_batchedtensor(arg):
                return torch._remove_batch_dim(arg, level, 1, 0), 0
            return arg, None

        values, dims = zip(*map(split, args), strict=True)
        results, _ = rule(_Batch(values[0].shape[0]), dims, *values)
        return tree_map(lambda result: torch._add_batch_dim(result, 0, level), results)

    return call


class _Batch(NamedTuple):
    batch_size: int


def _second_order(segment, dy, saved, statics, needs, cotangents):
    """d/d(dy, inputs) of <cotangents, backward(dy, inputs)>, from the composite's own second derivative."""
    inputs = list(saved[: segment.input_count(saved, statics)])
    if inputs[0] is None:
        inputs[0] = segment.missing_input(dy, saved, statics)
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
            return segment.composite(*segment.arguments(tuple(arguments)), *statics)

        return torch.func.vjp(y, *(filled[i] for i in wanted))[1](dy)

    _, pull = torch.func.vjp(first_order, dy, *(inputs[i] for i in variables))
    picked = [cotangents[i] for i in wanted]
    results = pull(tuple(torch.zeros_like(inputs[i]) if c is None else c for i, c in zip(wanted, picked, strict=True)))
    grads = [None] * len(saved)
    for i, grad in zip(variables, results[1:], strict=True):
        grads[i] = grad if saved[i] is not None else None
    return results[0], grads


def _with_precision(args: tuple, from_end: int) -> tuple:
    """args with a precision of "auto" (a compiled graph's) read from torch's setting."""
    if args[-from_end] != "auto":
        return args
    return (*args[:-from_end], read_precision(), *args[len(args) - from_end + 1 :])


def build(segment: type[Segment]):
    """Register the segment's ops; returns `apply(statics, tensors) -> y`."""
    name = segment.name
    static_names = [static.split()[-1] for static in segment.statics.split(", ")]
    statics_count = len(static_names)
    LIBRARY.define(f"{name}_fwd({segment.inputs}, {segment.statics}) -> {segment.results}")
    optional = segment.inputs.replace("Tensor ", "Tensor? ")
    kept = f"{segment.kept}, " if segment.kept else ""
    LIBRARY.define(f"{name}_bwd(Tensor dy, {optional}, {kept}{segment.statics}, int[] needs) -> {segment.grads}")
    packet = torch.ops.ckptkern
    fwd, bwd = getattr(packet, f"{name}_fwd").default, getattr(packet, f"{name}_bwd").default

    precision_from_end = static_names[::-1].index("precision") + 1

    def forward(*args):
        with torch._C._DisableAutocast():
            return _filled(segment.forward(*_with_precision(args, precision_from_end)), args[0])

    def backward(*args):
        with torch._C._DisableAutocast():
            return _filled(segment.backward(*_with_precision(_joined(args), precision_from_end + 1)), args[0])

    def backward_fake(*args):
        return segment.backward_fake(*_joined(args))

    def backward_flops(*args, out_val=None):
        return segment.backward_flops(*_joined(args))

    LIBRARY.impl(f"{name}_fwd", forward, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_bwd", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ckptkern::{name}_fwd", segment.forward_fake, lib=LIBRARY)
    torch.library.register_fake(f"ckptkern::{name}_bwd", backward_fake, lib=LIBRARY)
    torch.library.register_vmap(f"ckptkern::{name}_fwd", _loop_over_batch(fwd), lib=LIBRARY)
    torch.library.register_vmap(f"ckptkern::{name}_bwd", _loop_over_batch(bwd), lib=LIBRARY)
    LIBRARY.impl(f"{name}_bwd", _in_legacy_vmap(bwd), "Batched")
    register_flop_formula(getattr(packet, f"{name}_fwd"), get_raw=True)(segment.forward_flops)
    register_flop_formula(getattr(packet, f"{name}_bwd"), get_raw=True)(backward_flops)

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(needs, *args):
            statics, dy, saved = args[:statics_count], args[statics_count], args[statics_count + 1 :]
            return segment.flat(bwd(dy, *segment.backward_arguments(saved, statics), *statics, _split(needs)))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs, ctx.statics = inputs[0], inputs[1 : 1 + statics_count]
            ctx.save_for_backward(*inputs[1 + statics_count :])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, *cotangents):
            dy, *saved = ctx.saved_tensors
            with torch._C._DisableAutocast():  # as in the bodies of the ops
                ddy, grads = _second_order(segment, dy, saved, ctx.statics, ctx.needs, cotangents)
            return (None,) * (1 + statics_count) + (ddy, *grads)

    def gradients(dy, saved, statics, needs):
        """One gradient per input, None where not needed; with a graph of their own only when one is being made."""
        if torch.is_grad_enabled():
            if saved[0] is None and needed(needs, 0):  # else the gradient of x would come without a graph to x
                segment.missing_input(dy, saved, statics)
            grads = Backward.apply(needs, *statics, dy, *saved)
        else:
            arguments = segment.backward_arguments(saved, statics)
            if not _watched((dy, *saved)):
                return segment.flat(_direct(segment.backward, dy, *arguments, *statics, needs))
            grads = segment.flat(bwd(dy, *arguments, *statics, _split(needs)))
        return [g if needs >> i & 1 else None for i, g in enumerate(grads)]

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, statics, needs, *tensors):
            arguments = segment.arguments(tensors)
            results = (
                fwd(*arguments, *statics) if _dispatched(tensors) else _direct(segment.forward, *arguments, *statics)
            )
            outputs = segment.flat(results)
            ctx.call = statics, needs, state.Precision()
            ctx.save_for_backward(*segment.saved(tensors, outputs, statics, needs))
            return outputs[0]

        @staticmethod
        def backward(ctx, dy):
            statics, needs, precision = ctx.call
            with precision:
                return (None, None, *gradients(dy, ctx.saved_tensors, statics, needs))

    class Bare(Eager):
        """Of the op itself. `kept` receives what it returns besides y."""

        @staticmethod
        def forward(ctx, kept, statics, needs, *tensors):
            with torch._C._AutoDispatchBelowAutograd():
                results = fwd(*segment.arguments(tensors), *statics)
            kept += results[1:]
            ctx.call = statics, needs, state.Precision()
            ctx.save_for_backward(*segment.saved(tensors, segment.flat(results), statics, needs))
            return results[0]

        @staticmethod
        def backward(ctx, dy):
            return (None, *Eager.backward(ctx, dy))

    def bare(*args):
        statics, kept = args[-statics_count:], []
        tensors = segment.tensors(args[:-statics_count])
        if needs := _wanted(tensors):
            y = Bare.apply(kept, statics, needs, *tensors)
            return [y] if segment.results == "Tensor[]" else (y, *kept)
        with torch._C._AutoDispatchBelowAutograd():
            return fwd(*args)

    LIBRARY.impl(f"{name}_fwd", bare, "Autograd")

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(needs, *args):
            statics, tensors = args[:statics_count], args[statics_count:]
            return segment.flat(fwd(*segment.arguments(tensors), *statics))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.statics, tensors = inputs[1 : 1 + statics_count], inputs[1 + statics_count :]
            ctx.needs = inputs[0]
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*segment.saved(tensors, output, ctx.statics, ctx.needs))

        @staticmethod
        def backward(ctx, dy, *_):
            grads = gradients(dy, ctx.saved_tensors, ctx.statics, ctx.needs)
            return (None,) * (1 + statics_count) + tuple(grads)

    class Transformed(Functional):
        """Functional for torch.func; Dynamo traces no Function with a jvp."""

    def jvp(ctx, *tangents):
        raise NotImplementedError(f"{name}: forward-mode AD is not supported; use reverse mode (jacrev, vjp, grad)")

    Eager.jvp = Transformed.jvp = staticmethod(jvp)
    suffixes = {Eager: "", Bare: "Op", Functional: "Functional", Transformed: "Transformed", Backward: "Backward"}
    for function, suffix in suffixes.items():
        function.__name__ = function.__qualname__ = segment.__name__ + suffix + "Function"
        node = function._backward_cls  # its name is in grad_fn, profiles and anomaly mode
        node.__name__ = node.__qualname__ = function.__name__ + "Backward"

    levels = {i for i, static in enumerate(static_names) if static.endswith("recompute")}

    def for_inference(statics: tuple) -> tuple:
        return tuple(segment.inference_level if i in levels else static for i, static in enumerate(statics))

    constants = sum(1 << i for i in segment.constants)
    # torch's Function.apply looks for a setup_context and for transforms (5 % of a tiny mlp's host time): known here.
    apply_eager = super(torch.autograd.Function, Eager).apply

    def apply(statics: tuple, *tensors) -> Tensor:
        if kind := foreign(tensors):
            compose_of(name, kind)
            with autocast_off(tensors[0]):
                return segment.composite(*segment.arguments(tensors), *statics)
        if torch._C._are_functorch_transforms_active():
            if torch.compiler.is_compiling():
                raise NotImplementedError(f"{name}: torch.compile of a torch.func transform is not supported")
            return Transformed.apply(_present(tensors) & ~constants, *statics, *tensors)[0]
        if torch.compiler.is_compiling():
            needs = sum(1 << i for i, t in enumerate(tensors) if t is not None and t.requires_grad)
            if not needs or not torch.is_grad_enabled():
                # Dynamo, where nothing needs a gradient, hands a ctx to a forward(*args) that takes none
                return segment.flat(fwd(*segment.arguments(tensors), *for_inference(statics)))[0]
            return Functional.apply(needs, *statics, *_distinct(tensors))[0]
        tensors = [unwrap_if_dead(t) if type(t) is Tensor else t for t in tensors]
        needs = _wanted(tensors)
        return apply_eager(statics if needs else for_inference(statics), needs, *tensors)

    return apply
