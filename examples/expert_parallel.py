"""Expert parallelism: an all-to-all brings each expert its rows, and another one returns the results.

Dispatch and combine stay outside of `grouped_gated_mlp`, which saves the received rows, so recompute neither communicates nor
routes tokens again. The router's weights travel with the rows; if they were applied after the op, its output would be saved.

Run: torchrun --nproc-per-node 2 examples/expert_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn import functional as F

import ckptkern


class Experts(nn.Module):
    """A router over all experts, equal on all ranks, and this rank's part of the experts."""

    def __init__(self, d: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.experts, self.top_k, self.ranks = experts, top_k, dist.get_world_size()
        own = experts // self.ranks
        self.router = nn.Linear(d, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(own, 2 * hidden, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(own, d, hidden) * hidden**-0.5)

    def forward(self, x):  # [tokens, d]
        weights, index = self.router(x).softmax(-1).topk(self.top_k)
        order = index.flatten().argsort(stable=True)  # token-expert pairs by expert, and so by rank
        counts = torch.bincount(index.flatten(), minlength=self.experts)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)  # [rank that sends, own expert]
        sent, received = (n.view(self.ranks, -1).sum(1).tolist() for n in (counts, came))

        def exchanged(rows, received, sent):
            return wait_tensor(all_to_all_single_autograd(rows.contiguous(), received, sent, dist.group.WORLD))

        rows = exchanged(x[order // self.top_k], received, sent)
        row_weights = exchanged(weights.flatten()[order], received, sent)
        expert = torch.arange(len(self.down)).repeat(self.ranks).repeat_interleave(came)
        place = expert.argsort(stable=True)  # rows came by rank; the op wants them by expert
        ends = came.view(self.ranks, -1).sum(0).cumsum(0)
        y = ckptkern.grouped_gated_mlp(
            rows[place], ends, self.gate_up, self.down, row_weights=row_weights[place], recompute="full"
        )
        y = exchanged(torch.empty_like(y).index_copy(0, place, y), sent, received)
        return torch.zeros_like(x).index_add(0, order // self.top_k, y)


def main() -> None:
    dist.init_process_group("gloo")  # "nccl"
    torch.manual_seed(dist.get_rank())  # other data and other experts on each rank
    embed, layer, head = nn.Embedding(64, 32), Experts(32, 64, 8, 2), nn.Linear(32, 64, bias=False)
    shared = [embed.weight, layer.router.weight, head.weight]
    for parameter in shared:
        dist.broadcast(parameter.detach(), 0)
    optimizer, losses = torch.optim.AdamW([*shared, layer.gate_up, layer.down], 1e-2), []
    for ids in torch.randint(64, (60, 128)):
        x = embed(ids)
        loss = F.cross_entropy(head(x + layer(x)), (5 * ids + 7) % 64)  # each label follows from its token
        loss.backward()
        for parameter in shared:  # an expert has its gradient from all ranks already
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
