"""The demo's figure: memory over one step, the plane of time and peak, and the losses with their differences."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ckptkern.planning.figure import draw_timelines, unit_of

from .config import OURS, Config
from .results import Summary, relative_differences, title
from .training import Run

COLORS = {
    "eager": "#a9b4c0", "checkpointing": "#e38b2c", "chunked": "#9c5a11", "convert": "#0b6e7f", "bounded": "#6a3d9a",
}  # fmt: skip
EQUAL = 1e-9  # where a difference of 0 is drawn, below the last bit of a float32 loss


def draw_figure(path: Path, config: Config, runs: list[Run], summaries: list[Summary], limit: float | None) -> None:
    """Writes a PNG. limit: of the differences of the losses, if they have one."""
    figure = Figure(figsize=(12.5, 8.0), layout="constrained")
    figure.suptitle(title(config), fontsize=11)
    (memory, plane), (losses, differences) = figure.subplots(2, 2, height_ratios=(1.6, 1.0))
    draw_timelines(
        memory,
        {config.label(run.variant): run.timeline for run in runs},
        {config.label(run.variant): COLORS[run.variant] for run in runs},
    )
    unit, size = unit_of(max(row.peak_bytes for row in summaries))
    peaks = [row.peak_bytes / size for row in summaries]
    memory.set_yscale("log")
    memory.set_ylim(min(peaks) / 10, max(peaks) * 20)  # room for the legend above the lines
    memory.legend(frameon=False, fontsize=8, loc="upper left")
    _plain(memory)
    draw_plane(plane, summaries, unit, size)
    draw_losses(losses, runs)
    draw_differences(differences, config, runs, limit)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def draw_plane(axes: Axes, summaries: list[Summary], unit: str, size: int) -> None:
    """A point per variant, with the spread of its time: better is to the left and below."""
    for row in summaries:
        spread = [[row.ratio - row.p20_ratio], [row.p80_ratio - row.ratio]]
        axes.errorbar(
            row.ratio, row.peak_bytes / size, xerr=spread, fmt="o", markersize=8, capsize=3, color=COLORS[row.variant]
        )
        below = row.variant in OURS  # labels of points at the same height lie apart
        axes.annotate(
            row.label, (row.ratio, row.peak_bytes / size), (0, -16 if below else 8), textcoords="offset points", fontsize=8,
            ha="center",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(0.3, 0.15)
    axes.set_title("time and peak of one step: lower left is better", loc="left", fontsize=10)
    axes.set_xlabel(f"time / {summaries[0].label}'s (median, p20–p80)")
    axes.set_ylabel(f"peak, {unit}")
    _plain(axes)
    _tidy(axes)


def draw_losses(axes: Axes, runs: list[Run]) -> None:
    """The curves lie on top of each other, so each is narrower than the one below it."""
    for place, run in enumerate(runs):
        width = 7.0 * (1 - place / len(runs))
        axes.plot(range(1, len(run.losses) + 1), run.losses, color=COLORS[run.variant], linewidth=width)
    axes.set_title("training loss", loc="left", fontsize=10)
    axes.set_ylabel("nats per token")
    axes.set_xlabel("step")
    _tidy(axes)


def draw_differences(axes: Axes, config: Config, runs: list[Run], limit: float | None) -> None:
    for run in runs[1:]:
        values = [max(EQUAL, value) for value in relative_differences(runs[0], run)]
        axes.plot(range(1, len(values) + 1), values, color=COLORS[run.variant], linewidth=1.4)
    if limit is not None:
        axes.axhline(limit, color="#b03030", linewidth=1.0, linestyle="--")
        axes.annotate(
            "limit", (1.0, limit), (0, 2), ("axes fraction", "data"), "offset points", color="#b03030", ha="right"
        )
    axes.set_yscale("log")
    axes.set_ylim(0.5 * EQUAL, 1.0)
    axes.set_yticks([EQUAL, 1e-6, 1e-3, 1.0], ["0", "1e-6", "1e-3", "1"])
    axes.minorticks_off()
    name = config.label(runs[0].variant)
    axes.set_title(f"relative difference of the loss from {name}'s", loc="left", fontsize=10)
    axes.set_xlabel("step")
    _tidy(axes)


def _plain(axes: Axes) -> None:
    """Ticks of a logarithmic axis as numbers without powers."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
