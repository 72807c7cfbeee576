"""Applies each fault in a copy of the tree, and runs the tests that should see it."""

from __future__ import annotations

import itertools
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .anchors import ROOT, Fault, changed

LINKED = {
    "ckptkern/triton_kernels": "../triton_kernels",
    "ckptkern/benchmarks": "../benchmarks",
}  # else the installed tree's
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not long"]
CACHE = ".cache"
BUILD = [sys.executable, "-m", "ckptkern", "build"]


class Run(NamedTuple):
    """What tests said. outcome: "passed", "failed", "timeout", "broken" (they could not be collected), or "no tests"; by: the
    first test that failed, or the last line of what was printed; says: how it failed."""

    outcome: str
    by: str
    says: str = ""


class Found(NamedTuple):
    """Which test saw a fault, if one did, and its message. said: of each part of the suite that was run, what came of it."""

    fault: Fault
    by: str | None
    says: str
    seconds: float
    said: list[str]

    def line(self) -> str:
        verdict = f"found by {self.by}" if self.by else f"NOT FOUND ({'; '.join(self.said)})"
        return f"{self.fault.name} [{self.fault.file}]: {verdict}, {self.seconds:.0f} s"


def files_of(root: Path) -> list[str]:
    """Returns what git lists or would list."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return [name for name in listed if name and name not in LINKED and (root / name).is_file()]


def copied(target: Path, names: Sequence[str], root: Path = ROOT) -> Path:
    """Makes a copy of the tree, which imports nothing of ours from elsewhere."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)
    for name, to in LINKED.items():
        (target / name).symlink_to(to)
    return target


def environment(copy: Path) -> dict[str, str]:
    """An extension with a fault is built in the copy's own cache; as it is, it is in the user's."""
    own = {"CKPTKERN_CACHE": str(copy / CACHE)} if (copy / CACHE).exists() else {}
    return os.environ | own | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def tested(copy: Path, arguments: str, seconds: float) -> Run:
    """Runs pytest on a part of the suite, in one process, to the first failure. What is before its path is environment."""
    words = shlex.split(arguments)
    named = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    command = [*PYTEST, *words[len(named) :]]
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy) | named,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Run("timeout", f"no end after {seconds:.0f} s")
    lines = (line.partition(" ") for line in said.splitlines())
    failed = [rest.partition(" - ")[0] for kind, _, rest in lines if kind in ("FAILED", "ERROR")]
    last = " ".join(said.strip().splitlines()[-1:])
    outcome = {0: "passed", 1: "failed", 5: "no tests"}.get(process.returncode, "broken")
    if outcome == "failed" and not failed:
        outcome = "broken"
    says = [line[1:].strip() for line in said.splitlines() if line.startswith("E  ")]
    return Run(outcome, failed[0], says[0] if says else "") if outcome == "failed" else Run(outcome, last)


@contextmanager
def applied(fault: Fault, copy: Path) -> Iterator[None]:
    """The fault is in the copy inside."""
    path = copy / fault.file
    before = path.read_text()
    path.write_text(changed(fault, before))
    try:
        if fault.folder == "csrc":
            (copy / CACHE).mkdir(mode=0o700)
            subprocess.run(BUILD, cwd=copy, env=environment(copy), check=True, capture_output=True, text=True)
        yield
    finally:
        path.write_text(before)
        shutil.rmtree(copy / CACHE, ignore_errors=True)


def looked_for(fault: Fault, copy: Path, seconds: float) -> Found:
    """Runs the fault's tests, part by part, until one sees it."""
    start, said, by, says = time.monotonic(), [], None, ""
    try:
        with applied(fault, copy):
            for arguments in fault.tests:
                run = tested(copy, arguments, seconds)
                if run.outcome == "failed":
                    by, says = run.by, run.says
                    break
                said.append(f"{arguments}: {run.outcome}{f', {run.by}' if run.outcome != 'passed' else ''}")
    except subprocess.CalledProcessError as error:
        said.append(f"the extension cannot be built: {error.stderr.strip().splitlines()[-1:]}")
    return Found(fault, by, says, time.monotonic() - start, said)


def all_of(faults: Sequence[Fault], folder: Path, jobs: int, seconds: float) -> Iterator[Found]:
    """Looks for each fault, as many at a time as there are jobs, each in a copy of its own. Those of C++ share a copy, in which
    what has not changed is compiled once."""
    names, copies = files_of(ROOT), queue.SimpleQueue()
    for job in range(jobs):
        copies.put(copied(folder / f"copy {job}", names))

    def look(some: Sequence[Fault]) -> list[Found]:
        copy = copies.get()
        try:
            return [looked_for(fault, copy, seconds) for fault in some]
        finally:
            copies.put(copy)

    native = [fault for fault in faults if fault.folder == "csrc"]
    groups = [native] * bool(native) + [[fault] for fault in faults if fault.folder != "csrc"]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(look, group) for group in groups]):
                yield from done.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def red_without(faults: Sequence[Fault], folder: Path, seconds: float) -> list[str]:
    """Returns which parts of the suite fail without a fault: what they see of one says nothing then."""
    copy, red = copied(folder / "baseline", files_of(ROOT)), []
    for arguments in dict.fromkeys(test for fault in faults for test in fault.tests[:1]):
        run = tested(copy, arguments, seconds)
        print(f"without a fault: {arguments}: {run.outcome}", flush=True)
        if run.outcome != "passed":
            red.append(f"{arguments}: {run.outcome}, {run.by}")
    return red


def table_of(results: Sequence[Found]) -> str:
    """Returns a Markdown table of the faults in their order, and the counts by folder."""
    lines = ["| fault | file | found by | which says |", "|---|---|---|---|"]
    for result in results:
        says = result.says[:300].replace("|", "\\|")
        lines.append(
            f"| {result.fault.name} | `{result.fault.file}` | {f'`{result.by}`' if result.by else '**not found**'} | {says} |"
        )
    lines += ["", "| folder | faults | found |", "|---|---:|---:|"]
    for folder in dict.fromkeys(result.fault.folder for result in results):
        own = [result for result in results if result.fault.folder == folder]
        lines.append(f"| {folder} | {len(own)} | {sum(result.by is not None for result in own)} |")
    lines.append(f"| all | {len(results)} | {sum(result.by is not None for result in results)} |")
    return "\n".join(lines) + "\n"
