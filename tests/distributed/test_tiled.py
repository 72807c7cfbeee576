"""ckptkern.tiled inside fully_shard: one gather a pass. test_data_parallel.py trains it, in DistributedDataParallel too."""

from unittest import mock

import pytest
from support.architectures import ids
from support.ranks import on_ranks
from support.training import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group


@pytest.mark.parametrize(("reshard", "passes"), [(True, 2), (False, 1)])
@on_ranks()
def test_fsdp2_gathers_once_a_pass(rank, reshard, passes):
    network = build("tiled")
    for layer in network.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
    with (
        mock.patch.object(group, "foreach_all_gather", wraps=group.foreach_all_gather) as gathers,
        mock.patch.object(group, "foreach_reduce", wraps=group.foreach_reduce) as reductions,
    ):
        network(ids()).sum().backward()
    assert (gathers.call_count, reductions.call_count) == (2 * passes, 2)


@on_ranks()
def test_a_module_inside_that_is_sharded_by_itself(rank):
    network = build("tiled")
    fully_shard(network.layers[0].mlp[0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="tiled: FSDPLinear inside Sequential is sharded by itself"):
        network(ids())
