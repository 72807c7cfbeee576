"""Restores a model and all random states after a probe or a check.

A forward may change four things: random states (`seeded`), what modules hold (`unmoved`), gradients (`gradients_unmoved`) and
parameters. `no_trace` restores all of these after a whole call of convert. Checks inside it use `unmoved` alone, so that each
check begins as the last one did.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..segments.recorded import CONTAINERS, refilled
from .sharding import holds_sharded, is_sharded
from .trace import PLAIN_VALUES

SEED = 51_973  # seed of every check, independent of the user's
DEPTH = 3  # reaches lists of a nested configuration, but not the data of a trainer that a module holds
NOT_DATA = frozenset(
    ("builtins", "functools", "torch", "ckptkern")
)  # modules whose objects are functions, handles and what convert sets
# of a module: fully_shard gathers and frees parameters in each call, and registers hooks in the first
OF_FULLY_SHARD = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set", "_forward_hooks"}
FULLY_SHARD = "__composable_api_state_key"  # prefix of the attributes with fully_shard's state

# an object, and its attributes or items when it was noted
Held = tuple[Any, Any]


# -- random states


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Sets the seed of the global generators of torch, Python and NumPy, alike each time, and restores their states
    afterwards."""
    numpy = sys.modules.get("numpy.random")
    drawn = [random._inst, torch.default_generator]
    for accelerator in (torch.cuda, torch.xpu):  # torch.manual_seed would also seed those that are initialised later
        if accelerator.is_initialized():
            drawn += accelerator.default_generators
    if torch.backends.mps.is_available():
        drawn.append(torch.mps._get_default_mps_generator())
    if numpy is not None:
        drawn.append(numpy.mtrand._rand)
    restorers = [restorer_of(generator) for generator in drawn]
    try:
        for generator in drawn:
            (generator.manual_seed if isinstance(generator, torch.Generator) else generator.seed)(SEED)
        yield
    finally:
        for restore in restorers:
            restore()


def restorer_of(generator) -> Callable[[], None] | None:
    """Returns a function that restores a generator's present state; None for other objects."""
    numpy = sys.modules.get("numpy.random")
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, torch.Generator) or (numpy is not None and isinstance(generator, numpy.RandomState)):
        return functools.partial(generator.set_state, generator.get_state())
    if numpy is not None and isinstance(generator, numpy.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return None


# -- tensors


class Written:
    """Holds a tensor with its values, memory and requires_grad. values: None for a parameter, which is not copied."""

    def __init__(self, tensor: Tensor, values: Tensor | None):
        self.tensor, self.values, self.version = tensor, values, tensor._version
        self.requires_grad = tensor.requires_grad
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        self.memory = tensor.data if is_plain else None

    def restore(self) -> None:
        tensor, memory = self.tensor, self.memory
        if memory is not None and _place(tensor) != _place(memory):
            tensor.data = memory
        if tensor.requires_grad != self.requires_grad and tensor.is_leaf:
            tensor.requires_grad_(self.requires_grad)
        if self.values is None:
            return
        # torch's batch_norm writes its statistics without a new version
        compares = self.memory is not None and tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta
        if tensor._version != self.version or (compares and not torch.equal(tensor, self.values)):
            with torch.no_grad():
                tensor.copy_(self.values)
            self.version = tensor._version


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


# tensors copied by the outermost `unmoved`, which inner ones do not copy again
_COPIES: ContextVar[dict[int, Written] | None] = ContextVar("copies", default=None)


# -- modules


class _State:
    """Holds what modules hold, and what that holds, to a depth of DEPTH: attributes, items of containers, values of tensors
    and states of generators. Parameters are not copied, and other modules are not followed."""

    def __init__(self, modules: list[nn.Module], others: Iterable):
        self.held: list[Held] = []
        self.tensors: list[Written] = []
        self.restorers: list[Callable[[], None]] = []
        self.seen: set[int] = set()
        if any(map(is_sharded, modules)):
            self.seen.update(id(vars(m)[name]) for m in modules for name in OF_FULLY_SHARD)
        level = [*map(vars, modules), *others]
        for _ in range(DEPTH + 1):
            level = [item for value in level for item in self.taken(value)]

    def taken(self, value) -> Iterable:
        """Notes what the value holds, and returns it."""
        if type(value) in PLAIN_VALUES or id(value) in self.seen or isinstance(value, (type, nn.Module)):
            return ()
        self.seen.add(id(value))
        if isinstance(value, nn.Parameter):
            self.held.append((vars(value), dict(vars(value))))  # a quantised weight's scales
            return ()
        if isinstance(value, Tensor):
            if not (value.is_inference() or is_lazy(value)):
                written = (_COPIES.get() or {}).get(id(value))
                if written is None or written.tensor is not value or written.version != value._version:
                    written = Written(value, value.detach().clone())
                self.tensors.append(written)
            return ()
        if isinstance(value, tuple):
            return value
        if (restore := restorer_of(value)) is not None:
            self.restorers.append(restore)
            return ()
        if not isinstance(value, CONTAINERS):
            value = None if type(value).__module__.partition(".")[0] in NOT_DATA else getattr(value, "__dict__", None)
            if type(value) is not dict:
                return ()
        before = dict(value) if isinstance(value, dict) else list(value)
        self.held.append((value, before))
        if isinstance(before, list):
            return before
        return [item for name, item in before.items() if not (isinstance(name, str) and name.startswith(FULLY_SHARD))]

    def restore(self) -> None:
        for value, before in self.held:
            refilled(value, before)
        for restore in self.restorers:
            restore()
        for written in self.tensors:
            written.restore()


@contextlib.contextmanager
def unmoved(module: nn.Module, others: Iterable = ()) -> Iterator[None]:
    """Restores what the modules hold: modes, attributes, hooks, submodules, buffers and other tensors with their values, the
    contents of containers, and the attributes of objects such as configurations.

    others: more of such objects.
    """
    state = _State(list(module.modules()), others)
    is_outer = _COPIES.get() is None
    token = _COPIES.set({id(written.tensor): written for written in state.tensors}) if is_outer else None
    try:
        yield
    finally:
        if token is not None:
            _COPIES.reset(token)
        state.restore()


# -- training


@contextlib.contextmanager
def gradients_unmoved(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Sets gradients to None for a while, and disables the hooks that wait for them, such as those of an optimizer inside
    backward."""
    before = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    waiting = [(hooks, dict(hooks)) for _, _, hooks in before if hooks]
    try:
        for hooks, _ in waiting:
            hooks.clear()
        for p, _, _ in before:
            p.grad = None
        yield
    finally:
        for hooks, own in waiting:
            hooks.update(own)
        for p, grad, _ in before:
            p.grad = grad


@contextlib.contextmanager
def no_trace(module: nn.Module, call: tuple = ((), {})) -> Iterator[None]:
    """Restores the model, random states, gradients and the arguments of the call.

    Parameters stay the same objects in the same memory. The values of vectors and scalars are restored, too; those of matrices
    are not, because a copy would take the model's memory once more.
    """
    parameters = [p for p in module.parameters() if not (p.is_inference() or is_lazy(p))]
    sharded = is_sharded(module) or holds_sharded(module)
    args, kwargs = call
    with seeded(), gradients_unmoved(parameters), unmoved(module, (*args, *kwargs.values())):
        small = [Written(p, p.detach().clone() if p.dim() < 2 else None) for p in parameters if not sharded]
        try:
            yield
        finally:
            for written in small:
                written.restore()
