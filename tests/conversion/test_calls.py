"""The keywords of convert: its own, those of the model's call, and those of nobody."""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch
from support.architectures import ARCHITECTURES, ids
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

import ckptkern
from ckptkern import ops


class Extra(TypedDict, total=False):
    num_items: int


class Config:
    return_dict = True


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x).relu() * scale


class Named(Inner):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale)


class Anything(nn.Module):
    """As a wrapper, or a model of transformers, takes what it hands on."""

    def __init__(self):
        super().__init__()
        self.inner, self.config = Inner(), Config()

    def forward(self, x: Tensor, **kwargs: Unpack[Extra]) -> Tensor:
        return self.inner(x, **{name: value for name, value in kwargs.items() if name == "scale"})


X = torch.randn(4, 8)
MISSPELT = {
    "recompue": ("full", "did you mean 'recompute'?"),
    "mode": ("full", ""),
    "workspce": ("1MiB", "did you mean 'workspace'?"),
    "excluded": ("*", "did you mean 'exclude'?"),
}


@pytest.mark.parametrize("model", [Named, Anything])
@pytest.mark.parametrize("name", MISSPELT)
def test_a_keyword_of_nobody(name, model):
    model, (value, hint) = model(), MISSPELT[name]
    before = dict(vars(model))
    message = f"convert: neither convert nor the forward of {type(model).__name__} has an argument '{name}'"
    with pytest.raises(TypeError) as error:
        ckptkern.convert(model, X, **{name: value})
    assert str(error.value) == message + (f"; {hint}" if hint else "")
    assert dict(vars(model)) == before


def test_plan_names_it_too():
    pytest.importorskip("scipy")
    with pytest.raises(TypeError, match=r"plan: neither plan nor the forward of .* 'buget'; did you mean 'budget'\?"):
        ckptkern.plan(Anything(), X, buget="1MiB")


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        (Named, {"scale": 2.0}),
        (Anything, {"scale": 2.0}),  # of a module inside
        (Anything, {"num_items": 3}),  # of the TypedDict
        (Anything, {"return_dict": False}),  # of the config
        (Anything, {"anything": X, "nested": {"x": X}}),  # data
    ],
)
def test_a_keyword_of_the_model(model, keywords):
    ckptkern.convert(model(), X, **keywords)


# -- workspace ---------------------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = ARCHITECTURES["llama"].model()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.stack(ids).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("compiled", [False, True])
def test_the_workspace_of_every_op(monkeypatch, compiled):
    """Layers, and the head with its loss, in an eager call and, from torch 2.13 on, in a compiled one."""
    seen: dict[str, set] = {}

    def spied(name, op):
        def call(*args, workspace=None, **kwargs):
            seen.setdefault(name, set()).add(workspace)
            return op(*args, workspace=workspace, **kwargs)

        return call

    for name in ("transformer_layer", "linear_cross_entropy"):
        monkeypatch.setattr(ops, name, spied(name, getattr(ops, name)))
    model, example = WithLoss(), (ids(), ids())

    def chosen(**options):
        ckptkern.convert(model, *example, **options)
        seen.clear()
        (torch.compile(model, backend="eager") if compiled else model)(*example).backward()
        return dict(seen)

    traced = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    names = ("transformer_layer", "linear_cross_entropy") if traced or not compiled else ("transformer_layer",)
    assert chosen(workspace="16MiB") == {name: {"16MiB"} for name in names}
    assert chosen() == {name: {None} for name in names}
    assert chosen(workspace=2**20, recompute="full") == {name: {2**20} for name in names}
    torch._dynamo.reset()


def test_modules_of_torch_get_and_lose_it():
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    ckptkern.convert(layer, torch.randn(2, 3, 16), workspace="1MiB")
    assert layer.workspace == "1MiB"
    assert "workspace='1MiB'" in layer.extra_repr()
    ckptkern.revert(layer)
    assert "workspace" not in vars(layer)
    ckptkern.convert(layer, torch.randn(2, 3, 16))
    assert layer.workspace is None


def test_a_wrong_workspace_is_found_before_the_model_runs():
    with pytest.raises(ValueError, match=r"convert: workspace must be .*, not 'much'"):
        ckptkern.convert(nn.Linear(2, 2), torch.ones(3, 5), workspace="much")
