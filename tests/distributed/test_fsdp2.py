"""Segments inside FSDP2's fully_shard, before and after convert, train as one process with all ranks' batches."""

import contextlib
import copy
import importlib
from unittest import mock

import pytest
import torch
from support.architectures import ARCHITECTURES, GPT, Llama, Stack, ids, with_tables
from support.training import KINDS, Cast, Network, alone, build, check, convert, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ckptkern

ORDERS = ("convert, shard", "shard, convert")


def shard(network: nn.Module, size: int, **options) -> nn.Module:
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (size,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def sharded(kind: str, size: int, order: str = ORDERS[0], p: float = 0.0, **options) -> Network:
    if order == ORDERS[0] or kind != "converted":
        return shard(build(kind, p), size, **options)
    network = shard(build(kind, p, ours=False), size, **options)
    convert(network)
    return network


def _check_mode(rank, size, kind, order, reshard, p):
    network = sharded(kind, size, order, p, reshard_after_forward=reshard)
    check(network, alone(reference(kind, p), size), rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_fsdp2(ranks, reshard, kind):
    ranks.run(2, _check_mode, 2, kind, ORDERS[0], reshard, 0.0)


@pytest.mark.parametrize("reshard", [None, True, False])
def test_convert_after_fully_shard(ranks, reshard):
    ranks.run(2, _check_mode, 2, "converted", ORDERS[1], reshard, 0.0)


@pytest.mark.parametrize(("kind", "order"), [(kind, ORDERS[0]) for kind in KINDS] + [("converted", ORDERS[1])])
def test_resharding_to_half_of_the_ranks_and_dropout(ranks, kind, order):
    ranks.run(4, _check_mode, 4, kind, order, 2, 0.2)


def _check_hybrid(rank, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded"))
    check(sharded("converted", 4, order, mesh=mesh), alone(reference("converted", 0.0), 4), rank)


@pytest.mark.parametrize("order", ORDERS)
def test_hybrid_sharding(ranks, order):
    ranks.run(4, _check_hybrid, order)


def _check_accumulation(rank, size, kind, order):
    network = sharded(kind, size, order, 0.2)

    @contextlib.contextmanager
    def accumulating(last):
        network.set_requires_gradient_sync(last)
        yield

    check(network, alone(reference(kind, 0.2), size, 3), rank, 3, accumulating=accumulating)


@pytest.mark.parametrize(("kind", "order"), [("modules", ORDERS[0]), ("segments", ORDERS[0]), ("converted", ORDERS[1])])
def test_gradients_accumulated_without_synchronisation(ranks, kind, order):
    ranks.run(2, _check_accumulation, 2, kind, order)


# -- mixed precision


def _check_mixed(rank, size, kind, order, reshard):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    network = sharded(kind, size, order, mp_policy=policy, reshard_after_forward=reshard)
    check(network, alone(Cast(build(kind)), size), rank, rtol=1e-4, atol=1e-6)
    assert all(p.dtype == torch.float32 and type(p) is DTensor for p in network.parameters()) or not reshard


@pytest.mark.parametrize(("kind", "order"), [(kind, ORDERS[0]) for kind in KINDS] + [("converted", ORDERS[1])])
def test_mixed_precision(ranks, kind, order):
    ranks.run(2, _check_mixed, 2, kind, order, True)


# -- what is saved


def saved_now(network: nn.Module, given: torch.Tensor) -> int:
    """Bytes that a forward has left for backward. FSDP2 empties the storages of the parameters that it has resharded."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = network(given)
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in saved}
    y.sum().backward()
    return sum(one.nbytes() for one in storages.values())


def _check_saved(rank, size, kind, order):
    whole = build(kind)
    with ckptkern.memory.saved_tensors(whole) as saved:
        whole(ids())
    network = sharded(kind, size, order, reshard_after_forward=True)
    for _ in range(2):
        shards = sum(p.to_local().nbytes for p in network.parameters())
        held = saved_now(network, ids())
        assert held == saved.bytes, (held, saved)
        assert shards > 0


@pytest.mark.parametrize(("kind", "order"), [*((kind, ORDERS[0]) for kind in KINDS), ("converted", ORDERS[1])])
def test_no_gathered_weight_is_saved(ranks, kind, order):
    ranks.run(2, _check_saved, 2, kind, order)


# -- convert after fully_shard


def state_of(network: nn.Module) -> list[tuple]:
    return [(id(p), type(p), p.placements, p.requires_grad, id(p.grad)) for p in network.parameters()]


def _check_untouched(rank, reshard):
    network = shard(build("converted", ours=False), 4, reshard_after_forward=reshard)
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


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_convert_leaves_the_shards_as_they_were(ranks, reshard):
    ranks.run(4, _check_untouched, reshard)


class Odd(GPT):
    odd = False

    def forward(self, x):
        return super().forward(x.sin() if self.odd else x)


def _check_disagreement(rank, size, reshard):
    torch.manual_seed(0)
    network = shard(Network(Odd), size, reshard_after_forward=reshard)
    for layer in network.layers:
        layer.odd = rank == 1
    conversion = ckptkern.convert(network, ids())
    assert not conversion.converted
    assert [row.name for row in conversion if "another rank" in row.reason] == ["layers.0", "layers.1"]
    for layer in network.layers:
        layer.odd = False
    torch.manual_seed(0)
    check(network, alone(Network(GPT), size), rank)


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_that_disagree_leave_the_layer(ranks, reshard):
    ranks.run(2, _check_disagreement, 2, reshard)


def _check_alike(rank, size):
    fuse = importlib.import_module("ckptkern.conversion.fuse")
    with mock.patch.object(fuse, "fuse_like", wraps=fuse.fuse_like) as checked_before:
        sharded("converted", size, ORDERS[1])
    checked_before.assert_called_once()


def test_the_second_of_two_sharded_layers_is_like_the_first(ranks):
    ranks.run(2, _check_alike, 2)


def _check_sharded_inside(rank, size, reshard):
    torch.manual_seed(0)
    network, mesh = ARCHITECTURES["llama"].model(), init_device_mesh("cpu", (size,))
    unfused = copy.deepcopy(network)
    for layer in network.layers:
        fully_shard(layer.mlp, mesh=mesh, reshard_after_forward=reshard)
    shard(network, size, reshard_after_forward=reshard)
    conversion = ckptkern.convert(network, ids())
    assert [row.replaced_by for row in conversion.converted] == ["checkpoint", "checkpoint"]
    assert "DTensor" in conversion.rows[0].reason
    check(network, alone(unfused, size), rank)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_layer_with_a_sharded_module_inside_is_an_activation_checkpoint(ranks, reshard):
    ranks.run(2, _check_sharded_inside, 2, reshard)


def _check_groups(rank, size, order):
    """Layers that are one region in one process run one by one where each gathers its parameters."""
    torch.manual_seed(0)
    network = Stack(Llama, with_tables, 5)
    unfused = copy.deepcopy(network)
    if order == ORDERS[1]:
        shard(network, size)
    conversion = ckptkern.convert(network, ids(), recompute="full", every=2)
    assert len(conversion.converted) == 5
    if order == ORDERS[0]:
        assert len(conversion.groups) == 2
        shard(network, size)
    check(network, alone(unfused, size), rank)


@pytest.mark.parametrize("order", ORDERS)
def test_grouped_layers(ranks, order):
    ranks.run(2, _check_groups, 2, order)


def _check_root_alone(rank, size):
    network = fully_shard(build("converted", ours=False), mesh=init_device_mesh("cpu", (size,)))
    convert(network)
    check(network, alone(build("converted", ours=False), size), rank)


def test_a_model_that_is_sharded_as_a_whole(ranks):
    ranks.run(2, _check_root_alone, 2)


def _check_drop_ins(rank, size, order):
    network = build("modules", ours=False)
    if order == ORDERS[1]:
        shard(network, size)
    conversion = ckptkern.convert(network, ids())
    assert [row.replaced_by for row in conversion.converted] == 2 * ["ckptkern.nn.TransformerEncoderLayer"]
    assert [row.kind for row in conversion.converted] == 2 * ["TransformerEncoderLayer"]
    if order == ORDERS[0]:
        shard(network, size)
    for layer in network.layers:
        assert isinstance(layer, ckptkern.nn.TransformerEncoderLayer)
        assert isinstance(layer, FSDPModule)
        assert isinstance(layer.self_attn, ckptkern.nn.MultiheadAttention)
    unfused = build("modules", ours=False)
    check(network, alone(unfused, size), rank)
    ckptkern.revert(network)
    for layer in network.layers:
        assert not isinstance(layer, ckptkern.nn.TransformerEncoderLayer)
        assert type(layer).__name__ == "FSDPTransformerEncoderLayer"
        assert isinstance(layer, FSDPModule)
        assert type(layer.self_attn) is nn.MultiheadAttention
    check(network, alone(unfused, size), rank)


@pytest.mark.parametrize("order", ORDERS)
def test_torchs_layers_become_drop_ins_that_are_sharded(ranks, order):
    ranks.run(2, _check_drop_ins, 2, order)


def _check_without_examples(rank, size):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    unfused = copy.deepcopy(network)
    fully_shard(network, mesh=init_device_mesh("cpu", (size,)))
    conversion = ckptkern.convert(network)
    assert conversion.converted, conversion
    assert conversion.rows[0].kind == "Sequential"
    x = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    network(x[rank]).square().mean().backward()
    unfused(torch.cat(x)).square().mean().backward()
    for mine, theirs in zip(network.parameters(), unfused.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_convert_without_examples(ranks):
    ranks.run(2, _check_without_examples, 2)


def _check_revert(rank, size, order):
    network = sharded("converted", size, order)
    unfused = build("converted", ours=False)
    check(network, alone(unfused, size), rank)
    assert ckptkern.revert(network) is network
    assert not any("forward" in m.__dict__ for m in network.modules())
    assert all(type(p) is DTensor or isinstance(p, DTensor) for p in network.parameters())
    check(network, alone(unfused, size), rank)


@pytest.mark.parametrize("order", ORDERS)
def test_revert(ranks, order):
    ranks.run(2, _check_revert, 2, order)


def _check_fsdp1(rank):
    network = FullyShardedDataParallel(build("converted", ours=False), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="convert first"):
        ckptkern.convert(network, ids())


def test_fsdp1_is_refused(ranks):
    ranks.run(2, _check_fsdp1)


# -- activation checkpoints around sharded blocks


class Around(nn.Module):
    """Each layer is a region, with its gathers."""

    def __init__(self, network: Network):
        super().__init__()
        self.network = network

    def forward(self, ids):
        x = self.network.embed(ids)
        for layer in self.network.layers:
            x = ckptkern.checkpoint(layer, x)
            x = x[0] if isinstance(x, tuple) else x
        return self.network.head(x)


def _check_around(rank, size, kind, reshard):
    network = Around(build(kind, ours=False))
    mesh = init_device_mesh("cpu", (size,))
    for layer in network.network.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh)
    check(network, alone(build(kind, ours=False), size), rank)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_regions_around_sharded_blocks(ranks, kind, reshard):
    ranks.run(2, _check_around, 2, kind, reshard)
