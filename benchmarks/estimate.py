"""Estimates a language model's training step in each way to save memory: ``python -m ckptkern estimate CONFIG``."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conversion.report import aligned, write_rows
from ..extras import missing
from ..memory import format_size, parse_size
from ..planning.timing import RATES
from .estimate_model import (
    LoRA,
    built,
    convert_like_narrow,
    kinds_of,
    layers_of,
    original_of,
    pick_layers,
    read_config,
)
from .estimate_variants import SLOW, VARIANTS, count_all, longest

HELP = """\
examples:
  python -m ckptkern estimate config.json --tokens 8192 --gpu h100 --ranks 8
  python -m ckptkern estimate config.json --tokens 16384 --lora 16

Nothing is downloaded, computed or measured: the model is built on the meta
device, a few of its layers run there in each variant, and the allocations of
their ops are counted. The columns:

  peak     of a step, above parameters, gradients and optimizer states
  all      peak with these, of which each of --ranks GPUs has an equal shard
  saved    bytes between forward and backward
  PFLOP    of the step's matmuls
  longest  tokens of the longest sequence that fits --memory, on the line
           through the peaks of two lengths

The variants: "checkpointing" is torch.utils.checkpoint of each layer, as by
gradient_checkpointing_enable(). "selective" saves the result of
scaled_dot_product_attention. "chunked loss" has logits in 16 checkpointed
chunks of tokens. "Liger" allocates as the norms, gated MLPs, rotary embedding
and fused loss of liger_kernel 0.8.5; it is only the loss ("Liger's loss") if a
layer has no gate_proj, up_proj and down_proj, or norms other than RMSNorm.
"bounded" stays within --workspace.

--lora R trains only low-rank adapters of rank R, as peft adds them. Everything
else is frozen, without gradients and optimizer states. The adapters are
float32, as peft keeps them in a 16-bit model; autocast computes in 16 bits.
"""
STATES = {"adamw": None, "adamw-8bit": 2, "adamw-float32": 12, "sgd": 0}  # bytes a parameter; None: two of its dtype
BASES = ("checkpoint", "checkpoint-liger")
MARKERS = "osD^vP*"
EVIDENCE = """\
counted: bytes and matmuls of every op, on tensors without memory
measured: nothing here; docs/measurements/figures.md has full tuning on an H200
neither: time, what a library's kernel takes for itself, the allocator's gaps"""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP
    parser.add_argument("config", metavar="CONFIG", help="a config.json of transformers, or a folder with one")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step (default: %(default)s)")
    parser.add_argument(
        "--gpu",
        choices=RATES,
        default="h100",
        help="GPU whose memory and kernels are assumed (default: %(default)s)",
    )
    parser.add_argument("--memory", help="memory of a GPU, such as 80GiB (default: what PyTorch reports for --gpu)")
    parser.add_argument("--layers", default="auto", help="number of layers (default: auto, the configuration's)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the model (default: %(default)s)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train only LoRA adapters of this rank")
    parser.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="linear layers with an adapter, such as q_proj,v_proj "
        '(default: all of the decoder layers, as peft\'s "all-linear")',
    )
    parser.add_argument("--lora-dtype", choices=DTYPES, help="dtype of the adapters (default: float32, as in peft)")
    parser.add_argument(
        "--optimizer",
        choices=STATES,
        default="adamw",
        metavar="NAME",
        help="optimizer states: adamw, two in the parameters' dtype; adamw-8bit, two of 1 byte; adamw-float32, two and a copy "
        "of the parameters of 4 bytes each; sgd, none (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs that shard parameters, gradients and states, as in FSDP (default: 1)"
    )
    parser.add_argument("--workspace", default="1GiB", help="workspace of the bounded variants (default: %(default)s)")
    parser.add_argument(
        "--variants", help=f"variants, separated by commas: {', '.join(VARIANTS)} (default: all but {', '.join(SLOW)})"
    )
    parser.add_argument(
        "--today",
        choices=VARIANTS,
        metavar="VARIANT",
        help="variant to compare with (default: checkpointing, without and with Liger, and the lowest peak)",
    )
    parser.add_argument("--csv", type=Path, help="write a row for each variant to this file")
    parser.add_argument("--picture", type=Path, help="draw matmuls against peak into this file (needs matplotlib)")


class States(NamedTuple):
    """Bytes on each GPU when a step begins."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def all(self) -> int:
        return sum(self)


class Line(NamedTuple):
    """A variant and its step. longest: tokens. is_more: the search ended there, so that longer ones may fit."""

    key: str
    name: str
    peak: int
    saved: int
    flops: float
    longest: int
    is_more: bool

    @property
    def is_ours(self) -> bool:
        return self.key.startswith("ckptkern")


class Estimate(NamedTuple):
    """An estimate and its subject. replaced: (class, its replacement by ckptkern, or why there is none). original: classes
    of modules that run their original forward nevertheless."""

    title: list[str]
    states: States
    memory: int
    lines: list[Line]
    replaced: list[tuple[str, str]]
    original: list[str]
    positions: int | None


def states_of(parameters: Sequence[Tensor], optimizer: str, ranks: int) -> States:
    """Returns the bytes of each rank's shard. A frozen parameter has neither gradient nor optimizer state."""
    own, trained = STATES[optimizer], [p for p in parameters if p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    states = 2 * gradients if own is None else own * sum(p.numel() for p in trained)
    return States(*(math.ceil(nbytes / ranks) for nbytes in (sum(p.nbytes for p in parameters), gradients, states)))


def estimated(args: argparse.Namespace, keys: Sequence[str], memory: int, bound: int) -> Estimate:
    """Counts each variant."""
    config, dtype, lora = read_config(args.config), DTYPES[args.dtype], lora_of(args)
    set_layers(config, args.layers)
    eager = built(config, dtype, "meta", lora)
    first, layers = kinds_of(eager), layers_of(eager)[1]
    states = states_of([*eager.parameters()], args.optimizer, args.ranks)
    ours, replaced = None, []
    if any(VARIANTS[key].is_ours for key in keys):
        told("convert")
        ours = built(config, dtype, "meta", lora)
        rows = convert_like_narrow(ours, lora)
        replaced = list(dict.fromkeys((row.kind, row.replaced_by or f"nothing: {row.reason}") for row in rows))
    lines = []
    for key in keys:
        variant = VARIANTS[key]
        name = variant.named(layers)
        if variant.every > 1 and len(set(first)) > 1:
            told(f"{name}: left out, because the model has layers of several kinds")
            continue
        told(name)
        model, size = ours if variant.is_ours else eager, bound if variant.bounded else default_workspace(args.gpu)
        counted = functools.partial(count_all, model, first, variant, args.batch, size=size)
        step = counted(args.tokens, gpu=args.gpu)
        most, is_more = longest(
            lambda tokens, counted=counted: counted(tokens, gpu=args.gpu).peak,
            args.tokens,
            step.peak,
            memory - states.all,
        )
        # matmuls inside ckptkern's kernels are not seen, but those of PyTorch's ops are the same
        flops = counted(args.tokens).flops if variant.is_ours else step.flops
        lines.append(Line(key, name, int(step.peak), int(step.saved), flops, most, is_more))
    count, trained = (sum(p.numel() for p in eager.parameters() if p.requires_grad >= only) for only in (False, True))
    adapters = f"LoRA of rank {lora.rank} in {str(lora.dtype)[6:]}: {trained / 1e6:.1f} million train" if lora else ""
    title = [
        f"{config.model_type}: {(count - trained if lora else count) / 1e9:.2f} billion parameters, {len(first)} layers",
        *filter(None, [adapters]),
        f"a step of {args.batch} x {args.tokens:,} tokens in {args.dtype} on an {args.gpu.upper()}",
    ]
    original, positions = original_of(ours) if ours else [], getattr(config, "max_position_embeddings", None)
    return Estimate(title, states, memory, lines, replaced, original, positions)


def lora_of(args: argparse.Namespace) -> LoRA | None:
    """Returns the adapters of --lora, or None. Raises ValueError for a rank that is not positive, or their options without
    --lora."""
    if args.lora is None:
        if args.lora_targets or args.lora_dtype:
            raise ValueError("--lora-targets and --lora-dtype go with --lora, the adapters' rank")
        return None
    targets = tuple(args.lora_targets.split(",")) if args.lora_targets else None
    return LoRA(args.lora, DTYPES[args.lora_dtype or "float32"], targets)


def set_layers(config: Any, layers: str) -> None:
    """Sets the number of layers. Raises ValueError for an invalid one."""
    if layers == "auto":
        return
    if not layers.isdigit() or int(layers) < 1:
        raise ValueError(f"--layers: wanted auto or a positive number but got {layers!r}")
    pick_layers(config, [i % config.num_hidden_layers for i in range(int(layers))])


def default_workspace(gpu: str) -> int:
    """Returns the default workspace of a GPU."""
    return RATES[gpu].memory // 32


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compared(estimate: Estimate, today: str | None) -> list[str]:
    """Returns sentences on what ckptkern gains over the variant `today`, or over each of BASES and the lowest peak without
    ckptkern."""
    theirs = {line.key: line for line in estimate.lines if not line.is_ours}
    ours = [line for line in estimate.lines if line.is_ours]
    lowest = min(theirs, key=lambda key: theirs[key].peak, default="")
    bases = [theirs[key] for key in ([today] if today else dict.fromkeys((*BASES, lowest))) if key in theirs]
    told = []
    for base in bases if ours else ():
        told.append(f"over {base.name}, with a peak of {format_size(base.peak)}:")
        for line in ours:
            times = {"peak": line.peak / base.peak, "matmuls": line.flops / base.flops}
            if base.longest and not (line.is_more or base.is_more):
                times["longest"] = line.longest / base.longest
            told.append(f"  {line.name:26} " + ", ".join(f"{figure} x {ratio:.2f}" for figure, ratio in times.items()))
    return told


def show(estimate: Estimate, today: str | None) -> None:
    states = estimate.states
    parts = ", ".join(f"{name} {format_size(value)}" for name, value in states._asdict().items())
    before = f"{format_size(states.all)} of {format_size(estimate.memory)} before the step"
    table = [("", "peak", "all", "saved", "PFLOP", "longest")]
    for line in estimate.lines:
        sizes = map(format_size, (line.peak, line.peak + states.all, line.saved))
        more = "> " if line.is_more else ""
        table.append(
            (line.name, *sizes, f"{line.flops / 1e15:.3f}", f"{more}{line.longest:,}" if line.longest else "none")
        )
    names, *numbers = zip(*table, strict=True)
    columns = [names, *([cell.rjust(max(map(len, cells))) for cell in cells] for cells in numbers)]
    lines = [
        *estimate.title,
        f"each GPU: {parts}",
        before,
        "",
        *aligned(list(zip(*columns, strict=True))),
        "",
        *compared(estimate, today),
        "",
    ]
    lines += [f"ckptkern replaces {kind} by {by}" for kind, by in estimate.replaced]
    lines += [f"{kind} runs its original forward, unfused" for kind in estimate.original]
    if hint := estimate.replaced and missing("triton"):
        lines.append(f"ckptkern's ops allocate as with PyTorch's ops, not as their kernels: {hint}")
    if estimate.positions and any(line.longest > estimate.positions for line in estimate.lines):
        lines.append(f"the configuration has {estimate.positions:,} positions: longer sequences need another one")
    print("\n".join([*lines, "", EVIDENCE]))


def draw(estimate: Estimate, path: Path) -> None:
    """Draws matmuls against peak; below and left is better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes, markers = figure.subplots(), {True: iter(MARKERS), False: iter(MARKERS)}
    for line in estimate.lines:
        colour, marker = "#0b6e7f" if line.is_ours else "#e08214", next(markers[line.is_ours])
        axes.plot(line.peak / 2**30, line.flops / 1e15, marker, color=colour, ms=9, linestyle="none", label=line.name)
    axes.set(xlabel="peak of a step, GiB", ylabel="matmuls of a step, PFLOP", xscale="log")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_title("\n".join(estimate.title), loc="left", fontsize=9)
    axes.margins(x=0.1, y=0.15)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main(args: argparse.Namespace) -> int:
    try:
        if args.picture and (hint := missing("matplotlib")):
            raise ValueError(hint)
        keys = args.variants.split(",") if args.variants else [key for key in VARIANTS if key not in SLOW]
        if unknown := [key for key in keys if key not in VARIANTS]:
            raise ValueError(f"--variants: unknown {', '.join(unknown)}; choose from {', '.join(VARIANTS)}")
        for name in ("tokens", "batch", "ranks", "lora"):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(f"--{name}: wanted a positive number but got {getattr(args, name)}")
        estimate = estimated(
            args, keys, size_of("memory", args.memory, RATES[args.gpu].memory), size_of("workspace", args.workspace, 0)
        )
    except ValueError as error:
        print(f"ckptkern estimate: {error}", file=sys.stderr)
        return 2
    show(estimate, args.today)
    if args.csv:
        states = {f"{name}_bytes": value for name, value in estimate.states._asdict().items()}
        write_rows(args.csv, (line._asdict() | states for line in estimate.lines))
    if args.picture:
        draw(estimate, args.picture)
    return 0


def size_of(option: str, text: str | None, default: int) -> int:
    size = default if text is None else parse_size(text)
    if size is None:
        raise ValueError(f"--{option}: wanted a size such as 80GiB but got {text}")
    return size
