"""The picture of a report: memory over one step, up in forward and down in backward."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from ..memory import Timeline, three_digits

COLORS = {"eager PyTorch": "#a9b4c0", "none": "#e38b2c", "selective": "#0b6e7f", "full": "#6a3d9a"}
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def draw_timelines(timelines: dict[str, Timeline], path: str | os.PathLike) -> None:
    """Forward and backward are each as wide as the other: under the profiler their times mean little."""
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    top = max(one.peak for one in timelines.values())
    unit, size = next(((unit, size) for unit, size in UNITS if top >= size), UNITS[-1])
    for mode, one in timelines.items():
        heights = [n / size for n in one.bytes]
        label = f"{mode}: peak {three_digits(one.peak / size)} {unit}"
        axes.step(places(one), heights, where="post", color=COLORS.get(mode), linewidth=1.4, label=label)
    axes.axvline(1.0, color="#9aa3ab", linewidth=1.0, linestyle=":")
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_title("memory over one training step, without parameters and their gradients", loc="left", fontsize=10)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 2)
    axes.legend(frameon=False)
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def places(timeline: Timeline) -> list[float]:
    """Where each moment lies: forward from 0 to 1, backward from 1 to 2."""
    middle, end = timeline.marks["backward"], timeline.milliseconds[-1]
    return [t / middle if t <= middle else 1.0 + (t - middle) / (end - middle) for t in timeline.milliseconds]
