"""Runs of the tests marked `gpu`: only files that have some are collected, what is most likely to fail runs first, every result
is on the disk when it is known, and what passed before is left out. Without a GPU, their CPU counterparts show that it works.
Tests without a counterpart can run alone: nothing else has run what they do.

A test's CPU counterpart is the same case of the same function with "cpu" where it has "cuda".
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

FIELDS = ("test", "outcome", "seconds", "message")
HAS_GPU_TESTS = re.compile(r"\bmark\.gpu\b|def test_\w+\([^)]*\bdevice\b")
# Most likely to fail first: equal bits of forward and recompute, ops and layers as users call them, chunks and repetitions.
FIRST = tuple(
    map(
        re.compile,
        ("recomput(ed|es)|recompute_equals_forward|the_same_bits", "/test_ops.py|/test_devices.py", "chunk|repeat"),
    )
)
PASSED = pytest.StashKey[frozenset[str]]()


def may_have_gpu_tests(path: Path) -> bool:
    return HAS_GPU_TESTS.search(path.read_text()) is not None


def is_gpu_run(config: pytest.Config) -> bool:
    return config.option.markexpr == "gpu" or config.option.counterparts or config.option.list_gpu


def counterpart_of(nodeid: str) -> str:
    return re.sub(r"(?<=[\[-])cuda(?=[]-])", "cpu", nodeid)


def place(nodeid: str) -> int:
    """What `FIRST` says of a test; those it does not name come last."""
    return next((n for n, pattern in enumerate(FIRST) if pattern.search(nodeid)), len(FIRST))


def chosen(items: Iterable[pytest.Item], config: pytest.Config, passed: frozenset[str]) -> list[pytest.Item]:
    """Returns the tests marked gpu, those of them without a CPU counterpart, or the counterparts, that have not passed yet, in
    the order of `place`."""
    on_gpu = {item.nodeid: item for item in items if "gpu" in item.keywords}
    on_cpu = {item.nodeid: item for item in items if "gpu" not in item.keywords}
    pairs = {nodeid: on_cpu.get(counterpart_of(nodeid)) for nodeid in on_gpu}
    if config.option.counterparts:
        chosen = [*dict.fromkeys(item for item in pairs.values() if item is not None)]
    elif config.option.without_counterpart:
        chosen = [on_gpu[nodeid] for nodeid, counterpart in pairs.items() if counterpart is None]
    else:
        chosen = [*on_gpu.values()]
    return sorted((item for item in chosen if item.nodeid not in passed), key=lambda item: place(item.nodeid))


def listed(items: Iterable[pytest.Item]) -> list[str]:
    """A line per function: cases on a GPU, how many of them have a CPU counterpart, and its name."""
    known = {item.nodeid for item in items if "gpu" not in item.keywords}
    on_gpu = [item.nodeid for item in items if "gpu" in item.keywords]
    with_counterpart = [nodeid for nodeid in on_gpu if counterpart_of(nodeid) in known]
    counts, counterparts = (Counter(nodeid.partition("[")[0] for nodeid in each) for each in (on_gpu, with_counterpart))
    lines = [f"{count:5} {counterparts[name]:5}  {name}" for name, count in sorted(counts.items())]
    return ["  gpu   cpu  test", *lines, f"{len(on_gpu):5} {len(with_counterpart):5}  in all"]


def passed_in(path: Path) -> frozenset[str]:
    """The tests whose last row says that they passed."""
    if not path.exists():
        return frozenset()
    with path.open(newline="") as file:
        last = {row["test"]: row["outcome"] for row in csv.DictReader(file)}
    return frozenset(test for test, outcome in last.items() if outcome == "passed")


class Results:
    """A pytest plugin of the process that reports: appends a row to a CSV after each test, and prints a failure at once."""

    def __init__(self, config: pytest.Config, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._config, self._open = config, {}
        self._file = path.open("a", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if not path.stat().st_size:
            self._write(FIELDS)

    def _write(self, row: Iterable[object]) -> None:
        self._writer.writerow(row)
        self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's outcome is that of its last phase that did not pass. "???" is the phase of a test that ended its process."""
        outcome, seconds, message = self._open.pop(report.nodeid, ("passed", 0.0, ""))
        if not report.passed:
            outcome = report.outcome
            # of a skip, (file, line, reason)
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else _crash(report)
            message = " ".join(text.split())[:200]
        if report.failed and (terminal := self._config.pluginmanager.get_plugin("terminalreporter")):
            terminal.write_line(f"\nFAILED {report.nodeid}\n{report.longreprtext}")
        self._open[report.nodeid] = outcome, seconds + report.duration, message
        if report.when in ("teardown", "???"):
            outcome, seconds, message = self._open.pop(report.nodeid)
            self._write((report.nodeid, outcome, f"{seconds:.2f}", message))

    def pytest_unconfigure(self) -> None:
        self._file.close()


def _crash(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else report.longreprtext
