"""The table that choices are made from: bytes and costs of each region in each strategy, and the peak that they predict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..conversion.recorder import Alive, Loss, Step, step_of
from ..conversion.report import aligned, name_of
from ..conversion.trace import Call
from ..memory import format_size, three_digits
from .agree import largest_of
from .segments import ORIGINAL, Segment, Strategy, Workspaces, in_strategies
from .timing import Rates

SHOWN = 8  # lines of what stands at a peak


class Held(NamedTuple):
    """Bytes that one owner saves: storages that no other sees, and others by name. What is neither a parameter nor an input or
    output of a region is its own: a weight that autocast casts once for two regions counts in both."""

    own: int = 0
    shared: dict[tuple, int] = {}  # noqa: RUF012 (never written)

    @property
    def bytes(self) -> int:
        return self.own + sum(self.shared.values())


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
    its strategies."""

    first: Segment
    call: Call
    strategies: list[Strategy]
    costs: list[Cost] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


class Measured(NamedTuple):
    """One region of a table. kinds: of its calls, in their order. held: in each of its strategies."""

    segment: Segment
    kinds: list[int]
    strategies: list[Strategy]
    held: list[Held]

    @property
    def eager(self) -> Held | None:
        """What it saved before convert; None where that was not asked for, or there was no other forward."""
        return self.held[0] if self.strategies[0] == ORIGINAL else None


class Example(NamedTuple):
    """The training step that a table is of. loss: from what the model returns to what is differentiated. there: parameters and
    inputs whose gradients are there when it begins."""

    model: nn.Module
    args: tuple
    kwargs: dict
    loss: Loss | None
    there: list[Tensor]

    def step(self, regions: Sequence[tuple[str, nn.Module]] = (), step: Step | None = None) -> Step:
        """Records it, with the model as it is."""
        return step_of(self.model, self.args, self.kwargs, regions, loss=self.loss, there=self.there, step=step)


@dataclass
class Table:
    """What choices are made from. rest: what is saved outside of the regions. workspace: at most so many bytes of
    each op's; None is what it was given. steps: those that were recorded, by the choice; peaks: theirs, the largest of all
    ranks."""

    example: Example
    rows: list[Measured]
    kinds: list[Kind]
    rest: Held
    device: torch.device
    workspaces: Workspaces
    workspace: int | None = None
    rates: Rates | None = None  # of the GPU that a model on the meta device is planned for
    group: dist.ProcessGroup | None = None
    steps: dict[tuple[int, ...], Step] = field(default_factory=dict)
    peaks: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The regions' names and modules."""
        return [(row.segment.name, row.segment.module) for row in self.rows]

    def step(self, chosen: Sequence[int]) -> Step:
        """Records a step with the regions in these strategies and the table's workspace, which are afterwards as before. Of a
        choice that was recorded returns that."""
        if tuple(chosen) not in self.steps:
            strategies = [row.strategies[strategy] for row, strategy in zip(self.rows, chosen, strict=True)]
            with in_strategies([row.segment for row in self.rows], strategies), self.workspaces.at(self.workspace):
                self.steps[tuple(chosen)] = self.example.step(self.modules)
        return self.steps[tuple(chosen)]

    def measured(self, chosen: Sequence[int]) -> int:
        """Returns the peak of a step in these strategies, which is recorded once."""
        key = tuple(chosen)
        if key not in self.peaks:
            self.peaks[key] = largest_of(self.step(key).peak, self.group)
        return self.peaks[key]

    def apply(self, chosen: Sequence[int]) -> None:
        for row, strategy in zip(self.rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])

    @property
    def base(self) -> Step:
        """The step with every region at "full"."""
        return self.step(self.uniform("full"))

    @property
    def outside(self) -> int:
        """Bytes saved outside of all regions that no region saves."""
        seen = {name for row in self.rows for held in row.held for name in held.shared}
        return self.rest.own + sum(n for name, n in self.rest.shared.items() if name not in seen)

    def costs(self, chosen: Sequence[int]) -> list[Cost]:
        """The cost of a call of each region."""
        return [self.kinds[row.kinds[0]].costs[strategy] for row, strategy in zip(self.rows, chosen, strict=True)]

    def transient(self, chosen: Sequence[int]) -> int:
        """The most that the backward of one region rises above what is saved, besides gradients."""
        return max((cost.transient for cost in self.costs(chosen)), default=0)

    def rise(self, chosen: Sequence[int]) -> int:
        """The most that a smaller workspace could take from the peak."""
        outside = [one.highest - one.start for one in self.base.stretches if one.region is None]
        return max(*outside, *(max(cost.forward, cost.transient) for cost in self.costs(chosen)))

    def saved(self, chosen: Sequence[int]) -> int:
        """Bytes that the model's forward saves if the regions run in these strategies."""
        return total([self.rest, *(row.held[strategy] for row, strategy in zip(self.rows, chosen, strict=True))])

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
        """What the step is predicted to allocate at its peak if the regions run in these strategies: the step at "full" that
        was recorded, with what its regions save and their rises in place of what they were.

        In a stretch of the step the regions in `done` hold what they save. Beside that stands what the recorded step had."""
        base, highest = self.uniform("full"), 0
        were, are = self.costs(base), self.costs(chosen)
        for stretch in self.base.stretches:
            moved, rise, i = self._moved(stretch.done, base, chosen), 0, stretch.region
            if i is not None and stretch.backward:
                moved = self._moved(stretch.done | {i}, base, chosen)
                rise = are[i].backward - were[i].backward
            elif i is not None:
                rise = are[i].forward - were[i].forward
            highest = max(highest, stretch.highest + moved + rise)
        return highest

    def _moved(self, regions: frozenset[int], base: Sequence[int], chosen: Sequence[int]) -> int:
        """How many bytes more these regions save as chosen."""
        now, was = ([self.rest, *(self.rows[i].held[which[i]] for i in regions)] for which in (chosen, base))
        return total(now) - total(was)

    def uniform(self, mode: str) -> list[int]:
        """Every region in one mode, or "full" where it does not have it."""
        return [
            row.strategies.index(Strategy(mode if Strategy(mode) in row.strategies else "full")) for row in self.rows
        ]

    # -- as text

    def text(self, chosen: Sequence[int] | None = None) -> list[str]:
        """Returns the lines of a table: each strategy of the regions, those that are alike in one. chosen: with how many of
        them run in it."""
        head = ("region", "replaced by", "strategy", "chosen", "saved", "of eager", "time", "GFLOP", "transient")
        lines = [head]
        for number, kind in enumerate(self.kinds):
            places = [i for i, row in enumerate(self.rows) if row.kinds[0] == number]
            if not places:
                continue
            row = self.rows[places[0]]
            names = name_of([self.rows[i].segment.name for i in places]), row.segment.replaced_by
            for w, strategy in enumerate(row.strategies):
                cost, held = kind.costs[w], row.held[w].bytes
                lines.append(
                    (
                        *names,
                        str(strategy),
                        str(sum(chosen[i] == w for i in places) or "") if chosen else "",
                        format_size(held),
                        f"{held / row.eager.bytes:.1%}" if row.eager and row.eager.bytes else "",
                        time_of(cost.seconds),
                        three_digits(cost.flops / 1e9),
                        format_size(cost.transient),
                    )
                )
                names = "", ""
        shown = [
            i for i, name in enumerate(head) if any(line[i] for line in lines[1:]) or name in ("region", "strategy")
        ]
        return aligned([tuple(line[i] for i in shown) for line in lines])


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{three_digits(seconds * 1e3)} ms" if math.isfinite(seconds) else "does not fit"


def largest_standing(standing: Sequence[Alive]) -> list[tuple[int, str, str]]:
    """Returns (bytes, what, place) of the largest tensors that stand at a peak, and of the others as one."""
    rows = [(alive.bytes, alive.what, alive.place) for alive in standing[:SHOWN]]
    rest = sum(alive.bytes for alive in standing[SHOWN:])
    return [*rows, (rest, f"{len(standing) - SHOWN} others", "")] if rest else rows


def standing_lines(standing: Sequence[Alive]) -> list[str]:
    return aligned([(f"  {format_size(nbytes)}", *where) for nbytes, *where in largest_standing(standing)])


def joined(held: Iterable[Held]) -> Held:
    """Returns what several owners save together."""
    own, shared = 0, dict[tuple, int]()
    for one in held:
        own += one.own
        shared.update(one.shared)
    return Held(own, shared)


def total(held: Iterable[Held]) -> int:
    return joined(held).bytes
