"""Tensor subclasses: whose memory is the tensor, and who says itself what an operation of torch does with it.

The rule of all ops and modules. A tensor of a subclass is
- read as memory where the subclass changes no operation (class Named(torch.Tensor): pass); results are of the class that
  torch gives them;
- handed to the op where the subclass runs any op on the tensors it stands for (TRANSPARENT);
- composed of PyTorch ops, which the subclass knows, where it has operations of its own: a __torch_function__ or a
  __torch_dispatch__ (DTensor, a quantized weight, a jagged nested tensor). Plain autograd differentiates these and keeps
  what it keeps; under backend("triton") an op raises then, while a module calls its submodules;
- refused by name where no operation has a meaning (CausalBias, but for the mask that it is).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))

# By name: they come with torch._dynamo or torch.distributed, which a process may never import.
TRANSPARENT = frozenset((
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
))  # fmt: skip

_UNCHANGED = (
    Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl, Tensor.__torch_dispatch__
)  # fmt: skip


@functools.cache
def _has_own_operations(kind: type) -> bool:
    handlers = (kind.__torch_function__, kind.__torch_dispatch__)
    return f"{kind.__module__}.{kind.__qualname__}" not in TRANSPARENT and any(
        getattr(handler, "__func__", handler) not in _UNCHANGED for handler in handlers
    )


def _constant_has_own_operations(kind: type) -> bool:
    return _has_own_operations(kind)


_constant_has_own_operations._dynamo_marked_constant = True  # as in ops/_choices: called, not traced


def foreign(tensors: Iterable[Tensor | None]) -> type | None:
    """The first class among them with operations of its own, or None: their memory is what they are."""
    if not torch.compiler.is_compiling() and PLAIN.issuperset(map(type, tensors)):
        return None
    for tensor in tensors:
        if type(tensor) not in PLAIN and isinstance(tensor, Tensor) and _constant_has_own_operations(type(tensor)):
            return type(tensor)
    return None
