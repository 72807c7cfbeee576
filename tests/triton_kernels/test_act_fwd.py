"""act_fwd: h from a stored z (and u), the bits that forward's epilogue wrote."""

import pytest
import torch
from kernel_cases import ACTIVATIONS, BY_NAME, DTYPES, dropout_of, inputs_of, kernel

from ckptkern import triton_kernels


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("forward", ["linear_fwd", "gated_fwd"])
def test_bits_of_forward(forward, activation, dtype, p):
    launcher = BY_NAME[forward]
    options = {"dropout": dropout_of(p), "row_base": 128} if p else {}
    if forward == "linear_fwd":
        options["keep_bits"] = False
    kept = kernel(launcher, inputs_of(launcher, dtype), activation, **options)
    z, u = (kept["z"], None) if forward == "linear_fwd" else (kept["g"], kept["u"])
    h = triton_kernels.act_fwd(z, u, activation)
    if p:
        h = triton_kernels.dropout(h, *options["dropout"], row_base=options["row_base"])
    assert h.dtype == dtype
    assert torch.equal(h, kept["h"])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (33, 65)], ids=str)
def test_sizes_and_strides(shape):
    wide = torch.randn(shape[0], 2 * shape[1])
    z, u = wide[:, ::2], wide.flip(1)[:, ::2]
    torch.testing.assert_close(triton_kernels.act_fwd(z, u, "silu"), torch.nn.functional.silu(z) * u)
    torch.testing.assert_close(triton_kernels.act_fwd(z, None, "relu2"), z.relu() ** 2)
