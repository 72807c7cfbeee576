"""A gradient that a collective still writes: a tensor that is waited for where it is first read.

An op's backward takes it as dy and does first what needs x alone. Views of it are as late as it is. Any other operation on it
waits, so a reader that has never heard of it is right, and only early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

VIEWS = frozenset((torch.ops.aten.view.default, torch.ops.aten.slice.Tensor))


class Late(Tensor):
    """A contiguous tensor that finish() waits for and returns; it is called once."""

    finish: Callable[[], Tensor] | None
    value: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, finish: Callable[[], Tensor]
    ) -> Late:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.finish, made.value = finish, None
        return made

    def arrived(self) -> Tensor:
        if self.finish is not None:
            self.value, self.finish = self.finish(), None  # what was held for it is freed
        return self.value

    def data_ptr(self) -> int:  # which kernels are launched with
        return self.arrived().data_ptr()

    def __repr__(self, **options: Any) -> str:
        return f"Late({list(self.shape)}, {self.dtype}, arrived={self.finish is None})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        late = args[0] if args else None
        if func in VIEWS and late.finish is not None and not kwargs:
            shape = func(torch.empty(late.shape, dtype=late.dtype, device="meta"), *args[1:]).shape
            return cls(shape, late.dtype, late.device, lambda: func(late.arrived(), *args[1:]))
        args, kwargs = tree_map_only(cls, cls.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_late(tensor: Tensor) -> bool:
    return type(tensor) is Late and tensor.finish is not None


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, waited for if it is late."""
    return tensor.arrived() if type(tensor) is Late else tensor
