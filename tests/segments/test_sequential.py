"""Strategies: which layers become segments, what is then saved, and that gradients do not depend on the choice."""

import copy
import math

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern import checkpoint_sequential
from ckptkern.memory import saved_tensors
from ckptkern.segments import sequential
from ckptkern.segments.sequential import Part, split

DEPTH, WIDTH, ROWS = 12, 16, 32
ROW_BYTES = ROWS * WIDTH * 4


def deep(depth: int = DEPTH) -> nn.Sequential:
    """The field's tutorial: Linear and ReLU, over and over."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(depth)))


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def spans(parts: list[Part]) -> list[tuple[int, int, bool]]:
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    return [tuple(part) for part in parts]


@pytest.mark.parametrize(("segments", "expected"), [
    (1, [(0, 5, False)]),
    (2, [(0, 2, True), (2, 5, False)]),  # what is left over goes to the last, as in torch
    (5, [(0, 1, True), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, False)]),
    ("sqrt", [(0, 2, True), (2, 5, False)]),
    ("every 1", [(0, 1, True), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, True)]),
    ("every 2", [(0, 1, True), (1, 2, False), (2, 3, True), (3, 4, False), (4, 5, True)]),
    ("every 3", [(0, 1, True), (1, 3, False), (3, 4, True), (4, 5, False)]),
    ("[13]", [(0, 1, False), (1, 2, True), (2, 3, False), (3, 4, True), (4, 5, False)]),
    (lambda name, layer: name == "4" and isinstance(layer, nn.Module), [(0, 4, False), (4, 5, True)]),
])  # fmt: skip
def test_split(segments, expected):
    assert spans(split(deep(5), segments)) == expected
    assert spans(split(list(deep(5)), segments)) == expected


def test_names_are_those_of_the_children():
    from collections import OrderedDict

    model = nn.Sequential(OrderedDict(stem=nn.Linear(4, 4), block1=nn.ReLU(), block2=nn.ReLU(), head=nn.Linear(4, 4)))
    assert spans(split(model, "block*")) == [(0, 1, False), (1, 2, True), (2, 3, True), (3, 4, False)]


@pytest.mark.parametrize(("segments", "message"), [
    (0, "between 1 and the number of layers, 5, but is 0"),
    (6, "between 1 and the number of layers, 5, but is 6"),
    (True, "segments must be a number of segments"),
    (None, "but is None"),
    ("every 0", "'every k' with k at least 1"),
    ("block*", r"segments='block\*' chooses none of the layers 0, 1, 2, 3, 4"),
    ("2 gigs", r"'2 gigs' chooses none of the layers 0, 1, 2, 3, 4: it is neither 'sqrt' nor .* such as '2GiB'"),
    ("-2GiB", r"'-2GiB' chooses none .* such as '2GiB'"),
    ("2G", r"'2G' chooses none .*KB, MB, GB, KiB, MiB or GiB"),
    ("Sqrt", r"neither 'sqrt' nor 'every k'"),
    (lambda name, layer: False, r"chooses none of the layers 0, 1, 2, 3, 4$"),
    ("1MiB", "needs an input to measure with"),
    (" 1 MiB ", "needs an input to measure with"),
])  # fmt: skip
def test_what_cannot_be_meant(segments, message):
    with pytest.raises(ValueError, match=message):
        split(deep(5), segments)


def test_unknown_options(x):
    with pytest.raises(ValueError, match="Unexpected keyword arguments: speed"):
        checkpoint_sequential(deep(), 2, x, speed=1)
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        checkpoint_sequential(deep(), 2, x, use_reentrant=True)


# -- what is saved -----------------------------------------------------------------------------------------------------


def saved(model, function, x) -> int:
    with saved_tensors(exclude=model.parameters()) as saved:
        function(x)
    return saved.bytes


STRATEGIES = [1, 3, DEPTH, "sqrt", "every 2", "[0-9]", "5KiB", "13KiB", "1GiB"]


@pytest.mark.parametrize("segments", STRATEGIES)
def test_gradients_are_those_of_the_unmodified_run(segments, x):
    model = deep()
    parameters = [x, *model.parameters()]
    unfused = torch.autograd.grad(model(x).square().sum(), parameters)
    mine = torch.autograd.grad(checkpoint_sequential(model, segments, x).square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(mine, unfused, strict=True))


@pytest.mark.parametrize(("segments", "tensors"), [
    (1, DEPTH + 1), (DEPTH, DEPTH + 1), (3, 2 + 5), ("every 1", DEPTH), ("every 2", DEPTH + 1),
])  # fmt: skip
def test_saved_bytes(segments, tensors, x):
    """Saved, in tensors of the layers' width: x, and what plain layers keep, which is each layer's ReLU."""
    model = deep()
    assert saved(model, lambda x: checkpoint_sequential(model, segments, x), x) == tensors * ROW_BYTES


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Dropout])
@pytest.mark.parametrize("tensors", [1, 2, 4, 7, 12, 30, 1000])
def test_a_bound_in_bytes_holds(tensors, activation, x):
    """Nothing is recomputed where everything fits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), activation()) for _ in range(DEPTH)))
    bound = f"{tensors * ROW_BYTES} B"
    parts = split(model, bound, x)
    measured = saved(model, lambda x: checkpoint_sequential(model, bound, x), x)
    assert measured <= tensors * ROW_BYTES
    unfused = saved(model, model, x)
    recomputed = sum(part.stop - part.start for part in parts if part.recompute)
    assert (recomputed == 0) == (unfused <= tensors * ROW_BYTES)
    if tensors == 1:
        assert spans(parts) == [(0, DEPTH, True)]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Dropout])
def test_measured_on_fake_tensors_is_what_is_saved(activation, x):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), activation()) for _ in range(DEPTH)))
    measured = sequential._measure(list(model), x)
    assert sequential._saved([Part(0, DEPTH, False)], measured) == saved(model, model, x)
    half = [Part(0, DEPTH // 2, True), Part(DEPTH // 2, DEPTH, False)]
    assert sequential._saved(half, measured) == saved(model, lambda x: sequential.run(model, half, x), x)


def test_a_bound_that_cannot_hold(x):
    with pytest.raises(ValueError, match="at most 2 KiB may be saved, but one segment of all layers saves 2 KiB"):
        split(deep(), "2047 B", x)


def test_measuring_changes_nothing(x):
    """Measuring changes no statistics, random numbers or gradients, and is quick for a large input: tensors are fake."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), ckptkern.nn.MLP(WIDTH, 64))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    parts = split(model, "3KiB", x)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert any(part.recompute for part in parts)


# -- the module -------------------------------------------------------------------------------------------------------


def test_module(x):
    unfused = deep()
    model = ckptkern.nn.Sequential(*copy.deepcopy(unfused), segments="sqrt")
    model.load_state_dict(unfused.state_dict())
    assert "segments='sqrt'" in repr(model)
    y, expected = model(x), unfused(x)
    assert torch.equal(y, expected)
    mine, theirs = (torch.autograd.grad(out.sum(), x)[0] for out in (y, expected))
    assert torch.equal(mine, theirs)
    size = DEPTH // round(math.sqrt(DEPTH))
    assert saved(model, model, x) == (round(math.sqrt(DEPTH)) - 1 + size + 1) * ROW_BYTES
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert model[:3].segments == "sqrt"
    assert len(model[:3]) == 3


def test_module_measures_once_a_shape(x, monkeypatch):
    model, calls = ckptkern.nn.Sequential(*deep(), segments="9KiB"), []
    monkeypatch.setattr(sequential, "_measure", counted(sequential._measure, calls))
    for _ in range(3):
        model(x)
    assert len(calls) == 1
    model(x[:5])
    model.eval()(x)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert len(calls) == 4


def counted(function, calls):
    def call(*args):
        calls.append(1)
        return function(*args)

    return call


def test_a_layer_that_occurs_twice(x):
    act = nn.Tanh()
    model = ckptkern.nn.Sequential(nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act, segments="every 1")
    y = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), y)


def test_inputs_that_are_no_tensors(x):
    class Both(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    model = ckptkern.nn.Sequential(Both(), nn.Tanh(), segments="every 1")
    assert torch.equal(model((x, x)), (x + x).tanh())
    model.segments = "1GiB"
    with pytest.raises(ValueError, match="needs an input to measure with"):
        model((x, x))


def test_options_reach_the_segments(x):
    model = ckptkern.nn.Sequential(*deep(), segments=3, determinism_check="often")
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        model(x)
