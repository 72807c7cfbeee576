"""Converts a model in axolotl: a plugin for its configuration file."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .trainer import TrainerCallback


class CkptkernArgs(BaseModel):
    """Declares the plugin's key of the configuration file: `ckptkern`, a mapping of convert's options."""

    ckptkern: dict[str, Any] | None = None


class AxolotlPlugin(BasePlugin):
    """Adds `TrainerCallback` to axolotl's trainer.

    plugins: [ckptkern.integrations.AxolotlPlugin]
    ckptkern: {recompute: full, workspace: 64MiB}
    """

    def get_input_args(self) -> str:
        return f"{__name__}.CkptkernArgs"

    def add_callbacks_pre_trainer(self, cfg, model) -> list[TrainerCallback]:
        return [TrainerCallback(**(cfg.ckptkern or {}))]
