"""convert and revert before and after fully_shard and DistributedDataParallel: what becomes fused trains as one process."""

import copy
import importlib
from unittest import mock

import pytest
import torch
from distributed.test_data_parallel import in_wrappers, sharded
from support.architectures import ARCHITECTURES, GPT, Llama, Stack, ids, with_tables
from support.ranks import on_ranks
from support.training import Network, alone, build, check, convert
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptkern

ORDERS = pytest.mark.parametrize("order", ["convert, shard", "shard, convert"])


def state_of(network: nn.Module) -> list[tuple]:
    return [(id(p), type(p), p.placements, p.requires_grad, id(p.grad)) for p in network.parameters()]


@pytest.mark.parametrize(
    ("n", "reshard"), [(2, True), *(pytest.param(4, how, marks=pytest.mark.long) for how in (False, 2))]
)
@on_ranks()
def test_convert_leaves_the_shards_as_they_were(rank, n, reshard):
    network = sharded(build("converted", ours=False), reshard_after_forward=reshard)
    network(ids(rank)).sum().backward()
    network.layers[1].eval()
    network(ids(rank))  # leaves what is not resharded after forward gathered
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    before, modes = state_of(network), [m.training for m in network.modules()]
    bits = [(p.to_local().clone(), p.grad.to_local().clone()) for p in network.parameters()]
    network(ids(rank))
    drawn = torch.get_rng_state()
    convert(network)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert state_of(network) == before, "the same parameters, sharded"
    assert [m.training for m in network.modules()] == modes
    for p, (value, gradient) in zip(network.parameters(), bits, strict=True):
        assert torch.equal(p.to_local(), value)
        assert torch.equal(p.grad.to_local(), gradient)


@on_ranks()
def test_the_second_of_two_sharded_layers_is_like_the_first(rank):
    fuse = importlib.import_module("ckptkern.conversion.fuse")
    with mock.patch.object(fuse, "fuse_like", wraps=fuse.fuse_like) as checked_before:
        convert(sharded(build("converted", ours=False)))
    checked_before.assert_called_once()


class Odd(GPT):
    odd = False

    def forward(self, x):
        return super().forward(x.sin() if self.odd else x)


@on_ranks()
def test_ranks_that_disagree_leave_the_layer(rank):
    torch.manual_seed(0)
    network = sharded(Network(Odd), reshard_after_forward=True)
    for layer in network.layers:
        layer.odd = rank == 1
    conversion = ckptkern.convert(network, ids())
    assert not conversion.converted
    assert [row.name for row in conversion if "another rank" in row.reason] == ["layers.0", "layers.1"]
    for layer in network.layers:
        layer.odd = False
    torch.manual_seed(0)
    check(network, alone(Network(GPT), 2), rank)


@on_ranks()
def test_a_layer_with_a_sharded_module_inside_is_an_activation_checkpoint(rank):
    torch.manual_seed(0)
    network = ARCHITECTURES["llama"].model()
    unfused = copy.deepcopy(network)
    for layer in network.layers:
        fully_shard(layer.mlp, mesh=init_device_mesh("cpu", (2,)))
    sharded(network)
    conversion = ckptkern.convert(network, ids())
    assert [row.replaced_by for row in conversion.converted] == ["checkpoint", "checkpoint"]
    assert "DTensor" in conversion.rows[0].reason
    check(network, alone(unfused, 2), rank)


@ORDERS
@on_ranks()
def test_grouped_layers(rank, order):
    """Layers that are one region in one process run one by one where each gathers its parameters."""
    torch.manual_seed(0)
    network = Stack(Llama, with_tables, 5)
    unfused = copy.deepcopy(network)
    if order == "shard, convert":
        sharded(network)
    conversion = ckptkern.convert(network, ids(), recompute="full", every=2)
    assert len(conversion.converted) == 5
    if order == "convert, shard":
        assert len(conversion.groups) == 2
        sharded(network)
    check(network, alone(unfused, 2), rank)


@ORDERS
@on_ranks()
def test_torchs_layers_become_drop_ins_that_are_sharded(rank, order):
    network = build("modules", ours=False)
    if order == "shard, convert":
        sharded(network)
    conversion = ckptkern.convert(network, ids())
    rows = [(row.kind, row.replaced_by) for row in conversion.converted]
    assert rows == 2 * [("TransformerEncoderLayer", "ckptkern.nn.TransformerEncoderLayer")]
    if order == "convert, shard":
        sharded(network)
    for layer in network.layers:
        assert isinstance(layer, ckptkern.nn.TransformerEncoderLayer)
        assert isinstance(layer, FSDPModule)
        assert isinstance(layer.self_attn, ckptkern.nn.MultiheadAttention)
    unfused = build("modules", ours=False)
    check(network, alone(unfused, 2), rank)
    ckptkern.revert(network)
    for layer in network.layers:
        assert not isinstance(layer, ckptkern.nn.TransformerEncoderLayer)
        assert type(layer).__name__ == "FSDPTransformerEncoderLayer"
        assert isinstance(layer, FSDPModule)
        assert type(layer.self_attn) is nn.MultiheadAttention
    check(network, alone(unfused, 2), rank)


@on_ranks()
def test_convert_without_examples(rank):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    unfused = copy.deepcopy(network)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    conversion = ckptkern.convert(network)
    assert conversion.converted, conversion
    assert conversion.rows[0].kind == "Sequential"
    x = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    network(x[rank]).square().mean().backward()
    unfused(torch.cat(x)).square().mean().backward()
    for mine, theirs in zip(network.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def whole_model(network: nn.Module) -> nn.Module:
    return fully_shard(network, mesh=init_device_mesh("cpu", (2,)))


# In the order in which they are applied; "convert in" is of the module in DDP
STEPS = {
    "convert": convert,
    "convert in": lambda network: convert(network.module),
    "shard": sharded,
    "shard as a whole": whole_model,
    "DDP": DistributedDataParallel,
    "wrap": in_wrappers,
}


@pytest.mark.parametrize(
    "steps",
    ["convert, shard", "shard, convert", "shard as a whole, convert", "DDP, convert", "DDP, convert in", "convert, wrap, shard",
     "wrap, convert, shard"],
)  # fmt: skip
@on_ranks()
def test_revert(rank, steps):
    """After each order of steps a network trains as one process, converted and reverted."""
    network, unfused = build("converted", ours=False), build("converted", ours=False)
    for step in steps.split(", "):
        network = STEPS[step](network) or network
    check(network, alone(unfused, 2), rank)
    assert ckptkern.revert(network) is network
    assert not any("forward" in m.__dict__ for m in network.modules())
    assert all(isinstance(p, DTensor) for p in network.parameters()) or "shard" not in steps
    check(network, alone(unfused, 2), rank)


@on_ranks()
def test_fsdp1_is_refused(rank):
    network = FullyShardedDataParallel(build("converted", ours=False), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="convert first"):
        ckptkern.convert(network, ids())
