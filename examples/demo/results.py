"""Summarizes the demo's runs: the table, its conclusion in words, and the files."""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from datetime import datetime, timezone
from typing import NamedTuple

from ckptkern.memory import format_size, three_digits
from ckptkern.tools.env import collect

from .config import VARIANTS, label, title
from .training import Run, measured_step

AGREEMENT = 1e-3  # largest relative difference between two losses of a step that differ only in rounding
HEADINGS = ("variant", "loss", "saved", "peak", "tokens/s", "ratio", "p20–p80")


class Row(NamedTuple):
    """A row of the table. loss: of the last step, in nats per token. ratio: the median, over steps, of the step's time over
    the first variant's time of the same step; with its 20th and 80th percentile. difference: the largest relative difference
    of the losses from the first variant's. limited: whether it must be at most AGREEMENT."""

    variant: str
    label: str
    loss: float
    saved_bytes: int
    peak_bytes: int
    ms: float
    ratio: float
    p20_ratio: float
    p80_ratio: float
    difference: float
    limited: bool

    @property
    def failed(self) -> bool:
        return self.limited and not self.difference <= AGREEMENT  # a NaN fails


def summarize(config: Namespace, runs: list[Run]) -> list[Row]:
    """Returns a row per variant.

    Times are compared with the first variant's step by step: other programs slow both at the same moments. The steps up to the
    measured one are warm-up and not timed, unless there are no others.

    Differences are limited in fp32 on the CPU. Lower precisions and other devices sum in other orders, and training amplifies
    that. With dropout, torch's masks and ckptkern's come from different streams, so their curves are two samples.
    """
    first, warmup = runs[0], measured_step(config) + 1
    exact = config.device == "cpu" and config.dtype == "fp32"
    rows = []
    for run in runs:
        times, firsts = (timed.milliseconds[warmup:] or timed.milliseconds for timed in (run, first))
        ratios = sorted(time / base for time, base in zip(times, firsts, strict=True))
        differences = [abs(b - a) / abs(a) for a, b in zip(first.losses, run.losses, strict=True)]
        row = Row(
            variant=run.variant,
            label=label(config, run.variant),
            loss=run.losses[-1],
            saved_bytes=run.saved_bytes,
            peak_bytes=run.timeline.peak,
            ms=statistics.median(times),
            ratio=statistics.median(ratios),
            p20_ratio=ratios[len(ratios) // 5],
            p80_ratio=ratios[-1 - len(ratios) // 5],
            difference=math.nan if any(map(math.isnan, differences)) else max(differences),
            limited=exact and (config.dropout == 0.0 or VARIANTS[first.variant].ours == VARIANTS[run.variant].ours),
        )
        rows.append(row)
    return rows


def gain(rows: list[Row]) -> str | None:
    """Returns one sentence that compares ckptkern's lowest peak with eager's and the lowest of the others. None if one of
    these did not run."""
    eager = [row for row in rows if row.variant == "eager"]
    ours = [row for row in rows if VARIANTS[row.variant].ours]
    others = [row for row in rows if row not in eager + ours]
    if not (eager and ours and others):
        return None
    best, eager, baseline = (min(group, key=lambda row: row.peak_bytes) for group in (ours, eager, others))

    def beside(row: Row) -> str:
        return f"{format_size(row.peak_bytes)} ({three_digits(row.peak_bytes / best.peak_bytes)}×)"

    return (
        f"A step of {best.label} peaks at {format_size(best.peak_bytes)}, where eager takes {beside(eager)} and "
        f"{baseline.label}, the lowest of the others, {beside(baseline)}; it takes {best.ratio / eager.ratio:.2f} of eager's "
        f"time and {best.ratio / baseline.ratio:.2f} of that one's."
    )


def verdict(config: Namespace, row: Row, first: Row) -> str:
    """Returns the losses' difference from the first variant's, and its limit, in words."""
    apart = f"at most {row.difference:.2g} apart, relatively" if row.difference else "equal bit for bit"
    if row.limited:
        limit = f"{'more than' if row.failed else 'within'} the limit of {AGREEMENT:g}"
    elif config.dropout > 0.0:
        limit = "no limit: their dropout masks come from different random streams"
    else:
        limit = "no limit: only fp32 on a CPU has one"
    return f"- Loss of {row.label} against {first.label}: {apart} ({limit})."


def page(config: Namespace, rows: list[Row], warning: str | None) -> str:
    """Returns the results as Markdown, which is also what is printed."""
    table = [HEADINGS]
    for row in rows:
        saved, peak = format_size(row.saved_bytes), format_size(row.peak_bytes)
        spread, rate = f"{row.p20_ratio:.2f}–{row.p80_ratio:.2f}", 1e3 * config.batch_size * config.seq_len / row.ms
        table.append((row.label, f"{row.loss:.4f}", saved, peak, f"{rate:,.0f}", f"{row.ratio:.2f}", spread))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [" | ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in table]
    steps = max(1, config.steps - measured_step(config) - 1)
    notes = (
        f"Loss: of the last step, nats a token. Saved: what forward saves for backward. Peak: of forward and backward, above "
        f"parameters, gradients and optimizer state. Tokens/s: of forward, backward and optimizer, median of {steps} "
        f"interleaved steps. Ratio: of a step's time to that of {rows[0].label}, which means something only within one run."
    )
    verdicts = "\n".join(verdict(config, row, rows[0]) for row in rows[1:])
    parts = (f"{title(config)}:", "\n".join(f"| {line} |" for line in lines), gain(rows), notes, warning, verdicts)
    return "\n\n".join(filter(None, parts)) + "\n"


def write_results(config: Namespace, runs: list[Run], rows: list[Row], warning: str | None) -> None:
    """Writes ``report.md``, and ``results.json``: settings, environment, table, and the losses and times of each step."""
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": vars(config),
        "table": [row._asdict() for row in rows],
        "losses": {run.variant: run.losses for run in runs},
        "milliseconds": {run.variant: run.milliseconds for run in runs},
        "environment": collect(),
    }
    (config.out / "results.json").write_text(json.dumps(results, indent=2, default=str) + "\n")
    (config.out / "report.md").write_text(page(config, rows, warning))
