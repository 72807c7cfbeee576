"""frontier: the longest sequence, or largest batch, that trains within a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from ..conversion.recorder import Loss
from ..conversion.report import aligned
from ..conversion.selection import Which
from ..errors import BudgetError
from .plan import Plan, bytes_of, converted, found_segments, plan
from .segments import Strategy
from .table import Example

CLOSE = 64  # the search ends within this part of the size


@dataclasses.dataclass
class Frontier:
    """The largest size that trains within the budget, and the plan with which it does, which is applied.

    size: what make_inputs was called with. budget: bytes of a step's peak. tried: the peak of a step with all regions at
    "full", by size; math.inf where it did not fit the device. plan: of the largest size.
    """

    size: int
    budget: int
    tried: dict[int, float]
    plan: Plan

    @property
    def peak(self) -> int:
        """Bytes that a step of this size was measured to allocate at its peak, as planned; on the meta device counted."""
        assert self.plan.peak is not None
        return self.plan.peak

    def __str__(self) -> str:
        size = memory.format_size
        rows = [
            (str(n), size(int(peak)) if math.isfinite(peak) else "does not fit")
            for n, peak in sorted(self.tried.items())
        ]
        found = f"largest size within {size(self.budget)}: {self.size}, planned with a peak of {size(self.peak)}"
        return "\n".join([*aligned([("size", 'peak at "full"'), *rows]), found])


def frontier(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    budget: int | str,
    *,
    multiple: int = 64,
    limit: int | None = None,
    include: Which | Iterable[Which] | None = None,
    exclude: Which | Iterable[Which] | None = None,
    loss: Loss | None = None,
) -> Frontier:
    """Finds the longest sequence, or largest batch, that trains within a budget, and plans the model for it.

        def inputs(tokens):
            ids = torch.randint(0, 32000, (1, tokens))
            return {"input_ids": ids, "labels": ids}

        found = ckptkern.frontier(model, inputs, "24GiB")
        print(found.size, found.plan)

    A size fits if a step with every region at "full" stays within the budget. The peak of such a step is measured at few
    sizes: the next one is where the line through the last two meets the budget, or the middle of what is left. Then `plan`
    chooses the quickest strategies for the largest size, and measures a step of them: so what is returned has run. On the meta
    device steps are counted, for models and sizes that are not there.

    make_inputs: size -> the inputs of a step: a tensor, a tuple of positional or a dict of keyword arguments; give labels, so
    that the LM head and loss are in the step. budget: bytes that a step may allocate beyond what is there when it begins, as
    in `plan`. multiple: sizes are multiples of it; the first that is tried is `multiple` itself. The search ends when the next
    size that does not fit is at most `multiple`, or a 64th, larger. limit: the largest size to try, such as the number of the
    model's positions. include, exclude, loss: as in `plan`.

    Raises errors.BudgetError with the `least` for the first size if that does not fit, ValueError for a bad multiple or limit,
    and what `plan` raises.
    """
    limit_bytes = bytes_of("frontier", "budget", budget)
    for name, value in (("multiple", multiple), ("limit", multiple if limit is None else limit)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"frontier: {name} must be a positive int, not {value!r}")
    first = min(multiple, limit or multiple)
    example = Example("frontier", model, *arguments_of(make_inputs(first)), loss)
    with converted(example) as shown:
        for segment in found_segments(example, include, exclude):
            segment.set(Strategy("full"))

        def peak_of(size: int) -> float:
            shown(f"size {size}")
            try:
                return Example("frontier", model, *arguments_of(make_inputs(size)), loss).step().peak
            except torch.OutOfMemoryError:
                return math.inf

        size, tried = search(peak_of, limit_bytes, multiple, first, limit)
        args, kwargs = arguments_of(make_inputs(size))
        chosen = plan(model, *args, budget=limit_bytes, include=include, exclude=exclude, loss=loss, **kwargs)
    return Frontier(size, limit_bytes, tried, chosen)


def arguments_of(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """(positional, keyword arguments)."""
    if isinstance(inputs, dict):
        return (), inputs
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def search(
    peak_of: Callable[[int], float], budget: int, multiple: int, first: int, limit: int | None
) -> tuple[int, dict[int, float]]:
    """(the largest size that fits, the peaks of all that were tried)."""
    tried = {first: peak_of(first)}
    if tried[first] > budget:
        least = tried[first]
        known = f"takes {memory.format_size(int(least))}" if math.isfinite(least) else "does not fit the device"
        raise BudgetError(
            f'frontier: wanted a step of at most {memory.format_size(budget)}, but size {first} {known} with all at "full". '
            "Take that budget, a smaller multiple=, or fewer samples",
            int(least) if math.isfinite(least) else 0,
        )
    fits, fails = first, None if limit is None else limit + multiple
    bisect = False
    while fails is None or fails - fits > max(multiple, fits // CLOSE):
        if bisect and fails is not None:
            guess = (fits + fails) / 2
        else:
            guess = crossing(tried, fits, budget)
        highest = (
            4 * fits if fails is None else min(4 * fits, fails - multiple)
        )  # no step takes very much more than another
        size = max(int(min(guess, highest)) // multiple * multiple, fits + multiple)
        if limit is not None and size > limit:
            break
        tried[size] = peak_of(size)
        # a line that is bent is met from one side only
        bisect = not bisect and fails is not None and size != fails
        if tried[size] <= budget:
            fits = size
        else:
            fails = size
    return fits, tried


def crossing(tried: dict[int, float], fits: int, budget: int) -> float:
    """Where the line through the largest size that fits and its nearest neighbour meets the budget, a little beyond."""
    others = [n for n, peak in tried.items() if n != fits and math.isfinite(peak)]
    if not others:
        return 2 * fits
    other = min(others, key=lambda n: abs(n - fits))
    slope = (tried[fits] - tried[other]) / (fits - other)
    return fits + (budget - tried[fits]) / slope if slope > 0 else 4 * fits
