"""The tutorials' models with activation checkpoints give the unmodified run's bits for a part of its memory."""

import pytest
import torch

from ckptkern import __main__
from examples import tutorials

AT_MOST = {  # of the unmodified run's saved bytes
    "deep-net": 0.8, "blocks": 0.15, "transformer-encoder": 0.15, "resnet": 0.6, "unet": 0.5, "nested": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("name", tutorials.EXAMPLES)
def test_example(name):
    outcome = tutorials.run(name)
    assert outcome.differ == []
    assert outcome.segmented <= AT_MOST[name] * outcome.unmodified, outcome


def test_the_command(capsys):
    assert __main__.main(["examples", "resnet", "nested"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("same bits") == 2
    assert __main__.main(["examples", "no-such"]) == 2
    assert "choose from deep-net, blocks" in capsys.readouterr().out


def test_a_difference_is_found(monkeypatch, capsys):
    def drifting():
        model, _, x = tutorials.EXAMPLES["resnet"]()
        return tutorials.Example(model, lambda model, x: model(x) * (1 + torch.finfo(torch.float32).eps), x)

    monkeypatch.setitem(tutorials.EXAMPLES, "drifting", drifting)
    assert __main__.main(["examples", "drifting"]) == 1
    assert "DIFFERS: output" in capsys.readouterr().out
