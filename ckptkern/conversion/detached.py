"""Computes the values of lazy logits for reads that want no gradient: of what detach() returned, and of copies.

A copy is values of the moment in which it is asked for, and can be read after the optimizer's step. The model's loss does not
see these values: it stays linear_cross_entropy of the head's input.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .tokens import CASTS, share
from .trace import leaves_of, mapped

CALLERS = 5  # frames from asks_for_copy to whoever called clone


def origin_of(logits: Any) -> Any:
    """Returns the first logits in their history that detach() returned, or None."""
    return next((one for one in reversed([*logits.history]) if one.steps and one.steps[-1].name == "detach"), None)


def asks_for_copy(step: Any, logits: Any) -> bool:
    """Returns whether the step asks for a copy of logits.

    clone() and to(copy=True) ask for one where no gradient is wanted: of what detach() or torch.no_grad() returned, and under
    torch.no_grad(); and so does detach() of a clone. After detach() a cast or a move asks for one too, also to the dtype or the
    device that the logits have. contiguous(), reshape() and flatten() ask for a layout: trainers take statistics of the result.
    """
    if logits.matmul.log is not None:
        return False
    if step.name == "detach":
        return any(before.clones for before in logits.steps)
    if step.clones and (logits.detached or not torch.is_grad_enabled()):
        return not in_ddp()
    return step.name in CASTS and origin_of(logits) is not None


def in_ddp() -> bool:
    """Returns whether DistributedDataParallel asks: with find_unused_parameters=True its sink, an autograd.Function, clones
    all results of the model."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(CALLERS):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.nn.parallel.distributed":
            return True
        frame = frame.f_back
    return False


def values_apart(logits: Any) -> Tensor:
    """Computes the values without a graph. Those of what detach() returned are computed once, as long as it lives."""
    with torch.inference_mode(False), torch.no_grad():
        if any(one.made for one in logits.history):
            return logits.values().detach()
        origin = origin_of(logits)
        if origin is None:
            return logits.matmul.values(logits.steps)
        if origin.apart is None:
            origin.apart = logits.matmul.values(origin.steps)
        return functools.reduce(lambda z, step: step(z), logits.steps[len(origin.steps) :], origin.apart)


def read_apart(step: Any, given: list[Any]) -> Any:
    """Returns the step's result by values without a graph, of logits that detach() returned or that the step copies.

    NotImplemented for other logits, and for a result in the memory of the values, unless it is a copy: someone may change it.
    """
    copied = len(given) == 1 and asks_for_copy(step, given[0])
    if not copied and any(origin_of(logits) is None for logits in given):
        return NotImplemented
    values = {id(logits): values_apart(logits) for logits in given}
    if step.name == "__deepcopy__":  # whose memo is by id, and values that are computed for it may be freed before
        return values[id(step.args[0])].clone()
    args, kwargs = mapped(lambda one: values.get(id(one), one), (step.args, step.kwargs))
    result = step.function(*args, **kwargs)
    if not any(share(one, of) for one in leaves_of(result) for of in values.values()):
        return result
    return result.clone() if copied else NotImplemented
