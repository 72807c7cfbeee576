"""Memory that knows who wrote and read what, and the checks of every access.

Found here: bounds, uninitialised, race, in flight, proxy (`Fault.kind`; README.md says what each means).
"""

from __future__ import annotations

import mmap

import numpy as np

from .numerics import UNSIGNED

RESERVE = 2**26  # bytes from which a shadow is mapped and not allocated: pages that nothing touches cost nothing


class Fault(Exception):
    """What a kernel does wrong: its kind, what happened, and the instruction with its source line."""

    def __init__(self, kind: str, text: str, at: object):
        self.kind, self.at = kind, at
        super().__init__(f"{kind}: {text} [{getattr(at, 'where', at)}]")


def sparse_zeros(count: int, dtype) -> np.ndarray:
    """Zeros that take memory only where they are touched."""
    size = count * np.dtype(dtype).itemsize
    if size < RESERVE:
        return np.zeros(count, dtype)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(mapped, dtype)


class Order:
    """What is ordered before what, by clocks of warps (Lamport 1978; Mattern 1989, for a thread's clock).

    known[w, v] is the time up to which the accesses of warp v come before what warp w does next, for w = v those of the
    warp's other threads. A barrier of all makes `synced` of everything so far.
    """

    def __init__(self, warps: int, time: int):
        self.start = self.synced = time - 1  # what other CTAs did is not after this
        self.time = time
        self.known = np.full((warps, warps), self.start, np.int64)

    def meet(self, warps: np.ndarray) -> None:
        """A barrier of these warps."""
        if len(warps) == len(self.known):
            self.known[:] = self.synced = self.time
        else:
            together = self.known[warps].max(0)
            together[warps] = self.time
            self.known[warps] = together
        self.time += 1

    def meet_inside(self, warps: np.ndarray) -> None:
        """A barrier of each warp's own threads."""
        self.known[warps, warps] = self.time
        self.time += 1


class Memory:
    """Bytes, and per granule (the least that the kernel moves) the time and thread of the last write, and who has read since.

    A tensor has a base address, and `allowed` says which of its storage's bytes are in the views that were passed (None:
    all). Shared memory has base 0, and nothing in it may be read before it is written.
    """

    def __init__(self, name: str, data: np.ndarray, granule: int, base: int = 0, allowed: np.ndarray | None = None):
        self.name, self.data, self.granule, self.base, self.size = name, data, granule, base, data.size
        self.views = {size: data[: data.size // size * size].view(dtype) for size, dtype in UNSIGNED.items()}
        self.allowed = None if allowed is None else allowed[::granule]
        self.count = -(-data.size // granule)
        self.written = sparse_zeros(self.count, np.int32)  # time of the last write; 0: none
        self.writer = sparse_zeros(self.count, np.int32)  # its thread
        self.last_write = 0
        self.first_read = sparse_zeros(self.count, np.int32) if base else None  # in the launch
        self.reads: np.ndarray | None = None  # [warps, granules]: time of a warp's last read
        self.unsorted: list[tuple[np.ndarray, np.ndarray, int]] = []  # reads that are not in there yet
        self.last_read = 0
        if not base:
            self.flying = np.zeros(self.count, np.int16)  # copies that have yet to land here
            self.watched = np.zeros(self.count, np.int16)  # instructions that may still read here
            self.unfenced = np.zeros(self.count, bool)  # written by threads, not yet visible to wgmma
        self.asynchronous = 0  # of the instructions that `flying` and `watched` count

    def granules(self, offset: np.ndarray, size: int) -> np.ndarray:
        """[granules, threads] that accesses of `size` bytes at these offsets touch."""
        return offset // self.granule + np.arange(size // self.granule)[:, None]

    # --- the checks

    def check_bounds(self, index: np.ndarray, access: str, at) -> None:
        if self.allowed is not None and not self.allowed[index].all():
            raise Fault("bounds", f"{access} of {self.name} outside of the tensor's view", at)

    def check_flight(self, index: np.ndarray, access: str, at) -> None:
        if not self.asynchronous:
            return
        if self.flying[index].any():
            raise Fault("in flight", f"{access} of what an asynchronous copy has yet to write", at)
        if access == "write" and self.watched[index].any():
            raise Fault("in flight", "write of what an asynchronous instruction may still read", at)

    def check_initialised(self, index: np.ndarray, at) -> None:
        if not self.base and not self.written[index].all():
            raise Fault("uninitialised", "read of shared memory that nothing wrote", at)

    def check_written(self, index: np.ndarray, threads: np.ndarray, order: Order, access: str, at) -> None:
        """No other thread wrote here, unordered with this access."""
        if self.last_write <= order.synced and not self.base:
            return
        written = self.written[index]
        if self.base and ((written > 0) & (written <= order.start)).any():
            raise Fault("race", f"{access} of {self.name} at what another CTA wrote", at)
        if self.last_write <= order.synced:
            return
        writer = self.writer[index]
        bad = (written > order.known[threads >> 5, writer >> 5]) & (writer != threads) & (written > 0)
        if bad.any():
            place = tuple(np.argwhere(bad)[0])
            mine, other = int(threads[place[-1]]), int(writer[place])
            text = f"{access} of {self.name} by thread {mine} at what thread {other} wrote"
            missing = "no bar.warp.sync" if mine >> 5 == other >> 5 else "no barrier"
            raise Fault("race", f"{text}, {missing} between ({int(bad.any(0).sum())} threads)", at)

    def check_unread(self, index: np.ndarray, threads: np.ndarray, order: Order, at) -> None:
        """No other warp read here, unordered with this write."""
        if self.first_read is not None:
            first = self.first_read[index]
            if ((first > 0) & (first <= order.start)).any():
                raise Fault("race", f"write of {self.name} at what another CTA read", at)
        if self.last_read <= order.synced:
            return
        self._sort_reads(len(order.known))
        known = order.known[threads >> 5].T.copy()
        known[threads >> 5, np.arange(len(threads))] = np.iinfo(np.int64).max
        if (self.reads[:, index] > known[:, None]).any():
            raise Fault("race", f"write of {self.name} at what another warp read, no barrier between", at)

    def check_fenced(self, index: np.ndarray, access: str, at) -> None:
        if self.unfenced[index].any():
            raise Fault("proxy", f"{access} of what was written with no fence.proxy.async since", at)

    def _sort_reads(self, warps: int) -> None:
        if self.reads is None:
            self.reads = sparse_zeros(warps * self.count, np.int32).reshape(warps, self.count)
        for index, readers, time in self.unsorted:
            self.reads[np.broadcast_to(readers, index.shape), index] = time
        self.unsorted.clear()

    # --- what happens

    def note_read(self, index: np.ndarray, warps: np.ndarray, order: Order) -> None:
        if self.last_read <= order.synced:
            self.unsorted.clear()
        self.unsorted.append((index, warps, order.time))
        self.last_read = order.time
        if self.first_read is not None:
            self.first_read[index] = np.where(self.first_read[index] == 0, order.time, self.first_read[index])

    def note_write(self, index: np.ndarray, threads: np.ndarray, order: Order) -> None:
        self.written[index] = order.time
        self.writer[index] = threads
        self.last_write = max(self.last_write, order.time)
        if not self.base:
            self.unfenced[index] = True

    def reading(self, index: np.ndarray, threads: np.ndarray, order: Order, at) -> None:
        self.check_bounds(index, "read", at)
        self.check_flight(index, "read", at)
        self.check_initialised(index, at)
        self.check_written(index, threads, order, "read", at)
        self.note_read(index, threads >> 5, order)

    def writing(self, index: np.ndarray, threads: np.ndarray, order: Order, at) -> None:
        self.check_bounds(index, "write", at)
        self.check_flight(index, "write", at)
        self.check_written(index, threads, order, "write", at)
        self.check_unread(index, threads, order, at)

    def load(self, offset: np.ndarray, size: int, count: int, threads: np.ndarray, order: Order, at) -> np.ndarray:
        """[count, threads] elements of `size` bytes."""
        self.reading(self.granules(offset, size * count), threads, order, at)
        return self.views[size][offset // size + np.arange(count)[:, None]]

    def store(self, offset: np.ndarray, size: int, values: np.ndarray, threads: np.ndarray, order: Order, at) -> None:
        index = self.granules(offset, size * len(values))
        self.writing(index, threads, order, at)
        self.note_write(index, threads, order)
        place = offset // size + np.arange(len(values))[:, None]
        self.views[size][place] = values
        if (self.views[size][place] != values).any():
            raise Fault("race", f"two threads write different values to one address of {self.name}", at)
