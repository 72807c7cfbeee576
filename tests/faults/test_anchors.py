"""Every fault has its place in the code of today, and the tests that should see it are there. Nothing is run."""

import pytest
from faults.anchors import AnchorError, Fault, changed, problems, without_tests
from faults.table import FAULTS

FAULT = Fault("a fault", "ckptkern/state/__init__.py", "f(a, «b if c else 'd'»)", "b", ())


def test_each_fault_changes_one_place():
    assert "\n".join(problems(FAULTS)) == ""
    assert len(FAULTS) >= 65


def test_each_fault_names_tests_that_are_there():
    assert "\n".join(without_tests(FAULTS)) == ""


@pytest.mark.parametrize(
    "source", ["f(a, b if c else 'd')", 'f( a,\n  b if c else "d",\n)', "x = 1\nf(a, b  if c\n else 'd', )"]
)
def test_a_place_survives_formatting(source):
    assert "".join(changed(FAULT, source).split()).rstrip(")").rstrip(",").endswith("f(a,b")


@pytest.mark.parametrize("source", ["f(a, b if c else 'e')", "f(a, b if c else 'd')\n" * 2, "ff(a, b if c else 'd')"])
def test_a_place_that_is_lost_or_ambiguous_is_an_error(source):
    with pytest.raises(AnchorError, match="Anchor the fault anew"):
        changed(FAULT, source)


def test_what_is_no_python_is_an_error():
    with pytest.raises(AnchorError, match="is no Python"):
        changed(FAULT._replace(instead="b if"), "f(a, b if c else 'd')")
