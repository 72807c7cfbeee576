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


CASES = {
    "Linear": fc,
    "Dropout": lambda: nn.Dropout(0.0),
    "Sequential": lambda: nn.Sequential(fc(), nn.Tanh(), fc(), nn.LayerNorm(E)),
    "MultiheadAttention": lambda: theirs_of("MultiheadAttention"),
    "TransformerEncoderLayer": lambda: theirs_of("TransformerEncoderLayer", norm_first=True),
    "TransformerDecoderLayer": lambda: theirs_of("TransformerDecoderLayer", activation=F.gelu),
}


def step_of(module):
    generator, decodes = torch.Generator().manual_seed(1), isinstance(module, nn.TransformerDecoderLayer)
    return step(module, *torch.randn(1 + decodes, B, S, E, generator=generator).requires_grad_().unbind())[0]


@pytest.mark.parametrize("name", CASES)
def test_results_and_parameters_are_the_modules(name):
    """The module itself is as it was; its hooks are shared, and keys of state_dict are its."""
    cls, module, calls = getattr(ours, name), CASES[name](), []
    children, parameters = dict(module.named_modules()), [*module.parameters()]
    expected = step_of(module)
    module.register_forward_hook(lambda *_: calls.append(None))
    other = cls.from_torch(module)
    assert type(other) is cls
    assert [id(p) for p in other.parameters()] == [id(p) for p in parameters], "an optimizer counts by their order"
    assert list(other.state_dict()) == list(module.state_dict())
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


def test_what_is_refused():
    for module in (Own(E, E), parametrizations.weight_norm(fc())):
        with pytest.raises(TypeError, match=f"^Linear: module must be a torch.nn.Linear, not {type(module).__name__}"):
            ours.Linear.from_torch(module)
