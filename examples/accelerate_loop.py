"""Accelerate: convert first, then `prepare`. It accumulates gradients and runs in mixed precision as usual.

Install: pip install accelerate
Run: python examples/accelerate_loop.py
On several devices: accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ckptkern

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(64, 64),
    *(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)),
    nn.Linear(64, 64),
)
ids = torch.randint(64, (192, 32))
data = TensorDataset(ids, (5 * ids + 7) % 64)  # each label follows from its token
print(ckptkern.convert(model, ids[:8]))

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))

losses = []
for inputs, labels in batches:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
