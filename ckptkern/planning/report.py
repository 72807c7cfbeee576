"""Reports what each region of a model saves and costs in each mode, beside eager PyTorch."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from .. import memory
from ..conversion.blocks import is_converted
from ..conversion.recorder import Alive, Loss, Step
from ..conversion.report import aligned, write_rows
from ..extras import missing
from ..ops.dispatch.choices import MODES
from .measure import measure
from .plan import converted, found_segments
from .segments import EAGER, ORIGINAL, Strategy, original_forwards
from .table import Example, standing_lines, total


@dataclasses.dataclass
class Line:
    """A region in one mode; mode "eager PyTorch" is its forward before convert.

    saved: bytes saved for backward. seconds: of forward and backward; None on the meta device. flops: of their matmuls.
    transient: bytes that backward allocates above what is saved, besides gradients.
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
    """Measurements of each region and of the whole model; `print(report)` shows equal regions in one line, and `csv(path)`
    writes all lines.

    lines: one per region and mode. totals: bytes that the whole model saves, by mode; a region without the mode runs at "full".
    timelines, peaks: memory over a step and its peak, by mode. standing: tensors alive at the peak, the largest first, by mode.
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
        """Draws memory over the step, one curve per mode, into a PNG, SVG or PDF file. Needs matplotlib."""
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
        """Returns the bytes alive at the peak by the region that allocated them; "" is outside of all regions."""
        places: dict[str, int] = {}
        for alive in self.standing[mode]:
            places[alive.place] = places.get(alive.place, 0) + alive.bytes
        return places


def report(model: nn.Module, *example_inputs: Any, loss: Loss | None = None, **example_kwargs: Any) -> Report:
    """Measures what each region of a model saves and costs in each recompute mode, and in eager PyTorch.

        report = ckptkern.report(model, input_ids)
        print(report)
        report.figure("report.png")

    A model without regions is converted, and then reverted. Saved bytes are exact on any device. Times are medians of one
    region of each kind, run alone. Memory over a training step counts above what is there when it begins. Modes that do not fit
    are left out.

    example_inputs, example_kwargs: a call of the model at training size. loss: maps the model's output to the scalar that a
    step differentiates; None takes the output's `loss`, or its only scalar, or the sum of its floating-point tensors.

    Raises TypeError for another class of model or missing inputs; ValueError if the model is sharded or returns several
    scalars.
    """
    steps: dict[str, Step] = {}
    example = Example("report", model, (example_inputs, example_kwargs), loss)
    with converted(example, stays=False) as shown:
        segments = found_segments(example)
        strategies = []  # one mode per region; eager PyTorch only for a forward that convert replaced or may replace
        for segment in segments:
            has_eager = segment.is_block or is_converted(segment.module)
            modes = [Strategy(mode) for mode in segment.modes() if isinstance(mode, str)]
            strategies.append([ORIGINAL] * has_eager + modes)
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
            lines.append(Line(*of, str(strategy), total([held]), cost.seconds, cost.flops, cost.transient))
    return Report(
        lines,
        totals,
        {mode: step.over_time() for mode, step in steps.items()},
        {mode: step.peak for mode, step in steps.items()},
        {mode: step.standing() for mode, step in steps.items()},
        table.text(),
    )
