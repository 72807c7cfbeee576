"""Gradient accumulation: a batch of 16 in micro-batches of 4.

A region's state belongs to one call, so any number of micro-batches may be under way, and each samples its own dropout masks.

Run: python examples/accumulation.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import ckptkern

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(64, 64),
    *(ckptkern.nn.LlamaDecoderLayer(64, 4, num_kv_heads=2, intermediate_size=192, resid_dropout=0.1) for _ in range(2)),
    nn.Linear(64, 64),
)
for micro in (16, 4):
    with ckptkern.memory.saved_tensors(model) as saved:
        model(torch.randint(64, (micro, 32)))
    print(f"{micro:2} samples save {ckptkern.memory.format_size(saved.bytes)}")

optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
for batch in torch.randint(64, (10, 16, 32)):
    total = 0.0
    for ids in batch.split(4):
        labels = (5 * ids + 7) % 64  # each follows from its token
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()) * len(ids) / len(batch)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
