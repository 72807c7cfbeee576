"""Records a layer's forward as a graph of ATen operators, on fake tensors, and leaves the layer as it was.

A call of a module that bounds its own memory, or of core attention, is one operator of the graph, `ckptkern::part`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..memory import storages_of
from ..ops.dispatch.choices import setting
from .stages import Call, Form, Uncut


class _Thread(threading.local):
    """State of this thread. calls: collects the calls that become one operator, if it is a list."""

    calls: list[Call] | None = None


_THREAD = _Thread()


PLAIN_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)
READS = "its forward reads values of tensors on the host"
SEEDS = 1000001517, 1000005091  # Python's and NumPy's numbers begin near 0, and near 1: a choice by chance differs


class Place(int):
    """A tensor's position in a list of tensors."""


def traced_calls(calls: list[Call] | None) -> contextlib.AbstractContextManager[None]:
    """Collects the calls that become one operator inside. None: nothing is collected."""
    return setting("calls", calls, _THREAD)


def is_traced() -> bool:
    """Returns whether a forward is recorded in this thread."""
    return _THREAD.calls is not None


def class_forward(module: nn.Module, args: tuple, kwargs: dict):
    """Runs the forward of the module's class, whatever forward the module itself has."""
    return type(module).forward(module, *args, **kwargs)


def traced_call(module: nn.Module | None, forward: Callable, args: tuple, kwargs: dict, along: str = "nothing"):
    """Records a call as one operator. module: the called module, or None for a function. forward: runs on fake tensors. along:
    the axis along which the call may be cut: "tokens", "heads" (of all its arguments) or "nothing"."""
    tensors, form = taken((args, kwargs))
    if any(isinstance(leaf, MutableMapping) for leaf in form[0]):
        raise Uncut("its forward passes a mapping to a submodule")
    call = Call(module, form, forward)
    _THREAD.calls.append(call)
    parameters = [] if module is None or along == "nothing" else list(module.parameters())
    results = torch.ops.ckptkern.part(tensors, parameters, len(_THREAD.calls) - 1, along)
    return filled(call.result, results)


def taken(value) -> tuple[list[Tensor], Form]:
    """Returns the tensors in a value, and its form without them."""
    flat, spec = tree_flatten(value)
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    places = iter(range(len(tensors)))
    return tensors, ([Place(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in flat], spec)


def filled(form: Form, tensors: Sequence):
    """Returns the value of this form with these tensors; undoes `taken`."""
    values, spec = form
    return tree_unflatten([tensors[leaf] if type(leaf) is Place else leaf for leaf in values], spec)


_library = torch.library.Library("ckptkern", "FRAGMENT")
_library.define("part(Tensor[] tensors, Tensor[] parameters, int place, str along) -> Tensor[]")


@torch.library.register_fake("ckptkern::part", lib=_library)
def _(tensors: list[Tensor], parameters: list[Tensor], place: int, along: str) -> list[Tensor]:
    call = _THREAD.calls[place]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = filled(call.arguments, tensors)
        results, call.result = taken(call.run(*args, **kwargs))
        if call.module is None and storages_of(results).keys() & storages_of(tensors).keys():
            raise Uncut("its autograd.Function returns an argument, which it may have changed")
        return results

    with traced_calls(None), torch._C.DisableTorchFunction():
        try:
            results = run(tensors)
        except Exception as error:  # a kernel that takes no fake tensors runs on zeros, for the shapes of its results
            is_final = call.module is not None or isinstance(error, (Uncut, DynamicOutputShapeException))
            if is_final or not all(map(torch.is_floating_point, tensors)):
                raise
            with _disable_current_modes(), torch.no_grad():
                zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
                kinds = [(y.shape, y.stride(), y.dtype, y.device) for y in run(zeros)]
            results = [torch.empty_strided(*kind[:2], dtype=kind[2], device=kind[3]) for kind in kinds]
    return [tensor.clone() for tensor in results]


@contextlib.contextmanager
def custom_functions() -> Iterator[None]:
    """Records each call of an autograd.Function, such as of a library's kernel, as one operator."""
    original = vars(Function)["apply"]  # of C in torch 2.15

    def apply(kind, *args, **kwargs):
        run = functools.update_wrapper(functools.partial(original.__get__(None, kind)), kind, ("__name__",), ())
        if not is_traced():
            return run(*args, **kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        if "<locals>" in kind.__qualname__ or not all(isinstance(leaf, (Tensor, *PLAIN_VALUES)) for leaf in leaves):
            raise Uncut("its autograd.Function may hold what belongs to this layer or call")
        return traced_call(None, run, args, kwargs)

    with mock.patch.object(Function, "apply", classmethod(apply)):
        yield


# detach, which torch 2.15 records as an alias
_library.define("stopped(Tensor x) -> Tensor")
torch.library.register_fake("ckptkern::stopped", torch.empty_like, lib=_library)


def drawn_elsewhere() -> dict[Callable, tuple]:
    """Returns the states of Python's and NumPy's global generators, which a recompute does not restore, by their setters."""
    states: dict[Callable, tuple] = {random.setstate: random.getstate()}
    if numpy := sys.modules.get("numpy.random"):
        kind, keys, *others = numpy.get_state()
        states[numpy.set_state] = kind, tuple(keys), *others
    return states


CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)  # the first that matches gives the methods


def refilled(container, contents) -> bool:
    """Puts the contents back into a container that holds other objects; returns whether it did."""
    now, then = ([*items, *(items.values() if isinstance(items, dict) else ())] for items in (container, contents))
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return False
    kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, collections.deque) else kind.update)(container, contents)
    return True


class Changed(Uncut):
    """Raised if a forward changes the state of modules."""


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restores attributes, buffers, containers and call counts of modules afterwards, and raises Changed if the block changed
    more than counts. Silences logs of operators that do not run on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    counts = [(f.calls, dict(f.calls)) for m in module.modules() if hasattr(f := vars(m).get("forward"), "calls")]
    held = [d for m in module.modules() for d in (vars(m), m._parameters, m._buffers)]
    held += [d for m in module.modules() for d in vars(m).values() if type(d) in (list, dict, set)]
    before = [(container, copy.copy(container)) for container in held]
    buffers = [(b, b.clone(), b._version) for b in module.buffers()]  # a recording does write into buffers
    was, log.disabled, changed = log.disabled, True, False
    try:
        yield
    finally:
        log.disabled = was
        for calls, count in counts:
            calls.update(count)
        for container, old in before:
            changed |= refilled(container, old)
        for buffer, value, version in buffers:
            if buffer._version != version:
                changed = True
                buffer.copy_(value)
    if changed:
        raise Changed("its forward changes what a module stores")


def recorded(module: nn.Module, function: Callable, fakes: list[Tensor]) -> tuple[fx.GraphModule, list[Call], dict]:
    """Records a function of the module. Returns (the graph, its calls, the states in which it leaves generators that it seeds).
    Raises Uncut if it does not seed what it draws from Python's or NumPy's, which would be constants of a plan."""
    was, runs = drawn_elsewhere(), []
    trace = make_fx(torch.func.functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True)
    try:
        for seed in SEEDS:
            for generators in filter(None, (random, sys.modules.get("numpy.random"))):
                generators.seed(seed)
            before, calls = drawn_elsewhere(), list[Call]()
            with unchanged(module), traced_calls(calls), custom_functions():
                graph = trace(*fakes)
            ends = {put: state for put, state in drawn_elsewhere().items() if state != before.get(put)}
            if not ends:
                return graph, calls, ends
            runs.append((graph, calls, ends))
    finally:
        for put, state in was.items():
            put(state)
    first, second = ((graph.code, *others) for graph, *others in runs)
    if first != second or not all(map(torch.equal, *(graph.state_dict().values() for graph, *_ in runs))):
        raise Uncut("its forward draws from Python's or NumPy's random numbers")
    return runs[0]


def grouped_mm(function: Callable, x: Tensor, weight: Tensor, *args, **kwargs) -> Tensor:
    """Runs torch's grouped_mm; on fake tensors, for which torch supports only 16-bit dtypes, returns an empty result."""
    if not isinstance(x, FakeTensor):
        return function(x, weight, *args, **kwargs)
    if (x.dim(), weight.dim()) != (2, 3):
        raise Uncut("its grouped_mm does not group rows")
    return x.new_empty(len(x), weight.shape[-1])


class Reads(TorchDispatchMode):
    """Refuses reads of values of tensors that are not fake, such as parameters: they would be constants of a plan."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.data_dependent_output in function.tags and not isinstance(args[0], FakeTensor):
            raise Uncut(READS)
        return function(*args, **(kwargs or {}))


class Recording(TorchFunctionMode):
    """Hides calls from other modes. A forward sees gradients on and off as in training, but no graph is recorded. Tensors that
    are detached, or computed while gradients are off, are marked by the operator `stopped`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._C._set_grad_enabled:
            return function(*args)
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in ("tolist", "numpy", "__array__"):
            raise Uncut(READS)
        if name.endswith("grouped_mm"):
            result = traced_call(None, grouped_mm, (function, *args), kwargs)
        else:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                result = function(*args, **kwargs)
        if name == "__get__" or (name != "detach" and torch.is_grad_enabled()):
            return result
        writes = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        if writes or name in ("__setitem__", "__set__") or (name.endswith("_") and name[-2] != "_") or "out" in kwargs:
            raise Uncut("its forward writes in place while gradients are off")
        return tree_map_only(
            Tensor, lambda tensor: torch.ops.ckptkern.stopped(tensor) if tensor.is_floating_point() else tensor, result
        )
