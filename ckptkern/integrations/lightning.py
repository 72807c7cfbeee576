"""Converts a model in Lightning's Trainer."""

from __future__ import annotations

import warnings
from typing import Any

try:
    import lightning.pytorch as lightning
except ImportError:
    import pytorch_lightning as lightning

from torch import nn

from ..conversion.later import ConvertLater


class LightningCallback(lightning.Callback):
    """Converts the modules of a LightningModule at their first training call, inside any strategy, and logs which are fused.

        trainer = Trainer(callbacks=[ckptkern.integrations.LightningCallback("model", recompute="full")])

    modules: names of the modules whose calls are converted; without names, the module's children that have
        parameters. Lists and dictionaries of modules stand for what is in them.
    options: those of ckptkern.convert.
    conversions: what convert returned, by name; without modules that have not been called.
    """

    def __init__(self, *modules: str, **options: Any):
        self.modules, self.options = modules, options
        self.later: dict[str, ConvertLater] = {}

    @property
    def conversions(self):
        return {name: later.conversion for name, later in self.later.items() if later.conversion is not None}

    def on_fit_start(self, trainer, pl_module) -> None:
        names = self.modules or [
            name for name, child in pl_module.named_children() if any(True for _ in child.parameters())
        ]
        self.later = {
            place: ConvertLater(module, self.options)
            for name in names
            for place, module in called_in(name, pl_module.get_submodule(name))
        }

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        for name, later in self.later.items():
            for ran, count in later.check_calls().items():
                self.log(f"calls_{ran}/{name}", float(count))

    def on_train_end(self, trainer, pl_module) -> None:
        if missed := [name for name, later in self.later.items() if later.conversion is None]:
            warnings.warn(
                f"ckptkern: LightningCallback converted nothing in {', '.join(missed)}, because training did not call it as a "
                "module. Name the modules that training_step calls",
                stacklevel=2,
            )

    def teardown(self, trainer, pl_module, stage: str) -> None:
        for later in self.later.values():
            later.remove()


def called_in(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the module, or in place of a container without a forward the modules in it, with their names."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [(name, module)]
    return [found for part, child in module.named_children() for found in called_in(f"{name}.{part}", child)]
