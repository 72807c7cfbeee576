"""One module: from the calls that were captured of it to its new forward."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..nn.unmodified import runs_class_forward, untouched
from .adapters import why_unread
from .alike import Checked, call_kinds
from .arguments import live_attributes, named, rescaled, templates
from .autocast import apart_in
from .binding import Fused, Segment, is_cache
from .calls import Call, Form, pattern_of, regardless_of_precision
from .check import ROUNDING, TOLERANCE, difference, in_float64, random_parameters, results, varied, wide
from .computed import computed_of, resolve
from .experts import read_experts, routed
from .followed import followed, is_floating, samples
from .grammar import read, read_call
from .guard import Watch
from .layouts import experts_layout, is_experts, parts_of
from .leaves import Leaves, Probability
from .masks import is_adopted
from .moe import read_block, routed_rows, vary_choices
from .protection import seeded, unmoved
from .quantized import autocast_like, why_unreadable
from .reading import Argument, Reading
from .reads import joined, reads_of
from .trace import Unreadable, is_leaf, leaves_of, mapped, trace
from .unread import Probabilities, are_probabilities


def check_candidate(module: nn.Module) -> None:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        raise Unreadable("it contains a BatchNorm, whose buffers a second forward would update")
    inner = list(module.modules())[1:]
    if any(map(is_stack, inner)):  # is not traced, which would take a call of the whole model
        raise Unreadable("it holds several layers of one class")
    if not (runs_class_forward(module) and all(map(untouched, inner))):
        raise Unreadable("it contains hooks, or a forward that is not its class's")
    if why := why_unreadable(module):
        raise Unreadable(why)


def is_stack(module: nn.Module) -> bool:
    """Is it a list of modules of one class that have modules inside, as models hold their layers?"""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
        return False
    return len({type(one) for one in module}) == 1 and not any(map(is_leaf, module))


def result_of(
    output: object, arguments: list[Any], unread: Callable[[Tensor], bool] = lambda one: False
) -> tuple[Tensor, tuple | None]:
    """(the one tensor that a forward returns, how it lies in what is returned). unread: may a placeholder stand for another?"""
    if isinstance(output, Tensor):
        return output, None
    leaves, spec = tree_flatten(output)
    given = {id(value): i for i, value in enumerate(arguments) if isinstance(value, Tensor)}
    leaves = [Argument(given[id(one)]) if id(one) in given else one for one in leaves]
    tensors = [i for i, one in enumerate(leaves) if isinstance(one, Tensor)]
    others = [one for one in leaves if not isinstance(one, (Tensor, Argument, type(None)))]
    for i in tensors[1:]:
        if unread(leaves[i]):
            leaves[i] = Probabilities()
    tensors = [i for i in tensors if isinstance(leaves[i], Tensor)]
    if len(tensors) != 1 or others:
        raise Unreadable(
            f"forward returns {len(tensors)} tensors" if len(tensors) != 1 else "forward returns an object"
        )
    at = tensors[0]
    return leaves[at], (spec, [None if i == at else one for i, one in enumerate(leaves)], at)


def seen(tensor: Tensor) -> bool:
    """A trace has seen that the other results are probabilities."""
    return True


def attempt(form: Form, args: tuple, kwargs: dict[str, Any]) -> tuple[Segment, float, list[tuple]]:
    """(the region that was checked for this complete call, its error, the trace's log). Raises Unreadable."""
    module = form.module
    if any(t.is_meta for t in module.parameters()):
        raise Unreadable("its parameters are on the meta device, where nothing can be checked")
    blocks = read_blocks(module, leaves_of(form.counting(args, kwargs)))
    with unmoved(module), random_parameters(module):
        vary_choices(module)
        args, kwargs = mapped(wide, (args, kwargs))
        flat = leaves_of(form.counting(args, kwargs))
        module.train()  # shows where dropout is
        if is_experts(module) or parts_of(module) is not None:
            with torch.no_grad():
                apart = apart_in(module, args, kwargs)
                _, result = result_of(type(module).forward(module, *args, **kwargs), flat)
            experts, log = is_experts(module), []
            reading = read_experts(module, flat) if experts else read_block(module, args, kwargs, flat, read_call)
        else:
            traced = trace(module, args, kwargs, flat)
            leaves = Leaves(module)
            y, result = result_of(traced.result, flat, lambda one: are_probabilities(leaves, traced.node(one)))
            reading, log, apart = read(module, traced.node(y), blocks), traced.log, traced.apart
            if any(computed_of([reading.arguments, reading.choices])):
                resolve(module, reading, followed(form, reading, traced, args, kwargs))
            with contextlib.suppress(Exception):  # a dtype that this forward does not take
                apart = apart and trace(module, args, kwargs, flat, torch.bfloat16).apart
        module.eval()
        try:
            segment, error = check_numerics(form, reading, result, args, kwargs)
        except Unreadable:
            if not (blocks or reading.op == "moe_block"):
                raise
            # two scores of a random token may be one up to rounding: then other tokens decide
            segment, error = check_numerics(form, reading, result, args, kwargs)
        form.reads = joined(form.reads, reads_of(module, args, kwargs))
    segment.apart = next(iter(apart), "")
    return segment, error, log


def read_blocks(module: nn.Module, flat: list[Any]) -> dict[str, Reading | Unreadable]:
    """Each MoE block inside as moe_block, checked by itself, or why it is none."""
    found: dict[str, Reading | Unreadable] = {}
    for path, block in module.named_modules():
        parts = parts_of(block) if path else None
        if parts is None:
            continue
        experts = block.get_submodule(parts.experts)
        d = experts.get_parameter(experts_layout(experts)["gate_up_weight"]).shape[-1]
        try:
            like = (
                one for one in flat if isinstance(one, Tensor) and one.is_floating_point() and one.shape[-1:] == (d,)
            )
            call = (torch.randn_like(next(like)),), {}
            form = Form(block, [call])
            segment = attempt(form, *form.complete(*call))[0]
            found[path] = Reading(segment.op, segment.template, segment.x, logits_of=segment.logits_of)
        except Unreadable as why:
            found[path] = why
        except Exception as error:  # on random inputs a forward may raise anything
            found[path] = Unreadable(f"{type(error).__name__} in the probe: {error}")
    return found


def random_call(form: Form, segment: Segment, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], set[int]]:
    """(the call's values with random inputs and masks, the places of the masks)."""
    masks = {one.index for one in named(segment.template, "attn_mask", "key_padding_mask")}
    flat = [
        varied(value, segment.excludes) if i in masks else value
        for i, value in enumerate(leaves_of(form.counting(args, kwargs)))
    ]
    random = {*segment.inputs, *(i for i in segment.conditions if is_floating(flat[i]))}
    return [torch.randn_like(value) if i in random else value for i, value in enumerate(flat)], masks


def check_numerics(form: Form, reading: Reading, result, args: tuple, kwargs: dict[str, Any]) -> tuple[Segment, float]:
    module = form.module
    segment = Segment(module, reading.op, reading.arguments, reading.x)
    inputs = segment.inputs
    flat, masks = random_call(form, segment, args, kwargs)
    others = {*segment.biases, *segment.conditions}.difference(inputs, segment.constants)
    trained = [*inputs, *(i for i in sorted(others) if is_floating(flat[i]))]
    parameters = [p for p in module.parameters() if p.requires_grad]

    def original(flat: list[Any]) -> Tensor:
        args_, kwargs_ = form.call_of(flat, args, kwargs)
        return result_of(type(module).forward(module, *args_, **kwargs_), flat, seen)[0]

    theirs, best = results(original, flat, trained, parameters), math.inf
    reason = f"the numbers of {reading.op} are not finite"
    for arguments in reading.candidates():
        segment = Segment(module, reading.op, arguments, reading.x, logits_of=reading.logits_of)

        def fused(flat: list[Any], segment: Segment = segment) -> Tensor:
            return segment(flat, "full")

        try:
            with torch.no_grad():  # most choices show in the output
                error = difference([fused(flat)], theirs[:1])
            if error <= TOLERANCE:
                error = difference(results(fused, flat, trained, parameters), theirs)
                if TOLERANCE < error < ROUNDING:
                    error = min(error, difference_in_float64(module, original, fused, flat, trained))
        except (ValueError, TypeError, RuntimeError) as refusal:
            reason = f"ckptkern.{reading.op} refuses it: {refusal}"
            continue
        if error <= TOLERANCE:
            check_elsewhere(segment, original, fused, flat, masks)
            segment.result = result
            return segment, error
        best = min(best, error)
    raise Unreadable(reason if best == math.inf else f"the numbers of {reading.op} differ by {best:.1e}")


def difference_in_float64(
    module: nn.Module, original: Callable, fused: Callable, flat: list[Any], trained: list[int]
) -> float:
    """That of results and gradients. In float32 sums over many tokens, such as a key bias has, differ by more."""
    flat = [value.double() if is_floating(value) else value for value in flat]
    try:
        with in_float64(module):
            parameters = [p for p in module.parameters() if p.requires_grad]
            return difference(*(results(run, flat, trained, parameters) for run in (fused, original)))
    except Exception:  # a forward may take no float64
        return math.inf


def check_elsewhere(segment: Segment, original: Callable, fused: Callable, flat: list[Any], masks: set[int]) -> None:
    """In training mode, for larger calls, and what a trace would show."""
    module = segment.module
    if not any(p.value for p in templates(segment.template, Probability)):  # some forwards differ in training alone
        module.train()
        check_enlarged("training", original, fused, flat)
        module.eval()
    with rescaled(module, segment.template) as any_scale:
        if any_scale:
            check_enlarged("another scale", original, fused, flat)
    others = enlarged(segment, flat, masks)
    if segment.op == "moe_mlp":  # which is not traced
        others = itertools.chain(others, routed(segment.template, segment.x, flat))
    if segment.op == "moe_block":
        others = itertools.chain(others, routed_rows(segment.given(flat), segment.x, flat))
    for what, other in others:
        check_enlarged(what, original, fused, other)


def enlarged(segment: Segment, flat: list[Any], masks: set[int]) -> Iterator[tuple[str, list[Any]]]:
    """The arguments of calls with twice as many tokens of each input, and with two samples in place of one, or twice as many
    samples if something is computed: of what is computed it is not known whether its sizes are the example's."""
    inputs, conditions = segment.inputs, segment.conditions
    if flat[inputs[0]].dim() < 2:
        return

    def twice(value: Any, i: int, length: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if i in inputs:
            return torch.cat((value, torch.randn_like(value)), -2) if value.shape[-2] == length else value
        for dim in range(value.dim() > 2, value.dim()):
            if value.shape[dim] == length:
                value = torch.cat((value, value), dim)
        return varied(value, segment.excludes) if i in masks else value

    for length in dict.fromkeys(flat[i].shape[-2] for i in inputs):
        what = (
            "another length" if length > 1 else "more tokens than the example's one (give an example of at least two)"
        )
        yield what, [twice(value, i, length) for i, value in enumerate(flat)]
        if conditions:
            yield what, [value if i in conditions else twice(value, i, length) for i, value in enumerate(flat)]
    if flat[inputs[0]].dim() < 3:
        return
    x = flat[inputs[0]]
    times = 3 if segment.computes else 2  # `followed` has seen two
    for more in samples(flat, x, set(inputs)) if segment.computes else [set(inputs)] * (len(x) == 1):
        others = {
            i: [torch.randn_like(flat[i]) if i in inputs else flat[i].flip(0) for _ in range(1, times)] for i in more
        }
        yield "another batch", [torch.cat((v, *others[i])) if i in others else v for i, v in enumerate(flat)]


def check_enlarged(what: str, original: Callable, fused: Callable, flat: list[Any]) -> None:
    """Do both still agree in what they return? Some forwards have a window or a scale that depends on sizes, and an example
    of one sample does not tell a batch from a sequence."""
    with torch.no_grad():
        try:
            with seeded():  # of what something computed samples
                theirs = original(flat)
        except Exception:  # a size that the module does not take, or arguments that were enlarged wrongly
            return
        try:
            with seeded():
                error = difference([fused(flat)], [theirs])
        except (ValueError, TypeError, RuntimeError) as refusal:
            raise Unreadable(f"with {what} the op refuses it: {refusal}") from None
    if error > TOLERANCE:
        raise Unreadable(f"with {what} the numbers differ by {error:.1e}")


def mask_variants(module: nn.Module, args: tuple, kwargs: dict[str, Any], inputs: list[Tensor]) -> Iterator[tuple]:
    """The same call without masks, with bool ones and with added ones: libraries decide from call to call which they hand on.
    With a key_value, whose masks have its columns, in all combinations."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    places = {name: i for i, name in enumerate(names) if "mask" in name}
    x = inputs[0]
    B, S = (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, x.shape[0])
    seen = [torch.ones(B, 1, S, one.shape[-2], dtype=torch.bool, device=x.device).tril() for one in inputs]
    least = torch.finfo(x.dtype).min
    added = [torch.zeros(m.shape, dtype=x.dtype, device=x.device).masked_fill(~m, least) for m in seen]

    def changed(masks: dict[str, Tensor | None]) -> tuple:
        values = list(args)
        for name, mask in masks.items():
            if places[name] < len(args):
                values[places[name]] = mask
        by_name = {name: mask for name, mask in masks.items() if places[name] >= len(args)}
        given = {name: mask for name, mask in by_name.items() if name in kwargs or mask is not None}
        return tuple(values), kwargs | given

    if len(inputs) == 1:
        padding = [seen[0][:, 0, -1]] if x.dim() == 3 and is_adopted(module) else []
        for mask in (None, *seen, *added, *padding):
            yield from (changed({name: mask}) for name in places)
        return
    for masks in (seen, added):
        for combination in itertools.product((None, *masks), repeat=len(places)):
            yield changed(dict(zip(places, combination, strict=True)))


def without_caches(form: Form, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], list[int]]:
    """(args and kwargs with None in place of caches, the places of these among the values that count)."""
    flat = leaves_of(form.counting(args, kwargs))
    caches = [i for i, value in enumerate(flat) if is_cache(value)]
    args, kwargs = form.call_of([None if i in caches else value for i, value in enumerate(flat)], args, kwargs)
    return args, kwargs | {"use_cache": False} if caches and "use_cache" in kwargs else kwargs, caches


def check_own_dtype(form: Form, segment: Segment, args: tuple, kwargs: dict[str, Any]) -> None:
    """In 16 bits, too, do both agree as far as rounding lets them? A forward may do another thing there."""
    module = form.module
    if all(p.dtype.itemsize >= 4 for p in module.parameters()):
        return
    flat = leaves_of(form.counting(args, kwargs))
    for size in (1, 16):  # also where such a forward would clamp
        flat[segment.x] = size * torch.randn_like(flat[segment.x])
        with unmoved(module), torch.no_grad(), autocast_like(module, flat[segment.x]):
            module.eval()
            given = form.call_of(flat, args, kwargs)
            theirs = result_of(type(module).forward(module, *given[0], **given[1]), flat, seen)[0]
            ours = result_of(segment(flat, "full"), flat)[0]
        if segment.routes:  # where a score rounds otherwise, a token goes to another expert
            ours, theirs = nearest_rows(ours, theirs)
        if (error := difference([ours.float()], [theirs.float()])) > 0.05:
            raise Unreadable(f"in {theirs.dtype} the numbers differ by {error:.1e}")


def nearest_rows(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Three quarters of the rows of both, those that differ least."""
    ours, theirs = (one.reshape(-1, one.shape[-1]) for one in (ours, theirs))
    order = (ours.float() - theirs.float()).square().sum(-1).argsort()
    return ours[order[: max(3 * len(order) // 4, 1)]], theirs[order[: max(3 * len(order) // 4, 1)]]


def fuse_like(checked: Checked, module: nn.Module, calls: list[Call], recompute: str) -> tuple[Fused, float, Call]:
    """`fuse` of a module that is like one that was checked. Raises Unreadable if the same call shows a difference."""
    form, first = Form(module, calls), checked.fused
    form.fixed, form.reads = dict(first.form.fixed), first.form.reads
    segments = {
        pattern: Segment(module, one.op, one.template, one.x, one.result, one.caches, one.logits_of, one.apart)
        for pattern, one in first.segments.items()
        if one is not None
    }
    args, kwargs = form.complete(*calls[checked.which])
    segment = segments[regardless_of_precision(pattern_of(form.counting(args, kwargs), []))]
    args, kwargs, _ = without_caches(form, args, kwargs)

    def original(flat: list[Any]) -> Tensor:
        args_, kwargs_ = form.call_of(flat, *wide_call)
        return result_of(type(module).forward(module, *args_, **kwargs_), flat, seen)[0]

    def fused(flat: list[Any]) -> Tensor:
        return result_of(segment(flat, "full"), flat)[0]

    with unmoved(module), random_parameters(module):
        vary_choices(module)
        wide_call = mapped(wide, (args, kwargs))
        flat, masks = random_call(form, segment, *wide_call)
        module.train()
        if checked.log and trace(module, *wide_call, leaves_of(form.counting(*wide_call))).log != checked.log:
            raise Unreadable("another trace")
        module.eval()
        with torch.no_grad():
            error = difference([fused(flat)], [original(flat)])
        if error > TOLERANCE:
            raise Unreadable(f"the numbers of {segment.op} differ by {error:.1e}")
        check_elsewhere(segment, original, fused, flat, masks)
    check_own_dtype(form, segment, args, kwargs)
    return Fused(form, segments, watch_of(form, segments), recompute), error, (args, kwargs)


def watch_of(form: Form, segments: dict[tuple, Segment]) -> Watch:
    module = form.module
    live = {one for s in segments.values() for one in live_attributes(module, s.template)}
    return Watch(module, form.reads, live, {s.logits_of for s in segments.values() if s.logits_of})


def fuse(
    name: str, module: nn.Module, calls: list[Call], recompute: str, checked: list[Checked]
) -> tuple[Fused, float, Call]:
    """(the module's new forward, the largest error of its checks, a call that it takes).

    checked: modules of the model that were fused, to which this one is added. Raises Unreadable if no call of it can be read.
    """
    check_candidate(module)
    try:
        form = Form(module, calls)
    except Exception as error:  # a signature that Python cannot read
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    for other in checked:
        with contextlib.suppress(Exception):  # comparing someone's objects may raise: it is then checked by itself
            if other.is_like(name, module, calls):
                return fuse_like(other, module, calls, recompute)
    segments: dict[tuple, Segment | None] = {}
    worst, asked, taken, found, logs = 0.0, [], [], [], []  # asked: with caches, taken: without
    which = 0  # the first call that was checked

    def add(args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal worst
        args, kwargs = form.complete(args, kwargs)
        pattern = regardless_of_precision(pattern_of(form.counting(args, kwargs), []))
        if pattern in segments:
            return
        whole = args, kwargs
        args, kwargs, caches = without_caches(form, args, kwargs)
        segment, error, log = attempt(form, args, kwargs)
        check_own_dtype(form, segment, args, kwargs)
        segment.caches = caches
        segments[pattern], worst = segment, max(worst, error)
        taken.append((args, kwargs))
        asked.append(whole)
        found.append(segment)
        logs.append(log)

    for i, call in enumerate(calls):
        is_first = not found
        try:
            add(*call)
            which = i if is_first else which
        except Unreadable as why:
            reason = why
        except Exception as error:  # on random parameters a forward may raise anything
            reason = Unreadable(f"{type(error).__name__} in the probe: {error}")
    if not segments:
        adapter = why_unread(module)
        raise Unreadable(f"{adapter}: {reason}") if adapter else reason
    segment = next(iter(segments.values()))
    if segment.attends:
        flat = leaves_of(form.counting(*taken[0]))
        inputs = [flat[i] for i in segment.inputs]
        for args, kwargs in (taken[0], asked[0]) if segment.caches else (taken[0],):
            for call in mask_variants(module, args, kwargs, inputs):
                with contextlib.suppress(Exception):  # a mask that this module does not take
                    add(*call)
    form.ignore(taken)
    segments = {
        regardless_of_precision(pattern_of(form.counting(*call), [])): one
        for call, one in zip(asked, found, strict=True)
    }
    made = Fused(form, segments, watch_of(form, segments), recompute)
    checked.append(Checked(name, module, call_kinds(calls), made, logs[0], which))
    return made, worst, taken[0]


def runs_of(module: nn.Sequential, recompute: str) -> list[tuple[int, int, Fused, float]]:
    """(start, stop, what runs them, error) of the layers that are fused, the longest runs first."""
    layers, found, start = list(module), [], 0
    while start < len(layers):
        stop = next((n for n in range(len(layers), start + 1, -1) if all(map(is_leaf, layers[start:n]))), start)
        while stop > start + 1 and isinstance(layers[start], nn.Linear):
            part = nn.Sequential(*layers[start:stop])
            part.training = module.training
            with contextlib.suppress(Unreadable):
                run, error, _ = fuse("", part, calls_of(layers[start]), recompute, [])
                found.append((start, stop, run, error))
                break
            stop -= 1
        start = max(found[-1][1], start + 1) if found else start + 1
    return found


def calls_of(linear: nn.Linear) -> list[Call]:
    """Calls that a linear layer takes, of tokens with and without a batch."""
    weight = linear.weight
    if weight.is_meta or not weight.is_floating_point():
        return []
    shapes = ((3, linear.in_features), (2, 3, linear.in_features))
    return [((torch.randn(shape, dtype=weight.dtype, device=weight.device),), {}) for shape in shapes]
