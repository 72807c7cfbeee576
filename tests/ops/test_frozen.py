"""Frozen weights: every op computes with them what it computes with the dequantised weights, saves no more, and stays within
its workspace."""

import pytest
import torch

import ckptkern
from ckptkern import Frozen
from ckptkern.memory import saved_tensors
from ckptkern.ops import catalog

OPS = {entry.name: entry for entry in (*catalog.OPS.values(), *catalog.OTHER_OPS)}
WITH_WEIGHTS = tuple(
    name
    for name, entry in OPS.items()
    if any("weight" in one for one in catalog.input_shapes(entry.inputs(catalog.Sizes())))
)


def block_fp8(shape, seed=0):
    """A Frozen of random numbers, and what it stands for."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), generator=generator) + 0.5
    frozen = Frozen(data, scales * shape[-1] ** -0.5, kind="block_fp8", dtype=torch.float32)
    return frozen, frozen.dequantize()


def is_matmul_weight(path, shape):
    name = path.rpartition(".")[2]
    return (
        len(shape) > 1
        and ("weight" in name or path.startswith("weights."))
        and "top_k" not in name
        and "router" not in name
    )


def frozen_leaves(arguments):
    """(leaves with Frozen weights, leaves with what these stand for)."""
    leaves = catalog.random_leaves(arguments)
    found = {name: block_fp8(t.shape) for name, t in leaves.items() if is_matmul_weight(name, t.shape)}
    assert found
    return tuple(leaves | {name: pair[i] for name, pair in found.items()} for i in (0, 1))


def step(entry, arguments, leaves, **options):
    """(first result, gradients of what is trained, bytes that are saved besides the leaves)."""
    leaves = {name: t if not t.requires_grad else t.detach().requires_grad_() for name, t in leaves.items()}
    torch.manual_seed(0)
    with saved_tensors(exclude=leaves.values()) as saved:
        y = catalog.call(entry, arguments, leaves, **options)
    y = y[0] if isinstance(y, tuple) else y
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return y, dict(zip(trained, torch.autograd.grad(y, list(trained.values()), dy), strict=True)), saved.bytes


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_an_op_computes_with_frozen_weights_what_it_computes_with_the_dequantised(name, workspace):
    entry = OPS[name]
    options = {"workspace": workspace} if "workspace" in entry.parameters else {}
    arguments = entry.inputs(catalog.Sizes())
    for mode in entry.modes or (None,):
        options |= {} if mode is None else {"recompute": mode}
        frozen, plain = frozen_leaves(arguments)
        (y, grads, saved), (y_, grads_, saved_) = (
            step(entry, arguments, leaves, **options) for leaves in (frozen, plain)
        )
        torch.testing.assert_close(y, y_)
        assert saved == saved_ and grads.keys() == grads_.keys()
        for one in grads:
            torch.testing.assert_close(grads[one], grads_[one], msg=f"{mode} {one}")
