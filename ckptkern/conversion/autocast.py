"""Keeps autocast out of convert's checks, and finds what a forward keeps out of autocast.

A module is checked with autocast off, whatever the model's call switches on. A forward that switches autocast off around a
matmul, as models do for scores or routers in float32, is no fused op under autocast, which would round there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)


def device_types(module: nn.Module) -> list[str]:
    """Returns the device types of the module's tensors that have an autocast."""
    found = {t.device.type for t in (*module.parameters(), *module.buffers())}
    return sorted(kind for kind in found if kind != "meta" and is_autocast_available(kind))


@contextlib.contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Inside, autocast is off for the devices of the module."""
    with contextlib.ExitStack() as stack:
        for kind in device_types(module):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def switched_on(module: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Inside, autocast is on for the devices of the module; off, for a module with 16-bit parameters.

    One that casts to float32 changes no number of a float32 forward, which shows then where it switches autocast off.
    """
    if any(p.dtype in HALF for p in module.parameters()):
        with switched_off(module):
            yield
        return
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*autocast")  # of a forward that asks for the dtype of autocast in here
        for kind in device_types(module):
            stack.enter_context(torch.autocast(kind, torch.bfloat16, cache_enabled=False))
            torch.set_autocast_dtype(kind, dtype)
        yield


class Watched(TorchFunctionMode):
    """Notes of a forward inside of `switched_on` what it keeps out of autocast.

    apart: the functions around which it switches autocast off, and whose results would have fewer bits under autocast.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.kinds, self.dtype = frozenset(device_types(module)), dtype
        self.apart: list[str] = []

    def is_apart(self, result: object) -> bool:
        """Returns whether autocast is off now, or to another dtype, on the result's device."""
        if not isinstance(result, Tensor) or (kind := result.device.type) not in self.kinds:
            return False
        return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != self.dtype

    def would_round(self, function: Callable, args: tuple, kwargs: dict[str, Any], result: Tensor) -> bool:
        try:
            with torch.no_grad(), torch.autocast(result.device.type, torch.bfloat16):
                return function(*args, **kwargs).itemsize < result.itemsize
        except Exception:  # it returns something else, or takes no other dtype
            return False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.is_apart(result) and self.would_round(function, args, kwargs or {}, result):
            self.apart.append(getattr(function, "__name__", "a function"))
        return result


def apart_in(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """What the class's forward keeps out of autocast in this call."""
    with switched_on(module), Watched(module) as watched, torch.no_grad():
        type(module).forward(module, *args, **kwargs)
    return watched.apart


def is_rounded(module: nn.Module) -> bool:
    """Returns whether autocast hands 16-bit inputs to a module whose own parameters are float32."""
    if not torch._C._is_any_autocast_enabled():
        return False
    return not any(p.dtype in HALF for p in module.parameters()) and any(
        map(torch.is_autocast_enabled, device_types(module))
    )


def upcast(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a module's inputs would be without autocast: as they are, or in float32 if autocast rounded them."""
    if not is_rounded(module):
        return Tensor.detach
    return lambda one: one.detach().float() if one.dtype in HALF else one.detach()
