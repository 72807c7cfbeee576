"""Chooses the layers of a list that become segments (by a count, √L, every k, a bound in bytes or names) and runs them."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..memory import Storages, counting, format_size, parse_size, storages_of
from .checkpoint import checkpoint
from .reachable import caching_nothing

OPTIONS = frozenset(checkpoint.__kwdefaults__)
_ORDER = "a tensor: the order is checkpoint_sequential(layers, segments, input)"
Segments = int | str | Callable[[str, Callable], bool]


class Part(NamedTuple):
    """Layers [start, stop) of a list. recompute: they are one activation checkpoint."""

    start: int
    stop: int
    recompute: bool


def _named(functions) -> tuple[list[str], list[Callable]]:
    # named_children() leaves out what occurs twice
    named = functions._modules if isinstance(functions, nn.Module) else dict(enumerate(functions))
    return list(map(str, named)), list(named.values())


def split(functions: nn.Sequential | Sequence[Callable], segments: Segments, input: Tensor | None = None) -> list[Part]:
    """Returns the parts of a list of layers for a `segments` argument.

    segments:
      4            that many segments of equal length; the last takes the remainder and is not recomputed, because its
                   backward comes first (torch's rule)
      "sqrt"       round(√L) segments, as even as possible, the last not recomputed: the least memory for one more
                   forward pass (Chen et al., arXiv:1604.06174)
      "every 3"    segments of three successive layers, as `every=3` of convert and LayerStack; the last may be shorter
      "2GiB"       recomputes the fewest layers, those that save most first, so that at most this is saved for backward.
                   The layers are measured on fake tensors with the shapes and dtypes of `input`
      "block*"     each layer whose name matches (fnmatch) is a segment; names are those of the nn.Sequential's
                   children, or positions in the list
      a callable   (name, layer) -> bool: each layer for which it returns True is a segment

    Raises ValueError for more segments than layers, a pattern that matches no layer, a bound that a single segment
    already exceeds, and a bound without an input.
    """
    if isinstance(functions, Tensor) or not hasattr(functions, "__len__"):
        kind = _ORDER if isinstance(functions, Tensor) else type(functions).__name__
        raise TypeError(f"segments: expected an nn.Sequential or a list of layers, but found {kind}")
    names, layers = _named(functions)
    count = len(layers)
    starts = every = None
    text = segments if isinstance(segments, str) else ""
    if text == "sqrt":
        number = max(1, round(math.sqrt(count)))
        starts = [count * i // number for i in range(number)]
    elif isinstance(segments, int) and not isinstance(segments, bool):
        if not 1 <= segments <= max(count, 1):
            raise ValueError(f"segments must lie between 1 and the number of layers, {count}, but is {segments}")
        starts = [i * (count // segments) for i in range(segments)]
    elif every := re.fullmatch(r"every (\d+)", text):
        step = int(every[1])
        if step < 1:
            raise ValueError(f"segments must be 'every k' with k at least 1, but is {segments!r}")
        starts = [*range(0, count, step)]
    if starts is not None:
        return [Part(start, stop, bool(every) or stop < count) for start, stop in itertools.pairwise([*starts, count])]
    if (budget := parse_size(text)) is not None:
        if input is None:
            raise ValueError(f"segments={segments!r} is a bound in bytes, which needs an input to measure with")
        return _within(budget, layers, input)
    if isinstance(segments, str):
        chosen = [fnmatch.fnmatchcase(name, segments) for name in names]
    elif callable(segments):
        chosen = [bool(segments(name, layer)) for name, layer in zip(names, layers, strict=True)]
    else:
        raise ValueError(
            "segments must be a number of segments, 'sqrt', 'every k', a size like '2GiB', a name pattern or a callable "
            f"but is {_ORDER if isinstance(segments, Tensor) else repr(segments)}"
        )
    if not any(chosen):
        wanted = (
            ": it is neither 'sqrt' nor 'every k' (k a number) nor a size such as '2GiB' (B, KB, MB, GB, KiB, MiB or GiB), and "
            "no layer's name matches it as a pattern; a number of segments must be an int"
        )
        raise ValueError(
            f"segments={segments!r} chooses none of the layers {', '.join(names)}"
            f"{wanted if isinstance(segments, str) else ''}"
        )
    return _alone(chosen)


def _alone(chosen: Iterable[bool]) -> list[Part]:
    """Returns a part for every chosen layer, and one for every run of other layers."""
    parts: list[Part] = []
    for i, recompute in enumerate(chosen):
        if parts and not recompute and not parts[-1].recompute:
            parts[-1] = parts[-1]._replace(stop=i + 1)
        else:
            parts.append(Part(i, i + 1, recompute))
    return parts


# -- a bound in bytes -------------------------------------------------------------------------------------------------


def saved_by(function: Callable, x: Tensor) -> tuple[Any, Storages]:
    """Returns function(x) for a fake tensor x, and the storages saved for backward."""
    saved: Storages = {}
    with counting(lambda tensor: saved.update(storages_of([tensor])), hold=False):
        return function(x), saved


@contextmanager
def on_fakes() -> Iterator[FakeTensorMode]:
    """Runs functions on fake tensors inside: no arithmetic, memory or random numbers, and no statistics are changed."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), caching_nothing():
        yield mode


def _within(budget: int, layers: list[Callable], input: Tensor) -> list[Part]:
    saved, inputs = list[Storages](), list[Storages]()  # by each layer without a checkpoint
    with on_fakes() as mode:
        x = mode.from_tensor(input.detach()).requires_grad_(input.requires_grad)
        for layer in layers:
            own = (*layer.named_parameters(), *layer.named_buffers()) if isinstance(layer, nn.Module) else ()
            state = {name: mode.from_tensor(tensor) for name, tensor in own}
            function = functools.partial(torch.func.functional_call, layer, state) if state else layer
            inputs.append(storages_of([x]))
            x, storages = saved_by(function, x)
            for storage in storages_of(state.values()):
                storages.pop(storage, None)
            saved.append(storages)

    def size_of(parts):
        storages: Storages = {}
        for part in parts:
            for held in [inputs[part.start]] if part.recompute else saved[part.start : part.stop]:
                storages.update(held)
        return sum(storages.values())

    gain = [sum(held.values()) - sum(before.values()) for held, before in zip(saved, inputs, strict=True)]
    chosen = [False] * len(layers)
    for i in sorted(range(len(layers)), key=lambda i: -gain[i]):
        if size_of(_alone(chosen)) <= budget:
            return _alone(chosen)
        chosen[i] = True
    parts = _alone(chosen)
    while (size := size_of(parts)) > budget:  # join neighbours: the same recompute, fewer inputs, a higher peak
        if len(parts) == 1:
            raise ValueError(
                f"at most {format_size(budget)} may be saved, but one segment of all layers saves "
                f"{format_size(size)}, its input"
            )
        joined = [
            [*parts[:i], Part(parts[i].start, parts[i + 1].stop, True), *parts[i + 2 :]] for i in range(len(parts) - 1)
        ]
        # of the pairs that save most, the shortest: even segments have the lowest peak
        parts = min(joined, key=lambda some: (size_of(some), max(part.stop - part.start for part in some)))
    return parts


# -- running ----------------------------------------------------------------------------------------------------------


def run(functions: nn.Sequential | Sequence[Callable], parts: list[Part], input, **options):
    """Runs the layers in order, in parts returned by `split`. options: those of `checkpoint`."""
    _, layers = _named(functions)
    for part in parts:
        chain = _chain(layers[part.start : part.stop])
        input = checkpoint(chain, input, **options) if part.recompute else chain(input)
    return input


def _chain(layers: list[Callable]) -> Callable:
    if len(layers) == 1:
        return layers[0]

    def chain(input):
        for layer in layers:
            input = layer(input)
        return input

    return chain


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable],
    segments: Segments,
    input: Any,
    use_reentrant: bool | None = False,
    **options,
):
    """Runs a list of layers in segments, each an activation checkpoint, as ``torch.utils.checkpoint.checkpoint_sequential``.

    segments: a number, "sqrt", "every 2", a bound in bytes such as "2GiB", a name pattern, or a callable (name, layer) -> bool.
    `ckptkern.nn.Sequential` chooses once, this function at every call.
    options: those of `checkpoint`. Raises ValueError for segments that do not fit the layers.
    """
    if unknown := options.keys() - OPTIONS:
        raise ValueError(f"Unexpected keyword arguments: {','.join(sorted(unknown))}")
    if (
        torch._C._are_functorch_transforms_active()
    ):  # where `checkpoint` runs its function as it is, and nothing is measured
        return _chain(_named(functions)[1])(input)
    parts = split(functions, segments, input if isinstance(input, Tensor) else None)
    return run(functions, parts, input, use_reentrant=use_reentrant, **options)
