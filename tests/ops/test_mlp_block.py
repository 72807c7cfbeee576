"""mlp_block: what no rule over its options shows, and low-rank updates in more bits than what they update."""

import pytest
import torch
import torch.nn.functional as F
from support.calls import call_of
from support.cases import Watch, output_gradient

import ckptkern
from ckptkern import LoRA
from ckptkern.ops import catalog
from ckptkern.ops.catalog import Normal, Sizes


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("norm_first", [True, False])
def test_second_order_of_a_layer_norm_with_a_bias_alone(norm_first, needs_x):
    """torch's own second derivative of it is None, which would silently leave the bias without a gradient."""
    frozen, found = () if needs_x else ("x",), []
    for gain in (None, torch.ones(6, dtype=torch.float64)):
        call = call_of("mlp_block", norm="layer", norm_weight=gain, norm_bias=Normal((6,)), norm_first=norm_first)
        t = call.make(torch.float64, frozen=frozen)
        (first,) = torch.autograd.grad(call(t).pow(3).sum(), t["norm_bias"], create_graph=True)
        found += torch.autograd.grad(first.pow(2).sum(), t["norm_bias"])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("lead", [(6, 2, 3), (6, 2), (9,)], ids=str)
def test_whole_samples_are_dropped(lead):
    """A sample is a row of the first dimension if there are tokens in it; else all of x."""
    call = call_of("mlp_block", sizes=Sizes(lead), drop_path_p=0.5)
    branch, whole = (one(call.make()) - call.make()["x"] for one in (call, call.with_(drop_path_p=0.0)))
    samples = lead[0] if len(lead) > 1 else 1
    dropped = [not one.any() for one in branch.chunk(samples)]
    for one, full, drops in zip(branch.chunk(samples), whole.chunk(samples), dropped, strict=True):
        torch.testing.assert_close(one, full * (0 if drops else 2))
    assert len({*dropped}) == min(samples, 2)


AFTER = dict(
    post_norm="layer", post_norm_weight=Normal((6,), 1.0), post_norm_bias=Normal((6,)), layer_scale=Normal((6,))
)


@pytest.mark.parametrize("name", ["mlp_block", "attention_block"])
def test_parameters_after_the_branch_cost_no_matmul_of_its_gradient(name):
    """Their gradients read what the branch gave, one matmul from what is saved."""
    call = call_of(name, recompute="none", **AFTER)
    y = call(call.make(frozen=call.make().keys() - AFTER.keys()))
    with Watch() as watch:
        y.backward(output_gradient(y))
    weight = call.make()[{"mlp_block": "down_weight"}.get(name, "out_weight")]
    assert watch.flops == 2 * y[..., 0].numel() * weight.numel()


# -- low-rank updates --------------------------------------------------------------------------------------------------


def test_small_gradients_do_not_vanish_in_float16():
    x, w = torch.randn(16, 64).half(), (torch.randn(64, 64) / 8).half()
    a, b = (torch.randn(8, 64) / 8).requires_grad_(), (torch.randn(64, 8) * 1e-4).requires_grad_()
    y = ckptkern.mlp_block(x, w, None, w, None, "identity", lora={"up": LoRA(a, b, 1e-3)}, residual=False)
    y.backward(torch.full_like(y, 1e-4))
    z = (F.linear(x, w) + F.linear(F.linear(x.float(), a), b) * 1e-3).half()
    (expected,) = torch.autograd.grad(F.linear(z, w), a, torch.full_like(y, 1e-4))
    assert expected.norm() > 0
    assert (a.grad - expected).norm() < 0.01 * expected.norm()


def test_a_plain_tuple_will_do():
    leaves = catalog.random_leaves(catalog.OPS["mlp_block"].inputs(Sizes()))
    factors = torch.randn(2, 5), torch.randn(6, 2)
    ours, theirs = (ckptkern.mlp_block(**leaves, lora={"down": one}) for one in (factors, LoRA(*factors)))
    assert torch.equal(ours, theirs)
