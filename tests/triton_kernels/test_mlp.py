"""Linear, MLP and gated MLP: what backward recomputes, from whatever tensors and in however many launches, has the bits of
forward."""

import pytest
import torch
from support.kernel_cases import (
    DTYPES,
    LAUNCHERS,
    SUMS_OF_ROWS,
    assert_equal,
    dropout_of,
    inputs_of,
    kernel,
)

from ckptkern import triton_kernels


def pick(tensors, **names):
    return {new: tensors[old] for new, old in names.items()}


def linear(tensors, activation="identity", **options):
    return kernel(LAUNCHERS["linear_fwd"], tensors, activation, **options)


def gate_and_up(tensors):
    return (linear(pick(tensors, x="x", w=f"w{part}", b=f"b{part}"))["h"] for part in "gu")


@pytest.mark.parametrize("gated", [False, True], ids=["dual", "triple"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "identity"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_result_by_any_launch(activation, dtype, gated, device):
    """z (g and u), h and dz of the dual and the triple matmul are those of plain matmuls and act_grad. h is forward's, and what
    act_fwd and dropout make of a stored z."""
    dropout = dropout_of(0.3, device)
    options = {"dropout": dropout, "row_base": 32}
    fused, second = ("gated_bwd", "gated_act_grad") if gated else ("mlp_bwd", "act_grad")
    tensors = inputs_of(LAUNCHERS[fused], dtype, device, N=23)
    if gated:
        inputs = {name: tensors[name] for name in LAUNCHERS["gated_fwd"].inputs}
        saved = dict(zip("gu", gate_and_up(tensors), strict=True))
        forward = kernel(LAUNCHERS["gated_fwd"], inputs, activation, **options)
        step = pick(tensors, dy="dy", wd="wd") | saved
    else:
        layer = pick(tensors, x="x", w="w1", b="b1")
        saved, forward = {"z": linear(layer)["h"]}, linear(layer, activation, **options)
        forward.pop("bits", None)
        step = pick(tensors, dy="dy", w="w2") | saved
    once, apart = (kernel(LAUNCHERS[name], t, activation, **options) for name, t in ((fused, tensors), (second, step)))
    assert_equal(once, apart, SUMS_OF_ROWS)
    assert_equal(forward, saved | {"h": once["h"]})
    h = triton_kernels.act_fwd(*saved.values(), *[None] * (not gated), activation)
    assert torch.equal(triton_kernels.dropout(h, *dropout, row_base=32), once["h"])
    if not gated:
        dh = torch.randn_like(h)
        recomputed = kernel(LAUNCHERS["linear_bwd"], layer | {"dh": dh}, activation)
        dz, db = triton_kernels.act_bwd(dh, saved["z"], activation, db=True)
        assert_equal(recomputed, {"dz": dz, "db": db}, SUMS_OF_ROWS)
        over = kernel(LAUNCHERS[second], step, activation, h_over_z=True, **options)
        assert over["h"].data_ptr() == saved["z"].data_ptr()
        assert_equal(over, apart)


def test_the_gated_matmul_is_rounded_once(device):
    """relu(g)² u of bfloat16 numbers has 24 bits: float32 holds it exactly, and h is its only rounding."""
    tensors = inputs_of(LAUNCHERS["gated_bwd"], torch.bfloat16, device, N=23)
    g, u = gate_and_up(tensors)
    expected = (g.double().relu().square() * u.double()).to(torch.bfloat16)
    assert torch.equal(kernel(LAUNCHERS["gated_bwd"], tensors, "relu2")["h"], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["mlp", "gated"])
def test_results_over_their_operands(gated, dtype, device):
    """They have the bits of new ones, and are where they are wanted."""
    inputs = [torch.randn(70, 137, device=device).to(dtype) for _ in range(2 + gated)]
    launcher = triton_kernels.gated_hidden_grad if gated else triton_kernels.hidden_grad
    sums = {"dbg": True, "dbu": True} if gated else {"db": True}
    expected = launcher(*inputs, "gelu", save_h=True, **sums)
    over = {"over": True, "over_gu": True} if gated else {"over": True, "h_over_z": True}
    results = launcher(*inputs, "gelu", save_h=True, **sums, **over)
    assert all(map(torch.equal, results, expected))
    places = (inputs[1], inputs[2], inputs[0]) if gated else inputs  # dg, du, h; dz, h
    assert [t.data_ptr() for t in results[: len(inputs)]] == [t.data_ptr() for t in places]
