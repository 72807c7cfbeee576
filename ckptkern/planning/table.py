"""The table that choices are made from: bytes and costs of each region in each strategy, and the peak that they predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .live import Loss, Step
from .segments import Segment, Strategy, Workspaces
from .timing import Rates

Call = tuple[tuple, dict[str, Any]]


class Held(NamedTuple):
    """Bytes that one owner saves: storages that no other sees, and others by name. What is neither a parameter nor an input or
    output of a region is its own: a weight that autocast casts once for two regions counts in both."""

    own: int = 0
    shared: dict[tuple, int] = {}  # noqa: RUF012 (never written)

    @property
    def bytes(self) -> int:
        return total([self])


class Cost(NamedTuple):
    """Of one forward and backward of a region alone.

    seconds: None on the meta device, unless it stands for a GPU. flops: of matmuls. forward, backward: how far each rises above
    what was there when it began. transient: the same of backward, besides gradients.
    """

    seconds: float | None
    flops: int
    forward: int
    backward: int
    transient: int


DOES_NOT_FIT = Cost(math.inf, 0, 0, 0, 0)  # one region alone


@dataclass
class Kind:
    """Regions that are alike, of which one runs alone. held: by the places of its inputs and outputs. Both are in the order of
    its strategies, the original forward last if it is asked for."""

    first: Segment
    call: Call
    costs: list[Cost] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


class Measured(NamedTuple):
    """One region of a table. kinds: of its calls, in their order. held: in each of its strategies, and then in its original
    forward, if that was asked for."""

    segment: Segment
    kinds: list[int]
    strategies: list[Strategy]
    held: list[Held]

    @property
    def eager(self) -> Held | None:
        """What it saved before convert; None where that was not asked for, or there was no other forward."""
        return self.held[-1] if len(self.held) > len(self.strategies) else None


@dataclass
class Table:
    """What choices are made from. rest, eager_rest: what is saved outside of the regions. workspace: at most so many bytes of
    each op's; None is what it was given."""

    rows: list[Measured]
    kinds: list[Kind]
    rest: Held
    eager_rest: Held | None
    device: torch.device
    workspaces: Workspaces
    workspace: int | None = None
    rates: Rates | None = None  # of the GPU that a model on the meta device is planned for
    loss: Loss | None = None  # of what the model returns
    base: Step | None = None  # with every region at "full", if peaks are asked for

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The regions' names and modules."""
        return [(row.segment.name, row.segment.module) for row in self.rows]

    @property
    def outside(self) -> int:
        """Bytes saved outside of all regions that no region saves."""
        seen = {name for row in self.rows for held in row.held for name in held.shared}
        return self.rest.own + sum(n for name, n in self.rest.shared.items() if name not in seen)

    def transients(self, chosen: Sequence[int]) -> list[int]:
        return [
            self.kinds[row.kinds[0]].costs[strategy].transient for row, strategy in zip(self.rows, chosen, strict=True)
        ]

    def rise(self, chosen: Sequence[int]) -> int:
        """The most that a smaller workspace could take from the peak."""
        assert self.base is not None
        outside = [one.highest - one.start for one in self.base.stretches if one.segment is None]
        forward = [self.kinds[row.kinds[0]].costs[w].forward for row, w in zip(self.rows, chosen, strict=True)]
        return max(*outside, *forward, *self.transients(chosen))

    def saved(self, chosen: Sequence[int]) -> int:
        """Bytes that the model's forward saves if the regions run in these strategies."""
        return total([self.rest, *(row.held[strategy] for row, strategy in zip(self.rows, chosen, strict=True))])

    @property
    def eager_saved(self) -> int | None:
        """Bytes that the model saved before convert."""
        if self.eager_rest is None or any(row.eager is None for row in self.rows):
            return None
        return total([self.eager_rest, *(row.eager for row in self.rows)])

    def cost(self, row: Measured, strategy: int) -> float:
        """Seconds of the region's forwards and backwards; on the meta device, flops of their matmuls."""
        costs = [self.kinds[kind].costs[strategy] for kind in row.kinds]
        return sum(cost.flops if cost.seconds is None else cost.seconds for cost in costs)

    @property
    def cheapest(self) -> float:
        """The cost of the quickest choice there is."""
        return sum(min(self.cost(row, strategy) for strategy in range(len(row.strategies))) for row in self.rows)

    def cost_of(self, chosen: Sequence[int]) -> float:
        return sum(self.cost(row, strategy) for row, strategy in zip(self.rows, chosen, strict=True))

    def peak(self, chosen: Sequence[int]) -> int:
        """What the step is predicted to allocate at its peak if the regions run in these strategies: the step that was
        recorded, with what its regions save and their rises in place of what they were.

        In a stretch of the step the regions in `done` hold what they save. Beside that stands what the recorded step had."""
        base, highest = self.uniform("full"), 0
        assert self.base is not None
        for stretch in self.base.stretches:
            mode = self._moved(stretch.done, base, chosen)
            if stretch.segment is None:
                highest = max(highest, stretch.highest + mode)
                continue
            costs = self.kinds[self.rows[stretch.segment].kinds[0]].costs
            was, now = (costs[strategies[stretch.segment]] for strategies in (base, chosen))
            if stretch.backward:
                mode = self._moved(stretch.done | {stretch.segment}, base, chosen)
            rise = now.backward - was.backward if stretch.backward else now.forward - was.forward
            highest = max(highest, stretch.highest + mode + rise)
        return highest

    def _moved(self, segments: frozenset[int], base: Sequence[int], chosen: Sequence[int]) -> int:
        """How many bytes more these regions save as chosen."""
        now, was = ([self.rest, *(self.rows[i].held[which[i]] for i in segments)] for which in (chosen, base))
        return total(now) - total(was)

    def uniform(self, mode: str) -> list[int]:
        """Every region in one mode."""
        return [
            row.strategies.index(Strategy(mode))
            if Strategy(mode) in row.strategies
            else row.strategies.index(Strategy("full"))
            for row in self.rows
        ]


def total(held: Sequence[Held]) -> int:
    named: dict[tuple, int] = {}
    for one in held:
        named.update(one.shared)
    return sum(one.own for one in held) + sum(named.values())
