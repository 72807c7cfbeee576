"""Modules of ours made from modules that exist."""

import pytest
import torch
from support.drop_ins import B, E, H, S, step, theirs_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ckptkern import nn as ours


def fc(n=E, k=E):
    return nn.Linear(k, n)


CASES = {  # a module, and has ours its state_dict's keys?
    "Linear": (fc, True),
    "Dropout": (lambda: nn.Dropout(0.0), True),
    "Sequential": (lambda: nn.Sequential(fc(), nn.Tanh(), fc(), nn.LayerNorm(E)), True),
    "LinearStack": (lambda: nn.Sequential(fc(20), nn.SiLU(), fc(E, 20), nn.SiLU()), False),
    "MLP": (lambda: nn.Sequential(fc(20), nn.GELU("tanh"), nn.Dropout(0.0), fc(E, 20)), False),
    "MultiheadAttention": (lambda: theirs_of("MultiheadAttention"), True),
    "TransformerEncoderLayer": (lambda: theirs_of("TransformerEncoderLayer", norm_first=True), True),
    "TransformerDecoderLayer": (lambda: theirs_of("TransformerDecoderLayer", activation=F.gelu), True),
}


def step_of(module):
    generator, decodes = torch.Generator().manual_seed(1), isinstance(module, nn.TransformerDecoderLayer)
    return step(module, *torch.randn(1 + decodes, B, S, E, generator=generator).requires_grad_().unbind())[0]


@pytest.mark.parametrize("name", CASES)
def test_results_and_parameters_are_the_modules(name):
    """The module itself is as it was; its hooks are shared."""
    make, same_keys = CASES[name]
    cls, module, calls = getattr(ours, name), make(), []
    children, parameters = dict(module.named_modules()), [*module.parameters()]
    expected = step_of(module)
    module.register_forward_hook(lambda *_: calls.append(None))
    other = cls.from_torch(module)
    assert type(other) is cls
    assert {id(p) for p in other.parameters()} == {id(p) for p in parameters}
    assert not same_keys or list(other.state_dict()) == list(module.state_dict())
    assert children == dict(module.named_modules())
    torch.testing.assert_close(step_of(other), expected, rtol=1e-4, atol=1e-5)
    assert calls == [None]
    assert not cls.from_torch(module.eval()).training
    for wrong in (nn.Bilinear(2, 2, 2), None):
        with pytest.raises(TypeError, match=rf"^{cls.__name__}: .*(Bilinear|None)"):
            cls.from_torch(wrong)
    module.forward = lambda *_: None
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: {type(module).__name__} has a forward set on the instance"):
        cls.from_torch(module)


def test_settings():
    """Returns those of the module and of its parts, and those that from_torch is given."""
    mlp = ours.MLP.from_torch(nn.Sequential(fc(), nn.SiLU(), nn.Dropout(0.25), fc()), "none", "1MiB")
    assert (mlp.activation, mlp.dropout, mlp.recompute, mlp.workspace) == ("silu", 0.25, "none", "1MiB")
    theirs = nn.TransformerEncoderLayer(E, H, 20, 0.5)
    theirs.dropout.p = 0.25
    layer = ours.TransformerEncoderLayer.from_torch(theirs, "full")
    assert (type(layer.self_attn), type(layer.dropout1)) == (ours.MultiheadAttention, ours.Dropout)
    assert (layer.dropout.p, layer.dropout1.p, layer.self_attn.dropout) == (0.25, 0.5, 0.5)
    assert layer.recompute == layer.self_attn.recompute == "full"
    theirs.self_attn.forward = theirs.self_attn.forward
    other = ours.TransformerEncoderLayer.from_torch(theirs)
    assert other.self_attn is theirs.self_attn, "a forward of its own stays"
    assert ours.Sequential.from_torch(nn.Sequential(fc(), fc()), "every 2", debug=True).options == {"debug": True}


class Own(nn.Linear):
    pass


REFUSED = {
    "must be a torch.nn.Linear, not Own": (ours.Linear, [Own(E, E)]),
    "not ParametrizedLinear": (ours.Linear, [parametrizations.weight_norm(fc())]),
    "is not Linear, activation, Linear, activation": (ours.LinearStack, [fc(), nn.ReLU(), fc()]),
    "share one activation, but there are relu, silu": (ours.LinearStack, [fc(), nn.ReLU(), fc(), nn.SiLU()]),
    "has a 3 that is not an nn.Linear: Dropout": (ours.MLP, [fc(), nn.ReLU(), fc(), nn.Dropout()]),
    "ReLU that is not an unmodified": (ours.MLP, [fc(), nn.ReLU(), nn.ReLU(), fc()]),
    "training mode": (ours.MLP, [fc(), nn.ReLU(), nn.Dropout().eval(), fc()]),
    r"activation must be one of .* which Tanh\(\) does not": (ours.MLP, [fc(), nn.Tanh(), fc()]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    cls, parts = REFUSED[message]
    with pytest.raises((TypeError, ValueError), match=rf"^{cls.__name__}: .*{message}"):
        cls.from_torch(parts[0] if len(parts) == 1 else nn.Sequential(*parts))
