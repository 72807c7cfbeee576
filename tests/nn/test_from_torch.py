"""Modules of ours made from modules that exist."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ckptkern import nn as ours

E, H, B, S = 16, 4, 2, 5


def sequential(*parts):
    return nn.Sequential(*parts)


def fc(n=E, k=E):
    return nn.Linear(k, n)


OPTIONS = {"dropout": 0.0, "batch_first": True}
# name: (class of ours, (module, whether ours has its state_dict's keys, arguments of from_torch), further inputs)
CASES = {
    "Linear": (ours.Linear, fc, True, ()),
    "Dropout": (ours.Dropout, lambda: nn.Dropout(0.0), True, ()),
    "Sequential": (ours.Sequential, lambda: sequential(fc(), nn.Tanh(), fc(), nn.LayerNorm(E)), True, ()),
    "LinearStack": (ours.LinearStack, lambda: sequential(fc(20), nn.SiLU(), fc(E, 20), nn.SiLU()), False, ()),
    "MLP": (ours.MLP, lambda: sequential(fc(20), nn.GELU("tanh"), fc(E, 20)), False, ()),
    "MLP with dropout": (ours.MLP, lambda: sequential(fc(20), nn.ReLU(), nn.Dropout(0.0), fc(E, 20)), False, ()),
    "TransformerEncoderLayer": (
        ours.TransformerEncoderLayer, lambda: nn.TransformerEncoderLayer(E, H, 20, norm_first=True, **OPTIONS), True, (),
    ),
    "TransformerDecoderLayer": (
        ours.TransformerDecoderLayer, lambda: nn.TransformerDecoderLayer(E, H, 20, activation=F.gelu, **OPTIONS), True,
        (torch.randn(B, 3, E),),
    ),
}  # fmt: skip


def step(module, parameters, *more):
    x = torch.randn(B, S, E, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = module(x, *more)
    return y, torch.autograd.grad(y.square().sum(), [x, *parameters])


@pytest.mark.parametrize("name", CASES)
def test_results_and_parameters_are_the_modules(name):
    """The module itself is as it was."""
    cls, make, same_keys, more = CASES[name]
    module, calls = make(), []
    children, parameters = dict(module.named_modules()), [*module.parameters()]
    expected = step(module, parameters, *more)
    module.register_forward_hook(lambda *_: calls.append(None))
    other = cls.from_torch(module)
    assert type(other) is cls
    assert {id(p) for p in other.parameters()} == {id(p) for p in parameters}
    if same_keys:
        assert list(other.state_dict()) == list(module.state_dict())
    assert children == dict(module.named_modules())
    made = step(other, parameters, *more)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    assert calls == [None]
    assert type(made[0].grad_fn) is type(step(copy.deepcopy(other), parameters[:0], *more)[0].grad_fn)
    assert not cls.from_torch(module.eval()).training
    for wrong in (nn.Bilinear(2, 2, 2), None):
        with pytest.raises(TypeError, match=rf"^{cls.__name__}: .*(Bilinear|None)"):
            cls.from_torch(wrong)
    module.forward = lambda *_: None
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: {type(module).__name__} has a forward set on the instance"):
        cls.from_torch(module)


def test_settings():
    linear = ours.Linear.from_torch(fc(), F.silu, "full")
    assert (linear.activation, linear.recompute) == ("silu", "full")
    mlp = ours.MLP.from_torch(sequential(fc(), nn.SiLU(), nn.Dropout(0.25), fc()), "none", "1MiB")
    assert (mlp.activation, mlp.dropout, mlp.recompute, mlp.workspace) == ("silu", 0.25, "none", "1MiB")
    theirs = nn.TransformerEncoderLayer(E, H, 20, 0.5)
    theirs.dropout.p = 0.25
    layer = ours.TransformerEncoderLayer.from_torch(theirs, "full")
    assert [type(one).__module__ for one in (layer.self_attn, layer.dropout1)] == [
        "ckptkern.nn.attention",
        "ckptkern.nn.dropout",
    ]
    assert (layer.dropout.p, layer.dropout1.p, layer.self_attn.dropout, layer.self_attn.recompute) == (
        0.25,
        0.5,
        0.5,
        "full",
    )
    assert ours.Sequential.from_torch(sequential(fc(), fc()), "every 2", debug=True).options == {"debug": True}


class Own(nn.Linear):
    pass


REFUSED = {
    "a subclass": (ours.Linear, Own(E, E), "must be a torch.nn.Linear, not Own"),
    "parametrised": (ours.Linear, parametrizations.weight_norm(fc()), "not ParametrizedLinear"),
    "odd": (ours.LinearStack, sequential(fc(), nn.ReLU(), fc()), "is not Linear, activation, Linear, activation"),
    "two activations": (
        ours.LinearStack, sequential(fc(), nn.ReLU(), fc(), nn.SiLU()), "share one activation, but there are relu, silu",
    ),
    "a last dropout": (ours.MLP, sequential(fc(), nn.ReLU(), fc(), nn.Dropout()), "has a 3 that is not an nn.Linear: Dropout"),
    "two activations in a row": (ours.MLP, sequential(fc(), nn.ReLU(), nn.ReLU(), fc()), "ReLU that is not an unmodified"),
    "a dropout in evaluation": (ours.MLP, sequential(fc(), nn.ReLU(), nn.Dropout().eval(), fc()), "training mode"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    cls, module, message = REFUSED[case]
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: .*{message}"):
        cls.from_torch(module)


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match=r"^MLP: activation must be one of .* which Tanh\(\) does not"):
        ours.MLP.from_torch(sequential(fc(), nn.Tanh(), fc()))


def test_parts_that_a_layer_cannot_stand_for_are_called():
    """An adapter or a forward of its own stays what it is."""
    theirs = nn.TransformerEncoderLayer(E, H, 20, **OPTIONS)
    theirs.self_attn.forward = lambda *args, own=theirs.self_attn.forward, **kwargs: (2 * own(*args, **kwargs)[0], None)
    parametrizations.weight_norm(theirs.linear1)
    other, parameters = ours.TransformerEncoderLayer.from_torch(theirs), [*theirs.parameters()]
    assert other.self_attn is theirs.self_attn
    torch.testing.assert_close(step(other, parameters), step(theirs, parameters))
