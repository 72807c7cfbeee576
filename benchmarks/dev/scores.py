"""Peak and time of attention beside torch's SDPA, for what has a mask, a bias, a softcap or dropout, in PyTorch ops.

    python -m benchmarks.dev.scores [TOKENS] [WORKSPACE] [CASE ...]

One step, forward and backward, of 8 heads of 64 in float32 with one thread: peak in MiB above q, k, v and the output's
gradient, CPU seconds of the median of three interleaved pairs. torch's softcap is written out, because its SDPA has none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import peak_memory

HEADS, HEAD_DIM, WINDOW, CAP, P = 8, 64, 256, 30.0, 0.1


def cases(q: Tensor, k: Tensor, v: Tensor, workspace: str) -> dict[str, tuple[Callable, Callable]]:
    """(torch's, ours) by name. A mask that only torch's needs is made in its call."""
    S = q.shape[2]
    i, j = torch.arange(S)[:, None], torch.arange(S)
    mask, added = torch.rand(1, 1, S, S) < 0.7, torch.randn(1, 1, S, S)
    padding = (torch.arange(S) >= S // 8)[None, None, None]
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)

    def torchs(make: Callable = lambda: None, **options) -> Callable:
        return lambda: F.scaled_dot_product_attention(q, k, v, make(), **options)

    def ours(**options) -> Callable:
        return lambda: ckptkern.scaled_dot_product_attention(q, k, v, workspace=workspace, **options)

    def capped() -> Tensor:
        return (torch.tanh(q @ k.mT * HEAD_DIM**-0.5 / CAP) * CAP).softmax(-1) @ v

    return {
        "causal": (torchs(is_causal=True), ours(is_causal=True)),
        "bool": (torchs(lambda: mask), ours(attn_mask=mask)),
        "added": (torchs(lambda: added), ours(attn_mask=added)),
        "causal, padding": (torchs(lambda: (i >= j) & padding), ours(attn_mask=padding, window_size=(-1, 0))),
        "window": (torchs(lambda: (i >= j) & (i - j <= WINDOW)), ours(window_size=(WINDOW, 0))),
        "alibi": (torchs(lambda: -slopes[:, None, None] * (i - j).abs()), ours(alibi_slopes=slopes)),
        "softcap": (capped, ours(softcap=CAP)),
        "dropout": (torchs(dropout_p=P), ours(dropout_p=P)),
        "dropout, causal": (torchs(dropout_p=P, is_causal=True), ours(dropout_p=P, is_causal=True)),
    }


def main(tokens: int = 2048, workspace: str = "16MiB", *names: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, tokens, HEAD_DIM, requires_grad=True) for _ in range(3))
    do = torch.randn(1, HEADS, tokens, HEAD_DIM)

    def step(call: Callable) -> float:
        q.grad = k.grad = v.grad = None
        start = time.process_time()
        call().backward(do)
        return time.process_time() - start

    print(f"{'':16}{'MiB: torch':>12}{'ours':>8}{'s: torch':>12}{'ours':>8}{'ratio':>8}")
    for name, pair in cases(q, k, v, workspace).items():
        if names and name not in names:
            continue
        peaks = []
        for call in pair:
            step(call)
            q.grad = k.grad = v.grad = None
            with peak_memory("cpu") as peak:
                call().backward(do)
            peaks.append(peak.bytes / 2**20)
        pairs = sorted(([step(call) for call in pair] for _ in range(3)), key=lambda one: one[1] / one[0])
        theirs, own = pairs[1]
        print(f"{name:16}{peaks[0]:12.1f}{peaks[1]:8.1f}{theirs:12.2f}{own:8.2f}{own / theirs:8.2f}", flush=True)


if __name__ == "__main__":
    main(*([int(sys.argv[1])] if sys.argv[1:] else []), *sys.argv[2:])
