"""Fused regions with tensor and sequence parallelism, then FSDP2, on an n x 2 mesh, in torchtitan's order.

`convert` reads the role of each parameter of a block, so `TensorParallel` needs no plan of its layers: each rank's fused op has
a part of the heads and of the hidden units, and its own rows of the block's input. `fully_shard` comes last.

Run: torchrun --nproc-per-node 2 examples/fsdp2_tp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F

import ckptkern
from ckptkern.parallel import TensorParallel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(64), nn.RMSNorm(64)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = (nn.Linear(*shape, bias=False) for shape in ((64, 192), (64, 192), (192, 64)))

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, 16)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


styles = {
    "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "[12]": TensorParallel(sequence_parallel=True),
    "3": tp.SequenceParallel(),
    "4": tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}

dist.init_process_group("gloo")  # "nccl"
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))  # "cuda"
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 64), Block(), Block(), nn.RMSNorm(64), nn.Linear(64, 64, bias=False))

torch.manual_seed(mesh["data"].get_local_rank())  # other data for each group
ids = torch.randint(64, (32, 32))
labels = (5 * ids + 7) % 64  # each label follows from its token
conversion = ckptkern.convert(model, ids[:8])
tp.parallelize_module(model, mesh["tensor"], styles)
for layer in model[1:3]:
    fully_shard(layer, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])

optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
for inputs, targets in zip(ids.split(8), labels.split(8), strict=True):
    with tp.loss_parallel():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.full_tensor().item())
if dist.get_rank() == 0:
    print(conversion)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
dist.destroy_process_group()
