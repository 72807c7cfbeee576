"""ckptkern.tiled inside DistributedDataParallel and fully_shard: gradients of fn(x), one bucket or gather a pass."""

from unittest import mock

import pytest
import torch
from support.ranks import on_ranks
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


def check(network, rank, tolerance=1e-5):
    """Two steps, against one process that averages the ranks' gradients."""
    whole = Tiled()
    for step in range(2):
        x = torch.randn(2, 2, 20, WIDTH, generator=torch.Generator().manual_seed(step))
        network.zero_grad()
        network(x[rank]).float().square().sum().backward()
        whole.zero_grad()
        (whole(x).square().sum() / 2).backward()
        for p, exact in zip(network.parameters(), whole.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            atol = tolerance * exact.grad.abs().max().item()
            torch.testing.assert_close(grad.float(), exact.grad, rtol=tolerance, atol=atol)


@on_ranks()
def test_ddp(rank):
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        check(DistributedDataParallel(Tiled(CHUNKS), **options), rank)


def sharded(**options):
    network, mesh = Tiled(CHUNKS), init_device_mesh("cpu", (2,))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, **options)
    return network


@pytest.mark.parametrize(("reshard", "passes"), [(True, 2), (False, 1)])
@on_ranks()
def test_fsdp2_gathers_once_a_pass(rank, reshard, passes):
    group = _fsdp_param_group
    with (
        mock.patch.object(group, "foreach_all_gather", wraps=group.foreach_all_gather) as gathers,
        mock.patch.object(group, "foreach_reduce", wraps=group.foreach_reduce) as reductions,
    ):
        check(sharded(reshard_after_forward=reshard), rank)
    assert (gathers.call_count, reductions.call_count) == (2 * passes * 2, 2 * 2)


@on_ranks()
def test_fsdp2_in_bfloat16_and_a_module_inside_that_is_sharded_by_itself(rank):
    check(sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), rank, tolerance=3e-2)
    network = Tiled(CHUNKS)
    fully_shard(network.layers[0][0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="tiled: FSDPLinear inside Sequential is sharded by itself"):
        network(torch.randn(2, 20, WIDTH))
