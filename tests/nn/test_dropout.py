"""Dropout: the checks that it has besides those of all modules."""

import pytest
import torch
from support.cases import SEED, expected_mask
from torch import nn

import ckptkern


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_inplace(ours):
    """The result is the input itself, and gradients are right. torch's own module passes the same checks."""
    module = (ckptkern.nn if ours else nn).Dropout(0.5, inplace=True)
    x = torch.ones(40, 9, requires_grad=True)
    h = x * 3
    pointer = h.data_ptr()
    y = module(h)
    assert y.data_ptr() == pointer
    assert torch.equal(h, y)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module(x)


def test_a_scalar():
    x = torch.ones((), requires_grad=True)
    y = ckptkern.nn.Dropout(0.5)(x)
    y.backward()
    assert y.shape == ()
    assert x.grad == y


def test_inplace_over_what_another_op_keeps():
    """exp saves its result; overwriting it is an error, not a wrong gradient."""
    x = torch.ones(4, 9, requires_grad=True)
    y = ckptkern.nn.Dropout(0.5, inplace=True)(x.exp())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inplace_in_evaluation_returns_the_input():
    module = ckptkern.nn.Dropout(0.5, inplace=True).eval()
    x = torch.ones(4, 9)
    assert module(x) is x


def test_inplace_mask():
    torch.manual_seed(SEED)
    y = ckptkern.nn.Dropout(0.5, inplace=True)(torch.ones(20, 9))
    assert torch.equal(y, 2.0 * expected_mask(0.5, 20, 9))


def test_wrong_probability():
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            ckptkern.nn.Dropout(p)


def test_two_of_one_model_differ():
    """Two calls differ, and a seed reproduces them (flash-attention#2088)."""
    model = nn.Sequential(ckptkern.nn.Dropout(0.5), ckptkern.nn.Dropout(0.5))
    x = torch.ones(30, 30)
    first = model[0](x)
    assert not torch.equal(first, model[1](x))
    both = model(x)
    assert 0.15 < (both != 0).double().mean() < 0.35  # two independent masks of one sublayer
