"""The same table on all ranks, so that all of them make the same choice."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .table import Cost, Held, Table


def agreed(measure: Callable[[], Table], group: dist.ProcessGroup | None) -> Table:
    """This rank's table with the largest bytes and the mean times of all ranks. If one fails, all raise its error."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return measure()
    table, error = None, None
    try:
        table = measure()
    except (
        Exception
    ) as raised:  # of any kind: the other ranks wait for this one in the gather below, and it is raised after
        error = raised
    mine = f"{type(error).__name__}: {error}" if table is None else figures(table)
    theirs: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(theirs, mine, group=group)
    if error is not None:
        raise error
    for rank, one in enumerate(theirs):
        if isinstance(one, str):
            raise RuntimeError(f"plan: rank {rank} of the group failed with {one}")
        if one[0] != mine[0]:
            raise RuntimeError(f"plan: rank {rank} of the group has other regions than this one")
    return joined(table, theirs)


def figures(table: Table) -> tuple:
    """(what must be equal, bytes, costs), to be sent."""
    names = [
        (row.segment.name, type(row.segment.module).__name__, tuple(row.kinds), *map(str, row.strategies))
        for row in table.rows
    ]
    return (
        names,
        [*(row.held for row in table.rows), [table.rest]],
        [kind.costs for kind in table.kinds],
        [] if table.base is None else table.base.stretches,
    )


def joined(table: Table, all_ranks: Sequence[tuple]) -> Table:
    held = [
        [largest(of_all) for of_all in zip(*of_segment, strict=True)]
        for of_segment in zip(*(one[1] for one in all_ranks), strict=True)
    ]
    for place, kind in enumerate(table.kinds):
        kind.costs = [mean(of_all) for of_all in zip(*(one[2][place] for one in all_ranks), strict=True)]
    rows = [row._replace(held=own) for row, own in zip(table.rows, held, strict=False)]
    if table.base is not None:
        table.base.stretches = [
            of_all[0]._replace(start=max(one.start for one in of_all), highest=max(one.highest for one in of_all))
            for of_all in zip(*(one[3] for one in all_ranks), strict=True)
        ]
    return dataclasses.replace(table, rows=rows, rest=held[-1][0])


def largest(held: Sequence[Held]) -> Held:
    names = {name for one in held for name in one.shared}
    return Held(max(one.own for one in held), {name: max(one.shared.get(name, 0) for one in held) for name in names})


def mean(costs: Sequence[Cost]) -> Cost:
    seconds = [one.seconds for one in costs if one.seconds is not None]
    largest = (max(values) for values in list(zip(*costs, strict=True))[1:])
    return Cost(statistics.fmean(seconds) if seconds else None, *largest)


def largest_of(value: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The largest of all ranks' values."""
    return -least_of(-value, device, group)


def least_of(value: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The least of all ranks' values."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    least = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)
