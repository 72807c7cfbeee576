"""The objects that a function can read besides its arguments, and the weights of `torch.nn.utils.parametrize.cached()`, which a
recompute restores, since backward runs after that block."""

from __future__ import annotations

import dis
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize

_lock = threading.RLock()  # parametrize's cache is one for all threads


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that the code reads as globals; `co_names` includes attributes."""
    names = (
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return tuple(dict.fromkeys(names))


def reachable_of(function: Callable, args: tuple) -> tuple[nn.Module | None, tuple]:
    """Returns the module that a call certainly runs, or None, and other objects that the call can reach.

    The module is the function itself, the object that it is bound to, or the `self` of a decorated method. The others are
    arguments of a partial object, attributes of another object that is called or bound, defaults, cells of the closure, and
    globals that the function's code names.
    """
    others = ()
    while isinstance(function, functools.partial):
        others += (*function.args, *function.keywords.values())
        function = function.func
    if isinstance(function, nn.Module):
        return function, others
    own = None
    if isinstance(function, types.MethodType):
        if isinstance(function.__self__, nn.Module):
            return function.__self__, others
        others += tuple(getattr(function.__self__, "__dict__", {}).values())
        function = function.__func__
    elif not isinstance(function, types.FunctionType):
        return None, (*others, *getattr(function, "__dict__", {}).values())
    elif args and isinstance(args[0], nn.Module):
        own = args[0]
    if isinstance(function, types.FunctionType):
        names = function.__globals__
        others += (
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
            *(function.__closure__ or ()),
        )
        others += tuple(names[name] for name in _globals_of(function.__code__) if name in names)
    return own, others


def modules_of(function: Callable, args: tuple, kwargs: dict) -> list[nn.Module]:
    """Returns the modules that a call runs or can reach, with their submodules."""
    own, others = reachable_of(function, args)
    values = [own, *args, *kwargs.values()]
    for value in others:
        try:
            values.append(value.cell_contents if isinstance(value, types.CellType) else value)
        except ValueError:  # not filled yet
            continue
    roots = [item for value in values for item in (value if type(value) in (list, tuple) else (value,))]
    return list(dict.fromkeys(m for root in roots if isinstance(root, nn.Module) for m in root.modules()))


# -- parametrize.cached()


def missing_weights(function: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[nn.Module, str]]:
    """Yields (module, name) of weights that a call may compute for parametrize.cached()."""
    for module in modules_of(function, args, kwargs):
        for name in module._modules.get("parametrizations") or ():
            if (id(module), name) not in parametrize._cache:
                yield module, name


def makes_cached(function: Callable, args: tuple, kwargs: dict) -> bool:
    """Returns whether a call inside parametrize.cached() is the first to compute a weight. Later calls read this weight, and a
    second computation may give another."""
    return parametrize._cache_enabled > 0 and any(True for _ in missing_weights(function, args, kwargs))


def cached_weights() -> dict | None:
    """Returns a copy of the cached weights; None outside parametrize.cached()."""
    return parametrize._cache.copy() if parametrize._cache_enabled else None


@contextmanager
def caching(weights: dict | None) -> Iterator[None]:
    """Sets the weights of parametrize.cached() inside; None: not cached. Weights computed inside are dropped."""
    with _lock:
        before = parametrize._cache, parametrize._cache_enabled
        parametrize._cache, parametrize._cache_enabled = dict(weights or {}), weights is not None
        try:
            yield
        finally:
            parametrize._cache, parametrize._cache_enabled = before


@contextmanager
def caching_nothing() -> Iterator[None]:
    """Drops the weights that a trial run inside adds to parametrize.cached(), which may be fake tensors or lack a graph."""
    with caching(cached_weights()):
        yield
