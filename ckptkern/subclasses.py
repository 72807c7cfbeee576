"""Classifies tensor subclasses: which are plain memory, and which have their own dispatch.

All ops and modules follow one rule. A tensor of a subclass is

- read as plain memory if the subclass changes no operation (class Named(torch.Tensor): pass);
- passed to the op if the subclass runs any op on the tensors it stands for (TRANSPARENT), as a Frozen weight does;
- computed with in PyTorch ops if the subclass has its own __torch_function__ or __torch_dispatch__ (DTensor, a quantized
  weight, a jagged nested tensor). Autograd then decides what is saved, and under backend("triton") an op raises. A module calls
  its submodules as an activation checkpoint (ckptkern.checkpoint), which saves the module's input;
- refused by name if no operation on it has a meaning (CausalBias, except as a mask).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))

# By name, because importing the classes would import torch._dynamo or torch.distributed.
TRANSPARENT = frozenset(
    (
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "ckptkern.frozen.Frozen",
    )
)

_UNCHANGED = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl, Tensor.__torch_dispatch__)


def constant(function):
    """Caches a function for the process, and marks it as torch.compiler.assume_constant_result does without importing
    torch._dynamo. Dynamo then calls it instead of tracing into Triton, the CUDA driver or a class's handlers."""
    cached = functools.cache(function)

    def call(*args):
        return cached(*args)

    call._dynamo_marked_constant, call.cache_clear = True, cached.cache_clear
    return call


@constant
def _has_own_operations(kind: type) -> bool:
    handlers = (kind.__torch_function__, kind.__torch_dispatch__)
    return f"{kind.__module__}.{kind.__qualname__}" not in TRANSPARENT and any(
        getattr(handler, "__func__", handler) not in _UNCHANGED for handler in handlers
    )


def own_dispatch(tensors: Iterable[Tensor | None]) -> type | None:
    """Returns the first class with its own dispatch; None if all tensors are plain memory."""
    if not torch.compiler.is_compiling() and PLAIN.issuperset(map(type, tensors)):
        return None
    for tensor in tensors:
        if type(tensor) not in PLAIN and isinstance(tensor, Tensor) and _has_own_operations(type(tensor)):
            return type(tensor)
    return None
