"""Measures the bytes that a forward pass saves for backward, and peak memory.

Saved bytes are exact on any device. ``saved_tensors`` counts them with ``torch.autograd.graph.saved_tensors_hooks``;
``peak_memory`` reads the allocator.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "Peak",
    "SavedTensors",
    "Timeline",
    "dense_parts",
    "format_size",
    "free_memory",
    "memory_timeline",
    "parse_size",
    "peak_memory",
    "saved_tensors",
]

_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int | None:
    """Returns the bytes of a size like "64MiB", "1.5 GB" or "4096"; None for anything else."""
    number = text.strip().rstrip("BbIiKkMmGg").strip()
    unit = text.strip()[len(number) :].strip().upper() or "B"
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        return None
    return size if size >= 0 else None


def bytes_of(value) -> int | None:
    """Returns the bytes of a number such as 2**30 or 1e9, or of a size such as "64MiB"; None for anything else."""
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def format_size(size: int) -> str:
    """Formats bytes in the largest binary unit that gives at least 1: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{three_digits(size)} {unit}"
        size /= 1024
    return f"{three_digits(size)} GiB"


def three_digits(value: float) -> str:
    """Formats a number with three significant digits, more for whole thousands, and without an exponent from 1 on."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


@dataclass
class SavedTensors:
    """Saved tensors: ``tensors`` has one (shape, dtype, nbytes) per storage, in the order of saving. nbytes is the whole
    storage's."""

    tensors: list[tuple[torch.Size, torch.dtype, int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Returns the bytes of all storages in ``tensors``."""
        return sum(nbytes for _, _, nbytes in self.tensors)

    def __str__(self) -> str:
        count = len(self.tensors)
        lines = [f"{format_size(self.bytes):>9} in {count} tensor{'' if count == 1 else 's'}"]
        for shape, dtype, nbytes in sorted(self.tensors, key=lambda row: -row[2]):
            lines.append(f"{format_size(nbytes):>9}  {str(dtype).removeprefix('torch.'):8}  {list(shape)}")
        return "\n".join(lines)


@dataclass
class Peak:
    """``bytes``: the peak allocation above that on entry; 0 until the block ends."""

    bytes: int = 0


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_INDICES = {  # the methods that return what a sparse tensor is made of
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that own ``tensor``'s memory: itself, or a wrapper's or sparse tensor's parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # a DTensor names its mesh too
                yield from dense_parts(part)
    elif tensor.layout == torch.strided:
        yield tensor.detach().values() if tensor.is_nested else tensor
        if state := getattr(tensor, "quant_state", None):  # bitsandbytes keeps its scales beside the tensor
            for part in (state, state.state2) if state.nested else (state,):
                yield from (t for t in (part.absmax, part.code, part.offset) if isinstance(t, Tensor))
    elif tensor.layout in _INDICES:
        yield from (getattr(tensor, name)() for name in _INDICES[tensor.layout])
    else:
        raise TypeError(f"saved_tensors: cannot size a tensor of layout {tensor.layout}")


Storages = dict[StorageWeakRef, int]  # bytes of storages


def storages_of(tensors: Iterable[Tensor]) -> Storages:
    """Returns the bytes of each storage of the tensors. A weak reference keeps the address of a dead storage from being
    reused, so a key never stands for two storages."""
    storages = (part.untyped_storage() for tensor in tensors for part in dense_parts(tensor))
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}


class _Counters(threading.local):
    """The saved_tensors blocks that this thread is in, the innermost last, and whether it is in `placeholders`."""

    def __init__(self):
        self.active: list[Callable[[Tensor], None]] = []
        self.placeholders = False


_counters = _Counters()


@contextlib.contextmanager
def placeholders() -> Iterator[None]:
    """Marks meta tensors that are created inside as placeholders, which take no memory even in a model that is counted on
    the meta device."""
    before, _counters.placeholders = _counters.placeholders, True
    try:
        yield
    finally:
        _counters.placeholders = before


def are_placeholders() -> bool:
    return _counters.placeholders


def meta_like(tensor: Tensor) -> Tensor:
    """Returns a meta tensor with the sizes, strides and dtype of another."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def note_saved(tensors: Iterable[Tensor]) -> None:
    """Counts these tensors in the innermost saved_tensors block. Called by inner saved-tensor hooks, which hide what
    autograd saves, for what they keep on the device."""
    if _counters.active:
        for tensor in tensors:
            _counters.active[-1](tensor)


def changed_in_place(tensor: Tensor, version: int, kind: type | None = None) -> RuntimeError:
    """Returns autograd's error for a tensor changed in place. kind: the class that it names."""
    shape = "nested" if tensor.is_nested and tensor.layout == torch.strided else list(tensor.shape)
    name = tensor.type() if kind is None else kind.__name__
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name} {shape}] is at version {tensor._version}; expected version {version} instead."
    )


class Stays:
    """A tensor that is saved as it is. Hooks switch off autograd's check for in-place changes, so `unpack` makes it.

    itself: backward gets the same object. Only for a tensor without a graph: otherwise it would tie a saved output to its own
    grad_fn, a cycle that frees nothing.
    """

    def __init__(self, tensor: Tensor, itself: bool = False):
        self.tensor, self.version = tensor if itself else tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor, self.version)
        return self.tensor


@contextlib.contextmanager
def counting(save: Callable[[Tensor], None], hold: bool = True) -> Iterator[None]:
    """Calls save(tensor) for each tensor that is saved for backward. hold=False: nothing is held, so that a model that does
    not fit can be counted; it has no backward."""

    def pack(tensor):
        save(tensor)
        return Stays(tensor) if hold else None

    _counters.active.append(save)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, Stays.unpack):
            yield
    finally:
        _counters.active.remove(save)


@contextlib.contextmanager
def saved_tensors(exclude: nn.Module | Iterable[Tensor] = ()) -> Iterator[SavedTensors]:
    """Counts the bytes that a forward pass saves for its backward, each storage once.

        with saved_tensors(model) as saved:
            loss = model(x)
        loss.backward()
        print(saved.bytes, saved.tensors)

    exclude: a module, for its parameters and buffers, or tensors that do not count, nor do their views.

    Bytes are exact on all devices, also on meta and fake tensors. Wrapper subclasses such as DTensor count by their local
    parts, tensors in a store of ``ckptkern.storage`` if they are on the device. Run only forward inside.

    Tensors do not count that inner saved-tensor hooks take, that a checkpointed region discards, or that a Function puts on
    ``ctx`` without ``save_for_backward``. Raises RuntimeError in backward if a saved tensor was changed in place.
    """
    saved = SavedTensors()
    if isinstance(exclude, nn.Module):
        exclude = [*exclude.parameters(), *exclude.buffers()]
    seen = set(storages_of(exclude))

    def save(tensor):
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            key = StorageWeakRef(storage)
            if key not in seen:
                seen.add(key)
                saved.tensors.append((part.shape, part.dtype, storage.nbytes()))

    with counting(save):
        yield saved


@dataclass
class Timeline:
    """Allocated bytes over time, above those on entry: ``bytes[i]`` from ``milliseconds[i]`` on. ``marks``: when
    `mark(name)` was called. Empty until the block ends."""

    milliseconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        with torch.profiler.record_function(f"{_MARK}{name}"):
            pass

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    def between(self, first: str, last: str) -> list[int]:
        """Returns the bytes at mark `first` and all that follow up to mark `last`."""
        begin, end = (bisect.bisect_right(self.milliseconds, self.marks[name]) for name in (first, last))
        return [self.bytes[begin - 1] if begin else 0, *self.bytes[begin:end]]


_MARK = "ckptkern.memory: "


def _device(name: str, device: torch.device | str) -> torch.device:
    """Returns the device. Raises ValueError if it is missing or has no allocator that can be read."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: wanted a cuda or cpu device but got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{name}: torch finds no CUDA device here. Pass 'cpu' for a step on the CPU; if there is a GPU, install a torch "
            "that is built for CUDA"
        )
    return device


@contextlib.contextmanager
def memory_timeline(device: torch.device | str) -> Iterator[Timeline]:
    """Records the allocated memory on ``device`` over time inside the block.

        with memory_timeline("cuda") as timeline:
            loss = model(x).sum()
            timeline.mark("backward")
            loss.backward()
        print(timeline.peak)

    ``torch.profiler`` records torch's allocator, and slows the block down. It does not see BLAS libraries' buffers. Raises
    ValueError for other devices than CPU and CUDA.
    """
    device = _device("memory_timeline", device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below that it writes to stderr for every profile
    timeline, on = Timeline(), torch.profiler.ProfilerActivity
    activities = [on.CPU, on.CUDA] if device.type == "cuda" else [on.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        yield timeline
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kind = getattr(torch._C._autograd.DeviceType, device.type.upper())
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    level, start = 0, None
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        start = event.start_ns() if start is None else start
        now = (event.start_ns() - start) / 1e6
        if event.name().startswith(_MARK):
            timeline.marks[event.name().removeprefix(_MARK)] = now
        elif event.name() == "[memory]" and event.device_type() == kind and index in (None, event.device_index()):
            level += event.nbytes()
            timeline.milliseconds.append(now)
            timeline.bytes.append(level)


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Measures the peak of allocated memory on ``device`` inside the block, above that on entry.

        with peak_memory("cuda") as peak:
            model(x).sum().backward()
        print(peak.bytes)

    CUDA: ``max_memory_allocated``, whose counter is reset. CPU: as `memory_timeline`.
    """
    device = _device("peak_memory", device)
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        with memory_timeline(device) as timeline:
            yield peak
        peak.bytes = max(timeline.peak, 0)


def free_memory(device: torch.device | str) -> int:
    """Returns the bytes that this process can still allocate on ``device``: the driver's free memory and the caching
    allocator's unused memory, or Linux's MemAvailable."""
    device = _device("free_memory", device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with open("/proc/meminfo") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
