"""Attention in PyTorch ops, a block of queries at a time: what it never writes out, and which columns it reads."""

import pytest
import torch
from support.cases import Watch

import ckptkern
from ckptkern import eager
from ckptkern.eager import attention_core
from ckptkern.memory import peak_memory

S, D, SLOPES = 1024, 6, torch.tensor([0.5, 0.25, 0.125, 0.0625])
TRAINED = {name: SLOPES.clone().requires_grad_() for name in ("alibi_slopes", "sinks")}
MASK = torch.rand(1, 1, S, S, generator=torch.Generator().manual_seed(5)) > 0.3
WITHOUT_SCORES = {
    "mask": {"attn_mask": MASK, "window_size": (9, 0)},
    "causal, padding": {"attn_mask": torch.arange(S).view(1, 1, 1, S) > 24, "window_size": (-1, 0)},
    "alibi, softcap": {"alibi_slopes": SLOPES, "softcap": 2.0, "is_causal": True},
    "dropout, window": {"dropout_p": 0.3, "window_size": (40, 0)},
    "trained": TRAINED | {"window_size": (9, 0), "dropout_p": 0.3, "softcap": 2.0},
}


@pytest.mark.parametrize("name", WITHOUT_SCORES)
def test_scores_are_never_written_out(name, one_thread):
    """Above what the caller holds: the output, the logsumexp, the gradients, and 1 MiB, where one [B, H, Sq, Sk] has 16."""
    leaves, dy = torch.randn(3, 1, 4, S, D).requires_grad_(), torch.ones(1, 4, S, D)

    def step():
        y = ckptkern.scaled_dot_product_attention(*leaves.unbind(), **WITHOUT_SCORES[name], workspace="1MiB")
        torch.autograd.grad(y, [leaves, *TRAINED.values()], dy, allow_unused=True)

    step()  # first calls allocate for good
    with peak_memory("cpu") as peak:
        step()
    gradients, output, lse, delta = 2 * leaves.nbytes, dy.nbytes, 4 * 4 * S, 4 * 4 * S + 2 * dy.nbytes
    assert peak.bytes <= gradients + output + lse + delta + 2**20 + 2**17


def test_heads_of_k_are_not_repeated(one_thread):
    """For query heads that share a head of k and v, in a workspace that has no room for that."""
    q, k, v = (torch.randn(1, heads, 512, 32, requires_grad=True) for heads in (8, 1, 1))
    with peak_memory("cpu") as peak:
        y = ckptkern.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, workspace="256KiB")
        grads = torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    held = (y, y, y, *grads)  # and the gradient of y, and one query head's results and gradients
    assert peak.bytes <= sum(tensor.nbytes for tensor in held) + 2**18


def test_the_least_block_is_of_one_sample_and_one_head():
    q = torch.empty(3, 4, 20, 1)
    blocks = attention_core.query_blocks(q, q, eager.AttentionCore(1.0, "ieee"), lambda *sizes: sum(sizes), 1, 64)
    assert {block.of_queries(q).shape[:3] for block in blocks} == {(1, 1, 16), (1, 1, 4)}


def test_window_reads_what_it_sees():
    """Blocks under a window read its columns alone: 13 % of all scores here."""
    q = torch.randn(1, 2, 2048, 8)
    with Watch() as watch:
        eager.attn_fwd(q, q, q, eager.AttentionCore(1.0, "ieee", (128, 0), workspace=2**24))
    assert 0 < watch.flops < 0.13 * 4 * q.numel() * 2048
