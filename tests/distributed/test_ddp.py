"""General and fused segments under DDP and FSDP2, two gloo processes on the CPU."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, ids
from ranks import run_on_two
from torch import nn

import ckptkern
from ckptkern import checkpoint


class Block(nn.Module):
    """A general segment around a fused one."""

    def __init__(self, segments: bool):
        super().__init__()
        self.fc, self.mlp, self.segments = nn.Linear(8, 8), ckptkern.nn.MLP(8, 32), segments

    def inner(self, x):
        return x + self.mlp(self.fc(x).tanh())

    def forward(self, x):
        return checkpoint(self.inner, x) if self.segments else self.inner(x)


def model(segments: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(segments) for _ in range(3)))


def gradients_of(network, x) -> list[torch.Tensor]:
    for _ in range(2):  # with an optimizer's step between: nothing of the first step may be left over
        network.zero_grad()
        checked = network(x).square().mean()
        checked.backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in network.parameters()]


def _check_rank(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    both = torch.cat([torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)])
    expected = gradients_of(model(False), both)
    for static in (False, True):
        network = DistributedDataParallel(model(True), static_graph=static)
        for mine, plain in zip(gradients_of(network, x), expected, strict=True):
            torch.testing.assert_close(mine, plain)

    for whole in (False, True):  # the segment is the sharded module, or lies inside it
        mesh = init_device_mesh("cpu", (2,))
        network = model(not whole)
        for block in network:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(network, mesh=mesh)
        run = copy.copy(network) if whole else network

        def forward(x, run=run, whole=whole):
            for block in run:
                x = checkpoint(block, x) if whole else block(x)
            return x

        for mine, plain in zip(gradients_of_function(network, forward, x), expected, strict=True):
            torch.testing.assert_close(mine, plain)


def gradients_of_function(network, forward, x) -> list[torch.Tensor]:
    network.unshard()  # the root's own turn, which its forward would take
    for _ in range(2):
        network.zero_grad()
        forward(x).square().mean().backward()
    return [p.grad.full_tensor().clone() for p in network.parameters()]


def test_ddp_and_fsdp2_over_two_processes(tmp_path):
    run_on_two(_check_rank, tmp_path)


def converted(fuse: bool) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES["llama"].model()
    if fuse:
        assert len(ckptkern.convert(model, ids()).converted) == 2
    return model


def step(network, given) -> list[torch.Tensor]:
    for _ in range(2):
        network.zero_grad()
        network(given).square().mean().backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in network.parameters()]


def _check_converted(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mine = ids(rank)
    expected = step(converted(False), torch.cat([ids(0), ids(1)]))
    network = DistributedDataParallel(converted(True))
    for ours, plain in zip(step(network, mine), expected, strict=True):
        torch.testing.assert_close(ours, plain)
    network = converted(True)
    mesh = init_device_mesh("cpu", (2,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    with ckptkern.memory.kept_tensors() as kept:
        network(mine)
    assert not any(shape[-1:] == (48,) for shape, _, _ in kept.tensors if len(shape) == 3), "no hidden layer is kept"
    for ours, plain in zip(step(network, mine), expected, strict=True):
        torch.testing.assert_close(ours, plain)
    with pytest.raises(ValueError, match="convert first, then shard"):
        ckptkern.convert(network, mine)


def test_a_converted_model_under_ddp_and_fsdp2(tmp_path):
    run_on_two(_check_converted, tmp_path)
