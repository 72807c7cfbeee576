"""Makes activation checkpoints around layers that are not one fused op, inside of which fused parts stay fused. Where nothing
is fused, chooses the modules to checkpoint by what each saves and what it takes.

One training forward is recorded, with what every module saves and which tensors it takes. A checkpoint saves a module's inputs,
and recomputes the rest in backward. Small checkpoints save more inputs, large ones recompute more at once: of all bounds on the
recomputed bytes, the chosen one has the lowest peak of a step. So a ResNet is cut at its blocks, whether they are in lists or
in attributes, and a long nn.Sequential between some of its layers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .. import memory
from ..nn.unmodified import runs_class_forward
from ..segments.recorded import drawn_elsewhere
from .binding import ORIGINAL_CLASS, Forward, General
from .check import ROUNDING, TOLERANCE, difference, random_parameters, results, wide
from .protection import SEED, seeded, unmoved
from .recorder import Saved, Step, step_of
from .trace import Call, Unreadable, is_floating, is_leaf, leaves_of, mapped, recomputed, settings, tensors_in


def is_listed(name: str, module: nn.Module) -> bool:
    """Returns whether the module is a member of a list of modules, and not made of leaves only."""
    return name.rpartition(".")[2].isdigit() and not all(map(is_leaf, module.children()))


def is_marked(module: nn.Module) -> bool:
    """Returns whether transformers' gradient checkpointing wraps modules of this class."""
    return isinstance(getattr(type(module), "gradient_checkpointing", None), bool)


def is_layer(name: str, module: nn.Module) -> bool:
    """Returns whether the module is a layer of a model, with its class's forward: not a stage with layers inside, and not
    one of a layer's experts."""
    places = [*map(str.isdigit, name.split("."))]  # one made of leaves only, in no other list, may be an attention
    is_member = is_listed(name, module) or (places[-1] and sum(places) == 1 and not is_leaf(module))
    if not ((is_member or is_marked(module)) and runs_class_forward(module)):
        return False
    inner = [(path, m) for path, m in module.named_modules() if m is not module]
    if is_marked(module):  # lists inside it are its parts, as T5's sublayers are
        return not any(is_marked(m) for _, m in inner)
    return not any(is_listed(path, m) for path, m in inner)


def held_by(module: nn.Module) -> list[tuple[str, int]]:
    """Returns the names and lengths of lists, dicts and sets that modules inside hold, and the names and ids of tensors in
    tuples: state that the next call reads, and that a recompute would find changed."""
    held = [item for m in module.modules() for item in m.__dict__.items()]
    sizes = [(name, len(value)) for name, value in held if type(value) in (list, dict, set)]
    return sizes + [(name, id(tensor)) for name, value in held if type(value) is tuple for tensor in tensors_in(value)]


def training_step(module: nn.Module, run: Callable, call: Call) -> tuple[list[Tensor | None], list]:
    """Runs a training step of the module in float32 at least, always from the same random state and with the same random
    parameters.

    Returns (all outputs with a graph as one tensor, followed by the gradients; the buffers and plain attributes that the
    step leaves). Raises Unreadable if the forward fills containers, which a recompute would fill again, or samples
    elsewhere than in torch.
    """

    def outputs(flat):
        args, kwargs = recomputed(call, iter(flat))
        values = [tensor.flatten() for tensor in tensors_in(run(*args, **kwargs))]
        return torch.cat([value for value in values if value.requires_grad])

    with seeded(), unmoved(module), random_parameters(module):
        module.train()
        before, states, flat = held_by(module), drawn_elsewhere(), leaves_of(mapped(wide, call))
        x = [i for i, value in enumerate(flat) if is_floating(value)][:1]
        tensors = results(outputs, flat, x, [p for p in module.parameters() if p.requires_grad])
        if filled := dict(set(held_by(module)) - set(before)):
            raise Unreadable(f"a checkpoint is not possible either: its forward fills {next(iter(filled))}")
        if states != (drawn := drawn_elsewhere()):
            torch.manual_seed(SEED)
            again = results(outputs, flat, x)  # a forward that seeds what it draws begins in any state
            if drawn != drawn_elsewhere() or not difference(again[:1], tensors[:1]) <= TOLERANCE:
                raise Unreadable(
                    "a checkpoint is not possible either: its forward draws from Python's or NumPy's random numbers, and a "
                    "recompute samples others. Draw from torch's"
                )
        left = [b.detach().clone() for b in module.buffers() if b.numel() and b.itemsize > 1]
        return tensors, [*left, *settings(module)]


def error_of(forward: General, call: Call, is_asked: bool, wanted=None) -> float | None:
    """Returns the largest relative error of a training step with a checkpoint; None if the module itself cannot be tested, and
    the checkpoint is asked for in any case. wanted: the module's own `training_step`, by default that of its forward. Raises
    Unreadable if results, buffers or attributes differ."""
    module, parts = forward.module, forward.parts
    forward.parts = in_parts = None  # only what was checked runs in parts
    try:
        wanted = wanted or training_step(module, module.forward, call)
        forward.parts = parts
        if parts is not None:  # the module stays whole if it cannot be cut, or if parts differ by more than rounding
            with contextlib.suppress(Exception):  # a forward may raise anything in parts
                in_parts = training_step(module, forward, call)
            differs = difference(in_parts[0], wanted[0]) if in_parts else math.inf
            if not differs <= ROUNDING:
                parts.is_whole, parts.why = True, f"its numbers differ in parts ({differs:.1e})"
        is_whole = parts is None or parts.is_whole
        (theirs, left), (ours, ours_left) = wanted, training_step(module, forward, call) if is_whole else in_parts
        error = difference(ours, theirs)
    except Unreadable:
        raise
    except Exception as problem:  # a forward may raise anything on random parameters, and in a checkpoint
        if wanted is None and is_asked:
            return None
        raise Unreadable(f"as an activation checkpoint it raises {type(problem).__name__}: {problem}") from problem
    if not error <= (TOLERANCE if is_whole else ROUNDING):
        raise Unreadable(f"its numbers differ as an activation checkpoint ({error:.1e})")
    for expected, other in zip(left, ours_left, strict=True):
        if isinstance(expected, dict) and expected != other:
            raise Unreadable(
                f"a checkpoint is not possible either: its forward changes {dict(expected.items() ^ other.items())}"
            )
        if isinstance(expected, Tensor) and not torch.allclose(expected, other, rtol=TOLERANCE, equal_nan=True):
            raise Unreadable("a checkpoint is not possible either: its forward changes a buffer")
    if not is_whole:
        parts.slices, in_slices = SLICES, math.inf
        with contextlib.suppress(Exception):
            in_slices = difference(training_step(module, forward, call)[0], theirs)
        parts.slices = 0
        how = next(filter(None, parts.plans.values()), None)
        if how is None or not in_slices <= ROUNDING:
            parts.why = f"its numbers differ in slices ({in_slices:.1e})" if how else parts.why or "it is not recorded"
            parts.is_whole = True
    if parts is not None:
        forward.how = f"as a whole: {parts.why}" if parts.is_whole else f"in parts: {how}"
    return error


SLICES = 3  # slices of each part, in a check
GAIN = 1.5  # a checkpoint saves at least this many times the bytes of its inputs
LOWER = 0.95  # checkpoints that nobody asked for must lower the peak to this share
BOUNDS = 64  # number of bounds that are tried


@dataclass(eq=False)
class Called:
    """Describes a call of a module. start, stop: the part of the record that it saves; takes: the storages of its inputs;
    at: when it began, by the clock of writes; inner: the calls in it."""

    module: nn.Module | None
    start: int = 0
    takes: Saved = field(default_factory=dict)
    at: int = 0
    stop: int = 0
    inner: list[Called] = field(default_factory=list)


class Record(Step):
    """Records what one training forward of a model saves besides parameters and buffers, in order, the calls of its modules,
    and when each storage was last written, on a clock of writes."""

    def __init__(self, model: nn.Module):
        super().__init__(backs=False, holds=True)
        self.model = model
        self.saves: list[tuple[Any, int]] = []
        self.written: dict[Any, int] = {}
        self.writes = 0
        self.root = Called(None)
        self.called: list[Called] = []  # in the order in which they begin
        self._stack = [self.root]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.writes += 1
                written = self.others(args[i] if i < len(args) else kwargs.get(argument.name))
                self.written |= dict.fromkeys(written, self.writes)
        return func(*args, **kwargs)

    def others(self, values) -> Saved:
        """Returns the storages of these values that are not parameters or buffers."""
        storages = memory.storages_of(tensors_in(values))
        return {key: size for key, size in storages.items() if key not in self.names}

    def save(self, tensor: Tensor) -> None:
        self.saves += self.others(tensor).items()

    def watch(self, i: int, name: str, module: nn.Module) -> list:
        def enter(module, args, kwargs):
            called = Called(module, len(self.saves), self.others((args, kwargs)), self.writes)
            self.called.append(called)
            self._stack[-1].inner.append(called)
            self._stack.append(called)

        def leave(module, args, output):
            self._stack.pop().stop = len(self.saves)

        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    def between(self, start: int, stop: int) -> Saved:
        return dict(self.saves[start:stop])


def recorded(model: nn.Module, call: Call) -> Record | None:
    """Records a training forward of the model, and leaves the model as it was. Returns None if the call raises in training."""
    record = Record(model)
    regions = [("", module) for module in outside_of_converted(model)]  # inside, a hook would change what runs
    with contextlib.suppress(Exception):
        step_of(model, call, regions, there=(), step=record)
        record.root.stop = len(record.saves)
        return record
    return None


class Cut:
    """Describes a possible checkpoint: of a module, or of the layers [first, last) of an nn.Sequential. begins: the module
    that is called first."""

    def __init__(
        self, record: Record, calls: Sequence[Called], module: nn.Module, layers: tuple[int, int] | None = None
    ):
        self.module, self.layers, self.begins = module, layers, calls[0].module
        self.start, self.stop, self.takes = calls[0].start, calls[-1].stop, calls[0].takes
        self.inside = record.between(self.start, self.stop)
        self.size = sum(self.inside.values())
        # a recompute would read later writes to its inputs
        self.is_read_only = all(record.written.get(key, 0) <= calls[0].at for key in self.takes)

    @property
    def gains(self) -> bool:
        return self.is_read_only and self.size >= GAIN * sum(self.takes.values()) > 0

    @functools.cached_property
    def part(self) -> nn.Module:
        """Returns the module, or an nn.Sequential of these layers alone."""
        return self.module if self.layers is None else nn.Sequential(*list(self.module)[slice(*self.layers)])


class Cuts:
    """Chooses the checkpoints of a recorded model. allowed: the modules that the caller allows; fixed: modules that are
    checkpoints in any case, unless they are inside larger ones; slices: an nn.Sequential may be cut between its layers."""

    def __init__(
        self, record: Record, allowed: Container[nn.Module], fixed: Collection[nn.Module] = (), slices: bool = True
    ):
        self.record, self.allowed, self.fixed, self.slices = record, allowed, fixed, slices
        self.names = {module: name for name, module in record.model.named_modules()}
        self.calls: dict[nn.Module, list[Called]] = {}
        for called in record.called:
            self.calls.setdefault(called.module, []).append(called)
        self.kinds = collections.Counter(tuple(map(type, m)) for m in self.names if type(m) is nn.Sequential)
        self.holds = {m for m in self.names if any(map(is_converted, m.modules()))}
        # a block of convolutions, or a member of a list, may be one checkpoint
        whole = {
            m
            for m, name in self.names.items()
            if m in allowed and m._modules and runs_class_forward(m) and (is_member(name, m) or has_convolutions(m))
        }
        whole = whole.difference(self.holds, (record.model,)).union(fixed).intersection(self.calls)
        self.whole = {m: {called: Cut(record, [called], m) for called in self.calls[m]} for m in whole}

    def within(self, bound: int, called: Called | None = None) -> Iterator[Cut]:
        """Yields the largest checkpoints in a call, or in the whole model, each of which recomputes at most `bound` bytes."""
        called = called or self.record.root
        cuts = self.whole.get(called.module, {})
        if called.module in self.fixed or (cuts and all(cut.size <= bound and cut.gains for cut in cuts.values())):
            yield cuts[called]
            return
        first, is_list = 0, self.is_list(called)
        while first < len(called.inner):
            inner, cut = called.inner[first], self.run(called, first, bound) if is_list else None
            if cut is not None:
                yield cut
            elif not is_converted(inner.module):
                yield from self.within(bound, inner)
            first = first + 1 if cut is None else cut.layers[1]

    def is_list(self, called: Called) -> bool:
        """Returns whether the call is of an nn.Sequential with convolutions that is called once and calls each of its layers
        once. It must be the only one with layers of these classes: repeated ones are a model's blocks."""
        module = called.module
        return (
            self.slices
            and type(module) is nn.Sequential
            and runs_class_forward(module)
            and len(self.calls[module]) == 1
            and [inner.module for inner in called.inner] == list(module)
            and self.kinds[tuple(map(type, module))] == 1
            and module in self.allowed
            and has_convolutions(module)
        )

    def run(self, called: Called, first: int, bound: int) -> Cut | None:
        """Returns the longest run of leaf layers from `first` on that is a checkpoint within the bound; None if the first
        layer is to be cut inside."""
        layers = called.inner[first:]
        most = next(
            (i for i, layer in enumerate(layers) if layer.module in self.holds or layer.module._modules), len(layers)
        )
        for count in range(most, 1, -1):
            cut = Cut(self.record, layers[:count], called.module, (first, first + count))
            if cut.size <= bound and cut.gains:
                return cut
        return None

    def peak(self, cuts: Sequence[Cut]) -> tuple[int, int]:
        """Returns (the estimated peak of a step, what its forward saves), in bytes. When backward reaches a saved tensor,
        what was saved before it is still allocated, and twice its size for gradients; in a checkpoint, also what was
        recomputed up to there."""
        seen: set[Any] = set()
        height = peak = done = 0

        def save(saved):
            nonlocal height, peak
            for key, size in saved:
                height += 0 if key in seen else size
                seen.add(key)
                peak = max(peak, height + 2 * size)

        for cut in cuts:
            save(self.record.saves[done : cut.start])
            save(cut.takes.items())
            before, inside = height, cut.inside.keys() - seen
            save(cut.inside.items())
            height, done = before, cut.stop
            seen -= inside
        save(self.record.saves[done:])
        return peak, height

    def best(self, is_asked: bool) -> list[Cut]:
        """Returns the checkpoints with the least peak of a step, and of those the ones whose forward saves least. is_asked:
        also if they do not lower the peak."""
        own = [cuts.values() for m, cuts in self.whole.items() if not any(inner in self.fixed for inner in m.modules())]
        lists = filter(self.is_list, self.record.called)
        # sizes of runs from the first layer on, in each list
        runs = {sum(self.record.between(outer.start, inner.stop).values()) for outer in lists for inner in outer.inner}
        sizes = sorted({cut.size for cuts in own for cut in cuts} | runs)
        bounds = sizes if len(sizes) <= BOUNDS else [sizes[i * (len(sizes) - 1) // (BOUNDS - 1)] for i in range(BOUNDS)]
        candidates = [(*self.peak(cuts), cuts) for bound in bounds if (cuts := list(self.within(bound)))]
        most = math.inf if is_asked else LOWER * self.peak(list(self.within(-1)))[0]
        lower = [candidate for candidate in candidates if candidate[0] <= most]
        return min(lower, key=lambda candidate: candidate[:2])[2] if lower else []


def is_converted(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), Forward) or ORIGINAL_CLASS in module.__dict__


def is_member(name: str, module: nn.Module) -> bool:
    """Returns whether the module is a member of a list, and has submodules and parameters."""
    return name.rpartition(".")[2].isdigit() and bool(module._modules) and any(True for _ in module.parameters())


def has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(inner, _ConvNd) for inner in module.modules())


def may_be_found(model: nn.Module) -> bool:
    """Returns whether convert left convolutions or members of lists unchanged."""
    left = outside_of_converted(model)
    return any(m in left and (isinstance(m, _ConvNd) or is_member(name, m)) for name, m in model.named_modules())


def outside_of_converted(model: nn.Module) -> set[nn.Module]:
    """Returns the modules that are neither converted nor inside a converted module."""
    inside = {m for outer in model.modules() if is_converted(outer) for m in outer.modules()}
    return set(model.modules()) - inside


def by_module(cuts: Iterable[Cut]) -> list[tuple[nn.Module, list[Cut]]]:
    """Returns each module with its cuts: runs of its layers, or one cut of all of it."""
    grouped: dict[nn.Module, list[Cut]] = {}
    for cut in cuts:
        if cut.layers is not None or cut.module not in grouped:  # it may be called again
            grouped.setdefault(cut.module, []).append(cut)
    return list(grouped.items())


def calls_of(model: nn.Module, call: Call, cuts: Sequence[Cut]) -> dict[nn.Module, Call]:
    """Returns the first call of each module with which one of these cuts begins, in a training forward of the model: some
    branches run in training only."""
    begin = list({cut.begins for cut in cuts})
    if not begin:
        return {}
    step = step_of(model, call, [("", module) for module in begin], there=(), step=Step(backs=False, holds=True))
    return {module: step.calls[i][0].call for i, module in enumerate(begin)}
