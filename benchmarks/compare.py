"""Two runs of the benchmark side by side: which times moved beyond noise, and which bytes changed at all."""

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
    """The rows of a results.csv by (case, variant, dtype), and what its env.json says that times depend on."""

    rows: dict[Key, dict[str, str]]
    setting: dict[str, str]


def read(path: Path) -> Run:
    """A results.csv and the env.json beside it. Raises ValueError if it is none."""
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
    """What an env.json says that times depend on."""
    versions = env.get("versions", {})
    return {"device": env.get("device", "unknown")} | {
        name: str(versions.get(name, "unknown")) for name in ("torch", "triton")
    }


def span(row: dict[str, str], eager: dict[str, str] | None) -> tuple[float, float, float] | None:
    """(a variant's time, from, to): over eager's, or of eager itself in ms. None if it was not timed."""
    if eager is None or not all(one[field] for one in (row, eager) for field in ("ms", "p20_ms", "p80_ms")):
        return None
    ms, low, high = (float(row[field]) for field in ("ms", "p20_ms", "p80_ms"))
    if row["variant"] == EAGER:
        return ms, low, high
    base, base_low, base_high = (float(eager[field]) for field in ("ms", "p20_ms", "p80_ms"))
    return ms / base, low / base_high, high / base_low


def _time(old: tuple[float, float, float] | None, new: tuple[float, float, float] | None) -> tuple[str, str, str]:
    cells = tuple("–" if one is None else f"{one[0]:.3g}" for one in (old, new))
    if old is None or new is None:
        return *cells, ""
    if old[1] <= new[2] and new[1] <= old[2]:
        return *cells, "within noise"
    return *cells, f"{'slower' if new[0] > old[0] else 'quicker'}, {new[0] / old[0]:.2f}x"


def _bytes(text: str) -> str:
    return f"{float(text) / MIB:.6g} MiB"


def changed_bytes(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What a variant saves or peaks at, where it is another figure than before."""
    return [
        f"{name} {_bytes(old[field])} -> {_bytes(new[field])}"
        for name, field in (("saved", "saved_bytes"), ("peak", "peak_bytes"))
        if old[field] and new[field] and int(float(old[field])) != int(float(new[field]))
    ]


def compare(old: Run, new: Run) -> str:
    """A Markdown table with a line per (case, variant) of both runs. Times are left out if the runs had another device
    or torch."""
    other = [f"{name}: {value}, now {new.setting[name]}" for name, value in old.setting.items()
             if "unknown" in (value, new.setting[name]) or value != new.setting[name]]  # fmt: skip
    lines, notes = [], []
    for key, row in new.rows.items():
        before = old.rows.get(key)
        if before is None:
            notes.append(f"- {key[0]} {key[1]}: not in the old file")
            continue
        now_status, old_status = row.get("status", "ok"), before.get("status", "ok")
        if now_status != old_status:
            notes.append(
                f"- {key[0]} {key[1]}: {old_status}, now {now_status}: {row.get('note') or before.get('note')}"
            )
        moved = changed_bytes(before, row)
        if not other:
            eager = [run.rows.get((key[0], EAGER, key[2])) for run in (old, new)]
            times = _time(span(before, eager[0]), span(row, eager[1]))
            if key[1] == EAGER:
                times = *(cell if cell == "–" else f"{cell} ms" for cell in times[:2]), times[2]
            lines.append([key[0], key[1], *times, ", ".join(moved)])
        elif moved:
            lines.append([key[0], key[1], ", ".join(moved)])
    notes += [f"- {case} {variant}: only in the old file" for case, variant, dtype in old.rows.keys() - new.rows.keys()
              if case in {one[0] for one in new.rows}]  # fmt: skip
    if other:
        text = f"WARNING: times are not compared, because these differ: {'; '.join(other)}"
        heading = ["case", "variant", "bytes"]
        return "\n\n".join(
            filter(None, (text, table(heading, lines) if lines else "No bytes changed.", "\n".join(notes)))
        )
    heading = ["case", "variant", "old", "new", "time", "bytes"]
    return "\n\n".join(filter(None, (table(heading, lines), "\n".join(sorted(notes)), RULE)))
