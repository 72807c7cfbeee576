"""``python -m ckptkern demo``: one byte-level GPT trained three ways side by side, from one seed, on the same batches.

- ``torch``: plain PyTorch layers;
- ``torch.utils.checkpoint``: the same, every block inside a non-reentrant checkpoint;
- ``ckptkern``: the same, every block as one segment, ``ckptkern.transformer_layer``.

The text is the source code of Python's standard library, which every machine that runs this has. Whole top-level
modules and packages are held out, so near-identical siblings (the code pages in ``encodings``) are never on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import ops
from .env import collect as collect_environment
from .memory import kept_tensors, peak_memory

if TYPE_CHECKING:
    from rich.console import Console

WAYS = ("torch", "torch.utils.checkpoint", "ckptkern")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRESETS = {
    "cpu": {
        "steps": 600,
        "batch_size": 8,
        "seq_len": 128,
        "layers": 4,
        "d_model": 128,
        "heads": 4,
        "lr": 3e-3,
        "dtype": "fp32",
    },
    "cuda": {
        "steps": 600,
        "batch_size": 16,
        "seq_len": 1024,
        "layers": 12,
        "d_model": 1024,
        "heads": 16,
        "lr": 6e-4,
        "dtype": "bf16",
    },
}
AGREEMENT = 1e-3  # largest relative difference between two loss curves that differ only in rounding
MIB = 1 << 20
VOCABULARY = 256
EVALUATIONS = 8  # held-out points on a curve


@dataclass(frozen=True)
class Config:
    """What one run trains; raises ValueError where the numbers do not go together."""

    device: str
    dtype: str
    steps: int
    batch_size: int
    seq_len: int
    layers: int
    d_model: int
    heads: int
    lr: float
    dropout: float
    activation: str
    recompute: str
    seed: int
    ways: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "layers", "d_model", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}: wanted at least 1 but got {getattr(self, name)}")
        if self.d_model % self.heads:
            raise ValueError(f"--d-model: wanted a multiple of --heads {self.heads} but got {self.d_model}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"--dropout: wanted a probability in [0, 1) but got {self.dropout}")
        if not self.lr > 0.0:
            raise ValueError(f"--lr: wanted a positive learning rate but got {self.lr}")
        if len(set(self.ways)) != len(self.ways):
            raise ValueError(f"--ways: wanted each way once but got {' '.join(self.ways)}")


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, uint8 [n] each, with the files they came from."""

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def is_held_out(path: str) -> bool:
    """Whether a file (relative, '/'-separated) is held out: decided by its top-level name, about one in ten."""
    group = path.split("/")[0].removesuffix(".py")
    return hashlib.sha256(group.encode()).digest()[0] < 26


def load_corpus(root: Path | None = None, max_bytes: int = 16 * MIB) -> Corpus:
    """Reads the ``.py`` files below root (default: the standard library) in sorted order, up to max_bytes in all.

    Installed packages, tests, unreadable files and files that repeat an earlier one byte for byte are left out.
    Raises FileNotFoundError if there is no source text to train on.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    files: dict[bool, list[str]] = {False: [], True: []}
    seen: set[bytes] = set()
    total = 0
    for path in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skip.intersection(path.split("/")):
            continue
        try:
            text = (root / path).read_bytes()
        except OSError:
            continue
        digest = hashlib.sha256(text).digest()
        if not text or digest in seen:
            continue
        if total + len(text) > max_bytes:
            break
        seen.add(digest)
        total += len(text)
        texts[is_held_out(path)].append(text)
        files[is_held_out(path)].append(path)
    if not texts[False] or not texts[True]:
        raise FileNotFoundError(f"demo: wanted Python source files below {root} but found {total} bytes of them")
    train, held_out = (torch.frombuffer(bytearray(b"".join(texts[part])), dtype=torch.uint8) for part in (False, True))
    return Corpus(train, held_out, tuple(files[False]), tuple(files[True]))


def windows(text: Tensor, starts: Tensor, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The windows of text that begin at starts [B]: inputs and next bytes, int64 [B, seq_len] each, on device."""
    rows = text[starts[:, None] + torch.arange(seq_len + 1)].to(device=device, dtype=torch.int64)
    return rows[:, :-1], rows[:, 1:]


def training_batches(config: Config, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """One batch a step, drawn from the seed alone: every way trains on the same ones."""
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(len(text) - config.seq_len, (config.batch_size,), generator=generator)
        yield windows(text, starts, config.seq_len, torch.device(config.device))


def held_out_batches(config: Config, text: Tensor, batches: int = 8) -> list[tuple[Tensor, Tensor]]:
    """The same evenly spaced windows every time."""
    starts = torch.linspace(0, len(text) - config.seq_len - 1, batches * config.batch_size, dtype=torch.float64).long()
    return [windows(text, part, config.seq_len, torch.device(config.device)) for part in starts.chunk(batches)]


class PlainMLP(nn.Module):
    """fc2(dropout(activation(fc1(x)))) in plain torch layers, with the parameter names of ``ckptkern.nn.MLP``."""

    def __init__(self, d_model: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, 4 * d_model)
        self.fc2 = nn.Linear(4 * d_model, d_model)
        self.activation = ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class Attention(nn.Module):
    """Causal self-attention in plain torch layers. x [B, S, D] -> [B, S, D]."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.d_model
        self.norm1 = nn.LayerNorm(d)
        self.attention = Attention(d, config.heads)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = PlainMLP(d, config.activation, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class SegmentBlock(Block):
    """The same block, the same parameters, as one segment of ckptkern."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recompute, self.activation = config.recompute, config.activation

    def forward(self, x: Tensor) -> Tensor:
        qkv, out, fc1, fc2 = self.attention.qkv, self.attention.out, self.mlp.fc1, self.mlp.fc2
        attention = {
            "qkv_weight": qkv.weight, "qkv_bias": qkv.bias, "out_weight": out.weight, "out_bias": out.bias,
            "num_heads": self.attention.heads, "is_causal": True, "norm": "layer", "norm_weight": self.norm1.weight,
            "norm_bias": self.norm1.bias, "norm_eps": self.norm1.eps, "resid_dropout_p": self.dropout.p,
        }  # fmt: skip
        mlp = {
            "up_weight": fc1.weight, "up_bias": fc1.bias, "down_weight": fc2.weight, "down_bias": fc2.bias,
            "activation": self.activation, "dropout_p": self.dropout.p, "norm": "layer",
            "norm_weight": self.norm2.weight, "norm_bias": self.norm2.bias, "norm_eps": self.norm2.eps,
        }  # fmt: skip
        return ops.transformer_layer(x, attention, mlp, training=self.training, recompute=self.recompute)


class GPT(nn.Module):
    """A byte-level GPT: int64 [B, S] -> logits [B, S, 256]. ``way`` chooses the layers, never the ``state_dict``."""

    def __init__(self, config: Config, way: str) -> None:
        super().__init__()
        self.way = way
        self.token = nn.Embedding(VOCABULARY, config.d_model)
        self.position = nn.Embedding(config.seq_len, config.d_model)
        block = SegmentBlock if way == "ckptkern" else Block
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)
        for block in self.blocks:  # GPT-2: what is added to the residual stream starts smaller with depth
            for linear in (block.attention.out, block.mlp.fc2):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.way == "torch.utils.checkpoint" and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


@dataclass
class Run:
    """One way's model, its optimizer, and what was measured of it. Bytes are -1 until measured."""

    way: str
    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    kept_bytes: int = -1
    peak_bytes: int = -1


def start_runs(config: Config) -> list[Run]:
    """One run per way; all start from the same weights."""

    def lr_factor(step: int) -> float:
        warmup = max(1, config.steps // 20)
        progress = (step - warmup) / max(1, config.steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    runs = []
    for way in config.ways:
        torch.manual_seed(config.seed)
        model = GPT(config, way)
        if runs:
            model.load_state_dict(runs[0].model.state_dict())
        model.to(config.device)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
        scaler = torch.amp.GradScaler(config.device, enabled=config.dtype == "fp16")
        runs.append(Run(way, model, optimizer, schedule, scaler))
    return runs


def loss_of(config: Config, model: GPT, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy in nats per byte, under autocast unless the run is in fp32."""
    tokens, targets = batch
    with torch.autocast(config.device, dtype=DTYPES[config.dtype], enabled=config.dtype != "fp32"):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def synchronize(config: Config) -> None:
    if config.device == "cuda":
        torch.cuda.synchronize()


def train_step(config: Config, run: Run, batch: tuple[Tensor, Tensor], step: int, measure: bool) -> None:
    """Forward, backward and optimizer; appends loss and milliseconds, or with measure also counts bytes."""
    torch.manual_seed(config.seed + 1 + step)  # the two torch ways draw the same dropout masks
    synchronize(config)
    begin = time.perf_counter()
    if measure:
        with peak_memory(config.device) as peak:
            with kept_tensors(exclude=run.model.parameters()) as kept:
                loss = loss_of(config, run.model, batch)
            run.scaler.scale(loss).backward()
        run.kept_bytes, run.peak_bytes = kept.bytes, peak.bytes
    else:
        loss = loss_of(config, run.model, batch)
        run.scaler.scale(loss).backward()
    run.scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    run.schedule.step()
    run.losses.append(loss.item())
    synchronize(config)
    run.milliseconds.append(1000.0 * (time.perf_counter() - begin))


@torch.no_grad()
def evaluate(config: Config, run: Run, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Mean held-out loss, without dropout."""
    run.model.eval()
    losses = [loss_of(config, run.model, batch).item() for batch in batches]
    run.model.train()
    return statistics.fmean(losses)


def measured_step(config: Config) -> int:
    """The step whose bytes are counted: the third, when optimizer state and library workspaces are allocated."""
    return min(2, config.steps - 1)


@contextlib.contextmanager
def cpu_threads(threads: int | None, config: Config) -> Iterator[int]:
    """Runs the block with so many CPU threads; None: as many as make the first half of an MLP of this run quickest.

    That is fewer than the machine shows where other programs or a container's quota leave less of it: OpenMP threads
    spin while they wait for one that is not running, and two on a busy core were 20 times slower than one.
    """
    outer = torch.get_num_threads()
    try:
        if threads is None and config.device == "cpu":
            x = torch.randn(config.batch_size * config.seq_len, config.d_model)
            weight = torch.randn(4 * config.d_model, config.d_model)
            candidates = [outer >> shift for shift in range(outer.bit_length())]
            seconds = dict.fromkeys(candidates, 0.0)
            for _ in range(8):
                for count in candidates:
                    torch.set_num_threads(count)
                    F.gelu(F.linear(x, weight))  # wakes the threads
                    begin = time.perf_counter()
                    for _ in range(8):
                        F.gelu(F.linear(x, weight))
                    seconds[count] += time.perf_counter() - begin
            threads = min(candidates, key=seconds.__getitem__)
        torch.set_num_threads(threads or outer)
        yield threads or outer
    finally:
        torch.set_num_threads(outer)


def train(config: Config, corpus: Corpus, console: Console) -> list[Run]:
    """Trains all ways step by step in turn, the order rotating, so that slow moments of the machine hit all alike."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    runs = start_runs(config)
    held_out = held_out_batches(config, corpus.held_out)
    every = max(1, config.steps // EVALUATIONS)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )
    with progress:
        task = progress.add_task("loss", total=config.steps)
        for step, batch in enumerate(training_batches(config, corpus.train)):
            for turn in range(len(runs)):
                run = runs[(step + turn) % len(runs)]
                train_step(config, run, batch, step, measure=step == measured_step(config))
            losses = "  ".join(f"{short(run.way)} {run.losses[-1]:.3f}" for run in runs)
            progress.update(task, advance=1, description=f"loss  {losses}")
            if (step + 1) % every == 0 or step + 1 == config.steps:
                for run in runs:
                    run.held_out[step + 1] = evaluate(config, run, held_out)
                if not console.is_terminal:
                    console.print(f"step {step + 1:4d} of {config.steps}   loss  {losses}")
    return runs


@dataclass(frozen=True)
class Summary:
    """One row of the final table. Losses in nats per byte, bytes of one forward and backward."""

    way: str
    train_loss: float
    held_out_loss: float
    kept_mib: float
    peak_mib: float
    ms_per_step: float
    ratio: float


@dataclass(frozen=True)
class Agreement:
    """Largest relative difference between two loss curves, and whether it has a limit."""

    first: str
    other: str
    difference: float
    limited: bool

    @property
    def failed(self) -> bool:
        return self.limited and not self.difference <= AGREEMENT  # a NaN fails


def short(way: str) -> str:
    return way.rpartition(".")[2]


def tail_steps(config: Config) -> int:
    """How many last steps the final training loss is the mean of."""
    return max(1, min(20, config.steps // 5))


def summarize(config: Config, runs: list[Run]) -> list[Summary]:
    """A row per way; the ratio is to the first way. The steps up to the measured one are warm-up and not timed."""
    warmup = measured_step(config) + 1
    medians = [statistics.median(run.milliseconds[warmup:] or run.milliseconds) for run in runs]
    return [
        Summary(
            run.way,
            statistics.fmean(run.losses[-tail_steps(config) :]),
            run.held_out[config.steps],
            run.kept_bytes / MIB,
            run.peak_bytes / MIB,
            median,
            median / medians[0],
        )
        for run, median in zip(runs, medians, strict=True)
    ]


def relative_differences(first: Run, other: Run) -> list[float]:
    """|loss - first's loss| / first's loss, step by step."""
    return [abs(b - a) / abs(a) for a, b in zip(first.losses, other.losses, strict=True)]


def agreements(config: Config, runs: list[Run]) -> list[Agreement]:
    """Every way against the first. Only rounding separates them, except where dropout masks differ.

    The limit holds in fp32 on the CPU; lower precisions and other devices sum in other orders, and training amplifies
    that. With dropout torch's masks and ckptkern's come from different streams, so those two are two samples.
    """
    exact = config.device == "cpu" and config.dtype == "fp32"
    result = []
    for other in runs[1:]:
        differences = relative_differences(runs[0], other)
        largest = math.nan if any(map(math.isnan, differences)) else max(differences)
        same_masks = config.dropout == 0.0 or "ckptkern" not in (runs[0].way, other.way)
        result.append(Agreement(runs[0].way, other.way, largest, limited=exact and same_masks))
    return result


def print_summary(config: Config, summaries: list[Summary], agreed: list[Agreement], console: Console) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"byte-level GPT, {config.layers} layers of width {config.d_model}, {config.steps} steps",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("way", vertical="bottom")
    for heading in ("train\nloss", "held-out\nloss", "kept\nMiB", "peak\nMiB", "ms per\nstep", "ratio"):
        table.add_column(heading, justify="right", vertical="bottom")
    for row in summaries:
        table.add_row(
            row.way,
            f"{row.train_loss:.4f}",
            f"{row.held_out_loss:.4f}",
            f"{row.kept_mib:.1f}",
            f"{row.peak_mib:.1f}",
            f"{row.ms_per_step:.1f}",
            f"{row.ratio:.2f}",
        )
    console.print(table)
    console.print(
        f"Losses in nats per byte, the training loss over the last {tail_steps(config)} steps. Kept: what forward "
        "keeps for backward. Peak: of forward and backward, above what was allocated before."
    )
    for one in agreed:
        apart = f"at most {one.difference:.2g} apart, relatively" if one.difference else "equal bit for bit"
        if one.limited:
            verdict = f"{'more than' if one.failed else 'within'} the limit of {AGREEMENT:g}"
        elif config.dropout > 0.0:
            verdict = "no limit: their dropout masks come from different random streams"
        else:
            verdict = "no limit: only fp32 on a CPU has one"
        console.print(f"Loss of {one.other} against {one.first}: {apart} ({verdict}).")


def write_results(
    config: Config, corpus: Corpus, runs: list[Run], summaries: list[Summary], agreed: list[Agreement], out: Path
) -> None:
    """``losses.csv``, one line per step and way, and ``results.json``: settings, environment, table, differences."""
    with (out / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "way", "loss", "held_out_loss", "ms"))
        for step, run in itertools.product(range(config.steps), runs):
            writer.writerow(
                (
                    step + 1,
                    run.way,
                    repr(run.losses[step]),
                    repr(run.held_out[step + 1]) if step + 1 in run.held_out else "",
                    f"{run.milliseconds[step]:.3f}",
                )
            )
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(config),
        "text": {
            "train_bytes": len(corpus.train),
            "train_files": len(corpus.train_files),
            "held_out_bytes": len(corpus.held_out),
            "held_out_files": len(corpus.held_out_files),
        },
        "table": [dataclasses.asdict(row) for row in summaries],
        "agreement": [dataclasses.asdict(one) for one in agreed],
        "environment": collect_environment(),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")


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
        "--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)"
    )
    run.add_argument("--dtype", choices=tuple(DTYPES), help=f"of autocast; weights stay fp32 {default('dtype')}")
    run.add_argument("--steps", type=int, help=default("steps"))
    run.add_argument("--batch-size", type=int, help=f"sequences a step {default('batch_size')}")
    run.add_argument("--seq-len", type=int, help=f"bytes a sequence {default('seq_len')}")
    run.add_argument("--lr", type=float, help=f"peak learning rate {default('lr')}")
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
    model.add_argument("--activation", choices=tuple(ACTIVATIONS), default="gelu", help="of the MLP (default: gelu)")
    model.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="after attention and inside the MLP; ckptkern replays its masks from 16 bytes each (default: 0)",
    )
    model.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="full",
        help="what ckptkern's blocks recompute in backward (default: full, they keep their input only)",
    )


def config_of(args: argparse.Namespace) -> Config:
    """The parsed arguments, with the device's defaults filled in. Raises ValueError where they do not go together."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: wanted cuda but torch sees no CUDA device")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads: wanted at least 1 but got {args.threads}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    given = {name: getattr(args, name) for name in PRESETS[device] if getattr(args, name) is not None}
    return Config(
        device=device,
        dropout=args.dropout,
        activation=args.activation,
        recompute=args.recompute,
        seed=args.seed,
        ways=tuple(args.ways),
        **(PRESETS[device] | given),
    )


def main(args: argparse.Namespace) -> int:
    """Runs the demo; 0 if the loss curves agree where they must, 1 if not, 2 for arguments that make no sense."""
    from rich.console import Console

    from .demo_figure import draw_figure

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
        f"One byte-level GPT trained {len(runs)} ways from one seed: {config.layers} layers, width {config.d_model}, "
        f"{config.batch_size} × {config.seq_len} bytes a step, {config.dtype} on {config.device}"
        + (f", dropout {config.dropout:g}" if config.dropout else ""),
        runs,
        summaries,
        {other.way: relative_differences(runs[0], other) for other in runs[1:]},
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
