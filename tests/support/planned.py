"""Models that the tests of planning measure and plan, and what is measured of them without a plan."""

from __future__ import annotations

import random

import torch
from support.architectures import ARCHITECTURES, ids
from torch import Tensor, nn

import ckptkern
from ckptkern import memory
from ckptkern.errors import BudgetError

SCALARS = 256  # bytes that come and go between two runs


def model_of(name):
    torch.manual_seed(0)
    return ARCHITECTURES[name].model()


class Convolutions(nn.Module):
    """Nothing that an op stands for; one block is called twice."""

    def __init__(self):
        super().__init__()
        block = [nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 4, 1)) for _ in range(3)]
        self.blocks = nn.ModuleList(block)
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x)


class Ours(nn.Module):
    """Layers of ckptkern.nn of several kinds. The relu's output is saved by itself and by the next layer."""

    def __init__(self):
        super().__init__()
        self.layers = layers(2)
        self.act = ckptkern.nn.Linear(16, 16, activation="relu")
        self.mlp = ckptkern.nn.MLP(16, 32)
        self.encoder = ckptkern.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.encoder(self.mlp(self.act(self.layers(x))))


class WithLoss(nn.Module):
    """Returns a loss, as a model of transformers with labels."""

    def __init__(self, inner, vocabulary):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, vocabulary)

    def forward(self, x, labels):
        logits = self.head(self.inner(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def layers(count=4, device="cpu"):
    torch.manual_seed(0)
    kinds = [ckptkern.nn.LlamaDecoderLayer(16, 2, intermediate_size=48, device=device) for _ in range(count)]
    return nn.Sequential(*kinds)


def sequence(tokens=256, device="cpu", batch=2):
    return torch.randn(batch, tokens, 16, device=device, requires_grad=True)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 48, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def with_loss(count, vocabulary):
    return WithLoss(layers(count), vocabulary), (sequence(), torch.randint(0, vocabulary, (2, 256)))


CASES = {
    name: (lambda name=name: (model_of(name), (ids(),))) for name in ["llama", "gpt", "bert", "parallel", "decoder"]
} | {
    "convolutions": lambda: (Convolutions(), (torch.randn(64, 4, 6),)),
    "ours": lambda: (Ours(), (torch.randn(2, 5, 16),)),
    "llama layers": lambda: (layers(), (sequence(),)),
    "encoder": lambda: (encoder(), (sequence(64),)),
    "head and loss": lambda: with_loss(2, 300),
    "peak at the loss": lambda: with_loss(4, 4000),
}


def loss_of(output):
    loss = output["loss"] if isinstance(output, dict) else output
    loss = loss if isinstance(loss, Tensor) else loss[0]
    return loss if loss.dim() == 0 else loss.float().sum()


def counted(model, *inputs):
    """Bytes that a forward in training mode saves. The random state is as before."""
    with torch.random.fork_rng(), memory.saved_tensors(model) as saved:
        model.train()(*inputs)
    return saved.bytes


def peak_of(model, inputs):
    """Bytes that a step allocates at its peak, by the profiler."""
    with torch.random.fork_rng(), memory.peak_memory("cpu") as peak:
        output = model.train()(*inputs)  # stays in backward, as in most training loops
        loss_of(output).backward()
        del output
    return peak.bytes


def forget_gradients(model, inputs):
    for tensor in (*model.parameters(), *inputs):
        tensor.grad = None


def least_of(plan):
    """The least budget that the plan can meet. The plan is afterwards as before, unless that is 0."""
    try:
        plan.replan(0)
    except BudgetError as error:
        return error.least
    return 0


def mixtures(plan, count):
    """Chooses strategies at random, and runs the regions in them."""
    rows, draw = plan.table.rows, random.Random(0)
    for _ in range(count):
        yield apply(plan, [draw.randrange(len(row.strategies)) for row in rows])


def apply(plan, chosen):
    for row, strategy in zip(plan.table.rows, chosen, strict=True):
        row.segment.set(row.strategies[strategy])
    return tuple(chosen)
