"""MLP and GatedMLP: the checks that they have besides those of all modules."""

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern.memory import kept_tensors


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


def test_level_and_workspace_may_be_changed_later():
    """The level is a plain attribute: a planner may set it on a built model."""
    mlp = ckptkern.nn.MLP(6)
    x = torch.randn(300, 6, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).square().sum(), x)[0]
    for mlp.recompute, mlp.workspace in (("none", None), ("selective", 1), ("full", "1B")):
        torch.testing.assert_close(torch.autograd.grad(mlp(x).square().sum(), x)[0], expected)


PACKED = dict(activation="relu", recompute="packed", capacity=0.75)


@pytest.mark.parametrize(
    ("kind", "sizes", "torchs"),
    [
        (ckptkern.nn.MLP, (6, 24, 6), [nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6)]),
        (ckptkern.nn.LinearStack, ([6, 24, 6],), [nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6), nn.ReLU()]),
    ],
)
def test_packed(kind, sizes, torchs):
    """The level and its capacity reach the op, from the constructor, from a twin, or set later."""
    x = torch.randn(64, 6, requires_grad=True)
    torchs = nn.Sequential(*torchs)
    (expected,) = torch.autograd.grad(torchs(x).square().sum(), x)
    later = kind.from_torch(torchs)
    later.recompute, later.capacity = "packed", 0.75
    made = [kind(*sizes, **PACKED), kind.from_torch(torchs, "packed", capacity=0.75), later]
    made[0].load_state_dict(made[1].state_dict())
    y_bits = 64 if kind is ckptkern.nn.LinearStack else 0
    for module in made:
        assert "activation='relu'" in repr(module)
        assert "recompute='packed', capacity=0.75" in repr(module)
        with kept_tensors(module) as kept:
            y = module(x)
        assert kept.bytes == 64 * (6 * 4 + 3 + 8 + 18 * 4) + 8 + y_bits
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)
    assert "capacity" not in repr(kind(*sizes))
    for wrong in (dict(activation="gelu"), dict(capacity=1.5)):
        with pytest.raises(ValueError, match=f"{kind.__name__}: (recompute='packed' keeps|capacity must be)"):
            kind(*sizes, **PACKED | wrong)
    with pytest.raises(ValueError, match="LinearStack: capacity" if y_bits else "MLP: capacity"):
        kind.from_torch(torchs, capacity=-1)
    with pytest.raises(
        ValueError, match="GatedMLP: recompute must be one of 'none', 'selective', 'full', not 'packed'"
    ):
        ckptkern.nn.GatedMLP(6, 24, activation="relu", recompute="packed")
