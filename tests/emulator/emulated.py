"""Launches on CPU tensors by running the kernels' PTX (emulator), as a GPU of that architecture would run it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import numpy as np
import torch
from codegen.compiling import Compiled, compile_launch

import emulator
from ckptkern.benchmarks.compiling import instead_of_launches
from ckptkern.ops.dispatch import choices as _choices

ARCHS = (80, 90)
SCALARS = {
    "i1": np.uint8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "u8": np.uint8, "u16": np.uint16,
    "u32": np.uint32, "u64": np.uint64, "fp32": np.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Launch:
    """What was run, and the seconds that its compilation and its run took."""

    kernel: str
    arch: int
    counts: emulator.Counts
    compiled: float
    ran: float


@contextlib.contextmanager
def emulated(
    arch: int,
    change: Callable[[str], str] = lambda ptx: ptx,
    programs: Callable[[int], Iterable[int]] = range,
) -> Iterator[list[Launch]]:
    """Kernels are compiled for compute capability `arch` and emulated, whatever the device of their tensors; for tests.

    change: what is run in place of a kernel's PTX, to inject a fault. programs: of a grid of n, which CTAs run, in which
    order. Yields the list of launches. Raises emulator.Fault for what a kernel does wrong, and RuntimeError where
    Triton interprets.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("the emulator runs compiled kernels: use a process without TRITON_INTERPRET=1")
    launches: list[Launch] = []

    def run(kernel, grid, args, kwargs) -> None:
        started = time.perf_counter()
        compiled = compile_launch(kernel, args, kwargs, arch)
        ptx, tensors = change(compiled.ptx), Tensors()
        arguments = tensors.arguments(compiled)
        parameters = len(emulator.translate(ptx).kernel.parameters)
        arguments += [np.uint64(0)] * (parameters - len(arguments))  # scratch memory, which these kernels have none of
        grid = tuple(grid(compiled.bound) if callable(grid) else grid)
        ready = time.perf_counter()
        counts = emulator.run(ptx, grid, compiled.shared, arguments, tensors.all(), programs(int(np.prod(grid))))
        launches.append(Launch(kernel.fn.__name__, arch, counts, ready - started, time.perf_counter() - ready))

    with instead_of_launches(run, arch), mock.patch.object(_choices, "_device_reason", return_value=None):
        yield launches


class Tensors:
    """The storages of a launch at addresses far from each other, each with the bytes of the views that are passed."""

    FAR = 1 << 44  # bytes: no index that is wrong by less meets another tensor
    PAGE = 4096  # addresses keep their alignment up to this

    def __init__(self):
        self.storages: dict[int, list] = {}  # base, bytes, which of them are in views (None: all)

    def arguments(self, compiled: Compiled) -> list:
        """Parameters as Triton hands them over."""
        return [self.argument(kind, value) for kind, value in compiled.arguments]

    def argument(self, kind: str, value):
        """A parameter's value: a number, or the address of a tensor."""
        if not isinstance(value, torch.Tensor):
            return np.array(value).astype(SCALARS[kind])[()]
        storage = value.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if not value.data_ptr():  # as torch says of what has no elements
            return np.uint64(0)
        if start not in self.storages:
            data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
            base = (len(self.storages) + 1) * self.FAR + start % self.PAGE
            self.storages[start] = [base, data, np.zeros(size, bool)]
        base, _, allowed = self.storages[start]
        item = value.element_size()
        if allowed is not None and value.is_contiguous() and value.numel() * item == size:
            self.storages[start][2] = allowed = None
        if allowed is not None and value.numel():
            strides = [stride * item for stride in value.stride()]
            view = torch.from_numpy(allowed).as_strided(
                (*value.shape, item), (*strides, 1), value.storage_offset() * item
            )
            view.fill_(True)
        return np.uint64(base + value.data_ptr() - start)

    def all(self) -> list[emulator.Tensor]:
        return [emulator.Tensor(f"tensor {n}", *storage) for n, storage in enumerate(self.storages.values())]
