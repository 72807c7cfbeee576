"""Ops on their kernels, where a GPU runs them, too: one result in every mode, chunk and implementation. Values on a GPU:
tests/tools/test_selftest.py; with each option, on the interpreter: tests/ops/test_properties.py."""

import pytest
import torch
from support import catalog
from support.cases import Watch
from support.kernel_cases import assert_equal

import ckptkern

P, SEED = 0.3, 17
CHUNKED = ("linear_act", "linear_stack", "mlp", "gated_mlp")
NAMES = (*CHUNKED, "attention_block", "transformer_layer", "moe_mlp")


def outcome(name: str, device: str, **options) -> dict[str, torch.Tensor]:
    """y and gradients in bfloat16; of MLPs in two chunks, on a GPU of all ops and of several tiles."""
    entry, lead = catalog.OPS[name], (2, 67 if device == "cuda" or name in CHUNKED else 3)
    sizes = catalog.Sizes(lead, 64, 160, 96) if device == "cuda" else catalog.Sizes(lead)
    changes = {"dropout_p": P, "workspace": 1} | options
    arguments = entry.inputs(sizes) | {key: value for key, value in changes.items() if key in entry.parameters}
    leaves = catalog.random_leaves(arguments, torch.bfloat16, device)
    torch.manual_seed(SEED)
    with ckptkern.backend("triton"):
        y = catalog.call(entry, arguments, leaves)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("name", NAMES)
def test_every_mode_gives_the_same_bits(name, device):
    with Watch() as watch:
        first, *others = (outcome(name, device, recompute=mode) for mode in catalog.OPS[name].modes)
    assert "triton" in watch.strings, "the kernels did not run"
    for other in others:
        assert_equal(other, first, {name for name in first if "bias" in name})
