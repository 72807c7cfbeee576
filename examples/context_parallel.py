"""Context parallelism: each rank has a part of a long sequence's tokens, and attends to all of them.

Every rank reads the same batch and takes its tokens. The loss is a sum over this rank's tokens divided by the number of all
tokens, so that the sum of the ranks' gradients is the gradient of the mean. fully_shard over the same ranks would sum them,
too.

Run: torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import ckptkern
from ckptkern.parallel import ContextParallel, shard_sequence

VOCABULARY, WIDTH, TOKENS = 16, 32, 128


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(ckptkern.nn.LlamaDecoderLayer(WIDTH, 4, 2, 64) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, labels):  # [B, S / ranks]: this rank's rows
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return ckptkern.linear_cross_entropy(x, self.head.weight, labels, reduction="sum")


def train(steps: int, order: str = "zigzag") -> list[float]:
    """Returns the losses of each step, equal on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda"
    torch.manual_seed(0)  # the same parameters and batches on each rank
    model = Model()
    parallelize_module(model, mesh, {"layers.*": ContextParallel(order=order)})
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (2, TOKENS))
        labels = ids.roll(1, 1)  # the token before: a task for attention
        loss = model(*(shard_sequence(tensor, mesh, order=order) for tensor in (ids, labels))) / ids.numel()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl"
    losses = train(100)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    dist.destroy_process_group()
