"""Regions inside DistributedDataParallel, fully_shard and torch's checkpoint wrappers train as one process with all batches."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

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


def ddp(**options) -> Callable:
    return lambda kind, p: DistributedDataParallel(build(kind, p), **options)


def fsdp2(**options) -> Callable:
    return lambda kind, p: sharded(build(kind, p), **options)


def converted_last(**options) -> Callable:
    def make(kind: str, p: float) -> nn.Module:
        network = sharded(build(kind, p, ours=False), **options)
        convert(network)
        return network

    return make


def replicated(kind: str, p: float) -> nn.Module:
    return sharded(build(kind, p), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded")))


wrapped = functools.partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, checkpoint_fn=ckptkern.checkpoint
)


def in_wrappers(network: nn.Module) -> nn.Module:
    layers = list(network.layers)
    apply_activation_checkpointing(network, checkpoint_wrapper_fn=wrapped, check_fn=lambda module: module in layers)
    assert all(type(layer) is CheckpointWrapper for layer in network.layers)
    return network


def wrapped_inside(kind: str, p: float) -> nn.Module:
    network = build(kind, p, ours=kind != "segments")
    mesh = init_device_mesh("cpu", (2,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(in_wrappers(network), mesh=mesh)


class Engine(NamedTuple):
    """make(kind, p): this rank's network. p: of dropout, of which each rank has masks of its own."""

    make: Callable[[str, float], nn.Module]
    size: int = 2
    p: float = 0.0
    kinds: tuple[str, ...] = KINDS
    mixed: bool = False


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
ENGINES = {
    "DDP": Engine(ddp(), kinds=(*KINDS, "tiled")),
    "DDP, static graph": Engine(ddp(static_graph=True), kinds=(*KINDS, "tiled")),
    "DDP, views of buckets": Engine(ddp(static_graph=True, gradient_as_bucket_view=True), 2, 0.2, (*KINDS, "tiled")),
    "DDP on four ranks": Engine(ddp(), 4, 0.2),
    "FSDP2": Engine(fsdp2(), kinds=(*KINDS, "tiled")),
    "FSDP2, resharded": Engine(fsdp2(reshard_after_forward=True), p=0.2),
    "FSDP2, gathered once": Engine(fsdp2(reshard_after_forward=False)),
    "FSDP2, of half of the ranks": Engine(fsdp2(reshard_after_forward=2), 4, 0.2),
    "FSDP2, replicated": Engine(replicated, 4),
    "FSDP2, bfloat16": Engine(fsdp2(**MIXED, reshard_after_forward=True), 2, 0.0, (*KINDS, "tiled"), mixed=True),
    "shard, convert": Engine(converted_last(reshard_after_forward=True), kinds=("converted",)),
    "shard, convert, gathered once": Engine(converted_last(reshard_after_forward=False), kinds=("converted",)),
    "shard, convert, half of the ranks": Engine(converted_last(reshard_after_forward=2), 4, 0.2, ("converted",)),
    "shard, convert, bfloat16": Engine(converted_last(**MIXED), kinds=("converted",), mixed=True),
    "wrappers in DDP": Engine(
        lambda kind, p: DistributedDataParallel(in_wrappers(build(kind, p, ours=kind != "segments"))), p=0.2
    ),
    "wrappers in shards": Engine(lambda kind, p: sharded(in_wrappers(build(kind, p, ours=kind != "segments"))), p=0.2),
    "wrappers around shards": Engine(wrapped_inside),
}


def engines(*names: str, every: int = 3) -> pytest.MarkDecorator:
    """All pairs of engines and kinds; those of each kind with every third engine are not long."""
    cases = []
    for i, name in enumerate(names or ENGINES):
        engine = ENGINES[name]
        for j, kind in enumerate(engine.kinds):
            short = (i + j) % every == 0 or len(engine.kinds) == 1 or kind == "tiled"
            cases.append(pytest.param(engine.size, name, kind, marks=() if short else pytest.mark.long))
    return pytest.mark.parametrize(("n", "engine", "kind"), cases)


@engines()
@on_ranks()
def test_training_is_that_of_one_process(rank, n, engine, kind):
    """Losses, gradients and parameters of three steps."""
    engine = ENGINES[engine]
    network = engine.make(kind, engine.p)
    if engine.mixed:
        check(network, alone(Cast(build(kind)), n), rank, rtol=1e-4, atol=1e-6)
        assert all(p.dtype == torch.float32 and type(p) is DTensor for p in network.parameters())
    else:
        check(network, alone(reference(kind, engine.p), n), rank)


@engines("DDP", "DDP, views of buckets", "FSDP2", "shard, convert")
@on_ranks()
def test_gradients_accumulated_without_synchronisation(rank, n, engine, kind):
    is_ddp, options = engine.startswith("DDP"), {"gradient_as_bucket_view": True} if "views" in engine else {}
    for in_place in (False, True)[: 1 + is_ddp]:
        network = ddp(**options)(kind, 0.2) if is_ddp else ENGINES[engine].make(kind, 0.2)
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
        network = ddp(find_unused_parameters=True, gradient_as_bucket_view=views)(kind, 0.0)
        check(network, alone(reference(kind, 0.0), 2, skips=True), rank, skips=True)


@on_ranks()
def test_hooks_of_parameters_run_once_a_backward(rank):
    """Users' hooks beside DDP's, where gradients are there and where they are not, and with gradients added in place."""
    for kind in KINDS:
        network, counts = build(kind), Counter()

        def count(given, key, counts=counts):
            counts.update([] if given is None else [key])

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
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in saved}
    y.sum().backward()
    return sum(one.nbytes() for one in storages.values())


@on_ranks()
def test_no_gathered_weight_and_no_hidden_layer_is_saved(rank):
    for engine in ("FSDP2, resharded", "shard, convert"):
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
