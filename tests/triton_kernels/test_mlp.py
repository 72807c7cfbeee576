"""Linear, MLP and gated MLP: what backward recomputes, from whatever tensors and in however many launches, has the bits of
forward."""

import pytest
import torch
from support.kernel_cases import (
    ACTIVATIONS_AND_DTYPES,
    LAUNCHERS,
    SUMS_OF_ROWS,
    assert_equal,
    dropout_of,
    inputs_of,
    kernel,
)

from ckptkern import triton_kernels

each_activation_and_dtype = pytest.mark.parametrize(("activation", "dtype"), ACTIVATIONS_AND_DTYPES, ids=str)


def pick(tensors, **names):
    return {new: tensors[old] for new, old in names.items()}


def linear(tensors, activation="identity", **options):
    return kernel(LAUNCHERS["linear_fwd"], tensors, activation, **options)


def gate_and_up(tensors):
    return (linear(pick(tensors, x="x", w=f"w{one}", b=f"b{one}"))["h"] for one in "gu")


@each_activation_and_dtype
def test_linear_recomputes_z_and_h(activation, dtype, device):
    """dz from x alone is dz from forward's stored z; h from z is forward's, dropout included, and so is h written over z."""
    tensors = inputs_of(LAUNCHERS["linear_bwd"], dtype, device, N=23)
    options = {"dropout": dropout_of(0.3, device), "row_base": 16}
    forward = linear(pick(tensors, x="x", w="w", b="b"), activation, **options)
    recomputed = kernel(LAUNCHERS["linear_bwd"], tensors, activation)
    dz, db = triton_kernels.act_bwd(tensors["dh"], forward["z"], activation, db=True)
    assert torch.equal(recomputed["dz"], dz)
    torch.testing.assert_close(recomputed["db"], db, rtol=1e-6, atol=1e-5)

    step = inputs_of(LAUNCHERS["act_grad"], dtype, device, N=23) | {"z": forward["z"].clone()}
    apart = kernel(LAUNCHERS["act_grad"], step, activation, **options)
    assert torch.equal(apart["h"], forward["h"])
    over = kernel(LAUNCHERS["act_grad"], step, activation, h_over_z=True, **options)
    assert over["h"].data_ptr() == step["z"].data_ptr()
    assert_equal(over, apart)


@pytest.mark.parametrize("gated", [False, True], ids=["dual", "triple"])
@each_activation_and_dtype
def test_fused_matmuls_equal_the_two_steps(activation, dtype, gated, device):
    """z (g and u), h and dz of the dual and the triple matmul are those of plain matmuls and act_grad, and h is forward's."""
    options = {"dropout": dropout_of(0.3, device), "row_base": 32}
    fused, second = ("gated_bwd", "gated_act_grad") if gated else ("mlp_bwd", "act_grad")
    tensors = inputs_of(LAUNCHERS[fused], dtype, device, N=23)
    if gated:
        given = {name: tensors[name] for name in LAUNCHERS["gated_fwd"].inputs}
        saved = dict(zip("gu", gate_and_up(tensors), strict=True))
        forward = kernel(LAUNCHERS["gated_fwd"], given, activation, **options)
        step = pick(tensors, dy="dy", wd="wd") | saved
    else:
        layer = pick(tensors, x="x", w="w1", b="b1")
        saved, forward = {"z": linear(layer)["h"]}, linear(layer, activation, **options)
        forward.pop("bits", None)
        step = pick(tensors, dy="dy", w="w2") | saved
    once = kernel(LAUNCHERS[fused], tensors, activation, **options)
    assert_equal(once, kernel(LAUNCHERS[second], step, activation, **options), SUMS_OF_ROWS)
    assert_equal(forward, saved | {"h": once["h"]})


def test_the_gated_matmul_is_rounded_once(device):
    """relu(g)² u of bfloat16 numbers has 24 bits: float32 holds it exactly, and h is its only rounding."""
    tensors = inputs_of(LAUNCHERS["gated_bwd"], torch.bfloat16, device, N=23)
    g, u = gate_and_up(tensors)
    expected = (g.double().relu().square() * u.double()).to(torch.bfloat16)
    assert torch.equal(kernel(LAUNCHERS["gated_bwd"], tensors, "relu2")["h"], expected)


@pytest.mark.parametrize("forward", ["linear_fwd", "gated_fwd"])
@each_activation_and_dtype
def test_h_of_a_stored_z_has_the_bits_of_forward(activation, dtype, forward, device):
    """act_fwd, then dropout, is the epilogue that forward ran."""
    launcher, dropped = LAUNCHERS[forward], {"dropout": dropout_of(0.3, device), "row_base": 128}
    saved = kernel(launcher, inputs_of(launcher, dtype, device, N=23), activation, **dropped)
    z, u = (saved["z"], None) if forward == "linear_fwd" else (saved["g"], saved["u"])
    h = triton_kernels.act_fwd(z, u, activation)
    assert torch.equal(triton_kernels.dropout(h, *dropped["dropout"], row_base=128), saved["h"])
