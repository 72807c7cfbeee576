"""The table of partial backwards: that it is current, and that a part runs no more than it needs."""

from pathlib import Path

import pytest
from support import outside

from benchmarks.dev import partial

FOUND = {(row.op, row.mode): row for row in partial.rows()}


@pytest.mark.parametrize("name", partial.NAMES)
def test_a_recompute_is_added_once_whatever_is_asked_for(name):
    """`"none"` recomputes nothing. Each matmul of its backward is in the pass for x, in that for the weights, or in both."""
    none = FOUND[name, "none"]
    assert max(none.x, none.weights) < none.all <= none.x + none.weights
    for mode in partial.MODES:
        row = FOUND[name, mode]
        recomputed = row.all - none.all
        assert (row.x - none.x, row.weights - none.weights) == (recomputed, recomputed)
        assert 0 <= recomputed <= row.forward == none.forward


def test_an_mlp_by_hand():
    """dx takes dh and dx; the weights dh and two of their own; `"full"` computes h again."""
    assert FOUND["mlp", "none"][2:] == (2, 2, 3, 4)
    assert FOUND["mlp", "full"][2:] == (2, 3, 4, 5)


def test_the_page_shows_the_table():
    page = Path(outside.ROOT, partial.PAGE).read_text()
    assert f"{partial.BEGIN}\n{partial.table()}\n{partial.END}" in page
