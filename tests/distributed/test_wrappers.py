"""ckptkern.checkpoint in torch.distributed's checkpoint wrappers, alone and with FSDP2."""

import functools

import pytest
import torch
from support.architectures import ids
from support.training import KINDS, alone, build, check, reference
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckptkern
from ckptkern.memory import saved_tensors

wrapped = functools.partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, checkpoint_fn=ckptkern.checkpoint
)


def apply(network: nn.Module) -> nn.Module:
    layers = list(network.layers)
    apply_activation_checkpointing(network, checkpoint_wrapper_fn=wrapped, check_fn=lambda m: m in layers)
    assert all(type(layer) is CheckpointWrapper for layer in network.layers)
    return network


@pytest.mark.parametrize("kind", KINDS)
def test_one_process(kind):
    """Names in state_dict, saved bytes and gradients are those of the layers themselves."""
    network, unfused = apply(build(kind, 0.2)), build(kind, 0.2, ours=kind != "segments")
    assert network.state_dict().keys() == unfused.state_dict().keys()
    with saved_tensors(network) as saved:
        network(ids())
    inputs = [shape for shape, _, _ in saved.tensors if len(shape) == 3]
    assert len(inputs) <= 4, "the input of each layer, of the head, and the logits"
    check(network, alone(unfused, 1), 0)


def _check_engine(rank, size, kind, engine, p):
    network = build(kind, p, ours=kind != "segments")
    mesh = init_device_mesh("cpu", (size,))
    if engine == "sharded inside":
        for layer in network.layers:
            fully_shard(layer, mesh=mesh)
    apply(network)
    if engine == "sharded outside":
        for layer in network.layers:
            fully_shard(layer, mesh=mesh)
    network = DistributedDataParallel(network) if engine == "ddp" else fully_shard(network, mesh=mesh)
    check(network, alone(reference(kind, p), size), rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("engine", "p"), [("ddp", 0.2), ("sharded inside", 0.0), ("sharded outside", 0.2)])
def test_two_processes(ranks, engine, p, kind):
    ranks.run(2, _check_engine, 2, kind, engine, p)


def _check_convert(rank, size, order):
    """A wrapper that is there before becomes the fused layer itself; one that comes later recomputes it."""
    network, unfused = build("converted", ours=False), build("converted", ours=False)
    if order == "wrap, convert":
        apply(network)
    conversion = ckptkern.convert(network, ids())
    kind = "CheckpointWrapper" if order == "wrap, convert" else "GPT"
    assert [(row.kind, row.replaced_by) for row in conversion.converted] == 2 * [(kind, "transformer_layer")]
    if order == "convert, wrap":
        apply(network)
    for layer in network.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    fully_shard(network, mesh=init_device_mesh("cpu", (size,)))
    check(network, alone(unfused, size), rank)
    ckptkern.revert(network)
    assert not any("forward" in m.__dict__ for m in network.modules())
    check(network, alone(unfused, size), rank)


@pytest.mark.parametrize("order", ["wrap, convert", "convert, wrap"])
def test_convert(ranks, order):
    ranks.run(2, _check_convert, 2, order)


def test_values_are_checked_through_a_wrapper():
    """Options of ckptkern.checkpoint are those of the wrapper."""
    count = [0.0]

    class Moves(nn.Module):
        def forward(self, x):
            count[0] += 1.0
            return (x * count[0]).exp()

    layer = wrapped(Moves(), determinism_check="values")
    y = layer(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="recomputed other values"):
        y.backward()
