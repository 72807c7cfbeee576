"""The estimated arrival of rows follows the order of the run, from times that were measured."""

import itertools

import pytest

from benchmarks.gpu import arrivals
from ckptkern.benchmarks import cases, measure, run, suite

CASE = "mlp-gelu/d1024x16384"


def test_rounds_end_by_count_or_by_time():
    assert arrivals.timing([0.01, 0.02]) == pytest.approx(30 * 0.03)  # all rounds
    assert arrivals.timing([0.05, 0.05]) == pytest.approx(run.SECONDS["cuda"])  # until the time is over
    assert arrivals.timing([0.5, 0.5]) == pytest.approx(measure.ENOUGH)  # so many rounds at least
    assert arrivals.timing([0.001, 0.001]) == pytest.approx(2 * 30 * 0.002)  # and as CUDA graphs


def test_times_are_those_of_the_results():
    known = arrivals.measured()
    assert known[CASE, cases.EAGER] == pytest.approx(1.3e-3, rel=0.2)
    assert ("model/qwen3-8b/1x8192", cases.EAGER) in known


def test_rows_arrive_in_the_order_of_the_run():
    """One variant was measured; the others take eager's time, and another case eager's median. Rows come once."""
    chosen = run.select("--cases", "^mlp-gelu/", suite.cases_of("cuda", headline=True))
    jobs = run.jobs_of(chosen, cases.FIRST_COMPILED, ())
    known = {(CASE, cases.EAGER): 2.0, (CASE, "ckptkern full"): 3.0}
    rows = list(arrivals.arrivals(jobs, known))
    expected = dict.fromkeys((case.name, name) for case, makers in jobs for name in makers)
    assert [(row.case, row.variant) for row in rows] == [*expected]

    assert {row.case for row in rows} > {CASE}
    for row in rows:
        step = known.get((CASE, row.variant), 2.0) if row.case == CASE else 2.0
        assert row.step == pytest.approx(step)
    checked = [row.checked for row in rows]
    assert checked == sorted(checked)
    assert checked[0] == pytest.approx(arrivals.START + 2.0 * (arrivals.FLOAT64 + arrivals.CHECKS))
    assert all(row.timed > row.checked for row in rows)
    for before, row in itertools.pairwise(rows):
        if before.timed == row.timed and row.variant != cases.EAGER:
            begins = arrivals.COMPILES if row.variant in cases.COMPILED else 0.0
            begins += arrivals.KERNELS * row.variant.startswith("ckptkern")
            assert row.checked - before.checked == pytest.approx(begins + arrivals.CHECKS * row.step)
