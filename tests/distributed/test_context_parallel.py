"""Attention over a sequence that lies on several ranks, as an activation checkpoint: backward runs its collectives again."""

import pytest
import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, ids
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

import ckptkern

B, S, WIDTH, HEADS = 2, 8, 32, 4


def gathered(x, dim):
    """The whole of what each rank has a part of; the gradient of a part is the sum over ranks."""
    return torch.cat(all_gather(x.contiguous()), dim)


def passed_on(x, counts):
    """What the rank before has; in backward gradients go the other way. counts: calls of this function."""
    counts.append(torch.is_grad_enabled())
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = x.shape[0]
    to = [rows if i == (rank + 1) % size else 0 for i in range(size)]
    came = [rows if i == (rank - 1) % size else 0 for i in range(size)]
    return wait_tensor(all_to_all_single_autograd(x.contiguous(), came, to, dist.group.WORLD))


class Split(nn.Module):
    """A causal layer on this rank's part of the sequence."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.counts = kind, []
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = getattr(self, self.kind)(q, k, v)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(x)

    def whole(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gather(self, q, k, v):
        self.counts.append(torch.is_grad_enabled())
        rows = dist.get_rank() * q.shape[2] + torch.arange(q.shape[2])
        k, v = gathered(torch.stack((k, v)), 3)
        return F.scaled_dot_product_attention(q, k, v, rows[:, None] >= torch.arange(k.shape[2]))

    def ring(self, q, k, v):
        """Softmax over parts that come round, each with its maximum."""
        size, rank, L = dist.get_world_size(), dist.get_rank(), q.shape[2]
        rows = torch.arange(L)
        top = total = o = None
        kv = torch.stack((k, v))
        for step in range(size):
            k, v = kv
            source = (rank - step) % size
            seen = rank * L + rows[:, None] >= source * L + rows
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -1e30)
            now = scores.amax(-1, keepdim=True).detach()
            new = now if top is None else torch.maximum(top, now)
            weights = (scores - new).exp().masked_fill(~seen, 0.0)
            before = 0.0 if top is None else (top - new).exp()
            total = weights.sum(-1, keepdim=True) + (0.0 if total is None else before * total)
            o = weights @ v + (0.0 if o is None else before * o)
            top = new
            if step < size - 1:
                kv = passed_on(kv, self.counts)
        return o / total


def layers(kind):
    torch.manual_seed(0)
    return nn.ModuleList(Split(kind) for _ in range(2))


def _check_split(rank, size, kind, early_stop):
    x = torch.randn(B, S, WIDTH, generator=torch.Generator().manual_seed(5))
    unfused, split = layers("whole"), layers(kind)
    whole, part = x.clone().requires_grad_(), x.chunk(size, 1)[rank].clone().requires_grad_()
    y = whole
    for layer in unfused:
        y = layer(y)
    y.square().mean().backward()
    z = part
    for layer in split:
        z = ckptkern.checkpoint(layer, z, early_stop=early_stop)
    torch.testing.assert_close(z, y.chunk(size, 1)[rank])
    made = [len(layer.counts) for layer in split]
    (z.square().mean() / size).backward()
    torch.testing.assert_close(part.grad, whole.grad.chunk(size, 1)[rank])
    for mine, theirs in zip(split.parameters(), unfused.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert min(made) > 0
    assert [len(layer.counts) for layer in split] == [2 * count for count in made], "collectives run again in backward"


@pytest.mark.parametrize(
    ("kind", "size", "early_stop"), [("gather", 2, True), ("gather", 4, False), ("ring", 2, False), ("ring", 4, True)]
)
def test_attention_over_ranks(ranks, kind, size, early_stop):
    ranks.run(size, _check_split, size, kind, early_stop)


# -- torch's context_parallel, whose attention has no CPU kernel


def _check_context_parallel(rank):
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


def test_no_op_attends_to_a_part_of_the_sequence_silently(ranks):
    ranks.run(2, _check_context_parallel)
