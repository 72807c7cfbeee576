"""Engines on GPUs, over NCCL: with two of them where there are two, or else with one.

`pytest -m gpu tests/distributed` runs them. A reference is computed on the rank's own GPU.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from distributed.test_data_parallel import MIXED, sharded
from support.architectures import ids
from support.ranks import on_ranks
from support.training import KINDS, Cast, Network, alone, build, check, convert, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ckptkern

pytestmark = pytest.mark.gpu
SIZE = min(2, torch.cuda.device_count()) or 1
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}  # of sums in another order


def shard(network: Network, **options) -> Network:
    return sharded(network, mesh=init_device_mesh("cuda", (dist.get_world_size(),)), **options)


def shard_and_convert(kind: str) -> Network:
    network = shard(build(kind, ours=False).cuda())
    convert(network)
    return network


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream, last: bool):
    """Forward and backward on a stream of their own, beside that of the collectives."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


ENGINES = {
    "DDP": lambda kind: DistributedDataParallel(build(kind).cuda()),
    "DDP, dropout": lambda kind: DistributedDataParallel(build(kind, 0.2).cuda()),
    "DDP, side stream": lambda kind: DistributedDataParallel(build(kind).cuda()),
    "FSDP2": lambda kind: shard(build(kind).cuda()),
    "FSDP2, bfloat16": lambda kind: shard(build(kind).cuda(), **MIXED),
    "shard, convert": shard_and_convert,
}


CASES = [(engine, kind) for engine in ENGINES for kind in KINDS if kind == "converted" or engine != "shard, convert"]


@pytest.mark.parametrize(("engine", "kind"), CASES)
@on_ranks(SIZE, backend="nccl")
def test_training_is_that_of_one_process(rank, engine, kind):
    network = ENGINES[engine](kind)
    module = (
        reference(kind, 0.2 if "dropout" in engine else 0.0) if "bfloat16" not in engine else Cast(build(kind).cuda())
    )
    expected = [*alone(module.cuda(), dist.get_world_size())]
    how = {"accumulating": functools.partial(beside, torch.cuda.Stream())} if "stream" in engine else {}
    check(network, iter(expected), rank, **how, **TOLERANCE)


@pytest.mark.parametrize("kind", ["converted", "modules"])
@on_ranks(SIZE, backend="nccl")
def test_ddp_in_a_cuda_graph(rank, kind):
    """A step, as torch's documentation captures it: 11 steps before, on a side stream."""
    unfused, stream = reference(kind, 0.0).cuda(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        network = DistributedDataParallel(build(kind).cuda())
    tokens = ids().cuda()

    def step(model):
        loss = model(tokens).square().mean()
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
        tokens.copy_(ids(seed))
        for p in network.parameters():
            p.grad.zero_()
        graph.replay()
        unfused.zero_grad()
        torch.testing.assert_close(loss, step(unfused), **TOLERANCE)
        for mine, theirs in zip(network.parameters(), unfused.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)
    torch.cuda.synchronize()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_ranks(backend="nccl")
def test_context_parallel_in_an_activation_checkpoint(rank):
    """torch's context_parallel in an activation checkpoint, with backward inside it, against the same without a region."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (2,))
    results = []
    for segment in (False, True):
        torch.manual_seed(0)
        layer = Attention().cuda().bfloat16()
        x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = ckptkern.checkpoint(layer, x) if segment else layer(x)
            y.float().square().mean().backward()
        results.append([y.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[1], results[0])
