"""Runs the benchmark cases on this machine's device and writes one folder of results: ``python -m ckptkern bench``.

results.csv gets its rows as they come, report.md is written after each case, and the figures follow at the end. The
measurements need torch only, the figures matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..ops.dispatch.choices import parse_bytes
from ..tools import env
from . import cases, compare, measure, micro, own, report, suite
from .cases import Case, Maker

DEFAULT_RESULTS = Path("benchmarks/results")
OWN_RESULTS = Path("bench_output")  # of --op and --case
FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MINUTES = {"cuda": 5.0, "cpu": 4.0}
SECONDS = {"cuda": 2.5, "cpu": 4.0}  # for timing a case, at most
Job = tuple[Case, dict[str, Maker]]


def device_name(device: torch.device) -> str:
    """Returns the name of a device's folder, such as "cpu" or "nvidia-h200"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def commit() -> str:
    """Returns $CKPTKERN_COMMIT, or git's commit of this file; "unknown", with a warning, in a tree without history."""
    described = os.environ.get("CKPTKERN_COMMIT") or env.answer(
        "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"
    )
    if not described:
        say("WARNING: git finds no commit of this tree, so env.json says unknown. Set CKPTKERN_COMMIT")
    return described or "unknown"


def environment(device: torch.device) -> dict[str, Any]:
    """Returns the facts that a figure must come with: versions, devices, clocks, SDPA backends, tiles, commit, date."""
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        **env.collect(),
    }
    if device.type == "cuda":
        fields = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
        index = str(device.index or 0)
        clocks = env.answer("nvidia-smi", "-i", index, f"--query-gpu={fields}", "--format=csv,noheader")
        facts["clocks"] = (
            dict(zip(fields.split(","), clocks.split(", "), strict=False)) if clocks else "nvidia-smi does not answer"
        )
    if importlib.util.find_spec("triton"):
        from ..triton_kernels.tile import TILES

        facts["tiles"] = {
            f"{kernel} sm_{arch}": {shapes: tile._asdict() for shapes, tile in table.items()}
            for (kernel, arch), table in TILES.items()
        }
    return facts


def select(option: str, pattern: str, known: Sequence[Any]) -> list[Any]:
    """Returns the items of `known` whose name matches the regular expression; a comma is another |. Raises ValueError if
    none does."""
    try:
        matches = re.compile(pattern.replace(",", "|")).search
    except re.error as error:
        raise ValueError(f"{option} {pattern!r} is not a regular expression: {error}") from error
    matching = [item for item in known if matches(item.name)]
    if not matching:
        raise ValueError(f"{option} {pattern!r} matches none of {', '.join(item.name for item in known)}")
    return matching


class Sheet:
    """results.csv, whose rows are written as they come. A row replaces an earlier one of its case and variant, but not one
    that stood when `keep` was called. bad: failures of ckptkern's, by case and variant."""

    def __init__(self, path: Path, standing: Iterable[dict[str, str]] = (), commit: str | None = None):
        self._path, self._commit = path, commit
        self.rows: dict[tuple[str, str], dict[str, Any]] = {(row["case"], row["variant"]): row for row in standing}
        self.bad: dict[tuple[str, str], str] = {}
        self.keep()
        self._write()

    def keep(self) -> None:
        """Protects the rows that a resumed run would leave as they are."""
        self.final = {key for key, row in self.rows.items() if stands(row)}

    def _write(self) -> None:
        new = self._path.with_suffix(".new")  # in the same folder, because another may be on another filesystem
        try:
            with open(new, "w", newline="") as file:
                writer = csv.DictWriter(file, measure.FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows.values())
            new.replace(self._path)
        finally:  # of an interrupt: nothing but results.csv stays in the folder
            new.unlink(missing_ok=True)

    def __call__(self, row: measure.Row) -> None:
        key = row.case, row.variant
        if key in self.final:
            return  # eager, once more
        self.update(key, **dataclasses.asdict(row) | {"commit": self._commit})
        measured = f"{row.ms:.4g} ms" if row.ms else row.note
        if row.p20_ms and row.p80_ms:
            measured += f" ({row.p20_ms:.4g} to {row.p80_ms:.4g})"
        measured += f", {row.ratio:.2f} of eager" if row.ratio else ""
        say(f"  {row.variant:30} {row.status:8} {measured}")
        if row.variant.startswith("ckptkern") and row.status in ("failed", "wrong", "missing"):
            self.bad[key] = f"{row.status}: {row.note}"

    def update(self, key: tuple[str, str], **cells: Any) -> None:
        """Writes cells of a row."""
        self.rows[key] = self.rows.get(key, {}) | {
            name: "" if value is None else f"{value:.5g}" if isinstance(value, float) else value
            for name, value in cells.items()
        }
        self._write()

    def end(self, resumed: Container[str]) -> int:
        """Prints the failures of ckptkern's. Returns the exit status: 1 if there are any, UNFINISHED if the time ended
        before all resumed cases were measured, else 0."""
        for (case, variant), text in self.bad.items():
            say(f"NOT RIGHT: {case} {variant}: {text}")
        late = any(OVER in row.get("note", "") for row in self.rows.values() if row["case"] in resumed)
        return 1 if self.bad else UNFINISHED if late else 0


UNFINISHED = 124  # exit status of a resumed run whose time was over before all was measured, as timeout(1) has it
OVER = "the budget"  # in the note of cases dropped for time
INTERRUPTED = "interrupted; --resume measures what is missing"
STAND = ("ok", "missing", "published")  # a row's status, if a resumed run need not measure it again


def stands(row: Mapping[str, Any]) -> bool:
    """Returns whether a resumed run leaves a row as it is; also one that ended a process or ran out of memory, as it would
    again."""
    return row.get("status") in STAND or row.get("note", "").startswith((measure.LOST, measure.OUT_OF_MEMORY))


def earlier_rows(out: Path, setting: dict[str, str]) -> list[dict[str, str]]:
    """Returns the rows of an earlier run in the folder. Raises ValueError if that was of another device, torch or triton."""
    path = out / "results.csv"
    if not path.exists():
        return []
    earlier = compare.read(path).setting
    if earlier != setting:
        raise ValueError(f"--resume: {path} was measured with {earlier}, and this is {setting}: name another --out")
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def chosen(args: argparse.Namespace, device: torch.device) -> list[Case]:
    """Returns the cases that the arguments select: built-in cases, an op, or a user's module. Raises ValueError with the
    reason."""
    modes = tuple(filter(None, args.modes.split(","))) if args.modes is not None else None
    known = cases.MODES if args.op or args.case else cases.MODES + cases.BY_SUBLAYER
    if modes is not None and (not modes or set(modes) - {*known}):
        raise ValueError(f"--modes: wanted modes of {', '.join(known)}, separated by commas, but got {args.modes!r}")
    dtype = FLOATS.get(args.dtype)
    if sum(map(bool, (args.op, args.case, args.cases))) > 1:
        raise ValueError("--op, --case and --cases exclude each other")
    if sum(map(bool, (args.op or args.case, args.headline, args.published))) > 1:
        raise ValueError("--headline, --published, --op and --case exclude each other")
    stray = [name for name in micro.OPTIONS if not args.op and getattr(args, name) is not None]
    if stray:
        raise ValueError(f"{micro.flag(stray[0])} goes with --op, which names one of {', '.join(micro.OPS)}")
    if args.case:
        return [own.case_of(args.case, device, modes, dtype)]
    if args.op:
        selected = [micro.case_of(args, device.type, modes)]
    else:
        selected = select("--cases", args.cases, suite.cases_of(device.type, args.headline, args.published))
    if modes is not None:
        selected = [
            dataclasses.replace(case, modes=[mode for mode in case.modes if mode in (*modes, "")]) for case in selected
        ]
    return [dataclasses.replace(case, dtype=dtype) for case in selected]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


CASE_HELP = """\
examples:
  python -m ckptkern bench --cases "^mlp" --list
  python -m ckptkern bench --op mlp --features 4096 --tokens 8192
  python -m ckptkern bench --case model.py:build --modes full

--case: FUNCTION takes no arguments and returns (model, inputs). The inputs are
a tensor, a tuple of positional arguments or a dict of keyword arguments, of the
training size. FILE is a file or an importable module. The first floating-point
input requires a gradient. "ckptkern MODE" is the model after ckptkern.convert,
or with its own layers of ckptkern.nn in that mode.

--baseline: FUNCTION(model) takes the case's eager model, for --op a module of
ckptkern.benchmarks.models, and returns a function or module on the same
parameters to call in its place. It may change the model, which is a copy. Its
results are checked as all others are. The variant is called "your FUNCTION"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m ckptkern bench``."""
    parser.description = "Measure time, saved bytes, peak and error of each case in every variant."
    parser.add_argument(
        "--cases", default="", metavar="REGEX", help="run the cases whose names match; a comma means or (default: all)"
    )
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, f"{micro.epilog()}\n\n{CASE_HELP}"
    parser.add_argument(
        "--headline",
        action="store_true",
        help="run the most important cases: each op, some at d = 1024 and 4096, with two variants of torch.compile",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="run the cases of published figures, which the report shows beside ckptkern's",
    )
    parser.add_argument("--case", metavar="FILE:FUNCTION", help="run your own module instead; see below")
    parser.add_argument(
        "--baseline",
        metavar="FILE:FUNCTION",
        action="append",
        default=[],
        help="add your own function as a variant; see below. May be repeated",
    )
    parser.add_argument(
        "--modes",
        metavar="MODE,...",
        help="recompute modes: none, selective, full; for layers also ATTENTION/MLP (default: all modes of a case)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(FLOATS),
        help="dtype of the cases (default: bf16 on a GPU, fp32 on a CPU; --case: the module's)",
    )
    parser.add_argument(
        "--workspace",
        metavar="SIZE",
        help="workspace of ckptkern's variants, such as 64MiB, with which their names then end (default: the device's)",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD.csv",
        help="print what changed beyond noise since an earlier results.csv, which has its env.json beside it",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and their variants, and do not measure")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder of the results (default: {DEFAULT_RESULTS}/<device>; with --op and --case {OWN_RESULTS}/<device>)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device to measure (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=30,
        metavar="N",
        help="rounds of timing per variant, on a CPU at most (default: 30)",
    )
    parser.add_argument(
        "--budget-minutes",
        type=float,
        metavar="M",
        help=f"drop the cases of lowest priority after this time, and name them (default: {MINUTES['cuda']:g} on a GPU, "
        f"{MINUTES['cpu']:g} on a CPU)",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="also measure torch.compile (default: on a GPU only)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the results in --out, and measure only what is missing"
    )
    parser.add_argument(
        "--figures",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw figures/CASE.png beside results.csv, env.json and report.md (default: yes)",
    )
    micro.add_arguments(parser)


def jobs_of(chosen: list[Case], compilers: Container[str], measured: Container[tuple[str, str]]) -> list[Job]:
    """Returns the jobs in order: cases with the variants that are not measured yet, and eager, to be timed interleaved.
    compilers: the variants of torch.compile. After the first figures come two of these on the first size of the most
    important cases; the others, half a minute per case, come last."""
    compiled = [name for name in cases.COMPILED if name in compilers]
    first = [case for case in chosen if case.priority <= cases.HEADLINE]
    rest = [case for case in chosen if case.priority > cases.HEADLINE]
    most = [case for case in first if case.priority == 0]
    two = [name for name in compiled if name in cases.FIRST_COMPILED]
    jobs, planned = [], set()
    for group, names in ((first, None), (most, two), (rest, None), (first, compiled), (rest, compiled)):
        for case in group:
            makers = cases.variants(case) if names is None else {name: cases.COMPILED[name] for name in names}
            new = {name: make for name, make in makers.items() if (case.name, name) not in planned}
            planned |= {(case.name, name) for name in new}
            if left := {name: make for name, make in new.items() if (case.name, name) not in measured}:
                jobs.append((case, {cases.EAGER: cases.eager} | left))
    return jobs


def with_baselines(chosen: list[Case], targets: list[str]) -> list[Case]:
    """Returns the cases with the user's own functions as further variants. Raises ValueError for anything but FILE:FUNCTION."""
    makers = {}
    for target in targets:
        try:
            name, maker = own.baseline_of(target)
        except ValueError as error:
            raise ValueError(f"--baseline: {error}") from error
        if name in makers:
            raise ValueError(f"--baseline: wanted functions of different names but got {target} twice")
        makers[name] = maker
    return [dataclasses.replace(case, baselines={**case.baselines, **makers}) for case in chosen]


def ceilings(device: torch.device, emit: measure.Emit, rounds: int) -> dict[str, float]:
    """Measures the GPU's limits in this run: a copy of 1 GiB, and a bf16 matmul of 8192 cubed by cuBLAS."""
    source, n = torch.randn(2**28, device=device), 8192
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    steps = {"copy 1 GiB": lambda index: target.copy_(source), "bf16 matmul 8192": lambda index: torch.mm(a, b)}
    work = {"copy 1 GiB": (2e-6 * source.nbytes, "copy GB/s"), "bf16 matmul 8192": (2e-9 * n**3, "bf16 matmul TFLOP/s")}
    measure.interleaved(steps, measure.cuda_clock, 3, cuda=True)
    times, _ = measure.interleaved(steps, measure.cuda_clock, rounds, cuda=True)
    rates = {}
    for name, taken in times.items():
        row = measure.Row("ceiling", name, device.type, "float32" if name.startswith("copy") else "bfloat16")
        measure.add_times(row, taken, None)
        amount, unit = work[name]
        rates[unit] = amount / row.ms
        row.note = f"{rates[unit]:.0f} {unit.split()[-1]}"
        emit(row)
    return rates


def measure_all(
    jobs: list[Job], sheet: Sheet, device: torch.device, out: Path, facts: dict[str, Any], rounds: int, minutes: float
) -> bool:
    """Writes results.csv, and report.md after each case. Returns whether the GPU is lost to this process."""
    kind = device.type
    deadline, lost = time.monotonic() + 60 * minutes, ""
    if kind == "cuda":
        facts["ceilings"] = ceilings(device, sheet, rounds)
        (out / "env.json").write_text(json.dumps(facts, indent=2) + "\n")
    for place, (case, makers) in enumerate(jobs, 1):
        compiled = makers.keys() <= {cases.EAGER, *cases.COMPILED}
        for figure in case.figures:
            sheet(measure.row_of_figure(case.name, kind, figure))
        sheet.keep()
        left = deadline - time.monotonic()
        if left < 0:
            note = f"over {OVER} of {minutes:.3g} minutes"
            sheet(measure.Row(case.name, "compile" if compiled else "", kind, "", "dropped", note=note))
            continue
        say(f"[{place}/{len(jobs)}] {case.name}{', compiled' * compiled}")
        try:
            seconds = min(SECONDS[kind], left / 2 / (len(jobs) - place + 1))
            measure.measure(case, makers, device, sheet, rounds, seconds, deadline)
        except measure.GpuLost as error:
            lost = str(error)
        except Exception as error:  # the reference itself: out of memory, usually
            sheet.bad[case.name, cases.EAGER] = measure.one_line(error)
            sheet(measure.Row(case.name, cases.EAGER, kind, "", "failed", note=measure.one_line(error)))
        except KeyboardInterrupt:  # also of a time limit from outside
            sheet.bad[case.name, ""] = INTERRUPTED
            break
        report.write(out)
        if kind == "cuda" and not lost:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as error:  # what a kernel broke stays broken in this process
                lost = f"{case.name}: {measure.one_line(error)}"
        if lost:
            say(f"{lost}: --resume goes on in another process")
            break
    return bool(lost)


def main(args: argparse.Namespace) -> int:
    """Returns 0 if all of ckptkern's variants were right and ran, 1 if not, 2 for invalid arguments; measure.LOST_STATUS if
    another process has to go on, and with --resume UNFINISHED if the time ended before all was measured."""
    if args.device == "cuda" and not torch.cuda.is_available():
        say("ckptkern bench: --device: wanted cuda but torch sees no CUDA device")
        return 2
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    compilers: Collection[str] = cases.FIRST_COMPILED if args.headline or args.published else cases.COMPILED
    if not (kind == "cuda" if args.compile is None else args.compile):
        compilers = ()
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    try:
        if args.rounds < 1:
            raise ValueError(f"--rounds: wanted at least 1 but got {args.rounds}")
        size = parse_bytes("--workspace", args.workspace)
        selected = with_baselines(chosen(args, device), args.baseline)
        selected = [dataclasses.replace(case, workspace=size) for case in selected]
        old = compare.read(args.compare) if args.compare else None  # read now, because --out may overwrite it
        if args.list:
            for case in selected:
                print(f"{case.name:36} {', '.join([*cases.variants(case), *compilers])}")
            return 0
    except ValueError as error:
        say(f"ckptkern bench: {error}")
        return 2
    return run(selected, device, compilers, old, args)


def run(
    chosen: list[Case],
    device: torch.device,
    compilers: Collection[str],
    old: compare.Run | None,
    args: argparse.Namespace,
) -> int:
    """Measures the cases and writes the folder. Returns main's exit status."""
    out = args.out or (OWN_RESULTS if args.op or args.case else DEFAULT_RESULTS) / device_name(device)
    settings = {"rounds": args.rounds, "cases": args.op or args.case or args.cases, "compile": [*compilers]}
    settings["workspace"] = args.workspace
    facts = {"device": device_name(device), "settings": settings, **environment(device)}
    facts["warning"] = measure.load_warning(1 if device.type == "cuda" else torch.get_num_threads())
    minutes = args.budget_minutes if args.budget_minutes is not None else MINUTES[device.type]
    try:
        earlier = earlier_rows(out, compare.setting_of(facts)) if args.resume else []
    except ValueError as error:
        say(f"ckptkern bench: {error}")
        return 2
    standing = {(row["case"], row["variant"]) for row in earlier if stands(row)}
    jobs = jobs_of(chosen, compilers, standing)
    again = {case.name for case, _ in jobs}  # failed rows of other cases stay
    earlier = [row for row in earlier if row["case"] not in again or (row["case"], row["variant"]) in standing]
    out.mkdir(parents=True, exist_ok=True)
    (out / "env.json").write_text(json.dumps(facts, indent=2) + "\n")

    if facts["warning"]:
        say(facts["warning"])
    count = sum(len(makers) for _, makers in jobs)
    say(f"cases: {len(jobs)}, variants: {count}; the budget is {minutes:.3g} minutes")
    sheet = Sheet(out / "results.csv", earlier, facts["commit"])
    lost = measure_all(jobs, sheet, device, out, facts, args.rounds, minutes)
    report.write_all(out, args.figures)
    status = sheet.end(again if args.resume else ())
    if dropped := [case for (case, _), row in sheet.rows.items() if row["status"] == "dropped" and case in again]:
        say(f"dropped, over the budget: {', '.join(dict.fromkeys(dropped))}")
    if args.op or args.case:
        print(report.report(out))
    if old is not None:
        print(compare.compare(old, compare.read(out / "results.csv")))
    say(f"results in {out}")
    return measure.LOST_STATUS if lost else status
