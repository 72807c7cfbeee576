"""The same figures on all ranks, so that all of them make the same choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the values of all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def largest_of(value: int, group: dist.ProcessGroup | None) -> int:
    """Returns the largest of all ranks' values."""
    return max(gathered(value, group))


def agreed(measure: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Returns this rank's `Table` with the largest bytes and times of all ranks. If one fails, all raise its error."""
    table, error = None, None
    try:
        table = measure()
    except Exception as raised:  # the other ranks wait for this one in the gather below, and it is raised after
        error = raised
    mine = f"{type(error).__name__}: {error}" if table is None else figures(table)
    theirs = gathered(mine, group)
    if error is not None:
        raise error
    for rank, other in enumerate(theirs):
        if isinstance(other, str):
            raise RuntimeError(f"plan: rank {rank} of the group failed with {other}")
        if other[0] != mine[0] or tree_flatten(other[1])[1] != tree_flatten(mine[1])[1]:
            raise RuntimeError(f"plan: rank {rank} of the group has other regions than this one")
    held, table.rest, costs, stretches = tree_map(largest, *(other[1] for other in theirs))
    table.rows = [row._replace(held=own) for row, own in zip(table.rows, held, strict=True)]
    for kind, own in zip(table.kinds, costs, strict=True):
        kind.costs = own
    for step, own in zip(table.steps.values(), stretches, strict=True):
        step.stretches = own
    table.group = group
    return table


def figures(table: Any) -> tuple[Any, Any]:
    """Returns (what must be equal, bytes and costs), to be sent."""
    names = [
        (row.segment.name, type(row.segment.module).__name__, tuple(row.kinds), *map(str, row.strategies))
        for row in table.rows
    ]
    stretches = [step.stretches for step in table.steps.values()]
    return names, ([row.held for row in table.rows], table.rest, [kind.costs for kind in table.kinds], stretches)


def largest(*values: Any) -> Any:
    """Returns the largest of numbers, and the first of all else."""
    return max(values) if isinstance(values[0], (int, float)) else values[0]
