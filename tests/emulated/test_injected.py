"""Bugs in compiled kernels (tests/support/injected.py) are found, each as what it is."""

import json
import subprocess
from collections import Counter

import pytest
from support import outside

AT_LEAST = 0.6  # of all places


@pytest.mark.long
def test_injected_faults_are_found_as_what_they_are():
    process = outside.start(
        str(outside.ROOT / "tests" / "support" / "injected.py"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = process.communicate()
    assert process.returncode == 0, error
    faults, seen = json.loads(out)
    total = Counter(seen)
    assert not faults
    assert total.total() > 100
    assert 1 - total["nothing"] / total.total() > AT_LEAST, total
