"""Gradient accumulation: a batch of 16 in micro-batches of 4, each with regions of its own.

A region's state belongs to one call, so any number of micro-batches may be under way, and each samples its own dropout.

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


def batch():
    """Each token follows from the one before it."""
    ids = [torch.randint(64, (16,))]
    for _ in range(32):
        ids.append((5 * ids[-1] + 7) % 64)
    ids = torch.stack(ids, 1)
    return ids[:, :-1], ids[:, 1:]


def accumulate(ids, labels, micro: int) -> float:
    """Adds the gradients of the batch's mean loss, `micro` samples at a time."""
    total = 0.0
    for part, targets in zip(ids.split(micro), labels.split(micro), strict=True):
        loss = F.cross_entropy(model(part).flatten(0, 1), targets.flatten()) * len(part) / len(ids)
        loss.backward()
        total += loss.item()
    return total


def gradients(micro: int) -> torch.Tensor:
    model.zero_grad()
    accumulate(ids, labels, micro)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


ids, labels = batch()
model.eval()  # without dropout the gradients of the parts add up to those of the whole
torch.testing.assert_close(gradients(4), gradients(16))
model.train()
for micro in (16, 4):
    with ckptkern.memory.saved_tensors(model) as saved:
        model(ids[:micro])
    print(f"{micro:2} samples save {ckptkern.memory.format_size(saved.bytes)}")

optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
for _ in range(10):
    optimizer.zero_grad()
    losses.append(accumulate(*batch(), micro=4))
    optimizer.step()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
assert losses[-1] < losses[0] / 2
