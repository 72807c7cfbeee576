"""The estimated arrival of rows follows the order of the run, and each kernel is compiled once."""

import re
import subprocess

import pytest
from support import outside

from benchmarks.gpu import arrivals
from ckptkern.benchmarks import cases, run

LINE = re.compile(r" *([\d.]+) +([\d.]+) +([\d.]+) +(\d+) +([\d.]+)  (\S+), (.+)")
KERNEL, COMPILE, START = 0.5, 20.0, 30.0 + 10.0


def test_rounds_end_by_count_or_by_time():
    def steps(*seconds):
        return arrivals.timing([arrivals.Variant("", one, 0, 0.0) for one in seconds])

    assert steps(0.01, 0.02) == pytest.approx(30 * 0.03)  # all rounds
    assert steps(0.05, 0.05) == pytest.approx(run.SECONDS["cuda"])  # until the time is over
    assert steps(0.5, 0.5) == pytest.approx(7.0)  # seven rounds at least
    assert steps(0.001, 0.001) == pytest.approx(2 * 30 * 0.002)  # and as CUDA graphs


@pytest.mark.long
def test_rows_arrive_in_the_order_of_the_run():
    options = (
        "--cases",
        "^mlp-gelu/",
        "--kernel",
        KERNEL,
        "--launcher",
        0,
        "--torch-compile",
        COMPILE,
        "--build",
        30,
        "--imports",
        10,
    )
    process = outside.start(
        "-m", "benchmarks.gpu.arrivals", *map(str, options), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = process.communicate()
    assert process.returncode == 0, error[-4000:]
    rows = [match.groups() for match in map(LINE.fullmatch, out.splitlines()) if match]
    items = run.select("^mlp-gelu/", run.items("cuda", headline=True))
    jobs = run.jobs_of(items, cases.FIRST_COMPILED, ())
    expected = dict.fromkeys((item.name, name) for item, makers in jobs for name in makers)
    assert [(case, variant) for *_, case, variant in rows] == [*expected]

    numbers = [[float(one) for one in row[:5]] for row in rows]
    checked, timed, _, kernels, compiling = zip(*numbers, strict=True)
    assert list(checked) == sorted(checked)
    assert checked[0] > START
    assert all(end >= begin for begin, end in zip(checked, timed, strict=True))
    for (*_, variant), count, seconds in zip(rows, kernels, compiling, strict=True):
        assert seconds == pytest.approx(COMPILE if variant in cases.COMPILED else KERNEL * count)
    assert f"{sum(kernels):.0f} kernels compiled in {KERNEL * sum(kernels):.1f} s" in out
    first = {row[-1]: count for row, count in zip(rows, kernels, strict=True) if row[-2] == items[0].name}
    assert first["ckptkern none"] > 0
    assert first[cases.EAGER] == 0
    assert sum(kernels) < 2 * sum(first.values()), "the second size compiles all kernels again"
