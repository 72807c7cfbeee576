"""python -m ckptkern convert."""

import csv
from pathlib import Path

import pytest

from ckptkern.__main__ import main

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8)

def keywords():
    return nn.Bilinear(4, 4, 4), {"input1": torch.randn(3, 4), "input2": torch.randn(3, 4)}

def alone():
    return nn.TransformerEncoderLayer(32, 4)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return x + torch.tanh(self.mlp(x))

def layers():
    return nn.Sequential(Layer(), Layer()), torch.randn(4, 8)

def nothing():
    return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    return path


def test_the_table_of_a_users_model(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "rows.csv"
    assert main(["convert", f"{file}:build", "--recompute", "full", "--csv", str(out)]) == 0
    text = capsys.readouterr().out
    assert "mlp_block" in text
    assert "a training step of the whole model saves 128 B instead of 1.12 KiB, besides parameters" in text
    (row,) = csv.DictReader(out.open())
    assert (row["name"], row["replaced_by"], row["saved_before"], row["saved_after"]) == (
        "",
        "mlp_block",
        "1152",
        "128",
    )


@pytest.mark.parametrize("function", ["keywords", "alone"])
def test_other_forms_of_inputs(function: str, file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["convert", f"{file}:{function}"]) == 0
    assert "converted" in capsys.readouterr().out


def test_what_becomes_of_a_layer_that_is_no_op(file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["convert", f"{file}:layers"]) == 0
    assert "checkpoint" in capsys.readouterr().out
    assert main(["convert", f"{file}:layers", "--otherwise", "leave"]) == 0
    assert "checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.py", "wanted FILE:FUNCTION but got 'model.py'"),
        ("missing.py:build", "there is no file missing.py"),
        ("no_such_module:build", "there is no file or module no_such_module"),
        ("{file}:other", "has no function other"),
        ("{file}:nothing", "must return a torch.nn.Module, or (model, inputs), not int"),
    ],
)
def test_what_is_wrong_is_said(target: str, message: str, file: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["convert", target.format(file=file)]) == 2
    assert message in capsys.readouterr().err
