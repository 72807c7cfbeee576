"""A plain training loop in float16: autocast, GradScaler, and a converted model.

Run: python examples/plain_loop.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import ckptkern

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 64)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.layers(self.embed(ids), mask=mask, is_causal=True))


model = Model().to(device)
print(ckptkern.convert(model, torch.randint(64, (8, 32), device=device)))

optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scaler = torch.amp.GradScaler(device)
losses = []
for _ in range(12):
    ids = torch.randint(64, (8, 32), device=device)
    labels = (5 * ids + 7) % 64  # each follows from its token
    with torch.autocast(device, torch.float16):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
