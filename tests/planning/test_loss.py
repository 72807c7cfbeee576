"""The number that a measured step differentiates: the output's loss, its one scalar, or what loss= says."""

from types import SimpleNamespace

import pytest
import torch
from support.planned import forget_gradients
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import peak_memory

CLASSES, WIDTH, TOKENS = 4000, 32, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """returns: what is returned, of logits and loss."""

    def __init__(self, returns):
        super().__init__()
        self.embedding, self.returns = nn.Embedding(CLASSES, WIDTH), returns
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return self.returns(logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten()))


RETURNS = {
    "(logits, loss)": (lambda logits, loss: (logits, loss), lambda output: output[1], None),
    "(loss, logits)": (lambda logits, loss: (loss, logits), lambda output: output[0], None),
    "dict": (lambda logits, loss: {"z": logits, "total": loss}, lambda output: output["total"], None),
    "with a metric": (lambda logits, loss: (logits, loss, loss.detach()), lambda output: output[1], None),
    "object": (lambda logits, loss: SimpleNamespace(logits=logits, loss=loss), lambda output: output.loss, None),
    "two scalars": (
        lambda logits, loss: (logits, loss, 0.5 * loss),
        lambda output: output[1] + output[2],
        lambda output: output[1] + output[2],
    ),
    "loss outside": (
        lambda logits, loss: logits,
        lambda logits: logits.logsumexp(-1).mean(),
        lambda logits: logits.logsumexp(-1).mean(),
    ),
}  # fmt: skip


def peak_of(model, ids, loss):
    """Bytes of a step's peak, by the allocator, with gradients there as no step leaves them."""
    forget_gradients(model, ())
    with peak_memory("cpu") as peak:
        output = model.train()(ids)
        loss(output).backward()
        del output
    return peak.bytes


def close(ours, theirs):
    return abs(ours - theirs) <= 0.05 * theirs


@pytest.mark.parametrize("name", RETURNS)
def test_a_measured_step_differentiates_the_loss(name):
    returns, taken, loss = RETURNS[name]
    ids = torch.randint(CLASSES, (1, TOKENS))
    options = {} if loss is None else {"loss": loss}
    assert ckptkern.certify(GPT(returns), ids, **options).passed
    plan = ckptkern.plan(model := GPT(returns), ids, budget="100MiB", **options)
    assert close(plan.peak, peak_of(model, ids, taken))
    frontier = ckptkern.frontier(
        model := GPT(returns), lambda n: torch.zeros(1, n, dtype=torch.long), "100MiB", limit=128, **options
    )
    assert close(frontier.peak, peak_of(model, torch.zeros(1, frontier.size, dtype=torch.long), taken))
    model = GPT(returns)
    report = ckptkern.report(model, ids, **options)
    assert close(report.peaks["eager PyTorch"], peak_of(model, ids, taken))


def test_several_scalars_are_refused_and_so_is_a_loss_that_is_none():
    ids = torch.randint(CLASSES, (1, 4))
    for run in (ckptkern.certify, ckptkern.report, lambda *args, **more: ckptkern.plan(*args, budget="1GiB", **more)):
        with pytest.raises(ValueError, match=r"returns 2 scalars.* loss="):
            run(GPT(lambda logits, loss: (logits, loss, 2 * loss)), ids)
        with pytest.raises(TypeError, match=r": loss must return a scalar tensor, not a tensor of shape"):
            run(GPT(lambda logits, loss: (logits, loss)), ids, loss=lambda output: output[0])
        with pytest.raises(ValueError, match="no tensor that the model returned has one"):
            run(GPT(lambda logits, loss: (logits.detach(), loss.detach())), ids)
