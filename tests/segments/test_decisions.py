"""Decisions of an activation checkpoint, which recompute takes from forward."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.segments.decisions import COLUMNS

TOKENS, EXPERTS, D = 32, 4, 8


def topk(scores):
    values, chosen = torch.topk(scores, 2, -1)
    values /= values.sum(-1, keepdim=True)  # in place, as Mixtral does
    return torch.zeros_like(scores).scatter(-1, chosen, values)


def topk_by_name(scores):
    values, chosen = scores.topk(k=2, dim=0)
    return torch.zeros_like(scores).scatter(0, chosen, values)


def in_order(scores):
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values.cumsum(1) + order


def argsort(scores):
    return scores.argsort(-1).softmax(-1, torch.float32) * scores


def argmax(scores):
    return scores * torch.nn.functional.one_hot(scores.argmax(-1), EXPERTS)


def largest(scores):
    values, chosen = torch.max(scores, 1)
    return values[:, None] * chosen[:, None] + scores.min(1, keepdim=True).values


def drawn(scores):
    chosen = torch.multinomial((1e5 * scores).softmax(-1), 1)
    return torch.nn.functional.dropout(scores * chosen, 0.5)


def compared(scores):
    return torch.where(scores > scores.mean(), scores, 0.0) + scores * torch.le(scores, 0.2)


def bucketed(scores):
    return scores * torch.bucketize(scores, torch.tensor([0.2, 0.25, 0.3]))


def unfound(scores):
    return scores * torch.searchsorted(torch.tensor([0.2, 0.25, 0.3]), scores) + scores.maximum(2 * scores)


CASES = (topk, topk_by_name, in_order, argsort, argmax, largest, drawn, compared, bucketed, unfound)


class Routed:
    """Experts whose weights `choose` gives. What its recompute adds to the scores stands for a matmul that rounds otherwise."""

    def __init__(self, choose, noise):
        self.choose, self.noise, self.calls = choose, noise, 0
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(TOKENS, D, generator=generator, requires_grad=True)
        self.router = (1e-4 * torch.randn(D, EXPERTS, generator=generator)).requires_grad_()
        self.experts = torch.randn(EXPERTS, D, D, generator=generator, requires_grad=True)

    def __call__(self, x):
        self.calls += 1
        scores = (x @ self.router).softmax(-1)
        if self.calls > 1:
            generator = torch.Generator().manual_seed(1)
            scores = scores + self.noise * torch.randn(scores.shape, generator=generator)
        weights = self.choose(scores)
        return torch.einsum("te,td,edf->tf", weights, x, self.experts).sin()

    def gradients(self, run):
        torch.manual_seed(3)
        y = run(self, self.x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [self.x, self.router, self.experts])]


def relative_error(ours, theirs):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


saving = functools.partial(ckptkern.checkpoint, context_fn=ckptkern.saved_decisions)
torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=ckptkern.saved_decisions)


@pytest.mark.parametrize("run", [saving, torchs], ids=["ckptkern", "torch"])
@pytest.mark.parametrize("choose", CASES, ids=lambda case: case.__name__)
def test_recompute_that_rounds_otherwise(choose, run):
    """A little more or less in the scores changes gradients by as little, and without saved decisions by far more."""
    expected = Routed(choose, 0.0).gradients(lambda model, x: model(x))
    assert relative_error(Routed(choose, 0.0).gradients(run), expected) < 1e-6
    noise = 3e-5
    saved = relative_error(Routed(choose, noise).gradients(run), expected)
    recomputed = relative_error(Routed(choose, noise).gradients(ckptkern.checkpoint), expected)
    assert saved < 5e-3 < 0.1 < recomputed


def test_backward_again():
    model = Routed(topk, 1e-2)
    y = saving(model, model.x)
    first, second = (torch.autograd.grad(y.sum(), model.x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


WRONG = {  # what recompute chooses instead of the two largest of 32 x 4 scores
    r"decision 0 of 1 was topk of .*\[32, 4\] in forward, but is argmax": argmax,
    r"\[32, 4\] in forward, but is topk of \[31, 4\]": lambda scores: topk(scores[1:]),
    "after the last of forward's 1 decisions": lambda scores: topk(topk(scores)),
}


@pytest.mark.parametrize("message", WRONG)
def test_other_decisions_are_an_error(message):
    model = Routed(lambda scores: (topk if model.calls == 1 else WRONG[message])(scores), 0.0)
    with pytest.raises(CheckpointError, match=message):
        model.gradients(saving)


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS + 1])
def test_what_is_saved(columns):
    """Comparisons of rows of features are recomputed, and those of integers."""
    contexts = ckptkern.saved_decisions()
    x = torch.randn(3, columns)
    with contexts[0]:
        assert (x > 0).any()
        assert (x.long() >= 0).any()
        torch.topk(x, 2)
        x.max()
    names = [name for name, *_ in contexts[0].decisions]
    assert names == (["gt", "topk"] if columns == COLUMNS else ["topk"])
    assert sum(decision.nbytes for *_, decision in contexts[0].decisions) == 3 * 2 * 8 + (
        3 * columns if "gt" in names else 0
    )


@pytest.mark.parametrize(
    "select", [lambda z: z.topk(2, -1), lambda z: z.sort(1), lambda z: z.max(1, keepdim=True), lambda z: z.min(0)]
)
def test_values_save_where_they_come_from_and_no_scores(select):
    """Of attention that is written out, the largest score of a row is taken off."""
    x = torch.randn(TOKENS, 64, dtype=torch.float64, requires_grad=True)
    with saved_tensors([x]) as saved, ckptkern.saved_decisions()[0]:
        values = select(x * 1).values
    assert [dtype for _, dtype, _ in saved.tensors if dtype.is_floating_point] == []
    torch.testing.assert_close(values, select(x).values)

    def squared(x):
        with ckptkern.saved_decisions()[0]:
            return select(x).values.square()

    small = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(squared, small)


@pytest.mark.parametrize("add", [torch.index_add, torch.Tensor.index_add, torch.Tensor.index_add_])
def test_rows_that_are_added_are_saved_for_their_shape(add):
    places = torch.tensor([3, 0, 3, 1])

    def added(x):
        return add(torch.zeros(4, D), 0, places, x.sin()).square()

    x = torch.randn(4, D, requires_grad=True)
    with saved_tensors([x, places]) as saved, ckptkern.saved_decisions()[0]:
        add(torch.zeros(4, D), 0, places, x * 1)
    assert saved.bytes <= 8
    (dx,) = torch.autograd.grad(added(x).sum(), x)
    y = ckptkern.checkpoint(added, x, context_fn=ckptkern.saved_decisions)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], dx)


def test_rows_that_are_added_where_no_hooks_are_allowed():
    def added(x):
        with ckptkern.saved_decisions()[0]:
            return torch.zeros(4, D).index_add(0, torch.arange(4), x.sin()).sum()

    x = torch.randn(4, D)
    assert torch.equal(torch.func.grad(added)(x), x.cos())
    assert torch.equal(torch.compile(added, backend="eager", fullgraph=True)(x), added(x))


def test_compiled():
    def call(x, router):
        return topk((x @ router).softmax(-1)).sin() @ router.t() * x

    model, results = Routed(topk, 0.0), []
    for run in (call, torch.compile(functools.partial(saving, call), fullgraph=True, backend="aot_eager")):
        y = run(model.x, model.router)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [model.x, model.router])])
    assert relative_error(*results) < 1e-6
