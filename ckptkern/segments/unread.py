"""Placeholders for attention's probabilities among a layer's results, which callers rarely read: the original forward computes
them when they are read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ..ops.dispatch.choices import autocast_dtype

# Attributes of a placeholder that need no values: data parallelism reads them of all outputs, to hook those with a gradient,
# and a region of several layers reads versions.
ANSWERED = frozenset(
    getattr(Tensor, name).__get__ for name in ("_version", "device", "dtype", "grad_fn", "is_leaf", "requires_grad")
)


def when_read(forward: Callable[[], object], module: nn.Module, flat: list) -> Callable[[], list]:
    """Returns a function that runs an original forward once, in the modes of its call, and returns the leaves of its
    results."""
    reads = [value for value in (*module.parameters(), *flat) if isinstance(value, Tensor) and not value.is_inference()]
    versions, parameters = [tensor._version for tensor in reads], [*module.parameters()]
    x = next(value for value in flat if isinstance(value, Tensor))
    trains, dtype = torch.is_grad_enabled(), autocast_dtype(x)

    @functools.cache
    def leaves() -> list:
        moved = any(map(operator.is_not, module.parameters(), parameters))
        if moved or [tensor._version for tensor in reads] != versions:
            raise RuntimeError(
                "convert: attention's probabilities are computed when they are read, but a parameter or an argument of "
                "their layer has changed since the call; read them before the optimizer's step, and inside functional_call"
            )
        autocast = torch.autocast(x.device.type, dtype, dtype is not None) if x.is_cpu or x.is_cuda else nullcontext()
        with torch.inference_mode(False), torch.set_grad_enabled(trains), autocast:
            return tree_flatten(forward())[0]

    return leaves


class Unread(Tensor):
    """Stands for attention's probabilities until they are read: any function that takes them gets values, through which
    gradients flow. Their dropout samples anew."""

    original: Callable[[], list]  # `when_read`
    at: int

    @staticmethod
    def __new__(cls, original: Callable[[], list], at: int, like: Tensor) -> Unread:
        placeholder = Tensor._make_wrapper_subclass(cls, (0,), dtype=like.dtype, device=like.device)
        placeholder.original, placeholder.at = original, at
        return placeholder

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = read((args, kwargs or {}))
        return function(*args, **kwargs)


def read(values):
    """Returns the values with those of placeholders in them."""
    return tree_map_only(Unread, lambda tensor: tensor.__dict__["original"]()[tensor.__dict__["at"]], values)
