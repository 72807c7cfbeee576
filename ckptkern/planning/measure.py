"""What each region of a model saves, and what it costs, in each of its strategies.

Saved bytes: the model's forward runs once for each strategy, with saved-tensor hooks that count and hold nothing, so a model
may be measured that would not fit. A storage that several regions may save, such as what one hands to the next, has one name
in all of these runs, so that the bytes of any mixture of strategies are those of a union: exact, and not a sum.

Time, matmuls and workspace: one region of each kind runs alone, forward and backward, on the input that it had in the model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from .. import memory
from ..conversion.alike import call_kinds, same_inside
from ..conversion.check import unmoved
from ..conversion.trace import leaves_of, mapped
from ..ops.registration.functions import bodies_seen
from .live import Live, Step, gradients_as_there, step_of
from .segments import Segment, Strategy, original_forwards
from .timing import Clock

Call = tuple[tuple, dict[str, Any]]
REST = -1  # the owner of what is saved outside of all regions
# At most so many rounds of timings; so many seconds, from the fourth round on; and so many before it, where a round is so long
# that its noise is small.
ROUNDS, PATIENCE, LONG = 15, 2.0, 5.0


class Held(NamedTuple):
    """Bytes that one owner saves: storages that no other sees, and others by name."""

    own: int = 0
    shared: dict[tuple, int] = {}  # noqa: RUF012 (never written)

    @property
    def bytes(self) -> int:
        return total([self])


class Cost(NamedTuple):
    """Of one forward and backward. seconds, workspace: None on the meta device. flops: of matmuls. workspace: how far
    backward rises above what forward saved, besides gradients."""

    seconds: float | None
    flops: int
    workspace: int | None


class Rise(NamedTuple):
    """How far the forward and the backward of a region alone rise above what was there when they began."""

    forward: int = 0
    backward: int = 0


DOES_NOT_FIT = Cost(math.inf, 0, None)  # one region alone


@dataclass
class Kind:
    """Segments that are alike, of which one is timed."""

    first: Segment
    call: Call
    costs: list[Cost] = field(default_factory=list)  # in the order of its strategies
    rises: list[Rise] = field(default_factory=list)
    eager: Cost | None = None


class Measured(NamedTuple):
    """One region of a table. eager: what it saved before convert, None where there was no other forward."""

    segment: Segment
    kind: int
    calls: int
    strategies: list[Strategy]
    held: list[Held]
    eager: Held | None


@dataclass
class Table:
    """What choices are made from. rest, eager_rest: what is saved outside of the regions."""

    rows: list[Measured]
    kinds: list[Kind]
    rest: Held
    eager_rest: Held | None
    device: torch.device
    base: Step | None = None  # with every region at "full", if peaks are asked for

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The regions' names and modules."""
        return [(row.segment.name, row.segment.module) for row in self.rows]

    @property
    def outside(self) -> int:
        """Bytes saved outside of all regions that no region saves."""
        seen = {name for row in self.rows for held in row.held for name in held.shared}
        return self.rest.own + sum(n for name, n in self.rest.shared.items() if name not in seen)

    def workspaces(self, chosen: Sequence[int]) -> list[int]:
        return [self.cost(row, strategy).workspace or 0 for row, strategy in zip(self.rows, chosen, strict=True)]

    def saved(self, chosen: Sequence[int]) -> int:
        """Bytes that the model's forward saves if the regions run in these strategies."""
        return total([self.rest, *(row.held[strategy] for row, strategy in zip(self.rows, chosen, strict=True))])

    @property
    def eager_saved(self) -> int | None:
        """Bytes that the model saved before convert."""
        if self.eager_rest is None or any(row.eager is None for row in self.rows):
            return None
        return total([self.eager_rest, *(row.eager for row in self.rows)])

    def cost(self, row: Measured, strategy: int) -> Cost:
        seconds, flops, workspace = self.kinds[row.kind].costs[strategy]
        return Cost(None if seconds is None else seconds * row.calls, flops * row.calls, workspace)

    def peak(self, chosen: Sequence[int]) -> int:
        """What the step is predicted to allocate at its peak if the regions run in these strategies: the step that was
        recorded, with what its regions save and their rises in place of what they were.

        In a stretch of the step the regions in `done` hold what they save. Beside that stands what the recorded step had, and
        what kernels took for themselves at its peak."""
        base, highest = self.uniform("full"), 0
        assert self.base is not None
        for stretch in self.base.stretches:
            mode = self._moved(stretch.done, base, chosen)
            if stretch.segment is None:
                highest = max(highest, stretch.highest + mode)
                continue
            row = self.rows[stretch.segment]
            was, now = (self.kinds[row.kind].rises[strategies[stretch.segment]] for strategies in (base, chosen))
            if stretch.backward:
                mode = self._moved(stretch.done | {stretch.segment}, base, chosen)
            rise = now.backward - was.backward if stretch.backward else now.forward - was.forward
            highest = max(highest, stretch.highest + mode + rise)
        return highest + self.base.unseen

    def _moved(self, segments: frozenset[int], base: Sequence[int], chosen: Sequence[int]) -> int:
        """How many bytes more these regions save as chosen."""
        now, was = ([self.rest, *(self.rows[i].held[which[i]] for i in segments)] for which in (chosen, base))
        return total(now) - total(was)

    def uniform(self, mode: str) -> list[int]:
        """Every region in one mode."""
        return [
            row.strategies.index(Strategy(mode))
            if Strategy(mode) in row.strategies
            else row.strategies.index(Strategy("full"))
            for row in self.rows
        ]


def total(held: Sequence[Held]) -> int:
    named: dict[tuple, int] = {}
    for one in held:
        named.update(one.shared)
    return sum(one.own for one in held) + sum(named.values())


# -- bytes


class Recorder:
    """Who saves what in one forward of the model, and the first call of each region."""

    def __init__(self, model: nn.Module, segments: Sequence[Segment]):
        self.segments = segments
        self.parameters = {
            StorageWeakRef(part.untyped_storage())
            for tensor in (*model.parameters(), *model.buffers())
            for part in memory.dense_parts(tensor)
        }
        self.saved: dict[int, dict[StorageWeakRef, int]] = {}
        self.names: dict[StorageWeakRef, tuple] = {}
        self.calls: dict[int, Call] = {}  # the first of each region
        self.counts: dict[int, int] = {}
        self.within: list[int] = []
        self.count = 0

    def save(self, tensor: Tensor) -> None:
        own = self.saved.setdefault(self.within[-1] if self.within else REST, {})
        for part in memory.dense_parts(tensor):
            storage = part.untyped_storage()
            own[StorageWeakRef(storage)] = storage.nbytes()

    def name(self, role: str, values: Any) -> None:
        for i, value in enumerate(leaves_of(values)):
            if isinstance(value, Tensor):
                for j, part in enumerate(memory.dense_parts(value)):
                    self.names.setdefault(StorageWeakRef(part.untyped_storage()), (role, self.count, i, j))

    def enter(self, segment: int, args: tuple, kwargs: dict[str, Any]) -> None:
        self.count += 1
        self.within.append(segment)
        self.name("in", (args, kwargs))
        self.counts[segment] = self.counts.get(segment, 0) + 1
        if segment not in self.calls:
            self.calls[segment] = mapped(as_input, (args, kwargs))

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

    def held(self) -> dict[int, Held]:
        owners: dict[StorageWeakRef, int] = {}
        for saved in self.saved.values():
            for key in saved:
                owners[key] = owners.get(key, 0) + 1
        for i, (key, count) in enumerate(owners.items()):
            if count > 1:  # neither input nor output of a region: a weight that autocast cast once for all
                self.names.setdefault(key, ("other", i))
        found = {}
        for owner, saved in self.saved.items():
            saved = {key: nbytes for key, nbytes in saved.items() if key not in self.parameters}
            shared = {self.names[key]: nbytes for key, nbytes in saved.items() if key in self.names}
            found[owner] = Held(sum(saved.values()) - sum(shared.values()), shared)
        return found


def as_input(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def record(model: nn.Module, args: tuple, kwargs: dict[str, Any], segments: Sequence[Segment]) -> Recorder:
    """One forward of the model in training mode, of which nothing is left but the figures."""
    recorder = Recorder(model, segments)
    with unmoved(model), torch.enable_grad(), recorder.hooks(), memory.counting(recorder.save, hold=False):
        model.train()
        model(*args, **kwargs)
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
    """An input is the result of something: modules may write into it, and FlopCounterMode refuses leaves."""
    return tensor.clone() if tensor.requires_grad else tensor


def costs(kind: Kind, strategies: Sequence[Strategy | None], device: torch.device) -> list[Cost]:
    """Of one region in each strategy; None is its original forward. The rounds of timings interleave the strategies."""
    segment, call = kind.first, kind.call
    before, clock, seeds = segment.strategy, Clock(device), []
    kind.rises = [Rise()] * len(strategies)

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

    found: dict[int, tuple[int, int | None, list[float]]] = {}  # of the strategies that fit
    try:
        with unmoved(segment.module), torch.enable_grad(), no_main_grad(segment.module):
            segment.module.train()
            for i, strategy in enumerate(strategies):
                with running(strategy), suppress(torch.OutOfMemoryError):
                    forward, backward = step(segment.module, call, seeds)
                    with FlopCounterMode(display=False) as flops:
                        forward()
                        backward()
                    kind.rises[i], work = rises(segment.module, call)
                    found[i] = flops.get_total_flops(), None if device.type == "meta" else work, []
            start = time.perf_counter()
            for done in range(ROUNDS if device.type != "meta" else 0):
                if time.perf_counter() - start > (PATIENCE if done >= 3 else LONG):
                    break
                for i, (_, _, times) in found.items():
                    with running(strategies[i]):
                        times.append(clock(prepare))
    finally:
        segment.set(before)
    return [cost_of(*found[i]) if i in found else DOES_NOT_FIT for i in range(len(strategies))]


def cost_of(flops: int, work: int | None, times: list[float]) -> Cost:
    return Cost(statistics.median(times) if times else None, flops, work)


def rises(module: nn.Module, call: Call) -> tuple[Rise, int]:
    """(rises, workspace) of one forward and backward, in which gradients are made or added to as in the model's step."""
    leaves = mapped(as_input, call)
    args, kwargs = given = mapped(as_result, leaves)
    inputs = [one for one in (*leaves_of(leaves), *leaves_of(given)) if isinstance(one, Tensor)]
    with gradients_as_there(module) as there, bodies_seen():
        live = Live([*module.parameters(), *module.buffers(), *there, *inputs])
        with live:
            results = [
                one for one in leaves_of(module(*args, **kwargs)) if isinstance(one, Tensor) and one.requires_grad
            ]
            forward = live.restart()
            seeds = [torch.ones_like(one) for one in results]
            live.restart()
            start = live.now()
            if results:
                torch.autograd.backward(results, seeds)
            backward = max(0, live.restart() - start)
        made = [one.grad for one in (*module.parameters(), *inputs) if one.is_leaf and one.grad is not None]
        new = sum(grad.nbytes for grad in made if not any(grad is one for one in there))
    return Rise(forward, backward), max(0, backward - new)


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
) -> Table:
    """The table of a model's regions in their strategies. The model, its modes and random states are afterwards as before.

    strategies: of each region. shown: is told what is measured. peaks: with a step at "full", from which peaks are predicted.
    """
    before = [segment.strategy for segment in segments]
    device = device_of(model, (args, kwargs))
    records = []
    try:
        for i in range(max(map(len, strategies), default=1)):
            shown(f"saved bytes, strategy {i + 1}")
            for segment, own in zip(segments, strategies, strict=True):
                segment.set(own[min(i, len(own) - 1)])
            records.append(record(model, args, kwargs, segments))
    finally:
        for segment, strategy in zip(segments, before, strict=True):
            segment.set(strategy)
    held = [one.held() for one in records]
    eager_held = None
    if any(segment.has_eager for segment in segments):
        with original_forwards(model):
            eager_held = record(model, args, kwargs, segments).held()
    rows, kinds = [], []
    for i, (segment, own) in enumerate(zip(segments, strategies, strict=True)):
        if i not in records[0].calls:
            continue  # the model does not call it
        saved = [held[min(j, len(held) - 1)].get(i, Held()) for j in range(len(own))]
        eager_saved = eager_held.get(i, Held()) if segment.has_eager else None
        kind = kind_of(kinds, segment, records[0].calls[i])
        rows.append(Measured(segment, kind, records[0].counts[i], own, saved, eager_saved))
    for i, kind in enumerate(kinds):
        shown(f"time of {kind.first.name or 'the model'}")
        row = next(row for row in rows if row.kind == i)
        has_eager = row.eager is not None
        found = costs(kind, [*row.strategies, *([None] if has_eager else [])], device)
        kind.costs, kind.eager = found[: len(row.strategies)], found[-1] if has_eager else None
    eager_rest = None if eager_held is None else eager_held.get(REST, Held())
    table = Table(rows, kinds, held[0].get(REST, Held()), eager_rest, device)
    if peaks:
        shown('memory over a step at "full"')
        table.base = stepped(table, model, args, kwargs, table.uniform("full"))
    return table


def stepped(
    table: Table, model: nn.Module, args: tuple, kwargs: dict[str, Any], chosen: Sequence[int], all_there: bool = False
) -> Step:
    """A step of the model with its regions in these strategies, which are afterwards as before."""
    before = [row.segment.strategy for row in table.rows]
    try:
        for row, strategy in zip(table.rows, chosen, strict=True):
            row.segment.set(row.strategies[strategy])
        return step_of(model, args, kwargs, table.modules, table.device, all_there)
    finally:
        for row, strategy in zip(table.rows, before, strict=True):
            row.segment.set(strategy)
