"""plan: the cheapest strategies of a model's regions under a budget of bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import memory
from ..conversion.convert import Which, convert, progress, revert
from ..conversion.report import aligned, name_of
from ..errors import BudgetError
from ..extras import missing
from ..storage import Store
from .agree import agreed, least_of
from .measure import Measured, Table, measure
from .segments import Segment, Strategy, blocks_of, check_model, segments_of
from .solve import choose

MOVED = 0.05  # of the budget: a smaller change of the room on the device leaves the plan as it is


class Plan:
    """A strategy for each region of a model, and the table that they were chosen from. print(plan) shows both.

    budget: bytes that may be saved for backward. table: what was measured.
    """

    def __init__(self, model: nn.Module, table: Table, budget: int, group: dist.ProcessGroup | None = None):
        self.model, self.table, self.group = model, table, group
        self._hook: Any = None
        self._limit = math.inf
        self.replan(budget)

    def replan(self, budget: int | str) -> None:
        """Chooses for another budget, from the same table, and applies the choice. Raises BudgetError if no choice meets it;
        the model is then as before."""
        budget, rows = bytes_of(budget), self.table.rows
        costs = [[self.cost_of(row, strategy) for strategy in range(len(row.strategies))] for row in rows]
        chosen = choose(costs, [row.held for row in rows], self.table.rest, budget)
        self.chosen, self.budget = chosen, budget
        for row, strategy in zip(rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])

    def cost_of(self, row: Measured, strategy: int) -> float:
        cost = self.table.cost(row, strategy)
        return cost.flops if cost.seconds is None else cost.seconds

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The strategy of each region, by its name."""
        return {
            row.segment.name: row.strategies[strategy]
            for row, strategy in zip(self.table.rows, self.chosen, strict=True)
        }

    @property
    def saved(self) -> int:
        """Bytes that the model's forward saves for backward, besides parameters and buffers."""
        return self.table.saved(self.chosen)

    @property
    def cost(self) -> float:
        """Seconds of the regions' forward and backward; on the meta device, flops of their matmuls."""
        return sum(self.cost_of(row, strategy) for row, strategy in zip(self.table.rows, self.chosen, strict=True))

    @property
    def workspace(self) -> int:
        """The most that the backward of one region rises above what is saved, besides gradients; 0 on the meta device."""
        return max(self.table.workspaces(self.chosen), default=0)

    def __str__(self) -> str:
        lines = [("region", "strategy", "chosen", "saved", "time", "GFLOP", "workspace")]
        for kind in range(len(self.table.kinds)):
            lines += self._lines(kind)
        size = memory.format_size
        return "\n".join(
            [
                *aligned(lines),
                f"saved: {size(self.saved)} of a budget of {size(self.budget)}, "
                f"{size(self.table.outside)} of it outside of the regions",
            ]
        )

    def _lines(self, kind: int) -> list[tuple[str, ...]]:
        """Of regions that are alike."""
        rows = [(row, strategy) for row, strategy in zip(self.table.rows, self.chosen, strict=True) if row.kind == kind]
        first, lines = rows[0][0], []
        for strategy, name in enumerate(first.strategies):
            cost = self.table.cost(first, strategy)
            count = sum(chosen == strategy for _, chosen in rows)
            lines.append(
                (
                    name_of([row.segment.name for row, _ in rows]) if strategy == 0 else "", str(name), str(count or ""),
                    memory.format_size(first.held[strategy].bytes),
                    time_of(cost.seconds),
                    memory.three_digits(cost.flops / 1e9),
                    "" if cost.workspace is None else memory.format_size(cost.workspace),
                )
            )  # fmt: skip
        return lines

    # -- between steps

    def follow(self, limit: float = math.inf) -> None:
        """From now on, plans again before a training forward when the device's room has moved by more than a twentieth of the
        budget, up to `limit` bytes."""
        self.stop()
        self._limit = limit
        self._hook = self.model.register_forward_pre_hook(lambda module, args: self.check_room())

    def stop(self) -> None:
        """Plans no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def check_room(self) -> None:
        """Plans again if the room has moved, as `follow` does before each training forward. A collective call."""
        if not (self.model.training and torch.is_grad_enabled()):
            return
        budget = int(min(self._limit, room(self.model, self.table, self.workspace, self.group)))
        if abs(budget - self.budget) <= MOVED * self.budget:
            return
        try:
            self.replan(max(budget, 0))
        except BudgetError as error:
            warnings.warn(f"{error}. The step saves that, and may not fit", stacklevel=2)
            self.replan(error.least)


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{memory.three_digits(seconds * 1e3)} ms" if math.isfinite(seconds) else "does not fit"


def room(model: nn.Module, table: Table, workspace: int, group: dist.ProcessGroup | None) -> int:
    """Bytes that a step may keep: what is free now, less the gradients that backward will allocate, and its workspace. The
    least of all ranks."""
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    return least_of(memory.free_memory(table.device) - gradients - workspace, table.device, group)


def bytes_of(budget: int | str) -> int:
    size = memory.parse_size(budget) if isinstance(budget, str) else budget
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(
            f"plan: budget must be a number of bytes, or a size such as '10GiB' or '512MiB', not {budget!r}"
        )
    return size


def check_stores(stores: Sequence[Store]) -> None:
    for store in stores:
        if not isinstance(store, Store):
            raise TypeError(
                f"plan: stores must hold stores such as ckptkern.storage.offload(), not {type(store).__name__}"
            )


def found_segments(model: nn.Module, args: tuple, kwargs: dict[str, Any], include: Any, exclude: Any) -> list[Segment]:
    """The model's regions, converted if it has none, and the blocks that may become activation checkpoints."""
    segments = segments_of(model, include, exclude)
    if not segments and not any(p.is_meta for p in model.parameters()):
        convert(model, *args, recompute="full", include=include, exclude=exclude, **kwargs)
        segments = segments_of(model)
    return segments + blocks_of(model, segments, include, exclude)


def plan(
    model: nn.Module,
    *example_inputs: Any,
    budget: int | str | None = None,
    stores: Iterable[Store] = (),
    adapt: bool = False,
    include: Which | Iterable[Which] | None = None,
    exclude: Which | Iterable[Which] | None = None,
    group: dist.ProcessGroup | None = None,
    **example_kwargs: Any,
) -> Plan:
    """Chooses how each region of a model runs, the quickest that saves at most `budget` bytes for backward, and applies it.

        plan = ckptkern.plan(model, input_ids, budget="10GiB")
        print(plan)

    Regions are modules of ckptkern.nn and what convert made; a model without any is converted first. Members of lists of
    layers that have no region inside may become activation checkpoints (ckptkern.checkpoint). The strategies of a
    region are its modes; those of a layer also a mode for each sublayer, such as "full/none"; and each of them with
    what is saved going to one of `stores`.

    What is measured: saved bytes of every region, exactly, by forwards of the model that hold nothing; time, matmuls and
    workspace of one region of each kind, alone. The choice is the optimum of an integer programme (SciPy's milp) over that
    table. Of regions that are alike, the first are recomputed and the last save most, which peaks lowest.

    example_inputs, example_kwargs: a call of the model of the size that training has. Its device and dtypes count, and autocast
    around the call of plan. On meta tensors the matmuls take the place of the time. The random states, buffers and modes are
    afterwards as before.
    budget: bytes that the forward may keep, besides parameters and buffers: an int, or a size such as "10GiB". None: what is
    free on the device, less gradients and workspace.
    stores: where saved tensors may go, such as `[ckptkern.storage.offload()]`. Lossy ones change gradients: see storage.
    adapt: plan again, from the same table, when a training step begins and the room on the device has moved by more than a
    twentieth of the budget. At most the budget is used. Not with torch.compile, and not where forwards overlap (pipelines).
    include, exclude: the modules that may be regions, as in convert.
    group: the ranks that must choose alike, by default all: bytes and workspace are their largest, times their mean. All of
    them must call plan.

    Raises errors.BudgetError, a ValueError with the `least` that would do, if the budget is too small; ImportError without
    SciPy; ValueError for a model that is compiled, sharded or wrapped by DDP (plan first) or, with budget=None, on the meta
    device; RuntimeError on all ranks if one failed. The model is then as before.
    """
    check_model("plan", model, example_inputs or example_kwargs)
    if hint := missing("scipy"):
        raise ImportError(f"plan: {hint}")
    stores = list(stores)
    check_stores(stores)
    limit = math.inf if budget is None else bytes_of(budget)

    def table(shown: Callable[[str], None]) -> Table:
        segments = found_segments(model, example_inputs, example_kwargs, include, exclude)
        strategies = [segment.strategies(stores) for segment in segments]
        return measure(model, example_inputs, example_kwargs, segments, strategies, shown)

    had_none = not segments_of(model)
    try:
        with progress("plan") as shown:
            found = agreed(lambda: table(shown), group)
        if adapt or budget is None:
            if found.device.type == "meta":
                raise ValueError("plan: the model is on the meta device, which has no memory to fill: wanted a budget")
            limit = min(limit, room(model, found, max(found.workspaces(found.uniform("full")), default=0), group))
        made = Plan(model, found, int(limit), group)
    except BaseException:
        if had_none:
            revert(model)
        raise
    if adapt:
        made.follow(math.inf if budget is None else bytes_of(budget))
    return made
