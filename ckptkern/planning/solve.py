"""The cheapest choice of a strategy for each region under a bound in bytes: an integer programme, solved exactly by SciPy's
HiGHS.

    minimise    sum over regions s of cost[s, strategy of s]
    subject to  fixed + sum over s of own[s, strategy of s]  <=  budget

fixed: what is saved outside of the regions, or by a region in every strategy, or may be saved by several regions, such as the
tables of a rotary embedding: it counts once, whatever is chosen. Regions that differ in nothing are counted rather than told
apart: the n layers of a kind are one integer for each strategy, not n binaries, which would have n! equal solutions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import BudgetError
from ..memory import format_size
from .table import Held, Table, total

KIB = 2**10  # bytes are counted in KiB: the solver's tolerance, 1e-6, is then far below one byte


class Group(NamedTuple):
    """Segments with the same costs and bytes, in the model's order. strategies: the places of those that may be chosen."""

    members: list[int]
    strategies: list[int]
    costs: list[float]
    own: list[int]


LESS = "Take that budget, fewer tokens or samples, or stores=[ckptkern.storage.offload()]"


def choose(
    costs: Sequence[Sequence[float]], held: Sequence[Sequence[Held]], rest: Held, budget: int | None
) -> list[int]:
    """The place of each region's strategy; without a budget, of those that save least. costs[s][w], held[s][w]: of region s in
    strategy w. Raises BudgetError with the least that would do."""
    groups, fixed = grouped(costs, held, rest)

    def saved(chosen: list[int]) -> int:
        return total([rest, *(own[strategy] for own, strategy in zip(held, chosen, strict=True))])

    room = None if budget is None else budget - fixed
    while room is not None and (chosen := solved(groups, room)) is not None:
        excess = saved(chosen) - budget
        if excess <= 0:
            return chosen
        room -= excess  # the solver's integers are integers to 1e-6, which is many bytes of a large region
    chosen = solved(groups, None)
    least = saved(chosen)
    if budget is None or least <= budget:
        return chosen
    raise BudgetError(
        f"plan: wanted at most {format_size(budget)} ({budget} bytes) saved for backward, but the least that the regions "
        f"can keep is {format_size(least)} ({least} bytes), of which {format_size(total([rest]))} is outside of them. {LESS}",
        least,
    )


def by_saved(table: Table, budget: int | None) -> list[int]:
    """The cheapest choice that saves at most so many bytes; without a budget, that which saves least."""
    costs = [[table.cost(row, strategy) for strategy in range(len(row.strategies))] for row in table.rows]
    return choose(costs, [row.held for row in table.rows], table.rest, budget)


def grouped(costs: Sequence[Sequence[float]], held: Sequence[Sequence[Held]], rest: Held) -> tuple[list[Group], int]:
    """(groups, bytes that count whatever is chosen)."""
    fixed, owner = dict(rest.shared), dict[tuple, int]()
    for i, own in enumerate(held):
        always = set.intersection(*(set(one.shared) for one in own))
        for name, nbytes in [item for one in own for item in one.shared.items()]:
            if owner.setdefault(name, i) != i or name in always:
                fixed[name] = nbytes
    groups: dict[tuple, Group] = {}
    for i, (cost, own) in enumerate(zip(costs, held, strict=True)):
        private = [one.own + sum(n for name, n in one.shared.items() if name not in fixed) for one in own]
        strategies = undominated(cost, private)
        picked = ([one[w] for w in strategies] for one in (cost, private))
        groups.setdefault((tuple(cost), tuple(private)), Group([], strategies, *picked)).members.append(i)
    return list(groups.values()), rest.own + sum(fixed.values())


def undominated(cost: Sequence[float], own: Sequence[int]) -> list[int]:
    """Returns the strategies that can run, for which no other costs less or the same and saves no more."""
    able = [w for w in range(len(cost)) if math.isfinite(cost[w])]
    order = sorted(able, key=lambda w: (cost[w], own[w]))
    return sorted(w for i, w in enumerate(order) if all(own[w] < own[better] for better in order[:i]))


def solved(groups: list[Group], room: int | None) -> list[int] | None:
    """The strategies of all regions, the cheapest that save at most `room` bytes besides what is fixed; None if there are
    none. Without a room, those that save least."""
    if room is not None and room < 0:
        return None
    if not groups:
        return []
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    starts = np.cumsum([0, *(len(group.strategies) for group in groups)])
    of = np.repeat(np.arange(len(groups)), np.diff(starts))  # the group of each variable
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
    return spread(groups, [result.x[a:b] for a, b in itertools.pairwise(starts)])


def spread(groups: list[Group], counts: Sequence[Sequence[float]]) -> list[int]:
    """A strategy for each region. Of regions that are alike, the last save most: their backward comes first and frees it
    before the others' recompute."""
    chosen = {}
    for group, numbers in zip(groups, counts, strict=True):
        order = sorted(range(len(group.strategies)), key=lambda w: (group.own[w], w))
        strategies = [group.strategies[w] for w in order for _ in range(round(numbers[w]))]
        chosen.update(zip(group.members, strategies, strict=True))
    return [chosen[i] for i in range(len(chosen))]
