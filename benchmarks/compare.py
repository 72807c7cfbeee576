"""Compares two runs of the benchmark: which times moved beyond noise, and which bytes changed at all."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import NamedTuple

from .cases import EAGER
from .report import MIB, Rows, table

RULE = (
    "A time is a ratio to eager's of the same run. It moved if the two runs' ranges do not meet: from the variant's 20th\n"
    "percentile over eager's 80th to its 80th over eager's 20th. Eager itself is compared in ms, by its own percentiles."
)
COLUMNS = {"case", "variant", "dtype", "ms", "p20_ms", "p80_ms", "ratio", "saved_bytes", "peak_bytes"}
Key = tuple[str, str, str]


class Run(NamedTuple):
    """The rows of a results.csv by (case, variant, dtype), and the facts of its env.json on which times depend."""

    rows: dict[Key, dict[str, str]]
    setting: dict[str, str]


def read(path: Path) -> Run:
    """Returns a results.csv and the env.json beside it. Raises ValueError for another file."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = COLUMNS - set(reader.fieldnames or ())
            rows: Rows = [] if missing else list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--compare: cannot read {path}: {error}") from error
    if missing:
        raise ValueError(
            f"--compare: {path} is not a results.csv of this command: it lacks {', '.join(sorted(missing))}"
        )
    try:
        env = json.loads((path.parent / "env.json").read_text())
    except (OSError, ValueError):
        env = {}
    ours = (row for row in rows if row["case"] != "ceiling" and row.get("status") != "published")
    keyed = {(row["case"], row["variant"], row["dtype"]): row for row in ours}
    return Run(keyed, setting_of(env))


def setting_of(env: dict) -> dict[str, str]:
    """Returns the facts of an env.json on which times depend."""
    versions = env.get("versions", {})
    return {"device": env.get("device", "unknown")} | {
        name: str(versions.get(name, "unknown")) for name in ("torch", "triton")
    }


def span(row: dict[str, str], eager: dict[str, str] | None) -> tuple[float, float, float] | None:
    """Returns a variant's time and its range, over eager's or, for eager itself, in ms. Returns None if it was not timed."""
    if eager is None or not all(timed[field] for timed in (row, eager) for field in ("ms", "p20_ms", "p80_ms")):
        return None
    ms, low, high = (float(row[field]) for field in ("ms", "p20_ms", "p80_ms"))
    if row["variant"] == EAGER:
        return ms, low, high
    base, base_low, base_high = (float(eager[field]) for field in ("ms", "p20_ms", "p80_ms"))
    return ms / base, low / base_high, high / base_low


def _time(
    old: tuple[float, float, float] | None, new: tuple[float, float, float] | None, unit: str
) -> tuple[str, str, str]:
    before, now = ("–" if times is None else f"{times[0]:.3g}{unit}" for times in (old, new))
    if old is None or new is None:
        return before, now, ""
    if old[1] <= new[2] and new[1] <= old[2]:
        return before, now, "within noise"
    return before, now, f"{'slower' if new[0] > old[0] else 'quicker'}, {new[0] / old[0]:.2f}x"


def _bytes(text: str) -> str:
    return f"{float(text) / MIB:.6g} MiB"


def changed_bytes(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Returns a variant's saved and peak bytes where they changed."""
    return [
        f"{name} {_bytes(old[field])} -> {_bytes(new[field])}"
        for name, field in (("saved", "saved_bytes"), ("peak", "peak_bytes"))
        if old[field] and new[field] and int(float(old[field])) != int(float(new[field]))
    ]


def compare(old: Run, new: Run) -> str:
    """Returns a Markdown table with a line per (case, variant) of both runs. Times are left out if the device or torch
    differ."""
    other = [
        f"{name}: {value}, now {new.setting[name]}"
        for name, value in old.setting.items()
        if "unknown" in (value, new.setting[name]) or value != new.setting[name]
    ]
    lines, notes = [], []
    for (case, variant, dtype), row in new.rows.items():
        before = old.rows.get((case, variant, dtype))
        if before is None:
            notes.append(f"- {case} {variant}: not in the old file")
            continue
        old_status, now = before.get("status", "ok"), row.get("status", "ok")
        if now != old_status:
            notes.append(f"- {case} {variant}: {old_status}, now {now}: {row.get('note') or before.get('note')}")
        times = "", "", ""
        if not other:
            old_eager, eager = (run.rows.get((case, EAGER, dtype)) for run in (old, new))
            times = _time(span(before, old_eager), span(row, eager), " ms" if variant == EAGER else "")
        lines.append([case, variant, *times, ", ".join(changed_bytes(before, row))])
    cases = {case for case, *_ in new.rows}
    gone = [
        f"- {case} {variant}: only in the old file"
        for case, variant, _ in old.rows.keys() - new.rows.keys()
        if case in cases
    ]
    warning = f"WARNING: times are not compared, because these differ: {'; '.join(other)}" if other else ""
    shown = table(["case", "variant", "old", "new", "time", "bytes"], lines)
    return "\n\n".join(filter(None, (warning, shown, "\n".join(sorted(notes + gone)), "" if other else RULE)))
