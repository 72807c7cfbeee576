"""Linear, LinearStack, MLP and Dropout: what they have besides what all modules promise."""

from types import MethodType

import pytest
import torch
from support.cases import SEED, expected_mask
from torch import nn

import ckptkern


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ([3], ValueError, r"features needs at least two widths, .* but is \[3\]"),
        (3, TypeError, "features must be a sequence of widths, .* not 3"),
        ([7, None], ValueError, r"features\[1\] must be an integer of at least 0, not None"),
    ],
)
def test_wrong_widths_of_a_stack(features, error, message):
    with pytest.raises(error, match=f"LinearStack: {message}"):
        ckptkern.nn.LinearStack(features)


@pytest.mark.parametrize("activation", [0, "", False])
def test_only_none_is_no_activation(activation):
    with pytest.raises(ValueError, match=f"Linear: activation must be one of .*, not {activation!r}"):
        ckptkern.nn.Linear(7, 5, activation=activation)


def test_a_stack_of_mixed_biases():
    stack, x = ckptkern.nn.LinearStack([6, 5, 4]), torch.randn(3, 6)
    stack.layers[0].bias = None
    torch.testing.assert_close(stack(x), stack.layers[1](stack.layers[0](x).relu()).relu())


def test_a_classs_own_forward_bound_to_the_instance_is_no_other():
    """Hugging Face's kernelize binds forward to the instances; a layer with such parts stays one op."""
    x = torch.randn(3, 7)
    for bound in (None, "own", "another's"):
        layer = ckptkern.nn.MLP(7, 12, 5)
        if bound is not None:
            layer.fc1.forward = MethodType(nn.Linear.forward, layer.fc1 if bound == "own" else nn.Linear(7, 12))
        y = layer(x)
        assert (type(y.grad_fn).__name__ == "AddmmBackward0") == (bound == "another's")
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), y)


# -- Dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_dropout_is_the_mask_and_in_place_the_input(in_place):
    x = torch.ones(20, 9, requires_grad=True)
    h, mask = x * 3, expected_mask(0.5, 20, 9)
    torch.manual_seed(SEED)
    y = ckptkern.nn.Dropout(0.5, inplace=in_place)(h)
    assert torch.equal(y, 6.0 * mask)
    assert (y.data_ptr() == h.data_ptr()) == in_place
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_dropout_in_place_is_torchs():
    """The error of a leaf, that of overwriting what exp saves, and no copy in evaluation."""
    module, x = ckptkern.nn.Dropout(0.5, inplace=True), torch.ones(4, 9, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(x.exp()).sum().backward()
    assert module.eval()(x) is x
