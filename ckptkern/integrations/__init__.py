"""Runs convert where trainers have flags: by callbacks, plugins and overrides, which import their framework on first use."""

from __future__ import annotations

import importlib
from typing import Any

from ..conversion.later import convert_later

__all__ = ["AxolotlPlugin", "LightningCallback", "TrainerCallback", "convert_later"]
MODULES = {"TrainerCallback": "trainer", "LightningCallback": "lightning", "AxolotlPlugin": "axolotl"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{MODULES[name]}", __name__), name)
