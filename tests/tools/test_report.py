"""python -m ckptkern report."""

import csv
from pathlib import Path

import pytest

from ckptkern.__main__ import main
from ckptkern.planning import measure

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)

def alone():
    return nn.Linear(8, 8)
"""


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    return path


def test_the_report_of_a_users_model(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, figure = tmp_path / "rows.csv", tmp_path / "memory.png"
    given = ["report", f"{file}:build", "--csv", str(out), "--figure", str(figure), "--saved", "256B"]
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "eager PyTorch" in text
    assert "saved: 128 B of a budget of 256 B" in text
    rows = list(csv.DictReader(out.open()))
    assert [(row["mode"], row["saved"]) for row in rows][-1] == ("full", "128")
    assert figure.stat().st_size > 1000


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("model.py", [], "wanted FILE:FUNCTION but got 'model.py'"),
        ("{file}:alone", [], "must return (model, inputs), to measure with"),
        ("{file}:build", ["--saved", "1B"], "wanted at most 1 B (1 bytes) saved for backward, but the least"),
        ("{file}:build", ["--budget", "1B"], "wanted a step of at most 1 B (1 bytes), but the least"),
        ("{file}:build", ["--budget", "some"], "budget must be a number of bytes, or a size such as"),
    ],
)
def test_what_is_wrong_is_said(
    target: str, options: list[str], message: str, file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["report", target.format(file=file), *options]) == 2
    assert message in capsys.readouterr().err
