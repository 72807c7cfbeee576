"""convert on small layers, one for each way in which layers differ: what holds for all of them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from conversion.steps import assert_same, assert_same_steps, by_deepcopy, by_pickle, calls_of, compiled, saved, step
from support.architectures import ARCHITECTURES, fused_of, ids
from support.traces import changes, seen, traces

import ckptkern

by_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@functools.cache
def original(name):
    torch.manual_seed(0)
    return ARCHITECTURES[name].model().train()


@functools.cache
def _converted(name):
    """Returns (the converted model, the conversion, what was to be seen of the model before that)."""
    model = copy.deepcopy(original(name))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    example, before = ids(), seen(model)
    conversion = ckptkern.convert(model, example)
    assert not traces(before, seen(model))
    return model, conversion, before


def converted(name):
    """Returns a copy of the converted model."""
    return copy.deepcopy(_converted(name)[0])


@functools.cache
def exact(name):
    """Returns the original's step in float64."""
    return step(copy.deepcopy(original(name)).double(), ids(2))


@by_architecture
def test_the_step_is_that_of_the_original(name):
    """In float64, where any other formula shows."""
    ours, conversion = converted(name).double(), _converted(name)[1]
    assert fused_of(conversion) == [*ARCHITECTURES[name].replaced_by] * 2, str(conversion)
    assert all(row.error < 2e-5 for row in conversion.converted), str(conversion)
    assert_same(step(ours, ids(2)), exact(name), 1e-9)
    theirs, both = copy.deepcopy(original(name)).double(), torch.cat((ids(3), ids(4)))
    assert_same_steps(ours, theirs, both, tolerance=1e-9)
    assert calls_of(ours) == {"fused": 2 * len(conversion.converted), "checkpointed": 0, "original": 0}
    with torch.no_grad():
        torch.testing.assert_close(ours(both), theirs(both))


@by_architecture
def test_under_autocast_its_error_is_no_larger(name):
    want = exact(name)
    largest = max(tensor.norm() for tensor in want.values())

    def error(model):
        actual = step(model, ids(2), autocast=torch.bfloat16)
        return sum(
            float((actual[key] - tensor).norm() / tensor.norm())
            for key, tensor in want.items()
            if tensor.norm() > 1e-9 * largest
        )

    ours, theirs = error(converted(name)), error(original(name))
    assert ours <= 1.5 * theirs, f"the errors of all gradients sum to {ours:.2f}, those of the original to {theirs:.2f}"


@by_architecture
def test_it_saves_as_much_less_as_the_table_says(name):
    conversion = _converted(name)[1]
    before, after = (saved(model, ids(2)) for model in (original(name), converted(name)))
    assert 0 < after < before, str(conversion)
    assert before - after == pytest.approx(conversion.saved_before - conversion.saved_after, rel=0.05), str(conversion)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
@by_architecture
def test_a_copy_is_converted_and_shares_nothing(name, copied):
    ours = converted(name)
    want, bytes_ = step(ours, ids(2)), saved(ours, ids(2))
    other = copied(ours)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert_same(step(other, ids(2)), want, 1e-6)
    assert saved(other, ids(2)) == bytes_
    ckptkern.revert(other)
    assert any("forward" in vars(m) for m in ours.modules()), "the copy's revert reverts the copy alone"


@by_architecture
def test_convert_replaces_forwards_alone_and_revert_gives_back_the_original(name):
    ours, _, before = _converted(name)
    copied, forwards = converted(name), {m: vars(m)["forward"] for m in ours.modules() if "forward" in vars(m)}
    assert ckptkern.revert(copied) is copied
    ckptkern.revert(ours)
    after = seen(ours)
    for m, forward in forwards.items():  # other tests take it, too
        m.forward = forward
    assert not {name for name in changes(before, after) if not name.startswith("random state")}
    assert_same_steps(copied, original(name), ids(2), tolerance=1e-6)


COMPILED = ("gpt", "adaptive by a table")  # which returns a tuple, and what is computed of an argument


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COMPILED else pytest.mark.long) for name in ARCHITECTURES]
)
def test_it_compiles_without_a_break(name):
    assert_same_steps(compiled(converted(name)), original(name), ids(2))
