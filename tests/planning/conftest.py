"""Measured times do not matter to these tests."""

import pytest


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkern.planning.measure.ROUNDS", 1)
