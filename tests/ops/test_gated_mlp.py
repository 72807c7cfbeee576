"""gated_mlp: the checks that it has besides those of all ops."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import MODES

import ckptkern


def test_defaults():
    """SwiGLU without biases, "full"."""
    parameters = inspect.signature(ckptkern.gated_mlp).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "activation": "silu", "dropout_p": 0.0, "gate_bias": None, "up_bias": None, "down_bias": None,
        "training": True, "recompute": "full", "workspace": None,
    }  # fmt: skip
    x, wg, wu, wd = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6, 4), torch.randn(3, 6)
    torch.testing.assert_close(ckptkern.gated_mlp(x, wg, wu, wd), F.linear(F.silu(x @ wg.T) * (x @ wu.T), wd))


@pytest.mark.parametrize("mode", MODES)
def test_every_subset_of_biases(mode):
    x, wg, wu, wd = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 4), (6, 4), (6, 4), (3, 6)))
    x.requires_grad_()
    for present in itertools.product((False, True), repeat=3):
        bg, bu, bd = (
            torch.randn(n, dtype=torch.float64, requires_grad=True) if here else None
            for n, here in zip((6, 6, 3), present, strict=True)
        )
        wanted = [x, *(b for b in (bg, bu, bd) if b is not None)]
        ours = ckptkern.gated_mlp(x, wg, wu, wd, gate_bias=bg, up_bias=bu, down_bias=bd, recompute=mode)
        unfused = F.linear(F.silu(F.linear(x, wg, bg)) * F.linear(x, wu, bu), wd, bd)
        torch.testing.assert_close(ours, unfused)
        ours, unfused = (torch.autograd.grad(y.square().sum(), wanted) for y in (ours, unfused))
        for mine, theirs in zip(ours, unfused, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_gate_and_up_of_two_widths():
    with pytest.raises(
        ValueError, match=r"gated_mlp: gate_weight and up_weight must have one shape, but have \(6, 4\) and \(7, 4\)"
    ):
        ckptkern.gated_mlp(torch.ones(2, 4), torch.ones(6, 4), torch.ones(7, 4), torch.ones(3, 6))


def test_gate_and_up_as_halves_of_one_parameter():
    """A fused [gate; up] parameter, as many checkpoints hold it, is sliced and never copied."""
    both = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    x, wd = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    for mode in MODES:
        ours = torch.autograd.grad(ckptkern.gated_mlp(x, both[:6], both[6:], wd, recompute=mode).sum(), both)[0]
        unfused = torch.autograd.grad(F.linear(F.silu(x @ both[:6].T) * (x @ both[6:].T), wd).sum(), both)[0]
        torch.testing.assert_close(ours, unfused)
