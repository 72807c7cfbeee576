"""The demo's figure: loss curves and their differences on the left, memory and time bars on the right."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import Summary
from .training import Run

COLORS = {"torch": "#a9b4c0", "torch.utils.checkpoint": "#e38b2c", "ckptkern": "#0b6e7f"}
# the curves lie on top of each other, so each is narrower than the one below it
WIDTHS = {"torch": 7.0, "torch.utils.checkpoint": 3.5, "ckptkern": 1.3}
EQUAL = 1e-9  # where a difference of 0 is drawn, below the last bit of a float32 loss


def draw_figure(
    path: Path,
    title: str,
    runs: list[Run],
    summaries: list[Summary],
    differences: dict[str, list[float]],
    limit: float | None,
) -> None:
    """Writes a PNG. differences: every further variant's from the first, per step; limit: theirs, if they have one."""
    figure = Figure(figsize=(12.5, 7.0), layout="constrained")
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.7, 1.0), height_ratios=(1.7, 1.0))
    _draw_losses(figure.add_subplot(grid[0, 0]), runs)
    _draw_differences(figure.add_subplot(grid[1, 0]), differences, limit)
    names = [row.variant for row in summaries]
    memory = {"saved for backward": [row.saved_mib for row in summaries], "peak": [row.peak_mib for row in summaries]}
    _draw_bars(figure.add_subplot(grid[0, 1]), "memory of one step, MiB", names, memory)
    time = {"": [row.ms_per_step for row in summaries]}
    _draw_bars(figure.add_subplot(grid[1, 1]), "time of one step, ms (median)", names, time)
    figure.savefig(path, dpi=130)


def _draw_losses(axes: Axes, runs: list[Run]) -> None:
    steps = range(1, len(runs[0].losses) + 1)
    axes.plot(steps, runs[0].losses, color=COLORS[runs[0].variant], linewidth=0.7, alpha=0.6)
    for run in runs:
        axes.plot(
            steps, _smooth(run.losses), color=COLORS[run.variant], linewidth=WIDTHS[run.variant], label=run.variant
        )
        axes.plot(
            list(run.held_out),
            list(run.held_out.values()),
            linestyle="none",
            marker="o",
            markersize=4.0 + 1.3 * WIDTHS[run.variant],
            color=COLORS[run.variant],
            markeredgecolor="white",
        )
    axes.set_title("training loss (lines, moving average) and held-out loss (points)", loc="left", fontsize=10)
    axes.set_ylabel("nats per byte")
    axes.legend(frameon=False)
    _tidy(axes)


def _smooth(losses: list[float]) -> list[float]:
    """Centred moving averages, over fewer steps towards the ends, so that the fast first fall stays as it is."""
    reaches = [min(i, len(losses) - 1 - i, len(losses) // 60) for i in range(len(losses))]
    return [statistics.fmean(losses[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def _draw_differences(axes: Axes, differences: dict[str, list[float]], limit: float | None) -> None:
    for variant, values in differences.items():
        steps = range(1, len(values) + 1)
        axes.plot(
            steps, [max(EQUAL, value) for value in values], color=COLORS[variant], linewidth=0.5 * WIDTHS[variant] + 0.4
        )
    if limit is not None:
        axes.axhline(limit, color="#b03030", linewidth=1.0, linestyle="--")
        axes.annotate(
            "limit", (1.0, limit), (0, 2), ("axes fraction", "data"), "offset points", color="#b03030", ha="right"
        )
    axes.set_yscale("log")
    axes.set_ylim(0.5 * EQUAL, 1.0)
    axes.set_yticks([EQUAL, 1e-6, 1e-3, 1.0], ["0", "1e-6", "1e-3", "1"])
    axes.minorticks_off()
    axes.set_title("relative difference of the loss from the first variant's", loc="left", fontsize=10)
    axes.set_xlabel("step")
    _tidy(axes)


def _draw_bars(axes: Axes, title: str, names: list[str], groups: dict[str, list[float]]) -> None:
    """Horizontal bars, a group of them per variant, each labelled with its value and its ratio to the first variant's."""
    height = 0.8 / len(groups)
    for place, (label, values) in enumerate(groups.items()):
        centres = [row + (place - (len(groups) - 1) / 2) * height for row in range(len(names))]
        colors = [COLORS[name] for name in names]
        bars = axes.barh(centres, values, height=0.9 * height, color=colors, alpha=1.0 if place == 0 else 0.45)
        texts = [f"{label} {value:.1f}".strip() + f"  ({value / values[0]:.2f}×)" for value in values]
        axes.bar_label(bars, texts, padding=4, fontsize=9)
    axes.set_yticks(range(len(names)), [name.rpartition(".")[2] for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * max(map(max, groups.values())))
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
