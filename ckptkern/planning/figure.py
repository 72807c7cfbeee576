"""The picture of a report: memory over one step, up in forward and down in backward."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from ..memory import Timeline

COLORS = {"stock PyTorch": "#a9b4c0", "none": "#e38b2c", "selective": "#0b6e7f", "full": "#6a3d9a"}
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def draw_timelines(timelines: dict[str, Timeline], path: str | os.PathLike) -> None:
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    top = max(one.peak for one in timelines.values())
    unit, size = next(((unit, size) for unit, size in UNITS if top >= size), UNITS[-1])
    for level, one in timelines.items():
        axes.step(
            one.milliseconds, [n / size for n in one.bytes], where="post", color=COLORS.get(level), linewidth=1.4,
            label=f"{level}: peak {one.peak / size:.3g} {unit}",
        )  # fmt: skip
        if "backward" in one.marks:
            axes.plot(one.marks["backward"], level_at(one, one.marks["backward"]) / size, "o", color=COLORS.get(level))
    axes.set_title(
        "memory over one training step, without parameters and gradients; points: backward begins", fontsize=10
    )
    axes.set_xlabel("ms, under the profiler")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def level_at(timeline: Timeline, moment: float) -> int:
    """Allocated bytes at a moment."""
    level = 0
    for time, bytes_ in zip(timeline.milliseconds, timeline.bytes, strict=True):
        if time > moment:
            break
        level = bytes_
    return level
