"""Defines a benchmark case: a model in PyTorch, ckptkern's on the same parameters, and the variants in which it is measured.

A variant is a name and a maker `(model, x) -> function`; the function computes y from x with the model's own parameters. So all
variants share the model's weights, and are checked against one float64 copy.

Models with dropout are checked without it and timed with it, because every variant samples its own masks. tests/ checks the
masks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..conversion.protection import seeded, unmoved
from ..memory import format_size, parse_size
from .baselines import Function, Maker

MODES = ("none", "selective", "full")
BY_SUBLAYER = ("none/selective", "selective/selective", "selective/full")  # further modes of a layer
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
HEADLINE = 1  # the last priority of the first figures: each op, and the most important at d = 1024 and 4096


class Figure(NamedTuple):
    """A published figure of a case. variant: with the GPU. source: with what was measured. peak, saved: in bytes."""

    variant: str
    source: str
    ms: float | None = None
    peak: float | None = None
    saved: float | None = None
    note: str = ""


def ours(model: nn.Module, mode: str) -> Function:
    """Returns a model of `models` by ckptkern."""
    return functools.partial(model.ours, mode=mode)


@dataclass(frozen=True)
class Case:
    """A benchmark case.

    make     (device, dtype or None) -> (model, x): the reference module, eager PyTorch, and its input
    ours     (model, mode) -> the same function by ckptkern, on the model's parameters
    priority lower runs first; up to HEADLINE before all others
    baselines   further variants; a maker that raises ImportError is reported as missing
    drops    has dropout: checked in evaluation, timed in training
    dtype    None: the device's, from DTYPES
    workspace   bytes for variants of ckptkern without a size of their own; their names then say it
    figures  published by others
    """

    name: str
    make: Callable[[torch.device, torch.dtype | None], tuple[nn.Module, Tensor]]
    ours: Callable[[nn.Module, str], Function] = ours
    priority: int = 0
    modes: Sequence[str] = MODES
    baselines: dict[str, Maker] = field(default_factory=dict)
    drops: bool = False
    dtype: torch.dtype | None = None
    workspace: int | None = None
    figures: Sequence[Figure] = ()


def random_case(
    model: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, Tensor]:
    """Returns a model with random parameters and a random x [shape] that requires a gradient."""
    dtype = dtype or DTYPES[device.type]
    with device:  # where billions of random numbers take no time
        built = model().to(device, dtype)
    return built, torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def build(case: Case, device: torch.device, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns (model, x, dy) in the case's dtype. The model is in evaluation if it has dropout, as variants are checked."""
    torch.manual_seed(seed)
    model, x = case.make(device, case.dtype)
    model.train(not case.drops)
    with seeded(), unmoved(model):
        y = model(x).detach()
    return model, x, torch.randn_like(y) if y.dim() else torch.ones_like(y)  # a scalar is a loss


# -- variants that every case has --------------------------------------------------------------------------------------


def eager(model: nn.Module, x: Tensor) -> Function:
    return model


def _checkpoint(use_reentrant: bool, model: nn.Module, x: Tensor) -> Function:
    return functools.partial(checkpoint, model, use_reentrant=use_reentrant)


def _compiled(budget: float, checkpointed: bool, model: nn.Module, x: Tensor) -> Function:
    """Compiles the model. budget: the partitioner's, which it reads when it traces: here, not at every call."""
    import torch._functorch.config as config

    inner = _checkpoint(False, model, x) if checkpointed else model

    def call(x: Tensor) -> Tensor:
        return inner(x)

    # Dynamo caches compiled graphs by code object: without one of its own, this budget would get another's graph
    call = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    function = torch.compile(call, dynamic=False)
    checked = model.training
    with config.patch(activation_memory_budget=budget):
        for training in sorted({checked, True}):  # a model with dropout is checked in one and timed in the other
            model.train(training)
            function(x)
    model.train(checked)
    return function


EAGER, CHECKPOINT = "eager", "torch checkpoint"
REENTRANT = f"{CHECKPOINT}, reentrant"
CHECKPOINTS = (CHECKPOINT, REENTRANT)
COMPILED: dict[str, Maker] = {
    "compile": functools.partial(_compiled, 1.0, False),
    "compile + checkpoint": functools.partial(_compiled, 1.0, True),
    "compile, budget 0.5": functools.partial(_compiled, 0.5, False),
    "compile, budget 0": functools.partial(_compiled, 0.0, False),
}
FIRST_COMPILED = ("compile", "compile, budget 0")  # of the first figures: a compilation takes 10 to 20 s


def variants(case: Case) -> dict[str, Maker]:
    """Returns all variants of a case by name, eager first, except those of torch.compile."""
    makers: dict[str, Maker] = {EAGER: eager, CHECKPOINT: functools.partial(_checkpoint, False)}
    for mode in case.modes:
        makers[f"ckptkern {mode}".strip()] = lambda model, x, mode=mode: case.ours(model, mode)
    makers |= case.baselines
    if case.workspace:
        makers = dict(_within(case.workspace, name, make) for name, make in makers.items())
    return {**makers, REENTRANT: functools.partial(_checkpoint, True)}  # last, because a run may end within a case


class Within(NamedTuple):
    """A maker whose variant's forward and backward run within a workspace, in bytes."""

    workspace: int
    make: Maker

    def __call__(self, model: nn.Module, x: Tensor) -> Function:
        return self.make(model, x)


def _within(size: int, name: str, make: Maker) -> tuple[str, Maker]:
    """Returns the name with the size and the maker within it; unchanged if not ckptkern's, or if it has a size of its own."""
    if not name.startswith("ckptkern") or ", " in name:
        return name, make
    text = format_size(size)
    return f"{name}, {text if parse_size(text) == size else f'{size} bytes'}", Within(size, make)
