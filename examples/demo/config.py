"""The demo's variants, and its options with their defaults for a CPU and a GPU."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NamedTuple

import torch

from ckptkern import eager
from ckptkern.memory import parse_size


class Variant(NamedTuple):
    """A way to train the model. label: what tables and pictures call it, with options of the run. convert: the options that
    ckptkern.convert takes; None: it is not called."""

    label: str
    color: str
    checkpoints: bool = False  # of every block
    loss_chunks: int = 1  # of tokens, each in a checkpoint
    convert: tuple[str, ...] | None = None

    @property
    def ours(self) -> bool:
        return self.convert is not None


VARIANTS = {
    "eager": Variant("eager", "#a9b4c0"),
    "checkpointing": Variant("gradient checkpointing", "#e38b2c", checkpoints=True),
    "chunked": Variant("checkpointing, chunked loss", "#9c5a11", checkpoints=True, loss_chunks=16),
    "convert": Variant("ckptkern", "#0b6e7f", convert=()),
    "bounded": Variant('ckptkern, "{recompute}", {workspace}', "#6a3d9a", convert=("recompute", "workspace")),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Preset(NamedTuple):
    """An option's defaults on a CPU and a GPU, what --quick and, on a CPU, --full set instead (None: the
    device's), and its help."""

    cpu: int | float | str
    cuda: int | float | str
    quick: int | None
    help: str
    full: int | None = None


PRESETS = {
    "steps": Preset(10, 100, 6, "of training", full=30),
    "batch_size": Preset(2, 4, 1, "sequences a step"),
    "seq_len": Preset(2048, 4096, 1024, "tokens a sequence"),
    "vocabulary": Preset(8192, 32768, 2048, "tokens that text is made of, the 256 bytes included"),
    "text_mib": Preset(4, 16, 1, "MiB of text"),
    "layers": Preset(8, 12, 4, "blocks"),
    "d_model": Preset(128, 1024, None, "width"),
    "heads": Preset(4, 16, None, "attention heads"),
    "lr": Preset(1e-3, 6e-4, None, "peak learning rate, with --experts a third"),
    "dtype": Preset("fp32", "bf16", None, "of autocast; weights stay fp32"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options of ``python -m ckptkern demo``."""
    parser.description = (
        "Train a GPT on Python's standard library five ways side by side: the loss, the memory over a step, the time."
    )
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="a small model and few steps: less than a minute")
    length.add_argument(
        "--full", action="store_true", help="as many steps as the documentation's picture: four minutes on a CPU"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if there is one)")
    names = ", ".join(VARIANTS)
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[*VARIANTS],
        metavar="VARIANT",
        help=f"of {names} (default: all)",
    )
    for name, preset in PRESETS.items():
        add(
            f"--{name.replace('_', '-')}",
            type=type(preset.cpu),
            choices=DTYPES if name == "dtype" else None,
            help=f"{preset.help} (default: {preset.cpu} on a CPU, {preset.cuda} on a GPU)",
        )
    add("--threads", type=int, default=0, help="of the CPU (default: 0, what a short trial finds quickest)")
    add("--seed", type=int, default=0, help="of weights, batches and dropout (default: 0)")
    add("--out", type=Path, default=Path("demo_output"), help="folder for the results (default: demo_output)")
    experts = "a mixture of so many gated MLPs in place of each block's MLP, with a router and its load-balancing loss"
    add("--experts", type=int, default=0, help=f"{experts} (default: 0, a plain MLP)")
    add("--top-k", type=int, help="experts that a token goes through (default: 2)")
    activations = ", ".join(eager.ACTIVATIONS)
    add(
        "--activation",
        choices=eager.ACTIVATIONS,
        metavar="NAME",
        help=f"of {activations} (default: gelu, of experts silu)",
    )
    dropout = "after attention and inside the MLP, or after experts; ckptkern replays its masks from 16 bytes each"
    add("--dropout", type=float, default=0.0, help=f"{dropout} (default: 0)")
    recompute = "what the variant bounded recomputes in backward"
    add(
        "--recompute",
        choices=("none", "selective", "full"),
        default="full",
        help=f"{recompute} (default: full, its layers save their input only)",
    )
    add("--workspace", default="4MiB", help="transient memory of each layer of it (default: 4MiB)")


def settle(config: Namespace) -> None:
    """Fills in the device's defaults. Raises ValueError for invalid or inconsistent options."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: wanted cuda but torch sees no CUDA device")
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = {
        name: (config.quick and preset.quick)
        or (config.full and config.device == "cpu" and preset.full)
        or getattr(preset, config.device)
        for name, preset in PRESETS.items()
    }
    defaults |= {"top_k": 2, "activation": "silu"} if config.experts else {"top_k": 0, "activation": "gelu"}
    if config.experts:
        defaults["lr"] /= 3  # at more, an MoE's first steps amplify a rounding a thousandfold
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    least = {name: 1 for name, preset in PRESETS.items() if isinstance(preset.cpu, int)}
    least |= {"vocabulary": 256, "experts": 0, "threads": 0}
    heads, experts, width = config.heads, config.experts, config.d_model
    checks = [(name, f"at least {n}", getattr(config, name) >= n) for name, n in least.items()] + [
        ("d_model", f"a multiple of --heads {heads}", width % max(1, heads) == 0),
        ("d_model", "a multiple of 8, as torch's grouped_mm does,", not experts or width % 8 == 0),
        ("top_k", f"from 1 to all {experts} --experts", min(1, experts) <= config.top_k <= experts),
        ("dropout", "a probability in [0, 1)", 0.0 <= config.dropout < 1.0),
        ("lr", "a positive learning rate", config.lr > 0.0),
        ("workspace", 'a size like "4MiB"', parse_size(config.workspace)),
        ("variants", "each variant once", len({*config.variants}) == len(config.variants)),
    ]
    for name, wanted, right in checks:
        if not right:
            raise ValueError(f"--{name.replace('_', '-')}: wanted {wanted} but got {getattr(config, name)}")


def label(config: Namespace, variant: str) -> str:
    """Returns a variant's name in tables and figures."""
    return VARIANTS[variant].label.format(**vars(config))


def title(config: Namespace) -> str:
    """Returns one line that describes the run."""
    experts = f" of {config.experts} experts, {config.top_k} a token" if config.experts else ""
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    return (
        f"GPT{experts}: {config.layers} layers of width {config.d_model}, {config.vocabulary:,} tokens of vocabulary, "
        f"{config.batch_size} × {config.seq_len} a step, {config.steps} steps, {config.dtype} on {config.device}{dropout}"
    )
