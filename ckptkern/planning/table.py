"""Holds the table that choices are made from: bytes and costs of each region in each strategy, and the predicted peaks. It
is the same on all ranks, so that all make the same choice."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map, tree_structure

from ..conversion.recorder import Alive, Loss, Step, device_of, loss_of, step_of
from ..conversion.report import aligned, name_of
from ..conversion.trace import Call, tensors_in
from ..memory import format_size, three_digits
from .segments import ORIGINAL, Segment, Strategy, Workspaces, check_step, in_strategies
from .timing import Rates

SHOWN = 8  # lines of tensors alive at a peak

Choice = tuple[int, ...]  # index of each region's strategy


# Bytes that one owner saves, by name. Only the inputs and outputs of regions have names in the model, so that a weight that
# autocast casts once for two regions counts in both; what no other owner sees is one item, OWN until its owner has a name.
Held = dict[tuple, int]
OWN = ("own",)


class Cost(NamedTuple):
    """The cost of one forward and backward of a region alone.

    seconds: None on the meta device, unless a GPU's times are estimated. flops: of matmuls. forward, backward: bytes that each
    allocates above what was there when it began. transient: as backward, besides gradients.
    """

    seconds: float | None
    flops: int
    forward: int
    backward: int
    transient: int

    @property
    def time(self) -> float:
        """Returns the seconds, or the flops if there are none."""
        return self.flops if self.seconds is None else self.seconds


DOES_NOT_FIT = Cost(math.inf, 0, 0, 0, 0)  # one region alone


@dataclass
class Kind:
    """Regions that are alike, of which one runs alone. costs, held: in the order of `strategies`. held: by the places of
    inputs and outputs."""

    first: Segment
    call: Call
    strategies: list[Strategy]
    costs: list[Cost] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


class Measured(NamedTuple):
    """A region of a table. kinds: the kind of each of its calls. held: in each of its strategies."""

    segment: Segment
    kinds: list[int]
    strategies: list[Strategy]
    held: list[Held]

    @property
    def eager(self) -> int | None:
        """Returns the bytes that the region saved before convert; None if that was not measured."""
        return total(self.held[:1]) if self.strategies[0] == ORIGINAL else None


class Example:
    """The training step that a table describes, with the gradients that exist now. loss: maps the model's output to what is
    differentiated. Raises TypeError, ValueError or RuntimeError, naming `op`, if the step cannot run."""

    def __init__(self, op: str, model: nn.Module, call: Call, loss: Loss | None = None):
        check_step(op, model, call)
        self.op, self.model, self.call = op, model, call
        self.loss = None if loss is None else functools.partial(loss_of, loss=loss)
        leaves = *model.parameters(), *tensors_in(call)
        self.there = [leaf for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
        self.device = device_of(model, call)

    def step(self, segments: Sequence[Segment] = (), backs: bool = True) -> Step:
        """Records a step of the model as it is. backs=False: a forward only, of which the figures and calls remain."""
        regions, step = [(segment.name, segment.module) for segment in segments], Step(backs)
        return step_of(self.model, self.call, regions, loss=self.loss, there=self.there, step=step)


@dataclass
class Table:
    """Measurements that choices are made from. rest: what is saved outside of the regions. workspace: limit of each op's
    workspace in bytes; None leaves their own. steps: the recorded steps, by choice. peaks: their peaks, the largest of all
    ranks."""

    example: Example
    rows: list[Measured]
    kinds: list[Kind]
    rest: Held
    workspaces: Workspaces
    workspace: int | None = None
    rates: Rates | None = None  # of the GPU that a model on the meta device is planned for
    group: dist.ProcessGroup | None = None
    steps: dict[Choice, Step] = field(default_factory=dict)
    peaks: dict[Choice, int] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        return [row.segment for row in self.rows]

    def strategies(self, chosen: Choice) -> list[Strategy]:
        return [row.strategies[strategy] for row, strategy in zip(self.rows, chosen, strict=True)]

    def step(self, chosen: Choice) -> Step:
        """Records a step in the chosen strategies and the table's workspace, once for each choice, and restores both."""
        if chosen not in self.steps:
            with in_strategies(self.segments, self.strategies(chosen)), self.workspaces.at(self.workspace):
                self.steps[chosen] = self.example.step(self.segments)
        return self.steps[chosen]

    def measured(self, chosen: Choice) -> int:
        """Returns the measured peak of a step in the chosen strategies."""
        if chosen not in self.peaks:
            self.peaks[chosen] = max(gathered(self.step(chosen).peak, self.group))
        return self.peaks[chosen]

    @property
    def outside(self) -> int:
        """Returns the bytes saved outside of all regions that no region saves."""
        seen = {name for row in self.rows for held in row.held for name in held}
        return sum(nbytes for name, nbytes in self.rest.items() if name not in seen)

    def costs(self, chosen: Choice) -> list[Cost]:
        """Returns the cost of a call of each region."""
        return [self.kinds[row.kinds[0]].costs[strategy] for row, strategy in zip(self.rows, chosen, strict=True)]

    def transient(self, chosen: Choice) -> int:
        """Returns the most bytes that one region's backward allocates above what is saved, besides gradients."""
        return max((cost.transient for cost in self.costs(chosen)), default=0)

    def rise(self, chosen: Choice) -> int:
        """Returns the most bytes that a smaller workspace could take from the peak."""
        stretches = self.step(self.uniform("full")).stretches
        outside = [stretch.highest - stretch.start for stretch in stretches if stretch.region is None]
        return max(*outside, *(max(cost.forward, cost.transient) for cost in self.costs(chosen)))

    def saved(self, chosen: Choice) -> int:
        """Returns the bytes that the model's forward saves in the chosen strategies."""
        return saved(self.rest, [row.held for row in self.rows], chosen)

    def times(self) -> list[list[float]]:
        """Returns the seconds of each region's forwards and backwards, in each strategy; on the meta device, the flops of
        their matmuls."""
        return [
            [sum(self.kinds[kind].costs[i].time for kind in row.kinds) for i in range(len(row.strategies))]
            for row in self.rows
        ]

    def cost_of(self, chosen: Choice) -> float:
        return sum(map(operator.getitem, self.times(), chosen))

    def peak(self, chosen: Choice) -> int:
        """Returns the predicted peak of a step in the chosen strategies: the recorded step at "full", with the regions' saved
        bytes and transients exchanged.

        In a stretch of the step the regions in `done` hold what they save, beside what the recorded step holds elsewhere.
        """
        base, highest = self.uniform("full"), 0
        were, are = self.costs(base), self.costs(chosen)
        for stretch in self.step(base).stretches:
            regions, rise, i = stretch.done, 0, stretch.region
            if i is not None and stretch.backward:
                regions, rise = stretch.done | {i}, are[i].backward - were[i].backward
            elif i is not None:
                rise = are[i].forward - were[i].forward
            now, was = (total([self.rest, *(self.rows[k].held[which[k]] for k in regions)]) for which in (chosen, base))
            highest = max(highest, stretch.highest + now - was + rise)
        return highest

    def uniform(self, mode: str) -> Choice:
        """Returns the choice of one mode for every region, or of "full" where a region does not have that mode."""
        return tuple(
            row.strategies.index(Strategy(mode if Strategy(mode) in row.strategies else "full")) for row in self.rows
        )

    # -- as text

    def text(self, chosen: Choice | None = None) -> list[str]:
        """Returns the lines of a table: each strategy of the regions, equal regions in one line. chosen: adds how many
        regions run in each strategy."""
        lines = [("region", "replaced by", "strategy", "chosen", "saved", "of eager", "time", "GFLOP", "transient")]
        for number, kind in enumerate(self.kinds):
            places = [i for i, row in enumerate(self.rows) if row.kinds[0] == number]
            if not places:
                continue
            row = self.rows[places[0]]
            names = name_of([self.rows[i].segment.name for i in places]), row.segment.replaced_by
            for w, strategy in enumerate(row.strategies):
                cost, held, time = kind.costs[w], total([row.held[w]]), ""
                if cost.seconds is not None:
                    time = f"{three_digits(cost.seconds * 1e3)} ms" if math.isfinite(cost.seconds) else "does not fit"
                lines.append(
                    (
                        *names,
                        str(strategy),
                        str(sum(chosen[i] == w for i in places) or "") if chosen else "",
                        format_size(held),
                        f"{held / row.eager:.1%}" if row.eager else "",
                        time,
                        three_digits(cost.flops / 1e9),
                        format_size(cost.transient),
                    )
                )
                names = "", ""
        columns = zip(*lines, strict=True)
        shown = [column for column in columns if any(column[1:]) or column[0] in ("region", "strategy")]
        return aligned(list(zip(*shown, strict=True)))


def largest_standing(standing: Sequence[Alive]) -> list[tuple[int, str, str]]:
    """Returns (bytes, what, place) of the largest tensors alive at a peak, with the others summed in a last row."""
    rows = [(alive.bytes, alive.what, alive.place) for alive in standing[:SHOWN]]
    rest = sum(alive.bytes for alive in standing[SHOWN:])
    return [*rows, (rest, f"{len(standing) - SHOWN} others", "")] if rest else rows


def standing_lines(standing: Sequence[Alive]) -> list[str]:
    return aligned([(f"  {format_size(nbytes)}", *where) for nbytes, *where in largest_standing(standing)])


def total(held: Iterable[Held]) -> int:
    """Returns the bytes that several owners save together."""
    together: Held = {}
    for part in held:
        together |= part
    return sum(together.values())


def saved(rest: Held, held: Sequence[Sequence[Held]], chosen: Choice) -> int:
    """Returns the bytes that a choice saves. held[s][w]: of region s in strategy w. rest: outside of all regions."""
    return total([rest, *map(operator.getitem, held, chosen)])


# -- several ranks


def gathered(value, group: dist.ProcessGroup | None) -> list:
    """Returns the values of all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(measure: Callable[[], Table], group: dist.ProcessGroup | None) -> Table:
    """Returns this rank's table with the largest bytes and times of all ranks. If one rank fails, all raise its error."""
    try:
        table = measure()
    except Exception as error:  # the other ranks wait for this one in the gather
        gathered(f"{type(error).__name__}: {error}", group)
        raise
    names = [
        (row.segment.name, type(row.segment.module).__name__, tuple(row.kinds), *map(str, row.strategies))
        for row in table.rows
    ]
    figures = [
        *(row.held for row in table.rows),
        *(kind.costs for kind in table.kinds),
        *(step.stretches for step in table.steps.values()),
        table.rest,
    ]
    theirs = gathered((names, figures), group)
    for rank, other in enumerate(theirs):
        if isinstance(other, str):
            raise RuntimeError(f"plan: rank {rank} of the group failed with {other}")
        if other[0] != names or tree_structure(other[1]) != tree_structure(figures):
            raise RuntimeError(f"plan: rank {rank} of the group has other regions than this one")
    *largest, table.rest = tree_map(
        lambda *values: max(values) if isinstance(values[0], (int, float)) else values[0],
        *(other[1] for other in theirs),
    )
    for own, of_all in zip(figures[:-1], largest, strict=True):
        own[:] = of_all
    table.group = group
    return table
