"""Plots the demo's figure: memory over one step, peak against time, and the losses."""

from __future__ import annotations

from argparse import Namespace

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ckptkern.planning.figure import draw_timelines

from .config import VARIANTS, label, title
from .results import Row
from .training import Run

STYLE = {
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e4e8ec", "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
}  # fmt: skip


@matplotlib.rc_context(STYLE)
def draw_figure(config: Namespace, runs: list[Run], rows: list[Row]) -> None:
    """Writes demo.png."""
    figure = Figure(figsize=(12.5, 8.0))
    figure.suptitle(title(config), fontsize=11)
    memory, plane, losses = figure.subplot_mosaic("ab;cc", height_ratios=(1.6, 1.0)).values()
    colors = {label(config, run.variant): VARIANTS[run.variant].color for run in runs}
    draw_timelines(memory, {label(config, run.variant): run.timeline for run in runs}, colors)
    top = memory.get_ylim()[1]
    memory.set_ylim(top / 1000, top * 20)  # room for the legend above the lines
    memory.legend(frameon=False, fontsize=8, loc="upper left")
    for row in rows:
        spread = [[row.ratio - row.p20_ratio], [row.p80_ratio - row.ratio]]
        place = row.ratio, row.peak_bytes / 2**20
        plane.errorbar(*place, xerr=spread, fmt="o", markersize=8, capsize=3, color=colors[row.label])
        offset = (0, -16 if VARIANTS[row.variant].ours else 8)  # labels of points at the same height lie apart
        plane.annotate(row.label, place, offset, textcoords="offset points", fontsize=8, ha="center")
    plane.margins(0.3, 0.15)
    plane.set_title("time and peak of one step: lower left is better")
    plane.set_xlabel(f"time / {rows[0].label}'s (median, p20–p80)")
    plane.set_ylabel("peak, MiB")
    for axes in (memory, plane):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")  # without powers
        axes.yaxis.set_minor_locator(NullLocator())
    for place, run in enumerate(runs):  # they lie on top of each other: each is narrower than the one below it
        color, width = VARIANTS[run.variant].color, 7.0 * (1 - place / len(runs))
        losses.plot(range(1, config.steps + 1), run.losses, color=color, linewidth=width)
    losses.set_title("training loss, nats per token")
    losses.set_xlabel("step")
    figure.savefig(config.out / "demo.png", dpi=130, metadata={"Software": None})
