"""Measured times do not matter to these tests."""

import pytest

from ckptkern.planning import measure


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
