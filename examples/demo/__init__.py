"""``python -m ckptkern demo``: one GPT trained five ways side by side, from one seed, on the same batches.

- ``eager``: PyTorch's own layers;
- ``checkpointing``: the same, every block inside ``torch.utils.checkpoint``;
- ``chunked``: the same, and the loss in checkpointed chunks of tokens, as users write it;
- ``convert``: the first after ``ckptkern.convert`` with its defaults;
- ``bounded``: the same with ``recompute="full"`` and a workspace of 4 MiB.

The text is the source code of Python's standard library, which every machine that runs this has; the vocabulary is the 256
bytes and the text's most frequent words. With ``--experts`` each block's MLP is a mixture of experts, by torch's grouped
matmuls.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace

import torch

from ckptkern.benchmarks.measure import load_warning

from .config import add_arguments, settle
from .data import load_corpus
from .results import page, summarize, write_results
from .training import cpu_threads, train

__all__ = ["add_arguments", "main"]


def main(args: Namespace) -> int:
    """Runs the demo; 0 if the losses agree where they must, 1 if not, 2 for arguments that make no sense."""
    from .figure import draw_figure

    begin = time.perf_counter()
    try:
        settle(args)
        warning = load_warning(args.threads or 1)  # before it is this run that loads the machine
        ids, vocabulary = load_corpus(args.vocabulary, args.text_mib * 2**20)
        if len(vocabulary) < args.vocabulary:
            raise ValueError(f"--vocabulary: the text has only {len(vocabulary)} tokens: take more --text-mib")
        if len(ids) <= args.seq_len:
            raise ValueError(f"--seq-len: wanted less than the text's {len(ids)} tokens but got {args.seq_len}")
    except (ValueError, FileNotFoundError) as error:
        print(f"ckptkern demo: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    with cpu_threads(args) as threads:
        place = torch.cuda.get_device_name() if args.device == "cuda" else f"the CPU (threads: {threads})"
        print(f"Python's standard library as {len(ids):,} tokens of {len(vocabulary):,}; {args.dtype} on {place}.")
        runs = train(args, ids)
    rows = summarize(args, runs)
    write_results(args, runs, rows, warning)
    draw_figure(args, runs, rows)
    print(page(args, rows, warning))
    print(f"demo.png, report.md and results.json are in {args.out}; {time.perf_counter() - begin:.0f} s in all.")
    if any(row.failed for row in rows):
        print("ckptkern demo: the losses do not agree", file=sys.stderr)
        return 1
    return 0
