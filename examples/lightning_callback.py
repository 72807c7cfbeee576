"""Lightning: a callback converts the model in its first training step, and logs which calls are fused.

Install: pip install pytorch-lightning
Run: python examples/lightning_callback.py
"""

import pytorch_lightning as lightning  # `import lightning` has the same names
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ckptkern.integrations import LightningCallback


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(64, 64),
            *(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)),
            nn.Linear(64, 64),
        )
        self.losses = []

    def training_step(self, batch, _):
        inputs, labels = batch
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), labels.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


lightning.seed_everything(0, verbose=False)
ids = torch.randint(64, (128, 32))
data = TensorDataset(ids, (5 * ids + 7) % 64)  # each label follows from its token
module = Module()
convert = LightningCallback(recompute="full")
quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=1, callbacks=[convert], logger=False, **quiet)
trainer.fit(module, DataLoader(data, batch_size=8))
print(f"loss {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
print(convert.conversions["model"])
