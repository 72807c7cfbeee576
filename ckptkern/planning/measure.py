"""Measures what each region of a model saves and costs in each of its strategies.

One forward of the model records the calls of each region and what is saved outside of the regions. Then one region of each kind
runs alone in each strategy, forward and backward, on its input from the model: its saved bytes, matmuls, transient memory and
time are measured. Saved inputs and outputs have names in the model, so that a tensor saved by two neighbours counts once. The
bytes of any combination of strategies are therefore those of a union, and exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .. import memory
from ..conversion.alike import call_kinds, same_inside
from ..conversion.binding import without_caches
from ..conversion.protection import no_trace
from ..conversion.recorder import (
    Names,
    Saved,
    Step,
    as_input,
    device_of,
    owned_by,
    set_gradients,
    step_of,
)
from ..conversion.trace import Call, mapped, tensors_in
from ..storage import offload
from .segments import Segment, Strategy, Workspaces, in_strategies
from .table import DOES_NOT_FIT, OWN, Cost, Example, Held, Kind, Measured, Table, total
from .timing import Clock, Rates, Roofline

# At most ROUNDS rounds of timing. They end after PATIENCE seconds from the fourth round on, and after LONG seconds before it,
# because long rounds have little noise. On a CPU the first pass over the strategies counts as such a round.
ROUNDS, PATIENCE, LONG = 15, 2.0, 5.0
Shown = Callable[[str], None]  # called with what is being measured


# -- bytes


def held_of(saved: Saved, step: Step) -> Held:
    """Returns the saved bytes by their names in the step. Storages named None are parameters and buffers, and do not
    count."""
    held: Held = {}
    for key, nbytes in saved.items():
        if (name := step.names.get(key, OWN)) is not None:
            held[name] = held.get(name, 0) + nbytes
    return held


# -- one region alone


class Seeds(Function):
    """Joins a region's results to one root, for which backward creates gradients of ones that nothing else holds, as in a
    model."""

    @staticmethod
    def forward(ctx, *results: Tensor) -> Tensor:
        ctx.like = [(result.shape, result.dtype) for result in results]
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return tuple(torch.ones(shape, dtype=dtype, device=grad.device) for shape, dtype in ctx.like)


def as_result(tensor: Tensor) -> Tensor:
    """Returns a copy of an input that is not a leaf, so that modules may write into it. It keeps the strides, which decide
    what a region copies and saves."""
    if not tensor.requires_grad:
        return tensor
    result = tensor.clone()
    if result.stride() == tensor.stride() or 0 in tensor.stride():
        return result
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


class Alone(nn.Module):
    """Runs a region as a model of its own: takes a call and returns the root of the results, which only the graph holds."""

    def __init__(self, region: nn.Module):
        super().__init__()
        self.region = region

    def forward(self, args: tuple, kwargs: dict) -> Tensor:
        args, kwargs = mapped(as_result, (args, kwargs))
        output = self.region(*args, **kwargs)
        results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        return Seeds.apply(*results) if results else torch.zeros((), requires_grad=True)


def watched_alone(alone: Alone, call: Call, names: Names) -> tuple[Cost, Held]:
    """Records one forward and backward. Returns the cost, whose seconds include the recording, and what is saved, named by
    the places of inputs and outputs. names: storages of the model's parameters and buffers."""
    step = Step()
    step.names |= names
    step_of(alone, (call, {}), [("", alone.region)], step=step)
    forward = next(stretch for stretch in step.stretches if stretch.region is not None)
    backward = list(itertools.dropwhile(lambda stretch: not stretch.backward or stretch.region is None, step.stretches))
    rise = max((stretch.highest - backward[0].start for stretch in backward), default=0)
    cost = Cost(step.seconds, step.flops, forward.highest - forward.start, max(0, rise), max(0, rise - step.gradients))
    return cost, held_of(step.calls[0][0].saved, step)


def measure_alone(kind: Kind, names: Names, rates: Rates | None) -> None:
    """Measures the kind's costs and saved bytes in each strategy. Rounds of timing interleave the strategies. names: as in
    `watched_alone`. rates: of the GPU whose times are estimated on the meta device."""
    segment, strategies, alone = kind.first, kind.strategies, Alone(kind.first.module)
    call = mapped(as_input, without_caches(kind.call))
    device, start = device_of(alone, call), time.perf_counter()
    kind.costs, kind.held = [DOES_NOT_FIT] * len(strategies), [{}] * len(strategies)
    times: dict[int, list[float]] = {}  # of the strategies that fit
    leaves = [tensor for tensor in (*alone.parameters(), *tensors_in(call)) if tensor.is_leaf]

    def prepare():
        set_gradients(leaves)
        return lambda: alone(*call).backward()

    for i in (0, *range(len(strategies))):  # the first strategy twice: its first run loads libraries
        with in_strategies([segment], [strategies[i]]), suppress(torch.OutOfMemoryError):
            kind.costs[i], kind.held[i] = watched_alone(alone, call, names)
            times[i] = []
    with no_trace(alone), torch.enable_grad():
        alone.train()
        for i in times if device.type != "cpu" else ():
            with in_strategies([segment], [strategies[i]]):
                # flops of library ops come from formulas, because PyTorch does not see the matmuls of a kernel
                with Roofline(rates) as forward:
                    root = alone(*call)
                with Roofline(rates) as backward:
                    root.backward()
                copied = 0.0
                if rates is not None and isinstance(strategies[i].store, offload):
                    # copies to the host and back run beside the region's forward and backward, and the longer of both counts;
                    # copied is what stays on the device in the same mode without a store
                    here = kind.held[strategies.index(Strategy(strategies[i].mode))]
                    copied = (total([here]) - total([kind.held[i]])) / rates.host
                seconds = None if rates is None else max(forward.seconds, copied) + max(backward.seconds, copied)
                kind.costs[i] = kind.costs[i]._replace(flops=forward.flops + backward.flops, seconds=seconds)
        clock = Clock(device)
        for done in range(ROUNDS if device.type != "meta" else 0):
            if time.perf_counter() - start > (PATIENCE if done >= 3 else LONG) and (done or device.type == "cpu"):
                break
            for i, own in times.items():
                with in_strategies([segment], [strategies[i]]):
                    own.append(clock(prepare))
    for i, own in times.items():
        if own:
            kind.costs[i] = kind.costs[i]._replace(seconds=statistics.median(own))


# -- the table


def kind_of(kinds: list[Kind], segment: Segment, call: Call, strategies: list[Strategy]) -> int:
    """Returns the index of the region's kind in `kinds`, to which a new kind is added if none fits."""
    gradients = [tensor.requires_grad for tensor in tensors_in(call)]
    for i, kind in enumerate(kinds):
        with suppress(Exception):  # comparing a user's objects may raise: then the kinds differ
            if (
                kind.first.replaced_by == segment.replaced_by
                and call_kinds([kind.call]) == call_kinds([call])
                and gradients == [tensor.requires_grad for tensor in tensors_in(kind.call)]
                and same_inside(segment.name, segment.module, kind.first.name, kind.first.module)
            ):
                return i
    kinds.append(Kind(segment, call, strategies))
    return len(kinds) - 1


def measure(
    example: Example,
    segments: Sequence[Segment],
    strategies: Sequence[list[Strategy]],
    shown: Shown,
    rates: Rates | None = None,
) -> Table:
    """Returns the table of a model's regions in their strategies. Restores the model, its modes and the random states.

    strategies: of each region. shown: called with what is being measured. rates: of the GPU for which a model on the meta
    device is planned; the ops then have its default workspace.
    """
    shown("a forward")
    with in_strategies(segments, [own[-1] for own in strategies]):
        recorded = example.step(segments, backs=False)
    workspace = None if rates is None else rates.memory // 32
    rest, workspaces = held_of(recorded.outside, recorded), Workspaces(example.model)
    table = Table(example, [], [], rest, workspaces, workspace, rates)
    numbers = {
        i: [kind_of(table.kinds, segments[i], called.call, strategies[i]) for called in calls]
        for i, calls in sorted(recorded.calls.items())
    }
    fill(table, shown)
    for i, own in numbers.items():  # only regions that the model calls
        held: list[Held] = [{} for _ in strategies[i]]
        for j, called in enumerate(recorded.calls[i]):
            for w, alone in enumerate(table.kinds[own[j]].held if not called.hidden else ()):
                for name, nbytes in alone.items():
                    name, nbytes = ((i, j, w), nbytes) if name == OWN else called.names[name[1:]]
                    if name is not None:
                        held[w][name] = nbytes
        table.rows.append(Measured(segments[i], own, strategies[i], held))
    return table


def fill(table: Table, shown: Shown) -> None:
    """Measures each kind alone, within the table's workspace."""
    names, size = owned_by(table.example.model), table.workspace
    with table.workspaces.at(size):
        for kind in table.kinds:
            limit = "" if size is None else f", with a workspace of {memory.format_size(size)}"
            shown(f"{kind.first.name or 'the model'} alone{limit}")
            measure_alone(kind, names, table.rates)


def narrower(table: Table, shown: Shown) -> Table:
    """Returns the table of the same regions within a smaller workspace: the largest power of two that is at most a quarter
    of what the table's takes."""
    most = table.rise(table.uniform("full"))
    size = 1 << max(0, min(table.workspace or most, most).bit_length() - 3)
    kinds = list(map(dataclasses.replace, table.kinds))  # `fill` replaces their costs
    smaller = dataclasses.replace(table, kinds=kinds, workspace=size, steps={}, peaks={})
    fill(smaller, shown)
    return smaller
