"""Linear and LinearStack: the checks that they have besides those of all modules."""

import logging

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern.ops.dispatch import choices as _choices


def test_linear_takes_torchs_positional_arguments():
    layer = ckptkern.nn.Linear(3, 4, False, "cpu", torch.float64)
    assert layer.bias is None
    assert layer.weight.dtype == torch.float64
    assert (layer.activation, layer.recompute) == ("identity", "selective")
    assert ckptkern.nn.Linear(3, 4, activation="relu").activation == "relu"


def test_an_inplace_activation_may_follow():
    """nn.Sequential(Linear, ReLU(inplace=True)) with the Linear replaced by ours."""
    torch.manual_seed(1)
    ours = nn.Sequential(ckptkern.nn.Linear(3, 4), nn.ReLU(inplace=True), ckptkern.nn.Linear(4, 2))
    unfused = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    unfused.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 3)
    ours(x).sum().backward()
    unfused(x).sum().backward()
    for a, b in zip(ours.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_transformer_layer_with_our_linears():
    """A subclass of nn.Linear may stand where torch's own modules hold one."""
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


SPARSE = {"coo": torch.Tensor.to_sparse_coo, "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc}


def pruned(weight, layout):
    """A parameter with half of weight's elements."""
    saved = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    return nn.Parameter(SPARSE[layout]((weight * saved).detach()))


def results(module, x):
    """(y, gradients) or the error's type: what torch computes depends on its release and the layout."""
    x = x.detach().requires_grad_()
    try:
        y = module(x)
        y.square().sum().backward()
    except RuntimeError as error:
        return type(error)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_like_torch(ours, theirs, shape):
    mine, wanted = results(ours, torch.ones(shape)), results(theirs, torch.ones(shape))
    if isinstance(wanted, type):
        assert mine is wanted
        return False
    for one, other in zip(mine, wanted, strict=True):
        assert one.layout == other.layout
        torch.testing.assert_close(one.to_dense(), other.to_dense())
    return True


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_sparse_weight(layout, activation):
    act = {None: nn.Identity(), "relu": nn.ReLU(), "gelu": nn.GELU()}[activation]
    computed = []
    for bias in (False, True):
        ours, theirs = ckptkern.nn.Linear(6, 4, bias, activation=activation), nn.Linear(6, 4, bias)
        theirs.weight = pruned(theirs.weight, layout)
        ours.weight = nn.Parameter(theirs.weight.detach().clone())
        ours.bias = None if theirs.bias is None else nn.Parameter(theirs.bias.detach().clone())
        for shape in ((6,), (3, 6), (2, 3, 6)):
            computed.append(assert_like_torch(ours, nn.Sequential(theirs, act), shape))
            theirs.zero_grad()
            ours.zero_grad()
    assert computed.count(True) >= 5  # addmm of a COO weight in torch 2.13 takes no 2-D input


@pytest.mark.parametrize("layout", SPARSE)
def test_modules_with_a_sparse_weight(layout):
    """Each module calls its layers, and torch computes the sparse one."""

    def unfused_gated(gated):
        return lambda x: gated.down_proj(nn.functional.silu(gated.gate_proj(x)) * gated.up_proj(x))

    stack, mlp, gated = ckptkern.nn.LinearStack([6, 4, 6]), ckptkern.nn.MLP(6, 8), ckptkern.nn.GatedMLP(6, 8)
    for layer in (stack.layers[1], mlp.fc1, gated.up_proj):
        layer.weight = pruned(layer.weight, layout)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(stack(x), stack.layers[1](stack.layers[0](x).relu()).relu())
    torch.testing.assert_close(mlp(x), mlp.fc2(nn.functional.gelu(mlp.fc1(x))))
    torch.testing.assert_close(gated(x), unfused_gated(gated)(x))
    for kind, sizes, name, options in (
        ("TransformerEncoderLayer", (6, 2, 8, 0.0), "linear1", {}),
        ("MultiheadAttention", (6, 2), "out_proj", {}),
        ("MultiheadAttention", (6, 2), "out_proj", {"need_weights": False}),
    ):
        theirs, ours = getattr(nn, kind)(*sizes), getattr(ckptkern.nn, kind)(*sizes)
        ours.load_state_dict(theirs.state_dict())
        weight = pruned(getattr(theirs, name).weight, layout)
        for module in (ours, theirs):
            getattr(module, name).weight = weight
        inputs = (x, x, x) if kind == "MultiheadAttention" else (x,)
        try:
            expected = theirs(*inputs, **options)
        except RuntimeError as error:  # COO in attention: its last matmul is of two dimensions
            with pytest.raises(type(error)):
                ours(*inputs, **options)
            continue
        torch.testing.assert_close(ours(*inputs, **options), expected)


def test_a_sparse_weight_is_said_once_and_refused_by_kernels(caplog):
    _choices._log_once.cache_clear()
    weight, x = torch.eye(4).to_sparse_csr(), torch.ones(2, 4)
    with caplog.at_level(logging.INFO, logger="ckptkern"):
        for _ in range(2):
            ckptkern.linear_act(x, weight, None, "relu")
    assert caplog.messages == ["eager backend: the kernels cover dense weights, not torch.sparse_csr"]
    with (
        ckptkern.backend("triton"),
        pytest.raises(
            RuntimeError, match=r"linear_act: backend\('triton'\) was asked for, but .* not torch.sparse_csr"
        ),
    ):
        ckptkern.linear_act(x, weight, None, "relu")
