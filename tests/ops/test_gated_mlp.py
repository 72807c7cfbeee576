"""gated_mlp: the checks that it has besides those of all ops."""

import pytest
import torch
import torch.nn.functional as F
from support.cases import MODES

import ckptkern


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
