"""The cheapest choice whose peak stays within a bound, over modes and workspaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from ..errors import BudgetError
from ..memory import format_size
from ..ops.dispatch.checks import MODES
from .agree import largest_of
from .live import Step
from .solve import LESS, by_saved
from .table import Table

TRIES = 6  # steps that are measured for a budget and a workspace, at most
STEPS = 12  # of the bisection: a choice is found to 1/4,096 of what the regions save
SMALLER = 2  # smaller workspaces, each a quarter of the one before or less: below, chunks take much time
CHEAPER = 0.98  # a smaller workspace is taken for a cost of so much, or less: times have noise

Run = Callable[[Table, Sequence[int]], Step]


class Choices:
    """Those of one table, which are cheapest under some bound of saved bytes, and the uniform ones.

    A bound of saved bytes is what the integer programme takes, and the peak moves with it; the bound is bisected. peaks: of
    the steps that were measured, the largest of all ranks.
    """

    def __init__(self, table: Table, run: Run, group: dist.ProcessGroup | None):
        assert table.base is not None
        self.table, self._run, self._group = table, run, group
        self.steps: dict[tuple[int, ...], Step] = {}
        self.peaks: dict[tuple[int, ...], int] = {}
        self._note(table.uniform("full"), table.base)
        self.found: dict[tuple[int, ...], int] = {}
        self.least_saved = self._least_saved()
        for mode in MODES:
            self.add(table.uniform(mode))
        for place in range(max((len(row.strategies) for row in table.rows), default=0)):
            self.add([min(place, len(row.strategies) - 1) for row in table.rows])

    def add(self, chosen: Sequence[int]) -> int:
        key = tuple(chosen)
        if key not in self.found:
            self.found[key] = self.table.peak(chosen)
        return self.found[key]

    def _least_saved(self) -> int:
        try:
            self.add(by_saved(self.table, 0))
        except BudgetError as error:
            self.add(by_saved(self.table, error.least))
            return error.least
        return 0

    def _note(self, chosen: Sequence[int], step: Step) -> None:
        key = tuple(chosen)
        self.steps[key], self.peaks[key] = step, largest_of(step.peak, self.table.device, self._group)

    def measured(self, chosen: Sequence[int]) -> int:
        """The peak of a step in these strategies, measured once."""
        if tuple(chosen) not in self.peaks:
            self._note(chosen, self._run(self.table, chosen))
        return self.peaks[tuple(chosen)]

    def lowest(self) -> list[int]:
        """That of the lowest peak among the cheapest for STEPS bounds of saved bytes, evenly apart, and all others found."""
        high = max(self.table.saved(key) for key in self.found)
        for i in range(STEPS):
            self.add(by_saved(self.table, self.least_saved + (high - self.least_saved) * i // (STEPS - 1)))
        return list(min(self.able(), key=lambda key: self.found[key]))

    def able(self) -> list[tuple[int, ...]]:
        return [key for key in self.found if math.isfinite(self.table.cost_of(key))]

    def within(self, bound: int) -> list[int] | None:
        """The cheapest found whose peak is predicted within the bound."""
        low, high = self.least_saved, max(self.table.saved(key) for key in self.found) + 1
        while self.add(by_saved(self.table, high)) <= bound and self.table.saved(by_saved(self.table, high)) >= high:
            high *= 2  # even what saves most fits
        for _ in range(STEPS):
            middle = (low + high) // 2
            if self.add(by_saved(self.table, middle)) <= bound:
                low = middle
            else:
                high = middle
        fit = [key for key in self.able() if self.found[key] <= bound]
        return list(min(fit, key=self.table.cost_of)) if fit else None

    def best(self, budget: int) -> list[int]:
        """The cheapest whose step was measured within the budget. Raises BudgetError with the least that would do."""
        target = budget
        for _ in range(TRIES):
            chosen = self.within(target)
            over = math.inf if chosen is None else self.measured(chosen) - budget
            if chosen is None or over <= 0:
                break
            target = min(target, self.table.peak(chosen)) - over  # the prediction was too low
        if over > 0:
            self.measured(self.lowest())
        if tried := [list(one) for one, peak in self.peaks.items() if peak <= budget]:
            return min(tried, key=self.table.cost_of)
        lowest = min(self.peaks, key=lambda key: self.peaks[key])
        least, largest = self.peaks[lowest], next(iter(self.steps[lowest].standing()), None)
        stands = "" if largest is None else f", of which {format_size(largest.bytes)} are {largest.what}"
        raise BudgetError(
            f"plan: wanted a step of at most {format_size(budget)} ({budget} bytes), but the least that one of "
            f"the choices allocates at its peak is {format_size(least)} ({least} bytes){stands}. {LESS}",
            least,
        )

    def may_gain(self, chosen: Sequence[int], budget: int) -> bool:
        """Could a smaller workspace make it cheaper? As if it took nothing."""
        cost = CHEAPER * self.table.cost_of(chosen)
        if self.table.cheapest > cost:
            return False
        roomier = self.within(budget + self.table.rise(chosen))
        return roomier is not None and self.table.cost_of(roomier) <= cost


class Search:
    """Over workspaces: the model's own and smaller ones, each of which is measured when it may be of use."""

    def __init__(self, first: Choices, narrower: Callable[[Choices], Choices | None]):
        self.all, self._narrower, self._ended = [first], narrower, False  # ended: there is no smaller one

    def workspaces(self) -> Iterator[Choices]:
        yield from list(self.all)
        while not self._ended and len(self.all) <= SMALLER:
            choices = self._narrower(self.all[-1])
            if choices is None:
                self._ended = True
            else:
                self.all.append(choices)
                yield choices

    def best(self, budget: int) -> tuple[Choices, list[int]]:
        """The cheapest of all. Raises BudgetError with the least that would do."""
        best, cost, errors = None, math.inf, []
        for choices in self.workspaces():
            try:
                chosen = choices.best(budget)
            except BudgetError as error:
                errors.append(error)
                continue
            if best is not None and choices.table.cost_of(chosen) > CHEAPER * cost:
                break
            best, cost = (choices, chosen), choices.table.cost_of(chosen)
            if not choices.may_gain(chosen, budget):
                break
        if best is None:
            raise min(errors, key=lambda error: error.least)
        return best
