"""The results of the demo's runs: the table, the differences of the loss curves, and the files of both."""

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

from ..env import collect
from .config import Config
from .data import Corpus
from .training import Run, measured_step

if TYPE_CHECKING:
    from rich.console import Console

AGREEMENT = 1e-3  # largest relative difference between two loss curves that differ only in rounding


@dataclass(frozen=True)
class Summary:
    """One row of the final table. Losses in nats per byte, bytes of one forward and backward."""

    variant: str
    train_loss: float
    held_out_loss: float
    saved_mib: float
    peak_mib: float
    ms_per_step: float
    ratio: float


@dataclass(frozen=True)
class Agreement:
    """Largest relative difference between two loss curves, and whether it has a limit."""

    first: str
    other: str
    difference: float
    limited: bool

    @property
    def failed(self) -> bool:
        return self.limited and not self.difference <= AGREEMENT  # a NaN fails


def tail_steps(config: Config) -> int:
    """The number of last steps over which the final training loss is averaged."""
    return max(1, min(20, config.steps // 5))


def summarize(config: Config, runs: list[Run]) -> list[Summary]:
    """A row per variant; the ratio is to the first variant. The steps up to the measured one are warm-up and not timed."""
    warmup = measured_step(config) + 1
    medians = [statistics.median(run.milliseconds[warmup:] or run.milliseconds) for run in runs]
    return [
        Summary(
            run.variant,
            statistics.fmean(run.losses[-tail_steps(config) :]),
            run.held_out[config.steps],
            run.saved_bytes / 2**20,
            run.peak_bytes / 2**20,
            median,
            median / medians[0],
        )
        for run, median in zip(runs, medians, strict=True)
    ]


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
        same_masks = config.dropout == 0.0 or "ckptkern" not in (runs[0].variant, other.variant)
        result.append(Agreement(runs[0].variant, other.variant, largest, limited=exact and same_masks))
    return result


def print_summary(config: Config, summaries: list[Summary], agreed: list[Agreement], console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{config.model}, {config.layers} layers of width {config.d_model}, {config.steps} steps",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("variant", vertical="bottom")
    for heading in ("train\nloss", "held-out\nloss", "saved\nMiB", "peak\nMiB", "ms per\nstep", "ratio"):
        table.add_column(heading, justify="right", vertical="bottom")
    for row in summaries:
        table.add_row(
            row.variant,
            f"{row.train_loss:.4f}",
            f"{row.held_out_loss:.4f}",
            f"{row.saved_mib:.1f}",
            f"{row.peak_mib:.1f}",
            f"{row.ms_per_step:.1f}",
            f"{row.ratio:.2f}",
        )
    console.print(table)
    console.print(
        f"Losses in nats per byte, the training loss over the last {tail_steps(config)} steps. Saved: what forward "
        "saves for backward. Peak: of forward and backward, above what was allocated before."
    )
    for one in agreed:
        apart = f"at most {one.difference:.2g} apart, relatively" if one.difference else "equal bit for bit"
        if one.limited:
            verdict = f"{'more than' if one.failed else 'within'} the limit of {AGREEMENT:g}"
        elif config.dropout > 0.0:
            verdict = "no limit: their dropout masks come from different random streams"
        else:
            verdict = "no limit: only fp32 on a CPU has one"
        console.print(f"Loss of {one.other} against {one.first}: {apart} ({verdict}).")


def write_results(
    config: Config, corpus: Corpus, runs: list[Run], summaries: list[Summary], agreed: list[Agreement], out: Path
) -> None:
    """``losses.csv``, one line per step and variant, and ``results.json``: settings, environment, table, differences."""
    with (out / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "variant", "loss", "held_out_loss", "ms"))
        for step, run in itertools.product(range(config.steps), runs):
            writer.writerow(
                (
                    step + 1,
                    run.variant,
                    repr(run.losses[step]),
                    repr(run.held_out[step + 1]) if step + 1 in run.held_out else "",
                    f"{run.milliseconds[step]:.3f}",
                )
            )
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(config),
        "text": {
            "train_bytes": len(corpus.train),
            "train_files": len(corpus.train_files),
            "held_out_bytes": len(corpus.held_out),
            "held_out_files": len(corpus.held_out_files),
        },
        "table": [dataclasses.asdict(row) for row in summaries],
        "agreement": [dataclasses.asdict(one) for one in agreed],
        "environment": collect(),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
