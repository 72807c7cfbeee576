"""Runs launchers without a GPU, as on any compute capability, with a function in place of every launch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch


@contextlib.contextmanager
def instead_of_launches(run: Callable, arch: int) -> Iterator[None]:
    """Calls `run(kernel, grid, args, kwargs)` in place of every launch. Launchers choose as on compute capability `arch`."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from .. import triton_kernels

    def launch(self, *args, grid, warmup, **kwargs):
        run(self, grid, args, kwargs)

    def arch_of(x):  # a Mock would hold x
        return arch

    with contextlib.ExitStack() as patches:
        for kind in (JITFunction, InterpretedFunction):  # under TRITON_INTERPRET=1
            patches.enter_context(mock.patch.object(kind, "run", launch))
        for name, module in list(sys.modules.items()):
            if name.startswith(triton_kernels.__name__ + ".") and hasattr(module, "arch_of"):
                patches.enter_context(mock.patch.object(module, "arch_of", arch_of))
        yield


class Chip(NamedTuple):
    """A GPU as launchers see it: compute capability, SMs, bytes of shared memory per block, and bytes of memory."""

    arch: int
    sms: int
    block_shared: int
    memory: int


def _always(answer: Any) -> Callable:
    """Returns a function that returns `answer` and, unlike a Mock, holds no argument."""
    return lambda *args, **kwargs: answer


@contextlib.contextmanager
def meta_as_on(chip: Any, run: Callable) -> Iterator[None]:
    """Lets meta tensors pass for tensors on a GPU: ops choose backend, tiles and chunks and allocate as there, and
    `run(kernel, grid, args, kwargs)` is called in place of every launch. chip: has a Chip's attributes."""
    from .. import triton_kernels  # noqa: F401  (patched below: has to be there)
    from ..ops.attention import core
    from ..ops.dispatch import choices
    from ..ops.registration import functions
    from ..triton_kernels import attention

    choices._impl.cache_clear()  # of another GPU
    with contextlib.ExitStack() as stack:
        stack.callback(choices._impl.cache_clear)
        stack.enter_context(instead_of_launches(run, chip.arch))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda t: t.is_meta), create=True))
        for owner, name, value in (
            (torch.cuda, "get_device_capability", _always(divmod(chip.arch, 10))),
            (attention, "shared_memory_of", _always(chip.block_shared)),
            (choices, "_device_reason", _always(None)),
            (choices, "default_workspace", _always(chip.memory // 32)),
            (core, "_accepts", _always(True)),
            (functions, "DISPATCHED", 0),  # so that op bodies run, not their fakes
            (functions, "_OBSERVED", 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
