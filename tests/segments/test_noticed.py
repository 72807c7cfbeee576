"""What ckptkern.checkpoint notices between forward and backward: changes in place, and a recompute that differs."""

import collections
import functools

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from segments.test_regions import leaf, mlp
from torch import nn
from torch.utils.checkpoint import CheckpointError

from ckptkern import bits, checkpoint


@torch.no_grad()
def double(t):
    t.mul_(2)


def step_of_an_optimizer(model, x):
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


LOOSE = leaf(8, 8)
OF_WEIGHT = r"the parameter '3\.weight' of shape \(8, 32\) was changed in place .* forward saw version \d"
# how the region is called, what is changed between forward and backward, the message of the error
CHANGES = {
    "argument": (lambda model, x: checkpoint(model, x), lambda model, x: double(x), "modified by an inplace operation"),
    "module": (checkpoint, lambda model, x: double(model[3].weight), OF_WEIGHT),
    "lambda": (lambda model, x: checkpoint(lambda x: model(x), x), lambda model, x: double(model[3].weight), OF_WEIGHT),
    "captured tensor": (
        lambda model, x: checkpoint(lambda x: x @ LOOSE, x), lambda model, x: double(LOOSE), r"a parameter of shape \(8, 8\)",
    ),
    "a bias, which autograd does not save": (
        checkpoint, lambda model, x: double(model[0].bias), r"the parameter '0\.bias' of shape \(32,\) was changed in place"
    ),
    "step of an optimizer": (checkpoint, step_of_an_optimizer, "between forward and backward of the region Sequential"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_errors(name):
    call, change, message = CHANGES[name]
    model, x = mlp(), leaf(5, 8) * 1
    y = call(model, x)
    change(model, x)
    with pytest.raises(CheckpointError if name != "argument" else RuntimeError, match=message):
        y.sum().backward()


def test_a_parameter_that_the_region_does_not_use_may_change():
    """A closure over a whole model watches what autograd saves in the region, and no more."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    y = checkpoint(lambda x: model[0](x).sin().exp(), torch.randn(3, 4))
    double(model[1].weight)
    y.sum().backward()


def test_an_optimizer_may_step_in_backward_and_hooks_fire_once():
    """Also where two regions share the parameter (pytorch#82203)."""
    model, x, fired = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), torch.randn(3, 4), collections.Counter()

    @torch.no_grad()
    def descend(p):
        p.sub_(p.grad)
        fired.update([p])

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(descend)
    for layer in model:
        x = checkpoint(lambda x, layer=layer: layer(x).sin().exp(), x)
    x.sum().backward()
    shared = mlp()
    for p in shared.parameters():
        p.register_post_accumulate_grad_hook(lambda p: fired.update([p]))
    checkpoint(shared, checkpoint(shared, torch.randn(5, 8))).sum().backward()
    assert fired == dict.fromkeys([*model.parameters(), *shared.parameters()], 1)


def alternating(*functions):
    """A function that is another one at each call."""
    turn = iter(functions)
    return lambda x: next(turn)(x)


MISMATCHES = {
    "fewer": (lambda x: x.sin().sin().sin(), lambda x: x.sin(), "A different number of tensors was saved"),
    "more": (lambda x: x.sin(), lambda x: x.sin().sin(), "trying to save more tensors during recomputation"),
    "shape": (lambda x: x.sin().exp(), lambda x: x[:2].sin().exp(), "have different metadata than during the forward"),
    "dtype": (lambda x: x.sin().exp(), lambda x: x.double().sin().exp(), "have different metadata"),
}


@pytest.mark.parametrize("how", ["default", "debug", "switch"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_recompute_that_differs(name, how):
    """Errors have torch's class and words, so that code which matches on them goes on working."""
    first, second, message = MISMATCHES[name]
    with torch_checkpoint.set_checkpoint_debug_enabled(True if how == "switch" else None):
        y = checkpoint(alternating(first, second), leaf(4), debug=how == "debug", early_stop=False)
    with pytest.raises(CheckpointError, match=message if how == "default" else "Operations executed"):
        y.sum().backward()


def test_without_determinism_check_recompute_may_differ():
    y = checkpoint(
        alternating(torch.sin, lambda x: x.double().sin()), leaf(4), determinism_check="none", early_stop=False
    )
    y.sum().backward()


def selective(*ops):
    return functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [*ops])


ATEN = torch.ops.aten
DRIFTS = {  # options, drift between forward and recompute, is it an error
    "none": ({"determinism_check": "values"}, 0.0, False),
    "default": ({}, 1e-4, False),
    "values": ({"determinism_check": "values"}, 1e-4, True),
    "a policy": ({"determinism_check": "values", "context_fn": selective(ATEN.exp.default)}, 0.0, False),
    "a policy of the checksum's own ops": (
        {"determinism_check": "values", "context_fn": selective(ATEN.sum.default, ATEN.mul.Tensor)}, 1e-3, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRIFTS)
def test_values_that_differ_are_found(name):
    options, change, is_error = DRIFTS[name]
    drift = [0.0]

    def function(x):
        return (x.sin() + drift[0]).exp().cos()

    y = checkpoint(function, leaf(4, 100), **options)
    drift[0] = change
    if not is_error:
        y.sum().backward()
        return
    with pytest.raises(
        CheckpointError, match=r"function recomputed other values .* saved tensor 1 of 3, shape \(4, 100\)"
    ):
        y.sum().backward()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool]
)
def test_checksum_sees_every_byte_and_place(dtype, monkeypatch):
    monkeypatch.setattr(bits, "CHUNK", 7)  # several chunks
    x = (torch.randn(3, 11) * 3).to(dtype)
    seen = {int(bits.checksum(x))}
    assert seen == {int(bits.checksum(x.t().contiguous().t()))}
    for place in range(x.nbytes):
        y = x.clone()
        y.view(torch.uint8).view(-1)[place] ^= 1
        seen.add(int(bits.checksum(y)))
    assert len(seen) == x.nbytes + 1
    assert int(bits.checksum(x[:0])) == 0
