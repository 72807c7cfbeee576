"""Engines on GPUs, over NCCL: with two of them where there are two, or else with one.

`pytest -m gpu tests/distributed` runs them. A reference is computed on the rank's own GPU.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.architectures import ids
from support.training import KINDS, Cast, Network, alone, build, check, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ckptkern

pytestmark = pytest.mark.gpu
SIZE = min(2, torch.cuda.device_count()) or 1
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}  # of sums in another order


def shard(network: Network, **options) -> Network:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def _check_ddp(rank, size, kind, p):
    network = DistributedDataParallel(build(kind, p).cuda())
    check(network, alone(reference(kind, p).cuda(), size), rank, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_ddp(ranks, p, kind):
    ranks.run(SIZE, _check_ddp, SIZE, kind, p, backend="nccl")


def _check_fsdp2(rank, size, kind, convert_last):
    network = shard(build(kind, ours=not convert_last).cuda())
    if convert_last:
        conversion = ckptkern.convert(network, ids().cuda())
        assert [row.replaced_by for row in conversion.converted] == 2 * ["transformer_layer"]
    check(network, alone(reference(kind, 0.0).cuda(), size), rank, **TOLERANCE)


@pytest.mark.parametrize(("kind", "convert_last"), [*((kind, False) for kind in KINDS), ("converted", True)])
def test_fsdp2(ranks, kind, convert_last):
    ranks.run(SIZE, _check_fsdp2, SIZE, kind, convert_last, backend="nccl")


def _check_mixed(rank, size, kind):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    network = shard(build(kind).cuda(), mp_policy=policy)
    check(network, alone(Cast(build(kind).cuda()), size), rank, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_in_mixed_precision(ranks, kind):
    ranks.run(SIZE, _check_mixed, SIZE, kind, backend="nccl")


def _check_side_stream(rank, size, kind):
    """Forward and backward on a stream of their own, beside that of the collectives."""
    network = DistributedDataParallel(build(kind).cuda())
    expected = list(alone(reference(kind, 0.0).cuda(), size))
    stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def on_it(last):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    check(network, iter(expected), rank, accumulating=on_it, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_side_stream(ranks, kind):
    ranks.run(SIZE, _check_side_stream, SIZE, kind, backend="nccl")


def _check_graph(rank, kind):
    """A step of DDP in a CUDA graph, as torch's documentation captures it: 11 steps before, on a side stream."""
    unfused, stream = reference(kind, 0.0).cuda(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        network = DistributedDataParallel(build(kind).cuda())
    given = ids().cuda()

    def step(model):
        loss = model(given).square().mean()
        loss.backward()
        return loss

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(11):
            network.zero_grad(set_to_none=True)
            step(network)
    torch.cuda.current_stream().wait_stream(stream)
    network.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(network)
    for seed in range(2):  # all ranks the same batch: the mean of their gradients is each one's
        given.copy_(ids(seed))
        for p in network.parameters():
            p.grad.zero_()
        graph.replay()
        unfused.zero_grad()
        torch.testing.assert_close(loss, step(unfused), **TOLERANCE)
        for mine, theirs in zip(network.parameters(), unfused.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["converted", "modules"])
def test_ddp_in_a_cuda_graph(ranks, kind):
    ranks.run(SIZE, _check_graph, kind, backend="nccl")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


def _check_context_parallel(rank, size):
    """torch's context_parallel in an activation checkpoint, with backward inside it, against the same without a region."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (size,))
    found = []
    for segment in (False, True):
        torch.manual_seed(0)
        layer = Attention().cuda().bfloat16()
        x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = ckptkern.checkpoint(layer, x) if segment else layer(x)
            y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in layer.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_context_parallel_in_an_activation_checkpoint(ranks):
    ranks.run(2, _check_context_parallel, 2, backend="nccl")
