"""ckptkern.tiled inside DistributedDataParallel and fully_shard: gradients of fn(x), one bucket or gather a pass."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from ckptkern import tiled

WIDTH, CHUNKS = 8, 5


class Tiled(nn.Module):
    """Two feed-forward layers, as they are or in chunks."""

    def __init__(self, chunks=None):
        super().__init__()
        torch.manual_seed(0)
        self.chunks = chunks
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + (layer(x) if self.chunks is None else tiled(layer, x, self.chunks))
        return x


def batch(step, rank):
    torch.manual_seed(10 * step + rank)
    return torch.randn(2, 20, WIDTH)


def alone(size, steps):
    """Gradients of each step of one process, averaged over ranks."""
    network, found = Tiled(), []
    for step in range(steps):
        network.zero_grad()
        for rank in range(size):
            (network(batch(step, rank)).square().sum() / size).backward()
        found.append([p.grad.clone() for p in network.parameters()])
    return found


def check(network, rank, size, steps=2, tolerance=1e-5):
    for step, expected in enumerate(alone(size, steps)):
        network.zero_grad()
        network(batch(step, rank)).float().square().sum().backward()
        for p, exact in zip(network.parameters(), expected, strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad.float(), exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())


def _check_ddp(rank, size, options):
    check(DistributedDataParallel(Tiled(CHUNKS), **options), rank, size)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_ddp(ranks, options):
    ranks.run(2, _check_ddp, 2, options)


def sharded(size, **options):
    network, mesh = Tiled(CHUNKS), init_device_mesh("cpu", (size,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, **options)
    return network


def _check_fsdp2(rank, size, reshard, passes):
    network = sharded(size, reshard_after_forward=reshard)
    with (
        mock.patch.object(
            _fsdp_param_group, "foreach_all_gather", wraps=_fsdp_param_group.foreach_all_gather
        ) as gathers,
        mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as reductions,
    ):
        check(network, rank, size, steps=1)
    assert (gathers.call_count, reductions.call_count) == (passes * 2, 2)


@pytest.mark.parametrize(("reshard", "passes"), [(True, 2), (False, 1)])
def test_fsdp2_gathers_once_a_pass(ranks, reshard, passes):
    ranks.run(2, _check_fsdp2, 2, reshard, passes)


def _check_mixed(rank, size):
    check(sharded(size, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), rank, size, tolerance=3e-2)


def test_fsdp2_in_bfloat16(ranks):
    ranks.run(2, _check_mixed, 2)


def _check_inner(rank, size):
    network = Tiled(CHUNKS)
    inner = network.layers[0][0]
    fully_shard(inner, mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(RuntimeError, match="tiled: FSDPLinear inside Sequential is sharded by itself"):
        network(batch(0, rank))


def test_a_module_inside_that_is_sharded_by_itself(ranks):
    ranks.run(2, _check_inner, 2)
