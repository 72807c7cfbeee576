"""linear_act: the checks that it has besides those of all ops."""

import pytest
import torch
import torch.nn.functional as F
from support.cases import ACTIVATIONS, MODES

import ckptkern


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_at_zero_and_nan(activation, mode):
    """relu's gradient is 0 at 0; NaN passes through value and gradient, as in torch. z is x itself here."""
    x = torch.tensor([[-1.0, -0.0, 0.0, 2.0, float("nan"), float("inf")]]).T.contiguous()
    results = []
    for function in (
        lambda x: ckptkern.linear_act(x, torch.ones(1, 1), None, activation, recompute=mode),
        lambda x: ACTIVATIONS[activation](F.linear(x, torch.ones(1, 1))),
    ):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results.append((y.detach(), torch.autograd.grad(y, leaf, torch.full_like(y, 3.0))[0]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("features", [1, 7, 8, 9, 64, 65])
def test_every_bit_of_relus_mask(features):
    """At "selective" the mask is one bit per element: a dy of ones comes back as [z > 0], in every column."""
    x = torch.randn(37, features)
    bias = torch.zeros(features, requires_grad=True)
    y = ckptkern.linear_act(x, torch.eye(features), bias, "relu", recompute="selective")
    dy = torch.randn(37, features)
    (db,) = torch.autograd.grad(y, bias, dy)
    torch.testing.assert_close(db, (dy * (x > 0)).sum(0))


def test_a_chain_saves_each_hidden_layer_once():
    """relu at "none" saves y, which the next layer saves anyway: no more than nn.Linear and ReLU save."""
    from ckptkern.memory import saved_tensors

    layers = [torch.nn.Linear(16, 16) for _ in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]

    def saved(function):
        with saved_tensors(exclude=parameters) as saved:
            h = torch.randn(8, 16, requires_grad=True)
            for layer in layers:
                h = function(h, layer.weight, layer.bias)
            h.sum()
        return saved.bytes

    unfused = saved(lambda h, w, b: F.linear(h, w, b).relu())
    assert unfused == 4 * 8 * 16 * 4
    assert saved(lambda h, w, b: ckptkern.linear_act(h, w, b, recompute="none")) == unfused
