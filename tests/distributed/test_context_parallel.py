"""Collectives inside an activation checkpoint run again in backward; torch's context_parallel is not silently wrong."""

import pytest
import torch
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
    layer, gathers = nn.Linear(WIDTH, 3 * WIDTH), []
    x = torch.randn(1, HEADS, S, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def attend(x):
        q, *kv = layer(x).chunk(3, -1)
        gathers.append(rank)
        k, v = torch.cat(all_gather(torch.stack(kv)), -2)
        return F.scaled_dot_product_attention(q, k, v)

    actual, expected = (
        [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *layer.parameters()])]
        for y in (ckptkern.checkpoint(attend, x, early_stop=early_stop), attend(x))
    )
    torch.testing.assert_close(actual, expected)
    assert len(gathers) == 3, "collectives run again in backward"


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
