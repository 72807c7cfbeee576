"""mlp_block: what no rule over its options shows, and low-rank updates in more bits than what they update."""

import pytest
import torch
from support.cases import Watch, output_gradient
from support.catalog import Normal, Sizes
from support.properties import call_of

import ckptkern
from ckptkern import LoRA


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("norm_first", [True, False])
def test_second_order_of_a_layer_norm_with_a_bias_alone(norm_first, needs_x):
    """torch's own second derivative of it is None, which would silently leave the bias without a gradient."""
    call = call_of("mlp_block", norm="layer", norm_weight=None, norm_bias=Normal((6,)), norm_first=norm_first)
    t, grads = call.make(torch.float64, frozen=() if needs_x else ("x",)), []
    for gain in (None, torch.ones(6, dtype=torch.float64)):
        y = call.with_(norm_weight=gain)(t)
        (first,) = torch.autograd.grad(y.pow(3).sum(), t["norm_bias"], create_graph=True)
        grads += torch.autograd.grad(first.pow(2).sum(), t["norm_bias"])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("lead", [(6, 2, 3), (6, 2), (9,)], ids=str)
def test_whole_samples_are_dropped(lead):
    """A sample is a row of the first dimension if there are tokens in it; else all of x."""
    call = call_of("mlp_block", sizes=Sizes(lead), drop_path_p=0.5)
    x = call.make()["x"]
    branch, whole = (function(call.make()) - x for function in (call, call.with_(drop_path_p=0.0)))
    samples = lead[0] if len(lead) > 1 else 1
    branch, whole = (tensor.reshape(samples, -1) for tensor in (branch, whole))
    survives = branch.any(1, keepdim=True)
    torch.testing.assert_close(branch, 2 * whole * survives)
    assert len({*survives.flatten().tolist()}) == min(samples, 2)


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
    (da,) = torch.autograd.grad(y, a, torch.full_like(y, 1e-4))
    expected = 1e-7 * b.T @ w.float().T @ torch.ones(64, 16) @ x.float()
    assert (da - expected).norm() < 0.01 * expected.norm()


def test_a_plain_tuple_will_do():
    factors = torch.randn(2, 5), torch.randn(6, 2)
    call = call_of("mlp_block", lora={"down": LoRA(*factors)})
    assert torch.equal(call(call.make()), call.with_(lora={"down": factors})(call.make()))
