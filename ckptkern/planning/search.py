"""The cheapest choice whose peak stays within a bound, over modes and workspaces.

A bound of saved bytes is what the integer programme takes, and the peak moves with it; the bound is bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import BudgetError
from ..memory import format_size
from .solve import LESS, by_saved
from .table import Table

TRIES = 6  # steps that are measured for a budget and a workspace, at most
STEPS = 12  # of the bisection: a choice is found to 1/4,096 of what the regions save
SMALLER = 2  # smaller workspaces, each a quarter of the one before or less: below, chunks take much time
CHEAPER = 0.98  # a smaller workspace is taken for a cost of so much, or less: times have noise
UNBOUNDED = 2**60  # bytes

Choice = tuple[int, ...]


class Choices:
    """The choices of a table that are cheapest under some bound of saved bytes, and the uniform ones, with the peaks that are
    predicted of them."""

    def __init__(self, table: Table):
        self.table, self.predicted = table, dict[Choice, int]()
        full, least = table.uniform("full"), by_saved(table, None)
        table.measured(full)
        self.add(least)
        for place in range(max((len(row.strategies) for row in table.rows), default=0)):  # the modes are the first
            self.add([min(place, len(row.strategies) - 1) for row in table.rows])
        self.add(full)
        self.add(by_saved(table, UNBOUNDED))
        self.low, self.high = table.saved(least), max(map(table.saved, self.predicted))

    def add(self, chosen: list[int]) -> int:
        """Returns the predicted peak of a choice."""
        key = tuple(chosen)
        if key not in self.predicted:
            self.predicted[key] = self.table.peak(key)
        return self.predicted[key]

    def able(self) -> list[Choice]:
        """Returns those in which every region fits."""
        return [key for key in self.predicted if math.isfinite(self.table.cost_of(key))]

    def lowest(self) -> Choice:
        """Returns that of the lowest peak, also among the cheapest for STEPS bounds of saved bytes, evenly apart."""
        for i in range(STEPS):
            self.add(by_saved(self.table, self.low + (self.high - self.low) * i // (STEPS - 1)))
        return min(self.able(), key=lambda key: self.predicted[key])

    def within(self, bound: int) -> Choice | None:
        """Returns the cheapest whose peak is predicted within the bound."""
        low, high = self.low, self.high + 1
        for _ in range(STEPS):
            middle = (low + high) // 2
            low, high = (middle, high) if self.add(by_saved(self.table, middle)) <= bound else (low, middle)
        fit = [key for key in self.able() if self.predicted[key] <= bound]
        return min(fit, key=self.table.cost_of) if fit else None

    def best(self, budget: int) -> Choice:
        """Returns the cheapest whose step was measured within the budget. Raises BudgetError with the least that would do."""
        table, target = self.table, budget
        for _ in range(TRIES):
            chosen = self.within(target)
            over = math.inf if chosen is None else table.measured(chosen) - budget
            if chosen is None or over <= 0:
                break
            target = min(target, self.predicted[chosen]) - over  # the prediction was too low
        if over > 0:
            table.measured(self.lowest())
        if tried := [key for key, peak in table.peaks.items() if peak <= budget]:
            return min(tried, key=table.cost_of)
        lowest = min(table.peaks, key=lambda key: table.peaks[key])
        least, largest = table.peaks[lowest], next(iter(table.steps[lowest].standing()), None)
        stands = "" if largest is None else f", of which {format_size(largest.bytes)} are {largest.what}"
        raise BudgetError(
            f"plan: wanted a step of at most {format_size(budget)} ({budget} bytes), but the least that one of "
            f"the choices allocates at its peak is {format_size(least)} ({least} bytes){stands}. {LESS}",
            least,
        )

    def may_gain(self, chosen: Choice, budget: int) -> bool:
        """Could a smaller workspace make it cheaper? As if it took nothing."""
        cost = CHEAPER * self.table.cost_of(chosen)
        if self.table.cheapest > cost:
            return False
        roomier = self.within(budget + self.table.rise(chosen))
        return roomier is not None and self.table.cost_of(roomier) <= cost


class Search:
    """Over workspaces: the model's own and smaller ones, each of which is measured when it may be of use. narrower: returns the
    table of the next smaller one, or None."""

    def __init__(self, table: Table, narrower: Callable[[Table], Table | None]):
        self.all, self._narrower, self._ended = [Choices(table)], narrower, False  # ended: there is no smaller one

    def _measure_smaller(self) -> None:
        table = self._narrower(self.all[-1].table)
        self._ended = table is None
        if table is not None:
            self.all.append(Choices(table))

    def best(self, budget: int) -> tuple[Choices, Choice]:
        """Returns the cheapest of all. Raises BudgetError with the least that would do."""
        best, cost, errors = None, math.inf, []
        for i in range(SMALLER + 1):
            if i == len(self.all) and not self._ended:
                self._measure_smaller()
            if i == len(self.all):
                break
            choices = self.all[i]
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
