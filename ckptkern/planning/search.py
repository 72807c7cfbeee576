"""Finds the cheapest strategy for each region under a bound in bytes, on saved tensors or on the peak.

A bound on saved bytes is an integer programme, solved exactly by SciPy's HiGHS:

    minimise    sum over regions s of cost[s, strategy of s]
    subject to  fixed + sum over s of own[s, strategy of s]  <=  budget

fixed: what is saved outside of the regions, or by several regions, such as the tables of a rotary embedding, which count once.
Equal regions are counted, not told apart: n layers of a kind are one integer per strategy, because n binaries would have n!
equal solutions.

A bound on the peak bisects the bound on saved bytes, over modes and workspaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import BudgetError
from ..memory import format_size
from .table import Choice, Held, Table, saved, total

TRIES = 6  # most steps measured for a budget and a workspace
STEPS = 12  # bisection steps: the bound is found to 1/4,096 of what the regions save
SMALLER = (
    2  # smaller workspaces, each at most a quarter of the previous one; chunks in even smaller ones take much time
)
CHEAPER = 0.98  # a smaller workspace must reduce the cost to this, because times have noise
UNBOUNDED = 2**60  # bytes
KIB = 2**10  # bytes are counted in KiB: the solver's tolerance, 1e-6, is then far below one byte
LESS = "Take that budget, fewer tokens or samples, or stores=[ckptkern.storage.offload()]"

# -- a bound of saved bytes


class Group(NamedTuple):
    """Regions with the same costs and bytes, in the model's order. strategies: indices of those worth choosing, by the bytes
    that they save."""

    members: list[int]
    strategies: list[int]
    costs: list[float]
    own: list[int]


def choose(costs: Sequence[Sequence[float]], held: Sequence[Sequence[Held]], rest: Held, budget: int | None) -> Choice:
    """Returns the index of each region's strategy: the cheapest within the budget, or without a budget those that save
    least. costs[s][w], held[s][w]: of region s in strategy w. Raises BudgetError with the smallest feasible budget."""
    groups, fixed = grouped(costs, held, rest)
    room = None if budget is None else budget - fixed
    while room is not None and (chosen := solved(groups, room)) is not None:
        excess = saved(rest, held, chosen) - budget
        if excess <= 0:
            return chosen
        room -= excess  # the solver's integers are integers to 1e-6, which is many bytes of a large region
    chosen = solved(groups, None)
    least = saved(rest, held, chosen)
    if budget is None or least <= budget:
        return chosen
    raise BudgetError(
        f"plan: the budget of saved tensors is {format_size(budget)} ({budget} bytes), but the model saves at least "
        f"{format_size(least)} ({least} bytes), of which {format_size(total([rest]))} is outside of the regions. {LESS}",
        least,
    )


def by_saved(table: Table, budget: int | None) -> Choice:
    """Returns the cheapest choice that saves at most `budget` bytes; without a budget, the choice that saves least."""
    return choose(table.times(), [row.held for row in table.rows], table.rest, budget)


def grouped(costs: Sequence[Sequence[float]], held: Sequence[Sequence[Held]], rest: Held) -> tuple[list[Group], int]:
    """Returns the groups of equal regions, and the bytes that count whatever is chosen."""
    fixed, owner = dict(rest), dict[tuple, int]()
    for i, own in enumerate(held):
        for name, nbytes in [item for option in own for item in option.items()]:
            if owner.setdefault(name, i) != i:
                fixed[name] = nbytes
    groups: dict[tuple, Group] = {}
    for i, (cost, own) in enumerate(zip(costs, held, strict=True)):
        private = [sum(n for name, n in option.items() if name not in fixed) for option in own]
        strategies: list[int] = []  # that fit, and that no other strategy beats in both cost and bytes
        for seconds, nbytes, w in sorted(zip(cost, private, itertools.count(), strict=False)):
            if math.isfinite(seconds) and all(nbytes < private[better] for better in strategies):
                strategies.insert(0, w)  # ordered by bytes, the least first
        picked = ([figures[w] for w in strategies] for figures in (cost, private))
        groups.setdefault((tuple(cost), tuple(private)), Group([], strategies, *picked)).members.append(i)
    return list(groups.values()), sum(fixed.values())


def solved(groups: list[Group], room: int | None) -> Choice | None:
    """Returns the cheapest strategies of all regions that save at most `room` bytes besides the fixed ones; None if there
    are none. Without a room, returns those that save least."""
    if room is not None and room < 0:
        return None
    if not groups:
        return ()
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    of = np.repeat(np.arange(len(groups)), [len(group.strategies) for group in groups])  # the group of each variable
    nbytes = np.array([n for group in groups for n in group.own]) / KIB
    cost = np.array([c for group in groups for c in group.costs])
    members = np.array([len(group.members) for group in groups])
    constraints = [LinearConstraint(np.arange(len(groups))[:, None] == of, members, members)]
    if room is not None:
        constraints.append(LinearConstraint(nbytes[None], -np.inf, room / KIB))
    result = milp(
        nbytes if room is None else cost / max(cost.max(initial=0.0), 1e-30),
        integrality=np.ones(len(of)),
        bounds=Bounds(0, members[of]),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if result.status == 2:
        return None
    if not result.success:
        raise RuntimeError(f"plan: SciPy's milp found no optimum: {result.message}")
    chosen, counts = {}, iter(result.x)
    for group in groups:
        # of equal regions the last save most: their backward runs first and frees it before the others recompute
        strategies = [w for w, n in zip(group.strategies, counts, strict=False) for _ in range(round(n))]
        chosen.update(zip(group.members, strategies, strict=True))
    return tuple(chosen[i] for i in range(len(chosen)))


# -- a bound of the peak


class Choices:
    """Candidate choices of a table with their predicted peaks: the uniform ones, and the cheapest under bounds on saved
    bytes."""

    def __init__(self, table: Table):
        self.table, self.predicted = table, dict[Choice, int]()
        full, least = table.uniform("full"), by_saved(table, None)
        table.measured(full)
        lasts = [len(row.strategies) - 1 for row in table.rows]  # modes come first in the lists
        uniform = [tuple(min(place, last) for last in lasts) for place in range(max(lasts, default=-1) + 1)]
        for chosen in (least, *uniform, full, by_saved(table, UNBOUNDED)):
            self.add(chosen)
        self.low, self.high = table.saved(least), max(map(table.saved, self.predicted))

    def add(self, chosen: Choice) -> int:
        """Returns the predicted peak of a choice."""
        if chosen not in self.predicted:
            self.predicted[chosen] = self.table.peak(chosen)
        return self.predicted[chosen]

    def able(self) -> list[Choice]:
        """Returns the choices in which every region fits."""
        return [key for key in self.predicted if math.isfinite(self.table.cost_of(key))]

    def within(self, bound: int) -> Choice | None:
        """Returns the cheapest choice whose predicted peak is within the bound; None if there is none."""
        low, high = self.low, self.high + 1
        for _ in range(STEPS):
            middle = (low + high) // 2
            low, high = (middle, high) if self.add(by_saved(self.table, middle)) <= bound else (low, middle)
        fit = [key for key in self.able() if self.predicted[key] <= bound]
        return min(fit, key=self.table.cost_of) if fit else None

    def best(self, budget: int) -> Choice:
        """Returns the cheapest choice whose measured peak is within the budget. Raises BudgetError with the smallest
        feasible budget."""
        table, target = self.table, budget
        for _ in range(TRIES):
            chosen = self.within(target)
            over = math.inf if chosen is None else table.measured(chosen) - budget
            if not 0 < over < math.inf:
                break
            target = min(target, self.predicted[chosen]) - over  # the prediction was too low
        if over > 0:  # look for the lowest peak, also among the cheapest choices for STEPS evenly spaced bounds
            for i in range(STEPS):
                self.add(by_saved(table, self.low + (self.high - self.low) * i // (STEPS - 1)))
            table.measured(min(self.able(), key=self.predicted.__getitem__))
        if tried := [key for key, peak in table.peaks.items() if peak <= budget]:
            return min(tried, key=table.cost_of)
        lowest = min(table.peaks, key=table.peaks.__getitem__)
        least, largest = table.peaks[lowest], next(iter(table.steps[lowest].standing()), None)
        stands = "" if largest is None else f", of which {format_size(largest.bytes)} are {largest.what}"
        raise BudgetError(
            f"plan: the budget is {format_size(budget)} ({budget} bytes), but the lowest peak of a step is "
            f"{format_size(least)} ({least} bytes){stands}. {LESS}",
            least,
        )


class Search:
    """Searches the model's own workspace and smaller ones, which are measured when they may help. narrower: returns the
    table of the next smaller workspace, or None, which ends the list."""

    def __init__(self, table: Table, narrower: Callable[[Table], Table | None]):
        self.all: list[Choices | None] = [Choices(table)]
        self.narrower = narrower

    def best(self, budget: int) -> tuple[Choices, Choice]:
        """Returns the cheapest choice of all workspaces. Raises BudgetError with the smallest feasible budget."""
        best, cost, errors = None, math.inf, []
        for i in range(SMALLER + 1):
            if i == len(self.all):
                table = self.narrower(self.all[-1].table)
                self.all.append(None if table is None else Choices(table))
            if (choices := self.all[i]) is None:
                break
            try:
                chosen = choices.best(budget)
            except BudgetError as error:
                errors.append(error)
                continue
            if best is not None and choices.table.cost_of(chosen) > CHEAPER * cost:
                break
            best, cost = (choices, chosen), choices.table.cost_of(chosen)
            # skip smaller workspaces if even one of 0 bytes would not make it cheaper
            roomier = choices.within(budget + choices.table.rise(chosen))
            if roomier is None or choices.table.cost_of(roomier) > CHEAPER * cost:
                break
        if best is None:
            raise min(errors, key=lambda error: error.least)
        return best
