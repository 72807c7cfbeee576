"""Segments inside DistributedDataParallel train as one process with all ranks' batches."""

import contextlib
import copy

import pytest
import torch
from support.architectures import ids
from support.training import KINDS, alone, build, check, convert, reference
from torch.nn.parallel import DistributedDataParallel

import ckptkern

MODES = {
    "default": {},
    "static graph": {"static_graph": True},
    "views of buckets": {"gradient_as_bucket_view": True},
    "static graph, views of buckets": {"static_graph": True, "gradient_as_bucket_view": True},
}


def _check_mode(rank, size, kind, mode, p):
    network = DistributedDataParallel(build(kind, p), **MODES[mode])
    check(network, alone(reference(kind, p), size), rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_ddp(ranks, mode, kind):
    ranks.run(2, _check_mode, 2, kind, mode, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_dropout_has_each_ranks_own_masks(ranks, size, kind):
    ranks.run(size, _check_mode, size, kind, "default", 0.2)


def _check_unused(rank, size, kind, views):
    """In the first step rank 0 leaves out a layer, in the second all ranks do, in the third rank 0 asks for one that is not
    there: so every parameter is used."""
    network = DistributedDataParallel(build(kind), find_unused_parameters=True, gradient_as_bucket_view=views)
    check(network, alone(reference(kind, 0.0), size, skips=True), rank, skips=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("views", [False, True])
def test_parameters_of_a_layer_that_some_ranks_leave_out(ranks, views, kind):
    ranks.run(2, _check_unused, 2, kind, views)


def _check_no_sync(rank, size, kind, mode, p):
    network = DistributedDataParallel(build(kind, p), **MODES[mode])

    def accumulating(last):
        return contextlib.nullcontext() if last else network.no_sync()

    check(network, alone(reference(kind, p), size, 3), rank, 3, accumulating=accumulating)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["default", "views of buckets"])
def test_gradients_accumulated_without_synchronisation(ranks, mode, kind):
    ranks.run(2, _check_no_sync, 2, kind, mode, 0.2)


def _check_converted_in_ddp(rank, size):
    """convert may also come after DistributedDataParallel, given either model."""
    for inner in (False, True):
        network = DistributedDataParallel(build("converted", ours=False))
        convert(network.module if inner else network)
        check(network, alone(build("converted", ours=False), size), rank)
        ckptkern.revert(network)
        assert not any("forward" in m.__dict__ for m in network.modules())


def test_convert_after_ddp(ranks):
    ranks.run(2, _check_converted_in_ddp, 2)


def _check_saved(rank):
    network = DistributedDataParallel(build("converted"))
    unfused = DistributedDataParallel(build("converted", ours=False))
    with ckptkern.memory.saved_tensors(network) as saved:
        network(ids())
    with ckptkern.memory.saved_tensors(unfused) as saved_before:
        unfused(ids())
    assert saved.bytes < saved_before.bytes / 2
    assert not any(shape[-1:] == torch.Size([48]) for shape, _, _ in saved.tensors if len(shape) == 3)


def test_the_hidden_layer_is_not_saved(ranks):
    ranks.run(2, _check_saved)


def _check_in_place(rank, size, mode):
    """Micro-batches under no_sync, then one that reduces, twice; beside a replica whose gradients autograd accumulates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(ckptkern.nn.MLP(8, 16), torch.nn.Linear(8, 8), ckptkern.nn.GatedMLP(8, 16)).double()
    replicas = [DistributedDataParallel(one, **MODES[mode]) for one in (model, copy.deepcopy(model))]
    ckptkern.accumulate_in_place(replicas[1])
    x = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for step in range(2):
        for micro in range(2):
            for one in replicas:
                with contextlib.nullcontext() if micro else one.no_sync():
                    one(x[2 * step + micro]).square().sum().backward()
        theirs, ours = ([p.grad for p in one.parameters()] for one in replicas)
        torch.testing.assert_close(ours, theirs)
        for one in replicas:
            one.zero_grad(set_to_none=step == 1)


@pytest.mark.parametrize("mode", ["default", "views of buckets"])
def test_gradients_accumulated_in_place(ranks, mode):
    ranks.run(2, _check_in_place, 2, mode)
