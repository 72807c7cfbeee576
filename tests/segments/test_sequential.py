"""checkpoint_sequential: which layers become segments, what is then saved, and that gradients do not depend on the choice."""

import copy
from collections import OrderedDict

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


def deep(depth=DEPTH, activation=nn.ReLU):
    """The field's tutorial: Linear and an activation, over and over."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), activation()) for _ in range(depth)))


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def spans(parts):
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    return [tuple(part) for part in parts]


@pytest.mark.parametrize(("segments", "expected"), [
    (1, [(0, 5, False)]),
    (2, [(0, 2, True), (2, 5, False)]),  # what is left over goes to the last, as in torch
    (5, [(0, 1, True), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, False)]),
    ("every 1", [(0, 1, True), (1, 2, True), (2, 3, True), (3, 4, True), (4, 5, True)]),
    ("every 3", [(0, 1, True), (1, 3, False), (3, 4, True), (4, 5, False)]),
    ("[13]", [(0, 1, False), (1, 2, True), (2, 3, False), (3, 4, True), (4, 5, False)]),
    (lambda name, layer: name == "4" and isinstance(layer, nn.Module), [(0, 4, False), (4, 5, True)]),
])  # fmt: skip
def test_split(segments, expected):
    layers = deep(5)
    assert spans(split(layers, segments)) == spans(split(list(layers), segments)) == expected
    if segments == "[13]":
        named = OrderedDict((f"block{name}", layer) for name, layer in layers.named_children())
        assert spans(split(nn.Sequential(named), "block[13]")) == expected


@pytest.mark.parametrize(("segments", "message"), [
    (0, "between 1 and the number of layers, 5, but is 0"),
    (True, "segments must be a number of segments"),
    ("every 0", "'every k' with k at least 1"),
    ("block*", r"segments='block\*' chooses none of the layers 0, 1, 2, 3, 4"),
    ("2 gigs", r"'2 gigs' chooses none of the layers 0, 1, 2, 3, 4: it is neither 'sqrt' nor .* such as '2GiB'"),
    ("Sqrt", r"neither 'sqrt' nor 'every k'"),
    (lambda name, layer: False, r"chooses none of the layers 0, 1, 2, 3, 4$"),
    (" 1 MiB ", "needs an input to measure with"),
])  # fmt: skip
def test_what_cannot_be_meant(segments, message):
    with pytest.raises(ValueError, match=message):
        split(deep(5), segments)


def test_other_arguments_that_are_refused(x):
    with pytest.raises(ValueError, match="Unexpected keyword arguments: speed"):
        checkpoint_sequential(deep(), 2, x, speed=1)
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        checkpoint_sequential(deep(), 2, x, use_reentrant=True)
    with pytest.raises(ValueError, match="at most 2 KiB may be saved, but one segment of all layers saves 2 KiB"):
        split(deep(), "2047 B", x)


def saved(model, function, x):
    with saved_tensors(exclude=model.parameters()) as saved:
        function(x)
    return saved.bytes


# strategy, and what it saves in tensors of the layers' width: x, and what layers outside of segments save, a ReLU each
STRATEGIES = [
    (1, DEPTH + 1), (3, 2 + 5), (DEPTH, DEPTH + 1), ("sqrt", 2 + 5), ("every 1", DEPTH), ("every 2", DEPTH + 1),
    ("[0-9]", 10 + 3), ("5KiB", None), ("13KiB", None), ("1GiB", DEPTH + 1),
]  # fmt: skip


@pytest.mark.parametrize(("segments", "tensors"), STRATEGIES)
def test_gradients_and_saved_bytes(segments, tensors, x):
    """Of the function and of the module."""
    model = deep()
    module, parameters = ckptkern.nn.Sequential(*model, segments=segments), [x, *model.parameters()]
    unfused = torch.autograd.grad(model(x).square().sum(), parameters)
    for run in (lambda x: checkpoint_sequential(model, segments, x), module):
        with saved_tensors(exclude=model.parameters()) as saved:
            y = run(x)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), parameters), unfused, rtol=0, atol=0)
        assert tensors is None or saved.bytes == tensors * ROW_BYTES
    with torch.no_grad():
        assert torch.equal(module(x), y)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Dropout])
def test_a_bound_in_bytes_holds(activation, x):
    """Nothing is recomputed where everything fits. What is measured on fake tensors is what is saved."""
    model = deep(activation=activation)
    unfused = saved(model, model, x)
    for tensors in (1, 2, 4, 12, 30):
        bound = f"{tensors * ROW_BYTES} B"
        parts = split(model, bound, x)
        assert saved(model, lambda x, bound=bound: checkpoint_sequential(model, bound, x), x) <= tensors * ROW_BYTES
        assert any(part.recompute for part in parts) == (unfused > tensors * ROW_BYTES)
        assert tensors > 1 or spans(parts) == [(0, DEPTH, True)]
    measured = sequential._measure(list(model), x)
    half = [Part(0, DEPTH // 2, True), Part(DEPTH // 2, DEPTH, False)]
    for parts in ([Part(0, DEPTH, False)], half):
        real = saved(model, lambda x, parts=parts: sequential.run(model, parts, x), x)
        assert sequential._saved(parts, measured) == real


def test_measuring_changes_nothing(x):
    """No statistics, random numbers or gradients, and is quick for a large input: tensors are fake."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), ckptkern.nn.MLP(WIDTH, 64))
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert any(part.recompute for part in split(model, "3KiB", x))
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
