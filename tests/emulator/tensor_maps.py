"""Tensor maps, and TMA's copies of their boxes between tensors and shared memory ("PTX ISA" 8.7, sections 5.5 and 9.7.9.27).

A map is a parameter. Found here: tensor map (none where one is named) and, of what a TMA copies, most of what memory.py finds
of threads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

import numpy as np

from .matrices import swizzled
from .memory import Fault
from .numerics import UNSIGNED

MAPS = 1 << 60  # the address of the first; every parameter has 128 bytes there
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}
SWIZZLES = tuple(SWIZZLE_BITS)  # by CUtensorMapSwizzle
NAN = {6: 0x7FFF, 7: 0x7FFFFFFF, 8: 0x7FFFFFFF, 10: 0x7FFF}  # by .elemtype; which NaN it is, nobody says


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor and the box of it that an instruction moves; outermost axis first.

    strides, item, swizzle: bytes. fill: the bits of an element that is out of bounds. The limits are those of
    cuTensorMapEncodeTiled.
    """

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    item: int
    swizzle: int = 0
    fill: int = 0

    def __post_init__(self):
        width = self.box[-1] * self.item
        limits = {
            "as many axes everywhere": len(self.shape) == len(self.strides) == len(self.box) <= 5,
            "a base and strides of 16 bytes": not any(n % 16 for n in (self.base, *self.strides[:-1])),
            "a contiguous last axis": self.strides[-1] == self.item,
            "1 to 256 elements along an axis of the box": all(1 <= n <= 256 for n in self.box),
            "rows of the box of 16 bytes": width % 16 == 0,
            "rows of the box as wide as the swizzle": self.swizzle in (0, width),  # narrower ones are possible
        }
        for limit, saved in limits.items():
            if not saved:
                raise ValueError(f"a tensor map has {limit}: {self}")

    @classmethod
    def of_triton(cls, meta: dict, base: int, shape: tuple, strides: tuple, padding: str = "zero") -> TensorMap:
        """What Triton's make_tensordesc_arg makes of an entry of tensordesc_meta and of a TensorDescriptor, whose strides are
        elements."""
        if meta["fp4_padded"]:
            raise NotImplementedError("a tensor map of padded 4-bit elements")
        item, fill = meta["elem_size"], NAN[meta["elem_type"]] if padding == "nan" else 0
        swizzle, strides = SWIZZLES[meta["swizzle"]], tuple(stride * item for stride in strides)
        return cls(base, tuple(shape), strides, tuple(meta["block_size"]), item, swizzle, fill)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.item

    def elements(self, corner: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(addresses of the box's elements, which of them are inside of the tensor); flat"""
        axes = [start + np.arange(n) for start, n in zip(corner, self.box, strict=True)]
        grid = np.ix_(*axes)
        address = self.base + sum(axis * stride for axis, stride in zip(grid, self.strides, strict=True))
        inside = functools.reduce(
            np.logical_and, ((axis >= 0) & (axis < n) for axis, n in zip(grid, self.shape, strict=True))
        )
        return address.reshape(-1), inside.reshape(-1)


@functools.lru_cache(maxsize=512)
def pieces(start: int, size: int, swizzle: int) -> np.ndarray:
    """Where in shared memory the box's pieces of 16 bytes are."""
    return swizzled(start + np.arange(0, size, 16), SWIZZLE_BITS[swizzle])


class TMA:
    """The copies of a CTA."""

    def __init__(self, cta):
        self.cta = cta
        self.addresses = {name: np.uint64(MAPS + 128 * n) for n, name in enumerate(cta.parameters)}
        self.maps = {MAPS + 128 * n: value for n, value in enumerate(cta.parameters.values())}
        self.commits = np.zeros(cta.threads, np.int64)  # groups that each thread has made
        # by thread: (the group's number, when it was issued, granules of shared memory), until wait_group and wait_group.read
        self.writing: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.reading: defaultdict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)

    def _box(
        self, thread: int, address, coordinates: tuple, shared, at
    ) -> tuple[TensorMap, tuple, np.ndarray, np.ndarray]:
        """(map, corner, pieces in shared memory, their granules)"""
        cta, one = self.cta, np.array([thread])
        where = int(cta.full(address, one)[0])
        box = self.maps.get(where)
        if not isinstance(box, TensorMap):
            raise Fault("tensor map", f"none at {where:#x}: no parameter", at)
        corner = tuple(int(cta.full(c, one)[0]) for c in reversed(coordinates))
        if len(corner) != len(box.box):
            raise Fault("bounds", f"{len(corner)} coordinates of {len(box.box)} axes", at)
        start = int(cta.full(shared, one)[0])
        cta.check_alignment(np.array([start]), 128, at)
        if start + box.bytes > cta.shared.size:
            raise Fault(
                "bounds", f"a box of {box.bytes} bytes at {start} of {cta.shared.size} bytes of shared memory", at
            )
        places = pieces(start, box.bytes, box.swizzle)
        return box, corner, places, cta.shared.granules(places, 16)

    # --- copies

    def load(self, to, address, coordinates: tuple, barrier, mask, at) -> None:
        """A box to shared memory, `fill` where it is out of bounds; all its bytes count at the mbarrier when they land."""
        cta, shared = self.cta, self.cta.shared
        for thread in cta.chosen(mask):
            box, corner, places, index = self._box(thread, address, coordinates, to, at)
            one = np.array([thread], np.int32)
            done = cta.mbarriers.at(int(cta.full(barrier, one)[0]), one, at)
            element, inside = box.elements(corner)
            data = np.full(element.size, box.fill, UNSIGNED[box.item])
            here = np.flatnonzero(inside)
            if here.size:
                for tensor, part in cta.locate(element[here], box.item, "TMA's read", at):
                    offset = element[here[part]] - tensor.base
                    reader = np.full(offset.size, thread, np.int32)
                    data[here[part]] = tensor.load(offset, box.item, 1, reader, cta.order, at)[0]
            shared.check_fenced(index, "TMA's write", at)
            shared.writing(index, np.full(places.size, thread, np.int32), cta.order, at)
            shared.flying[index] += 1
            shared.asynchronous += 1
            land = functools.partial(self._land, places, index, data.view(np.uint64).reshape(-1, 2))
            done.flying.append((box.bytes, land))
            cta.events += 1

    def _land(self, places: np.ndarray, index: np.ndarray, data: np.ndarray, unit: int) -> None:
        shared = self.cta.shared
        shared.views[8][places[:, None] // 8 + np.arange(2)] = data
        shared.flying[index] -= 1
        shared.asynchronous -= 1
        shared.note_write(index, np.full(places.size, unit, np.int32), self.cta.order, fenced=True)

    def store(self, address, coordinates: tuple, source, mask, at) -> None:
        """A box to its tensor, but for what is out of bounds. Nobody has it before wait_group, nor may anyone write to where it
        comes from before wait_group.read."""
        cta, shared = self.cta, self.cta.shared
        for thread in cta.chosen(mask):
            box, corner, places, index = self._box(thread, address, coordinates, source, at)
            shared.check_flight(index, "read", at)
            shared.check_initialised(index, at)
            shared.check_fenced(index, "TMA's read", at)
            shared.check_written(index, np.full(places.size, thread, np.int32), cta.order, "TMA's read", at)
            shared.watched[index] += 1
            shared.asynchronous += 1
            data = shared.views[8][places[:, None] // 8 + np.arange(2)].reshape(-1).view(UNSIGNED[box.item])
            element, inside = box.elements(corner)
            here = np.flatnonzero(inside)
            if here.size:
                for tensor, part in cta.locate(element[here], box.item, "TMA's write", at):
                    self._write(tensor, element[here[part]] - tensor.base, data[here[part]], thread, at)
            self.writing[thread].append((int(self.commits[thread]), cta.order.time))
            self.reading[thread].append((int(self.commits[thread]), index))
            cta.order.time += 1

    def _write(self, tensor, offset: np.ndarray, data: np.ndarray, thread: int, at) -> None:
        order, index = self.cta.order, tensor.granules(offset, data.itemsize)
        tensor.writing(index, np.full(offset.size, thread, np.int32), order, at)
        tensor.note_write(index, np.full(offset.size, order.store_unit(thread), np.int32), order)
        tensor.last_write = np.iinfo(np.int64).max  # a barrier of all is not enough
        tensor.views[data.itemsize][offset // data.itemsize] = data

    def commit(self, mask, at) -> None:
        self.commits[self.cta.chosen(mask)] += 1

    def wait(self, count: int, read: bool, mask, at) -> None:
        """All groups of each thread but its last `count` have read their source, and without `read` are written."""
        cta, shared = self.cta, self.cta.shared
        for thread in {*self.reading, *self.writing} & set(cta.chosen(mask).tolist()):
            last, warp = self.commits[thread] - count, thread >> 5
            for number, index in self.reading[thread]:
                if number < last:
                    shared.watched[index] -= 1
                    shared.asynchronous -= 1
                    shared.note_read(index, np.full(index.shape[-1], warp), cta.order)
            self.reading[thread] = [group for group in self.reading[thread] if group[0] >= last]
            if not read:
                known, unit = cta.order.known, cta.order.store_unit(thread) >> 5
                known[warp, unit] = max(
                    [known[warp, unit], *(time for number, time in self.writing[thread] if number < last)]
                )
                self.writing[thread] = [group for group in self.writing[thread] if group[0] >= last]

    def finish(self) -> None:
        """Shared memory is another CTA's after the end, so that stores must have read theirs."""
        stores = sum(map(len, self.reading.values()))
        if stores:
            raise Fault("in flight", f"{stores} TMA stores may still read at the end", self.cta.kernel.name)
