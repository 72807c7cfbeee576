"""Linear + activation: what is recomputed in backward has the bits of forward, whatever it is recomputed from."""

import pytest
import torch
from support.kernel_cases import ACTIVATIONS, DTYPES, LAUNCHERS, assert_equal, dropout_of, inputs_of, kernel

from ckptkern import triton_kernels

FORWARD, BACKWARD, STEP = LAUNCHERS["linear_fwd"], LAUNCHERS["linear_bwd"], LAUNCHERS["act_grad"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.mark.sampled
@each_activation
@each_dtype
def test_backward_recomputes_the_z_of_forward(activation, dtype, device):
    """dz from x alone is dz from forward's stored z, bit for bit; db within a float32 sum."""
    tensors = inputs_of(BACKWARD, dtype, device, N=23)
    forward = kernel(FORWARD, {name: tensors[name] for name in ("x", "w", "b")}, activation)
    recomputed = kernel(BACKWARD, tensors, activation)
    dz, db = triton_kernels.act_bwd(tensors["dh"], forward["z"], activation, db=True)
    assert torch.equal(recomputed["dz"], dz)
    torch.testing.assert_close(recomputed["db"], db, rtol=1e-6, atol=1e-5)


@pytest.mark.sampled
@each_activation
@each_dtype
def test_h_is_recomputed_from_z(activation, dtype, device):
    """act_grad's h is linear_fwd's, dropout included: act sees the rounded z in both.

    Written over z where z is workspace, it is the same, and so is dz.
    """
    options = {"dropout": dropout_of(0.3, device), "row_base": 16}
    inputs = inputs_of(FORWARD, dtype, device, N=23)
    forward = kernel(FORWARD, inputs, activation, **options)
    z = forward["z"].clone()
    tensors = inputs_of(STEP, dtype, device, N=23) | {"z": z}
    step = kernel(STEP, tensors, activation, **options)
    assert torch.equal(step["h"], forward["h"])
    assert torch.equal(z, forward["z"])
    over = kernel(STEP, tensors, activation, h_over_z=True, **options)
    assert over["h"].data_ptr() == z.data_ptr()
    assert_equal(over, step)


@each_dtype
@pytest.mark.parametrize("special", [False, True], ids=["numbers", "NaN, inf and zero"])
def test_relu_gradient_from_its_output_and_from_its_bits(dtype, special, device):
    """dz from z, from y = relu(z) and from the 1-bit mask are one, NaN and infinities among z included."""
    x = inputs_of(FORWARD, dtype, device, N=23)
    if special:
        x["b"][:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], device=device)
        x["w"][3] = 0
    forward = kernel(FORWARD, x, "relu")
    assert forward["h"].isnan().any() == special
    dy = inputs_of(LAUNCHERS["act_bwd"], dtype, device, N=23)["dy"]
    expected = torch.where(forward["z"] <= 0, 0, dy)
    for saved, bits in ((forward["z"], False), (forward["h"], False), (forward["bits"], True)):
        assert torch.equal(triton_kernels.act_bwd(dy, saved, "relu", bits=bits)[0], expected)
    assert torch.equal(triton_kernels.linear_bwd(x["x"], x["w"], x["b"], dy, "relu", "ieee")[0], expected)


@each_dtype
def test_bias_gradient_of_ones_counts_the_live_units(dtype, device):
    """db under dh = 1 is the column sum of (h > 0), exactly, tile rows beyond M left out."""
    tensors = inputs_of(BACKWARD, dtype, device, M=77, N=23)
    forward = kernel(FORWARD, {name: tensors[name] for name in ("x", "w", "b")}, "relu")
    tensors["dh"] = torch.ones_like(tensors["dh"])
    count = (forward["h"] > 0).sum(0).float()
    assert torch.equal(kernel(BACKWARD, tensors, "relu")["db"], count)
    ones = {"dy": torch.ones(77, 1, device=device, dtype=dtype), "w": torch.ones(1, 23, device=device, dtype=dtype)}
    assert torch.equal(kernel(STEP, ones | {"z": forward["z"]}, "relu")["db"], count)
