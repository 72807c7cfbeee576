"""Regions inside DistributedDataParallel, fully_shard and torch's checkpoint wrappers train as one process with all batches."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.architectures import ids
from support.ranks import on_ranks
from support.training import KINDS, Cast, alone, build, check, convert, reference
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptkern
from ckptkern.memory import saved_tensors


def sharded(network: nn.Module, **options) -> nn.Module:
    layers = options.pop("layers", None) or network.layers
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def shard_and_convert(network: nn.Module, **options) -> nn.Module:
    network = sharded(network, **options)
    convert(network)
    return network


def in_wrappers(network: nn.Module) -> nn.Module:
    layers = list(network.layers)
    wrapper = functools.partial(
        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, checkpoint_fn=ckptkern.checkpoint
    )
    apply_activation_checkpointing(network, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in layers)
    assert all(type(layer) is CheckpointWrapper for layer in network.layers)
    return network


class Engine:
    """wrap: makes of a network, and options, this rank's. p: of dropout, of which each rank has masks of its own. before: kinds
    whose network is the unmodified one, in which the engine puts ckptkern's regions."""

    def __init__(self, wrap: Callable, size: int = 2, p: float = 0.0, kinds=KINDS, before=(), **options):
        self.wrap, self.size, self.p, self.kinds, self.before = (
            functools.partial(wrap, **options),
            size,
            p,
            kinds,
            before,
        )
        self.mixed = "mp_policy" in options

    def make(self, kind: str, p: float) -> nn.Module:
        return self.wrap(build(kind, p, kind not in self.before))


def replicated(network: nn.Module) -> nn.Module:
    return sharded(network, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded")))


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
ALL, LAST = (*KINDS, "tiled"), {"kinds": ("converted",), "before": ("converted",)}
WRAPPED = {"before": ("segments",)}
ENGINES = {
    "DDP": Engine(DistributedDataParallel, kinds=ALL),
    "DDP, static graph": Engine(DistributedDataParallel, kinds=ALL, static_graph=True),
    "DDP, views": Engine(DistributedDataParallel, 2, 0.2, ALL, gradient_as_bucket_view=True),
    "DDP on four ranks": Engine(DistributedDataParallel, 4, 0.2),
    "FSDP2": Engine(sharded, 2, 0.2, ALL, reshard_after_forward=True),
    "FSDP2, gathered once": Engine(sharded, reshard_after_forward=False),
    "FSDP2, of half of the ranks": Engine(sharded, 4, 0.2, reshard_after_forward=2),
    "FSDP2, replicated": Engine(replicated, 4),
    "FSDP2, bfloat16": Engine(sharded, kinds=ALL, **MIXED),
    "shard, convert": Engine(shard_and_convert, **LAST, reshard_after_forward=True),
    "shard, convert, gathered once": Engine(shard_and_convert, **LAST, reshard_after_forward=False),
    "shard, convert, half of the ranks": Engine(shard_and_convert, 4, 0.2, **LAST, reshard_after_forward=2),
    "shard, convert, bfloat16": Engine(shard_and_convert, **LAST, **MIXED),
    "wrappers in DDP": Engine(lambda network: DistributedDataParallel(in_wrappers(network)), 2, 0.2, **WRAPPED),
    "wrappers in shards": Engine(lambda network: sharded(in_wrappers(network)), 2, 0.2, **WRAPPED),
    "wrappers around shards": Engine(lambda network: in_wrappers(sharded(network)), **WRAPPED),
}


def engines(*names: str) -> pytest.MarkDecorator:
    """All pairs of engines and kinds; those of each kind with every third engine are not long."""
    cases = []
    for i, name in enumerate(names or ENGINES):
        engine = ENGINES[name]
        for j, kind in enumerate(engine.kinds):
            short = (i + j) % 3 == 0 or len(engine.kinds) == 1 or kind == "tiled"
            cases.append(pytest.param(engine.size, name, kind, marks=() if short else pytest.mark.long))
    return pytest.mark.parametrize(("n", "engine", "kind"), cases)


@engines()
@on_ranks()
def test_training_is_that_of_one_process(rank, n, engine, kind):
    """Losses, gradients and parameters of three steps."""
    engine = ENGINES[engine]
    network, close = engine.make(kind, engine.p), {"rtol": 1e-4, "atol": 1e-6} if engine.mixed else {}
    module = Cast(build(kind)) if engine.mixed else reference(kind, engine.p)
    check(network, alone(module, n), rank, **close)
    assert not engine.mixed or all(p.dtype == torch.float32 and type(p) is DTensor for p in network.parameters())


@engines("DDP", "DDP, views", "FSDP2", "shard, convert")
@on_ranks()
def test_gradients_accumulated_without_synchronisation(rank, n, engine, kind):
    is_ddp = engine.startswith("DDP")
    for in_place in (False, True)[: 1 + is_ddp]:
        network = ENGINES[engine].make(kind, 0.2)
        if in_place:
            ckptkern.accumulate_in_place(network)

        def accumulating(last, network=network):
            if not is_ddp:
                network.set_requires_gradient_sync(last)
            return contextlib.nullcontext() if last or not is_ddp else network.no_sync()

        check(network, alone(reference(kind, 0.2), n, 3), rank, 3, accumulating=accumulating)


@pytest.mark.parametrize("kind", ["converted", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])])
@on_ranks()
def test_parameters_of_a_layer_that_some_ranks_leave_out(rank, kind):
    """In the first step rank 0 leaves out a layer, in the second all ranks do, in the third rank 0 asks for one that is not
    there: so every parameter is used."""
    for views in (False, True):
        network = DistributedDataParallel(build(kind), find_unused_parameters=True, gradient_as_bucket_view=views)
        check(network, alone(reference(kind, 0.0), 2, skips=True), rank, skips=True)


@on_ranks()
def test_hooks_of_parameters_run_once_a_backward(rank):
    """Users' hooks beside DDP's, where gradients are there and where they are not, and with gradients added in place."""
    for kind in KINDS:
        network, counts = build(kind), Counter()

        def count(gradient, key, counts=counts):
            counts.update([] if gradient is None else [key])

        for hook in ("register_hook", "register_post_accumulate_grad_hook"):
            for name, p in network.named_parameters():
                getattr(p, hook)(functools.partial(count, key=(hook, name)))
        replica = DistributedDataParallel(network)
        ckptkern.accumulate_in_place(replica)
        for _ in range(2):
            replica(ids()).sum().backward()
        assert counts == dict.fromkeys(counts, 2), (kind, counts)
        assert len(counts) == 2 * len(list(network.parameters()))


# -- what is saved


def saved_now(network: nn.Module) -> int:
    """Bytes that a forward has left for backward. FSDP2 empties the storages of the parameters that it has resharded."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = network(ids())
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    y.sum().backward()
    return sum(storage.nbytes() for storage in storages.values())


@on_ranks()
def test_no_gathered_weight_and_no_hidden_layer_is_saved(rank):
    for engine in ("FSDP2", "shard, convert"):
        for kind in ENGINES[engine].kinds:
            whole = build(kind)
            with saved_tensors(whole) as saved:
                whole(ids())
            network = ENGINES[engine].make(kind, 0.0)
            for _ in range(2):
                held = saved_now(network)
                assert held == saved.bytes, (kind, held, saved)
    network, unfused = (DistributedDataParallel(build("converted", ours=ours)) for ours in (True, False))
    with saved_tensors(network) as saved:
        network(ids())
    with saved_tensors(unfused) as before:
        unfused(ids())
    assert saved.bytes < before.bytes / 2
    assert not any(shape[-1:] == torch.Size([48]) for shape, _, _ in saved.tensors if len(shape) == 3)


@on_ranks()
def test_one_rank_alone_may_convert(rank):
    """What convert measures of a step has a backward, in which the reducer would wait for the other rank."""
    network = DistributedDataParallel(build("converted", ours=False))
    if rank == 0:
        conversion = ckptkern.convert(network, ids())
        assert conversion.converted
        assert conversion.peak_before > conversion.saved_before > conversion.saved_after
