"""Saves what an activation checkpoint's recompute needs: the call's arguments, modules' state, random state and precision.
csrc/segment_state.h in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.weak import TensorWeakRef

from .containers import CONTAINERS, take_apart
from .modules import SCALARS, ModuleState, is_of, unseen
from .precision import Precision

DEEPEST = 1000  # guards against a list that holds itself


class _Thread(threading.local):
    """State of a thread. outer: undo functions of each region that it is inside. drawings: the regions that it runs, as
    [draws, whether they are repeated, index of the next]."""

    def __init__(self) -> None:
        self.outer: list[tuple] = []
        self.drawings: list[list] = []


_thread = _Thread()


def drawn(sample: Callable[[], Tensor], depth: int | None = None) -> Tensor:
    """Returns the draw that the innermost region of this thread recorded at this place, or else a new `sample`. A region
    that does not preserve generators' states, as in a CUDA graph capture, which cannot read them, repeats its draws."""
    depth = len(_thread.drawings) if depth is None else depth
    if depth == 0:
        return sample()
    region = _thread.drawings[depth - 1]
    draws, repeats, place = region
    if repeats and place < len(draws):
        region[2] += 1
        return draws[place]
    state = drawn(sample, depth - 1)  # this region runs again inside another region's recompute
    if not repeats:
        draws.append(state)
    return state


def function_modes() -> tuple[Any, list]:
    return _C._get_torch_function_state(), _get_current_function_mode_stack()


def set_function_modes(modes: tuple[Any, list]) -> None:
    state, stack = modes
    while _C._len_torch_function_stack():
        _C._pop_torch_function_stack()
    for mode in stack:
        _C._push_on_torch_function_stack(mode)
    _C._set_torch_function_state(state)


_latest: dict[torch.device, TensorWeakRef] = {}


def read_generator(generator: torch.Generator) -> Tensor:
    """Returns the generator's state: the same tensor as long as nothing is drawn, so that many regions hold one."""
    try:
        state = generator.get_state()
    except RuntimeError as error:
        raise RuntimeError(
            f"ckptkern.checkpoint: the random state of {generator.device} cannot be read here: {error}. In a CUDA graph "
            "capture use preserve_rng_state=False, and ckptkern.dropout or ckptkern's layers for dropout: they replay their "
            "masks from a tensor of their own."
        ) from error
    latest = _latest.get(generator.device, lambda: None)()
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        if latest is not None and torch.equal(latest, state):
            return latest
        _latest[generator.device] = TensorWeakRef(state)
    return state


class _Saved(torch.autograd.Function):
    """Holds tensors as autograd's saved variables: active saved-tensor hooks see them, and a change in place raises when
    they are read."""

    @staticmethod
    def forward(ctx, root, tensors):
        ctx.save_for_backward(*tensors)  # in a list, so that they are not inputs with edges
        return Tensor._make_subclass(Tensor, _EMPTY)  # invisible to modes


_EMPTY, _ROOT = torch.empty(0, device="cpu"), torch.empty(0, device="cpu", requires_grad=True)


def saved(tensors: list[Tensor]) -> Tensor:
    """Saves tensors in a node that lives as long as the returned tensor. Their hooks run as the caller's code does."""
    if torch.is_grad_enabled():
        return _Saved.apply(_ROOT, tensors)
    with torch.enable_grad():  # only if needed: torch function modes see it
        return _Saved.apply(_ROOT, tensors)


class SegmentState(ModuleState):
    """The state that a call reads, recorded in forward. enter() restores it, exit() restores what was there before enter().

    own: the module that the call runs, or None. reachable: what else the function can reach: its closure's cells, defaults,
    globals. values: the recompute needs every value of forward, also running statistics that it only updates. draws: whether
    forward must run between record() and stop().
    """

    def __init__(self, args: tuple, kwargs: dict, preserve_rng_state: bool, values: bool, own, reachable: tuple):
        super().__init__(values)
        self.precision, self.modes = Precision(), function_modes()
        self.tensors: list[Tensor] = []  # each once: the recompute of mha(x, x, x) gets one x
        self.known: dict[int, int] = {}  # id -> index in tensors
        self.caches: list[tuple[int, TensorWeakRef, int]] = []  # index, tensor, version before forward
        with _C.DisableTorchFunction():
            if own is not None:
                self.add_module(own, own=True)
            self.given = self.take((args, kwargs), -1)
            for value in reachable:
                self.reach(value)
            devices = dict.fromkeys(x.device for x in self.tensors if x.device.type not in ("cpu", "meta"))
        tensors, self.tensors, self.known = self.tensors, [], {}
        alone = [place for place, *_ in self.caches]
        groups = [[i for i in range(len(tensors)) if i not in alone], *([i] for i in alone)]
        self.nodes = [(places, saved([tensors[i] for i in places])) for places in groups if places]
        self.random: list[tuple[torch.Generator, Tensor]] = []
        if preserve_rng_state:
            of_devices = (torch.get_device_module(d).default_generators[d.index] for d in devices)
            generators = [torch.default_generator, *self.generators, *of_devices]
            self.random = [(generator, read_generator(generator)) for generator in generators]
        self.recorded: list[Tensor] | None = [] if not preserve_rng_state or _thread.drawings else None

    @property
    def draws(self) -> bool:
        return self.recorded is not None

    def record(self) -> None:
        _thread.drawings.append([self.recorded, False, 0])

    def stop(self) -> None:
        _thread.drawings.pop()

    def take(self, value, depth: int):
        """Returns an argument tree with a number in place of every tensor: (what makes a container, its children) or (None,
        the object). depth: 0 for the tuple of arguments and the dict of keywords, 1 for an argument."""
        if depth > DEEPEST:
            raise RecursionError("the arguments of a region are nested more than 1000 deep")
        if is_of(value, Tensor) and not value.is_inference():  # autograd cannot save inference tensors
            place = self.known.setdefault(id(value), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(value)
                if depth > 1 and not value.requires_grad:
                    self.caches.append((place, TensorWeakRef(value), value._version))
            return place
        kind, make = type(value), None
        if kind is tuple or kind is list:
            make, items = kind, value
        elif is_of(value, tuple) and hasattr(value, "_make"):
            make, items = kind._make, value
        elif kind is dict:
            keys, items = list(value), value.values()
            make = lambda held: dict(zip(keys, held, strict=True))  # noqa: E731
        elif kind not in SCALARS and not is_of(value, type):
            if issubclass(kind, CONTAINERS) or hasattr(kind, "__dataclass_fields__"):
                items, make = take_apart(value) or ((), None)
            if make is None:
                self.reach(value, depth)
        return make, value if make is None else [self.take(item, depth + 1) for item in items]

    def arguments(self) -> tuple[tuple, dict]:
        """Returns the (args, kwargs) of forward. Runs unpack hooks, and so a parent region's recompute."""
        tensors = {i: x for places, node in self.nodes for i, x in zip(places, node.grad_fn.saved_tensors, strict=True)}
        return given_again(self.given, tensors)

    @unseen
    def settle(self) -> None:
        """Notes after forward what forward itself updated: its writes into a nested tensor without gradient (a cache) are
        not errors."""
        super().settle()
        for place, reference, version in self.caches:
            x = reference()
            if x is not None and x._version != version:
                self.nodes = [(places, saved([x]) if places == [place] else node) for places, node in self.nodes]

    def enter(self) -> None:
        self.precision.__enter__()
        undo: list[Callable[[], None]] = []
        _thread.outer.append((undo, function_modes()))
        try:
            before = [(generator, read_generator(generator)) for generator, _ in self.random]
            undo.append(lambda: restore(before))
            if self.recorded is not None:
                _thread.drawings.append([self.recorded, True, 0])
                undo.append(_thread.drawings.pop)
            restore(self.random)
            with _C.DisableTorchFunction():
                self.enter_modules(undo)
            set_function_modes(self.modes)
        except BaseException:
            self.exit()
            raise

    def exit(self) -> None:
        if not _thread.outer:
            raise RuntimeError("SegmentState: exit without enter on this thread")
        undo, modes = _thread.outer.pop()
        set_function_modes(modes)
        with _C.DisableTorchFunction():
            for function in reversed(undo):
                function()
        self.precision.__exit__()


def given_again(taken, tensors: dict[int, Tensor]):
    """Puts together what `take` took apart."""
    if type(taken) is int:
        return tensors[taken]
    make, held = taken
    if make is None:
        return held
    held = [given_again(child, tensors) for child in held]
    return make(tuple(held))


def restore(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
