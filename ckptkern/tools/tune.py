"""``python -m ckptkern tune``: measure which route is quickest for each product here, with which tiles, and remember it for
this machine.

Of every op, dtype and size the routes (`ops/_routes.py`) are checked against float64, then timed in turns, forward and
backward at "full". Of the quickest routes of kernels the variants follow, the same routes with other tiles: those that compile
for this card without more spills than the shipped tiles have, and fit into its shared memory, are checked and timed likewise,
together with the routes that they come from and the default. The table has one row for an op, a dtype and a size; what replaces
the default there is quicker by more than the noise, summed over the problems of the row: its medians by MARGIN, and its 80th
percentiles below the default's medians.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..conversion.convert import progress
from ..ops import _choices, _routes, _tuned
from ..planning.measure import seconds
from .compiling import Built, built
from .convert import load, model_and_inputs
from .verify import error_ratio, gradients, relative_errors

OPS = ("linear_act", "mlp", "gated_mlp")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MARGIN = 0.03  # of the default's median
ROUNDS, ENOUGH = 30, 5
REACH = 0.1  # routes that are this much slower than the quickest have their tiles tried, too
CHECKED_ROWS, CHECKED_RESULTS = 256, 2**22  # of a product; on a GPU so many that tiles are those of many rows
ERROR_AT_MOST = 2.0  # in units of eager's own: the rule of verify and of the benchmarks


class Problem(NamedTuple):
    """What is timed: an op at a size. features, hidden, out: of its input, of the layer between (linear_act: 0), of its output,
    as choose_route has them."""

    op: str
    features: int
    hidden: int
    out: int
    dtype: torch.dtype
    tokens: int

    @property
    def size(self) -> int:
        return _routes.size_class(max(self.features, self.out))

    def __str__(self) -> str:
        sizes = "x".join(str(n) for n in (self.features, self.hidden, self.out) if n)
        return f"{self.op} {sizes} {str(self.dtype).removeprefix('torch.')}, {self.tokens} tokens"


@dataclass
class Outcome:
    """ms of every round by route; same: tiles with which this problem runs the kernels of their route; wrong: what was not
    timed, and why."""

    problem: Problem
    default: str
    ms: dict[str, list[float]] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        return {route: statistics.median(times) for route, times in self.ms.items()}

    def times(self, route: str) -> list[float]:
        return self.ms.get(route.partition(":")[0] if route in self.same else route, [])


def totals(outcomes: Sequence[Outcome], of: Callable[[list[float]], float]) -> dict[str, float]:
    """By route the sum over these problems, if it was timed in all of them. of: a problem's figure, of its rounds."""
    routes = dict.fromkeys(route for one in outcomes for route in (*one.ms, *one.same))
    times = {route: [one.times(route) for one in outcomes] for route in routes}
    return {route: sum(map(of, rounds)) for route, rounds in times.items() if all(rounds)}


def choice(*outcomes: Outcome) -> str:
    """The route that the table gets for problems of one row, those of an op, dtype and size."""
    medians = totals(outcomes, statistics.median)
    late = totals(outcomes, lambda times: sorted(times)[int(0.8 * (len(times) - 1))])
    default, base = outcomes[0].default, outcomes[0].default.partition(":")[0]
    kept = default if default in medians else base  # for tiles that were not timed, their route
    limit = medians.get(kept, math.inf)
    surely = [route for route, ms in medians.items() if ms < (1 - MARGIN) * limit and late[route] < limit]
    return min(surely, key=medians.__getitem__, default=kept)


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Of the table's file: a row for each op, dtype and size, where there was something to choose."""
    groups: dict[tuple, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.problem.op, one.problem.dtype, one.problem.size), []).append(one)
    rows = []
    for (op, dtype, size), group in groups.items():
        medians = totals(group, statistics.median)
        if len(medians) > 1:
            rows.append({
                "op": op, "features": _routes.SIZES[size], "dtype": str(dtype).removeprefix("torch."),
                "tokens": group[0].problem.tokens, "measured": [one.problem[1:4] for one in group],
                "route": choice(*group), "ms": {route: round(ms, 4) for route, ms in medians.items()},
            })  # fmt: skip
    return rows


# -- one problem ------------------------------------------------------------------------------------------------------


def tensors_of(problem: Problem, device: torch.device, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    d, h, e = problem.features, problem.hidden, problem.out
    shapes = {
        "linear_act": {"weight": (e, d), "bias": (e,)},
        "mlp": {"fc1_weight": (h, d), "fc1_bias": (h,), "fc2_weight": (e, h), "fc2_bias": (e,)},
        "gated_mlp": {"gate_weight": (h, d), "up_weight": (h, d), "down_weight": (e, h)},
    }[problem.op]

    def random(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        return made.to(problem.dtype).requires_grad_()

    return {"x": random(rows, d).detach().mul(d**0.5).requires_grad_(), **{n: random(*s) for n, s in shapes.items()}}


def forward(problem: Problem, t: dict[str, Tensor]) -> Tensor:
    if problem.op == "linear_act":
        return ops.linear_act(t["x"], t["weight"], t["bias"], "gelu", recompute="full")
    if problem.op == "mlp":
        return ops.mlp(t["x"], t["fc1_weight"], t["fc1_bias"], t["fc2_weight"], t["fc2_bias"], "gelu", recompute="full")
    return ops.gated_mlp(t["x"], t["gate_weight"], t["up_weight"], t["down_weight"], "silu", recompute="full")


def judge(problem: Problem, t: dict[str, Tensor]) -> Callable[[str], str | None]:
    """Says what is wrong with a route's results, by the rule of error_ratio."""

    def found(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        y = forward(problem, tensors)
        dy = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(1), device=y.device).to(problem.dtype)
        return gradients(lambda: forward(problem, tensors), tensors, dy.to(y.dtype))

    @functools.cache
    def references() -> tuple:
        with ops.backend("eager"), _choices.forced_route("eager"):
            exact = found({name: one.detach().double().requires_grad_() for name, one in t.items()})
            return exact, relative_errors(found(t), exact)

    def fault(route: str) -> str | None:
        exact, eager = references()
        with _choices.forced_route(route):
            ratio, worst = error_ratio(relative_errors(found(t), exact), eager, problem.dtype)
        return None if ratio <= ERROR_AT_MOST else f"error of {worst} {ratio:.1f} times eager's"

    return fault


def step_of(problem: Problem, route: str, t: dict[str, Tensor]) -> Callable[[], float]:
    """Runs forward and backward, and gives its ms."""
    leaves, outputs = list(t.values()), []

    def run() -> float:
        with _choices.forced_route(route):
            outputs.clear()
            took = seconds(
                lambda: outputs.append(forward(problem, t)),
                lambda: torch.autograd.grad(outputs[0], leaves, torch.ones_like(outputs[0])),
                leaves[0].device,
            )
        return 1e3 * took

    return run


def unfit(own: Sequence[Built], shipped: Sequence[Built], limit: int) -> str | None:
    """Why tiles are not worth a run where a block has `limit` bytes of shared memory: they do not fit, or spill more than the
    shipped ones of that kernel."""
    for one in own:
        if one.shared > limit:
            return f"{one.kernel} of {one.tile} takes {one.shared} bytes of shared memory, and a block has {limit}"
        if one.stack > max((other.stack for other in shipped if other.kernel == one.kernel), default=0):
            return f"{one.kernel} of {one.tile} spills {one.stack} bytes"
    return None


class Race:
    """The routes of one problem: checked, then timed in turns. timer: what step_of is."""

    def __init__(self, outcome: Outcome, device: torch.device, timer=None):
        self.outcome, self.device, self.timer = outcome, device, timer or step_of
        self.problem, self.steps = outcome.problem, {}
        self.compiled = functools.cache(self._compiled)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.problem, self.device, self.problem.tokens)

    @functools.cached_property
    def fault(self) -> Callable[[str], str | None]:
        rows = CHECKED_ROWS
        if self.device.type == "cuda":
            rows = max(rows, CHECKED_RESULTS // (self.problem.hidden or self.problem.out))
        return judge(self.problem, tensors_of(self.problem, self.device, min(self.problem.tokens, rows)))

    @property
    def shared_memory(self) -> int | None:
        """Bytes that a block may have; None on a CPU, where kernels are interpreted."""
        from ..triton_kernels.tile import device_shared_memory

        return device_shared_memory(self.device.index) if self.device.type == "cuda" else None

    def _compiled(self, route: str) -> list[Built]:
        """The products that a step launches by that route."""
        from ..triton_kernels.tile import device_arch

        def call() -> None:
            with _choices.forced_route(route):
                y = forward(self.problem, self.tensors)
                torch.autograd.grad(y, list(self.tensors.values()), torch.ones_like(y))

        return built(call, device_arch(self.device.index))

    def pruned(self, route: str) -> bool:
        """Is there nothing to time? Variants that this problem's kernels have not are left out without a word."""
        base, _, variant = route.partition(":")
        if not variant or self.shared_memory is None:
            return False
        own, shipped = self.compiled(route), self.compiled(base)
        if set(own) == set(shipped):
            self.outcome.same.append(route)
            return True
        if why := unfit(own, shipped, self.shared_memory):
            self.outcome.wrong[route] = why
        return bool(why)

    def enter(self, route: str) -> None:
        """Takes the route in, unless it is pruned, wrong, or fails."""
        try:
            if self.pruned(route):
                return
            if wrong := self.fault(route):
                self.outcome.wrong[route] = wrong
                return
            step = self.timer(self.problem, route, self.tensors)
            step()
            self.steps[route] = step
        except Exception as error:  # what does not compile here, or lacks memory, costs its route alone, and is printed
            self.outcome.wrong[route] = one_line(error)

    def run(self, patience: float) -> None:
        """The rounds of all that has entered, for `patience` seconds at most, in place of earlier ones."""
        times: dict[str, list[float]] = {route: [] for route in self.steps}
        start = time.perf_counter()
        for done in range(ROUNDS if len(self.steps) > 1 else 1):
            if done >= ENOUGH and time.perf_counter() - start > patience:
                break
            for route, step in list(self.steps.items()):
                try:
                    times[route].append(step())
                except Exception as error:  # as above: the others go on
                    self.outcome.wrong[route] = one_line(error)
                    del self.steps[route], times[route]
                    self.outcome.ms.pop(route, None)
        self.outcome.ms |= times


def measure(
    problem: Problem, device: torch.device, patience: float, deadline: float = math.inf, timer=None,
    say: Callable[[str], None] = lambda stage: None,
) -> Outcome:  # fmt: skip
    """Routes with the shipped tiles, then the tiles of the quickest of them, each timed for half of `patience` seconds.

    No tiles are tried after `deadline`, of time.perf_counter. say: is told what is being done.
    """
    probe = torch.empty(0, dtype=problem.dtype, device=device)
    backend = _choices.choose_backend("tune", probe)
    key = (problem.op, backend, device.type, device.index, problem.dtype, problem.size)
    outcome = Outcome(problem, _choices.default_route(*key))
    names = _choices.candidates(backend, device.type, device.index, problem.dtype)
    race = Race(outcome, device, timer)
    for name in names:
        if ":" not in name or name == outcome.default:
            say(f"{problem}: {name}")
            race.enter(name)
    share = patience / (2 if any(":" in name for name in names) else 1)
    race.run(share)
    medians = outcome.medians
    near = {name for name, ms in medians.items() if ms <= (1 + REACH) * min(medians.values())}
    tiles = [name for name in names if name not in medians and name.partition(":")[0] in near]
    for left, name in zip(range(len(tiles), 0, -1), tiles, strict=True):
        if time.perf_counter() > deadline:
            outcome.wrong["tiles"] = f"the time is over, {left} not tried"
            break
        say(f"{problem}: {name}")
        race.enter(name)
    if race.steps.keys() - medians.keys():
        against = near | {outcome.default}
        race.steps = {name: step for name, step in race.steps.items() if name in against or name not in medians}
        race.run(share)
    return outcome


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]


# -- which problems ---------------------------------------------------------------------------------------------------


def shapes_of(text: str) -> list[tuple[int, int]]:
    """ "1024x4096,2048x8192" -> pairs. For argparse."""
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        if all(len(pair) == 2 and min(pair) > 0 for pair in pairs):
            return pairs
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"wanted FEATURESxHIDDEN, such as 1024x4096,2048x8192, but got {text!r}")


def of_model(target: str, tokens: int, dtypes: Sequence[torch.dtype] = ()) -> list[Problem]:
    """The problems that a forward of FILE:FUNCTION's model meets, each once, in these dtypes or those that it runs in."""
    model, given, named = model_and_inputs(load(target)())
    choice = _choices._choice
    choice.seen = seen = []
    try:
        with torch.random.fork_rng():
            copy.deepcopy(model).train()(*given, **named)
    finally:
        choice.seen = None
    found = dict.fromkeys(Problem(*sizes, one, tokens) for *sizes, ran in seen for one in dtypes or (ran,))
    if not found:
        raise ValueError(
            f"{target}: the forward met no fused MLP or linear layer; tune a model of ckptkern.nn, or convert it first"
        )
    return list(found)


def problems(args: argparse.Namespace, device: torch.device) -> list[Problem]:
    """What the command line asks for."""
    tokens = args.tokens or (8192 if device.type == "cuda" else 512)
    dtypes = [DTYPES[name] for name in args.dtype or ()]
    if args.model:
        if given := [f"--{name}" for name in ("ops", "shapes") if getattr(args, name)]:
            raise ValueError(f"--model says which products: {' and '.join(given)} cannot be given with it")
        return of_model(args.model, tokens, dtypes)
    sizes = _routes.SIZES[:-1] if device.type == "cuda" else _routes.SIZES[:3]

    def problem(op: str, features: int, hidden: int | None, dtype: torch.dtype) -> Problem:
        if op == "linear_act":
            return Problem(op, features, 0, hidden or features, dtype, tokens)
        return Problem(op, features, hidden or 4 * features, features, dtype, tokens)

    shapes = args.shapes or [(n, None) for n in sizes]
    dtypes = dtypes or [torch.bfloat16, torch.float16]
    return [problem(op, *shape, dtype) for op in args.ops or OPS for dtype in dtypes for shape in shapes]


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``python -m ckptkern tune``."""
    parser.description = (
        "Measure which route is quickest for each product on this machine (our kernels, and with which tiles; cuBLAS and "
        "elementwise kernels; one kernel for two products; on a CPU, 16-bit products as they are or through float32), and "
        "write the table that ckptkern then reads. Nothing is tuned unless you ask."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument(
        "--dtype", nargs="+", choices=tuple(DTYPES), help="default: bf16 and fp16, or what --model runs in"
    )
    parser.add_argument(
        "--shapes", type=shapes_of, help="FEATURESxHIDDEN,... (linear_act: INxOUT); default: one of each size"
    )
    parser.add_argument("--model", metavar="FILE:FUNCTION", help="the products of your model, as `report` loads it")
    parser.add_argument("--tokens", type=int, help="default: 8192, on a CPU 512")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most this long (default: %(default)g)")
    parser.add_argument("--dry-run", action="store_true", help="measure, and write nothing")
    parser.add_argument("--reset", action="store_true", help="remove this machine's table, and measure nothing")


def line(outcome: Outcome) -> str:
    """One problem's result."""
    parts = [f"{route} {ms:.3g} ms" for route, ms in outcome.medians.items()]
    parts += [f"{route}: {why}" for route, why in outcome.wrong.items()]
    return f"{outcome.problem!s:44} {'; '.join(parts) or 'nothing ran'}"


def merged(file, wanted: dict[str, str], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file that is valid here, with these over them."""

    def key(row: dict[str, Any]) -> tuple:
        return row["op"], row["dtype"], row["features"]

    try:
        _tuned.read(file, wanted)
        before = _tuned.rows(file)
    except (OSError, ValueError):
        before = []
    return list({key(row): row for row in (*before, *rows)}.values())


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the table; returns the exit status."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("ckptkern tune: there is no CUDA device", file=sys.stderr)
            return 2
        device = torch.device("cuda", torch.cuda.current_device())
    file, machine = _tuned.path(device.type, device.index), _tuned.machine(device.type, device.index)
    if args.reset:
        known = file.exists()
        file.unlink(missing_ok=True)
        print(f"removed {file}" if known else f"there is no table of this machine: {file}")
        return 0
    try:
        todo = problems(args, device)
        if not args.dry_run:
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()  # before minutes of measuring
    except (ValueError, OSError) as error:
        print(f"ckptkern tune: {error}", file=sys.stderr)
        return 2
    print(f"{machine['device']}, torch {machine['torch']}: {len(todo)} products, at most {args.minutes:g} minutes")
    outcomes, rows, start = [], [], time.perf_counter()
    # Whatever CKPTKERN_BACKEND says: routes of kernels are what a table is for.
    with progress("tune", len(todo)) as bar, ops.backend("auto"):
        for n, problem in enumerate(todo):
            left = 60 * args.minutes - (time.perf_counter() - start)
            if left <= 0:
                print(f"the time is over: {len(todo) - n} of {len(todo)} products are left; --minutes gives more")
                break
            outcomes.append(
                measure(
                    problem,
                    device,
                    left / (len(todo) - n),
                    start + 60 * args.minutes,
                    say=lambda text, n=n: bar(text, n),
                )
            )
            print(line(outcomes[-1]), flush=True)
            rows = rows_of(outcomes)
            if rows and not args.dry_run:
                _tuned.write(file, machine, merged(file, machine, rows))  # after each: an interrupt loses nothing
    for row in rows:
        print(f"{row['op']} {row['dtype']}, {_routes.size_text(_routes.SIZES.index(row['features']))}: {row['route']}")
    if args.dry_run or not rows:
        print("nothing is written")
        return 0 if rows else 1
    print(f"the table has these now: {file}\nprocesses that start from now on read it; `tune --reset` removes it")
    return 0
