"""python -m ckptkern frontier."""

from pathlib import Path

import pytest

from ckptkern.__main__ import main
from ckptkern.planning import measure

pytest.importorskip("scipy")

MODEL = """
import torch
from torch import nn

def build():
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    return nn.Sequential(*layers), lambda size: torch.randn(size, 8)

def alone():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    path = tmp_path / "its_model.py"
    path.write_text(MODEL)
    return path


def test_the_longest_of_a_users_model(file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["frontier", f"{file}:build", "--budget", "256KiB", "--multiple", "8"]) == 0
    text = capsys.readouterr().out
    assert "largest size within 256 KiB: " in text
    assert "at the peak stand" in text


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("model.py", ["--budget", "1GiB"], "wanted FILE:FUNCTION but got 'model.py'"),
        ("{file}:alone", ["--budget", "1GiB"], "FUNCTION must return (model, make_inputs)"),
        ("{file}:build", ["--budget", "1B"], "wanted a step of at most 1 B, but size 64 takes"),
        ("{file}:build", ["--budget", "some"], "budget must be a number of bytes"),
    ],
)
def test_what_is_wrong_is_said(
    target: str, options: list[str], message: str, file: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["frontier", target.format(file=file), *options]) == 2
    assert message in capsys.readouterr().err
