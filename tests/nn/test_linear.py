"""Linear and LinearStack: what is their own beside the checks of all modules."""

import pytest
import torch
from torch import nn

import ckptkern


def test_linear_takes_torchs_positional_arguments():
    layer = ckptkern.nn.Linear(3, 4, False, "cpu", torch.float64)
    assert layer.bias is None
    assert layer.weight.dtype == torch.float64
    assert (layer.activation, layer.recompute) == ("identity", "selective")
    assert ckptkern.nn.Linear(3, 4, activation="relu").activation == "relu"


def test_an_inplace_activation_may_follow():
    """nn.Sequential(Linear, ReLU(inplace=True)) with the Linear exchanged."""
    torch.manual_seed(1)
    ours = nn.Sequential(ckptkern.nn.Linear(3, 4), nn.ReLU(inplace=True), ckptkern.nn.Linear(4, 2))
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 3)
    ours(x).sum().backward()
    plain(x).sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_transformer_layer_with_our_linears():
    """A subclass of nn.Linear serves where torch's own modules hold one."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    expected = layer(torch.ones(2, 3, 8))
    for name in ("linear1", "linear2"):
        old = getattr(layer, name)
        new = ckptkern.nn.Linear(old.in_features, old.out_features)
        new.load_state_dict(old.state_dict())
        setattr(layer, name, new)
    torch.testing.assert_close(layer(torch.ones(2, 3, 8)), expected)


def test_stack_widths():
    stack = ckptkern.nn.LinearStack(iter([3, 5, 2]))
    assert [tuple(layer.weight.shape) for layer in stack.layers] == [(5, 3), (2, 5)]
    assert (stack.activation, stack.recompute, stack.workspace) == ("relu", "full", None)
    for features in ([], [3]):
        with pytest.raises(ValueError, match=r"LinearStack: features needs at least two widths, .* but is \[3?\]"):
            ckptkern.nn.LinearStack(features)
    for features in (None, 3):
        with pytest.raises(TypeError, match=f"LinearStack: features must be a sequence of widths, .* not {features}"):
            ckptkern.nn.LinearStack(features)
