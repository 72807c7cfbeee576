"""A rank that dies or hangs, in forward, in a recompute or in backward, is an error of the others, whichever engine trains.

The process group's timeout bounds the wait for a rank that hangs.
"""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckptkern
from ckptkern.parallel import TensorParallel

B, WIDTH, HIDDEN = 2, 16, 32
MICROS = 4
CODE = 7  # a rank that dies exits with it
LIMIT = timedelta(seconds=0.5)  # of the step with the fault


class Fault(nn.Module):
    """The identity, which ends this process or lets it hang where it is armed to: (what, where)."""

    def __init__(self):
        super().__init__()
        self.armed = None, None

    def strike(self, place: str) -> None:
        fate, armed = self.armed
        if place == armed:
            if fate == "dies":
                os._exit(CODE)
            time.sleep(3600)  # the test ends the process

    def forward(self, x):
        self.strike("forward" if torch._C._current_graph_task_id() == -1 else "recompute")
        if x.requires_grad:
            x.register_hook(lambda dx: self.strike("backward"))
        return x.view_as(x)


class Block(nn.Module):
    """A fused layer, and one in an activation checkpoint with the fault in front of it."""

    def __init__(self, fault: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.first, self.second = (ckptkern.nn.GatedMLP(WIDTH, HIDDEN) for _ in range(2))

    def inner(self, x):
        return self.second(self.fault(x)).tanh()

    def forward(self, x):
        return ckptkern.checkpoint(self.inner, self.first(x))


def _step(model):
    return lambda x: model(x.requires_grad_()).square().mean().backward()


def _ddp(block, group):
    return _step(DistributedDataParallel(block, process_group=group))


def _fsdp2(block, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (block.first, block.second, block):
        fully_shard(layer, mesh=mesh)
    return _step(block)


def _tensor_parallel(block, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    return _step(parallelize_module(block, mesh, {"first": TensorParallel(), "second": TensorParallel()}))


def _pipeline(block, group):
    rank, n, x = dist.get_rank(), dist.get_world_size(), torch.empty(B, WIDTH, requires_grad=True)
    stage = PipelineStage(block, rank, n, torch.device("cpu"), input_args=(x,), output_args=(x,), group=group)
    run = Schedule1F1B(stage, MICROS, loss_fn=lambda y, target: (y - target).square().mean())
    last = {"target": torch.zeros(MICROS * B, WIDTH)} if rank == n - 1 else {}
    return lambda x: run.step(*([] if rank else [x]), **last)


ENGINES = {"DDP": _ddp, "FSDP2": _fsdp2, "TensorParallel": _tensor_parallel, "1F1B": _pipeline}


def _train(rank, engine, fate, place):
    """A step without a fault on the group that has a long timeout, then one with it on the last rank."""
    x = torch.randn(MICROS * B, WIDTH)
    ENGINES[engine](Block(Fault()), dist.group.WORLD)(x.clone())
    dist.barrier()
    group = dist.new_group(timeout=LIMIT)  # gloo's sends and receives take the timeout that a group is made with
    fault = Fault()
    step = ENGINES[engine](Block(fault), group)
    if rank == dist.get_world_size() - 1:
        fault.armed = fate, place
    step(x)


FATES = [("dies", "forward"), ("dies", "backward"), ("hangs", "recompute")]


@pytest.mark.parametrize(
    ("engine", "fate", "place"),
    [
        pytest.param(engine, *fate, marks=() if (i + j) % 3 == 0 else pytest.mark.long)
        for i, engine in enumerate(ENGINES)
        for j, fate in enumerate(FATES)
    ],
)
def test_a_lost_rank_is_an_error_of_the_others(engine, fate, place):
    with Ranks(patience=120) as ranks:
        errors = ranks.errors(2, _train, engine, fate, place, lost=1, code=CODE if fate == "dies" else None)
    assert re.search(r"^(RuntimeError|torch\.distributed\.\w+Error)", errors[0], re.MULTILINE), errors[0]
