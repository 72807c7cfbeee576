"""``python -m ckptkern demo``: one GPT trained five ways side by side, from one seed, on the same batches.

- ``eager``: PyTorch's own layers;
- ``checkpointing``: the same, every block inside ``torch.utils.checkpoint``;
- ``chunked``: the same, and the loss in checkpointed chunks of tokens, as users write it;
- ``convert``: the first after ``ckptkern.convert`` with its defaults;
- ``bounded``: the same with ``recompute="full"`` and a workspace of 4 MiB.

The text is the source code of Python's standard library, which every machine that runs this has; the vocabulary is a byte-pair
encoding that is trained on it. With ``--experts`` each block's MLP is a mixture of experts, by torch's grouped matmuls.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ckptkern import eager
from ckptkern.tools.env import load_warning

from .config import DTYPES, PRESETS, QUICK, VARIANTS, Config
from .data import load_corpus
from .results import AGREEMENT, agreements, print_summary, summarize, write_results
from .training import cpu_threads, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``python -m ckptkern demo``."""

    def default(name: str) -> str:
        return f"(default: {PRESETS['cpu'][name]} on a CPU, {PRESETS['cuda'][name]} on a GPU)"

    parser.description = (
        "Train a GPT on Python's standard library five ways side by side: the loss, the memory over a step, the time."
    )
    run = parser.add_argument_group("run")
    run.add_argument("--quick", action="store_true", help="a small model and few steps: less than a minute")
    run.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if there is one)"
    )
    run.add_argument(
        "--variants",
        nargs="+",
        choices=tuple(VARIANTS),
        default=tuple(VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(VARIANTS)} (default: all)",
    )
    run.add_argument("--dtype", choices=tuple(DTYPES), help=f"of autocast; weights stay fp32 {default('dtype')}")
    run.add_argument("--steps", type=int, metavar="N", help=default("steps"))
    run.add_argument("--batch-size", type=int, metavar="N", help=f"sequences a step {default('batch_size')}")
    run.add_argument("--seq-len", type=int, metavar="N", help=f"tokens a sequence {default('seq_len')}")
    run.add_argument("--lr", type=float, help=f"peak learning rate {default('lr')}, with --experts a third")
    run.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (default: what a short trial finds quickest, at most torch's own)",
    )
    run.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout (default: 0)")
    run.add_argument(
        "--out", type=Path, default=Path("demo_output"), help="folder for the results (default: demo_output)"
    )
    add_model_arguments(parser.add_argument_group("model"), default)


def add_model_arguments(model: argparse._ArgumentGroup, default: Callable[[str], str]) -> None:
    model.add_argument(
        "--vocabulary", type=int, metavar="N", help=f"tokens that text is made of {default('vocabulary')}"
    )
    model.add_argument("--text-mib", type=int, metavar="N", help=f"MiB of text {default('text_mib')}")
    model.add_argument("--layers", type=int, metavar="N", help=default("layers"))
    model.add_argument("--d-model", type=int, metavar="N", help=f"width {default('d_model')}")
    model.add_argument("--heads", type=int, metavar="N", help=f"attention heads {default('heads')}")
    model.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="a mixture of N experts, gated MLPs, in place of each block's MLP, with a router and its load-balancing loss "
        "(default: a plain MLP)",
    )
    model.add_argument("--top-k", type=int, metavar="K", help="experts that a token goes through (default: 2)")
    model.add_argument(
        "--activation",
        choices=tuple(eager.ACTIVATIONS),
        metavar="NAME",
        help=f"of {', '.join(eager.ACTIVATIONS)} (default: gelu, of experts silu)",
    )
    model.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="after attention and inside the MLP, or after experts; ckptkern replays its masks from 16 bytes each "
        "(default: 0)",
    )
    model.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="full",
        help="what the variant bounded recomputes in backward (default: full, its layers save their input only)",
    )
    model.add_argument(
        "--workspace", default="4MiB", metavar="SIZE", help="transient memory of each layer of it (default: 4MiB)"
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
    preset = PRESETS[device] | (QUICK if args.quick else {})
    if args.experts:
        preset["lr"] /= 3  # at more, an MoE's first steps amplify a rounding a thousandfold
    return Config(
        device=device,
        dropout=args.dropout,
        activation=args.activation or ("silu" if args.experts else "gelu"),
        recompute=args.recompute,
        workspace=args.workspace,
        experts=args.experts or 0,
        top_k=2 if args.top_k is None else args.top_k,
        seed=args.seed,
        variants=tuple(args.variants),
        **(preset | given),
    )


def main(args: argparse.Namespace) -> int:
    """Runs the demo; 0 if the losses agree where they must, 1 if not, 2 for arguments that make no sense."""
    from rich.console import Console

    from .figure import draw_figure

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    begin = time.perf_counter()
    try:
        config = config_of(args)
        warning = load_warning(args.threads or 1)  # before it is this run that loads the machine
        corpus = load_corpus(config.vocabulary, config.text_mib * 2**20)
        if len(corpus.vocabulary) < config.vocabulary:
            raise ValueError(f"--vocabulary: the text has only {len(corpus.vocabulary)} tokens: take more --text-mib")
        if len(corpus.ids) <= config.seq_len:
            raise ValueError(
                f"--seq-len: wanted less than the text's {len(corpus.ids)} tokens but got {config.seq_len}"
            )
    except (ValueError, FileNotFoundError) as error:
        print(f"ckptkern demo: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    with cpu_threads(args.threads, config) as threads:
        place = torch.cuda.get_device_name() if config.device == "cuda" else f"the CPU (threads: {threads})"
        console.print(
            f"{corpus.bytes / 1e6:.1f} MB of Python's standard library ({corpus.files} files) as {len(corpus.ids):,} tokens "
            f"of {len(corpus.vocabulary):,}; {config.dtype} on {place}."
        )
        runs = train(config, corpus.ids, console)
    summaries, agreed = summarize(config, runs), agreements(config, runs)
    write_results(config, corpus, runs, summaries, agreed, warning, args.out)
    limit = AGREEMENT if all(one.limited for one in agreed) else None
    draw_figure(args.out / "demo.png", config, runs, summaries, limit)
    print_summary(config, summaries, agreed, warning, console)
    console.print(
        f"demo.png, report.md, losses.csv and results.json are in {args.out}; {time.perf_counter() - begin:.0f} s in all.",
        markup=False,
    )
    if any(one.failed for one in agreed):
        print("ckptkern demo: the losses do not agree", file=sys.stderr)
        return 1
    return 0
