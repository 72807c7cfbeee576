"""The demo's runs, trained side by side step by step, with their memory over a step and their times."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptkern.memory import Timeline, memory_timeline, saved_tensors

from .config import DTYPES, Config
from .data import batches
from .model import GPT, build
from .moe import MoE

if TYPE_CHECKING:
    from rich.console import Console

BALANCE = 0.01  # weight of the routers' imbalance, as in Switch Transformer
PRINTED = 8  # lines of progress where there is no terminal


@dataclass
class Run:
    """One variant's model, its optimizer, and what was measured of it: the loss and time of each step, and of one step the
    bytes that forward saves for backward and the memory over time."""

    variant: str
    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    saved_bytes: int = -1
    timeline: Timeline = field(default_factory=Timeline)


def start_runs(config: Config) -> list[Run]:
    """One run per variant; all start from the same weights, with their gradients allocated."""

    def lr_factor(step: int) -> float:
        warmup = max(1, config.steps // 20)
        progress = (step - warmup) / max(1, config.steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    runs: list[Run] = []
    for variant in config.variants:
        model = build(config, variant)
        if runs:
            model.load_state_dict(runs[0].model.state_dict())
            for one, first in zip(moe_layers(model), moe_layers(runs[0].model), strict=True):
                one.choice = first.choice
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
        scaler = torch.amp.GradScaler(config.device, enabled=config.dtype == "fp16")
        runs.append(Run(variant, model, optimizer, schedule, scaler))
    return runs


def moe_layers(model: GPT) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def losses_of(config: Config, model: GPT, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy in nats a token, what is minimised: that and a part of the routers' imbalance), under autocast
    unless the run is in fp32."""
    with torch.autocast(config.device, dtype=DTYPES[config.dtype], enabled=config.dtype != "fp32"):
        nats, imbalance = model(*batch)
    return nats, nats + BALANCE * imbalance


def synchronize(config: Config) -> None:
    if config.device == "cuda":
        torch.cuda.synchronize()


def train_step(config: Config, run: Run, batch: tuple[Tensor, Tensor], step: int, measure: bool) -> None:
    """Forward, backward and optimizer; appends loss and milliseconds, or with measure also counts bytes.

    Gradients stay allocated from step to step, so what is measured is activations and transient memory.
    """
    torch.manual_seed(config.seed + 1 + step)  # the variants in torch's own layers sample the same dropout masks
    synchronize(config)
    begin = time.perf_counter()
    if measure:
        with memory_timeline(config.device) as run.timeline:
            with saved_tensors(exclude=run.model.parameters()) as saved:
                loss, total = losses_of(config, run.model, batch)
            run.timeline.mark("backward")
            run.scaler.scale(total).backward()
        run.saved_bytes = saved.bytes
    else:
        loss, total = losses_of(config, run.model, batch)
        run.scaler.scale(total).backward()
    run.scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=False)
    run.schedule.step()
    run.losses.append(loss.item())
    synchronize(config)
    run.milliseconds.append(1000.0 * (time.perf_counter() - begin))


def measured_step(config: Config) -> int:
    """The step whose bytes are counted: the third, because optimizer state and library workspaces exist by then."""
    return min(2, config.steps - 1)


@contextlib.contextmanager
def cpu_threads(threads: int | None, config: Config) -> Iterator[int]:
    """Runs the block with this many CPU threads; None: as many as make the first half of an MLP of this run quickest.

    That may be fewer than the machine shows, if other programs or a container's quota take some: OpenMP threads spin
    while they wait for one that is not running, and two on a busy core were 20 times slower than one.
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


def train(config: Config, ids: Tensor, console: Console) -> list[Run]:
    """Trains all variants step by step, in rotating order, so that slow moments of the machine hit all alike."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    runs = start_runs(config)
    every = max(1, config.steps // PRINTED)
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
        for step, batch in enumerate(batches(config, ids)):
            for one in moe_layers(runs[0].model):
                one.choice.clear()
            for turn in range(len(runs)):
                run = runs[(step + turn) % len(runs)]
                train_step(config, run, batch, step, measure=step == measured_step(config))
            losses = [run.losses[-1] for run in runs]
            text = f"loss {losses[0]:.3f}, all within {max(losses) - min(losses):.1g}"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal and ((step + 1) % every == 0 or step + 1 == config.steps):
                console.print(f"step {step + 1:4d} of {config.steps}   {text}")
    return runs
