"""ckptkern.storage.partition over two processes."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from support.stores import Fused, gradients, through, watch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from ckptkern.storage import offload, partition


@on_ranks()
def test_partition_over_two_processes(rank):
    tensors = [torch.randn(n) for n in (1, 2, 3, 8, 33)] + [
        torch.randn(5, 3).bfloat16()[:, 1:],
        torch.arange(7) > 2,
    ]
    keep = partition(min_bytes=0)
    puts = watch(keep)
    for restored, tensor in zip(through(keep, *tensors), tensors, strict=True):
        assert torch.equal(restored, tensor)
        assert (restored.dtype, restored.stride()) == (tensor.dtype, tensor.stride())
    assert puts == [tensor.numel() for tensor in tensors]
    share = keep.put(torch.randn(1000))[0].tensor
    assert share.nbytes == 2000 + 8

    module, x = Fused("full"), torch.randn(9, 16)
    expected = gradients(module, x, contextlib.nullcontext())
    chained = partition(then=offload(), min_bytes=0)
    for store in (partition(min_bytes=0), partition(dist.new_group([0, 1]), min_bytes=0), chained):
        assert all(map(torch.equal, gradients(module, x, store), expected))
        with store:
            y = x.clone().requires_grad_().exp().sum()
        for _ in range(2):
            y.backward(retain_graph=True)

    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0)):
        x = distribute_tensor(torch.randn(6, 4), mesh, [placement]).requires_grad_()
        keep = offload(min_bytes=0) if placement.is_shard() else partition(min_bytes=0)
        puts = watch(keep)
        with keep:
            y = x.exp().sin().sum()
        y.backward()
        assert type(x.grad) is type(x)
        local = x.detach().to_local()
        torch.testing.assert_close(x.grad.to_local(), local.exp().cos() * local.exp())
        assert puts == [local.numel()]  # exp's result is sin's input
        with offload(min_bytes=0, exclude=[x]) as keep:
            puts = watch(keep)
            x.sin()
        assert puts == []

    with partition(min_bytes=0):
        y = (torch.randn(10, requires_grad=True) + rank).exp().sum()
    with pytest.raises(RuntimeError, match="not equal on all ranks"):
        y.backward()

    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member"):
            partition(alone)
    else:
        assert torch.equal(through(partition(alone, min_bytes=0), tensors[4])[0], tensors[4])
