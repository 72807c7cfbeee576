"""`LightningCallback`, against the same run without it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ckptkern import integrations

lightning = pytest.importorskip("pytorch_lightning")
IDS = torch.arange(32)[:, None] * 3 % 31 + torch.arange(16) % 32
DATA = TensorDataset(IDS, (5 * IDS + 7) % 64)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
        self.body = nn.Sequential(nn.Embedding(64, 16), *layers)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 64))
        self.losses, self.validated = [], []

    def loss(self, batch):
        return F.cross_entropy(self.head(self.body(batch[0])).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Late(Module):
    """Builds its layers when training begins, in a list."""

    def configure_model(self):
        if "layers" not in self._modules:
            self.layers = nn.ModuleList(self.body[1:])
            self.body = self.body[:1]

    def loss(self, batch):
        x = self.body(batch[0])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(nn.functional.linear(x, self.head[2].weight[:, :16]).flatten(0, 1), batch[1].flatten())


def trained(callbacks, folder, kind=Module, **options):
    lightning.seed_everything(0, verbose=False)
    module = kind()
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet, **options)
    trainer.fit(module, DataLoader(DATA, batch_size=8), DataLoader(DATA, batch_size=8))
    return module, trainer


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("body",), ("body.1", "body.2")])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}])
def test_the_losses_are_those_without_the_callback(names, options, tmp_path):
    callback = integrations.LightningCallback(*names, recompute="full")
    (expected, _), (actual, trainer) = trained([], tmp_path, **options), trained([callback], tmp_path, **options)
    rtol = 2e-2 if options else 1e-4
    for name, count in (("losses", 4), ("validated", 6)):  # two of the validation before training
        values = getattr(actual, name)
        assert len(values) == count
        torch.testing.assert_close(values, getattr(expected, name), rtol=rtol, atol=0.0)
    assert {*callback.conversions} == {*(names or ("body", "head"))}
    for name, conversion in callback.conversions.items():
        calls = 4 if conversion.converted[0].name else 3  # the first call of what is itself replaced runs as it was
        assert trainer.callback_metrics[f"calls_fused/{name}"] == calls * len(conversion.converted) > 0
        assert trainer.callback_metrics[f"calls_original/{name}"] == 0


@pytest.mark.slow
def test_modules_that_are_built_late_in_a_list(tmp_path):
    callback = integrations.LightningCallback(recompute="full")
    with pytest.warns(UserWarning, match="converted nothing in head, because"):
        actual, trainer = trained([callback], tmp_path, Late)
    torch.testing.assert_close(actual.losses, trained([], tmp_path, Late)[0].losses, rtol=1e-4, atol=0.0)
    assert [trainer.callback_metrics[f"calls_fused/layers.{i}"] for i in (0, 1)] == [3, 3]


@pytest.mark.slow
def test_a_checkpoint_has_the_modules_own_names(tmp_path):
    _, trainer = trained([integrations.LightningCallback(recompute="full")], tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert saved.keys() == Module().state_dict().keys()


@pytest.mark.slow
def test_lost_fusion_is_warned_of(tmp_path):
    class Hook(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 1:
                module.body[2].linear1.register_forward_hook(lambda module, args, y: y)

    with pytest.warns(UserWarning, match="2 training calls of converted modules were not fused, of 2"):
        trained([Hook(), integrations.LightningCallback("body", recompute="full")], tmp_path)


def test_a_module_that_is_not_there(tmp_path):
    with pytest.raises(AttributeError, match="tail"):
        trained([integrations.LightningCallback("tail")], tmp_path)
