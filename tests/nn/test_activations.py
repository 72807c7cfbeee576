"""Activations that modules are given as functions and modules."""

import functools
import inspect
import math

import pytest
import torch
from support.drop_ins import ours_of
from torch import nn
from torch.nn import functional as F

from ckptkern.eager import ACTIVATIONS
from ckptkern.nn.activations import named, recognised


class NewGELU(nn.Module):
    """As in transformers."""

    def forward(self, z):
        return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))


class Swish(nn.Module):
    """silu for as long as beta is 1."""

    def __init__(self, kind):
        super().__init__()
        scale = torch.ones(())
        self.beta = (
            nn.Parameter(scale) if kind == "parameter" else scale.requires_grad_() if kind == "attribute" else 1.0
        )
        if kind == "buffer":
            self.register_buffer("gain", scale)

    def forward(self, z):
        return z * torch.sigmoid(self.beta * z)


def hooked():
    module = nn.Sequential(nn.ReLU())
    module[0].register_forward_hook(lambda *_: None)
    return module


def forms_of(torchs):
    """A function of torch's, or modules of a class of torch's, in place too."""
    if not isinstance(torchs, type):
        return [torchs]
    return [torchs(), *([torchs(inplace=True)] if "inplace" in torchs.__init__.__annotations__ else [])]


WRITTEN_OUT = {
    "relu": [torch.relu_, torch.Tensor.relu, nn.Threshold(0.0, 0.0), nn.Sequential(nn.ReLU())],
    "relu2": [lambda z: F.relu(z) ** 2],
    "gelu": [lambda z: z * 0.5 * (1 + torch.erf(z / 2**0.5))],
    "gelu_tanh": [nn.GELU("tanh"), functools.partial(F.gelu, approximate="tanh"), NewGELU()],
    "quick_gelu": [lambda z: z * torch.sigmoid(1.702 * z)],
    "silu": [Swish("number")],
}
UNKNOWN = [
    nn.ReLU6(), nn.LeakyReLU(0.01), nn.Tanh(), nn.PReLU(1, 0.0), nn.Softmax(-1), nn.GLU(), nn.RReLU(), nn.Dropout(), hooked(),
    Swish("parameter"), Swish("attribute"), Swish("buffer"), lambda z: F.gelu(z).clamp(-10, 10), lambda z: F.relu(z).detach(),
    lambda z: z.sum(), lambda z: None, lambda: None, lambda z: F.silu(z.detach()) + z - z.detach(), nn.MultiheadAttention,
]  # fmt: skip


def test_functions_and_modules_are_recognised():
    """Torch's own by name, which a layer reads that calls what it does not know."""
    before = torch.get_rng_state()
    for name, entry in ACTIVATIONS.items():
        functions = [form for original in entry.torchs for form in forms_of(original)]
        assert [named(function) for function in functions] == [name] * len(functions)
        functions += WRITTEN_OUT.get(name, [])
        assert functions
        assert [recognised(function) for function in functions] == [name] * len(functions)
    assert [recognised(function) for function in UNKNOWN] == [None] * len(UNKNOWN)
    assert torch.equal(torch.get_rng_state(), before)


def takes_nothing(cls):
    try:
        inspect.signature(cls).bind()
    except TypeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_torchs_of_an_activation_are_all():
    """A function missing there is not recognised in a traced module, which convert then leaves unfused."""
    classes = {name: getattr(nn, name) for name in ("Identity", *nn.modules.activation.__all__)}
    for name, entry in ACTIVATIONS.items():
        functions = {getattr(where, name) for where in (F, torch) if hasattr(where, name)}
        ours = {function for function in functions if recognised(function) == name}
        ours |= {kind for kind in classes.values() if takes_nothing(kind) and recognised(kind()) == name}
        assert ours == set(entry.torchs)


@pytest.mark.parametrize("name", ["Linear", "LinearStack", "MLP", "GatedMLP", "LlamaDecoderLayer"])
def test_modules_take_them(name):
    with torch.no_grad(), torch.device("meta"):
        module = ours_of(name, activation=NewGELU())
    assert "activation='gelu_tanh'" in repr(module)
    name_of = "GatedMLP" if name == "LlamaDecoderLayer" else name  # which has one as its mlp
    with pytest.raises(ValueError, match=rf"^{name_of}: activation must be one of 'relu', .* which Tanh\(\) does not$"):
        ours_of(name, activation=nn.Tanh())
    with pytest.raises(ValueError, match=f"^{name_of}: activation must be one of 'relu', .*, not 3$"):
        ours_of(name, activation=3)
