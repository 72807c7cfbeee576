"""Moves saved tensors to the host: pinned buffers for a GPU, memory-mapped files for a CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..memory import changed_in_place
from .store import MIN_BYTES, Store


class Flight:
    """A copy under way. `resident`, its end on the device, belongs to stream `home`, which waits for the copy if the flight
    is dropped before the copy has landed."""

    def __init__(self, resident: Tensor, home=None):
        self.resident, self.home, self.event = resident, home, None

    def landed(self) -> bool:
        return self.event is None or self.event.query()

    def join(self, stream) -> None:
        """Lets `stream` read, overwrite and free `resident` from here on. The host does not wait."""
        if self.event is not None:
            stream.wait_event(self.event)
            self.resident.record_stream(stream)  # does nothing if resident was allocated on that stream
            self.event = None

    def __del__(self):
        if not self.landed():
            self.join(self.home)


class _Copy:
    """A run in a host buffer. `out`: the flight there, until it has landed; `back`: a prefetched flight back."""

    def __init__(self, lane: _Lane, whole: Tensor, flat: Tensor, number: int):
        self.lane, self.number = lane, number
        self.whole, self.buffer = whole, whole[: flat.nbytes]  # not its _base: in a torch dispatch mode a view has none
        self.dtype, self.version = flat.dtype, flat._version
        self.out = self.back = self.error = None

    def __del__(self):
        # all copies of a lane run in order, so a copy that is still using the buffer comes before the next one into it
        self.lane.free.setdefault(self.whole.numel(), []).append(self.whole)


class _Lane:
    """Copies in order, while the GPU computes: between a GPU and pinned memory on one side stream, or between a CPU and
    memory-mapped files."""

    def __init__(self, device: torch.device, directory: str, prefetch: int, in_flight: int):
        self.device, self.directory, self.prefetch, self.in_flight = device, directory, prefetch, in_flight
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: dict[int, list[Tensor]] = {}
        self.bytes = 0
        self.pending: deque[tuple[Flight, weakref.ref[_Copy]]] = deque()  # flights out whose sources are still held
        self.copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self.count = 0
        self.ahead: list[weakref.ref[_Copy]] = []
        self.lock = threading.RLock()  # a graph's destructors may run in the middle of anything

    def take(self, nbytes: int) -> Tensor:
        """Returns a host buffer, uint8 of at least `nbytes`."""
        size = 1 << (max(nbytes, 4096) - 1).bit_length()
        with contextlib.suppress(KeyError, IndexError):  # another thread may take the last one
            return self.free[size].pop()
        if self.side is not None:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        else:
            try:
                with tempfile.NamedTemporaryFile(
                    prefix="ckptkern-", dir=self.directory
                ) as file:  # the mapping outlives it
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # a sparse file on a full disk kills the process when written
                    buffer = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            except OSError as error:
                message = f"offload: not enough space for {size} bytes: {error.strerror}"
                raise OSError(error.errno, message, self.directory) from error
        self.bytes += size
        return buffer

    def stream(self):
        return None if self.side is None else torch.cuda.current_stream(self.device)

    def send(self, source: Tensor, buffer: Tensor) -> Flight:
        if self.side is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("offload: a forward pass under CUDA graph capture cannot move its tensors to the host")
        return self._start(buffer, source, Flight(source, self.stream()))

    def bring(self, buffer: Tensor, home) -> Flight:
        with torch.cuda.stream(home):  # allocated where it is used: no other stream has to give it back
            resident = torch.empty(buffer.numel(), dtype=torch.uint8, device=self.device)
        return self._start(resident, buffer, Flight(resident, home))

    def _start(self, target: Tensor, source: Tensor, flight: Flight) -> Flight:
        if self.side is None:
            target.copy_(source)
            return flight
        self.side.wait_stream(flight.home)
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            flight.event = self.side.record_event()
        return flight

    def put(self, flat: Tensor) -> _Copy:
        source = flat.view(torch.uint8)
        with self.lock:
            copy = _Copy(self, self.take(source.numel()), flat, self.count)
            copy.out = self.send(source, copy.buffer)
            self.copies[copy.number] = copy
            self.count += 1
            self.pending.append((copy.out, weakref.ref(copy)))
            self.settle()
        return copy

    def settle(self) -> None:
        """Releases the sources whose copies have landed, and in any case the oldest beyond `in_flight`."""
        while self.pending:
            flight, weak = self.pending[0]
            if not flight.landed() and len(self.pending) <= self.in_flight:
                return
            copy = weak()
            if copy is not None:
                copy.out = None
                if flight.resident._version != copy.version:  # before the copy or after it: the host cannot tell
                    copy.error = changed_in_place(flight.resident, copy.version)
            self.pending.popleft()

    def get(self, copy: _Copy) -> Tensor:
        with self.lock:
            self.settle()
            if copy.error is not None:
                raise copy.error
            if copy.out is not None:  # the source is still here
                if copy.out.resident._version != copy.version:
                    raise changed_in_place(copy.out.resident, copy.version)
                resident = copy.out.resident
            else:
                flight, copy.back = copy.back or self.bring(copy.buffer, self.stream()), None
                flight.join(self.stream())
                resident = flight.resident
            # prefetch what backward wants next: the tensors stored before this one, latest first
            before = map(self.copies.get, range(copy.number - 1, max(copy.number - 65, -1), -1))
            window = list(
                itertools.islice(
                    (earlier for earlier in before if earlier is not None and earlier.out is None), self.prefetch
                )
            )
            for earlier in filter(None, (weak() for weak in self.ahead)):
                if earlier not in window:  # backward went elsewhere
                    earlier.back = None
            for earlier in window:
                if earlier.back is None:
                    earlier.back = self.bring(earlier.buffer, self.stream())
            self.ahead = [weakref.ref(earlier) for earlier in window]
        return resident.view(copy.dtype)


class offload(Store):
    """Moves saved tensors to the host, bit for bit, and copies them back before backward needs them.

    CUDA tensors go to pinned buffers on a side stream, CPU tensors to unlinked memory-mapped files. Meta tensors are dropped
    and created again. Buffers of ``host_bytes`` in all are reused: create one store for all steps.

    directory: of the files, by default ``tempfile.gettempdir()``. prefetch: tensors copied back ahead of backward, in reverse
    order of saving. in_flight: tensors that may wait for their copies; beyond it, the stream that saved the oldest waits.
    min_bytes, exclude, select: as in ``Store``.

    After a change in place, backward gets the saved value if the copy completed before; otherwise it raises RuntimeError.

    Raises NotADirectoryError, ValueError for negative counts; inside the block, OSError if the file system is full,
    RuntimeError under CUDA graph capture.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike | None = None,
        prefetch: int = 2,
        in_flight: int = 4,
        min_bytes: int = MIN_BYTES,
        exclude: Iterable[Tensor] = (),
        select: Callable[[Tensor], bool] | None = None,
    ):
        super().__init__(min_bytes, exclude, select)
        for name, value in (("prefetch", prefetch), ("in_flight", in_flight)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"offload: {name} must be an int of at least 0, not {value!r}")
        directory = os.fspath(tempfile.gettempdir() if directory is None else directory)
        if not os.path.isdir(directory):
            raise NotADirectoryError(f"offload: {directory!r} is not a directory")
        self._settings = directory, prefetch, in_flight
        self._lanes: dict[torch.device, _Lane] = {}
        self._lock = threading.Lock()

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of all host buffers, in use and free."""
        return sum(lane.bytes for lane in list(self._lanes.values()))

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.device.type in ("cpu", "cuda", "meta")

    def put(self, flat: Tensor) -> _Copy | functools.partial:
        if flat.is_meta:
            return functools.partial(torch.empty, flat.shape, dtype=flat.dtype, device="meta")
        with self._lock:
            if flat.device not in self._lanes:
                self._lanes[flat.device] = _Lane(flat.device, *self._settings)
        return self._lanes[flat.device].put(flat)

    def resident(self, saved: _Copy | functools.partial) -> Iterator[Tensor]:
        return iter(())

    def get(self, saved: _Copy | functools.partial) -> Tensor:
        return saved.lane.get(saved) if isinstance(saved, _Copy) else saved()
