"""A DDP training that torchrun runs exits as it should; `make exits ARGS="--runs 200"` runs it many times."""

import pytest
from support import exits


@pytest.mark.slow
def test_a_run_exits_as_it_should():
    assert exits.run(1) is None


@pytest.mark.long
def test_a_rank_that_dies_at_exit_is_told(monkeypatch):
    monkeypatch.setenv("CKPTKERN_BACKEND", "unknown")
    assert exits.run(1).startswith("run 1: exit status 1, 0 of 2 ranks have trained")
