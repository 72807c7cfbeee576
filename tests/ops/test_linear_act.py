"""linear_act and linear_stack: values that activations treat specially, bits of relu's mask, and any number of layers."""

import pytest
import torch
import torch.nn.functional as F
from support import oracles
from support.cases import gradients
from support.catalog import Sizes
from support.properties import call_of

import ckptkern
from ckptkern.memory import saved_tensors


@pytest.mark.parametrize("mode", range(3))
@pytest.mark.parametrize("activation", oracles.ACTIVATIONS)
def test_at_zero_and_nan(activation, mode):
    """relu's gradient is 0 at 0; NaN passes through value and gradient, as in torch. z is x itself here."""
    x = torch.tensor([[-1.0], [-0.0], [0.0], [2.0], [float("nan")], [float("inf")]], requires_grad=True)
    call = call_of("linear_act", mode=mode, activation=activation, bias=None, sizes=Sizes((6,), 1, out=1))
    tensors = {"x": x, "weight": torch.ones(1, 1)}
    actual, expected = (gradients(of, tensors) for of in (call, lambda t: call.oracle(t)[0]))
    torch.testing.assert_close(actual, expected, equal_nan=True)


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
    weights, saved_bytes = [torch.randn(16, 16, requires_grad=True) for _ in range(3)], []
    for layer in (lambda h, w: ckptkern.linear_act(h, w, None, recompute="none"), lambda h, w: F.linear(h, w).relu()):
        with saved_tensors(exclude=weights) as saved:
            h = torch.randn(8, 16, requires_grad=True)
            for weight in weights:
                h = layer(h, weight)
        saved_bytes.append(saved.bytes)
    assert saved_bytes[0] == saved_bytes[1]


def test_containers():
    """Weights and biases may be lists, tuples, ParameterLists or generators, and biases None. One layer is a linear_act."""
    tensors = call_of("linear_stack").make()
    x = tensors["x"]
    weights, biases = ([t for name, t in tensors.items() if name.startswith(kind)] for kind in ("weights", "biases"))
    expected = ckptkern.linear_stack(x, weights, biases)
    for kind in (tuple, iter, torch.nn.ParameterList):
        assert torch.equal(ckptkern.linear_stack(x, kind(weights), kind(biases)), expected)
    assert torch.equal(ckptkern.linear_stack(x, weights, [None] * len(weights)), ckptkern.linear_stack(x, weights))
    layer = weights[0], biases[0]
    assert torch.equal(ckptkern.linear_stack(x, *([t] for t in layer)), ckptkern.linear_act(x, *layer))
