"""Choices whose predicted peak stays within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import BudgetError
from ..ops.dispatch.checks import MODES
from .table import Table

STEPS = 12  # of the bisection: a choice is found to 1/4,096 of what the regions save


class Choices:
    """Those that are cheapest under some bound of saved bytes, and the uniform ones.

    A bound of saved bytes is what the integer programme takes, and the peak moves with it; the bound is bisected.
    """

    def __init__(self, table: Table, by_saved: Callable[[int], list[int]]):
        self.table, self.by_saved = table, by_saved
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
            self.add(self.by_saved(0))
        except BudgetError as error:
            self.add(self.by_saved(error.least))
            return error.least
        return 0

    def lowest(self) -> list[int]:
        """That of the lowest peak among the cheapest for STEPS bounds of saved bytes, evenly apart, and all others found."""
        high = max(self.table.saved(key) for key in self.found)
        for i in range(STEPS):
            self.add(self.by_saved(self.least_saved + (high - self.least_saved) * i // (STEPS - 1)))
        return list(min(self.able(), key=lambda key: self.found[key]))

    def able(self) -> list[tuple[int, ...]]:
        return [key for key in self.found if math.isfinite(self.table.cost_of(key))]

    def within(self, bound: int) -> list[int] | None:
        """The cheapest found whose peak is predicted within the bound."""
        low, high = self.least_saved, max(self.table.saved(key) for key in self.found) + 1
        while self.add(self.by_saved(high)) <= bound and self.table.saved(self.by_saved(high)) >= high:
            high *= 2  # even what saves most fits
        for _ in range(STEPS):
            middle = (low + high) // 2
            if self.add(self.by_saved(middle)) <= bound:
                low = middle
            else:
                high = middle
        fit = [key for key in self.able() if self.found[key] <= bound]
        return list(min(fit, key=self.table.cost_of)) if fit else None
