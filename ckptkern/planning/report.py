"""report: what each region of a model saves and costs in each mode, beside eager PyTorch."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from .. import memory
from ..conversion.bound import revert
from ..conversion.report import aligned, name_of
from ..extras import missing, progress
from ..ops.dispatch.checks import MODES
from .live import Alive, Loss, Step, by_place, step_of
from .measure import measure, stepped
from .plan import found_segments, standing_lines, time_of
from .segments import Segment, Strategy, check_model, original_forwards, segments_of
from .table import Table

EAGER = "eager PyTorch"


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
    have it at "full"; "eager PyTorch" is left out if a region has no original forward. timelines: memory
    over one step, by mode. standing: what stands at the peak of that step, the largest first, by mode.
    """

    lines: list[Line]
    totals: dict[str, int]
    timelines: dict[str, memory.Timeline]
    standing: dict[str, list[Alive]]

    def csv(self, path: str | os.PathLike) -> None:
        """Writes a row for each line."""
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Line)])
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, self.lines))

    def figure(self, path: str | os.PathLike) -> None:
        """Draws memory over the step, one curve for each mode, into a file (PNG, SVG, PDF). Needs matplotlib."""
        if hint := missing("matplotlib"):
            raise ImportError(f"report: {hint}")
        from .figure import draw_steps

        draw_steps(self.timelines, self.standing, path)

    def __str__(self) -> str:
        text = [("region", "replaced by", "mode", "saved", "of eager", "time", "GFLOP", "transient")]
        for names, lines in self._alike():
            before = next((line.saved for line in lines if line.mode == EAGER), None)
            for i, line in enumerate(lines):
                text.append(
                    (
                        name_of(names) if i == 0 else "", line.replaced_by if i == 0 else "", line.mode,
                        memory.format_size(line.saved),
                        f"{line.saved / before:.1%}" if before else "",
                        time_of(line.seconds),
                        memory.three_digits(line.flops / 1e9),
                        memory.format_size(line.transient),
                    )
                )  # fmt: skip
        return "\n".join([*aligned(text), "the model saves", *self._totals(), *self._at_peaks()])

    def _at_peaks(self) -> list[str]:
        lines = []
        for mode, standing in self.standing.items():
            lines += [f"at the peak of {mode} stand", *standing_lines(standing)]
        return lines

    def by_place(self, mode: str) -> dict[str, int]:
        """Bytes that stand at the peak, by the region in whose forward or backward they were made; "" is outside of all."""
        return by_place(self.standing[mode])

    def _totals(self) -> list[str]:
        rows = []
        for mode, saved in self.totals.items():
            peak = self.timelines[mode].peak if mode in self.timelines else None
            rows.append(
                (f"  {mode}", memory.format_size(saved), "" if peak is None else f"peak {memory.format_size(peak)}")
            )
        return aligned(rows)

    def _alike(self) -> Iterator[tuple[list[str], list[Line]]]:
        """(names, the lines of the first) of regions that differ in their name and, by noise, in nothing else."""
        of_name: dict[str, list[Line]] = {}
        for line in self.lines:
            of_name.setdefault(line.name, []).append(line)
        groups: dict[tuple, list[str]] = {}
        for name, lines in of_name.items():
            key = tuple((one.kind, one.replaced_by, one.mode, one.saved, one.flops, one.seconds) for one in lines)
            groups.setdefault(key, []).append(name)
        for names in groups.values():
            yield names, of_name[names[0]]


def lines_of(table: Table) -> list[Line]:
    lines = []
    for row in table.rows:
        segment, costs = row.segment, table.kinds[row.kinds[0]].costs
        modes = [*map(str, row.strategies), EAGER]
        order = range(len(row.held)) if row.eager is None else [-1, *range(len(row.strategies))]
        for i in order:
            seconds, flops, *_, transient = costs[i]
            of = segment.name, type(segment.module).__name__, segment.replaced_by, modes[i]
            lines.append(Line(*of, row.held[i].bytes, seconds, flops, transient))
    return lines


def modes_of(segment: Segment) -> list[Strategy]:
    """One mode for the whole region."""
    return [Strategy(mode) for mode in segment.modes() if isinstance(mode, str)]


# -- memory over one step


def steps_of(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], table: Table, modes: Sequence[str]
) -> dict[str, Step]:
    """A step at each of the modes that fit, without the gradients of parameters."""

    def run(mode: str) -> Step:
        if mode != EAGER:
            return stepped(table, model, args, kwargs, table.uniform(mode), all_there=True)
        with original_forwards(model):
            return step_of(model, args, kwargs, table.modules, table.device, True, table.loss)

    found = {}
    for mode in modes:
        with suppress(torch.OutOfMemoryError):
            found[mode] = run(mode)
    return found


def report(model: nn.Module, *example_inputs: Any, loss: Loss | None = None, **example_kwargs: Any) -> Report:
    """Measures what each region of a model saves and costs in each mode, and eager PyTorch beside it.

        report = ckptkern.report(model, input_ids)
        print(report)
        report.csv("report.csv")
        report.figure("report.png")

    Regions are modules of ckptkern.nn and what convert made. A model without any is converted, and afterwards reverted: the
    model is as before in any case. Blocks without a region inside are shown as the checkpoints that convert may make of them.

    Saved bytes are counted, and exact, on any device. Times are medians of one region of each kind, run alone in turns with
    its other modes, on the input that it has in the model. matmuls: torch's FlopCounterMode. Memory over the step: what the
    profiler saw the allocator do in one training step of the whole model in each mode, without the gradients of parameters; on
    the meta device what tensors came and went. A mode that does not fit is left out. What stands at the peak: the tensors that
    are there then, with the op that made each and the region that called it.

    example_inputs, example_kwargs: a call of the model, of the size that training has. loss: from what the model returns to the
    scalar that a step differentiates, as in `certify`; None takes the output's `loss`, or its one scalar, else the sum of its
    floating-point tensors.

    Raises TypeError if model is no nn.Module or there are no inputs, ValueError for a model that is sharded or returns several
    scalars.
    """
    check_model("report", model, example_inputs, example_kwargs)
    had_none = not segments_of(model)
    try:
        with progress("report") as shown:
            segments = found_segments(model, example_inputs, example_kwargs, None, None)
            table = measure(
                model,
                example_inputs,
                example_kwargs,
                segments,
                list(map(modes_of, segments)),
                shown,
                eager=True,
                loss=loss,
            )
            totals = {} if table.eager_saved is None else {EAGER: table.eager_saved}
            totals |= {mode: table.saved(table.uniform(mode)) for mode in MODES}
            shown("memory over a step")
            steps = steps_of(model, example_inputs, example_kwargs, table, list(totals))
    finally:
        if had_none:
            revert(model)
    over_time = {mode: step.over_time() for mode, step in steps.items()}
    return Report(lines_of(table), totals, over_time, {mode: step.standing() for mode, step in steps.items()})
