"""What a forward pass keeps for its backward, and how high memory rises: the two figures of a recompute segment.

Kept bytes are exact on any device: they are counted, not sampled. ``kept_tensors`` listens through
``torch.autograd.graph.saved_tensors_hooks``; ``peak_memory`` reads the allocator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Kept", "Peak", "dense_parts", "format_size", "kept_tensors", "parse_size", "peak_memory"]

_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int | None:
    """Bytes of a size like "64MiB", "1.5 GB" or "4096"; None if it is not a size, or negative."""
    number = text.strip().rstrip("BbIiKkMmGg").strip()
    unit = text.strip()[len(number) :].strip().upper() or "B"
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        return None
    return size if size >= 0 else None


def format_size(size: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


@dataclass
class Kept:
    """What autograd saved: ``tensors`` holds one (shape, dtype, nbytes) per storage, in the order they were saved.

    shape and dtype are those of the first tensor saved from that storage; nbytes is the size of the whole storage,
    which is what stays allocated when a small view of it is saved. ``print(kept)`` lists them, the largest first.
    """

    tensors: list[tuple[torch.Size, torch.dtype, int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all storages in ``tensors``."""
        return sum(nbytes for _, _, nbytes in self.tensors)

    def __str__(self) -> str:
        count = len(self.tensors)
        lines = [f"{format_size(self.bytes):>9} in {count} tensor{'' if count == 1 else 's'}"]
        for shape, dtype, nbytes in sorted(self.tensors, key=lambda one: -one[2]):
            lines.append(f"{format_size(nbytes):>9}  {str(dtype).removeprefix('torch.'):8}  {list(shape)}")
        return "\n".join(lines)


@dataclass
class Peak:
    """``bytes``: the highest allocation above what was allocated on entry; 0 until the block is left."""

    bytes: int = 0


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own that ``tensor`` is made of: itself, unless it is a wrapper or sparse."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
                yield from dense_parts(part)
    elif tensor.layout == torch.strided:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        raise TypeError(f"kept_tensors: cannot size a tensor of layout {tensor.layout}")


@contextlib.contextmanager
def kept_tensors(exclude: torch.nn.Module | Iterable[torch.Tensor] = ()) -> Iterator[Kept]:
    """Counts the bytes that a forward pass keeps for its backward, each storage once.

        with kept_tensors(model) as kept:
            loss = model(x)
        loss.backward()
        print(kept.bytes, kept.tensors)

    exclude: what is not counted: a module, for its parameters and buffers, or tensors. Views of them are not counted
    either; a cast copy of a parameter has a storage of its own and is counted. Any device and dtype will do: on meta
    tensors and fake tensors the figure is exact too, and nothing is computed. DTensor and other wrapper subclasses count
    by their local parts.

    A tensor is counted when it is saved, even if its graph is dropped before the block is left, so run the forward only.

    The block does not see

    - what saved-tensor hooks inside it take, since the innermost hooks get the tensor: the stores of
      ``ckptkern.storage``, ``torch.autograd.graph.save_on_cpu``;
    - what a checkpointed segment inside it discards, which is the point of the segment;
    - tensors that a Function puts on ``ctx`` itself instead of ``ctx.save_for_backward``.

    The block does not prolong any tensor's life: it makes no cycle, because it stores a saved output detached.
    Hooks switch off autograd's check for in-place changes between forward and backward. This block makes the check
    itself and raises RuntimeError in backward.
    """
    kept = Kept()
    # a weak reference keeps the address of a dead storage from being reused, so a key never stands for two storages
    seen: set[StorageWeakRef] = set()
    if isinstance(exclude, torch.nn.Module):
        exclude = [*exclude.parameters(), *exclude.buffers()]
    for tensor in exclude:
        seen.update(StorageWeakRef(part.untyped_storage()) for part in dense_parts(tensor))

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            key = StorageWeakRef(storage)
            if key not in seen:
                seen.add(key)
                kept.tensors.append((part.shape, part.dtype, storage.nbytes()))
        # returning the tensor itself would tie a saved output to its own grad_fn: a cycle that frees nothing
        return tensor.detach(), tensor._version

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield kept
    finally:
        seen.clear()


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"kept_tensors: a tensor of shape {tuple(tensor.shape)} needed for backward was changed in place after "
            f"it was saved: it is at version {tensor._version}, version {version} was saved"
        )
    return tensor


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Measures how far memory on ``device`` rises inside the block above what was allocated on entry.

        with peak_memory("cuda") as peak:
            model(x).sum().backward()
        print(peak.bytes)

    CUDA: ``max_memory_allocated`` (the caching allocator's peak counter is reset). CPU: the sum of the allocations and
    frees of torch's CPU allocator that ``torch.profiler`` records. It does not count private buffers of BLAS libraries,
    nor that the block frees memory allocated before it. The profiler slows the block down, so never time it. Raises
    ValueError for any other device: a meta tensor has no memory.
    """
    device = torch.device(device)
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    elif device.type == "cpu":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield peak
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        level = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            level += event.nbytes()
            peak.bytes = max(peak.bytes, level)
    else:
        raise ValueError(f"peak_memory: wanted a cuda or cpu device but got {device}")
