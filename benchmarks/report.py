"""Writes tables and figures of results.csv, and the part of a documentation page that shows them.

python -m ckptkern.benchmarks.report --page docs/measurements/figures.md            write that part again
python -m ckptkern.benchmarks.report --page docs/measurements/figures.md --check    exit status 1 if it is not current
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..extras import missing
from .cases import CHECKPOINT, CHECKPOINTS, EAGER, MODES

SHOWN = ("ok", "published")  # statuses of rows in tables; others are named below them
WIDE = 0.25  # a spread (p80 - p20) / median beyond this is named: another program may have moved the median
COLUMNS = (CHECKPOINT, *(f"ckptkern {mode}" for mode in MODES))  # variants of a page's table
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
MIB = 2**20
Rows = list[dict[str, str]]


def read(folder: Path) -> tuple[dict[str, Rows], dict]:
    """Returns the rows of results.csv by case, and env.json."""
    by_case: dict[str, Rows] = {}
    with open(folder / "results.csv", newline="") as file:
        for row in csv.DictReader(file):
            by_case.setdefault(row["case"], []).append(row)
    return by_case, json.loads((folder / "env.json").read_text())


def table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, the first column left-aligned and the others right."""
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, rule, *lines))


def _figure(row: dict[str, str], field: str, form: str, scale: float = 1.0) -> str:
    return format(float(row[field]) * scale, form) if row.get(field) else "–"


def _bytes(row: dict[str, str], field: str) -> str:
    if not row.get(field):
        return "–"
    size, units = float(row[field]), ["B", "KiB", "MiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 100 else f"{size:.3g} {units[0]}"


def _spread(row: dict[str, str]) -> float | None:
    """Returns (p80 - p20) / median of a row's times."""
    known = row.get("ms") and row.get("p20_ms") and row.get("p80_ms")
    return (float(row["p80_ms"]) - float(row["p20_ms"])) / float(row["ms"]) if known else None


def case_table(rows: Rows, timed: bool) -> str:
    """Returns the table of a case's measured variants, without empty columns. timed: with milliseconds, which mean something
    on a GPU only."""
    base = next((float(row["ms"]) for row in rows if row["variant"] == CHECKPOINT and row["ms"]), None)

    def by_checkpoint(row: dict[str, str]) -> str:
        return _figure(row, "ms", ".2f", 1 / base) if base and row["status"] == "ok" else "–"

    columns: dict[str, Callable[[dict[str, str]], str]] = {
        "time / eager": lambda row: _figure(row, "ratio", ".2f"),
        "time / checkpoint": by_checkpoint,
        "spread": lambda row: "–" if (spread := _spread(row)) is None else f"{spread:.0%}",
        "saved": lambda row: _bytes(row, "saved_bytes"),
        "peak": lambda row: _bytes(row, "peak_bytes"),
        "error / eager's": lambda row: _figure(row, "error_ratio", ".2f"),
        "ms (p20–p80)": lambda row: _time(row) if timed else "–",
        "CUDA graph ms": lambda row: _figure(row, "graph_ms", ".3f"),
        "tokens/s": _rate,
        "longest sequence": lambda row: _figure(row, "longest", ",.0f"),
        "source": lambda row: row.get("source") or "",
    }
    shown = [row for row in rows if row["status"] in SHOWN]
    cells = {name: [cell(row) for row in shown] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if set(column) - {"", "–"}}
    return (
        table(["variant", *cells], [*zip((row["variant"] for row in shown), *cells.values(), strict=True)])
        if shown
        else ""
    )


def _rate(row: dict[str, str]) -> str:
    """Returns the tokens per second of a whole model's step."""
    return f"{1e3 * float(row['tokens']) / float(row['ms']):,.0f}" if row["ms"] and row.get("tokens") else "–"


def _time(row: dict[str, str]) -> str:
    """Returns a row's ms, and their spread if there is one."""
    ms = _figure(row, "ms", ".3f")
    return f"{ms} ({_figure(row, 'p20_ms', '.3f')}–{_figure(row, 'p80_ms', '.3f')})" if row.get("p20_ms") else ms


def _notes(rows: Rows) -> str:
    """Returns notes on the rows of a case: remarks, wide spreads, and variants without figures with the reason."""
    others = [
        f"- {row['variant'] or 'case'}: {row['status']}: {row['note']}" for row in rows if row["status"] not in SHOWN
    ]
    measured = [row for row in rows if row["status"] == "ok"]
    notes: dict[str, list[str]] = {}
    for row in measured:
        if row["note"]:
            notes.setdefault(row["note"], []).append(row["variant"])
    said = [note if len(names) == len(measured) else f"{', '.join(names)}: {note}" for note, names in notes.items()]
    if wide := [row["variant"] for row in measured if (_spread(row) or 0.0) > WIDE]:
        said.append(f"spread above {WIDE:.0%}, so measure again on a quiet machine: {', '.join(wide)}")
    return "\n".join([f"- {note}" for note in said] + others)


def is_model(rows: Rows) -> bool:
    """Returns whether a row has tokens, or the longest sequence that fits."""
    return any(row.get("tokens") or row.get("longest") for row in rows)


def preface(env: dict) -> str:
    """Returns where and with what a folder's figures were measured."""
    versions = env.get("versions", {})
    text = f"torch {versions.get('torch', '?')}, triton {versions.get('triton', '?')}"
    if env.get("ceilings"):
        ceilings = ", ".join(f"{value:.0f} {name}" for name, value in env["ceilings"].items())
        text += f", CUDA {versions.get('CUDA')}, driver {versions.get('NVIDIA driver')}; ceilings: {ceilings}"
    else:
        text += "; on a CPU only ratios within a case mean something. Saved bytes are exact"
    return f"{text}. Commit {env.get('commit') or 'unknown'}, {env.get('date', '')[:10]}."


def report(folder: Path) -> str:
    """Returns the text of a folder's report.md."""
    by_case, env = read(folder)
    parts = [f"# {env.get('device', folder.name)}", preface(env)]
    parts.append(
        "Time of forward + backward, median of interleaved rounds; spread: from the 20th to the 80th percentile, of the\n"
        "median. Every variant was checked against float64 first, unless its note says against what; an error is the largest\n"
        "of the output's and the gradients', in eager's own."
    )
    if env.get("warning"):
        parts.append(f"**{env['warning']}**")
    for case, rows in by_case.items():
        if case == "ceiling":
            continue
        shown = case_table(rows, "ceilings" in env or is_model(rows))
        parts += [f"## {case}, {rows[0]['dtype']}".rstrip(", "), *filter(None, (shown, _notes(rows)))]
    return "\n\n".join(parts) + "\n"


def _of_another(row: dict[str, str]) -> bool:
    """Returns whether a row measures an implementation other than eager, torch's checkpoints and ckptkern."""
    shown = row["variant"] in (EAGER, *CHECKPOINTS) or row["variant"].startswith(("ckptkern", "own core"))
    return not (shown or row["note"].startswith("not a result"))


def summary(folder: Path) -> str:
    """Returns a table of a folder's cases, with time / eager of `COLUMNS` and of the fastest variant of others, and a table of
    its whole models that ckptkern ran, with time / eager and peak of every variant."""
    by_case, env = read(folder)
    measured = {case: [row for row in rows if row["status"] == "ok" and row["ratio"]] for case, rows in by_case.items()}
    cases, models = [], {}
    for case, rows in measured.items():
        by_variant = {row["variant"]: row for row in rows}
        if EAGER not in by_variant or len(rows) == 1:
            continue
        if is_model(by_case[case]):
            if any(name.startswith("ckptkern") for name in by_variant):
                models[case.removeprefix("model/")] = by_variant
            continue
        fastest = min(filter(_of_another, rows), key=lambda row: float(row["ratio"]), default=None)
        times = [_figure(by_variant[name], "ratio", ".2f") if name in by_variant else "" for name in COLUMNS]
        cases.append([case, *times, f"{fastest['variant']} {_figure(fastest, 'ratio', '.2f')}" if fastest else ""])
    device = env.get("device", folder.name)
    measured_by = f"torch {env.get('versions', {}).get('torch', '?')}, {env.get('date', '')[:10]}"
    parts = [f"**{device}**, time / eager ({measured_by})", table(["case", *COLUMNS, "fastest other"], cases)]
    if models:
        variants = dict.fromkeys(name for rows in models.values() for name in rows)
        lines = [[name, *(_step(rows[name]) if name in rows else "" for rows in models.values())] for name in variants]
        parts += [f"**{device}**, whole models, time / eager · peak, MiB", table(["variant", *models], lines)]
    return "\n\n".join(parts)


def _step(row: dict[str, str]) -> str:
    """Returns time / eager and the peak in MiB of a whole model's step."""
    return f"{_figure(row, 'ratio', '.2f')} · {_figure(row, 'peak_bytes', ',.0f', 1 / MIB)}"


def draw(folder: Path) -> None:
    """Draws figures/CASE.png: time over eager's and saved bytes, a bar for each variant. Needs matplotlib."""
    from matplotlib.figure import Figure

    by_case, env = read(folder)
    (folder / "figures").mkdir(exist_ok=True)
    for case, rows in by_case.items():
        timed = [row for row in rows if row["status"] == "ok" and row["ratio"]]
        if not timed:
            continue
        names = [row["variant"] for row in timed]
        colors = [
            "#0b6e7f" if "ckptkern" in name else "#e38b2c" if "checkpoint" in name else "#a9b4c0" for name in names
        ]
        figure = Figure(figsize=(10, 1.2 + 0.34 * len(timed)), layout="constrained")
        figure.suptitle(f"{case}, {rows[0]['dtype']}, {env.get('device', '')}", fontsize=11)
        time_axes, saved_axes = figure.subplots(1, 2, sharey=True)
        for axes, title, field, scale in (
            (time_axes, "time of forward + backward / eager", "ratio", 1.0),
            (saved_axes, "saved for backward, MiB", "saved_bytes", 1 / MIB),
        ):
            bars = axes.barh(names, [float(row[field]) * scale for row in timed], color=colors)
            axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
            axes.set_title(title, loc="left", fontsize=9)
            axes.margins(x=0.15)
            axes.spines[["top", "right"]].set_visible(False)
        time_axes.axvline(1.0, color="#606870", linewidth=0.8, linestyle="--")
        time_axes.invert_yaxis()
        figure.savefig(folder / "figures" / f"{case.replace('/', '-')}.png", dpi=110)


def write(folder: Path) -> None:
    """Writes report.md."""
    (folder / "report.md").write_text(report(folder))


def write_all(folder: Path, figures: bool = True) -> None:
    """Writes report.md and, if requested and matplotlib is installed, the figures."""
    write(folder)
    if figures and (hint := missing("matplotlib")):
        print(f"no figures: {hint}", file=sys.stderr)
    elif figures:
        draw(folder)


def page_part(results: Path) -> str:
    """Returns the text between the page's markers: the summaries of GPUs or, if there are none, of CPUs."""
    folders = sorted(path.parent for path in results.glob("*/results.csv"))
    folders = [folder for folder in folders if "ceilings" in read(folder)[1]] or folders
    return "\n\n".join(map(summary, folders)) or "No results yet."


def with_part(page: Path, begin: str, part: str, end: str) -> str:
    """Returns the text of a page with `part` between its markers. Raises ValueError if the page has none."""
    before, marker, rest = page.read_text().partition(begin)
    _, last, after = rest.partition(end)
    if not (marker and last):
        raise ValueError(f"{page} has no {begin} ... {end}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ckptkern.benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("--page", type=Path, required=True, help="file with the markers")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="(default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if it is not current")
    args = parser.parse_args(argv)
    text = args.page.read_text()
    try:
        current = with_part(args.page, BEGIN, page_part(args.results), END)
    except ValueError as error:
        parser.error(str(error))
    if args.check:
        if current != text:
            print(f"{args.page} is not current: python -m ckptkern.benchmarks.report --page {args.page}")
        return int(current != text)
    args.page.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main())
