"""Converts a model in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

try:
    import lightning.pytorch as lightning
except ImportError:
    import pytorch_lightning as lightning

from ..conversion.later import ConvertLater


class LightningCallback(lightning.Callback):
    """Converts the modules of a LightningModule at their first training call, inside any strategy, and logs which are fused.

        trainer = Trainer(callbacks=[ckptkern.integrations.LightningCallback("model", recompute="full")])

    modules: names of the modules whose calls are converted; without names, the module's children that have parameters.
    options: those of ckptkern.convert.
    conversions: what convert returned, by name; without modules that have not been called.
    """

    def __init__(self, *modules: str, **options: Any):
        self.modules, self.options = modules, options
        self.later: dict[str, ConvertLater] = {}

    @property
    def conversions(self):
        return {name: later.conversion for name, later in self.later.items() if later.conversion is not None}

    def setup(self, trainer, pl_module, stage: str) -> None:
        if stage == "fit":
            names = self.modules or [
                name for name, child in pl_module.named_children() if any(True for _ in child.parameters())
            ]
            self.later = {name: ConvertLater(pl_module.get_submodule(name), self.options) for name in names}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        for name, later in self.later.items():
            for ran, count in later.check_calls().items():
                self.log(f"calls_{ran}/{name}", float(count))

    def teardown(self, trainer, pl_module, stage: str) -> None:
        for later in self.later.values():
            later.remove()
