"""mlp: the checks that it has besides those of all ops."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from cases import MODES
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.memory import saved_tensors


def test_defaults():
    """gelu (erf), no dropout, training, "full", 1 GiB."""
    parameters = inspect.signature(ckptkern.mlp).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "activation": "gelu", "dropout_p": 0.0, "training": True, "recompute": "full", "workspace": None,
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_one_bias_without_the_other(mode):
    x, w1, w2 = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4), torch.randn(3, 6)
    b1, b2 = torch.randn(6, requires_grad=True), torch.randn(3, requires_grad=True)
    for first, second in ((b1, None), (None, b2)):
        wanted = [x] + [b for b in (first, second) if b is not None]
        ours = torch.autograd.grad(ckptkern.mlp(x, w1, first, w2, second, recompute=mode).square().sum(), wanted)
        unfused = torch.autograd.grad(F.linear(F.gelu(F.linear(x, w1, first)), w2, second).square().sum(), wanted)
        for mine, theirs in zip(ours, unfused, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_saves_no_more_than_a_checkpoint():
    """It saves d elements per token, like torch.utils.checkpoint; eager PyTorch saves d + 2h."""
    fc1, fc2 = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
    parameters = [*fc1.parameters(), *fc2.parameters()]
    x = torch.randn(10, 16, requires_grad=True)

    def saved(function):
        with saved_tensors(exclude=parameters) as saved:
            function(x)
        return saved.bytes // (10 * 4)

    def unfused(x):
        return fc2(F.gelu(fc1(x)))

    assert saved(unfused) == 16 + 2 * 64
    assert saved(lambda x: checkpoint(unfused, x, use_reentrant=False)) == 16
    assert saved(lambda x: ckptkern.mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias)) == 16


def test_one_weight_in_two_places():
    """fc2 tied to fc1's transpose: both contributions arrive, through a view of one parameter."""
    w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64)
    for mode in MODES:
        (ours,) = torch.autograd.grad(ckptkern.mlp(x, w, None, w.T, None, recompute=mode).sum(), w)
        (unfused,) = torch.autograd.grad(F.linear(F.gelu(F.linear(x, w)), w.T).sum(), w)
        torch.testing.assert_close(ours, unfused)


def test_x_and_weights_as_views_of_one_buffer():
    """Slices of one tensor, with its strides."""
    buffer = torch.randn(20, 30, dtype=torch.float64, requires_grad=True)

    def run(function):
        x, w1, w2 = buffer[:5, :4], buffer[5:11, 4:8], buffer[11:14, 10:16]
        return torch.autograd.grad(function(x, w1, w2).square().sum(), buffer)[0]

    ours = run(lambda x, w1, w2: ckptkern.mlp(x, w1, None, w2, None))
    torch.testing.assert_close(ours, run(lambda x, w1, w2: F.linear(F.gelu(F.linear(x, w1)), w2)))
