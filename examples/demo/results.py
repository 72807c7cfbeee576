"""The results of the demo's runs: the table, what it says in words, the differences of the losses, and the files of them."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkern.memory import format_size, three_digits
from ckptkern.tools.env import collect

from .config import OURS, Config
from .data import Corpus
from .training import Run, measured_step

if TYPE_CHECKING:
    from rich.console import Console

AGREEMENT = 1e-3  # largest relative difference between two losses of a step that differ only in rounding
HEADINGS = ("loss", "saved", "peak", "ms", "ratio", "p20–p80")


@dataclass(frozen=True)
class Summary:
    """One row of the table. loss: in nats a token, of the last step. ratio: the median, over steps, of the step's time over
    the first variant's time of the same step; its 20th and 80th percentile beside it."""

    variant: str
    label: str
    loss: float
    saved_bytes: int
    peak_bytes: int
    ms: float
    ratio: float
    p20_ratio: float
    p80_ratio: float

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.label, f"{self.loss:.4f}", format_size(self.saved_bytes), format_size(self.peak_bytes), f"{self.ms:.0f}",
            f"{self.ratio:.2f}", f"{self.p20_ratio:.2f}–{self.p80_ratio:.2f}",
        )  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """Largest relative difference between the losses of two variants, and whether it has a limit."""

    first: str
    other: str
    difference: float
    limited: bool

    @property
    def failed(self) -> bool:
        return self.limited and not self.difference <= AGREEMENT  # a NaN fails


def summarize(config: Config, runs: list[Run]) -> list[Summary]:
    """A row per variant. Ratios are to the first variant, step by step: other programs slow both in the same moments. The steps
    up to the measured one are warm-up and not timed, unless there are no others."""
    warmup = measured_step(config) + 1
    timed = [run.milliseconds[warmup:] or run.milliseconds for run in runs]
    rows = []
    for run, times in zip(runs, timed, strict=True):
        ratios = sorted(time / first for time, first in zip(times, timed[0], strict=True))
        last = len(ratios) - 1
        p20, p80 = ratios[math.floor(0.2 * last)], ratios[math.ceil(0.8 * last)]
        rows.append(
            Summary(
                run.variant, config.label(run.variant), run.losses[-1], run.saved_bytes, run.timeline.peak,
                statistics.median(times), statistics.median(ratios), p20, p80,
            )
        )  # fmt: skip
    return rows


def relative_differences(first: Run, other: Run) -> list[float]:
    """|loss - first's loss| / first's loss, step by step."""
    return [abs(b - a) / abs(a) for a, b in zip(first.losses, other.losses, strict=True)]


def agreements(config: Config, runs: list[Run]) -> list[Agreement]:
    """Every variant against the first. Only rounding separates them, except where dropout masks differ.

    The limit holds in fp32 on the CPU. Lower precisions and other devices sum in other orders, and training amplifies
    that. With dropout, torch's masks and ckptkern's come from different streams, so their curves are two samples.
    """
    exact = config.device == "cpu" and config.dtype == "fp32"
    result = []
    for other in runs[1:]:
        differences = relative_differences(runs[0], other)
        largest = math.nan if any(map(math.isnan, differences)) else max(differences)
        same_masks = config.dropout == 0.0 or (runs[0].variant in OURS) == (other.variant in OURS)
        labels = config.label(runs[0].variant), config.label(other.variant)
        result.append(Agreement(*labels, largest, limited=exact and same_masks))
    return result


def gain(summaries: list[Summary]) -> str | None:
    """The table in one sentence: the lowest peak of ckptkern's beside eager's and the lowest of the others. None if one of
    these was not run."""
    ours = [row for row in summaries if row.variant in OURS]
    others = [row for row in summaries if row.variant not in OURS and row.variant != "eager"]
    eager = next((row for row in summaries if row.variant == "eager"), None)
    if not ours or not others or eager is None:
        return None
    best, baseline = (min(rows, key=lambda row: row.peak_bytes) for rows in (ours, others))

    def beside(row: Summary) -> str:
        return f"{format_size(row.peak_bytes)} ({three_digits(row.peak_bytes / best.peak_bytes)}×)"

    return (
        f"A step of {best.label} peaks at {format_size(best.peak_bytes)}, where eager takes {beside(eager)} and "
        f"{baseline.label}, the lowest of the others, {beside(baseline)}; it takes {best.ratio / eager.ratio:.2f} of eager's "
        f"time and {best.ratio / baseline.ratio:.2f} of that one's."
    )


def notes(config: Config) -> str:
    return (
        f"Loss: of the last step, nats a token. Saved: what forward saves for backward. Peak: of forward and backward, above "
        f"parameters, gradients and optimizer state. ms: of forward, backward and optimizer, median of "
        f"{max(1, config.steps - measured_step(config) - 1)} interleaved steps. Ratio: of a step's time to that of "
        f"{config.label(config.variants[0])}, which means something only within one run."
    )


def verdict(config: Config, one: Agreement) -> str:
    """How far the losses of a variant are from the first's, and what limit that has."""
    apart = f"at most {one.difference:.2g} apart, relatively" if one.difference else "equal bit for bit"
    if one.limited:
        limit = f"{'more than' if one.failed else 'within'} the limit of {AGREEMENT:g}"
    elif config.dropout > 0.0:
        limit = "no limit: their dropout masks come from different random streams"
    else:
        limit = "no limit: only fp32 on a CPU has one"
    return f"Loss of {one.other} against {one.first}: {apart} ({limit})."


def print_summary(
    config: Config, summaries: list[Summary], agreed: list[Agreement], warning: str | None, console: Console
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title(config), box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("variant")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summaries:
        table.add_row(*row.cells)
    console.print(table)
    for line in (gain(summaries), notes(config), warning, *(verdict(config, one) for one in agreed)):
        if line:
            console.print(line, markup=False)


def title(config: Config) -> str:
    """The run in a line."""
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    return (
        f"{config.model}: {config.layers} layers of width {config.d_model}, {config.vocabulary:,} tokens of vocabulary, "
        f"{config.batch_size} × {config.seq_len} a step, {config.steps} steps, {config.dtype} on {config.device}{dropout}"
    )


def page(config: Config, summaries: list[Summary], agreed: list[Agreement], warning: str | None) -> str:
    """The same as Markdown."""
    lines = [("variant", *HEADINGS), ("---", *["---:"] * len(HEADINGS)), *(row.cells for row in summaries)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    words = (gain(summaries), notes(config), warning)
    verdicts = "\n".join(f"- {verdict(config, one)}" for one in agreed)
    return "\n\n".join(filter(None, (f"{title(config)}:", table, *words, verdicts))) + "\n"


def write_results(
    config: Config,
    corpus: Corpus,
    runs: list[Run],
    summaries: list[Summary],
    agreed: list[Agreement],
    warning: str | None,
    out: Path,
) -> None:
    """``losses.csv``, one line per step and variant, ``report.md``, and ``results.json``: settings, environment, table,
    differences."""
    with (out / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "variant", "loss", "ms"))
        for step, run in itertools.product(range(config.steps), runs):
            writer.writerow((step + 1, run.variant, repr(run.losses[step]), f"{run.milliseconds[step]:.3f}"))
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(config),
        "text": {"bytes": corpus.bytes, "files": corpus.files, "tokens": len(corpus.ids)},
        "table": [dataclasses.asdict(row) for row in summaries],
        "gain": gain(summaries),
        "warning": warning,
        "agreement": [dataclasses.asdict(one) for one in agreed],
        "environment": collect(),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (out / "report.md").write_text(page(config, summaries, agreed, warning))
