"""The demo's runs, trained side by side step by step, with their memory over a step and their times."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ckptkern.extras import progress
from ckptkern.memory import Timeline, memory_timeline, saved_tensors

from .config import DTYPES
from .data import batches
from .model import GPT, MoE, build

BALANCE = 0.01  # weight of the routers' imbalance, as in Switch Transformer
PRINTED = 10  # lines on the way


@dataclass
class Run:
    """A variant's model, what trains it, the loss and time of each step, and of one step the bytes that forward saves for
    backward and the memory over time."""

    variant: str
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    saved_bytes: int = -1
    timeline: Timeline = field(default_factory=Timeline)


def start_runs(config: Namespace) -> list[Run]:
    """Returns a run per variant; all start from the same weights, with their gradients allocated."""
    runs: list[Run] = []
    for variant in config.variants:
        model = build(config, variant)
        if runs:
            for layer, first in zip(moe_layers(model), moe_layers(runs[0].model), strict=True):
                layer.choice = first.choice
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        scaler = torch.amp.GradScaler(config.device, enabled=config.dtype == "fp16")
        runs.append(Run(variant, model, optimizer, scaler))
    return runs


def moe_layers(model: GPT) -> list[MoE]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, MoE)]


def train_step(config: Namespace, run: Run, batch: tuple[Tensor, Tensor], step: int) -> None:
    """Runs forward, backward and the optimizer; appends loss and milliseconds, and counts the bytes of the step to measure.

    Gradients stay allocated from step to step, so what is measured is activations and transient memory.
    """
    torch.manual_seed(config.seed + 1 + step)  # the variants in torch's own layers sample the same dropout masks
    measure, dtype = step == measured_step(config), DTYPES[config.dtype]
    begin = time.perf_counter()
    with memory_timeline(config.device) if measure else contextlib.nullcontext(run.timeline) as run.timeline:
        with (
            saved_tensors(exclude=run.model.parameters()) if measure else contextlib.nullcontext() as saved,
            torch.autocast(config.device, dtype=dtype, enabled=dtype != torch.float32),
        ):
            nats, imbalance = run.model(*batch)
        if measure:
            run.timeline.mark("backward")
            run.saved_bytes = saved.bytes
        run.scaler.scale(nats + BALANCE * imbalance).backward()
    run.scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=False)
    run.losses.append(nats.item())  # waits for all that was launched on a GPU
    run.milliseconds.append(1000.0 * (time.perf_counter() - begin))


def measured_step(config: Namespace) -> int:
    """Returns the step whose bytes are counted: the third, because optimizer state and library workspaces exist by then."""
    return min(2, config.steps - 1)


@contextlib.contextmanager
def cpu_threads(config: Namespace) -> Iterator[int]:
    """Runs the block with --threads CPU threads, by default as many as make the first half of an MLP of this run quickest.

    That may be fewer than the machine shows, if other programs or a container's quota take some: OpenMP threads spin
    while they wait for one that is not running, and two on a busy core were 20 times slower than one.
    """
    outer = torch.get_num_threads()
    x = torch.randn(config.batch_size * config.seq_len, config.d_model)
    names = {"F": F, "x": x, "w": torch.randn(4 * config.d_model, config.d_model)}

    def seconds(threads: int) -> float:
        timer = Timer("F.gelu(F.linear(x, w))", timer=time.perf_counter, globals=names, num_threads=threads)
        return timer.timeit(64).mean

    threads = config.threads or outer
    if not config.threads and config.device == "cpu":
        threads = min((outer >> shift for shift in range(outer.bit_length())), key=seconds)
    try:
        torch.set_num_threads(threads)
        yield threads
    finally:
        torch.set_num_threads(outer)


def train(config: Namespace, ids: Tensor) -> list[Run]:
    """Trains all variants step by step, in rotating order, so that slow moments of the machine hit all alike."""
    print(f"Training {config.steps} steps in {len(config.variants)} variants.", flush=True)
    runs, every, begin = start_runs(config), max(1, config.steps // PRINTED), time.monotonic()
    with progress("demo", config.steps) as shown:
        for step, batch in enumerate(batches(config, ids)):
            for layer in moe_layers(runs[0].model):
                layer.choice.clear()
            for turn in range(len(runs)):
                train_step(config, runs[(step + turn) % len(runs)], batch, step)
            losses = [run.losses[-1] for run in runs]
            text = f"loss {losses[0]:.3f}, all within {max(losses) - min(losses):.1g}"
            shown(text, step + 1)
            if (step + 1) % every == 0 or step + 1 == config.steps:
                left = (time.monotonic() - begin) / (step + 1) * (config.steps - step - 1)
                print(f"step {step + 1:4d} of {config.steps}   {text}   {left:.0f} s left", flush=True)
    return runs
