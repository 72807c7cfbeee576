"""MLP and GatedMLP: the checks that they have besides those of all modules."""

import torch

import ckptkern


def test_mlp_defaults():
    """4 x hidden features, as many out as in, gelu, biases, no dropout, "full"."""
    mlp = ckptkern.nn.MLP(6)
    assert (mlp.fc1.in_features, mlp.fc1.out_features) == (6, 24)
    assert (mlp.fc2.in_features, mlp.fc2.out_features) == (24, 6)
    assert (mlp.activation, mlp.dropout, mlp.recompute, mlp.workspace) == ("gelu", 0.0, "full", None)
    assert mlp.fc1.bias is not None
    assert mlp.fc2.bias is not None


def test_gated_mlp_defaults():
    """Llama's: SwiGLU without biases."""
    mlp = ckptkern.nn.GatedMLP(6, 10)
    assert list(mlp.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert [tuple(p.shape) for p in mlp.parameters()] == [(10, 6), (10, 6), (6, 10)]
    assert (mlp.activation, mlp.dropout, mlp.recompute, mlp.workspace) == ("silu", 0.0, "full", None)


def test_mode_and_workspace_may_be_changed_later():
    """The mode is a plain attribute: a planner may set it on a built model."""
    mlp = ckptkern.nn.MLP(6)
    x = torch.randn(300, 6, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).square().sum(), x)[0]
    for mlp.recompute, mlp.workspace in (("none", None), ("selective", 1), ("full", "1B")):
        torch.testing.assert_close(torch.autograd.grad(mlp(x).square().sum(), x)[0], expected)
