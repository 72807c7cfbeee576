"""convert and revert before and after fully_shard and DistributedDataParallel: what becomes fused trains as one process."""

import copy

import pytest
import torch
from distributed.test_data_parallel import in_wrappers, sharded
from support.architectures import GPT, Llama, Stack, ids, with_tables
from support.ranks import on_ranks
from support.training import Network, alone, build, check, convert
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptkern


def state_of(network: nn.Module) -> tuple[list, list]:
    """Which tensors the parameters are, with the modules' modes; and values."""
    parameters, modes = [*network.parameters()], [module.training for module in network.modules()]
    which = [(id(p), type(p), p.placements, p.requires_grad, id(p.grad)) for p in parameters]
    return [*which, *modes], [tensor.to_local().clone() for p in parameters for tensor in (p, p.grad)]


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
    before, values = state_of(network)
    network(ids(rank))
    drawn = torch.get_rng_state()
    convert(network)
    assert torch.equal(torch.get_rng_state(), drawn)
    after, tensors = state_of(network)
    assert after == before, "the same parameters, sharded"
    assert all(map(torch.equal, tensors, values))


class Odd(GPT):
    odd = False

    def forward(self, x):
        return super().forward(x.sin() if self.odd else x)


@on_ranks()
def test_ranks_that_disagree_fuse_nothing(rank):
    torch.manual_seed(0)
    network = sharded(Network(Odd), reshard_after_forward=True)
    for layer in network.layers:
        layer.odd = rank == 1
    conversion = ckptkern.convert(network, ids())
    assert {row.replaced_by for row in conversion.converted} == {"checkpoint"}, "on which they agree"
    assert [row.name for row in conversion if "ranks disagree" in row.reason] == ["layers.0", "layers.1"]
    for layer in network.layers:
        layer.odd = False
    torch.manual_seed(0)
    check(network, alone(Network(GPT), 2), rank)


@on_ranks()
def test_convert_without_examples(rank):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    unfused = copy.deepcopy(network)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    assert ckptkern.convert(network).converted
    x = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    network(x[rank]).square().mean().backward()
    unfused(torch.cat(x)).square().mean().backward()
    for mine, theirs in zip(network.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def mlps(network: nn.Module) -> None:
    for layer in network.layers:
        fully_shard(layer.mlp, mesh=init_device_mesh("cpu", (2,)))


# In the order in which they are applied; "convert in" is of the module in DDP, "convert groups" of regions of two layers, which
# run one by one where each gathers its parameters
STEPS = {
    "convert": lambda network: ckptkern.convert(network, ids()),
    "convert in": lambda network: ckptkern.convert(network.module, ids()),
    "convert groups": lambda network: ckptkern.convert(network, ids(), recompute="full", every=2),
    "shard": sharded,
    "shard as a whole": lambda network: fully_shard(network, mesh=init_device_mesh("cpu", (2,))),
    "shard mlps": mlps,
    "DDP": DistributedDataParallel,
    "wrap": in_wrappers,
}
NETWORKS = {  # as it was before, and what replaces its layers
    "layers": (lambda: build("converted", ours=False), 2 * ["transformer_layer"]),
    "torch's": (lambda: build("modules", ours=False), 2 * ["ckptkern.nn.TransformerEncoderLayer"]),
    "five": (lambda: Stack(Llama, with_tables, 5), 5 * ["transformer_layer"]),
    "mlps": (lambda: Stack(Llama, with_tables), 2 * ["checkpoint"]),  # a DTensor inside
}
ORDERS = [
    *(("layers", steps) for steps in (
        "convert, shard", "shard, convert", "shard as a whole, convert", "DDP, convert", "DDP, convert in",
        "convert, wrap, shard", "wrap, convert, shard",
    )),
    ("torch's", "convert, shard"), ("torch's", "shard, convert"),
    ("five", "convert groups, shard"), ("five", "shard, convert groups"),
    ("mlps", "shard mlps, shard, convert"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "steps"), ORDERS)
@on_ranks()
def test_a_network_trains_as_one_process_converted_and_reverted(rank, name, steps):
    """After each order of steps."""
    make, replaced_by = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    unfused = copy.deepcopy(network)
    for step in steps.split(", "):
        result = STEPS[step](network)
        if step.startswith("convert"):
            assert [row.replaced_by for row in result.converted] == replaced_by, result
        else:
            network = result or network
    check(network, alone(unfused, 2), rank)
    shards = [isinstance(module, FSDPModule) for module in network.modules()].count(True)
    assert ckptkern.revert(network) is network
    for module in network.modules():
        assert "forward" not in module.__dict__
        assert not any("ckptkern.nn" in base.__module__ for base in type(module).__mro__), type(module)
        shards -= isinstance(module, FSDPModule)
    assert shards == 0
    assert all(isinstance(p, DTensor) for p in network.parameters()) or "shard" not in steps
    check(network, alone(unfused, 2), rank)


@on_ranks()
def test_fsdp1_is_refused(rank):
    network = FullyShardedDataParallel(build("converted", ours=False), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="convert first"):
        ckptkern.convert(network, ids())
