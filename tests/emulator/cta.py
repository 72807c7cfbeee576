"""A running CTA: its threads, its shared memory, and what its instructions do.

Found here: alignment and bounds of addresses, barriers, what is in flight at the end (`memory.Fault`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from . import matrices
from .memory import Fault, Memory, Order
from .numerics import UNSIGNED
from .ptx import Kernel, Unknown

LANES = np.arange(32)


@dataclasses.dataclass(eq=False)
class Pending:
    """A wgmma's result: NaN in every array that is or became its register, until its wait."""

    values: np.ndarray
    arrays: list[tuple[np.ndarray, np.ndarray | None]]  # with the threads that it is for

    def land(self) -> None:
        for array, mask in self.arrays:
            np.copyto(array, self.values, where=True if mask is None else mask)


@dataclasses.dataclass(eq=False)
class Barrier:
    """Who has arrived at a named barrier, how many it wants, and which of them wait."""

    arrived: np.ndarray
    wanted: int
    waiting: list = dataclasses.field(default_factory=list)  # (strand, instruction)


class CTA:
    """`strand` is what runs now (launch.Strand); the methods are called by the functions of blocks."""

    def __init__(
        self,
        kernel: Kernel,
        shared: int,
        granule: int,
        tensors: list[Memory],
        parameters: dict,
        special: dict,
        time: int,
    ):
        self.kernel, self.parameters = kernel, parameters
        self.threads, self.warps = kernel.threads, kernel.threads // 32
        self.ids = np.arange(self.threads, dtype=np.int32)
        self.special = {
            "%tid.x": self.ids.astype(np.uint32), "%laneid": (self.ids & 31).astype(np.uint32),
            "%warpid": (self.ids >> 5).astype(np.uint32), **special,
        }  # fmt: skip
        self.shared = Memory("shared memory", np.full(max(shared, 16), 0xFF, np.uint8), granule)
        self.tensors, self.bases = tensors, np.array([tensor.base for tensor in tensors], np.int64)
        self.order = Order(self.warps, time)
        self.alive = np.ones(self.threads, bool)
        self.strand = None
        self.barriers: dict[int, Barrier] = {}
        self.woken: list = []  # strands whose barrier is complete
        self.fragments: dict[tuple, tuple] = {}
        self.open_copies: list[tuple] = []  # cp.async since the last commit
        # groups of them, by the threads that committed them; of wgmma, the same way, and the last group is open
        self.copies: defaultdict[bytes, list[list]] = defaultdict(list)
        self.matmuls: defaultdict[bytes, list[list]] = defaultdict(lambda: [[]])
        self.pending: dict[int, Pending] = {}

    # --- who is here

    def chosen(self, mask) -> np.ndarray:
        """The threads of a mask."""
        return self.ids if mask is None else np.flatnonzero(np.broadcast_to(mask, (self.threads,))).astype(np.int32)

    def warps_of(self, mask, at, per: int = 1) -> np.ndarray:
        """The warps (or groups of `per`) of a mask, which must be whole."""
        if mask is None and self.alive.all():
            return np.arange(self.warps // per)
        active = np.broadcast_to(self.alive if mask is None else mask, (self.threads,)).reshape(-1, 32 * per)
        if (active.any(1) != active.all(1)).any():
            raise Fault(
                "barrier", f"{int(active.sum())} threads are here, a part of a warp{' group' if per > 1 else ''}", at
            )
        return np.flatnonzero(active.all(1))

    def who(self, mask) -> bytes:
        return b"" if mask is None else np.packbits(np.broadcast_to(mask, (self.threads,))).tobytes()

    def full(self, value, threads: np.ndarray | None = None) -> np.ndarray:
        if np.shape(value) != (self.threads,):
            value = np.broadcast_to(value, (self.threads,))
        return value if threads is None or threads is self.ids else value[threads]

    def stacked(self, values, threads: np.ndarray | None = None) -> np.ndarray:
        return np.stack([self.full(value, threads) for value in values])

    def spread(self, values: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """[count, all threads], 0 in those that are not among `threads`."""
        if threads is self.ids:
            return values
        result = np.zeros((len(values), self.threads), values.dtype)
        result[:, threads] = values
        return result

    def blend(self, mask, new, old):
        """A register after a masked write; what a wgmma has yet to write follows it."""
        result = np.where(mask, new, old)
        pending = self._pending_of(new)
        if pending is not None:
            pending.arrays.append((result, np.broadcast_to(mask, (self.threads,))))
            self.pending[id(result)] = pending
        return result

    # --- plain access

    def check_alignment(self, address: np.ndarray, size: int, at) -> None:
        off = address & (size - 1)
        if off.any():
            raise Fault("alignment", f"{size} bytes at an address that is {int(off.max())} off", at)

    def in_shared(self, offset: np.ndarray, size: int, at) -> np.ndarray:
        """Offsets, aligned and inside."""
        offset = offset.astype(np.int64)
        self.check_alignment(offset, size, at)
        if offset.size and int(offset.max()) + size > self.shared.size:
            raise Fault(
                "bounds", f"{size} bytes at {int(offset.max())} of {self.shared.size} bytes of shared memory", at
            )
        return offset

    def locate(self, address: np.ndarray, size: int, access: str, at) -> list[tuple[Memory, np.ndarray | slice]]:
        """The tensors of these addresses, each with the positions that are its own."""
        which = np.searchsorted(self.bases, address, "right") - 1
        parts = [(which[0], slice(None))] if (which == which[0]).all() else [(n, which == n) for n in np.unique(which)]
        for n, part in parts:
            here, tensor = address[part], self.tensors[n]
            if n < 0 or int(here.max()) + size > tensor.base + tensor.size:
                inside = f"{int(here.max()) - tensor.base} of {tensor.size} bytes of {tensor.name}"
                raise Fault("bounds", f"{access} of {size} bytes at {hex(int(here.min())) if n < 0 else inside}", at)
        return [(self.tensors[n], part) for n, part in parts]

    def load(self, space: str, address, size: int, count: int, mask, at):
        threads = self.chosen(mask)
        if not threads.size:
            return np.zeros((count, self.threads), UNSIGNED[size])
        if space == "shared":
            offset = self.in_shared(self.full(address, threads), size * count, at)
            return self.spread(self.shared.load(offset, size, count, threads, self.order, at), threads)
        address = self.full(address, threads).astype(np.int64)
        self.check_alignment(address, size * count, at)
        values = np.zeros((count, threads.size), UNSIGNED[size])
        for tensor, part in self.locate(address, size * count, "read", at):
            values[:, part] = tensor.load(address[part] - tensor.base, size, count, threads[part], self.order, at)
        return self.spread(values, threads)

    def store(self, space: str, address, size: int, values: tuple, mask, at) -> None:
        threads = self.chosen(mask)
        if not threads.size:
            return
        elements = self.stacked(values, threads)
        if space == "shared":
            offset = self.in_shared(self.full(address, threads), size * len(values), at)
            return self.shared.store(offset, size, elements, threads, self.order, at)
        address = self.full(address, threads).astype(np.int64)
        self.check_alignment(address, size * len(values), at)
        for tensor, part in self.locate(address, size * len(values), "write", at):
            tensor.store(address[part] - tensor.base, size, elements[:, part], threads[part], self.order, at)
        return None

    # --- barriers

    def barrier(self, number, count, waits: bool, mask, at) -> None:
        """bar.sync, bar.arrive: complete when `count` threads (None: all that live) are here."""
        number = int(np.max(number))
        here = self.warps_of(mask, at)
        wanted = int(self.alive.sum()) if count is None else int(np.max(count))
        barrier = self.barriers.setdefault(number, Barrier(np.zeros(self.threads, bool), wanted))
        barrier.arrived |= np.repeat(np.isin(np.arange(self.warps), here), 32) & self.alive
        if waits:
            barrier.waiting.append((self.strand, at))
        if int(barrier.arrived.sum()) < barrier.wanted:
            self.strand.waits |= waits
            return
        del self.barriers[number]
        self.order.meet(np.flatnonzero(barrier.arrived.reshape(-1, 32).any(1)))
        for strand, _ in barrier.waiting:
            strand.waits = False
            if strand is not self.strand:
                self.woken.append(strand)

    def warp_barrier(self, mask, at) -> None:
        self.order.meet_inside(self.warps_of(mask, at))

    def proxy_fence(self, mask, at) -> None:
        """What these warps wrote is visible to asynchronous instructions."""
        warps = self.warps_of(mask, at)
        unfenced = self.shared.unfenced
        if len(warps) == self.warps:
            unfenced.fill(False)
        else:
            unfenced &= ~np.isin(self.shared.writer >> 5, warps)

    # --- cp.async

    def copy(self, to, source, size: int, used, mask, at) -> None:
        """`used` of `size` bytes from a tensor to shared memory, zeros after them, when a wait says so."""
        threads = self.chosen(mask)
        if not threads.size:
            return
        offset = self.in_shared(self.full(to, threads), size, at)
        source, used = (self.full(value, threads).astype(np.int64) for value in (source, used))
        self.check_alignment(source[used > 0], size, at)
        data = np.zeros((threads.size, size), np.uint8)
        for amount in np.unique(used[used > 0]).tolist():
            some = np.flatnonzero(used == amount)
            for tensor, part in self.locate(source[some], amount, "cp.async's read", at):
                here, item = some[part], tensor.granule
                if amount % item:
                    raise Unknown(f"a copy of {amount} bytes where granules are of {item}", at)
                words = tensor.load(source[here] - tensor.base, item, amount // item, threads[here], self.order, at)
                data[here, :amount] = np.ascontiguousarray(words.T).view(np.uint8)
        index = self.shared.granules(offset, size)
        self.shared.writing(index, threads, self.order, at)
        self.shared.flying[index] += 1
        self.shared.asynchronous += 1
        self.open_copies.append((offset, data, index, threads))

    def commit_copies(self, mask, at) -> None:
        """What these threads have copied since their last commit is a group."""
        mine = [mask is None or self.full(mask)[threads].all() for *_, threads in self.open_copies]
        group = [copy for copy, own in zip(self.open_copies, mine, strict=True) if own]
        self.open_copies = [copy for copy, own in zip(self.open_copies, mine, strict=True) if not own]
        self.copies[self.who(mask)].append(group)

    def wait_copies(self, count: int | None, mask, at) -> None:
        """All groups of these threads but the last `count` land; None: also what is in no group yet."""
        if count is None:
            self.commit_copies(mask, at)
        groups = self.copies[self.who(mask)]
        landing = groups[: max(len(groups) - (count or 0), 0)]
        del groups[: len(landing)]
        for offset, data, index, threads in (copy for group in landing for copy in group):
            self.shared.views[1][offset[:, None] + np.arange(data.shape[1])] = data
            self.shared.flying[index] -= 1
            self.shared.asynchronous -= 1
            self.shared.note_write(index, threads, self.order)

    # --- instructions of a warp

    def shuffle(self, mode: str, value, lane, mask, at) -> np.ndarray:
        self.warps_of(mask, at)
        value, lane = self.full(value).reshape(-1, 32), self.full(lane).astype(np.int64).reshape(-1, 32)
        source = {"bfly": LANES ^ lane, "idx": lane & 31, "up": LANES - lane}[mode]
        return np.take_along_axis(value, np.where(source < 0, LANES, source), 1).reshape(-1)

    def _rows(self, address, count: int, mask, at) -> tuple[np.ndarray, np.ndarray]:
        """(warps, offsets of their 8 x count rows of 16 bytes, which the first 8 x count lanes name)"""
        warps = self.warps_of(mask, at)
        return warps, self.in_shared(self.full(address).reshape(-1, 32)[warps, : 8 * count].reshape(-1), 16, at)

    @staticmethod
    def _lanes_of_rows(warps: np.ndarray, count: int) -> np.ndarray:
        """The first of the four threads that hold a row; the last one stands for readers, so that a warp that reads what it
        stored itself is seen."""
        return (warps[:, None] * 32 + np.tile(np.arange(0, 32, 4), count)).reshape(-1).astype(np.int32)

    def ldmatrix(self, address, count: int, transpose: bool, mask, at) -> np.ndarray:
        warps, offset = self._rows(address, count, mask, at)
        index = self.shared.granules(offset, 16)
        self.shared.reading(index, self._lanes_of_rows(warps, count) + np.int32(3), self.order, at)
        words = self.shared.views[4][offset[:, None] // 4 + np.arange(4)].reshape(-1, count, 8, 4)
        words = matrices.transposed(words) if transpose else words
        result = np.zeros((count, self.warps, 32), np.uint32)
        result[:, warps] = words.swapaxes(0, 1).reshape(count, -1, 32)
        return result.reshape(count, -1)

    def stmatrix(self, address, values: tuple, transpose: bool, mask, at) -> None:
        count = len(values)
        warps, offset = self._rows(address, count, mask, at)
        words = self.stacked(values).reshape(count, self.warps, 8, 4)[:, warps].swapaxes(0, 1)
        words = matrices.transposed(words) if transpose else np.ascontiguousarray(words)
        self.shared.store(offset, 4, words.reshape(-1, 4).T, self._lanes_of_rows(warps, count), self.order, at)

    def operand(self, registers: tuple, side: str, type: str) -> np.ndarray:
        """A fragment, computed once in a block; the registers live on with it, so that no id means another."""
        key = (side, type, *map(id, registers))
        if key not in self.fragments:
            if len(self.fragments) > 512:
                self.fragments.clear()
            self.fragments[key] = matrices.operand(self.stacked(registers), side, type), registers
        return self.fragments[key][0]

    def mma(self, type: str, a: tuple, b: tuple, c: tuple, mask, at) -> np.ndarray:
        self.warps_of(mask, at)
        return matrices.multiply_add(self.operand(a, "a", type), self.operand(b, "b", type), self.stacked(c))

    # --- wgmma

    def _pending_of(self, array) -> Pending | None:
        base = getattr(array, "base", None)
        return self.pending.get(id(array)) or (None if base is None else self.pending.get(id(base)))

    def _descriptor(self, value, groups: np.ndarray, at) -> np.ndarray:
        """One a warp group."""
        value = self.full(value).reshape(-1, 128)[groups]
        if (value != value[:, :1]).any():
            raise Fault("barrier", "a wgmma descriptor differs inside a warp group", at)
        return value[:, 0]

    def _described(
        self, descriptor, rows: int, depth: int, type: str, transpose: bool, groups, at
    ) -> tuple[np.ndarray, list]:
        """([groups, rows, depth], the granules that are read)"""
        item, shared, parts, read = matrices.BYTES[type], self.shared, [], []
        for value in self._descriptor(descriptor, groups, at):
            address = matrices.described(int(value), rows, depth, item, transpose)
            if int(address.max()) + item > shared.size:
                raise Fault(
                    "bounds", f"wgmma reads up to {int(address.max())} of {shared.size} bytes of shared memory", at
                )
            index = shared.granules(address.reshape(-1) // shared.granule * shared.granule, max(item, shared.granule))
            self._read_asynchronously(index, "wgmma", at)
            read.append(index)
            parts.append(matrices.numbers(shared.views[item][address // item], type))
        return np.stack(parts), read

    def _read_asynchronously(self, index: np.ndarray, access: str, at) -> None:
        """Checks of what another proxy reads: all that wrote it has landed, is fenced, and a barrier came after it."""
        shared = self.shared
        if shared.asynchronous and shared.flying[index].any():
            raise Fault("in flight", f"{access} of what an asynchronous copy has yet to write", at)
        shared.check_initialised(index, at)
        shared.check_fenced(index, access, at)
        here = self.warps_of(self.strand.mask, at)
        if shared.last_write > self.order.synced and len(here) > 1:
            known = self.order.known[here].min(0)
            if (shared.written[index] > known[shared.writer[index] >> 5]).any():
                raise Fault("race", f"{access} of what was written with no barrier since", at)
        shared.watched[index] += 1
        shared.asynchronous += 1

    def wgmma_fence(self, mask, at) -> None:
        self.warps_of(mask, at, per=4)

    def wgmma(
        self, columns: int, depth: int, type: str, c: tuple, a, b, scale, transpose: list, mask, at
    ) -> list[np.ndarray]:
        groups = self.warps_of(mask, at, per=4)
        old = np.stack([self.full(x if (pending := self._pending_of(x)) is None else pending.values) for x in c])
        transpose_a, transpose_b = [False, False, *transpose][-2:]
        if isinstance(a, tuple):
            left, read = self.operand(a, "a", type).reshape(-1, 64, depth)[groups], []
        else:
            left, read = self._described(a, 64, depth, type, transpose_a, groups, at)
        right, more = self._described(b, columns, depth, type, transpose_b, groups, at)
        threads = self.ids.reshape(-1, 128)[groups].reshape(-1)
        matmul = matrices.group_gemm(left, right.swapaxes(1, 2))
        new = old.copy()
        new[:, threads] = matmul + np.where(self.full(scale, threads), old[:, threads], np.float32(0))
        here = None if threads.size == self.threads else np.isin(self.ids, threads)
        registers = []
        for before, values in zip(old, new, strict=True):
            array = np.where(True if here is None else here, np.float32(np.nan), before)
            self.pending[id(array)] = Pending(values, [(array, here)])
            registers.append(array)
        self.matmuls[self.who(mask)][-1].append((registers, [*read, *more], threads))
        return registers

    def wgmma_commit_group(self, mask, at) -> None:
        self.matmuls[self.who(mask)].append([])

    def wgmma_wait_group(self, count: int, mask, at) -> None:
        groups = self.matmuls[self.who(mask)]
        done = max(len(groups) - 1 - count, 0)
        for registers, read, threads in (matmul for group in groups[:done] for matmul in group):
            for array in registers:
                pending = self.pending[id(array)]
                pending.land()
                for other, _ in pending.arrays:
                    self.pending.pop(id(other), None)
            for index in read:
                self.shared.watched[index] -= 1
                self.shared.asynchronous -= 1
                for warp in np.unique(threads >> 5):  # from here on a read like others, by every warp of the group
                    self.shared.note_read(index, np.full(index.shape[-1], warp), self.order)
        del groups[:done]

    def trap(self, mask, at) -> None:
        if self.chosen(mask).size:
            raise Fault("trap", "reached", at)

    # --- the end

    def finish(self) -> None:
        """Nothing may be in flight when the last thread ends."""
        copies = len(self.open_copies) + sum(len(group) for groups in self.copies.values() for group in groups)
        if copies:
            raise Fault("in flight", f"{copies} cp.async instructions are pending at the end", self.kernel.name)
