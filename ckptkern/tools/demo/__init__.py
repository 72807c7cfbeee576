"""``python -m ckptkern demo``: one byte-level GPT trained three ways side by side, from one seed, on the same batches.

- ``torch``: PyTorch's own layers;
- ``torch.utils.checkpoint``: the same, every block inside a non-reentrant checkpoint;
- ``ckptkern``: the same, every block as one region, ``ckptkern.transformer_layer``. With ``--experts``, whose unfused form
  is torch's grouped matmuls in transformers' layout, as two: ``ckptkern.attention_block`` and ``ckptkern.nn.Experts``.

The text is the source code of Python's standard library, which every machine that runs this has. Whole top-level
modules and packages are held out, so near-identical siblings (the code pages in ``encodings``) are never on both sides.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from ... import eager
from .config import DTYPES, HEADS, PRESETS, VARIANTS, Config
from .data import load_corpus
from .results import AGREEMENT, agreements, print_summary, relative_differences, summarize, write_results
from .training import cpu_threads, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``python -m ckptkern demo``."""

    def default(name: str) -> str:
        return f"(default: {PRESETS['cpu'][name]} on a CPU, {PRESETS['cuda'][name]} on a GPU)"

    parser.description = "Train a byte-level GPT on Python's standard library, three ways side by side."
    run = parser.add_argument_group("run")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if there is one)"
    )
    run.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=VARIANTS,
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)} (default: all)",
    )
    run.add_argument("--dtype", choices=tuple(DTYPES), help=f"of autocast; weights stay fp32 {default('dtype')}")
    run.add_argument("--steps", type=int, help=default("steps"))
    run.add_argument("--batch-size", type=int, help=f"sequences a step {default('batch_size')}")
    run.add_argument("--seq-len", type=int, help=f"bytes a sequence {default('seq_len')}")
    run.add_argument("--lr", type=float, help=f"peak learning rate {default('lr')}, with --experts a third")
    run.add_argument(
        "--threads", type=int, help="CPU threads (default: what a short trial finds quickest, at most torch's own)"
    )
    run.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout (default: 0)")
    run.add_argument(
        "--out", type=Path, default=Path("demo_output"), help="folder for the results (default: demo_output)"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, help=default("layers"))
    model.add_argument("--d-model", type=int, help=f"width {default('d_model')}")
    model.add_argument("--heads", type=int, help=f"attention heads {default('heads')}")
    model.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="a mixture of N experts, gated MLPs, in place of each block's MLP, with a router and its load-balancing loss "
        "(default: a plain MLP)",
    )
    model.add_argument("--top-k", type=int, metavar="K", help="experts that a token goes through (default: 2)")
    model.add_argument(
        "--activation", choices=tuple(eager.ACTIVATIONS), help="of the MLP (default: gelu, of experts silu)"
    )
    model.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="after attention and inside the MLP, or after experts; ckptkern replays its masks from 16 bytes each "
        "(default: 0)",
    )
    model.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="full",
        help="what ckptkern's blocks recompute in backward (default: full, they save their input only)",
    )
    model.add_argument(
        "--head",
        choices=HEADS,
        default="eager",
        help="ckptkern's loss: a linear layer and F.cross_entropy, or linear_cross_entropy, which holds no logits "
        "(default: eager)",
    )


def config_of(args: argparse.Namespace) -> Config:
    """The parsed arguments, with the device's defaults filled in. Raises ValueError where they do not go together."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: wanted cuda but torch sees no CUDA device")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads: wanted at least 1 but got {args.threads}")
    if args.experts is None and args.top_k is not None:
        raise ValueError("--top-k goes with --experts")
    if args.experts is not None and args.experts < 1:
        raise ValueError(f"--experts: wanted at least 1 but got {args.experts}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    given = {name: getattr(args, name) for name in PRESETS[device] if getattr(args, name) is not None}
    preset = dict(PRESETS[device])
    if args.experts:
        preset["lr"] /= 3  # at more, an MoE's first steps amplify a rounding a thousandfold
    return Config(
        device=device,
        dropout=args.dropout,
        activation=args.activation or ("silu" if args.experts else "gelu"),
        recompute=args.recompute,
        head=args.head,
        experts=args.experts or 0,
        top_k=2 if args.top_k is None else args.top_k,
        seed=args.seed,
        variants=tuple(args.variants),
        **(preset | given),
    )


def main(args: argparse.Namespace) -> int:
    """Runs the demo; 0 if the loss curves agree where they must, 1 if not, 2 for arguments that make no sense."""
    from rich.console import Console

    from .figure import draw_figure

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    begin = time.perf_counter()
    try:
        config = config_of(args)
        corpus = load_corpus()
        for text, part in ((corpus.train, "training"), (corpus.held_out, "held-out")):
            if len(text) <= config.seq_len:
                raise ValueError(f"--seq-len: wanted less than the {len(text)} {part} bytes but got {config.seq_len}")
    except (ValueError, FileNotFoundError) as error:
        print(f"ckptkern demo: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    with cpu_threads(args.threads, config) as threads:
        place = torch.cuda.get_device_name() if config.device == "cuda" else f"the CPU (threads: {threads})"
        console.print(
            f"{len(corpus.train) / 1e6:.1f} MB of Python's standard library to train on "
            f"({len(corpus.train_files)} files), {len(corpus.held_out) / 1e6:.1f} MB held out "
            f"({len(corpus.held_out_files)} files); {config.dtype} on {place}."
        )
        runs = train(config, corpus, console)
        summaries, agreed = summarize(config, runs), agreements(config, runs)
        write_results(config, corpus, runs, summaries, agreed, args.out)
    draw_figure(
        args.out / "demo.png",
        f"One {config.model} trained {len(runs)} variants from one seed: {config.layers} layers, width {config.d_model}, "
        f"{config.batch_size} × {config.seq_len} bytes a step, {config.dtype} on {config.device}"
        + (f", dropout {config.dropout:g}" if config.dropout else ""),
        runs,
        summaries,
        {other.variant: relative_differences(runs[0], other) for other in runs[1:]},
        limit=AGREEMENT if all(one.limited for one in agreed) else None,
    )
    print_summary(config, summaries, agreed, console)
    console.print(
        f"{args.out / 'demo.png'}, {args.out / 'losses.csv'} and {args.out / 'results.json'} written; "
        f"{time.perf_counter() - begin:.0f} s in all."
    )
    if any(one.failed for one in agreed):
        print("ckptkern demo: the loss curves do not agree", file=sys.stderr)
        return 1
    return 0
