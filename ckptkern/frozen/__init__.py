"""Holds frozen quantised weights: the tensor that stands for one (`tensor`), and how each kind is dequantised (`kinds`)."""

from .kinds import is_made_of, why_not
from .tensor import Frozen, frozen_bytes, only_frozen, regrouped, viewed

__all__ = ["Frozen", "frozen_bytes", "is_made_of", "only_frozen", "regrouped", "viewed", "why_not"]
