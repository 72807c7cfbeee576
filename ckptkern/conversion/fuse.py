"""Fuses one module: from the calls that were captured of it to its new forward."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..nn.unmodified import runs_class_forward, untouched
from ..ops.dispatch.choices import autocast_dtype
from ..segments.recorded import class_forward
from .alike import call_kinds, same_inside
from .arguments import named, rescaled
from .binding import Fused, Segment, Unread, is_cache, without_caches
from .calls import Form, not_looked_at
from .check import TOLERANCE, Check, difference, double, in_float64, random_parameters, results, varied, wide
from .computed import Computed, Followed, following, resolve, templates
from .grammar import read
from .guard import all_reads, reads_of
from .layouts import is_experts, parts_of, why_unread
from .masks import has_ours
from .moe import read_block, read_experts, routed, vary_choices
from .protection import unmoved
from .quantized import autocast_like, why_unreadable
from .reading import Argument, Probability, Reading, Steps
from .trace import (
    Call,
    Trace,
    Unreadable,
    Watched,
    is_floating,
    is_leaf,
    leaves_of,
    mapped,
    recomputed,
    switched,
    trace,
)


def result_of(output: object, arguments: list[Any], unread: Callable[[Tensor], bool]) -> tuple[Tensor, tuple | None]:
    """Returns (the one tensor that a forward returns, its place in what is returned). unread: may a placeholder stand for
    another tensor? Raises Unreadable."""
    if isinstance(output, Tensor):
        return output, None
    leaves, spec = tree_flatten(output)
    places = {id(value): i for i, value in enumerate(arguments) if isinstance(value, Tensor)}
    tensors: dict[int, Tensor] = {}
    for i, leaf in enumerate(leaves):
        if id(leaf) in places:
            leaves[i] = Argument(places[id(leaf)])
        elif isinstance(leaf, Tensor):
            leaves[i] = Unread if tensors and unread(leaf) else None
            if leaves[i] is None:
                tensors[i] = leaf
        elif leaf is not None:
            raise Unreadable("forward returns an object")
    if len(tensors) != 1:
        raise Unreadable(f"forward returns {len(tensors)} tensors")
    ((at, y),) = tensors.items()
    return y, (spec, leaves, at)


class Attempt(NamedTuple):
    """Holds a checked call. asked: with its caches; call: without; log: of its trace."""

    asked: Call
    call: Call
    segment: Segment
    error: float
    log: list[tuple]


def tried(form: Form, asked: Call, like: tuple[Reading, list[tuple]] | None = None) -> Attempt:
    """Reads and checks a module in a complete call, for 16-bit parameters also in 16 bits.

    like: the reading of a similar module, and its trace's log; the same reading is then compared without gradients. Raises
    Unreadable.
    """
    module, (args, kwargs) = form.module, without_caches(asked)
    if any(t.is_meta for t in module.parameters()):
        raise Unreadable("its parameters are on the meta device, where nothing can be checked")
    caches = [i for i, value in enumerate(leaves_of(form.counting(asked))) if is_cache(value)]
    own = args, kwargs | {"use_cache": False} if caches and "use_cache" in kwargs else kwargs
    blocks = read_blocks(module, leaves_of(form.counting(own))) if like is None else {}
    with unmoved(module), random_parameters(module):
        vary_choices(module)
        call = args, kwargs = mapped(wide, own)
        flat = leaves_of(form.counting(call))
        module.train()  # shows where dropout is
        if like is not None:
            reading, log = like
            if log and trace(module, call, flat).log != log:
                raise Unreadable("its trace differs from that of a similar layer")
        elif is_experts(module) or parts_of(module) is not None:
            with switched(module, torch.float32), Watched(module) as watched, torch.no_grad():
                _, result = result_of(class_forward(module, args, kwargs), flat, lambda _: False)
            apart, log = watched.apart, []
            reading = read_experts(module, flat) if is_experts(module) else read_block(module, call, flat)
        else:
            traced, steps = trace(module, call, flat), Steps(module)
            # another result that is a softmax, with a dropout or without, is attention's probabilities
            y, result = result_of(
                traced.result, flat, lambda tensor: steps.strip(traced.node(tensor), []).is_function("softmax")
            )
            reading, log, apart = read(module, traced.node(y), blocks), traced.log, traced.apart
            if any(templates([reading.arguments, reading.choices], Computed)):
                resolve(module, reading, followed(form, reading, traced, call))
            with contextlib.suppress(Exception):  # forward may refuse the dtype
                apart = apart and trace(module, call, flat, torch.bfloat16).apart
        module.eval()
        if like is None:
            reading.result, reading.apart = result, next(iter(apart), "")
        try:
            segment, error = check_numerics(form, reading, call, like is None)
        except Unreadable:
            if not (blocks or reading.op == "moe_block"):
                raise
            # two scores of a random token may be equal up to rounding: then other tokens decide
            segment, error = check_numerics(form, reading, call, like is None)
        if like is None:
            form.reads = all_reads(form.reads, reads_of(module, call))
    segment.caches = caches
    if any(p.itemsize < 4 for p in module.parameters()):
        # in 16 bits, too, both must agree up to rounding: a forward may compute something else there
        check = RegionCheck(form, segment.reading, own, randomizes=False)
        for size in (1, 16):  # also where such a forward would clamp
            x = check.flat[segment.x] = size * torch.randn_like(check.flat[segment.x])
            with unmoved(module), autocast_like(module, x):
                module.eval()
                calls = [(f"in {autocast_dtype(x) or x.dtype}", check.flat)]
                # where a score rounds otherwise, a token goes to another expert
                check.require(calls, 0.05, nearest_rows if segment.routes else None)
    return Attempt(asked, own, segment, error, log)


def followed(form: Form, reading: Reading, traced: Trace, call: Call) -> Followed | None:
    """Returns the values of a trace that follow the input: they differ in float64, and with twice as many samples if the
    module takes these. None if no such trace can be compared."""
    flat = mapped(double, leaves_of(form.counting(call)))
    x = flat[reading.x]
    inputs = {reading.x, *(argument.index for argument in named(reading.arguments, "key_value"))}
    for more in [*(samples(flat, x, inputs) if x.dim() > 2 else ()), set()]:
        values = [torch.cat((value, value)) if i in more else value for i, value in enumerate(flat)]
        # the module may refuse the sizes or the dtype, or have another trace
        with contextlib.suppress(Exception), in_float64(form.module):
            calls = trace(form.module, form.call_of(values, call), values).calls
            return following(traced.calls, calls, *((len(x), 2) if more else (1, 1)))
    return None


def samples(flat: list[Any], x: Tensor, inputs: set[int]) -> list[set[int]]:
    """Returns which arguments may have a row for each sample: the inputs alone, and all arguments of the batch's size."""
    batched = {i for i, value in enumerate(flat) if isinstance(value, Tensor) and value.dim() and len(value) == len(x)}
    return [inputs, batched] if batched - inputs else [inputs]


def reason_of(error: Exception) -> Unreadable:
    """Returns why a module is not fused. On random parameters and inputs a forward may raise anything."""
    return error if isinstance(error, Unreadable) else Unreadable(f"{type(error).__name__} in the probe: {error}")


def read_blocks(module: nn.Module, flat: list[Any]) -> dict[str, Reading | Unreadable]:
    """Returns each MoE block inside, by path, as it was read and checked alone; or the reason why it is not a moe_block."""
    readings: dict[str, Reading | Unreadable] = {}
    for path, block in module.named_modules():
        parts = parts_of(block) if path else None
        if parts is None:
            continue
        d = block.get_parameter(parts.router_weight).shape[-1]
        try:
            like = next(value for value in flat if is_floating(value) and value.shape[-1:] == (d,))
            call = (torch.randn_like(like),), {}
            form = Form(block, [call])
            readings[path] = tried(form, form.complete(call)).segment.reading
        except Exception as error:  # a forward may raise anything on random numbers: it is the block's reason
            readings[path] = reason_of(error)
    return readings


class RegionCheck(Check):
    """Compares a region with the forward that it replaces.

    call: a complete call of the module; flat: its values that count, with random inputs and masks if `randomizes`; masks: the
    places of the masks among them.
    """

    def __init__(self, form: Form, reading: Reading, call: Call, randomizes: bool = True):
        self.form, self.module, self.call = form, form.module, call
        self.segment = segment = Segment(form.module, reading)
        self.flat = leaves_of(form.counting(call))
        self.masks = {argument.index for argument in named(segment.template, "attn_mask", "key_padding_mask")}
        for i, value in enumerate(self.flat) if randomizes else ():
            if i in segment.inputs or (i in segment.conditions and is_floating(value)):
                self.flat[i] = torch.randn_like(value)
            elif i in self.masks:
                self.flat[i] = varied(value, segment.excludes)

    def original(self, flat: list[Any]) -> Tensor:
        args, kwargs = self.form.call_of(flat, self.call)
        # a trace has seen that the other results are probabilities
        return result_of(class_forward(self.module, args, kwargs), flat, lambda _: True)[0]

    def ours(self, flat: list[Any]) -> Tensor:
        return self.segment.y(flat, "full")

    def elsewhere(self) -> Iterator[tuple[str, list[Any]]]:
        """Yields calls in training mode, with other scales, calls that show what a trace would, and larger calls: with twice
        as many tokens of each input, and with two samples in place of one. Some forwards have a window or a scale that depends
        on sizes, and an example of one sample does not tell a batch from a sequence. If something is computed, it yields calls
        with three times as many samples, because computed sizes may be the example's."""
        segment, flat = self.segment, self.flat
        if not any(p.value for p in templates(segment.template, Probability)):  # some forwards differ in training alone
            self.module.train()
            yield "with training", flat
            self.module.eval()
        with rescaled(self.module, segment.template) as any_scale:
            if any_scale:
                yield "with another scale", flat
        if segment.op in ("moe_mlp", "moe_block"):  # which are not traced
            yield from routed(segment, flat)
        inputs, conditions = segment.inputs, segment.conditions
        x = flat[inputs[0]]
        if x.dim() < 2:
            return

        def twice(value, i, length):
            if not isinstance(value, Tensor):
                return value
            if i in inputs:
                return torch.cat((value, torch.randn_like(value)), -2) if value.shape[-2] == length else value
            for dim in range(value.dim() > 2, value.dim()):
                if value.shape[dim] == length:
                    value = torch.cat((value, value), dim)
            return varied(value, segment.excludes) if i in self.masks else value

        for length in dict.fromkeys(flat[i].shape[-2] for i in inputs):
            where = (
                "with another length"
                if length > 1
                else "with more tokens than the example's one (give an example of at least two)"
            )
            longer = [twice(value, i, length) for i, value in enumerate(flat)]
            yield where, longer
            if conditions:
                yield where, [value if i in conditions else longer[i] for i, value in enumerate(flat)]
        if x.dim() < 3:
            return
        times = 3 if segment.computes else 2  # `followed` has seen two
        for more in samples(flat, x, set(inputs)) if segment.computes else [set(inputs)] * (len(x) == 1):
            others = {
                i: [torch.randn_like(flat[i]) if i in inputs else flat[i].flip(0) for _ in range(1, times)]
                for i in more
            }
            yield "with another batch", [torch.cat((v, *others[i])) if i in others else v for i, v in enumerate(flat)]


def check_numerics(form: Form, reading: Reading, call: Call, gradients: bool) -> tuple[Segment, float]:
    """Returns (the region of the first candidate that agrees with the forward, its error). Raises Unreadable."""
    module, check = form.module, RegionCheck(form, reading, call)
    flat, segment, best = check.flat, check.segment, math.inf
    others = {*segment.biases, *segment.conditions}.difference(segment.inputs, segment.constants)
    trained = [*segment.inputs, *(i for i in sorted(others) if is_floating(flat[i]))]
    parameters = [p for p in module.parameters() if p.requires_grad]
    theirs = results(check.original, flat, trained if gradients else None, parameters)
    reason = f"the numbers of {reading.op} are not finite, or have another shape"
    for candidate in reading.candidates():
        check.segment = Segment(module, candidate)
        try:
            error = difference(results(check.ours, flat, None), theirs[:1])  # most choices show in the output
            if error <= TOLERANCE and gradients:
                error = difference(results(check.ours, flat, trained, parameters), theirs)
                # in float32 sums over many tokens, such as a key bias has, differ by more, as does ReLU's mask near zero
                if TOLERANCE < error < math.inf:
                    with contextlib.suppress(Exception), in_float64(module):  # a forward may refuse float64
                        wider = mapped(double, flat)
                        own = [p for p in module.parameters() if p.requires_grad]
                        error = min(error, check.error(wider, trained, own))
        except (ValueError, TypeError, RuntimeError) as refusal:
            reason = f"ckptkern.{reading.op} refuses it: {refusal}"
            continue
        if error <= TOLERANCE:
            check.require(check.elsewhere())
            return check.segment, error
        best = min(best, error)
    raise Unreadable(reason if best == math.inf else f"the numbers of {reading.op} differ by {best:.1e}")


def mask_variants(module: nn.Module, call: Call, inputs: list[Tensor]) -> list[Call]:
    """Returns the call without masks, with bool masks and with additive masks: libraries decide from call to call which they
    pass. With a key_value, whose masks have its columns, returns all combinations."""
    places = list(inspect.signature(type(module).forward).parameters)[1:]
    names = [name for name in places if "mask" in name]
    x = inputs[0]
    B, S, _ = (1, *x.shape)[-3:]
    seen = [torch.ones(B, 1, S, tensor.shape[-2], dtype=torch.bool, device=x.device).tril() for tensor in inputs]
    added = [torch.zeros_like(m, dtype=x.dtype).masked_fill(~m, torch.finfo(x.dtype).min) for m in seen]
    if len(inputs) == 1:
        # attention layers with our implementation get padding masks [B, S]
        is_adopted = any(has_ours(getattr(m, "config", None)) for m in module.modules())
        padding = [seen[0][:, 0, -1]] if x.dim() == 3 and is_adopted else []
        variants = [{name: mask} for mask in (None, *seen, *added, *padding) for name in names]
    else:
        pairs = (pair for masks in (seen, added) for pair in itertools.product((None, *masks), repeat=len(names)))
        variants = [dict(zip(names, pair, strict=True)) for pair in pairs]
    args, kwargs = call
    by_place, calls = places[: len(args)], []  # of a forward with *args, whose arguments stay where they are
    for masks in variants:
        values = tuple(masks.get(name, value) for name, value in itertools.zip_longest(by_place, args))
        calls.append((values, kwargs | {name: mask for name, mask in masks.items() if name not in by_place}))
    return calls


def nearest_rows(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the three quarters of the rows of both that differ least."""
    ours, theirs = (rows.reshape(-1, rows.shape[-1]) for rows in (ours, theirs))
    nearest = (ours.float() - theirs.float()).square().sum(-1).argsort()[: max(3 * len(ours) // 4, 1)]
    return ours[nearest], theirs[nearest]


class Checked(NamedTuple):
    """Holds a fused module, with which others are compared.

    calls: the kinds of its calls; log: what the trace of its first checked call called.
    """

    name: str
    calls: list[tuple]
    fused: Fused
    log: list[tuple]


def fuse_like(checked: Checked, module: nn.Module, calls: list[Call], recompute: str) -> tuple[Fused, float, Call]:
    """Fuses a module that is like a checked one, as `fuse` does. Raises Unreadable if the same call shows a difference."""
    form, first = Form(module, calls), checked.fused
    form.fixed, form.reads = dict(first.form.fixed), first.form.reads
    segments = {
        pattern: Segment(module, segment.reading, segment.caches)
        for pattern, segment in first.segments.items()
        if segment is not None
    }
    call = next(call for call in map(form.complete, calls) if form.pattern(call) in segments)
    result = tried(form, call, (segments[form.pattern(call)].reading, checked.log))
    return Fused(form, segments, recompute), result.error, result.call


def fuse(
    name: str, module: nn.Module, calls: list[Call], recompute: str, checked: list[Checked]
) -> tuple[Fused, float, Call]:
    """Returns (the module's new forward, the largest error of its checks, a call that it takes).

    checked: the fused modules of the model, to which this one is added. Raises Unreadable if none of its calls can be read.
    """
    inner = list(module.modules())[1:]
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in (module, *inner)):
        raise Unreadable("it contains a BatchNorm, whose buffers a second forward would update")
    lists = [m for m in inner if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    # a model's layers are not traced, which would take a call of the whole model
    if any(len(set(map(type, m))) == 1 and not any(map(is_leaf, m)) for m in lists):
        raise Unreadable("it holds several layers of one class")
    if not (runs_class_forward(module) and all(map(untouched, inner))):
        raise Unreadable("it contains hooks, or a module with another forward than its class's")
    if why := why_unreadable(module):
        raise Unreadable(why)
    try:
        form = Form(module, calls)
    except Exception as error:  # a signature that Python cannot read
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    for other in checked:
        with contextlib.suppress(Exception):  # comparing someone's objects may raise: it is then checked by itself
            like = other.fused.module
            same_call = call_kinds(calls) == other.calls and same_inside(name, module, other.name, like)
            buffers = zip(module.buffers(), like.buffers(), strict=True)
            if same_call and all(x is y or torch.equal(x, y) for x, y in buffers):
                return fuse_like(other, module, calls, recompute)
    attempts: dict[tuple, Attempt] = {}  # by the pattern of their call

    def add(call):
        asked = form.complete(call)
        pattern = form.pattern(asked)
        if pattern not in attempts:
            attempts[pattern] = tried(form, asked)

    for call in calls:
        try:
            add(call)
        except Exception as error:  # a forward may raise anything: it is the module's reason
            reason = reason_of(error)
    if not attempts:
        adapter = why_unread(module)
        raise Unreadable(f"{adapter}: {reason}") if adapter else reason
    first = next(iter(attempts.values()))
    if first.segment.attends:
        flat = leaves_of(form.counting(first.call))
        inputs = [flat[i] for i in first.segment.inputs]
        for like in (first.call, first.asked) if first.segment.caches else (first.call,):
            for call in mask_variants(module, like, inputs):
                with contextlib.suppress(Exception):  # a mask that this module does not take
                    add(call)
    ignored = form.keywords
    for _, call, *_ in attempts.values():
        ignored = not_looked_at(module, call, [name for name in ignored if name in call[1]])
    form.fixed = {name: recomputed(form.example[1].get(name), itertools.repeat(None)) for name in ignored}
    segments = {form.pattern(attempt.asked): attempt.segment for attempt in attempts.values()}
    fused = Fused(form, segments, recompute)
    checked.append(Checked(name, call_kinds(calls), fused, first.log))
    return fused, max(attempt.error for attempt in attempts.values()), first.call


def runs_of(module: nn.Sequential, recompute: str) -> list[tuple[int, int, Fused, float]]:
    """Returns (start, stop, forward, error) of each run of layers that is fused. The longest runs are tried first."""
    layers, runs, start = list(module), [], 0
    while start < len(layers):
        stop = next((n for n in range(len(layers), start + 1, -1) if all(map(is_leaf, layers[start:n]))), start)
        while stop > start + 1 and isinstance(layers[start], nn.Linear):
            part = nn.Sequential(*layers[start:stop])
            part.training = module.training
            with contextlib.suppress(Unreadable):
                run, error, _ = fuse("", part, calls_of(layers[start]), recompute, [])
                runs.append((start, stop, run, error))
                break
            stop -= 1
        start = max(runs[-1][1], start + 1) if runs else start + 1
    return runs


def calls_of(linear: nn.Linear) -> list[Call]:
    """Returns calls that a linear layer takes, of tokens with and without a batch."""
    weight = linear.weight
    if weight.is_meta or not weight.is_floating_point():
        return []
    shapes = ((3, linear.in_features), (2, 3, linear.in_features))
    return [((torch.randn(shape, dtype=weight.dtype, device=weight.device),), {}) for shape in shapes]
