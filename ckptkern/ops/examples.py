"""What the catalogue's examples are made of: sizes, inputs that are trained, and values of options."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]
P = 0.25  # k/65536 exactly, so that torch's scale is ours
ACROSS_RANKS = "needs several processes"  # an option's value
SPLIT = {"group": ACROSS_RANKS, "vocab_start": ACROSS_RANKS}


class Sizes(NamedTuple):
    """lead: of the input's shape, its features apart. heads: of attention, which have 4 features each. experts: of an
    MoE layer, each token has two."""

    lead: tuple[int, ...] = (2, 3)
    features: int = 6
    hidden: int = 5
    out: int = 7
    heads: int = 2
    experts: int = 3

    @property
    def tokens(self) -> int:
        return torch.Size(self.lead).numel()


class Normal(NamedTuple):
    """An input that is trained, of random numbers."""

    shape: tuple[int, ...]
    mean: float = 0.0


def normal(*shape: int) -> Normal:
    return Normal(shape)


def gain(*shape: int) -> Normal:
    return Normal(shape, 1.0)


def alone(**values: Any) -> dict[str, Arguments]:
    """Options that go without others."""
    return {name: {name: value} for name, value in values.items()}


def together(common: Arguments, **values: Any) -> dict[str, Arguments]:
    """Options that go with others."""
    return {name: common | {name: value} for name, value in values.items()}


def fixed(*shape: int) -> Tensor:
    """Numbers without a period."""
    return torch.arange(torch.Size(shape).numel()).square().sin().view(shape)
