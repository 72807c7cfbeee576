"""All faults, in the order of their folders."""

from __future__ import annotations

from .conversion import CONVERSION
from .kernels import KERNELS
from .ops import OPS
from .others import CSRC, EAGER, FROZEN, NN, PARALLEL, PLANNING, SEGMENTS, STATE, STORAGE

FAULTS = [*OPS, *KERNELS, *CONVERSION, *SEGMENTS, *STORAGE, *PLANNING, *PARALLEL, *NN, *EAGER, *FROZEN, *STATE, *CSRC]
