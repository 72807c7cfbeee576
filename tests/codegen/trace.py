"""Every launch of a step, caught on meta tensors that pass for tensors of a GPU: Triton's and torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ckptkern.benchmarks.compiling import Chip, meta_as_on


class Launch(NamedTuple):
    """A launch of a Triton kernel, with its grid and arguments, or of an op of torch, of which the name is all."""

    name: str
    kernel: Any = None
    grid: tuple[int, ...] | Callable = ()
    args: tuple = ()
    kwargs: Mapping[str, Any] = {}

    @property
    def named(self) -> dict[str, Any]:
        """Every argument by name."""
        return {**dict(zip((p.name for p in self.kernel.params), self.args, strict=False)), **self.kwargs}


ALLOCATES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "transpose_",
    "unsqueeze_",
}
# What a CUDA device has a kernel for and meta tensors have not, or not on every release: what it returns.
CUDA_ONLY = {
    "aten::mm.dtype": lambda a, b, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
    "aten::mm.dtype_out": lambda a, b, dtype, out: out,
    "aten::addmm.dtype": lambda c, a, b, dtype, **scales: c.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
    "aten::addmm.dtype_out": lambda c, a, b, dtype, out, **scales: out,
}


class _Log(TorchDispatchMode):
    """Appends every op of torch that launches something to `log`: all but views, allocations and what asks for sizes."""

    def __init__(self, log: list[Launch]):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = CUDA_ONLY.get(func.name(), func)(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        has_result = func._schema.is_mutable or any(isinstance(leaf, Tensor) for leaf in tree_leaves(out))
        if has_result and not func.is_view and name not in ALLOCATES:
            self.log.append(Launch(name))
        return out


@contextlib.contextmanager
def as_on(arch: int) -> Iterator[list[Launch]]:
    """Lets meta tensors pass for tensors of an H200 of that compute capability, 90 or another: ops choose backend, tiles and
    chunks as there. Yields the launches inside."""
    log: list[Launch] = []

    def caught(kernel, grid, args, kwargs) -> None:
        args = tree_map_only(Tensor, Tensor.detach, args)  # a gradient that is held twice would be copied
        log.append(Launch(kernel.fn.__name__, kernel, grid, args, kwargs))

    with meta_as_on(Chip(arch, 132, 232448, 140 * 2**30), caught), _Log(log):
        yield log
