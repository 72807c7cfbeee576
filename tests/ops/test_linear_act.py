"""linear_act and linear_stack: values that activations treat specially, bits of relu's mask, and any number of layers."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.cases import ACTIVATIONS, MODES, assert_same, gradients
from support.oracles import ORACLES

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.ops import catalog
from ckptkern.ops.examples import normal

each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_at_zero_and_nan(activation, mode):
    """relu's gradient is 0 at 0; NaN passes through value and gradient, as in torch. z is x itself here."""
    x = {"x": torch.tensor([[-1.0, -0.0, 0.0, 2.0, float("nan"), float("inf")]]).T.contiguous().requires_grad_()}
    found, expected = (
        gradients(
            lambda t, of=of: of(t["x"], torch.ones(1, 1), None, activation, recompute=mode), x, torch.full((6, 1), 3.0)
        )
        for of in (ckptkern.linear_act, ORACLES["linear_act"])
    )
    torch.testing.assert_close(found, expected, equal_nan=True)


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
    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]

    def saved(function):
        with saved_tensors(exclude=weights) as saved:
            h = torch.randn(8, 16, requires_grad=True)
            for weight in weights:
                h = function(h, weight)
            h.sum()
        return saved.bytes

    assert saved(lambda h, w: ckptkern.linear_act(h, w, None, recompute="none")) == 4 * 8 * 16 * 4
    assert saved(lambda h, w: F.linear(h, w).relu()) == 4 * 8 * 16 * 4


def stack(*widths):
    """(x, weights, biases)"""
    shapes = {"x": (13, widths[0])} | {f"weight{i}": (n, k) for i, (k, n) in enumerate(itertools.pairwise(widths))}
    shapes |= {f"bias{i}": (n,) for i, n in enumerate(widths[1:])}
    x, *rest = catalog.random_leaves({name: normal(*shape) for name, shape in shapes.items()}, torch.float64).values()
    return x, rest[: len(widths) - 1], rest[len(widths) - 1 :]


@each_mode
@pytest.mark.parametrize("widths", [[5, 6], [5, 6, 7], [9, 1, 9, 2], [70, 65, 3, 66, 64]], ids=str)
def test_depths_and_widths(widths, mode):
    """One layer, which is a linear_act, two, and more, narrow and wide, growing and shrinking."""
    x, weights, biases = stack(*widths)
    leaves = dict(enumerate([x, *weights, *biases]))
    found, expected = (
        gradients(lambda _, of=of: of(x, weights, biases, recompute=mode), leaves)
        for of in (ckptkern.linear_stack, ORACLES["linear_stack"])
    )
    torch.testing.assert_close(found, expected)
    if len(weights) == 1:
        one = gradients(lambda _: ckptkern.linear_act(x, *weights, *biases, recompute="full"), leaves)
        assert_same(found, one)


def test_containers():
    """Weights and biases may be lists, tuples, ParameterLists or generators, and biases None."""
    x, weights, biases = stack(5, 6, 7)
    expected = ckptkern.linear_stack(x, weights, biases)
    for kind in (tuple, iter, torch.nn.ParameterList):
        assert torch.equal(ckptkern.linear_stack(x, kind(weights), kind(biases)), expected)
    assert torch.equal(ckptkern.linear_stack(x, weights, [None, None]), ckptkern.linear_stack(x, weights))
