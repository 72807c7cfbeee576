"""checkpoint_sequential: which layers become segments, what is then saved, and that gradients do not depend on the choice."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ckptkern
from ckptkern import checkpoint_sequential
from ckptkern.memory import saved_tensors
from ckptkern.segments.sequential import split

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


def shown(parts):
    """The numbers of all layers, those of a segment in brackets."""
    numbers = ["".join(map(str, range(part.start, part.stop))) for part in parts]
    return "".join(f"[{text}]" if part.recompute else text for text, part in zip(numbers, parts, strict=True))


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        (1, "01234"),
        (2, "[01]234"),  # what is left over goes to the last, as in torch
        (5, "[0][1][2][3]4"),
        ("every 1", "[0][1][2][3][4]"),
        ("every 3", "[012][34]"),
        ("[13]", "0[1]2[3]4"),
        (lambda name, layer: name == "4" and isinstance(layer, nn.Module), "0123[4]"),
    ],
)
def test_split(segments, expected):
    assert shown(split(deep(5), segments)) == shown(split(list(deep(5)), segments)) == expected


def test_split_by_names():
    named = OrderedDict((f"block{name}", layer) for name, layer in deep(5).named_children())
    assert shown(split(nn.Sequential(named), "block[13]")) == "0[1]2[3]4"


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (0, "between 1 and the number of layers, 5, but is 0"),
        (True, "segments must be a number of segments"),
        ("every 0", "'every k' with k at least 1"),
        ("block*", r"segments='block\*' chooses none of the layers 0, 1, 2, 3, 4"),
        ("2 gigs", r"'2 gigs' chooses none of the layers 0, 1, 2, 3, 4: it is neither 'sqrt' nor .* such as '2GiB'"),
        ("Sqrt", r"neither 'sqrt' nor 'every k'"),
        (lambda name, layer: False, r"chooses none of the layers 0, 1, 2, 3, 4$"),
        (" 1 MiB ", "needs an input to measure with"),
    ],
)
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
    (1, DEPTH + 1), (3, 2 + 5), (DEPTH, DEPTH + 1), ("sqrt", 2 + 5), ("every 1", DEPTH), ("every 2", (DEPTH + 1) // 2),
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
    """Nothing is recomputed where everything fits, to the byte."""
    model = deep(activation=activation)
    unfused = saved(model, model, x)
    for bound in (*(tensors * ROW_BYTES for tensors in (1, 2, 4, 12, 30)), unfused, unfused - 1):
        parts = split(model, f"{bound} B", x)
        assert saved(model, lambda x, bound=bound: checkpoint_sequential(model, f"{bound} B", x), x) <= bound
        assert any(part.recompute for part in parts) == (unfused > bound)
        assert bound > ROW_BYTES or shown(parts) == "[01234567891011]"


def test_measuring_changes_nothing(x):
    """No statistics, random numbers or gradients, and is quick for a large input: tensors are fake."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), ckptkern.nn.MLP(WIDTH, 64))
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert any(part.recompute for part in split(model, "3KiB", x))
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
