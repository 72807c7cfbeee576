"""Follows which tokens lazy logits are of: through views, copies and masks that leave each token's logits whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memory import placeholders
from ..subclasses import PLAIN
from .reading import DIVIDE, MULTIPLY

# Functions that leave each token's logits whole: those that show some of them, and those that may copy all in their order.
VIEWS = frozenset((
    "__getitem__", "detach", "movedim", "moveaxis", "narrow", "permute", "select", "squeeze", "swapaxes", "swapdims",
    "transpose", "unflatten", "unsqueeze", "view",
))  # fmt: skip
PARTS = {"chunk": 2, "split": 2, "unbind": 1}  # the place of `dim`
COPIES = frozenset(("bfloat16", "clone", "contiguous", "flatten", "float", "half", "reshape", "to", "type"))
CASTS = frozenset(("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"))  # to a dtype or a device
NEGATE = ("neg", "__neg__", "negative")
SCALES = frozenset((*MULTIPLY, *DIVIDE, *NEGATE))


class Tokens(NamedTuple):
    """Of which tokens logits are. `placeholder`, on the meta device, is a view of what stands for the logits [..., classes] of
    rows [..., d], as the logits are of those of all rows."""

    rows: Tensor
    classes: int
    placeholder: Tensor

    def others(self) -> list[int] | None:
        """The dimensions of tokens; None unless the remaining one has all classes of a token."""
        one, V = self.placeholder, self.classes
        others = [i for i in range(one.dim()) if one.stride(i) != 1 or one.shape[i] != V]
        whole = V > 1 and len(others) == one.dim() - 1 and one.storage_offset() % V == 0
        return others if whole and all(one.stride(i) % V == 0 for i in others if one.shape[i] > 1) else None

    @placeholders()
    def shown(self) -> Tensor:
        """The rows of these tokens [..., d], in their order; the leading shape may be another."""
        one, others, (*lead, d) = self.placeholder, self.others(), self.rows.shape
        sizes, strides = [one.shape[i] for i in others], [one.stride(i) // self.classes for i in others]
        first = one.storage_offset() // self.classes
        tokens = one.new_empty(math.prod(lead)).as_strided(sizes, strides, first)
        if tokens.is_contiguous() and tokens.numel() == math.prod(lead):
            return self.rows
        rows = self.rows.reshape(-1, d)
        offset = rows.storage_offset() + first * rows.stride(0)
        return rows.as_strided((*sizes, d), [*(s * rows.stride(0) for s in strides), rows.stride(1)], offset)

    @placeholders()
    def copied(self, shape: torch.Size, dtype: torch.dtype) -> Tokens | None:
        """Those of a copy, whose elements have the same order."""
        one = self.placeholder
        if one.shape[-1:] == shape[-1:] == (self.classes,) and one.stride(-1) == 1:
            return self._replace(rows=self.shown(), placeholder=one.new_empty(shape, dtype=dtype))
        if one.shape != shape:
            return None
        whole = one.new_empty(math.prod(self.rows.shape[:-1]) * self.classes, dtype=dtype)
        return self._replace(placeholder=whole.as_strided(shape, one.stride(), one.storage_offset()))

    @placeholders()
    def after(self, step: Any) -> Tokens | None:
        """Those of step's result; None if it is not followed."""
        before = self.placeholder
        if step.name in SCALES or step.name == "tanh":
            return self.copied(before.shape, before.dtype)
        if step.name == "__getitem__" and isinstance(step.args[1], Tensor):
            return self.masked(step.args[1])
        if step.name not in VIEWS | COPIES or any(hasattr(one, "__array__") for one in step.others):
            return None
        try:
            seen = _to(step, before, self.rows.device) if step.name == "to" else step(before)
        except Exception:  # the function's own error, which it raises again for values
            return None
        if not isinstance(seen, Tensor) or not (
            seen.dtype == before.dtype or (before.dtype.itemsize < seen.dtype.itemsize and seen.dtype == torch.float32)
        ):
            return None
        if share(seen, before):
            found = self._replace(placeholder=seen)
        else:
            found = self.copied(seen.shape, seen.dtype) if step.name in COPIES else None
        return found if found is not None and found.others() is not None else None

    def are(self, others: Tokens) -> bool:
        """Are they the same tokens in the same order, with the classes last?"""
        one, other = self.placeholder, others.placeholder
        if one.shape != other.shape or not self.others() == others.others() == list(range(one.dim() - 1)):
            return False
        placed = one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
        return (placed and _same(self.rows, others.rows)) or _same(self.shown(), others.shown())

    @placeholders()
    def masked(self, mask: Tensor) -> Tokens | None:
        """Those that a mask of the leading dimensions leaves; None for another index."""
        one, lead = self.placeholder, mask.dim()
        if (
            mask.dtype != torch.bool or type(mask) not in PLAIN or mask.device != self.rows.device or not 0 < lead < one.dim()
            or self.others() != list(range(one.dim() - 1)) or mask.shape != one.shape[:lead]
        ):  # fmt: skip
            return None
        rows = self.shown().reshape(*one.shape[:-1], self.rows.shape[-1])[mask]
        return self._replace(rows=rows, placeholder=one.new_empty((*rows.shape[:-1], self.classes)))


def _to(step: Any, placeholder: Tensor, device: torch.device) -> Tensor | None:
    """Tensor.to of a tensor on this device; None for another device."""
    wanted, dtype, *_ = torch._C._nn._parse_to(*step.args[1:], **step.kwargs)
    return placeholder.to(dtype or placeholder.dtype) if wanted in (None, device) else None


def _same(one: Tensor, other: Tensor) -> bool:
    """Are they the same elements of one memory?"""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def share(one: Any, other: Tensor) -> bool:
    """Is `one` a tensor in other's memory?"""
    strided = isinstance(one, Tensor) and one.layout is torch.strided
    return strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata
