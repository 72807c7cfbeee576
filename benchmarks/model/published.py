"""The cost model beside what others have published: the same sizes, estimated for the GPU that they measured on.

What they published was not run here. Where it is eager PyTorch's time, the model's own error shows: the two should be equal.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptkern.benchmarks.cases import EAGER, Item, Maker, variants
from ckptkern.benchmarks.published import BACKWARD, FORWARD, GROUPS, STEP, Figure, Group
from ckptkern.benchmarks.report import with_part

from .estimate import total
from .rates import GPUS
from .sheet import codes_of
from .trace import build, peak, step

HEADER = ("source", "gpu", "case", "part", "variant", "ms", "tflops", "peak_mib", "note")
BEGIN, END = "<!-- published:begin -->", "<!-- published:end -->"


def _makers(item: Item) -> dict[str, Maker]:
    return {name: make for name, make in variants(item.case).items() if name == EAGER or name.startswith("ckptkern")}


def estimated(groups: Iterable[Group] = GROUPS, workers: int = 2) -> list[tuple[Group, list[Figure]]]:
    """Each group of a known GPU with its figures, the published ones first, then the model's of eager and of ours."""
    groups = [group for group in groups if group.gpu]
    traced: dict[tuple[str, str], dict] = {}
    for group in groups:
        item = group.item()
        if (group.gpu, item.name) not in traced:
            model, x = build(item)
            gpu, makers = GPUS[group.gpu], _makers(item)
            traced[group.gpu, item.name] = {
                variant: (step(gpu, make, model, x), peak(gpu, make, model, x)) for variant, make in makers.items()
            }
    codes = {}
    for name in {name for name, _ in traced}:
        steps = {
            (case, variant): one
            for (gpu, case), found in traced.items()
            if gpu == name
            for variant, (one, _) in found.items()
        }
        codes[name] = codes_of(GPUS[name], steps, workers)
    found = []
    for group in groups:
        own = []
        for variant, (one, most) in traced[group.gpu, group.item().name].items():
            launches = {STEP: one.launches, FORWARD: one.forward, BACKWARD: one.backward}[group.part]
            ms = 1e3 * total(launches, GPUS[group.gpu], codes[group.gpu]).seconds
            own.append(Figure("cost model", variant, ms, mib=most / 2**20 if group.part == STEP else None))
        found.append((group, [group.complete(one) for one in (*group.figures, *own)]))
    return found


def write(found: Sequence[tuple[Group, list[Figure]]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for group, figures in found:
            for one in figures:
                numbers = ("" if n is None else f"{n:.5g}" for n in (one.ms, one.tflops, one.mib))
                writer.writerow((one.source, group.gpu, group.item().name, group.part, one.variant, *numbers, one.note))


def table(path: Path) -> str:
    """The markdown table of a file of `write`."""
    lines = ["| | ms | TFLOP/s | peak, MiB | source |", "|---|---|---|---|---|"]
    before = None
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            group = f"{row['gpu'].upper()}, {row['case']}, {row['part']}"
            if group != before:
                lines.append(f"| **{group}** | | | | |")
            before = group
            numbers = [f"{float(row[name]):.{digits}f}" if row[name] else "" for name, digits in
                       (("ms", 1), ("tflops", 0), ("peak_mib", 0))]  # fmt: skip
            source = "; ".join(filter(None, (row["source"], row["note"])))
            lines.append(f"| {row['variant']} | {' | '.join(numbers)} | {source} |")
    return "\n".join(lines)


def put_into(page: Path, text: str) -> None:
    """Between the page's markers. Raises ValueError where it has none."""
    page.write_text(with_part(page, BEGIN, text, END))
