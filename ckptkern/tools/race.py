"""The implementations of one matmul and their tiles: checked against float64, then timed in turns."""

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
from ..planning.timing import Clock, cache_of, captured, copies
from .compiling import Built, built
from .selftest import error_ratio, gradients, relative_errors

MARGIN = 0.03  # of the default's median
ROUNDS, ENOUGH = 30, 5
REACH = 0.1  # implementations that are this much slower than the quickest have their tiles tried, too
CHECKED_ROWS, CHECKED_RESULTS = 256, 2**22  # of a matmul; on a GPU so many that tiles are those of many rows
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

    def key(self, device: torch.device) -> tuple:
        """(backend, device type, index, dtype, size): what it has in common with the ops' other matmuls of that size."""
        backend = _choices.choose_backend("autotune", torch.empty(0, dtype=self.dtype, device=device))
        return backend, device.type, device.index, self.dtype, self.size

    def few(self, device: torch.device) -> bool:
        """Are its rows few there, so that the table has a row of their own for them?"""
        return self.tokens <= _choices.few_rows(*self.key(device))

    def arguments(self, rows: int) -> dict[str, Any]:
        return catalog.OPS[self.op].inputs(catalog.Sizes((rows,), self.features, self.hidden, self.out))

    def __str__(self) -> str:
        sizes = "x".join(str(n) for n in (self.features, self.hidden, self.out) if n)
        return f"{self.op} {sizes} {str(self.dtype).removeprefix('torch.')}, {self.tokens} tokens"


@dataclass
class Outcome:
    """ms of every round by implementation; same: tiles with which this problem runs the kernels of their
    implementation; wrong: what was not timed, and why; left: what the time did not suffice for. few: its rows are.
    timed: how."""

    problem: Problem
    default: str
    ms: dict[str, list[float]] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    timed: str = ""
    few: bool = False

    @property
    def medians(self) -> dict[str, float]:
        return {impl: statistics.median(times) for impl, times in self.ms.items()}

    def times(self, impl: str) -> list[float]:
        return self.ms.get(impl.partition(":")[0] if impl in self.same else impl, [])


def totals(outcomes: Sequence[Outcome], of: Callable[[list[float]], float]) -> dict[str, float]:
    """By implementation the sum over these problems, if it was timed in all of them. of: a problem's figure, of its rounds."""
    impls = dict.fromkeys(impl for one in outcomes for impl in (*one.ms, *one.same))
    times = {impl: [one.times(impl) for one in outcomes] for impl in impls}
    return {impl: sum(map(of, rounds)) for impl, rounds in times.items() if all(rounds)}


def choice(*outcomes: Outcome) -> str:
    """The implementation that the table gets for problems of one row, those of an op, dtype and size."""
    medians = totals(outcomes, statistics.median)
    late = totals(outcomes, lambda times: sorted(times)[int(0.8 * (len(times) - 1))])
    default, base = outcomes[0].default, outcomes[0].default.partition(":")[0]
    saved = default if default in medians else base  # for tiles that were not timed, their implementation
    limit = medians.get(saved, math.inf)
    surely = [impl for impl, ms in medians.items() if ms < (1 - MARGIN) * limit and late[impl] < limit]
    return min(surely, key=medians.__getitem__, default=saved)


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
        with ops.backend("eager"), _choices.forced_impl("eager"):
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
    """Forward and backward by an implementation, on its operands interleaved. It runs once when it is made; calling it
    gives ms."""

    problem: Problem
    impl: str
    operands: Operands
    clock: Clock
    turn: int = 0
    replay: Callable[[], Any] | None = None  # a step with each of the operands, as a CUDA graph

    def __post_init__(self) -> None:
        self.once()  # compiles, for which no clock waits

    def once(self) -> None:
        leaves, dy = self.operands[self.turn % len(self.operands)]
        self.turn += 1
        with _choices.forced_impl(self.impl):
            torch.autograd.grad(forward(self.problem, leaves), list(leaves.values()), dy)

    def each(self) -> None:
        for _ in self.operands:
            self.once()

    def capture(self, pool: Any) -> None:
        self.replay = captured(self.each, self.once, pool)

    def __call__(self) -> float:
        if self.replay is None:
            return 1e3 * self.clock(lambda: self.once)
        return 1e3 * self.clock(lambda: self.replay) / len(self.operands)


def unfit(own: Sequence[Built], default: Sequence[Built], limit: int) -> str | None:
    """Why tiles are not worth a run where a block has `limit` bytes of shared memory: they do not fit, or spill more than the
    default ones of that kernel."""
    for one in own:
        if one.shared > limit:
            return f"{one.kernel} of {one.tile} takes {one.shared} bytes of shared memory, and a block has {limit}"
        if one.stack > max((other.stack for other in default if other.kernel == one.kernel), default=0):
            return f"{one.kernel} of {one.tile} spills {one.stack} bytes"
    return None


class Race:
    """The implementations of one problem: checked, then timed in turns. timer: what Timed is."""

    def __init__(self, outcome: Outcome, device: torch.device, timer=None):
        self.outcome, self.device, self.clock = outcome, device, Clock(device)
        self.timer = timer or functools.partial(Timed, clock=self.clock)
        self.problem, self.steps = outcome.problem, {}
        self.compiled = functools.cache(self._compiled)
        self.not_captured = ""  # which implementation, and why

    @functools.cached_property
    def operands(self) -> Operands:
        return operands_of(self.problem, self.device)

    @functools.cached_property
    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @functools.cached_property
    def fault(self) -> Callable[[str], str | None]:
        rows = CHECKED_ROWS
        if self.device.type == "cuda":
            rows = max(rows, CHECKED_RESULTS // (self.problem.hidden or self.problem.out))
        return checker(self.problem, tensors_of(self.problem, self.device, min(self.problem.tokens, rows)))

    @property
    def shared_memory(self) -> int | None:
        """Bytes that a block may have; None on a CPU, where kernels are interpreted."""
        from ..triton_kernels.tile import device_shared_memory

        return device_shared_memory(self.device.index) if self.device.type == "cuda" else None

    def _compiled(self, impl: str) -> list[Built]:
        """The matmuls that a step launches by that implementation."""
        from ..triton_kernels.tile import device_arch

        def call() -> None:
            with _choices.forced_impl(impl):
                leaves, dy = self.operands[0]
                torch.autograd.grad(forward(self.problem, leaves), list(leaves.values()), dy)

        return built(call, device_arch(self.device.index))

    def pruned(self, impl: str) -> bool:
        """Is there nothing to time? Variants that this problem's kernels have not are left out without a word."""
        base, _, variant = impl.partition(":")
        if not variant or self.shared_memory is None:
            return False
        own, default = self.compiled(impl), self.compiled(base)
        if set(own) == set(default):
            self.outcome.same.append(impl)
            return True
        if why := unfit(own, default, self.shared_memory):
            self.outcome.wrong[impl] = why
        return bool(why)

    def enter(self, impl: str) -> None:
        """Takes the implementation in, unless it is pruned, wrong, or fails."""
        try:
            if self.pruned(impl):
                return
            if wrong := self.fault(impl):
                self.outcome.wrong[impl] = wrong
                return
            step = self.timer(self.problem, impl, self.operands)
            step()
            self.steps[impl] = step
        except (
            Exception
        ) as error:  # what does not compile here, or lacks memory, costs its implementation alone, and is printed
            self.outcome.wrong[impl] = one_line(error)

    def capture(self) -> None:
        """CUDA graphs of all steps, or of none where one cannot be captured, since implementations are timed alike."""
        for impl, step in self.steps.items():
            if self.not_captured:
                return
            try:
                if step.replay is None:
                    step.capture(self.pool)
            except (
                Exception
            ) as error:  # whatever the implementation does that no graph can hold; the line of the problem says so
                self.not_captured = f"{impl} is not captured, {one_line(error)}"
                for one in self.steps.values():
                    one.replay = None

    def how(self) -> str:
        """What the times are of, in words."""
        if self.device.type != "cuda":
            return "wall clock"
        if not self.clock.ahead:
            kind = "kernels and the host, for which a step waits"
        else:
            kind = "kernels, launched ahead" if self.not_captured else "kernels, in CUDA graphs"
        return f"{kind} ({self.not_captured})" if self.not_captured else kind

    def run(self, patience: float) -> None:
        """The rounds of all that has entered, for `patience` seconds at most, in place of earlier ones."""
        if self.device.type == "cuda":
            self.capture()
        times: dict[str, list[float]] = {impl: [] for impl in self.steps}
        start = time.perf_counter()
        for done in range(ROUNDS if len(self.steps) > 1 else 1):
            if done >= ENOUGH and time.perf_counter() - start > patience:
                break
            for impl, step in list(self.steps.items()):
                try:
                    times[impl].append(step())
                except Exception as error:  # as above: the others go on
                    self.outcome.wrong[impl] = one_line(error)
                    del self.steps[impl], times[impl]
                    self.outcome.ms.pop(impl, None)
        self.outcome.ms |= times
        self.outcome.timed = self.how()


def measure(
    problem: Problem, device: torch.device, patience: float, deadline: float = math.inf, timer=None,
    say: Callable[[str], None] = lambda stage: None,
) -> Outcome:  # fmt: skip
    """Implementations with the default tiles, the default first, then the tiles of the quickest of them, each timed for half of
    `patience` seconds.

    Nothing more is tried after `deadline`, of time.perf_counter. say: is told what is being done.
    """
    key = problem.key(device)
    few = problem.few(device)
    outcome = Outcome(problem, _choices.default_impl(problem.op, *key, few), few=few)
    names = _choices.candidates(*key[:-1])
    race = Race(outcome, device, timer)

    def enter(those: list[str]) -> None:
        for name in those:
            if time.perf_counter() > deadline:
                outcome.left.append(name)
            else:
                say(f"{problem}: {name}")
                race.enter(name)

    default = [name for name in names if ":" not in name or name == outcome.default]
    enter(sorted(default, key=lambda name: name != outcome.default))
    share = patience / (2 if any(":" in name for name in names) else 1)
    race.run(share)
    medians = outcome.medians
    near = {name for name, ms in medians.items() if ms <= (1 + REACH) * min(medians.values())}
    tiles = [name for name in names if name not in (*medians, *default)]
    enter([name for name in tiles if name.partition(":")[0] in near])
    if race.steps.keys() - medians.keys():
        against = near | {outcome.default}
        race.steps = {name: step for name, step in race.steps.items() if name in against or name not in medians}
        race.run(share)
    return outcome


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]
