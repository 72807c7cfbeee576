"""Models that the tests of planning measure and plan."""

from __future__ import annotations

import torch
from support.architectures import ARCHITECTURES, ids
from torch import Tensor, nn

import ckptkern

NAMES = ["llama", "gpt", "bert", "parallel", "decoder"]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name].model()


class Convolutions(nn.Module):
    """Nothing that an op stands for; one block is called twice."""

    def __init__(self):
        super().__init__()
        block = [nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 4, 1)) for _ in range(3)]
        self.blocks = nn.ModuleList(block)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x)


class Ours(nn.Module):
    """Layers of ckptkern.nn of several kinds. The relu's output is saved by itself and by the next layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ckptkern.nn.LlamaDecoderLayer(16, 2, intermediate_size=24) for _ in range(2)])
        self.act = ckptkern.nn.Linear(16, 16, activation="relu")
        self.mlp = ckptkern.nn.MLP(16, 32)
        self.encoder = ckptkern.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.encoder(self.mlp(self.act(x)))


MODELS = {name: (lambda name=name: model_of(name), ids) for name in NAMES} | {
    "convolutions": (Convolutions, lambda: torch.randn(2, 4, 6)),
    "ours": (Ours, lambda: torch.randn(2, 5, 16)),
}  # fmt: skip
