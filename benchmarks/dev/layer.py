"""Counts what 32 layers of a 7B Llama save for backward, and their matmuls, in each recompute mode: `make bench-layer`.

Meta tensors in bfloat16, so nothing is allocated and the counts are exact. The eager layer uses LayerNorm, because RMSNorm on
meta tensors saves more than its CUDA kernel does. Prints the table, and writes it into the docs.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.benchmarks.report import table, with_part
from ckptkern.memory import saved_tensors

LAYERS, WIDTH, HIDDEN, HEADS, TOKENS = 32, 4096, 11008, 32, 4096
SDPA = torch.ops.aten._scaled_dot_product_flash_attention.default
UNSEEN = TOKENS * (2 * WIDTH + 4 * HEADS)  # bytes of the output and logsumexp that torch's policy saves without hooks
MODES = ("none", "selective", "full", ("none", "selective"), ("selective", "selective"), ("selective", "full"))
EAGER, POLICY = "eager PyTorch", "torch checkpoint that saves SDPA"
BEGIN, END = "<!-- layer:begin -->", "<!-- layer:end -->"
META = {"device": "meta", "dtype": torch.bfloat16}


class EagerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, bias=False, **META) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False, **META) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False, **META) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, **META)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        o = SDPA(rotate(q), rotate(k), v, 0.0, True)[0]
        x = x + self.o(o.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def counts() -> dict[str, tuple[int, int]]:
    """Returns by variant the bytes that one layer saves for backward, and the FLOPs of its matmuls."""
    eager, fused = EagerLayer(), ckptkern.nn.LlamaDecoderLayer(WIDTH, HEADS, intermediate_size=HIDDEN, **META)
    x = torch.empty(1, TOKENS, WIDTH, requires_grad=True, **META)
    cos, sin = (torch.empty(TOKENS, WIDTH // HEADS, **META) for _ in range(2))  # one pair for all layers

    def ours(mode: str | tuple[str, str]) -> Tensor:
        fused.recompute = mode
        return fused(x, (cos, sin))

    checkpointed = functools.partial(checkpoint, eager, x, cos, sin, use_reentrant=False)
    variants: dict[str, Callable[[], Tensor]] = {EAGER: lambda: eager(x, cos, sin)}
    for mode in MODES:
        name = json.dumps(mode) if isinstance(mode, str) else f"({', '.join(map(json.dumps, mode))})"
        variants[f"ckptkern `{name}`"] = functools.partial(ours, mode)
    variants["torch checkpoint"] = checkpointed
    contexts = functools.partial(create_selective_checkpoint_contexts, [SDPA])
    variants[POLICY] = functools.partial(checkpointed, context_fn=contexts)
    counted = {}
    for name, variant in variants.items():
        with saved_tensors(exclude=[*eager.parameters(), *fused.parameters(), cos, sin]) as saved:
            variant()
        with FlopCounterMode(display=False) as counter:
            variant().sum().backward()
        counted[name] = (saved.bytes + UNSEEN * (name == POLICY), counter.get_total_flops())
    return counted


def part() -> str:
    """Returns a Markdown table of saved GiB of all layers and of matmuls as a ratio to eager."""
    counted = counts()
    lines = [
        [name, f"{LAYERS * saved / 2**30:.1f}", f"{flops / counted[EAGER][1]:.2f}"]
        for name, (saved, flops) in counted.items()
    ]
    return table(["variant", "saved, GiB", "matmuls / eager"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.layer", description=__doc__.split("\n")[0])
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    args = parser.parse_args()
    print(part())
    if args.page:
        args.page.write_text(with_part(args.page, BEGIN, part(), END))


if __name__ == "__main__":
    main()
