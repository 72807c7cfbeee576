"""One module: from the calls that were captured of it to its new forward."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .. import memory
from ..nn.plain import runs_class_forward, untouched
from ..subclasses import foreign
from .binding import Fused, Segment, Watch, pattern_of, regardless_of_precision, templates
from .grammar import read
from .leaves import Probability
from .proof import TOLERANCE, difference, random_parameters, results, unmoved, varied, wide_arguments
from .reading import Argument, Reading
from .trace import Unreadable, is_leaf, leaves_of, trace


def check_candidate(module: nn.Module) -> None:
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        raise Unreadable("it contains a BatchNorm, whose buffers a second forward would move")
    inner = list(module.modules())[1:]
    if not (runs_class_forward(module) and all(map(untouched, inner))):
        raise Unreadable("there are hooks inside, or a forward that is not its class's")
    kind = foreign(list(module.parameters()))
    if kind is not None:
        raise Unreadable(f"a parameter is a {kind.__name__}")


def result_of(output: object, arguments: list[Any]) -> tuple[Tensor, tuple | None]:
    """(the one tensor that a forward returns, how it lies in what is returned)."""
    if isinstance(output, Tensor):
        return output, None
    leaves, spec = tree_flatten(output)
    given = {id(value): i for i, value in enumerate(arguments) if isinstance(value, Tensor)}
    leaves = [Argument(given[id(one)]) if id(one) in given else one for one in leaves]
    tensors = [i for i, one in enumerate(leaves) if isinstance(one, Tensor)]
    others = [one for one in leaves if not isinstance(one, (Tensor, Argument, type(None)))]
    if len(tensors) != 1 or others:
        raise Unreadable(
            f"forward returns {len(tensors)} tensors" if len(tensors) != 1 else "forward returns an object"
        )
    at = tensors[0]
    return leaves[at], (spec, [None if i == at else one for i, one in enumerate(leaves)], at)


def attempt(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Segment, float]:
    """(the segment that was proven for these arguments, its error). Raises Unreadable."""
    if any(t.is_meta for t in module.parameters()):
        raise Unreadable("its parameters are on the meta device, where nothing can be proven")
    with unmoved(module), random_parameters(module):
        args, kwargs = wide_arguments(args, kwargs)
        module.train()  # shows where dropout is
        output, node = trace(module, args, kwargs)
        flat = leaves_of((args, kwargs))
        y, result = result_of(output, flat)
        reading = read(module, node(y))
        module.eval()
        return prove(module, reading, result, args, kwargs)


def prove(module: nn.Module, reading: Reading, result, args: tuple, kwargs: dict[str, Any]) -> tuple[Segment, float]:
    flat = leaves_of((args, kwargs))
    masks = {one.index for one in _arguments_named(reading.arguments, ("attn_mask", "key_padding_mask"))}
    flat = [varied(value) if i in masks else value for i, value in enumerate(flat)]
    x = torch.randn_like(flat[reading.x])
    parameters = [p for p in module.parameters() if p.requires_grad]

    def original(x: Tensor) -> Tensor:
        values = iter([x if i == reading.x else value for i, value in enumerate(flat)])
        args_, kwargs_ = _rebuilt((args, kwargs), values)
        return result_of(type(module).forward(module, *args_, **kwargs_), [])[0]

    theirs, best = results(original, x, parameters), math.inf
    for arguments in reading.candidates():
        segment = Segment(module, reading.op, arguments, reading.x)

        def fused(x: Tensor, segment: Segment = segment) -> Tensor:
            return segment([x if i == reading.x else value for i, value in enumerate(flat)], "full")

        try:
            with torch.no_grad():  # most choices show in the output
                error = difference([fused(x)], theirs[:1])
            if error <= TOLERANCE:
                error = difference(results(fused, x, parameters), theirs)
        except (ValueError, TypeError, RuntimeError) as refusal:
            reason = f"ckptkern.{reading.op} refuses it: {refusal}"
            continue
        if error <= TOLERANCE:
            segment.result = result
            return segment, error
        best = min(best, error)
    raise Unreadable(reason if best == math.inf else f"the numbers of {reading.op} differ by {best:.1e}")


def _arguments_named(template: dict[str, Any], names: tuple[str, ...]) -> Iterator[Argument]:
    for name, value in template.items():
        if isinstance(value, dict):
            yield from _arguments_named(value, names)
        elif name in names and isinstance(value, Argument):
            yield value


def _rebuilt(values: Any, leaves: Iterator[Any]) -> Any:
    """The same nesting with other leaves."""
    if type(values) in (tuple, list):
        return type(values)(_rebuilt(one, leaves) for one in values)
    if type(values) is dict:
        return {name: _rebuilt(one, leaves) for name, one in values.items()}
    return next(leaves)


def mask_variants(module: nn.Module, args: tuple, kwargs: dict[str, Any], x: Tensor) -> Iterator[tuple]:
    """The same call without a mask, with a bool one and with an added one: libraries decide from call to call which they
    hand on."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    places = {name: i for i, name in enumerate(names) if "mask" in name}
    B, S = (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, x.shape[0])
    seen = torch.ones(B, 1, S, S, dtype=torch.bool, device=x.device).tril()
    added = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)
    for mask in (None, seen, added):
        for name, i in places.items():
            if i < len(args):
                yield (*args[:i], mask, *args[i + 1 :]), kwargs
            elif name in kwargs or mask is not None:
                yield args, kwargs | {name: mask}


def is_cache(value: object) -> bool:
    """Does it collect keys and values from call to call?"""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def without_caches(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], list[int]]:
    """(args and kwargs with None in place of caches, the places of these)."""
    flat = leaves_of((args, kwargs))
    caches = [i for i, value in enumerate(flat) if is_cache(value)]
    args, kwargs = _rebuilt((args, kwargs), iter([None if i in caches else value for i, value in enumerate(flat)]))
    return args, kwargs | {"use_cache": False} if caches and "use_cache" in kwargs else kwargs, caches


def fuse(module: nn.Module, calls: dict[Any, tuple], recompute: str) -> tuple[Fused, float]:
    """(the module's new forward, the largest error of its proofs). Raises Unreadable if no call of it can be read."""
    check_candidate(module)
    segments, worst = {}, 0.0

    def add(pattern: tuple, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal worst
        args, kwargs, caches = without_caches(args, kwargs)
        segments[pattern], error = attempt(module, args, kwargs)
        segments[pattern].caches = caches
        worst = max(worst, error)

    for pattern, call in calls.items():
        try:
            add(pattern, *call)
        except Unreadable as why:
            reason = why
        except Exception as error:  # on random parameters a forward may raise anything
            reason = Unreadable(f"{type(error).__name__} in the probe: {error}")
    if not segments:
        raise reason
    first, segment = next(iter(segments.items()))
    if segment.op in ("attention_block", "transformer_layer"):
        for call in mask_variants(module, *calls[first], leaves_of(calls[first])[segment.x]):
            pattern = regardless_of_precision(pattern_of(*call, []))
            if pattern not in segments:
                with contextlib.suppress(Exception):  # a mask that this module does not take
                    add(pattern, *call)
    live = {(p.path, p.attribute) for s in segments.values() for p in templates(s.template, Probability)}
    return Fused(module, segments, Watch(module, live), recompute), worst


def runs_of(module: nn.Sequential, recompute: str) -> list[tuple[int, int, Fused, float]]:
    """(start, stop, what runs them, error) of the layers that are fused, the longest runs first."""
    layers, found, start = list(module), [], 0
    while start < len(layers):
        stop = next((n for n in range(len(layers), start + 1, -1) if all(map(is_leaf, layers[start:n]))), start)
        while stop > start + 1 and isinstance(layers[start], nn.Linear):
            part = nn.Sequential(*layers[start:stop]).train(module.training)
            with contextlib.suppress(Unreadable):
                found.append((start, stop, *fuse(part, calls_of(layers[start]), recompute)))
                break
            stop -= 1
        start = max(found[-1][1], start + 1) if found else start + 1
    return found


def calls_of(linear: nn.Linear) -> dict[Any, tuple]:
    """Calls that a linear layer takes, of tokens with and without a batch."""
    weight = linear.weight
    if weight.is_meta or not weight.is_floating_point():
        return {}
    shapes = ((3, linear.in_features), (2, 3, linear.in_features))
    calls = [((torch.randn(shape, dtype=weight.dtype, device=weight.device),), {}) for shape in shapes]
    return {regardless_of_precision(pattern_of(*call, [])): call for call in calls}


def kept_bytes(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any], x: int) -> int:
    """What one training call keeps, besides parameters and the arguments that it only reads."""
    flat = leaves_of((args, kwargs))
    flat = [v.detach().requires_grad_() if i == x else v for i, v in enumerate(flat)]
    shared = [v for i, v in enumerate(flat) if isinstance(v, Tensor) and i != x]
    args, kwargs = _rebuilt((args, kwargs), iter(flat))
    with unmoved(module), torch.enable_grad():
        module.train()
        exclude = [*module.parameters(), *module.buffers(), *shared]
        with memory.kept_tensors(exclude) as kept:
            forward(*args, **kwargs)
    return kept.bytes
