"""What each region of a model saves, and what it costs, in each of its strategies.

One forward of the model at first, with saved-tensor hooks that count and hold nothing: who is called with what, and what is
saved outside of the regions. Then one region of each kind runs alone in each of its strategies, forward and backward, on the
input that it had in the model: its saved bytes, matmuls, transient memory and time. What it saves of its inputs and outputs
has a name in the model, by which it is counted once if a neighbour saves it too: so the bytes of any mixture of strategies
are those of a union, exact, and not a sum.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from .. import memory
from ..conversion.alike import call_kinds, same_inside
from ..conversion.protection import seeded, unmoved
from ..conversion.trace import leaves_of, mapped
from ..ops.dispatch.choices import RECOMPUTING
from ..ops.registration.functions import bodies_seen
from ..storage import offload
from .live import Live, Loss, Step, gradients_as_there, loss_of, step_of
from .segments import Segment, Strategy, Workspaces, original_forwards
from .table import DOES_NOT_FIT, Call, Cost, Held, Kind, Measured, Table
from .timing import Clock, Rates, estimated

# At most so many rounds of timings; so many seconds, from the fourth round on; and so many before it, where a round is so long
# that its noise is small. On a CPU the first pass over the strategies is such a round if it is as long.
ROUNDS, PATIENCE, LONG = 15, 2.0, 5.0


# -- bytes


def parts_of(role: str, values: Any) -> Iterator[tuple[tuple, torch.UntypedStorage]]:
    """(place, storage) of all tensors inside."""
    for i, value in enumerate(leaves_of(values)):
        if isinstance(value, Tensor):
            for j, part in enumerate(memory.dense_parts(value)):
                yield (role, i, j), part.untyped_storage()


def storages_of(tensor: Tensor) -> dict[StorageWeakRef, int]:
    return {StorageWeakRef(storage): storage.nbytes() for _, storage in parts_of("", tensor)}


def held_of(saved: dict[StorageWeakRef, int], names: dict[StorageWeakRef, tuple | None]) -> Held:
    """Of these storages; those whose name is None are parameters and buffers, which do not count."""
    shared = {names[key]: nbytes for key, nbytes in saved.items() if names.get(key) is not None}
    return Held(sum(nbytes for key, nbytes in saved.items() if key not in names), shared)


class Called(NamedTuple):
    """A call of a region. names: of its inputs and outputs, by their place: their name in the model, and their bytes. hidden:
    it is inside a checkpoint of the model's own, for which nothing that it saves is saved."""

    call: Call
    names: dict[tuple, tuple[tuple | None, int]]
    hidden: bool

    def held(self, alone: Held) -> Held:
        """What this call saves in the model, if it is `alone` by the places of inputs and outputs."""
        if self.hidden:
            return Held()
        named = [self.names[place] for place in alone.shared]
        return Held(alone.own, {name: nbytes for name, nbytes in named if name is not None})


class Recorder:
    """Who is called with what in one forward of the model, and what is saved outside of all regions."""

    def __init__(self, model: nn.Module, segments: Sequence[Segment]):
        self.segments = segments
        known = (storages_of(tensor) for tensor in (*model.parameters(), *model.buffers()))
        self.known: dict[StorageWeakRef, tuple | None] = dict.fromkeys(key for storages in known for key in storages)
        self.names = dict(self.known)
        self.outside: dict[StorageWeakRef, int] = {}
        self.calls: dict[int, list[Called]] = {}
        self.within: list[Called] = []
        self.count = 0

    def save(self, tensor: Tensor) -> None:
        if not self.within:
            self.outside.update(storages_of(tensor))

    def name(self, role: str, values: Any) -> None:
        for place, storage in parts_of(role, values):
            name = self.names.setdefault(StorageWeakRef(storage), (self.count, *place))
            self.within[-1].names[place] = name, storage.nbytes()

    def enter(self, segment: int, args: tuple, kwargs: dict[str, Any]) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hidden = not torch.is_grad_enabled() or getattr(hooks and hooks[1], "__module__", "") in RECOMPUTING
        called = Called(mapped(as_input, (args, kwargs)), {}, hidden)
        self.calls.setdefault(segment, []).append(called)
        self.count += 1
        self.within.append(called)
        self.name("in", (args, kwargs))

    def leave(self, output: Any) -> None:
        self.name("out", output)
        self.within.pop()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for i, segment in enumerate(self.segments):
                before = segment.module.register_forward_pre_hook(
                    lambda module, args, kwargs, i=i: self.enter(i, args, kwargs), with_kwargs=True
                )
                after = segment.module.register_forward_hook(lambda module, args, output: self.leave(output))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @property
    def rest(self) -> Held:
        return held_of(self.outside, self.names)


def as_input(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def record(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], segments: Sequence[Segment], loss: Loss | None = None
) -> Recorder:
    """Runs one forward of the model in training mode, and its loss, of which nothing is left but the figures and the calls."""
    recorder = Recorder(model, segments)
    with seeded(), unmoved(model), torch.enable_grad(), recorder.hooks(), memory.counting(recorder.save, hold=False):
        model.train()
        output = model(*args, **kwargs)
        if loss is not None:
            loss_of(output, loss)
    return recorder


# -- time


@contextmanager
def no_main_grad(module: nn.Module) -> Iterator[None]:
    """Megatron-LM's sums of gradients are out of the way for a while, so that backward adds nothing to them."""
    taken = [(p, p.main_grad) for p in module.parameters() if hasattr(p, "main_grad")]
    try:
        for p, _ in taken:
            del p.main_grad
        yield
    finally:
        for p, main_grad in taken:
            p.main_grad = main_grad


def step(
    module: nn.Module, call: Call, seeds: list[Tensor] | None = None
) -> tuple[Callable[[], Any], Callable[[], list[Tensor | None]]]:
    """(forward, backward, which returns gradients and accumulates none). seeds: the outputs' gradients; an empty list gets
    them in the first backward, so that later ones need not make them."""
    seeds = [] if seeds is None else seeds
    leaves = mapped(as_input, call)
    wanted = [one for one in leaves_of(leaves) if isinstance(one, Tensor) and one.requires_grad]
    wanted += [p for p in module.parameters() if p.requires_grad]
    args, kwargs = mapped(as_result, leaves)
    outputs: list[Tensor] = []

    def forward() -> None:
        results = leaves_of(module(*args, **kwargs))
        outputs.extend(one for one in results if isinstance(one, Tensor) and one.requires_grad)

    def backward() -> list[Tensor | None]:
        if not outputs or not wanted:
            return []
        if not seeds:
            seeds.extend(map(torch.ones_like, outputs))
        return list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))

    return forward, backward


def as_result(tensor: Tensor) -> Tensor:
    """An input is the result of something: modules may write into it, and FlopCounterMode refuses leaves. Its strides decide
    what a region copies, and saves."""
    if not tensor.requires_grad:
        return tensor
    result = tensor.clone()
    if result.stride() == tensor.stride() or 0 in tensor.stride():
        return result
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def measure_alone(
    kind: Kind, strategies: Sequence[Strategy | None], device: torch.device, known: dict, rates: Rates | None = None
) -> None:
    """Fills the kind's costs and what it saves in each strategy; None is its original forward. known: the storages of the
    model's parameters and buffers. rates: of a GPU whose times are estimated on the meta device. The rounds of timings
    interleave the strategies."""
    segment, call = kind.first, kind.call
    before, clock, seeds = segment.strategy, Clock(device), []
    kind.costs, kind.held = [DOES_NOT_FIT] * len(strategies), [Held()] * len(strategies)
    times: dict[int, list[float]] = {}  # of the strategies that fit

    @contextmanager
    def running(strategy: Strategy | None) -> Iterator[None]:
        if strategy is None:
            with original_forwards(segment.module):
                yield
        else:
            segment.set(strategy)
            yield

    def prepare() -> Callable[[], Any]:
        forward, backward = step(segment.module, call, seeds)
        return lambda: (forward(), backward())

    try:
        with seeded(), unmoved(segment.module), torch.enable_grad(), no_main_grad(segment.module):
            segment.module.train()
            start = time.perf_counter()
            with (
                nullcontext(memory.Timeline()) if device.type == "meta" else memory.memory_timeline(device) as timeline
            ):
                for i in (0, *range(len(strategies))):  # the first twice: its first run loads libraries
                    with running(strategies[i]), suppress(torch.OutOfMemoryError):
                        mark = marks(i, timeline, device)
                        kind.costs[i], kind.held[i] = watched_alone(segment.module, call, known, mark)
                        if device.type != "cpu":
                            copied = 0 if rates is None else to_host(kind, strategies, i)
                            kind.costs[i] = by_formulas(kind.costs[i], segment.module, call, rates, copied)
                        times[i] = []
            for i in times if device.type != "meta" else ():
                kind.costs[i] = as_allocated(kind.costs[i], timeline, i)
            for done in range(ROUNDS if device.type != "meta" else 0):
                if time.perf_counter() - start > (PATIENCE if done >= 3 else LONG) and (done or device.type == "cpu"):
                    break
                for i in times:
                    with running(strategies[i]):
                        times[i].append(clock(prepare))
    finally:
        segment.set(before)
    for i, own in times.items():
        if own:
            kind.costs[i] = kind.costs[i]._replace(seconds=statistics.median(own))


def to_host(kind: Kind, strategies: Sequence[Strategy | None], i: int) -> int:
    """Bytes that are copied to the host in a strategy: which stay on the device in the same mode."""
    strategy = strategies[i]
    if strategy is None or not isinstance(strategy.store, offload):
        return 0
    return kind.held[strategies.index(Strategy(strategy.mode))].bytes - kind.held[i].bytes


def by_formulas(cost: Cost, module: nn.Module, call: Call, rates: Rates | None, copied: int) -> Cost:
    """With the flops of library ops by their formulas, since a kernel's matmuls are no ops of PyTorch's, and the seconds that
    the rates give, if there are some. Copies to the host and back run beside the forward and backward of a region; what takes
    longer is what the region takes."""
    spans = []
    with FlopCounterMode(display=False) as flops:
        for run in step(module, call):
            if rates is None:
                run()
            else:
                spans.append(max(estimated(run, rates), copied / rates.host))
    return cost._replace(flops=flops.get_total_flops(), seconds=sum(spans) if spans else None)


def marks(i: int, timeline: memory.Timeline, device: torch.device) -> Callable[[str], None]:
    """Notes moments of a pass; on the meta device there is no timeline."""
    return (lambda name: None) if device.type == "meta" else (lambda name: timeline.mark(f"{i} {name}"))


def as_allocated(cost: Cost, timeline: memory.Timeline, i: int) -> Cost:
    """With what kernels of libraries take for themselves, which no op returns."""
    rises = []
    for first, last, seen in (("forward", "seeds", cost.forward), ("backward", "end", cost.backward)):
        start, *heights = timeline.between(f"{i} {first}", f"{i} {last}")
        rises.append(max(seen, max(heights, default=start) - start))
    return cost._replace(
        forward=rises[0], backward=rises[1], transient=max(0, cost.transient + rises[1] - cost.backward)
    )


class Seed(torch.autograd.Function):
    """Gradients of ones, which backward makes and nothing else holds, as in a model; then it calls begin()."""

    @staticmethod
    def forward(ctx, begin: Callable[[], None], *results: Tensor) -> Tensor:
        ctx.begin, ctx.like = begin, [(one.shape, one.dtype) for one in results]
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        seeds = [torch.ones(shape, dtype=dtype, device=grad.device) for shape, dtype in ctx.like]
        ctx.begin()
        return None, *seeds


def watched_alone(
    module: nn.Module, call: Call, known: dict[StorageWeakRef, tuple | None], mark: Callable[[str], None]
) -> tuple[Cost, Held]:
    """One forward and backward, seen op by op, in which gradients are made or added to as in the model's step: the cost, and
    what is saved, by the places of inputs and outputs. seconds are those of a pass that is watched. mark: notes moments."""
    leaves = mapped(as_input, call)
    inputs = [one for one in leaves_of(leaves) if isinstance(one, Tensor)]
    names, saved = dict(known), {}
    start = 0

    def name(role: str, values: Any) -> None:
        for place, storage in parts_of(role, values):
            names.setdefault(StorageWeakRef(storage), place)

    def begin_backward() -> None:
        nonlocal start
        mark("backward")
        live.restart()
        start = live.now()

    with gradients_as_there(module) as there, bodies_seen():
        live = Live([*module.parameters(), *module.buffers(), *there, *inputs])
        with live:
            args, kwargs = given = mapped(as_result, leaves)
            name("in", given)
            live.restart()
            before = live.now()
            mark("forward")
            begin = time.perf_counter()
            with memory.counting(lambda tensor: saved.update(storages_of(tensor))):
                output = module(*args, **kwargs)
            name("out", output)
            results = [one for one in leaves_of(output) if isinstance(one, Tensor) and one.requires_grad]
            del output, args, kwargs, given  # in a model nothing but the graph holds them
            forward = live.restart() - before
            mark("seeds")
            if results:
                root = Seed.apply(begin_backward, *results)
                results.clear()
                root.backward()
            else:
                begin_backward()
            seconds = time.perf_counter() - begin
            backward = max(0, live.restart() - start)
            mark("end")
        made = [one.grad for one in (*module.parameters(), *inputs) if one.is_leaf and one.grad is not None]
        new = sum(grad.nbytes for grad in made if not any(grad is one for one in there))
    return Cost(seconds, live.flops, forward, backward, max(0, backward - new)), held_of(saved, names)


# -- the table


def kind_of(kinds: list[Kind], segment: Segment, call: Call) -> int:
    """The place of the kind that the region is of, which may be a new one."""
    for i, kind in enumerate(kinds):
        with suppress(Exception):  # comparing someone's objects may raise: it is then of another kind
            if is_alike(kind.first, kind.call, segment, call):
                return i
    kinds.append(Kind(segment, call))
    return len(kinds) - 1


def is_alike(a: Segment, call: Call, b: Segment, other: Call) -> bool:
    return (
        a.replaced_by == b.replaced_by
        and call_kinds([call]) == call_kinds([other])
        and gradients_of(call) == gradients_of(other)
        and same_inside(b.name, b.module, a.name, a.module)
    )


def gradients_of(call: Call) -> list[bool]:
    return [one.requires_grad for one in leaves_of(call) if isinstance(one, Tensor)]


def device_of(model: nn.Module, call: Call) -> torch.device:
    tensors = [*model.parameters(), *(one for one in leaves_of(call) if isinstance(one, Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def measure(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    segments: Sequence[Segment],
    strategies: Sequence[list[Strategy]],
    shown: Callable[[str], None],
    peaks: bool = False,
    eager: bool = False,
    rates: Rates | None = None,
    loss: Loss | None = None,
) -> Table:
    """Returns the table of a model's regions in their strategies. The model, modes and random states are afterwards as before.

    strategies: of each region. shown: is told what is measured. peaks: with a step at "full", from which peaks are predicted.
    eager: with the original forwards, where there are some. rates: of the GPU that a model on the meta device is planned for,
    whose default workspace the ops then have. loss: as in `loss_of`.
    """
    device = device_of(model, (args, kwargs))
    before = [segment.strategy for segment in segments]
    shown("a forward")
    try:
        for segment, own in zip(segments, strategies, strict=True):
            segment.set(own[-1])
        recorded = record(model, args, kwargs, segments, loss)
    finally:
        for segment, strategy in zip(segments, before, strict=True):
            segment.set(strategy)
    kinds: list[Kind] = []
    of_calls = {i: [kind_of(kinds, segments[i], one.call) for one in calls] for i, calls in recorded.calls.items()}
    workspaces, workspace = Workspaces(model), None if rates is None else rates.memory // 32
    with workspaces.at(workspace):
        for i, kind in enumerate(kinds):
            shown(f"{kind.first.name or 'the model'} alone")
            own = next(strategies[place] for place, numbers in of_calls.items() if i in numbers)
            original = [None] if eager and kind.first.has_eager else []
            measure_alone(kind, [*own, *original], device, recorded.known, rates)
    rows = []
    for i, numbers in sorted(of_calls.items()):  # of the regions that the model calls
        alone = zip(*(kinds[number].held for number in numbers), strict=True)
        held = [joined([c.held(one) for c, one in zip(recorded.calls[i], of_call, strict=True)]) for of_call in alone]
        rows.append(Measured(segments[i], numbers, strategies[i], held))
    eager_rest = None
    if eager and any(segment.has_eager for segment in segments):
        with original_forwards(model):
            eager_rest = record(model, args, kwargs, segments, loss).rest
    table = Table(rows, kinds, recorded.rest, eager_rest, device, workspaces, workspace, rates, loss)
    if peaks:
        shown('memory over a step at "full"')
        table.base = stepped(table, model, args, kwargs, table.uniform("full"))
    return table


def narrower(
    table: Table, model: nn.Module, args: tuple, kwargs: dict[str, Any], shown: Callable[[str], None]
) -> Table:
    """The same regions in a smaller workspace: the power of two that is at most a quarter of what the table's takes."""
    most = table.rise(table.uniform("full"))
    size = 1 << max(0, min(table.workspace or most, most).bit_length() - 3)
    kinds = [Kind(kind.first, kind.call) for kind in table.kinds]
    other = dataclasses.replace(table, kinds=kinds, workspace=size)
    known = Recorder(model, []).known
    with table.workspaces.at(size):
        for i, kind in enumerate(kinds):
            shown(f"{kind.first.name or 'the model'} alone, with a workspace of {memory.format_size(size)}")
            measure_alone(
                kind, next(row for row in table.rows if i in row.kinds).strategies, table.device, known, table.rates
            )
    other.base = stepped(other, model, args, kwargs, table.uniform("full"))
    return other


def joined(held: Sequence[Held]) -> Held:
    """Of all calls of a region."""
    return Held(sum(one.own for one in held), {name: n for one in held for name, n in one.shared.items()})


def stepped(
    table: Table, model: nn.Module, args: tuple, kwargs: dict[str, Any], chosen: Sequence[int], all_there: bool = False
) -> Step:
    """A step of the model with its regions in these strategies and the table's workspace, which are afterwards as before."""
    before = [row.segment.strategy for row in table.rows]
    try:
        for row, strategy in zip(table.rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])
        with table.workspaces.at(table.workspace):
            return step_of(model, args, kwargs, table.modules, table.device, all_there, table.loss)
    finally:
        for row, strategy in zip(table.rows, before, strict=True):
            row.segment.set(strategy)
