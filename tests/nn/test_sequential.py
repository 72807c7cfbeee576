"""nn.Sequential: the checks that it has besides those of the strategies, in tests/segments/test_sequential.py."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ckptkern


def model(**options):
    torch.manual_seed(1)
    return ckptkern.nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), **options)


def gradients(module, x):
    module.zero_grad()
    module(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("segments", ["sqrt", 2, "every 2", "1KiB"])
def test_copies(segments, copied):
    """Also after a step, when the parts are known."""
    module, x = model(segments=segments, determinism_check="none"), torch.randn(3, 6)
    expected = gradients(module, x)
    twin = copied(module)
    assert repr(twin) == repr(module)
    assert twin.options == {"determinism_check": "none"}
    for got, wanted in zip(gradients(twin, x), expected, strict=True):
        assert torch.equal(got, wanted)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    for got, wanted in zip(gradients(module, x), expected, strict=True):
        assert torch.equal(got, wanted)


def test_meta_tensors():
    module, x = model().to("meta"), torch.empty(3, 6, device="meta", requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("segments", [None, 2.0, [2], {2}], ids=repr)
def test_wrong_segments_at_construction(segments):
    with pytest.raises(ValueError, match=r"segments must be a number of segments, .* but is"):
        model(segments=segments)


def test_wrong_options_at_construction():
    with pytest.raises(TypeError, match=r"Sequential: recompute is not an option of ckptkern\.checkpoint"):
        model(recompute="full")


@pytest.mark.parametrize("layers", [("x",), (3,), (None, 3)], ids=str)
def test_wrong_layers_raise_torchs_error(layers):
    errors = []
    for sequential in (ckptkern.nn.Sequential, nn.Sequential):
        with pytest.raises(TypeError) as raised:
            sequential(*layers)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
