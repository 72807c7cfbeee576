"""The weights of `torch.nn.utils.parametrize.cached()`, which a recompute finds as forward had them: backward runs after the
block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from .reachable import modules_of

_lock = threading.RLock()  # parametrize's cache is one for all threads


def _missing(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[nn.Module, str]]:
    """Weights that a call may compute for parametrize.cached()."""
    for module in modules_of(function, args, kwargs):
        for name in module._modules.get("parametrizations") or ():
            if (id(module), name) not in parametrize._cache:
                yield module, name


def makes_cached(function: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether a call inside of parametrize.cached() is the first to compute a weight. Later calls read it, and its
    parametrization may give another one the second time."""
    return parametrize._cache_enabled > 0 and any(True for _ in _missing(function, args, kwargs))


def make_cached(function: Callable) -> None:
    """Computes the weights that `makes_cached` finds."""
    if parametrize._cache_enabled:
        for module, name in _missing(function, (), {}):
            getattr(module, name)


def cached_weights() -> dict | None:
    """Returns the weights so far; None outside of parametrize.cached()."""
    return parametrize._cache.copy() if parametrize._cache_enabled else None


@contextmanager
def caching(weights: dict | None) -> Iterator[None]:
    """Inside, these are the weights of parametrize.cached(); None: it is not entered. What is computed inside is dropped."""
    with _lock:
        before = parametrize._cache, parametrize._cache_enabled
        parametrize._cache, parametrize._cache_enabled = dict(weights or {}), weights is not None
        try:
            yield
        finally:
            parametrize._cache, parametrize._cache_enabled = before


@contextmanager
def caching_nothing() -> Iterator[None]:
    """Inside, for a trial run: it leaves neither weights of fake tensors in parametrize.cached(), nor any without a graph."""
    with caching(cached_weights()):
        yield
