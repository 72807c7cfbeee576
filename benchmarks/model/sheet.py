"""Cost model: a case in every variant as rows of a table, and the launches of a variant with what bounds each."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptkern.benchmarks.cases import CHECKPOINT, EAGER, Item, Maker, variants
from ckptkern.memory import format_size

from .estimate import Codes, estimate, total
from .rates import GPU, TABLE
from .sass import Code, key, read_all
from .trace import Caught, Launch, Trace, build, step

SAVED, OWN = f"{CHECKPOINT}, SDPA saved", "own core, selective"
HEADER = (
    "source", "gpu", "case", "variant", "launches_fwd", "launches_bwd", "gflop", "mbytes", "fwd_ms", "bwd_ms", "ms", "ratio",
    "saved_bytes",
)  # fmt: skip


def modelled(item: Item, modes: Sequence[str] = ()) -> dict[str, Maker]:
    """The variants of an item that have an estimate: eager, two checkpoints, and ours in these modes (none given: at all)."""
    found = {name: make for name, make in variants(item.case).items() if name in (EAGER, CHECKPOINT, SAVED)}
    for name, make in variants(item.case).items():
        mode = name.replace(",", "").split()[-1]
        if (name.startswith("ckptkern") or name == OWN) and (not modes or mode in (*modes, "ckptkern")):
            found[name] = make
    return found


def traces(
    gpu: GPU, items: Iterable[Item], modes: Sequence[str] = (), only: Collection[tuple[str, str]] | None = None
) -> dict[tuple[str, str], Trace]:
    """(case, variant) -> its launches, of all or of `only` these."""
    found = {}
    for item in items:
        model, x = build(item)
        for name, make in modelled(item, modes).items():
            if only is None or (item.name, name) in only:
                found[item.name, name] = step(gpu, make, model, x)
    return found


def codes_of(gpu: GPU, steps: dict[tuple[str, str], Trace], workers: int) -> Codes:
    """Compiles every kernel with matmuls that the steps launch, once; the SASS of each launch."""
    caught = [one.caught for trace in steps.values() for one in trace.launches if one.kind == "kernel"]
    keys = {id(one): key(one, gpu.arch) for one in caught}
    found = read_all({keys[id(one)]: one for one in caught}, gpu.arch, workers)
    by_launch: dict[int, Code] = {place: found[name] for place, name in keys.items()}

    def code(one: Caught) -> Code:
        return by_launch[id(one)]

    return code


class Row(NamedTuple):
    """One line. ratio: of the times of a step, to eager's."""

    case: str
    variant: str
    launches: tuple[int, int]
    flops: int
    bytes: int
    ms: tuple[float, float]
    ratio: float
    saved: int


def rows(gpu: GPU, steps: dict[tuple[str, str], Trace], codes: Codes) -> list[Row]:
    found, eager = [], 1.0
    for (case, variant), trace in steps.items():
        ms = [1e3 * total(part, gpu, codes).seconds for part in (trace.forward, trace.backward)]
        eager = sum(ms) if variant == EAGER else eager  # which comes first
        flops, moved = (sum(getattr(one, field) for one in trace.launches) for field in ("flops", "bytes"))
        counts = len(trace.forward), len(trace.backward)
        found.append(Row(case, variant, counts, flops, moved, (ms[0], ms[1]), sum(ms) / eager, trace.saved))
    return found


def table(gpu: GPU, found: Sequence[Row]) -> str:
    lines = [
        f"cost model, not measured: {gpu.name}, bf16" + (", calibrated" if gpu.scales != TABLE else ""),
        f"{'case':40} {'variant':28} {'launches':>8} {'GFLOP':>9} {'GB':>7} {'fwd ms':>8} {'bwd ms':>8} {'ms':>8} "
        f"{'/ eager':>7} {'saved':>9}",
    ]
    for row in found:
        lines.append(
            f"{row.case:40} {row.variant:28} {row.launches[0]:>4}/{row.launches[1]:<3} {row.flops / 1e9:9.1f} "
            f"{row.bytes / 1e9:7.2f} {row.ms[0]:8.3f} {row.ms[1]:8.3f} {sum(row.ms):8.3f} {row.ratio:7.3f} "
            f"{format_size(row.saved):>9}"
        )
    return "\n".join(lines)


def write(gpu: GPU, found: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = "cost model" if gpu.scales == TABLE else "calibrated cost model"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for row in found:
            numbers = (row.flops / 1e9, row.bytes / 1e6, *row.ms, sum(row.ms), row.ratio)
            writer.writerow(
                (source, gpu.name, row.case, row.variant, *row.launches, *(f"{n:.5g}" for n in numbers), row.saved)
            )


def explained(gpu: GPU, launches: Sequence[Launch], codes: Codes) -> list[str]:
    """A line per launch, in order; equal neighbours share one."""
    lines = []
    estimated = ((one, estimate(one, gpu, codes)) for one in launches)
    for (name, flops, moved), group in itertools.groupby(
        estimated, lambda pair: (pair[0].name, pair[0].flops, pair[0].bytes)
    ):
        (_, first), *others = group
        exposed = f"{100 * first.epilogue:.0f} %" if first.epilogue else ""
        lines.append(
            f"  {1 + len(others):3} x {name:40} {flops / 1e9:9.1f} {moved / 1e6:9.1f} {1e6 * first.seconds:9.1f} us  "
            f"{first.bound:13} {exposed:>5}  {first.note}".rstrip()
        )
    return lines


def explanation(gpu: GPU, steps: dict[tuple[str, str], Trace], codes: Codes) -> str:
    """Every launch of every variant with its estimated time; the last columns: what bounds it, and the part of it that
    is epilogue (in attention, softmax) during which tensor cores wait."""
    lines = [
        f"cost model, not measured: {gpu.name}",
        f"  {'':6}{'launch':40} {'GFLOP':>9} {'MB':>9} {'each':>12}  bound by",
    ]
    for (case, variant), trace in steps.items():
        for name, launches in (("forward", trace.forward), ("backward", trace.backward)):
            seconds = total(launches, gpu, codes).seconds
            lines.append(f"{case}, {variant}, {name}: {len(launches)} launches, {1e3 * seconds:.3f} ms")
            lines += explained(gpu, launches, codes)
    return "\n".join(lines)
