"""python -m ckptkern convert, report and frontier, of a user's model."""

import csv
import re

import pytest

from ckptkern.__main__ import main
from ckptkern.planning import measure

MODEL = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

def build():
    return mlp(), torch.randn(4, 8)

def keywords():
    return nn.Bilinear(4, 4, 4), {"input1": torch.randn(3, 4), "input2": torch.randn(3, 4)}

def encoder():
    return nn.TransformerEncoderLayer(32, 4)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x):
        return x + torch.tanh(self.mlp(x))

def layers():
    return nn.Sequential(Layer(), Layer()), torch.randn(4, 8)

def of_sizes():
    return nn.Sequential(mlp(), mlp(), mlp()), lambda size: torch.randn(size, 8)

def nothing():
    return 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    return path


def test_convert(file, tmp_path, capsys):
    out = tmp_path / "rows.csv"
    assert main(["convert", f"{file}:build", "--recompute", "full", "--csv", str(out)]) == 0
    text = capsys.readouterr().out
    assert "mlp_block" in text
    assert "the whole model saves 128 B for backward instead of 1.12 KiB, and a step peaks at " in text
    (row,) = csv.DictReader(out.open())
    columns = ("name", "replaced_by", "saved_before", "saved_after")
    assert [row[name] for name in columns] == ["", "mlp_block", "1152", "128"]


@pytest.mark.parametrize(
    ("arguments", "checkpoints"),
    [("keywords", False), ("encoder", False), ("layers", True), ("layers --otherwise leave", False)],
)
def test_convert_of_other_inputs_and_layers(arguments, checkpoints, file, capsys):
    function, *options = arguments.split()
    assert main(["convert", f"{file}:{function}", *options]) == 0
    text = capsys.readouterr().out
    assert "converted" in text
    assert bool(re.search(r"\bcheckpoint\b", text)) == checkpoints


def test_report(file, tmp_path, capsys):
    pytest.importorskip("scipy")
    out, figure = tmp_path / "rows.csv", tmp_path / "memory.png"
    arguments = ["report", f"{file}:build", "--csv", str(out), "--figure", str(figure), "--saved", "256B"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "eager PyTorch" in text
    assert "saved: 128 B of a budget of 256 B" in text
    rows = list(csv.DictReader(out.open()))
    assert [(row["mode"], row["saved"]) for row in rows][-1] == ("full", "128")
    assert figure.stat().st_size > 1000


def test_frontier(file, capsys):
    pytest.importorskip("scipy")
    assert main(["frontier", f"{file}:of_sizes", "--budget", "256KiB", "--multiple", "8"]) == 0
    text = capsys.readouterr().out
    assert "largest size within 256 KiB: " in text
    assert "at the peak stand" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("convert model.py", "wanted FILE:FUNCTION but got 'model.py'"),
        ("convert missing.py:build", "there is no file missing.py"),
        ("convert no_such_module:build", "there is no file or module no_such_module"),
        ("convert {file}:other", "has no function other"),
        ("convert {file}:nothing", "must return a torch.nn.Module, or (model, inputs), not int"),
        ("report model.py", "wanted FILE:FUNCTION but got 'model.py'"),
        ("report {file}:encoder", "must return (model, inputs), to measure with"),
        (
            "report {file}:build --saved 1B",
            "the budget of saved tensors is 1 B (1 bytes), but the model saves at least",
        ),
        ("report {file}:build --budget 1B", "the budget is 1 B (1 bytes), but the lowest peak"),
        ("report {file}:build --budget some", "budget must be a number of bytes, or a size such as"),
        ("frontier model.py --budget 1GiB", "wanted FILE:FUNCTION but got 'model.py'"),
        ("frontier {file}:encoder --budget 1GiB", "FUNCTION must return (model, make_inputs)"),
        ("frontier {file}:of_sizes --budget 1B", "the budget is 1 B, but size 64 takes"),
        ("frontier {file}:of_sizes --budget some", "budget must be a number of bytes"),
    ],
)
def test_what_is_wrong_is_said(arguments, message, file, capsys):
    assert main([word.format(file=file) for word in arguments.split()]) == 2
    assert message in capsys.readouterr().err
