"""Peak memory and time of a training step over the length of the sequence: `make bench-frontier`.

A Llama of transformers, float32, one thread, gradients allocated before the step. Variants run interleaved. Peak bytes are
exact; of times only the ratio to gradient checkpointing means anything, and only within one run. Writes a CSV and prints the
table.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ckptkern
from ckptkern.extras import missing
from ckptkern.memory import peak_memory

MIB = 2**20
CHECKPOINTING = "gradient checkpointing"
Step = Callable[[Tensor], Tensor]  # input ids -> loss


def llama(vocabulary: int, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, use_cache=False, max_position_embeddings=2**20,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def whole_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def chunked_loss(model: nn.Module, ids: Tensor, chunks: int = 16) -> Tensor:
    """The loss in checkpointed chunks of tokens, as users of torch before 2.15 write it."""
    hidden = model.model(input_ids=ids).last_hidden_state[0, :-1]
    target = ids[0, 1:]

    def part(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, model.lm_head.weight), target, reduction="sum")

    parts = zip(hidden.chunk(chunks), target.chunk(chunks), strict=True)
    return sum(checkpoint(part, *one, use_reentrant=False) for one in parts) / len(target)


def torchs_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """torch 2.15's own chunked loss."""
    hidden = model.model(input_ids=ids).last_hidden_state[0, :-1]
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, model.lm_head.weight, ids[0, 1:], options=options)


def checkpointed(model: nn.Module, saves: tuple = ()) -> nn.Module:
    """saves: aten ops whose results are saved (selective checkpointing)."""
    given = {"use_reentrant": False}
    if saves:
        given["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(saves))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given)
    return model


def converted(model: nn.Module, ids: Tensor, **options) -> nn.Module:
    ckptkern.convert(model, input_ids=ids[:, :8], labels=ids[:, :8], **options)
    return model


def stacked(model: nn.Module, every: int) -> nn.Module:
    """Saves the input of every k-th layer alone. transformers walks through a list of one member, it."""
    model.model.layers = nn.ModuleList([ckptkern.nn.LayerStack(model.model.layers, every=every)])
    return model


def variants(make: Callable[[], nn.Module], ids: Tensor) -> dict[str, Step]:
    sdpa = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)
    found = {
        "eager": (make(), whole_loss),
        CHECKPOINTING: (checkpointed(make()), whole_loss),
        "checkpointing that saves SDPA, loss in chunks": (checkpointed(make(), sdpa), chunked_loss),
        "checkpointing, loss in chunks": (checkpointed(make()), chunked_loss),
        "ckptkern.convert, defaults": (converted(make(), ids), whole_loss),
        'ckptkern.convert, "full"': (converted(make(), ids, recompute="full"), whole_loss),
        'ckptkern.convert, "full", 4 MiB': (converted(make(), ids, recompute="full", workspace="4MiB"), whole_loss),
        'ckptkern.convert, "full", LayerStack of 2': (stacked(converted(make(), ids, recompute="full"), 2), whole_loss),
        'ckptkern.convert, "full", LayerStack of 3': (stacked(converted(make(), ids, recompute="full"), 3), whole_loss),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["checkpointing, torch's chunked loss"] = (checkpointed(make()), torchs_loss)
    for model, _ in found.values():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return {name: functools.partial(loss, model) for name, (model, loss) in found.items()}


def measured(steps: dict[str, Step], ids: Tensor, rounds: int) -> list[dict[str, object]]:
    peaks, seconds = {}, {name: [] for name in steps}
    for name, step in steps.items():
        with peak_memory("cpu") as peak:
            step(ids).backward()
        peaks[name] = peak.bytes
    for _ in range(rounds):
        for name, step in steps.items():
            gc.collect()
            start = time.thread_time()
            step(ids).backward()
            seconds[name].append(time.thread_time() - start)
    medians = {name: statistics.median(one) for name, one in seconds.items()}
    return [
        {"variant": name, "tokens": ids.shape[1], "peak_bytes": peaks[name],
         "seconds": round(medians[name], 3), "ratio": round(medians[name] / medians[CHECKPOINTING], 3)}
        for name in steps
    ]  # fmt: skip


def table(rows: list[dict[str, object]]) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    cells = {(row["variant"], row["tokens"]): row for row in rows}
    last = " | ".join(f"{n:,} tokens, MiB" for n in lengths)
    lines = [f"| | {last} | KiB a token | time |", "|---" + "|---:" * (len(lengths) + 2) + "|"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        of = [cells[name, n] for n in lengths]
        grown = (
            ""
            if len(of) == 1
            else f"{(of[-1]['peak_bytes'] - of[-2]['peak_bytes']) / (lengths[-1] - lengths[-2]) / 1024:.1f}"
        )
        peaks = " | ".join(f"{row['peak_bytes'] / MIB:.0f}" for row in of)
        lines.append(f"| {name} | {peaks} | {grown} | {of[-1]['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dev.frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="lengths (default: 1024 2048 4096)"
    )
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each variant, of which the median counts")
    parser.add_argument("--out", type=Path, help="the CSV to write")
    given = parser.parse_args()
    if hint := missing("transformers"):
        parser.error(hint)
    torch.set_num_threads(1)
    rows = []
    for tokens in given.tokens:
        ids = torch.randint(0, given.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
        make = functools.partial(llama, given.vocabulary, given.layers, given.width, given.heads)
        rows += measured(variants(make, ids), ids, given.rounds)
        print(f"{tokens} tokens: done", file=sys.stderr, flush=True)
        if given.out:
            with given.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    print(
        f"torch {torch.__version__}, {given.layers} layers, width {given.width}, {given.vocabulary:,} classes, float32"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
