"""What a launch passes is bounded here, and that its time is measured and checked; no time is asserted."""

import re
import subprocess

import pytest
from support import outside

from benchmarks.dev import launches

# What Triton's binder looks at one by one, and constants and options, of each kernel of the steps: a launch's host time is in
# proportion to them.
MOST = {
    "_act_fwd_kernel": (8, 6), "_act_bwd_kernel": (9, 7), "_hidden_grad_kernel": (11, 6), "_gated_hidden_grad_kernel": (16, 6),
    "_stack_fwd_kernel": (12, 8), "_stack_bwd_kernel": (17, 8),
    "_norm_fwd_kernel": (13, 6), "_norm_bwd_kernel": (15, 8), "_sum_rows_kernel": (6, 4),
    "_heads_fwd_kernel": (20, 11), "_heads_bwd_kernel": (26, 12),
    "_attn_fwd_kernel": (48, 13), "_attn_dkdv_kernel": (52, 14), "_attn_dq_kernel": (48, 14),
}  # fmt: skip


@pytest.fixture(scope="module")
def report():
    """What the command said, in a process without the interpreter."""
    process = outside.start(
        "-m", "benchmarks.dev.launches", "--rounds", "1", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out.splitlines()[1:]


@pytest.mark.long
def test_every_step_is_measured_and_checked(report):
    found = {}
    for line in report:
        if not line.startswith(" "):
            case, mode, count, verdict, mean = re.fullmatch(
                rf"(\S+) (\w+): (\d+) launches, (within|ABOVE) {launches.MOST:.1f}: ([\d.]+)", line
            ).groups()
            found[case] = mode
            assert int(count) >= 2
            if float(mean) != launches.MOST:  # as printed, rounded
                assert verdict == ("within" if float(mean) < launches.MOST else "ABOVE")
    assert found == launches.STEPS


@pytest.mark.slow
def test_what_a_launch_passes(report):
    rows = [re.fullmatch(r" +[\d.]+ +(\d+) \+ +(\d+)  \d+ x (\w+)", line) for line in report if line.startswith(" ")]
    assert {name for *_, name in map(re.Match.groups, rows)} == MOST.keys()
    for passed, constants, name in map(re.Match.groups, rows):
        assert (int(passed), int(constants)) <= MOST[name], name
        assert int(constants) <= MOST[name][1], name


def test_interpreted_kernels_are_refused():
    class Interpreted:
        kernel = object()

    with pytest.raises(RuntimeError, match="interpreted"):
        launches.costs([Interpreted()])
