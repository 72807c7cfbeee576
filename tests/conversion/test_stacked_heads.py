"""Logits of several heads in one tensor, as models of audio codes stack them: a loss of one head's is linear_cross_entropy of
this head; what else is read, and what changes in place, is torch's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.cases import assert_same_within_rounding
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ckptkern
from ckptkern.conversion.logits import Logits
from ckptkern.memory import peak_memory

K, V, D, TOKENS = 3, 300, 16, 70


class Model(nn.Module):
    """use(model, the stacked logits, labels [B, S, K], the list of logits): returns the loss, and what else is read."""

    def __init__(self, use, dim=1, bias=False):
        super().__init__()
        self.body, self.use, self.dim = nn.Linear(D, D), use, dim
        self.heads = nn.ModuleList(nn.Linear(D, V, bias=bias) for _ in range(K))

    def forward(self, x, labels):
        h = torch.tanh(self.body(x))
        each = [head(h) for head in self.heads]
        return self.use(self, torch.stack(each, dim=self.dim), labels, each)

    def of(self, z, k):
        return z.select(self.dim, k)


def ce(z, labels):
    return F.cross_entropy(z.reshape(-1, V), labels.reshape(-1))


def losses(m, z, labels):
    return sum(ce(m.of(z, k), labels[..., k]) for k in range(K))


def of_musicgen(m, z, labels, each):
    """After transformers' MusicgenForCausalLM, in our words."""
    last, loss = z.movedim(m.dim, 1)[:, :, -labels.shape[1] :], 0.0
    for k in range(K):
        own = last[:, k].contiguous().view(-1, z.shape[-1])
        loss = loss + nn.CrossEntropyLoss()(own, labels[..., k].contiguous().view(-1))
    return loss / K, z.reshape(-1, *z.shape[2:])


def masked(m, z, labels, each):
    return sum(F.cross_entropy(m.of(z, k)[labels[..., k] > 50], labels[..., k][labels[..., k] > 50]) for k in range(K))


def read_without_graph(m, z, labels, each):
    with torch.no_grad():
        right = [m.of(torch.stack(each, m.dim), k).argmax(-1) == labels[..., k] for k in range(K)]
    return losses(m, z, labels), right, z.detach().argmax(-1)


FUSED = {
    "selected": lambda m, z, labels, each: losses(m, z, labels),
    "musicgen": of_musicgen,
    "unbound": lambda m, z, labels, each: sum(ce(y, labels[..., k]) for k, y in enumerate(z.unbind(m.dim))),
    "iterated": lambda m, z, labels, each: sum(ce(y, labels[..., k]) for k, y in enumerate(z.movedim(m.dim, 0))),
    "narrowed": lambda m, z, labels, each: sum(
        ce(z.narrow(m.dim, k, 1).squeeze(m.dim)[:, 3:].clone(), labels[:, 3:, k]) for k in range(K)
    ),
    "capped": lambda m, z, labels, each: sum(
        ce(5 * torch.tanh(m.of(z, k).float() / 5), labels[..., k]) for k in range(K)
    ),
    "masked": masked,
    "stacked twice": lambda m, z, labels, each: losses(m, torch.stack([z, z])[1], labels),
    "of heads too": lambda m, z, labels, each: losses(m, z, labels) + ce(each[0][:, :5], labels[:, :5, 0]),
    "read without a graph": read_without_graph,
}


def changed_by(change):
    """Changes logits in training only, which the example's call, in evaluation, does not show."""

    def use(m, z, labels, each):
        if m.training:
            change(m, z, each)
        return losses(m, z, labels) + sum(y.mean() for y in each) * 1e-3

    return use


VALUES = {
    "a loss of all at once": lambda m, z, labels, each: ce(z.movedim(m.dim, 2), labels),
    "squared": lambda m, z, labels, each: losses(m, z, labels) + z.pow(2).mean(),
    "the largest": lambda m, z, labels, each: (losses(m, z, labels), z.argmax(-1)),
    "some classes": lambda m, z, labels, each: losses(m, z, labels) + z[..., :7].mean(),
    "a copy of all": lambda m, z, labels, each: losses(m, z.contiguous() * 0.5, labels),
    "a loss of two": lambda m, z, labels, each: ce(z.narrow(m.dim, 0, 2).movedim(m.dim, 2), labels[..., :2]),
    "with another tensor": lambda m, z, labels, each: (
        losses(m, z, labels) + torch.stack([each[0], torch.zeros_like(each[0])]).mean()
    ),
    "statistics of all": lambda m, z, labels, each: losses(m, z, labels) + z.logsumexp(-1).mean(),
    "the stack changes": changed_by(lambda m, z, each: z.mul_(2.0)),
    "a view of the stack changes": changed_by(lambda m, z, each: m.of(z, 1).mul_(2.0)),
    "a flat view of the stack changes": changed_by(lambda m, z, each: m.of(z, 1).reshape(-1, V).mul_(2.0)),
    "a head's logits change": changed_by(lambda m, z, each: each[1].mul_(2.0)),
    "a loss of a view without a graph": lambda m, z, labels, each: (
        losses(m, z, labels) + ce(without_graph(m.of, z, 1), labels[..., 1])
    ),
    "a loss of a stack without a graph": lambda m, z, labels, each: (
        losses(m, z, labels) + ce(m.of(without_graph(torch.stack, each, m.dim), 1), labels[..., 1])
    ),
}


@torch.no_grad()
def without_graph(function, *args):
    return function(*args)


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, TOKENS, D, generator=g), torch.randint(0, V, (2, TOKENS, K), generator=g)


def pair(use, **options):
    """Returns the model, and a converted copy."""
    torch.manual_seed(0)
    theirs = Model(use, **options)
    ours = copy.deepcopy(theirs)
    with warnings.catch_warnings(action="ignore"):
        ckptkern.convert(ours, *inputs(), recompute="full")
    return ours, theirs


def step(model, seed):
    model.zero_grad()
    with warnings.catch_warnings(action="ignore"):
        results = tree_leaves(model.train()(*inputs(seed)))
        results[0].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {f"result {i}": result.detach() + 0 for i, result in enumerate(results)} | grads


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("use", [*FUSED, *VALUES])
def test_a_step_is_that_of_torch(use, dim, bias):
    ours, theirs = pair((FUSED | VALUES)[use], dim=dim, bias=bias)
    for seed in (1, 2):
        assert_same_within_rounding(step(ours, seed), step(theirs, seed))
    if use in (*FUSED, "squared"):
        ran = "fused" if use in FUSED else "original"
        assert [head.forward.calls[ran] for head in ours.heads] == [2] * K


def test_the_stack_is_lazy_and_saves_no_logits():
    ours, theirs = pair(FUSED["musicgen"])
    assert type(ours(*inputs())[1]) is Logits
    peaks = []
    for model in (ours, theirs):
        step(model, 1)
        with peak_memory("cpu") as peak:
            step(model, 1)
        peaks.append(peak.bytes)
    assert peaks[0] < peaks[1] - K * 2 * TOKENS * V * 4


def test_a_compiled_model_gets_values():
    ours, theirs = pair(FUSED["selected"])
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager")
    for seed in (1, 2):
        assert_same_within_rounding(
            {name.removeprefix("_orig_mod."): value for name, value in step(compiled, seed).items()}, step(theirs, seed)
        )


def test_it_raises_what_torch_raises():
    ours, _ = pair(lambda m, z, labels, each: losses(m, z, labels) if m.dim == 1 else torch.stack(each, 9).sum())
    ours.dim = 0
    with pytest.raises(IndexError, match="Dimension out of range"):
        ours.train()(*inputs())


def test_what_reads_values_is_said():
    model = Model(VALUES["squared"])
    with pytest.warns(UserWarning, match="also passes the logits of heads.0 to stack, which needs their values"):
        ckptkern.convert(model, *inputs(), recompute="full")
    model = Model(VALUES["a loss of all at once"])
    rows = ckptkern.convert(model, *inputs(), recompute="full")
    assert {row.reason for row in rows if row.name == "heads.0"} == {
        "its result goes through stack before F.cross_entropy"
    }
