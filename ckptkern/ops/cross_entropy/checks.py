"""Checks of the arguments of linear_cross_entropy and selected_log_probs. `op` is the function's name in messages."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..dispatch.checks import check_number, check_softcap, check_tensor

NAME = "linear_cross_entropy"
TOP = 64  # log-probabilities of a token at most


def check_targets(target: Tensor, entries: int | Tensor, ignore_index: int) -> None:
    """Checks that all targets are classes or ignored: an IndexError on a CPU, a device-side assertion on a GPU, as in
    torch."""
    bad = ((target < 0) | (target >= entries)) & (target != ignore_index)
    if target.is_cpu:
        if bool(bad.any()):
            raise IndexError(f"{NAME}: Target {target[bad][0].item()} is out of bounds.")
    else:
        torch._assert_async(~bad.any(), f"{NAME}: a target is out of bounds")


def check_equal_shards(entries: Tensor, mine: int, size: int) -> None:
    """Checks that shards have equal sizes if vocab_start is None: a ValueError on a CPU, a device-side assertion on a
    GPU."""
    message = f"{NAME}: without vocab_start all ranks have shards of equal size"
    if not entries.is_cpu:
        torch._assert_async(entries == mine * size, message)
    elif entries != mine * size:
        raise ValueError(f"{message}, but here are {mine} of {int(entries)} classes on one of {size} ranks")


def check_class_weights(weight: Tensor | None, x: Tensor, classes: int, split: bool) -> None:
    """A shard may be followed by other ranks' classes."""
    if weight is None:
        return
    check_tensor(NAME, "weight", weight, x)
    if weight.dim() != 1 or (len(weight) < classes if split else len(weight) != classes):
        raise ShapeError(f"{NAME}: weight must have a value for each class, but has shape {tuple(weight.shape)}")
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{NAME}: weight gets no gradient; detach it")


def check_scalars(label_smoothing, logit_scale, softcap, z_loss) -> tuple[float, float, float, float]:
    for name, value in (("label_smoothing", label_smoothing), ("logit_scale", logit_scale), ("z_loss", z_loss)):
        check_number(NAME, name, value)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{NAME}: label_smoothing must be between 0 and 1, not {label_smoothing}")
    return float(label_smoothing), float(logit_scale), check_softcap(NAME, softcap), float(z_loss)


def check_top_k(k: int | None, classes: int | None) -> None:
    """classes: None if other ranks have some, too."""
    if k is None:
        return
    if type(k) is not int:
        raise TypeError(f"{NAME}: top_k must be an int or None, not {k!r}")
    if not 1 <= k <= TOP or (classes is not None and k > classes):
        most = TOP if classes is None else min(classes, TOP)
        raise ValueError(f"{NAME}: top_k must be from 1 to {most}, not {k}; for more, compute the logits")


def check_target(
    op: str, name: str, x: Tensor, w: Tensor, target: Tensor, probabilities: bool, several: bool = False
) -> None:
    """several: may a token have k targets?"""
    check_tensor(op, name, target, x, floating=False)
    lead = tuple(x.shape[:-1])
    if probabilities:
        wanted, what = (*lead, w.shape[0]), "probabilities of classes, (..., classes)"
    else:
        wanted, what = lead, "a class for each token, as input without its features"
        if target.dtype != torch.int64:
            either = ", or floating point for probabilities" if op == NAME else ""
            raise DtypeError(f"{op}: {name} must be int64{either}, not {target.dtype}")
    if several and target.dim() == x.dim() and target.shape[-1]:
        wanted = (*lead, target.shape[-1])
    if tuple(target.shape) != wanted:
        raise ShapeError(f"{op}: {name} must have shape {wanted}, {what}, but has {tuple(target.shape)}")


def place_in(op: str, group, entries: int, vocab_start: int | None) -> tuple[str, int, int]:
    """(name of the group, its size, this rank's first class); "", 1, 0 without a group."""
    if group is None:
        if vocab_start is not None:
            raise ValueError(f"{op}: vocab_start needs a group")
        return "", 1, 0
    if vocab_start is None:
        vocab_start = group.rank() * entries
    return group.group_name, group.size(), vocab_start
