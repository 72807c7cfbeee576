"""MLP and gated MLP: the matmul of both tiles at once and the two-step implementation give one result, bit for bit."""

import pytest
import torch
from support.kernel_cases import (
    ACTIVATIONS_AND_DTYPES,
    DTYPES,
    LAUNCHERS,
    SUMS_OF_ROWS,
    assert_equal,
    dropout_of,
    inputs_of,
    kernel,
)  # fmt: skip

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_activation_and_dtype = pytest.mark.parametrize(("activation", "dtype"), ACTIVATIONS_AND_DTYPES, ids=str)


def pick(tensors, **names):
    return {new: tensors[old] for new, old in names.items()}


@each_activation_and_dtype
def test_dual_matmul_equals_z_then_act_grad(activation, dtype, device):
    """The dual matmul's z, h and dz are those of linear_fwd and act_grad, and h is forward's."""
    options = {"dropout": dropout_of(0.3, device), "row_base": 32}
    tensors = inputs_of(LAUNCHERS["mlp_bwd"], dtype, device, N=23)
    layer = pick(tensors, x="x", w="w1", b="b1")
    z = kernel(LAUNCHERS["linear_fwd"], layer, "identity")["h"]
    steps = kernel(LAUNCHERS["act_grad"], pick(tensors, dy="dy", w="w2") | {"z": z}, activation, **options)
    dual = kernel(LAUNCHERS["mlp_bwd"], tensors, activation, **options)
    assert_equal(dual, steps, SUMS_OF_ROWS)
    assert torch.equal(dual["h"], kernel(LAUNCHERS["linear_fwd"], layer, activation, **options)["h"])


@each_activation_and_dtype
def test_triple_matmul_equals_g_and_u_then_act_grad(activation, dtype, device):
    """As above for the gated MLP, whose g and u are two plain matmuls in the two-step implementation."""
    options = {"dropout": dropout_of(0.3, device), "row_base": 32}
    tensors = inputs_of(LAUNCHERS["gated_bwd"], dtype, device, N=23)
    forward = kernel(
        LAUNCHERS["gated_fwd"], {name: tensors[name] for name in ("x", "wg", "bg", "wu", "bu")}, activation, **options
    )
    g, u = (
        kernel(LAUNCHERS["linear_fwd"], pick(tensors, x="x", w=f"w{one}", b=f"b{one}"), "identity")["h"] for one in "gu"
    )
    steps = kernel(
        LAUNCHERS["gated_act_grad"], pick(tensors, dy="dy", wd="wd") | {"g": g, "u": u}, activation, **options
    )
    triple = kernel(LAUNCHERS["gated_bwd"], tensors, activation, **options)
    assert_equal(triple, steps, SUMS_OF_ROWS)
    assert_equal(forward, {"h": triple["h"], "g": g, "u": u})


@each_dtype
def test_gate_and_up_are_not_interchangeable(dtype, device):
    """Gate and up weights as halves of one tensor; exchanging them changes every gradient."""
    launcher = LAUNCHERS["gated_bwd"]
    tensors = inputs_of(launcher, dtype, device)
    packed = torch.cat([tensors["wg"], tensors["wu"]])
    expected = kernel(launcher, tensors, "silu")
    halves = dict(zip(("wg", "wu"), packed.split(tensors["wg"].shape[0]), strict=True))
    assert_equal(kernel(launcher, tensors | halves, "silu"), expected)
    exchanged = kernel(launcher, tensors | {"wg": halves["wu"], "wu": halves["wg"]}, "silu")
    assert not any(torch.equal(exchanged[name], expected[name]) for name in expected)


def test_the_gated_matmul_is_rounded_once(device):
    """relu(g)² u of bfloat16 numbers has 24 bits: float32 holds it exactly, and h is its only rounding."""
    tensors = inputs_of(LAUNCHERS["gated_bwd"], torch.bfloat16, device, N=23)
    layer = {name: tensors[name] for name in ("x", "wg", "bg", "wu", "bu")}
    g, u = (
        kernel(LAUNCHERS["linear_fwd"], pick(tensors, x="x", w=f"w{one}", b=f"b{one}"), "identity")["h"] for one in "gu"
    )
    expected = (g.double().relu().square() * u.double()).to(torch.bfloat16)
    assert torch.equal(kernel(LAUNCHERS["gated_fwd"], layer, "relu2")["h"], expected)
    assert torch.equal(kernel(LAUNCHERS["gated_bwd"], tensors, "relu2")["h"], expected)
