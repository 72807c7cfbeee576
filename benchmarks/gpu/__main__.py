"""Runs everything that is measured on a GPU, in three parts: `make gpu`.

Each part builds ckptkern with this Python's own torch (no network, no venv),
runs its steps, the most valuable first, and ends within its seconds; time that
is left goes to steps of the other parts. Results are written to OUT as they
come. A step with a result there, or in IN, is not measured again:

    results.csv      a row per case and variant: benchmarks and whole models
    env.json         device, versions, commit, ceilings
    report.md        tables of results.csv
    tests.csv        a row per test
    log.txt          the output of every step, with its second
    caches.tgz       extension, compiled kernels and tuned table, for the next
                     part on a machine that keeps nothing

The exit status is 1 if anything of ckptkern's was wrong or failed, and 0
otherwise, also if not all was run.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import caches

ROOT = Path(__file__).resolve().parents[2]
CACHES = "caches.tgz"
# Exit statuses: of a program whose time was up, of pytest without tests, and of one that lost the GPU and goes on in another
# process, where it leaves out what it was lost to.
CUT, NO_TESTS, LOST = 124, 5, 75
SECONDS = 570  # of a part, the build included
MOST_FILES, MOST_BYTES = 8, 16 * 2**20  # of OUT, and of each of its files
# Its own process group, so that it is ended with what it starts. A new session would outlive whatever ends this one.
GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
FINISH = 8  # seconds to end the last step and to pack the caches
SLACK = 15  # seconds that a program of its own clock needs to start, and to print what it knows
SMALLEST = 20  # seconds with which no step begins


class Run(NamedTuple):
    """Settings of the steps. work: folder of builds and caches. cases, models_named, tests: the user's.

    A step is a method that returns a command, or the reason why it is left out.
    """

    out: Path
    work: Path
    dry: bool
    cases: str
    models_named: str
    tests: list[str]
    cores: int

    @property
    def kind(self) -> str:
        """Returns the kind of device."""
        return "cpu" if self.dry else "cuda"

    def program(self, module: str, *arguments: object) -> list[str]:
        return [sys.executable, "-m", module, *map(str, arguments)]

    def bench(self, seconds: int, *arguments: str) -> list[str]:
        """Returns the benchmark, whose budget ends sooner, because a case may be under way."""
        cases = ["--cases", self.cases] if self.cases else []
        small = ["--device", self.kind, *(["--rounds", "7"] if self.dry else [])]
        budget = ("--budget-minutes", f"{0.9 * seconds / 60:.2f}")
        return self.program(
            "ckptkern", "bench", "--out", self.out, "--resume", "--no-figures", *budget, *small, *cases, *arguments
        )

    def models(self, seconds: int) -> list[str]:
        """Returns the whole models. Blocks of many sizes come and go: they must not be split in a timed step."""
        options = ("--out", self.out, "--device", self.kind, "--only", self.models_named, "--seconds", seconds - SLACK)
        allocator = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return ["env", allocator, *self.program("benchmarks.gpu.models", *options)]

    def pytest(self, *arguments: str) -> list[str]:
        """Returns the tests, in small portions so that order stays. Triton takes most of the time: it compiles each kernel
        on one core."""
        options: list[object] = [
            "-p",
            "no:cacheprovider",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
            "--no-summary",
        ]
        options += ["--continue-on-collection-errors", "--results", self.out / "tests.csv", *arguments]
        paths = [word for word in self.tests if (ROOT / word.partition("::")[0]).exists()]  # the program runs elsewhere
        options += [word for word in self.tests if word not in paths]
        if importlib.util.find_spec("xdist"):
            options += ["-n", min(self.cores, 14), "--dist", "load", "--maxschedchunk", 4]
        if importlib.util.find_spec("pytest_timeout"):
            options += ["--timeout", 60, "--timeout-method", "thread"]  # a signal waits for a kernel that hangs
        return self.program("pytest", *options, *(ROOT / path for path in paths or ["tests"]))

    def others(self, seconds: int) -> list[str]:
        return self.pytest(*(["--counterparts", "--quick"] if self.dry else ["-m", "gpu"]))

    def autotune(self, seconds: int) -> list[str] | str:
        """Returns the autotuning, whose table is for `caches.tgz`: no other step reads it."""
        if self.dry:
            return "on a CPU nothing can be chosen"
        minutes, table = f"{0.9 * seconds / 60:.2f}", f"CKPTKERN_CACHE={self.work / 'cache/tuned'}"
        return ["env", table, *self.program("ckptkern", "autotune", "--minutes", minutes)]

    def sanitizer(self, seconds: int) -> list[str] | str:
        return "no GPU" if self.dry else self.program("tests.codegen.sanitizer", "--seconds", seconds - SLACK)


class Step(NamedTuple):
    """A program of a part. share: of the part's remaining time, relative to later steps' shares."""

    part: int
    name: str
    share: int
    command: Callable[[Run, int], list[str] | str]


STEPS = (
    Step(1, "headline cases", 330, lambda run, seconds: run.bench(seconds, "--headline", "--compile")),
    Step(1, "tests without a counterpart", 120, lambda run, seconds: run.pytest("-m", "gpu", "--without-counterpart")),
    Step(2, "whole models", 330, Run.models),
    Step(2, "published cases", 200, lambda run, seconds: run.bench(seconds, "--published")),
    Step(3, "other cases", 150, Run.bench),
    Step(3, "autotune", 170, Run.autotune),
    Step(3, "other tests", 120, Run.others),
    Step(3, "sanitizer", 60, Run.sanitizer),
)


class Log:
    """Prints lines, and appends them to a file, each with the second of the part."""

    def __init__(self, path: Path):
        self.path, self.start = path, time.monotonic()

    def __call__(self, line: str) -> None:
        line = f"{time.monotonic() - self.start:5.0f} s  {line}"
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def run(command: Sequence[str], seconds: float, log: Callable[[str], None], lib: Path) -> int:
    """Runs a program where ckptkern was built, because Python first finds what lies where it starts. Its lines go to the log.
    Returns its exit status; 124 if its time was up.

    It is then interrupted, and killed with what it has started if it goes on for ten seconds.
    """
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # of a job in the background: its programs would be deaf to it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command, cwd=lib, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **GROUP
    )
    ended = threading.Event()

    def stop() -> None:
        for number, patience in ((signal.SIGINT, seconds), (signal.SIGKILL, FINISH - 2)):
            if ended.wait(patience):
                return
            stopped.append(number)
            os.killpg(process.pid, number)

    stopped: list[int] = []
    watch = threading.Thread(target=stop, daemon=True)
    watch.start()
    try:
        for line in process.stdout or ():
            log(line.rstrip("\n"))
        status = process.wait()
    except BaseException:  # this process's own end
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        ended.set()
    return CUT if stopped else status


def build(work: Path, log: Log) -> Path:
    """Returns the folder of ckptkern, built with this Python's torch. Keeps an extension that is newer than its sources."""
    import torch

    lib = work / f"{sys.implementation.cache_tag}-torch-{torch.__version__}" / "lib"
    lib.mkdir(parents=True, exist_ok=True)
    for path in lib.rglob("*.py"):
        path.unlink()
    base = lib.parent.relative_to(ROOT) if lib.is_relative_to(ROOT) else lib.parent
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(base), "--build-lib", str(lib)]
    log(f"build: with torch {torch.__version__}")
    inside = os.environ | {"CKPTKERN_WITH_EXTENSION": "1"}
    done = subprocess.run(command, cwd=ROOT, env=inside, capture_output=True, text=True, check=False)
    if done.returncode:
        log(done.stdout + done.stderr)
        raise SystemExit("make gpu: ckptkern does not build: the log says why")
    return lib


def unpack_wheels(folder: Path, site: Path) -> list[str]:
    """Unpacks the wheels of a folder that fit any Python, and returns their names. Kernels are read as source files."""
    wheels = sorted(folder.glob("*-py3-none-*.whl")) if folder.is_dir() else []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    return [wheel.name for wheel in wheels]


def failures(out: Path) -> list[str]:
    """Returns a line for each result of ckptkern's in results.csv and tests.csv that is wrong or failed."""
    rows, tests = read(out / "results.csv"), {row["test"]: row for row in read(out / "tests.csv")}
    lines = [
        f"{row['case']} {row['variant']}: {row['status']}: {row['note']}"
        for row in rows
        if row["variant"].startswith("ckptkern") and row["status"] in ("failed", "wrong")
    ]
    return lines + [
        f"{name}: {row['message']}" for name, row in tests.items() if row["outcome"] not in ("passed", "skipped")
    ]


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def too_much(out: Path) -> list[str]:
    """Returns the files of OUT that would not come back from a machine that returns eight files of 16 MiB."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    lines = [
        f"{path.name}: {path.stat().st_size} bytes, at most {MOST_BYTES}"
        for path in files
        if path.stat().st_size > MOST_BYTES
    ]
    if len(files) > MOST_FILES:
        lines.append(
            f"{len(files)} files, at most {MOST_FILES}: {', '.join(str(path.relative_to(out)) for path in files)}"
        )
    return lines


def prepare(part: int, args: argparse.Namespace, log: Log) -> Path:
    """Takes over the contents of IN, builds, and returns the folder of the build. Programs find the wheels and the caches."""
    log(f"part {part}, {args.seconds} s, commit {os.environ.get('CKPTKERN_COMMIT') or 'unknown: COMMIT=... names it'}")
    before = args.resume or args.out
    if (before / CACHES).exists():
        log(f"caches: {caches.unpack(before / CACHES, args.work)}")
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # contains ninja
    lib = build(args.work, log)
    wheels = unpack_wheels(args.wheels, args.work / "site")
    paths = [str(lib), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(args.work / "site")]
    os.environ.update(
        PYTHONPATH=os.pathsep.join(paths),
        PYTHONUNBUFFERED="1",
        TRITON_CACHE_DIR=str(args.work / "cache/triton"),
        TORCHINDUCTOR_CACHE_DIR=str(args.work / "cache/inductor"),
    )
    here = setting(lib, args.dry)
    log(f"built; {', '.join(f'{name} {value}' for name, value in here.items())}; wheels: {', '.join(wheels) or 'none'}")
    if before != args.out and (before / "env.json").exists():
        take_over(before, args.out, here, log)
    return lib


def setting(lib: Path, dry: bool) -> dict[str, str]:
    """Returns the device and the versions on which times depend, from another process, which gives its GPU memory back."""
    ask = (
        "import json, sys, torch; from ckptkern.benchmarks import compare, run; from ckptkern.tools import env; "
        "name = run.device_name(torch.device(sys.argv[1])); "
        "print(json.dumps(compare.setting_of({'device': name, **env.collect()})))"
    )
    return json.loads(
        subprocess.check_output([sys.executable, "-c", ask, "cpu" if dry else "cuda"], cwd=lib, text=True)
    )


def take_over(before: Path, out: Path, here: dict[str, str], log: Log) -> None:
    """Copies the results of the previous part, unless another GPU or torch produced them."""
    environment = json.loads((before / "env.json").read_text())
    there = {"device": environment.get("device")} | {
        name: environment.get("versions", {}).get(name, "unknown") for name in ("torch", "triton")
    }
    if there != here:
        log(f"not taken over, because {there} gave them: the results of {before}")
        return
    for path in sorted(before.iterdir()):
        if path.name not in (CACHES, log.path.name) and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def words(text: str) -> list[str]:
    """Returns the words of an argument of make, as a shell reads them."""
    return shlex.split(text)


def gpu_of() -> str:
    """Returns a line about the GPU, from another process, which gives its GPU memory back."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no GPU"


def run_steps(part: int, args: argparse.Namespace, log: Log, lib: Path) -> list[str]:
    """Runs the steps of a part, then those that were cut and, on a GPU, the steps of other parts. Returns the steps that
    failed."""
    this = Run(args.out, args.work, args.dry, args.cases, args.models, words(args.tests), os.cpu_count() or 1)
    own = [step for step in STEPS if step.part == part and args.steps in step.name]
    others = (
        []
        if args.dry or args.steps
        else sorted((step for step in STEPS if step.part != part), key=lambda step: step.part)
    )
    cut: list[Step] = []
    bad: list[str] = []
    while queue := own or cut or others:
        left = int(log.start + args.seconds - time.monotonic()) - FINISH
        if left < SMALLEST:
            log(f"no time is left for: {', '.join(step.name for step in own + cut + others)}")
            break
        seconds = left * queue[0].share // sum(step.share for step in own) if own else left
        step, is_own = queue.pop(0), queue is own
        command = step.command(this, seconds)
        if isinstance(command, str):
            log(f"{step.name}: left out: {command}")
            continue
        log(f"{step.name}: at most {seconds} s")
        status = run(command, seconds, log, lib)
        log(f"{step.name}: status {status}{', its time was up' if status == CUT else ''}")
        pack(args, log)
        if status == LOST:
            queue.insert(0, step)
        elif status == CUT and is_own:
            cut.append(step)
        elif status not in (0, CUT) and not (status == NO_TESTS and "tests" in step.name):
            bad.append(f"{step.name}: exit status {status}")
    return bad


def pack(args: argparse.Namespace, log: Log) -> None:
    log(f"caches: {caches.pack(args.out / CACHES, args.work, MOST_BYTES)}")


def run_part(part: int, args: argparse.Namespace) -> list[str]:
    """Runs one part, and returns what failed."""
    log = Log(args.out / "log.txt")
    lib = prepare(part, args, log)
    pack(args, log)
    try:
        bad = run_steps(part, args, log, lib)
    finally:
        pack(args, log)
    bad += failures(args.out) + too_much(args.out)
    for path in sorted(args.out.iterdir()):
        log(f"{path.stat().st_size:11,} bytes  {path.name}")
    for line in bad:
        log(f"NOT RIGHT: {line}")
    log(f"part {part} ended; not right: {len(bad)}")
    return bad


def folder(name: str) -> Path:
    return Path(name).resolve()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--part", type=int, choices=(1, 2, 3), help="PART: which of the three parts (default: all, one after another)"
    )
    result.add_argument("--out", type=folder, required=True, metavar="DIR", help="OUT: the folder of the results")
    result.add_argument("--in", type=folder, dest="resume", metavar="DIR", help="IN: the OUT of the previous part")
    result.add_argument("--dry", action="store_true", help="DRY=1: run the same programs on a CPU, with small sizes")
    result.add_argument(
        "--seconds", type=int, default=SECONDS, metavar="N", help="SECONDS: the limit of a part (default: %(default)s)"
    )
    result.add_argument("--cases", default="", metavar="REGEX", help="CASES: run only these benchmark cases")
    result.add_argument(
        "--models", default="", metavar="REGEX", help="MODELS: run only these whole models, by the names of their cases"
    )
    result.add_argument(
        "--tests", default="", metavar="ARGS", help="TESTS: arguments for pytest, such as the tests to run"
    )
    result.add_argument(
        "--steps", default="", metavar="WORD", help="STEPS: run only steps with this word in their names"
    )
    result.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "build/gpu/wheels",
        metavar="DIR",
        help="WHEELS: the folder with wheels of baselines, for any Python 3",
    )
    result.add_argument("--work", type=folder, default=ROOT / "build/gpu/work", help=argparse.SUPPRESS)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if something of ckptkern's failed, or 2 for invalid arguments."""
    command_line = parser()
    args = command_line.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        command_line.error(f"{sys.executable} has no torch. Install it, or name another Python: make gpu PYTHON=...")
    if args.resume and not args.resume.is_dir():
        command_line.error(f"IN: {args.resume} is not a folder; name the OUT of the part before")
    if not any(args.steps in step.name for step in STEPS):
        command_line.error(f"STEPS: {args.steps!r} is in none of {', '.join(step.name for step in STEPS)}")
    if not args.dry and gpu_of() == "no GPU":
        command_line.error("torch sees no GPU here. DRY=1 shows on a CPU what is run")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bad = []
    for part in (args.part,) if args.part else (1, 2, 3):
        bad += run_part(part, args)
        args.resume = None
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
