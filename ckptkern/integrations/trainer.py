"""Converts a model in transformers' Trainer, and in the trainers of TRL and axolotl, which are built on it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import transformers
from torch import nn

from ..conversion import patch_trl
from ..conversion.heads import Patch
from ..conversion.later import ConvertLater


class TrainerCallback(transformers.TrainerCallback):
    """Converts the model at its first training step, after Trainer has prepared it, and logs which calls are fused.

        trainer = Trainer(model, arguments, callbacks=[ckptkern.integrations.TrainerCallback(recompute="full")], ...)

    The log history and the progress bar contain `calls_fused`, `calls_checkpointed` and `calls_original`, and a warning says
    when fusion is lost. The table is printed once. In TRL's trainers `ckptkern.patch_trl` is called, too.

    options: those of ckptkern.convert.
    conversion: what convert returned; None before the first step.

    Raises what convert raises. With `torch_compile=True` the model compiles as converted, and the calls are no longer counted.
    """

    def __init__(self, **options: Any):
        self.options = options
        self.later: ConvertLater | None = None
        self.patch: Patch | None = None

    @property
    def conversion(self):
        return None if self.later is None else self.later.conversion

    def on_train_begin(self, args, state, control, *, model: nn.Module, **_: Any) -> None:
        self.on_train_end(args, state, control)  # of training that was interrupted
        self.later, self.printed = ConvertLater(model, self.options), not state.is_world_process_zero
        if "trl" in sys.modules:
            try:
                self.patch = patch_trl(self.options.get("workspace"))
            except RuntimeError as error:  # a version that this training need not use
                warnings.warn(str(error), stacklevel=2)

    def on_log(self, args, state, control, *, logs: dict[str, Any], **_: Any) -> None:
        if self.later is not None and "loss" in logs:
            calls = {f"calls_{ran}": count for ran, count in self.later.check_calls().items()}
            logs.update(calls)
            state.log_history[-1].update(calls)

    def on_step_end(self, args, state, control, **_: Any) -> None:
        if not self.printed and self.conversion is not None:
            print(self.conversion)
            self.printed = True

    def on_train_end(self, args, state, control, **_: Any) -> None:
        if self.later is not None:
            self.later.remove()
        if self.patch is not None:
            self.patch.remove()
