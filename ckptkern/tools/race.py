"""The implementations of one matmul: checked against float64, then timed in turns."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..ops import catalog
from ..ops.dispatch import choices as _choices
from ..ops.dispatch import implementations as _impls
from ..planning.timing import Clock, cache_of, copies
from .selftest import error_ratio, gradients, relative_errors

MARGIN = 0.03  # of the default's median
ROUNDS, ENOUGH = 30, 5
CHECKED_ROWS, CHECKED_RESULTS = 256, 2**22  # of a matmul; so many that tiles are those of many rows
ERROR_AT_MOST = 2.0  # in units of eager's own: the rule of selftest and of the benchmarks


class Problem(NamedTuple):
    """What is timed: an op at a size. features, hidden, out: of its input, of the layer between (linear_act: 0), of its output,
    as choose_impl has them."""

    op: str
    features: int
    hidden: int
    out: int
    dtype: torch.dtype
    tokens: int

    @property
    def size(self) -> int:
        return _impls.size_class(max(self.features, self.out))

    def backend(self, device: torch.device) -> str:
        return _choices.choose_backend("autotune", torch.empty(0, dtype=self.dtype, device=device))

    def arguments(self, rows: int) -> dict[str, Any]:
        return catalog.OPS[self.op].inputs(catalog.Sizes((rows,), self.features, self.hidden, self.out))

    def __str__(self) -> str:
        sizes = "x".join(str(n) for n in (self.features, self.hidden, self.out) if n)
        return f"{self.op} {sizes} {str(self.dtype).removeprefix('torch.')}, {self.tokens} tokens"


@dataclass
class Outcome:
    """ms of every round by implementation; wrong: what was not timed, and why. ahead: the times are of kernels alone."""

    problem: Problem
    default: str
    ms: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    ahead: bool = True


def totals(outcomes: Sequence[Outcome], of: Callable[[list[float]], float]) -> dict[str, float]:
    """By implementation the sum over these problems, if it was timed in all of them. of: a problem's figure, of its rounds."""
    impls = dict.fromkeys(impl for one in outcomes for impl in one.ms)
    return {
        impl: sum(of(one.ms[impl]) for one in outcomes) for impl in impls if all(impl in one.ms for one in outcomes)
    }


def choice(*outcomes: Outcome) -> str:
    """The implementation that the table gets for problems of one row, those of an op, dtype and size."""
    medians = totals(outcomes, statistics.median)
    late = totals(outcomes, lambda times: sorted(times)[int(0.8 * (len(times) - 1))])
    default = outcomes[0].default
    limit = medians.get(default, math.inf)
    surely = [impl for impl, ms in medians.items() if ms < (1 - MARGIN) * limit and late[impl] < limit]
    return min(surely, key=medians.__getitem__, default=default)


# -- one problem ------------------------------------------------------------------------------------------------------


def tensors_of(problem: Problem, device: torch.device, rows: int) -> dict[str, Tensor]:
    return catalog.random_leaves(problem.arguments(rows), problem.dtype, device)


def forward(problem: Problem, t: dict[str, Tensor]) -> Tensor:
    activation = "silu" if problem.op == "gated_mlp" else "gelu"
    return catalog.call(catalog.OPS[problem.op], problem.arguments(0), t, activation=activation, recompute="full")


def checker(problem: Problem, t: dict[str, Tensor]) -> Callable[[str], str | None]:
    """Says what is wrong with an implementation's results, by the rule of error_ratio."""

    def found(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        y = forward(problem, tensors)
        dy = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(1), device=y.device).to(problem.dtype)
        return gradients(lambda: forward(problem, tensors), tensors, dy.to(y.dtype))

    @functools.cache
    def references() -> tuple:
        with ops.backend("eager"):
            exact = found({name: one.detach().double().requires_grad_() for name, one in t.items()})
            return exact, relative_errors(found(t), exact)

    def fault(impl: str) -> str | None:
        exact, eager = references()
        with _choices.forced_impl(impl):
            ratio, worst = error_ratio(relative_errors(found(t), exact), eager, problem.dtype)
        return None if ratio <= ERROR_AT_MOST else f"error of {worst} {ratio:.1f} times eager's"

    return fault


Operands = list[tuple[dict[str, Tensor], Tensor]]  # the leaves of a step, and the gradient of its result


def operands_of(problem: Problem, device: torch.device) -> Operands:
    """As many as fill the GPU's L2, so that a step finds its own in memory, as in training."""
    leaves = tensors_of(problem, device, problem.tokens)
    dy = torch.randn(problem.tokens, problem.out, device=device).to(problem.dtype)
    nbytes = dy.nbytes + sum(one.nbytes for one in leaves.values())
    others = [
        ({name: one.detach().clone().requires_grad_() for name, one in leaves.items()}, dy.clone())
        for _ in range(copies(nbytes, cache_of(device)) - 1)
    ]
    return [(leaves, dy), *others]


@dataclass
class Timed:
    """Forward and backward by an implementation, on its operands in turns: once when it is made; calling it gives ms."""

    problem: Problem
    impl: str
    operands: Operands
    clock: Clock
    turn: int = 0

    def __post_init__(self) -> None:
        self.once()  # compiles, for which no clock waits

    def once(self) -> None:
        leaves, dy = self.operands[self.turn % len(self.operands)]
        self.turn += 1
        with _choices.forced_impl(self.impl):
            torch.autograd.grad(forward(self.problem, leaves), list(leaves.values()), dy)

    def __call__(self) -> float:
        return 1e3 * self.clock(lambda: self.once)


def measure(problem: Problem, device: torch.device, patience: float, timer=Timed) -> Outcome:
    """Times the implementations that pass the check, in turns, for `patience` seconds or ENOUGH rounds. timer: as Timed."""
    clock, steps = Clock(device), {}
    default = _choices.default_impl(problem.op, device.type, device.index, problem.dtype, problem.size)
    outcome = Outcome(problem, default)
    rows = max(CHECKED_ROWS, CHECKED_RESULTS // (problem.hidden or problem.out))
    fault = checker(problem, tensors_of(problem, device, min(problem.tokens, rows)))
    operands = functools.cache(lambda: operands_of(problem, device))

    def enter(impl: str) -> Callable[[], float] | None:
        if wrong := fault(impl):
            outcome.wrong[impl] = wrong
            return None
        step = timer(problem, impl, operands(), clock)
        step()
        return step

    def attempt(impl: str, run: Callable[[], Any]) -> Any:
        """run(). What does not compile here, or lacks memory, costs its implementation alone, and is printed."""
        try:
            return run()
        except Exception as error:
            outcome.wrong[impl] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]
            steps.pop(impl, None)
            outcome.ms.pop(impl, None)
            return None

    for impl in _impls.candidates(problem.backend(device)):
        if step := attempt(impl, functools.partial(enter, impl)):
            steps[impl] = step
    start = time.perf_counter()
    for done in range(ROUNDS if len(steps) > 1 else 1):
        if done >= ENOUGH and time.perf_counter() - start > patience:
            break
        for impl, step in list(steps.items()):
            if ms := attempt(impl, step):
                outcome.ms.setdefault(impl, []).append(ms)
    outcome.ahead = clock.ahead
    return outcome
