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


@pytest.mark.parametrize("early_stop", [True, False])
@on_ranks()
def test_collectives_inside_an_activation_checkpoint_run_again(rank, early_stop):
    """Each rank's queries attend to the keys and values of all."""
    layer = nn.Linear(WIDTH, 3 * WIDTH)
    x = torch.randn(2, 1, HEADS, S, WIDTH, generator=torch.Generator().manual_seed(5))
    whole, part = x.flatten(0, 1).requires_grad_(), x[rank].clone().requires_grad_()
    gathers = []

    def attend(x, everyone=lambda one: [one]):
        q, k, v = (layer(x)[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3))
        k, v = torch.cat(everyone(torch.stack((k, v))), -2)
        return F.scaled_dot_product_attention(q, k, v)

    def gathered(one):
        gathers.append(one.shape)
        return all_gather(one)

    y = attend(torch.cat(tuple(whole.split(1)), -2))
    y.square().mean().backward()
    expected = [whole.grad[rank], *(p.grad.clone() for p in layer.parameters())]
    layer.zero_grad()
    z = ckptkern.checkpoint(attend, part, gathered, early_stop=early_stop)
    torch.testing.assert_close(z, y.chunk(2, -2)[rank])
    (z.square().mean() / 2).backward()
    for p in layer.parameters():
        dist.all_reduce(p.grad)
    torch.testing.assert_close([part.grad[0], *(p.grad for p in layer.parameters())], expected)
    assert len(gathers) == 2, "collectives run again in backward"


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
