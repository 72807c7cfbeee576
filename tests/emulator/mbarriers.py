"""mbarriers: barriers in shared memory that count arrivals and bytes ("PTX ISA" 8.7, section 9.7.13.15).

Found here: mbarrier (used before its init or after its memory was overwritten, more arrivals than it expects, init over a used
one), and for launch.py what the strands of a hang wait for.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from .memory import Fault

MOST = 2**20 - 1  # of arrivals, and of bytes under way


@dataclasses.dataclass(eq=False)
class MBarrier:
    """A phase is complete when nothing is `pending` and no `bytes` are to come; then the next one begins."""

    address: int
    count: int
    created: int  # time of its init, the last write of its memory
    unit: int  # the thread that stands for the copies that complete here
    learned: np.ndarray  # what arrivals of this phase release
    known: np.ndarray  # what those of the last complete phase released
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    used: bool = False
    flying: deque[tuple[int, Callable]] = dataclasses.field(default_factory=deque)  # (bytes, what writes them)

    def __str__(self) -> str:
        return f"the mbarrier at {self.address}, phase {self.phase}: {self.pending} arrivals and {self.bytes} bytes to come"


class MBarriers:
    """Those of a CTA, by address."""

    def __init__(self, cta):
        self.cta = cta
        self.live: dict[int, MBarrier] = {}

    def _index(self, address: int, at) -> np.ndarray:
        return self.cta.shared.granules(self.cta.in_shared(np.array([address]), 8, at), 8)

    def _places(self, address, mask) -> Iterator[tuple[int, np.ndarray]]:
        """Every address with its threads."""
        threads = self.cta.chosen(mask)
        address = self.cta.full(address, threads)
        for place in np.unique(address):
            yield int(place), threads[address == place]

    def at(self, address: int, threads: np.ndarray, at) -> MBarrier:
        """The mbarrier that these threads use, which another's init comes before."""
        shared, order = self.cta.shared, self.cta.order
        index, barrier = self._index(address, at), self.live.get(address)
        if barrier is None:
            raise Fault("mbarrier", f"no mbarrier.init has been at {address}", at)
        if (shared.written[index] != barrier.created).any():
            raise Fault("mbarrier", f"what was the mbarrier at {address} has been overwritten", at)
        first = threads[np.unique(threads >> 5, return_index=True)[1]]  # one a warp
        index = np.repeat(index, len(first), 1)
        shared.check_written(index, first, order, "use of an mbarrier", at)
        shared.note_read(index, first >> 5, order)
        barrier.used = True
        return barrier

    # --- the instructions

    def init(self, address, count, mask, at) -> None:
        cta = self.cta
        for place, threads in self._places(address, mask):
            wanted, index = int(np.max(cta.full(count, threads))), self._index(place, at)
            if not 1 <= wanted <= MOST:
                raise Fault("mbarrier", f"init with a count of {wanted}", at)
            old = self.live.get(place)
            # Undefined for any that is valid; Triton 3.7.1 leaves the init of barriers that it does not use, two at one place.
            if old is not None and old.used and (old.flying or (cta.shared.written[index] == old.created).all()):
                raise Fault("mbarrier", f"init over the one at {place}, which no mbarrier.inval has ended", at)
            self._write(index, threads, at)
            nothing = np.zeros(cta.order.known.shape[1], np.int64)
            barrier = MBarrier(place, wanted, cta.order.time, cta.order.unit(place // 8), nothing, nothing, wanted)
            self.live[place] = barrier
            cta.order.time += 1  # so that no other write of its memory has the same time

    def inval(self, address, mask, at) -> None:
        for place, threads in self._places(address, mask):
            if self.at(place, threads[:1], at).flying:
                raise Fault("in flight", f"inval of the mbarrier at {place}, on which copies complete", at)
            self._write(self._index(place, at), threads, at)
            del self.live[place]

    def _write(self, index: np.ndarray, threads: np.ndarray, at) -> None:
        if len(threads) > 1:
            raise Fault("race", f"{len(threads)} threads begin or end one mbarrier", at)
        self.cta.shared.writing(index, threads, self.cta.order, at)
        self.cta.shared.note_write(index, threads, self.cta.order, fenced=True)

    def _expect(self, barrier: MBarrier, amount, threads: np.ndarray, at) -> None:
        barrier.bytes += int(self.cta.full(amount, threads).astype(np.int64).sum())
        if barrier.bytes > MOST:
            raise Fault("mbarrier", f"{barrier.bytes} bytes are expected, more than {MOST}", at)

    def arrive(self, address, count, amount, mask, at) -> None:
        """Arrivals that expect `amount` bytes first (None: none)."""
        cta = self.cta
        for place, threads in self._places(address, mask):
            barrier = self.at(place, threads, at)
            if amount is not None:
                self._expect(barrier, amount, threads, at)
            arrivals = int(cta.full(count, threads).astype(np.int64).sum())
            if arrivals > barrier.pending:
                raise Fault("mbarrier", f"{arrivals} arrivals at {barrier}", at)
            barrier.pending -= arrivals
            barrier.learned = np.maximum(barrier.learned, cta.order.release(np.unique(threads >> 5)))
            cta.events += 1
            self._settle(barrier)

    def wait(self, address, parity, mask, at) -> np.ndarray:
        """Returns, for each thread, whether the phase of this parity is complete, which changes between calls only."""
        cta = self.cta
        result, late = np.zeros(cta.threads, bool), None
        for place, threads in self._places(address, mask):
            barrier, wanted = self.at(place, threads, at), cta.full(parity, threads).astype(np.int64)
            wanted = barrier.phase - ((barrier.phase ^ wanted) & 1)  # its number; Triton 3.7.1 writes -1 for 1
            if (wanted >= barrier.phase).any() and at in cta.strand.asked:
                self._land(barrier)
            result[threads] = done = wanted < barrier.phase
            if done.any():
                cta.order.acquire(np.unique(threads[done] >> 5), barrier.known)
            if not done.all():
                late = barrier
        if late is None:
            cta.strand.asked.pop(at, None)
        else:
            self._in_vain(late, at)
        return result

    def _in_vain(self, barrier: MBarrier, at) -> None:
        """The strand is put aside when it asks again and nothing has happened: the first time may have been a look ahead."""
        strand, cta = self.cta.strand, self.cta
        if strand.asked.get(at, (None, -1))[1] == cta.events:
            strand.stalled = cta.events
        strand.asked[at] = barrier, cta.events

    # --- phases

    def _settle(self, barrier: MBarrier) -> None:
        if barrier.pending or barrier.bytes:
            return
        barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
        barrier.known, barrier.learned = barrier.learned, np.zeros_like(barrier.learned)

    def _land(self, barrier: MBarrier) -> None:
        """Copies land as late as they can: when someone waits for them, and only they are missing."""
        phase, order = barrier.phase, self.cta.order
        while barrier.flying and not barrier.pending and barrier.phase == phase:
            size, land = barrier.flying.popleft()
            land(barrier.unit)
            barrier.learned[barrier.unit >> 5] = order.time
            order.time += 1
            barrier.bytes -= size
            self.cta.events += 1
            self._settle(barrier)

    # --- the end

    def awaited(self, strands) -> list[tuple[MBarrier, object]]:
        """(mbarrier, the instruction that waits there) of strands that are put aside."""
        return [(barrier, at) for s in strands for at, (barrier, events) in s.asked.items() if events == s.stalled]

    def finish(self) -> None:
        for barrier in self.live.values():
            if barrier.flying:
                raise Fault("in flight", f"{len(barrier.flying)} copies at the end: {barrier}", self.cta.kernel.name)
