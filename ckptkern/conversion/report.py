"""Reports what convert did: a row for each module that it converted or left unchanged."""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from .. import memory

WAY = (
    "a forward can recompute what convert cannot read: a part by ckptkern.checkpointed(part)(x), a list of layers by "
    "ckptkern.checkpoint_sequential(layers, 2, x); ckptkern.plan chooses by a budget"
)
NOTHING = "no module of it is a fused op, and checkpoints of its modules do not lower the peak"
RAN = ("fused", "checkpointed", "original")  # what a call of a converted module may run

AGAIN = "Convert the model once more, as it is trained now"  # the remedy where its inside has changed
WARNED: set[Hashable] = set()  # warnings since a model was converted


def warn_once(key: Hashable, text: str, stacklevel: int) -> None:
    if key not in WARNED:
        WARNED.add(key)
        warnings.warn(f"ckptkern.convert: {text}", stacklevel=stacklevel)


def warn_of(name: str, ran: str, kind: str, why: str) -> None:
    """Warns once for each cause that modules of a class, `kind`, do not run as their rows say."""
    original = "its original forward, which saves everything"
    how = original if ran == "original" else "an activation checkpoint, not fused"
    warn_once((ran, kind, why), f"a training call of {name} ({kind}) runs {how}: {why}", 7)


warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass
class Row:
    """Describes a module and its replacement.

    replaced_by: a fused op, "checkpoint" (activation checkpoint), "tiled" (runs in chunks of tokens), a class of ckptkern.nn,
    or None, with the reason.
    saved_before, saved_after: bytes that one call saves for backward, besides parameters.
    error: the largest relative error of output and gradients in the check.
    calls: calls with gradients that ran "fused", "checkpointed" or, in training, "original"; not counted under torch.compile.
    """

    name: str
    kind: str
    replaced_by: str | None
    saved_before: int | None = None
    saved_after: int | None = None
    error: float | None = None
    reason: str = ""
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Returns the number of calls that did not run as `replaced_by` says."""
        planned = "checkpointed" if self.replaced_by == "checkpoint" else "fused"
        return sum(count for ran, count in self.calls.items() if ran != planned)


@dataclass
class Conversion:
    """Lists the rows in the model's order. print(conversion) shows a table.

    saved_before, saved_after: bytes that a training call saves for backward, besides parameters; None if not measured.
    peak_before, peak_after: peak bytes of a step, above what is allocated when it begins.
    groups: the names of the layers of each region (`every`).
    """

    rows: list[Row] = field(default_factory=list)
    saved_before: int | None = None
    saved_after: int | None = None
    peak_before: int | None = None
    peak_after: int | None = None
    groups: list[list[str]] = field(default_factory=list)

    @property
    def converted(self) -> list[Row]:
        return [row for row in self.rows if row.replaced_by is not None]

    @property
    def left(self) -> list[Row]:
        return [row for row in self.rows if row.replaced_by is None]

    @property
    def calls(self) -> dict[str, int]:
        """Returns the sums of all rows' `calls`: {"fused": ..., "checkpointed": ..., "original": ...}."""
        return {kind: sum(row.calls.get(kind, 0) for row in self.rows) for kind in RAN}

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = [("module", "class", "replaced by", "saved before", "saved after", "error")]
        for name, rows in alike(self.rows):
            before, after, errors = (
                [value for row in rows if (value := getattr(row, column)) is not None]
                for column in ("saved_before", "saved_after", "error")
            )
            lines.append(
                (
                    name,
                    rows[0].kind,
                    rows[0].replaced_by or "left",
                    *(memory.format_size(sum(bytes_)) if bytes_ else "" for bytes_ in (before, after)),
                    f"{max(errors):.1e}" if errors else "",
                )
            )
        text = aligned(lines)
        for name, rows in alike([row for row in self.rows if row.reason]):
            prefix = "an activation checkpoint, because: " if rows[0].replaced_by else ""
            text.append(f"{name}: {prefix}{rows[0].reason}")
        for names in self.groups:
            text.append(f"{names[0]} to {names[-1]} are one region")
        count = len(self.converted)
        text.append(f"{count} module{'s' * (count != 1)} converted")
        if self.saved_before is not None and self.saved_after is not None:
            size = memory.format_size
            text[-1] += (
                f"; the whole model saves {size(self.saved_after)} for backward instead of {size(self.saved_before)}"
            )
            if self.peak_before is not None and self.peak_after is not None:
                text[-1] += f", and a step peaks at {size(self.peak_after)} instead of {size(self.peak_before)}"
        if not count and self.saved_before is not None:
            text.append(WAY)
        elif not self.rows:
            text[-1] += ": give convert a call of the model, as in ckptkern.convert(model, input_ids, labels=labels)"
        if self.converted:
            text.append("calls since then: " + ", ".join(f"{count} {kind}" for kind, count in self.calls.items()))
        return "\n".join(text)


def aligned(lines: list[tuple[str, ...]]) -> list[str]:
    """Returns the lines with their cells in columns."""
    columns = [[cell.ljust(max(map(len, cells))) for cell in cells] for cells in zip(*lines, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def write_rows(path: str | os.PathLike, rows: Iterable[dict[str, object]]) -> None:
    """Writes rows of the same columns as CSV."""
    rows = list(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def alike(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Returns the rows by groups whose names differ only in a number, with one name for each group."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\d+", "#", row.name), row.kind, row.replaced_by, row.reason), []).append(row)
    return [(name_of([row.name for row in group]), group) for group in groups.values()]


def name_of(names: list[str]) -> str:
    """Returns one name for modules whose names differ only in a number."""
    name = names[0] or "(the model)"
    return name if len(names) == 1 else f"{re.sub(r'[0-9]+', '*', name)} ({len(names)})"
