"""Attention in PyTorch ops, a block of queries at a time: what it never writes out, and which blocks there are."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import eager
from ckptkern.eager import query_blocks
from ckptkern.memory import peak_memory


def hidden_by(left: int | None, right: int | None, rows: int, columns: int) -> torch.Tensor:
    """True where column j is not in i - left .. i + right."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    return (j < i - (math.inf if left is None else left)) | (j > i + (math.inf if right is None else right))


S, D, SLOPES = 1024, 6, torch.tensor([0.5, 0.25, 0.125, 0.0625])
TRAINED = {name: SLOPES.clone().requires_grad_() for name in ("alibi_slopes", "sinks")}
WITHOUT_SCORES = {
    "mask": {
        "attn_mask": torch.rand(1, 1, S, S, generator=torch.Generator().manual_seed(5)) > 0.3,
        "window_size": (9, 0),
    },
    "causal, padding": {"attn_mask": torch.arange(S).view(1, 1, 1, S) > 24, "window_size": (-1, 0)},
    "alibi, softcap": {"alibi_slopes": SLOPES, "softcap": 2.0, "is_causal": True},
    "dropout, window": {"dropout_p": 0.3, "window_size": (40, 0)},
    "trained": TRAINED | {"window_size": (9, 0), "dropout_p": 0.3, "softcap": 2.0},
}


@pytest.mark.parametrize("name", WITHOUT_SCORES)
def test_scores_are_never_written_out(name):
    """Above what the caller holds: the output, the logsumexp, the gradients, and 1 MiB, where one [B, H, Sq, Sk] has 16."""
    leaves, dy, threads = torch.randn(3, 1, 4, S, D).requires_grad_(), torch.ones(1, 4, S, D), torch.get_num_threads()

    def step():
        y = ckptkern.scaled_dot_product_attention(*leaves.unbind(), **WITHOUT_SCORES[name], workspace="1MiB")
        torch.autograd.grad(y, [leaves, *TRAINED.values()], dy, allow_unused=True)

    torch.set_num_threads(1)  # torch's flash kernel for CPUs allocates a buffer for each
    try:
        step()  # first calls allocate for good
        with peak_memory("cpu") as peak:
            step()
    finally:
        torch.set_num_threads(threads)
    gradients, output, lse, delta = 2 * leaves.nbytes, dy.nbytes, 4 * 4 * S, 4 * 4 * S + 2 * dy.nbytes
    assert peak.bytes <= gradients + output + lse + delta + 2**20 + 2**17


@pytest.mark.parametrize("window", [(None, None), (None, 0), (30, 5), (7, None), (None, -20), (2, -1)], ids=str)
@pytest.mark.parametrize(("rows", "columns", "samples", "kv_heads", "group"), [
    (83, 70, 2, 4, 1), (70, 300, 3, 1, 4), (16, 1, 1, 2, 2), (1, 65, 2, 3, 1), (300, 33, 1, 1, 1),
])  # fmt: skip
def test_blocks_are_a_partition(window, rows, columns, samples, kv_heads, group):
    """Every score that the window lets be seen lies in one block; a block starts where dropout masks can, and costs no more
    than the budget unless it is the least."""
    q, k = torch.empty(samples, kv_heads * group, rows, 1), torch.empty(samples, kv_heads, columns, 1)
    core, seen = eager.AttentionCore(1.0, "ieee", window), ~hidden_by(*window, rows, columns)

    def cost(b, h, r):
        return b * h * r * columns

    for budget, one_each in itertools.product((1, 20_000, 10**9), (False, True)):
        covered = torch.zeros(samples, kv_heads * group, rows, columns, dtype=torch.int32)
        for block in query_blocks.query_blocks(q, k, core, cost, budget, 64, one_each):
            covered[block.samples, block.heads, block.rows, block.columns] += 1
            assert block.rows.start % 16 == 0
            assert block.columns.start % 32 == 0
            part, count = block.of_keys(k).shape, block.rows.stop - block.rows.start
            assert cost(part[0], part[1], count) <= budget or (part[:2] == (1, 1) and count <= 16)
            assert block.of_queries(q).shape[1] == part[1] * (1 if one_each else group)
        assert (covered <= 1).all()
        assert (covered[:, :, seen] == 1).all()


def test_window_reads_what_it_sees():
    """Blocks under a window read its columns alone: 13 % of all scores here."""
    read = []

    class Flops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention_for_cpu" in func.__name__ and "backward" not in func.__name__:
                read.append(args[0].shape[2] * args[1].shape[2])
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 2048, 8)
    with Flops():
        eager.attn_fwd(q, q, q, eager.AttentionCore(1.0, "ieee", (128, 0), workspace=2**24))
    assert 0 < sum(read) < 0.13 * 2048**2


CU = torch.tensor([0, 40, 40, 83], dtype=torch.int32)
CORES = {  # of 83 rows; or of 128 rows of 32 columns, of which some blocks see none
    "packed": (83, 83, dict(window=(20, 0), cu_q=CU, cu_k=CU, max_q=50, max_k=50)),
    "rows after the last column": (128, 32, dict(window=(5, None), dropout=(torch.tensor([3, 4]), 20_000, 2.0, 0))),
    "rows before the first": (128, 32, dict(window=(None, -40))),
}


@pytest.mark.parametrize("case", CORES)
def test_blocks_of_sequences_and_blocks_without_a_column(case):
    """Forward and backward as at once; zeros and zero gradients where nothing is seen."""
    rows, columns, options = CORES[case]
    q, k, v, do = (torch.randn(1, 4, count, D) * (n + 1) for n, count in enumerate((rows, columns, columns, rows)))
    results = []
    for workspace in (None, 1024):
        core = eager.AttentionCore(0.4, "ieee", **options, workspace=workspace)
        o, lse, _ = eager.attn_fwd(q, k, v, core)
        results.append((o, *eager.attn_grads(q, k, v, do, o, lse, core)[:3]))
    for whole, blocked in zip(*results, strict=True):  # other blocks of a matmul round otherwise with several threads
        torch.testing.assert_close(blocked, whole, rtol=1e-5, atol=3e-5)
