"""Bugs in compiled kernels (tests/support/injected.py) are found, each as what it is."""

import json
import subprocess
from collections import Counter

import pytest
from support import outside

from ckptkern.triton_kernels import fences

# bug -> the kind of fault that it is; of these kernels, where it must be found. In other places it may be covered: a barrier
# that another one makes redundant, a mask that is true everywhere, the last group of copies, a loop that does not run.
EVERYWHERE = ("norm", "linear", "attention")
KINDS = {
    "barrier dropped": ({"race"}, EVERYWHERE),
    "wait for copies dropped": ({"in flight"}, EVERYWHERE),
    "wait for copies too lax": ({"in flight"}, EVERYWHERE),
    "group of copies not closed": ({"in flight"}, EVERYWHERE),
    "store to shared memory dropped": ({"uninitialised", "results"}, EVERYWHERE),
    # under Triton 3.6 the fences that we add behind the waits for copies cover attention's
    "fence before wgmma dropped": ({"proxy"}, ("linear",) if fences.MISSING else ("linear", "attention")),
    "wait for wgmma dropped": ({"in flight", "results"}, ("linear", "attention")),
    "mask of a store dropped": ({"bounds", "race"}, EVERYWHERE),
    "mask of a load dropped": ({"bounds"}, ("linear", "attention")),
    "mask of a copy dropped": ({"bounds"}, EVERYWHERE),
    "load 2 bytes further": ({"alignment", "bounds"}, ("norm", "attention")),
    "matrix read 16 bytes further": ({"bounds", "uninitialised", "race", "in flight", "results"}, EVERYWHERE),
    "shuffle from another lane": ({"race", "results"}, ("norm", "attention")),
}
ON_SM_90_ALONE = ("fence before wgmma dropped", "wait for wgmma dropped")
AT_LEAST = 0.6  # of all places


def wrong(bug: str, kernel: str, arch: int, seen: Counter) -> str | None:
    kinds, _ = KINDS[bug]
    if not sum(seen[kind] for kind in kinds):
        return f"{bug}, {kernel}, sm_{arch}: not found, {dict(seen)}"
    if seen.keys() - kinds - {"nothing", "results"}:
        return f"{bug}, {kernel}, sm_{arch}: found as what it is not, {dict(seen)}"
    return None


@pytest.mark.long
def test_injected_faults_are_found_as_what_they_are():
    process = outside.start(
        str(outside.ROOT / "tests" / "support" / "injected.py"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = process.communicate()
    assert process.returncode == 0, error
    found = {name: Counter(kinds) for name, kinds in json.loads(out).items()}
    faults = []
    for bug, (_, kernels) in KINDS.items():
        for arch in (90,) if bug in ON_SM_90_ALONE else (80, 90):
            for kernel in kernels:
                if not (
                    bug.startswith("matrix") and (kernel, arch) == ("linear", 90)
                ):  # wgmma reads shared memory itself
                    faults.append(wrong(bug, kernel, arch, found[f"{bug}, {kernel}, sm_{arch}"]))
    assert not list(filter(None, faults))
    total = sum(found.values(), Counter())
    assert total.total() > 100
    assert 1 - total["nothing"] / total.total() > AT_LEAST, total
