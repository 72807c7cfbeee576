"""Chooses the cheapest strategies of a model's regions within a budget of bytes (`plan`), and finds the longest sequence or
largest batch that trains within a budget (`frontier`)."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import memory
from ..conversion.binding import revert
from ..conversion.blocks import Cuts, by_module, recorded
from ..conversion.calls import check_keywords
from ..conversion.convert import convert
from ..conversion.recorder import Alive, Loss, as_input
from ..conversion.report import NOTHING, WAY, aligned
from ..conversion.selection import Which, selected
from ..conversion.trace import mapped
from ..errors import BudgetError
from ..extras import missing, progress
from ..ops.dispatch.choices import Bytes
from ..ops.registration.functions import Bodies
from ..storage import Store
from .measure import Shown, measure, narrower
from .search import Search, by_saved
from .segments import Segment, Strategy, segments_of
from .table import Choice, Example, Table, agreed, gathered, standing_lines
from .timing import RATES

SMALL = (slice(2), slice(64))  # sequences and tokens for the conversion
LOWER = 0.95  # a smaller workspace helps if it reduces the peak at "full" to this
CLOSE = 64  # the search of a frontier ends within 1/CLOSE of the size
MOVED = 0.05  # of the budget: smaller changes of the device's free memory do not change the plan


class Plan:
    """The strategies of a model's regions, and the table that they were chosen from; `print(plan)` shows both.

    budget: in bytes, of the peak if `by_peak`, else of saved tensors. peak, predicted: measured and predicted peak of a step;
    None without `by_peak`. workspace: limit of each op's workspace; None if unchanged.
    """

    def __init__(self, table: Table, budget: int | str, search: Search | None = None):
        self.model, self.table, self.search = table.example.model, table, search
        self.by_peak = search is not None
        self.peak: int | None = None
        self.predicted: int | None = None
        self.adapting: Any = None
        self.replan(budget)

    def replan(self, budget: int | str) -> None:
        """Chooses and applies strategies for another budget from the same measurements. A plan by peak measures a step of
        each new choice. Raises BudgetError if no choice fits; the model is then unchanged."""
        budget = bytes_of("plan", "budget", budget)
        if self.search is None:
            self.chosen = by_saved(self.table, budget)
        else:
            choices, self.chosen = self.search.best(budget)
            self.table = choices.table
            self.peak, self.predicted = self.table.measured(self.chosen), choices.predicted[self.chosen]
        self.budget = budget
        self.table.workspaces.set(self.table.workspace)
        for segment, strategy in zip(self.table.segments, self.table.strategies(self.chosen), strict=True):
            segment.set(strategy)

    @property
    def workspace(self) -> int | None:
        """Returns the limit of each op's workspace in bytes; None if it is unchanged."""
        return self.table.workspace

    @property
    def standing(self) -> list[Alive]:
        """Returns the tensors alive at the step's peak, the largest first."""
        return self.table.step(self.chosen).standing() if self.by_peak else []

    @property
    def strategies(self) -> dict[str, Strategy]:
        """Returns the strategy of each region, by name."""
        names = [segment.name for segment in self.table.segments]
        return dict(zip(names, self.table.strategies(self.chosen), strict=True))

    @property
    def saved(self) -> int:
        """Returns the bytes that forward saves for backward, besides parameters and buffers."""
        return self.table.saved(self.chosen)

    @property
    def cost(self) -> float:
        """Returns the seconds of the regions' forward and backward; on the meta device, matmul FLOPs."""
        return self.table.cost_of(self.chosen)

    @property
    def transient(self) -> int:
        """Returns the most bytes that one region's backward allocates above what is saved, besides gradients."""
        return self.table.transient(self.chosen)

    def __str__(self) -> str:
        size = memory.format_size
        lines = self.table.text(self.chosen) + [f"{NOTHING}: {WAY}"] * (not self.table.rows)
        outside = f"{size(self.table.outside)} of it outside of the regions"
        if self.peak is None:
            return "\n".join([*lines, f"saved: {size(self.saved)} of a budget of {size(self.budget)}, {outside}"])
        lines.append(f"peak of a step: {size(self.peak)} of a budget of {size(self.budget)}")
        if self.workspace is not None:
            lines.append(f"workspace: {size(self.workspace)}")
        lines += [f"saved: {size(self.saved)}, {outside}", "at the peak stand", *standing_lines(self.standing)]
        return "\n".join(lines)

    def _follow_room(self, limit: float) -> None:
        """Plans again before a training forward if the device's free memory has changed by more than MOVED of the budget, up
        to `limit` bytes. This is a collective call."""
        if Bodies.seen or not (self.model.training and torch.is_grad_enabled()):  # the step is being recorded
            return
        budget = int(min(limit, room(self.table, self.by_peak, self.chosen)))
        if abs(budget - self.budget) > MOVED * self.budget:
            try:
                self.replan(max(budget, 0))
            except BudgetError as error:
                warnings.warn(
                    f"{error}. The step runs with the smallest feasible budget, and may not fit", stacklevel=2
                )
                self.replan(error.least)


def room(table: Table, by_peak: bool, chosen: Choice) -> int:
    """Returns the device's free bytes, the smallest of all ranks. For a plan by saved bytes the gradients that backward will
    allocate, and its transients, are subtracted."""
    device, model = table.example.device, table.example.model
    if device.type == "meta":
        raise ValueError("plan: the model is on the meta device, which has no free memory to plan for. Give a budget")
    free = memory.free_memory(device)
    if not by_peak:
        free -= sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None) + table.transient(
            chosen
        )
    return min(gathered(free, table.group))


def bytes_of(op: str, name: str, budget: float | str) -> int:
    """Returns a bound in bytes. Raises ValueError if it is not a size."""
    size = memory.bytes_of(budget)
    if size is None:
        raise ValueError(
            f"{op}: {name} must be a number of bytes, or a size such as '10GiB' or '512MiB', not {budget!r}"
        )
    return size


@contextmanager
def converted(example: Example, stays: bool = True) -> Iterator[Shown]:
    """Yields a function to call at each stage. On exit, reverts a model that had no region on entry, after an error or if it
    is not to stay converted."""
    op, model = example.op, example.model
    if any(getattr(m.__dict__.get("forward"), "group", None) for m in model.modules()):
        raise ValueError(
            f"{op}: convert's every made one region of several layers, but {op} measures each layer. Convert without every"
        )
    keeps = bool(segments_of(model))
    try:
        with progress(op) as shown:
            yield shown
        keeps = keeps or stays
    finally:
        if not keeps:
            revert(model)


def found_segments(example: Example, include=None, exclude=None) -> list[Segment]:
    """Returns the model's regions and the blocks that may become activation checkpoints. Converts a model without regions.

    Converts on the first few sequences and tokens if the model takes them: they take less time, and what is checked does not
    depend on their number.
    """
    model, call = example.model, example.call
    segments, options = segments_of(model, include, exclude), {"include": include, "exclude": exclude}
    if not segments and example.device.type != "meta":
        args, kwargs = mapped(lambda t: as_input(t[SMALL[: t.dim()]].clone()), call)
        try:
            convert(model, *args, recompute="full", **options, **kwargs)
        except Exception:  # the model's own error: its inputs cannot be cut like this
            convert(model, *call[0], recompute="full", **options, **call[1])
        segments = segments_of(model)
    record, taken = recorded(model, call), {m for segment in segments for m in segment.module.modules()}
    if record is None:
        return segments
    # blocks without a region: the choice with the lowest peak
    candidates = Cuts(record, selected(model, include, exclude) - taken, slices=False)
    cuts = candidates.best(is_asked=True)
    names = {m: name for name, m in model.named_modules()}
    return segments + [Segment(names[m], m, "checkpoint", is_block=True) for m, _ in by_module(cuts)]


def plan(
    model: nn.Module,
    *example_inputs: Any,
    budget: Bytes = None,
    saved: Bytes = None,
    stores: Iterable[Store] = (),
    adapt: bool = False,
    include: Which = None,
    exclude: Which = None,
    group: dist.ProcessGroup | None = None,
    device: str | None = None,
    loss: Loss | None = None,
    **example_kwargs: Any,
) -> Plan:
    """Chooses the fastest strategy for each region of a model whose training step stays within a budget, and applies it.

        plan = ckptkern.plan(model, input_ids, labels=input_ids, budget="20GiB")
        print(plan)

    A model without regions is converted first. A region's strategies are its recompute modes, for a layer also a mode for each
    sublayer ("full/none"), each with or without one of `stores`. An integer programme (SciPy's milp) chooses among them from
    measurements of one region of each kind; a step of the choice is then measured.

    example_inputs, example_kwargs: a call at training size, with labels so that the loss is in the step. On meta tensors FLOPs
    replace times, and peaks are counted.
    budget: bytes that a step may allocate beyond what is there when it begins, such as "20GiB".
    saved: instead of budget, bytes that forward may save for backward. With neither, it is the device's free memory less
    gradients and transients.
    stores: where saved tensors may go, such as `[ckptkern.storage.offload()]`. adapt: plan again if the free memory changes by
    5% of the budget. include, exclude: as in `convert`. group: ranks that must choose alike; by default all. loss: as in
    `report`.
    device: the GPU for which a model on the meta device is planned: "h100", "h200" or "a100".

    Raises BudgetError with the smallest feasible budget as `least`; ImportError without SciPy; ValueError for both budgets, a
    model that is compiled, sharded or in DDP, or a meta model without a budget; RuntimeError if another rank failed.
    """
    if hint := missing("scipy"):
        raise ImportError(f"plan: {hint}")
    for store in (stores := list(stores)):
        if not isinstance(store, Store):
            raise TypeError(
                f"plan: stores must hold stores such as ckptkern.storage.offload(), not {type(store).__name__}"
            )
    if None not in (budget, saved):
        raise ValueError("plan: budget bounds the peak and saved the saved bytes: give one of them")
    by_peak, given = budget is not None, saved if budget is None else budget
    limit = math.inf if given is None else bytes_of("plan", "budget" if by_peak else "saved", given)
    example = Example("plan", model, (example_inputs, example_kwargs), loss)
    with converted(example) as shown:
        check_keywords("plan", plan, model, example_kwargs)
        if device not in (None, *RATES):
            raise ValueError(f"plan: device must be one of {', '.join(RATES)}, not {device!r}")
        if device is not None and example.device.type != "meta":
            raise ValueError(
                "plan: device is for a model on the meta device. Leave it out: the times of this model are measured"
            )

        def measured(larger=None):
            """Measures in the ops' own workspace, or in a smaller one than `larger`'s."""
            if larger is None:
                segments = found_segments(example, include, exclude)
                strategies = [
                    [Strategy(mode, store) for store in (None, *stores) for mode in segment.modes()]
                    for segment in segments
                ]
                table = measure(example, segments, strategies, shown, RATES.get(device))
            else:
                table = narrower(larger, shown)
            if by_peak:
                shown('memory over a step at "full"')
                table.step(table.uniform("full"))
            return table

        def smaller(table):
            """Returns the table for a smaller workspace; None if that does not lower the peak."""
            if not table.workspaces.given:
                return None
            other, full = agreed(lambda: measured(table), group), table.uniform("full")
            return other if other.peak(full) < LOWER * table.peak(full) else None

        table = agreed(measured, group)
        bound = min(limit, room(table, by_peak, table.uniform("full"))) if adapt or given is None else limit
        chosen = Plan(table, int(bound), Search(table, smaller) if by_peak else None)
    if adapt:
        chosen.adapting = model.register_forward_pre_hook(lambda module, args: chosen._follow_room(limit))
    return chosen


# -- the longest sequence, or largest batch, that trains within a budget


@dataclasses.dataclass
class Frontier:
    """The largest size that trains within a budget, and its plan, which is applied.

    size: the argument of make_inputs. budget, `peak`: in bytes. tried: size -> peak of a step at "full"; math.inf if it did not
    fit.
    """

    size: int
    budget: int
    tried: dict[int, float]
    plan: Plan

    @property
    def peak(self) -> int:
        """Returns the peak of the planned step in bytes."""
        assert self.plan.peak is not None
        return self.plan.peak

    def __str__(self) -> str:
        size = memory.format_size
        rows = [
            (str(n), size(int(peak)) if math.isfinite(peak) else "does not fit")
            for n, peak in sorted(self.tried.items())
        ]
        result = f"largest size within {size(self.budget)}: {self.size}, planned with a peak of {size(self.peak)}"
        return "\n".join([*aligned([("size", 'peak at "full"'), *rows]), result])


def frontier(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    budget: int | str,
    *,
    multiple: int = 64,
    limit: int | None = None,
    include: Which = None,
    exclude: Which = None,
    loss: Loss | None = None,
) -> Frontier:
    """Finds the longest sequence, or largest batch, that trains within a budget, and plans the model for it.

        def inputs(tokens):
            ids = torch.randint(0, 32000, (1, tokens))
            return {"input_ids": ids, "labels": ids}

        longest = ckptkern.frontier(model, inputs, "24GiB")
        print(longest.size, longest.plan)

    A size fits if a step with every region at "full" stays within the budget.

    make_inputs: maps a size to a tensor, a tuple of positional or a dict of keyword arguments. multiple: sizes are multiples of
    it; the search ends within the larger of `multiple` and 1/64 of the size. limit: the largest size to try. budget, include,
    exclude, loss: as in `plan`.

    Raises BudgetError with `least` for the first size, `multiple`, if that does not fit; ValueError for an invalid multiple or
    limit; and as `plan`.
    """
    limit_bytes = bytes_of("frontier", "budget", budget)
    for name, value in (("multiple", multiple), ("limit", multiple if limit is None else limit)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"frontier: {name} must be a positive int, not {value!r}")
    first = min(multiple, limit or multiple)
    example = Example("frontier", model, arguments_of(make_inputs(first)), loss)
    with converted(example) as shown:
        for segment in found_segments(example, include, exclude):
            segment.set(Strategy("full"))

        def peak_of(size):
            shown(f"size {size}")
            try:
                return Example("frontier", model, arguments_of(make_inputs(size)), loss).step().peak
            except torch.OutOfMemoryError:
                return math.inf

        size, tried = search(peak_of, limit_bytes, multiple, first, limit)
        args, kwargs = arguments_of(make_inputs(size))
        chosen = plan(model, *args, budget=limit_bytes, include=include, exclude=exclude, loss=loss, **kwargs)
    return Frontier(size, limit_bytes, tried, chosen)


def arguments_of(inputs) -> tuple[tuple, dict]:
    """Returns (positional arguments, keyword arguments)."""
    if isinstance(inputs, dict):
        return (), inputs
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def search(
    peak_of: Callable[[int], float], budget: int, multiple: int, first: int, limit: int | None
) -> tuple[int, dict[int, float]]:
    """Returns the largest size that fits, and the peaks of all sizes tried."""
    tried = {first: peak_of(first)}
    if tried[first] > budget:
        least = tried[first]
        known = f"takes {memory.format_size(int(least))}" if math.isfinite(least) else "does not fit the device"
        raise BudgetError(
            f'frontier: the budget is {memory.format_size(budget)}, but size {first} {known} with all regions at "full". '
            "Take that budget, a smaller multiple=, or fewer samples",
            int(least) if math.isfinite(least) else 0,
        )
    most = math.inf if limit is None else limit
    fits, fails, bisect = first, most + multiple, False
    while fails - fits > max(multiple, fits // CLOSE):
        guess = (fits + fails) / 2 if bisect else crossing(tried, fits, budget)
        # do not grow more than fourfold at once
        size = max(int(min(guess, 4 * fits, fails - multiple)) // multiple * multiple, fits + multiple)
        if size > most:
            break
        tried[size] = peak_of(size)
        # extrapolation approaches a curved line from one side only, so bisect every other time
        bisect = not bisect and fails < math.inf
        if tried[size] <= budget:
            fits = size
        else:
            fails = size
    return fits, tried


def crossing(tried: dict[int, float], fits: int, budget: int) -> float:
    """Returns the size at which the line through the largest size that fits and its nearest neighbour meets the budget;
    without a neighbour twice that size, and four times it if the line does not rise."""
    others = [n for n, peak in tried.items() if n != fits and math.isfinite(peak)]
    if not others:
        return 2 * fits
    other = min(others, key=lambda n: abs(n - fits))
    slope = (tried[fits] - tried[other]) / (fits - other)
    return fits + (budget - tried[fits]) / slope if slope > 0 else 4 * fits
