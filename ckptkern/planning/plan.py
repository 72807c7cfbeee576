"""plan: the cheapest strategies of a model's regions under a budget of bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import memory
from ..conversion.bound import revert
from ..conversion.calls import check_keywords
from ..conversion.convert import convert
from ..conversion.report import NOTHING, WAY, aligned, name_of
from ..conversion.selection import Which
from ..conversion.trace import leaves_of, mapped
from ..errors import BudgetError
from ..extras import missing, progress
from ..storage import Store
from .agree import agreed, least_of
from .live import Alive, Loss, Step
from .measure import measure, narrower, stepped
from .search import Choices, Search
from .segments import Segment, Strategy, blocks_of, check_model, segments_of
from .solve import by_saved
from .table import Table
from .timing import RATES, Rates

SMALL = (2, 64)  # sequences and tokens that a model is converted with
SHOWN = 8  # lines of what stands at the peak
LOWER = 0.95  # a smaller workspace is of use if it makes the peak at "full" so much, or less
MOVED = 0.05  # of the budget: a smaller change of the room on the device leaves the plan as it is


class Plan:
    """A strategy for each region of a model, and the table that they were chosen from. print(plan) shows both.

    budget: bytes that a training step may allocate beyond what is there when it begins, or, in a plan by saved bytes, that the
    forward may save for backward. by_peak: which of the two. peak: bytes that a step in the chosen strategies was measured to
    allocate, and predicted: what was predicted of it; None in a plan by saved bytes. table: what was measured; choices: what
    was tried of it.
    """

    def __init__(
        self,
        model: nn.Module,
        table: Table,
        budget: int,
        group: dist.ProcessGroup | None = None,
        search: Search | None = None,
    ):
        self.model, self.table, self.group, self._search = model, table, group, search
        self.by_peak = search is not None
        self.peak: int | None = None
        self.predicted: int | None = None
        self.choices: Choices | None = None
        self._hook: Any = None
        self._follows = True  # not while a step of a choice runs
        self._limit = math.inf
        self.replan(budget)

    def replan(self, budget: int | str) -> None:
        """Chooses for another budget, from the same measurements, and applies the choice. A plan by peak measures a step of
        each choice that is new, and smaller workspaces when they may be of use. Raises BudgetError if no choice meets the
        budget; the model is then as before."""
        budget = bytes_of("plan", "budget", budget)
        if self._search is None:
            chosen = by_saved(self.table, budget)
        else:
            following, self._follows = self._follows, False
            try:
                self.choices, chosen = self._search.best(budget)
            finally:
                self._follows = following
            self.table = self.choices.table
            self.peak, self.predicted = self.choices.measured(chosen), self.table.peak(chosen)
        self.chosen, self.budget = chosen, budget
        self.table.workspaces.set(self.table.workspace)
        for row, strategy in zip(self.table.rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])

    @property
    def workspace(self) -> int | None:
        """Bytes of each op's workspace, where that was not less before; None if it was left as it was."""
        return self.table.workspace

    @property
    def standing(self) -> list[Alive]:
        """What stands at the peak of a step, the largest first; of a plan by peak."""
        return [] if self.choices is None else self.choices.steps[tuple(self.chosen)].standing()

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
        return self.table.cost_of(self.chosen)

    @property
    def transient(self) -> int:
        """The most that the backward of one region rises above what is saved, besides gradients."""
        return max(self.table.transients(self.chosen), default=0)

    def __str__(self) -> str:
        lines = [("region", "strategy", "chosen", "saved", "time", "GFLOP", "transient")]
        for kind in range(len(self.table.kinds)):
            lines += self._lines(kind)
        size = memory.format_size
        way = [] if self.table.rows else [f"{NOTHING}: {WAY}"]
        outside = f"{size(self.table.outside)} of it outside of the regions"
        if self.peak is None:
            return "\n".join(
                [*aligned(lines), *way, f"saved: {size(self.saved)} of a budget of {size(self.budget)}, {outside}"]
            )
        return "\n".join(
            [
                *aligned(lines),
                *way,
                f"peak of a step: {size(self.peak)} of a budget of {size(self.budget)}",
                *([] if self.workspace is None else [f"workspace: {size(self.workspace)}"]),
                f"saved: {size(self.saved)}, {outside}",
                "at the peak stand",
                *standing_lines(self.standing),
            ]
        )

    def _lines(self, kind: int) -> list[tuple[str, ...]]:
        """Of regions that are alike."""
        rows = [
            (row, strategy) for row, strategy in zip(self.table.rows, self.chosen, strict=True) if row.kinds[0] == kind
        ]
        lines: list[tuple[str, ...]] = []
        if not rows:
            return lines
        first = rows[0][0]
        for strategy, name in enumerate(first.strategies):
            cost = self.table.kinds[kind].costs[strategy]
            count = sum(chosen == strategy for _, chosen in rows)
            lines.append(
                (
                    name_of([row.segment.name for row, _ in rows]) if strategy == 0 else "", str(name), str(count or ""),
                    memory.format_size(first.held[strategy].bytes),
                    time_of(cost.seconds),
                    memory.three_digits(cost.flops / 1e9),
                    memory.format_size(cost.transient),
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
        if not (self._follows and self.model.training and torch.is_grad_enabled()):
            return
        if self.by_peak:
            budget = int(
                min(self._limit, least_of(memory.free_memory(self.table.device), self.table.device, self.group))
            )
        else:
            budget = int(min(self._limit, room(self.model, self.table, self.transient, self.group)))
        if abs(budget - self.budget) <= MOVED * self.budget:
            return
        try:
            self.replan(max(budget, 0))
        except BudgetError as error:
            warnings.warn(f"{error}. The step saves that, and may not fit", stacklevel=2)
            self.replan(error.least)


def standing_lines(standing: Sequence[Alive]) -> list[str]:
    """The largest of what stands at a peak, and the rest in one line."""
    rows = [(f"  {memory.format_size(one.bytes)}", one.what, one.place) for one in standing[:SHOWN]]
    if rest := sum(one.bytes for one in standing[SHOWN:]):
        rows.append((f"  {memory.format_size(rest)}", f"{len(standing) - SHOWN} others", ""))
    return aligned(rows)


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{memory.three_digits(seconds * 1e3)} ms" if math.isfinite(seconds) else "does not fit"


def room(model: nn.Module, table: Table, transient: int, group: dist.ProcessGroup | None) -> int:
    """Bytes that a step may keep: what is free now, less the gradients that backward will allocate, and its transients. The
    least of all ranks."""
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    return least_of(memory.free_memory(table.device) - gradients - transient, table.device, group)


def room_for_step(model: nn.Module, table: Table, by_peak: bool, group: dist.ProcessGroup | None) -> int:
    """Bytes on the device for what a plan bounds: all that a step allocates, or what it saves."""
    if by_peak:
        return least_of(memory.free_memory(table.device), table.device, group)
    if table.device.type == "meta":
        raise ValueError("plan: the model is on the meta device, which has no memory to fill: wanted a budget")
    return room(model, table, max(table.transients(table.uniform("full")), default=0), group)


class Example:
    """The call of the model that plan was given, as its steps begin then: with the gradients that were there."""

    def __init__(
        self, model: nn.Module, args: tuple, kwargs: dict[str, Any], group: dist.ProcessGroup | None, loss: Loss | None
    ):
        self.call, self.group, self.loss = (model, args, kwargs), group, loss
        self.shown: Callable[..., None] = lambda stage: None
        leaves = [one for one in (*model.parameters(), *leaves_of((args, kwargs))) if isinstance(one, Tensor)]
        self.absent = [one for one in leaves if one.is_leaf and one.grad is None]

    def measured(
        self, stores: Sequence[Store], include: Any, exclude: Any, by_peak: bool, rates: Rates | None
    ) -> Table:
        segments = found_segments(*self.call, include, exclude)
        strategies = [segment.strategies(stores) for segment in segments]
        return measure(*self.call, segments, strategies, self.shown, by_peak, rates=rates, loss=self.loss)

    @contextmanager
    def as_then(self) -> Iterator[None]:
        before = [one.grad for one in self.absent]
        try:
            for one in self.absent:
                one.grad = None
            yield
        finally:
            for one, grad in zip(self.absent, before, strict=True):
                one.grad = grad

    def step(self, table: Table, chosen: Sequence[int]) -> Step:
        self.shown("a step as planned")
        with self.as_then():
            return stepped(table, *self.call, chosen)

    def search(self, table: Table) -> Search:
        return Search(Choices(table, self.step, self.group), self.narrower)

    def narrower(self, choices: Choices) -> Choices | None:
        """In a smaller workspace; None if that lowers the peak no more."""
        table = choices.table
        if not table.workspaces.given:
            return None
        with self.as_then():
            found = agreed(lambda: narrower(table, *self.call, self.shown), self.group)
        full = table.uniform("full")
        return Choices(found, self.step, self.group) if found.peak(full) < LOWER * table.peak(full) else None


def bytes_of(op: str, name: str, budget: float | str) -> int:
    """Returns a bound in bytes. Raises ValueError for what is none."""
    size = memory.bytes_of(budget)
    if size is None:
        raise ValueError(
            f"{op}: {name} must be a number of bytes, or a size such as '10GiB' or '512MiB', not {budget!r}"
        )
    return size


def rates_of(device: str | None, model: nn.Module) -> Rates | None:
    if device is None:
        return None
    if device not in RATES:
        raise ValueError(f"plan: device must be one of {', '.join(RATES)}, not {device!r}")
    if not all(p.is_meta for p in model.parameters()):
        raise ValueError("plan: device is of a model on the meta device; elsewhere times are measured: leave it out")
    return RATES[device]


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
        convert_small(model, args, kwargs, include, exclude)
        segments = segments_of(model)
    return segments + blocks_of(model, args, kwargs, segments, include, exclude)


def convert_small(model: nn.Module, args: tuple, kwargs: dict[str, Any], include: Any, exclude: Any) -> None:
    """Converts with the first of the sequences and tokens, if the model takes them: what is checked does not depend on their
    number, and its time does."""

    def shortened(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(SMALL[: tensor.dim()]):
            tensor = tensor.narrow(dim, 0, min(size, tensor.shape[dim]))
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    small_args, small_kwargs = mapped(shortened, (args, kwargs))
    try:
        convert(model, *small_args, recompute="full", include=include, exclude=exclude, **small_kwargs)
    except Exception:  # of the model's own: its inputs go together in another way
        convert(model, *args, recompute="full", include=include, exclude=exclude, **kwargs)


def plan(
    model: nn.Module,
    *example_inputs: Any,
    budget: int | str | None = None,
    saved: int | str | None = None,
    stores: Iterable[Store] = (),
    adapt: bool = False,
    include: Which | Iterable[Which] | None = None,
    exclude: Which | Iterable[Which] | None = None,
    group: dist.ProcessGroup | None = None,
    device: str | None = None,
    loss: Loss | None = None,
    **example_kwargs: Any,
) -> Plan:
    """Chooses how each region of a model runs, the quickest whose step stays within a budget, and applies it.

        plan = ckptkern.plan(model, input_ids, labels=input_ids, budget="20GiB")
        print(plan)

    Regions are modules of ckptkern.nn and what convert made; a model without any is converted first. Blocks of
    convolutions and members of lists without a region inside may become activation checkpoints. The strategies of a
    region are its modes; those of a layer also a mode for each sublayer, such as "full/none"; and each of them with
    what is saved going to one of `stores`.

    Measures saved bytes of every region, exactly; time, matmuls and transient memory of one region of each kind, alone; and,
    for `budget`, one step with all regions at "full", from which it predicts the peak of every choice. The choice is the
    optimum of an integer programme (SciPy's milp). A step of it is then measured, and another is chosen if that is above the
    budget. Of regions that are alike, the first are recomputed and the last save most, which peaks lowest. If no choice meets
    the budget, or a smaller workspace may save more time than it takes, the same is measured for a quarter of the workspace;
    a second plan starts with what the first one set, and `replan` with what the ops were given.

    example_inputs, example_kwargs: a call of the model of the size that training has. Its device and dtypes count, and autocast
    around the call of plan. Give labels, so that the LM head and loss are in the step. On meta tensors FLOPs of matmuls replace
    times, and peaks are counted. The random states, buffers and modes are afterwards as before.
    budget: bytes that a step may allocate beyond what is there when it begins, at every point of it: saved tensors,
    transients, and the gradients that are not there yet. An int, or a size such as "20GiB".
    saved: instead of budget, bytes that the forward may save for backward, besides parameters and buffers. With neither of
    them, `saved` is what is free on the device, less gradients and transients.
    stores: where saved tensors may go, such as `[ckptkern.storage.offload()]`. adapt: plan again, from the same table, when a
    step begins and the room on the device has moved by a twentieth of the budget; not with torch.compile or pipelines.
    include, exclude: as in convert. group: the ranks that must choose alike (by default all), by their largest bytes.
    loss: from what the model returns to the scalar that a step differentiates, as in `certify`; None takes the output's `loss`,
    or its one scalar, else the sum of its floating-point tensors.
    device: "h100", "h200" or "a100": for a model on the meta device, the GPU whose rates give times (a roofline of each op, and
    of copies to the host beside the region's own work), and whose default workspace the ops have.

    Raises errors.BudgetError with the `least` that would do; ImportError without SciPy; ValueError for both budgets, a model
    that is compiled, sharded or wrapped by DDP or, with neither, on the meta device; RuntimeError on all ranks if one failed.
    """
    check_model("plan", model, example_inputs, example_kwargs)
    check_keywords("plan", plan, model, example_kwargs)
    if hint := missing("scipy"):
        raise ImportError(f"plan: {hint}")
    check_stores(stores := list(stores))
    if None not in (budget, saved):
        raise ValueError("plan: budget bounds the peak and saved the saved bytes: give one of them")
    given, by_peak = (saved, False) if budget is None else (budget, True)
    bound = math.inf if given is None else bytes_of("plan", "saved" if budget is None else "budget", given)
    limit, rates = bound, rates_of(device, model)
    example = Example(model, example_inputs, example_kwargs, group, loss)
    had_none = not segments_of(model)
    try:
        with progress("plan") as example.shown:
            found = agreed(lambda: example.measured(stores, include, exclude, by_peak, rates), group)
            if adapt or given is None:
                limit = min(limit, room_for_step(model, found, by_peak, group))
            made = Plan(model, found, int(limit), group, example.search(found) if by_peak else None)
    except BaseException:
        if had_none:
            revert(model)
        raise
    if adapt:
        made.follow(bound)
    return made
