"""The cheapest choice of a strategy for each region under a bound in bytes: an integer programme, solved exactly by SciPy's
HiGHS.

    minimise    sum over regions s of cost[s, strategy of s]
    subject to  rest + sum over s of own[s, strategy of s] + sum over storages k of size[k] z[k]  <=  budget
                z[k] >= 1  if the strategy of some region saves k

Regions that differ in nothing are counted rather than told apart: the n layers of a kind are one integer for each strategy,
not n binaries, which would have n! equal solutions.
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
    shared: list[dict[tuple, int]]


LESS = "Take that budget, fewer tokens or samples, or stores=[ckptkern.storage.offload()]"


def choose(costs: Sequence[Sequence[float]], held: Sequence[Sequence[Held]], rest: Held, budget: int) -> list[int]:
    """The place of each region's strategy. costs[s][w], held[s][w]: of region s in strategy w. Raises BudgetError with the
    least that would do."""
    groups, fixed = grouped(costs, held, rest)
    room = budget - fixed
    while (chosen := solved(groups, room)) is not None:
        excess = total([rest, *(own[strategy] for own, strategy in zip(held, chosen, strict=True))]) - budget
        if excess <= 0:
            return chosen
        room -= excess  # the solver's integers are integers to 1e-6, which is many bytes of a large region
    chosen = solved(groups, None)
    least = total([rest, *(own[strategy] for own, strategy in zip(held, chosen, strict=True))])
    if least <= budget:
        return chosen
    raise BudgetError(
        f"plan: wanted at most {format_size(budget)} ({budget} bytes) saved for backward, but the least that the regions "
        f"can keep is {format_size(least)} ({least} bytes), of which {format_size(total([rest]))} is outside of them. {LESS}",
        least,
    )


def by_saved(table: Table, budget: int) -> list[int]:
    """The cheapest choice that saves at most so many bytes."""
    costs = [[table.cost(row, strategy) for strategy in range(len(row.strategies))] for row in table.rows]
    return choose(costs, [row.held for row in table.rows], table.rest, budget)


def grouped(costs: Sequence[Sequence[float]], held: Sequence[Sequence[Held]], rest: Held) -> tuple[list[Group], int]:
    """(groups, bytes that are saved whatever is chosen)."""
    forced = dict(rest.shared)
    for own in held:
        for name in set.intersection(*(set(one.shared) for one in own)):
            forced[name] = own[0].shared[name]
    owners: dict[tuple, set[int]] = {}
    for i, own in enumerate(held):
        for name in {name for one in own for name in one.shared} - forced.keys():
            owners.setdefault(name, set()).add(i)
    groups: dict[tuple, Group] = {}
    for i, (cost, own) in enumerate(zip(costs, held, strict=True)):
        shared = [{k: n for k, n in one.shared.items() if len(owners.get(k, ())) > 1} for one in own]
        private = [one.own + sum(n for k, n in one.shared.items() if len(owners.get(k, ())) == 1) for one in own]
        strategies = undominated(cost, private, shared)
        key = (tuple(cost), tuple(private), i if any(shared) else None)
        if key not in groups:
            picked = ([one[w] for w in strategies] for one in (cost, private, shared))
            groups[key] = Group([], strategies, *picked)
        groups[key].members.append(i)
    return list(groups.values()), rest.own + sum(forced.values())


def undominated(cost: Sequence[float], own: Sequence[int], shared: Sequence[dict[tuple, int]]) -> list[int]:
    """Ways that can run, for which no other costs less or the same and saves nothing else."""

    def beats(a: int, b: int) -> bool:
        no_worse = cost[a] <= cost[b] and own[a] <= own[b] and shared[a].keys() <= shared[b].keys()
        return no_worse and (a < b or (cost[a], own[a], shared[a].keys()) != (cost[b], own[b], shared[b].keys()))

    able = [strategy for strategy in range(len(cost)) if math.isfinite(cost[strategy])]
    return [b for b in able if not any(beats(a, b) for a in able if a != b)]


def solved(groups: list[Group], room: int | None) -> list[int] | None:
    """The strategies of all regions, the cheapest that save at most `room` bytes besides what is fixed; None if there are
    none. Without a room, those that save least."""
    if not groups:
        return [] if room is None or room >= 0 else None
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    if room is not None and room < 0:
        return None
    sizes = {name: n for group in groups for shared in group.shared for name, n in shared.items()}
    place = {name: i for i, name in enumerate(sizes)}
    starts = np.cumsum([0, *(len(group.strategies) for group in groups)])
    count, last = int(starts[-1]) + len(sizes), int(starts[-1])
    nbytes = np.array([n for group in groups for n in group.own] + list(sizes.values())) / KIB
    cost = np.array([c for group in groups for c in group.costs] + [0.0] * len(sizes))
    members = [len(group.members) for group in groups]
    upper = np.repeat([*members, *[1] * len(sizes)], [*(len(group.strategies) for group in groups), *[1] * len(sizes)])
    one_each = np.zeros((len(groups), count))
    keeps = []  # z[k] - x >= 0
    for i, group in enumerate(groups):
        one_each[i, starts[i] : starts[i + 1]] = 1
        for w, name in [(w, name) for w, shared in enumerate(group.shared) for name in shared]:
            keeps.append(np.zeros(count))
            keeps[-1][[starts[i] + w, last + place[name]]] = -1, 1
    constraints = [LinearConstraint(one_each, members, members)]
    if keeps:
        constraints.append(LinearConstraint(np.array(keeps), 0, np.inf))
    if room is not None:
        constraints.append(LinearConstraint(nbytes[None], -np.inf, room / KIB))
    result = milp(
        nbytes if room is None else cost / max(cost.max(initial=0.0), 1e-30),
        integrality=np.arange(count) < last,
        bounds=Bounds(0, upper),
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
