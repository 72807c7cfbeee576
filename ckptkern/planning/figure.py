"""Draws a report: memory over one training step, and the tensors alive at its peak."""

from __future__ import annotations

import os

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..conversion.recorder import Alive
from ..memory import Timeline, format_size, parse_size, three_digits
from .table import largest_standing

COLORS = {"eager PyTorch": "#a9b4c0", "none": "#e38b2c", "selective": "#0b6e7f", "full": "#6a3d9a"}


def draw_steps(timelines: dict[str, Timeline], standing: dict[str, list[Alive]], path: str | os.PathLike) -> None:
    """Draws memory over the step, and below it the tensors alive at the peak of the mode with the lowest peak."""
    figure = Figure(figsize=(8.0, 6.8), layout="constrained")
    over_time, at_peak = figure.subplots(2, 1, height_ratios=(3, 2))
    draw_timelines(over_time, timelines)
    mode = min(timelines, key=lambda mode: timelines[mode].peak)
    rows = largest_standing(standing[mode])  # a bar for each of the largest, one for the rest
    unit, size = unit_of(max(nbytes for nbytes, *_ in rows))
    names = [f"{what}  {place}".rstrip() for _, what, place in rows]
    at_peak.barh(names, [nbytes / size for nbytes, *_ in rows], color=COLORS.get(mode))
    at_peak.invert_yaxis()
    at_peak.tick_params(axis="y", labelsize=7, length=0)
    at_peak.set_title(f"what stands at the peak of {mode}", loc="left", fontsize=10)
    at_peak.set_xlabel(unit)
    at_peak.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def unit_of(top: int) -> tuple[str, int]:
    """Returns the unit in which `format_size` shows a size, and its bytes."""
    unit = format_size(top).split()[1]
    return unit, parse_size(f"1{unit}") or 1


def draw_timelines(axes: Axes, timelines: dict[str, Timeline], colors: dict[str, str] = COLORS) -> None:
    """Draws forward and backward with equal widths, because the profiler distorts their times."""
    unit, size = unit_of(max(timeline.peak for timeline in timelines.values()))
    for mode, timeline in timelines.items():
        heights = [n / size for n in timeline.bytes]
        label = f"{mode}: peak {three_digits(timeline.peak / size)} {unit}"
        middle, end = timeline.marks["backward"], timeline.milliseconds[-1]  # forward from 0 to 1, backward from 1 to 2
        places = [t / middle if t <= middle else 1.0 + (t - middle) / (end - middle) for t in timeline.milliseconds]
        axes.step(places, heights, where="post", color=colors.get(mode), linewidth=1.4, label=label)
    axes.axvline(1.0, color="#9aa3ab", linewidth=1.0, linestyle=":")
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_title("memory over one training step, above what is there when it begins", loc="left", fontsize=10)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 2)
    axes.legend(frameon=False)
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
