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
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=needs_x)
    weight, bias = torch.randn(3, 3).double(), torch.randn(3, dtype=torch.float64, requires_grad=True)

    def second_order(norm_weight):
        options = dict(norm="layer", norm_weight=norm_weight, norm_bias=bias, norm_first=norm_first)
        y = ckptkern.mlp_block(x, weight, None, weight, None, **options)
        (grad,) = torch.autograd.grad(y.pow(3).sum(), bias, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), bias)[0]

    torch.testing.assert_close(second_order(None), second_order(torch.ones(3, dtype=torch.float64)))


@pytest.mark.parametrize("lead", [(6, 2, 3), (6, 2), (9,)], ids=str)
def test_whole_samples_are_dropped(lead):
    """A sample is a row of the first dimension if there are tokens in it; else all of x."""
    call = call_of("mlp_block", sizes=Sizes(lead), drop_path_p=0.5)
    tensors = call.make()
    branch, whole = (one(tensors) - tensors["x"] for one in (call, call.with_(drop_path_p=0.0)))
    samples, seen = lead[0] if len(lead) > 1 else 1, set()
    for one, saved in zip(branch.chunk(samples), whole.chunk(samples), strict=True):
        torch.testing.assert_close(one, saved * 2 if one.any() else saved * 0)
        seen.add(bool(one.any()))
    assert len(seen) == min(samples, 2)


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
