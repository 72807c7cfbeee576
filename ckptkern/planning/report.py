"""report: what each region of a model saves and costs in each mode, beside eager PyTorch."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from .. import memory
from ..conversion.binding import ORIGINAL_CLASS
from ..conversion.recorder import Alive, Loss, Step
from ..conversion.report import aligned, write_rows
from ..extras import missing
from ..ops.dispatch.choices import MODES
from .measure import measure
from .plan import converted, found_segments
from .segments import EAGER, ORIGINAL, Strategy, original_forwards
from .table import Example, standing_lines


@dataclasses.dataclass
class Line:
    """A region in a mode, "eager PyTorch" for its forward before convert.

    saved: bytes that it saves for backward, besides parameters and buffers. seconds: of its forward and backward. flops: of
    their matmuls. transient: bytes that backward rises above what is saved, besides gradients. seconds is None on the meta
    device.
    """

    name: str
    kind: str
    replaced_by: str
    mode: str
    saved: int
    seconds: float | None
    flops: int
    transient: int


@dataclasses.dataclass
class Report:
    """print(report) shows the regions, those that are alike in one line, and the whole model.

    lines: of all regions, in the model's order. totals: bytes that the whole model saves, by mode, with regions that do not
    have it at "full"; "eager PyTorch" is left out if a region has no original forward. timelines: memory over one step, by
    mode; peaks: that step's. standing: what stands at its peak, the largest first, by mode.
    """

    lines: list[Line]
    totals: dict[str, int]
    timelines: dict[str, memory.Timeline]
    peaks: dict[str, int]
    standing: dict[str, list[Alive]]
    _table: list[str]

    def csv(self, path: str | os.PathLike) -> None:
        """Writes a row for each line."""
        write_rows(path, map(dataclasses.asdict, self.lines))

    def figure(self, path: str | os.PathLike) -> None:
        """Draws memory over the step, one curve for each mode, into a file (PNG, SVG, PDF). Needs matplotlib."""
        if hint := missing("matplotlib"):
            raise ImportError(f"report: {hint}")
        from .figure import draw_steps

        draw_steps(self.timelines, self.standing, path)

    def __str__(self) -> str:
        size = memory.format_size
        totals = [
            (f"  {mode}", size(saved), f"peak {size(self.peaks[mode])}" if mode in self.peaks else "")
            for mode, saved in self.totals.items()
        ]
        text = [*self._table, "the model saves", *aligned(totals)]
        for mode, standing in self.standing.items():
            text += [f"at the peak of {mode} stand", *standing_lines(standing)]
        return "\n".join(text)

    def by_place(self, mode: str) -> dict[str, int]:
        """Bytes that stand at the peak, by the region in whose forward or backward they were made; "" is outside of all."""
        places: dict[str, int] = {}
        for alive in self.standing[mode]:
            places[alive.place] = places.get(alive.place, 0) + alive.bytes
        return places


def report(model: nn.Module, *example_inputs: Any, loss: Loss | None = None, **example_kwargs: Any) -> Report:
    """Measures what each region of a model saves and costs in each mode, and eager PyTorch beside it.

        report = ckptkern.report(model, input_ids)
        print(report)
        report.csv("report.csv")
        report.figure("report.png")

    Regions are modules of ckptkern.nn and what convert made. A model without any is converted, and afterwards reverted: the
    model is as before in any case. Blocks without a region inside are shown as the checkpoints that convert may make of them.

    Saved bytes are counted, and exact, on any device. Times are medians of one region of each kind, run alone in turns with
    its other modes, on the input that it has in the model. Memory over the step: what the profiler saw the allocator do in one
    training step of the whole model in each mode, above what is there when it begins, as in `plan`; on the meta device what
    tensors came and went. A mode that does not fit is left out. What stands at the peak: the tensors that are there then, with
    the op that made each and the region that called it.

    example_inputs, example_kwargs: a call of the model, of the size that training has. loss: from what the model returns to the
    scalar that a step differentiates, as in `certify`; None takes the output's `loss`, or its one scalar, else the sum of its
    floating-point tensors.

    Raises TypeError if model is no nn.Module or there are no inputs, ValueError for a model that is sharded or returns several
    scalars.
    """
    steps: dict[str, Step] = {}
    example = Example("report", model, (example_inputs, example_kwargs), loss)
    with converted(example, stays=False) as shown:
        segments = found_segments(example)
        strategies = []  # one mode for the whole region, and a forward of PyTorch's alone: replaced by convert, or not yet
        for segment in segments:
            has_eager = segment.forward is not None or segment.is_block or ORIGINAL_CLASS in segment.module.__dict__
            modes = [Strategy(mode) for mode in segment.modes() if isinstance(mode, str)]
            strategies.append([ORIGINAL, *modes] if has_eager else modes)
        table = measure(example, segments, strategies, shown)
        totals = {}
        if table.rows and all(row.eager is not None for row in table.rows):
            with original_forwards(model):
                totals[EAGER] = example.step(segments, backs=False).saved
        totals |= {mode: table.saved(table.uniform(mode)) for mode in MODES}
        shown("memory over a step")
        for mode in totals:
            with suppress(torch.OutOfMemoryError), original_forwards(model) if mode == EAGER else nullcontext():
                steps[mode] = example.step(table.segments) if mode == EAGER else table.step(table.uniform(mode))
    lines = []
    for row in table.rows:
        of = row.segment.name, type(row.segment.module).__name__, row.segment.replaced_by
        for strategy, held, cost in zip(row.strategies, row.held, table.kinds[row.kinds[0]].costs, strict=True):
            lines.append(Line(*of, str(strategy), held.bytes, cost.seconds, cost.flops, cost.transient))
    timelines = {mode: step.over_time() for mode, step in steps.items()}
    peaks = {mode: step.peak for mode, step in steps.items()}
    return Report(
        lines, totals, timelines, peaks, {mode: step.standing() for mode, step in steps.items()}, table.text()
    )
