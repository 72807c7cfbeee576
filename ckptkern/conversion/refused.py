"""Refuses models and calls of which no training step can run, and says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .calls import keywords_of, parameters_of
from .trace import tensors_in


def check_step(op: str, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises TypeError for what is no module, or a batch as one positional dict; ValueError for a model that is compiled, lazy
    or wrapped by DataParallel; RuntimeError in inference mode, and for tensors that were made in it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, not {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"{op}: the model is compiled: {op} first, then compile")
    if isinstance(model, nn.DataParallel):
        raise ValueError(
            f"{op}: the model is wrapped by nn.DataParallel, whose replicas would run the parameters of the first GPU. Pass "
            "model.module, and train with torch.nn.parallel.DistributedDataParallel"
        )
    check_tensors(op, model, args, kwargs)
    batch = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(batch, Mapping) and batch and keywords_of(parameters_of(model)).issuperset(batch):
        raise TypeError(
            f"{op}: the one argument is a dict of the forward's arguments: {', '.join(batch)}. Pass them by keyword, "
            f"{op}(model, **batch)"
        )


def check_tensors(op: str, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError in inference mode, and for tensors that were made in it; ValueError for lazy modules."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{op}: torch.inference_mode() is on, in which no step can be differentiated. Call {op} outside of it; "
            "torch.no_grad() is no problem"
        )
    tensors = [*model.parameters(), *tensors_in((args, kwargs))]
    if any(is_lazy(one) for one in tensors):
        raise ValueError(f"{op}: a lazy module has no parameters yet. Call the model once first")
    if any(one.is_inference() for one in tensors):
        raise RuntimeError(
            f"{op}: a parameter or input was made in torch.inference_mode(), so that no gradient flows through it. Make it "
            "outside, or pass its clone()"
        )
