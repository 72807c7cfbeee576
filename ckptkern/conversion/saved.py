"""Measures what a training call saves for backward, besides parameters."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from .protection import unmoved
from .recorder import Step, step_of
from .sharding import holds_sharded, is_sharded
from .trace import Call, leaves_of, recomputed


def saved_bytes(module: nn.Module, run: Callable, args: tuple, kwargs: dict[str, Any], x: Tensor) -> int:
    """What one training call of `run`, a forward of `module`, saves, besides parameters and the arguments other than x."""
    given = leaves_of((args, kwargs))
    wanted = x.detach().requires_grad_()
    args, kwargs = recomputed((args, kwargs), iter([wanted if value is x else value for value in given]))
    shared = [value for value in given if isinstance(value, Tensor) and value is not x]
    with unmoved(module), torch.enable_grad():
        module.train()
        with memory.saved_tensors([*module.parameters(), *module.buffers(), *shared]) as saved:
            run(*args, **kwargs)
    return saved.bytes


def saved_by(module: nn.Module, run: Callable, call: Call | None, x: Tensor | None = None) -> int | None:
    """`saved_bytes` for the input x, the first of the call if it is not named; None without a call that can be measured."""
    if call is None or holds_sharded(module):  # a forward that no backward follows would leave their state open
        return None
    x = next((v for v in leaves_of(call) if isinstance(v, Tensor) and v.is_floating_point()), None) if x is None else x
    with contextlib.suppress(Exception):  # what convert checks does not hang on this measurement
        return saved_bytes(module, run, *call, x)
    return None


def step_of_all(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], there: list[Tensor]
) -> tuple[int | None, int | None]:
    """Returns the bytes that a training step of the model saves for backward, besides parameters, and those of its peak; None
    for what cannot be measured. there: as in `step_of`."""
    if not (args or kwargs) or is_sharded(model) or holds_sharded(model):
        return None, None  # a forward that no backward follows would leave their state open
    # the reducer of DistributedDataParallel would wait for ranks that do not convert
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    forward, peak = Step(backs=False), None  # of which nothing is held: the model may not fit before it is converted
    # whatever its forward makes of it in training
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(model, args, kwargs, there=there, step=forward)
        peak = step_of(model, args, kwargs, there=there, profiles=False).peak
    return (forward.saved if forward.has_output else None), peak
