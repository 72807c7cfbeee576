"""torch.compile(fullgraph=True) of a converted model: convert first, then compile.

Run: python examples/compile.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import ckptkern


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 64), Block(), nn.Linear(64, 64))
ids = torch.randint(64, (160, 32))
labels = (5 * ids + 7) % 64  # each label follows from its token
print(ckptkern.convert(model, ids[:8]))
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # "inductor", the default, takes longer to begin
torch.testing.assert_close(compiled(ids[:8]), model(ids[:8]))

optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
for inputs, targets in zip(ids.split(8), labels.split(8), strict=True):
    loss = F.cross_entropy(compiled(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
