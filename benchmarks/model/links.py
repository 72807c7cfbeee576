"""Cost model: what connects the GPUs of a group, the time of a collective over it, and how much of that matmuls hide.

A collective runs beside the launches that follow it until one waits for it; several run one after another, as on NCCL's stream.
That both have less bandwidth and fewer SMs meanwhile is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .trace import COLLECTIVE, WAIT, Launch

GIGA, MICRO = 1e9, 1e-6


class Link(NamedTuple):
    """Bytes a second of one GPU in one direction, and seconds of a step to the next rank."""

    name: str
    peak: float
    reached: float  # part of the peak, as NCCL's own model takes it
    hop: float
    between_nodes: bool = False

    @property
    def bandwidth(self) -> float:
        return self.peak * self.reached


# peak     NVLink: NVIDIA's data sheets of A100 (600 GB/s, both directions together, in 12 links) and H100, H200 (900, in 18).
#          PCIe x16: 16 GT/s and 32 GT/s a lane with 128b/130b (PCI-SIG's base specifications 4.0 and 5.0). Network: 400 Gb/s.
# reached  NCCL's src/graph/topo.h: 20.0 and 20.6 of the 25 GB/s of a link of A100 and H100 (SM80_NVLINK_BW, SM90_NVLINK_BW), 12
#          of the 15.75 GB/s of PCIe 3.0 x16 (PCI_BW), 12 of the 12.5 GB/s of 100 Gb/s (NET_BW).
# hop      NCCL's src/graph/tuning.cc, hwLat of rings with the protocol Simple.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink4", 450 * GIGA, 20.6 / 25, 3.4 * MICRO),
        Link("nvlink3", 300 * GIGA, 20.0 / 25, 3.4 * MICRO),
        Link("pcie5", 63 * GIGA, 12 / 15.75, 5.7 * MICRO),
        Link("pcie4", 31.5 * GIGA, 12 / 15.75, 5.7 * MICRO),
        Link("400gb", 50 * GIGA, 12 / 12.5, 14.0 * MICRO, between_nodes=True),
    )
}

BASE = 8.4 * MICRO  # of any collective: NCCL's src/graph/tuning.cc, baseLat with the protocol Simple
TREE = 0.9  # of a ring's bandwidth that a tree reaches: the same file
ROUNDS = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}  # times round the ring


def seconds(name: str, size: int, ranks: int, link: Link) -> float:
    """Time of all_reduce, reduce_scatter_tensor or all_gather_into_tensor. size: bytes of the whole tensor, before a scatter or
    after a gather.

    In a ring each rank sends size / ranks bytes in each of 2 (ranks - 1) steps, or ranks - 1 of the two others (Thakur,
    Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521; doc/PERFORMANCE.md of nccl-tests). An all-reduce may take a tree, up
    and down it: of log2(ranks) levels between nodes, a chain inside one (src/graph/tuning.cc of NCCL); the quicker counts.
    Raises ValueError for another collective.
    """
    if name not in ROUNDS:
        raise ValueError(f"the cost model has no time of {name}: it knows {', '.join(ROUNDS)}")
    steps = ROUNDS[name] * (ranks - 1)
    ring = BASE + steps * link.hop + size * steps / ranks / link.bandwidth
    if name != "all_reduce":
        return ring
    depth = math.ceil(math.log2(ranks)) if link.between_nodes else ranks - 1
    return min(ring, BASE + 2 * depth * link.hop + 2 * size / (TREE * link.bandwidth))


class Timeline(NamedTuple):
    """Seconds of a pass, of its collectives, and those of the latter in which the GPU waits."""

    seconds: float
    collectives: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Part of the collectives' time."""
        return max(0.0, 1 - self.exposed / self.collectives) if self.collectives else 0.0

    def then(self, other: Timeline) -> Timeline:
        return Timeline(*(a + b for a, b in zip(self, other, strict=True)))


def timeline(
    launches: Iterable[Launch], of: Callable[[Launch], float], ranks: int, link: Link, overlap: bool = True
) -> Timeline:
    """The launches one after another, beside them the collectives. of: seconds of a launch. overlap: or each collective is
    waited for where it starts."""
    now = free = busy = exposed = 0.0
    ends: dict[int, float] = {}
    for launch in launches:
        if launch.kind == COLLECTIVE:
            took = seconds(launch.name.split()[0], launch.bytes, ranks, link)
            busy += took
            free = ends[launch.shape[0]] = max(now, free) + took
        if launch.kind == WAIT or (launch.kind == COLLECTIVE and not overlap):
            wait = max(0.0, ends[launch.shape[0]] - now)
            exposed += wait
            now += wait
        elif launch.kind != COLLECTIVE:
            now += of(launch)
    left = max(0.0, free - now)  # of what nothing waits for
    return Timeline(now + left, busy, exposed + left)
