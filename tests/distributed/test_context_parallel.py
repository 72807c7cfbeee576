"""Collectives inside an activation checkpoint run again in backward; torch's context_parallel is not silently wrong."""

import pytest
import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, ids
from support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

import ckptkern

B, S, WIDTH, HEADS = 2, 8, 32, 4


class Layer(nn.Module):
    """A causal layer on the whole sequence, or on this rank's part of it, which gathers keys and values."""

    def __init__(self, split: bool):
        super().__init__()
        self.split, self.gathers = split, 0
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = torch.ones(S, S, dtype=torch.bool).tril()
        if self.split:
            self.gathers += 1
            k, v = torch.cat(all_gather(torch.stack((k, v)).contiguous()), 3)
            seen = seen.chunk(dist.get_world_size())[dist.get_rank()]
        o = F.scaled_dot_product_attention(q, k, v, seen)
        return x + self.out(o.transpose(1, 2).flatten(2))


def layers(split: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(split) for _ in range(2))


@pytest.mark.parametrize(("n", "early_stop"), [(2, True), (4, False)])
@on_ranks()
def test_attention_over_ranks(rank, n, early_stop):
    x = torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(5))
    unfused, split = layers(False), layers(True)
    whole, part = x.clone().requires_grad_(), x.chunk(n, 1)[rank].clone().requires_grad_()
    y, z = whole, part
    for one, other in zip(unfused, split, strict=True):
        y, z = one(y), ckptkern.checkpoint(other, z, early_stop=early_stop)
    y.square().mean().backward()
    torch.testing.assert_close(z, y.chunk(n, 1)[rank])
    (z.square().mean() / n).backward()
    torch.testing.assert_close(part.grad, whole.grad.chunk(n, 1)[rank])
    for mine, theirs in zip(split.parameters(), unfused.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert [layer.gathers for layer in split] == [2, 2], "collectives run again in backward"


@on_ranks()
def test_no_op_attends_to_a_part_of_the_sequence_silently(rank):
    """In torch's context_parallel, whose attention has no CPU kernel."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = ARCHITECTURES["gpt"].model()
    ckptkern.convert(model, ids())
    attention = ckptkern.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(B, S, WIDTH)
    heads = [torch.randn(B, HEADS, S, 8) for _ in range(3)]
    packed, cu = torch.randn(S // 2, HEADS, 8), torch.tensor([0, S // 2], dtype=torch.int32)
    with context_parallel(mesh, buffers=[x, *heads], buffer_seq_dims=[1, 2, 2, 2]):
        assert x.shape[1] == S // 2
        with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
            model(ids())  # the original forward, in which torch replaces attention
        for op in (
            lambda: attention(x, x, x, need_weights=False),
            lambda: attention(x, x, x),
            lambda: ckptkern.scaled_dot_product_attention(*heads, is_causal=True),
            lambda: ckptkern.varlen_attn(packed, packed, packed, cu, cu, S // 2, S // 2),
        ):
            with pytest.raises(NotImplementedError, match="this rank's part of the sequence alone"):
                op()
        ckptkern.mlp(x, torch.randn(4, WIDTH), None, torch.randn(WIDTH, 4), None)
    model(ids()).sum().backward()
    ckptkern.scaled_dot_product_attention(*heads)
