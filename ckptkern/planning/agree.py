"""The same figures on all ranks, so that all of them make the same choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map


def agreed(measure: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Returns this rank's `Table` with the largest bytes and times of all ranks. If one fails, all raise its error."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return measure()
    table, error = None, None
    try:
        table = measure()
    except Exception as raised:  # the other ranks wait for this one in the gather below, and it is raised after
        error = raised
    mine = f"{type(error).__name__}: {error}" if table is None else figures(table)
    theirs: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(theirs, mine, group=group)
    if error is not None:
        raise error
    for rank, one in enumerate(theirs):
        if isinstance(one, str):
            raise RuntimeError(f"plan: rank {rank} of the group failed with {one}")
        if one[0] != mine[0] or tree_flatten(one[1])[1] != tree_flatten(mine[1])[1]:
            raise RuntimeError(f"plan: rank {rank} of the group has other regions than this one")
    held, table.rest, costs, stretches = tree_map(largest, *(one[1] for one in theirs))
    table.rows = [row._replace(held=own) for row, own in zip(table.rows, held, strict=True)]
    for kind, own in zip(table.kinds, costs, strict=True):
        kind.costs = own
    for step, own in zip(table.steps.values(), stretches, strict=True):
        step.stretches = own
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


def largest_of(value: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Returns the largest of all ranks' values."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    most = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)
