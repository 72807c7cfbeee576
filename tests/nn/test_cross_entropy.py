"""LinearCrossEntropyLoss: torch's constructor, state and results; tied weights; what is called because no op stands for it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.cases import assert_same_within_rounding
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import ckptkern
from ckptkern.memory import saved_tensors

WIDTH, CLASSES, IGNORED = 7, 12, -100
ours = functools.partial(ckptkern.nn.LinearCrossEntropyLoss, dtype=torch.float64)
TORCH_CLASS = getattr(nn, "LinearCrossEntropyLoss", None)


def inputs(*lead):
    x = torch.randn(*lead, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(CLASSES, lead)
    target.view(-1)[::3] = IGNORED
    return x, target


def gradients(loss, module, x):
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss.sum(), (x, *parameters))
    return dict(zip(("loss", "x", *names), (loss.detach(), *grads), strict=True))


@pytest.mark.skipif(TORCH_CLASS is None, reason="this torch has no LinearCrossEntropyLoss")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(reduction="none", weight=torch.linspace(0.5, 2, CLASSES, dtype=torch.float64), bias=True),
        dict(out_features=(2, 3), bias=True),
    ],
    ids=str,
)
def test_like_torchs(options):
    """The same parameters from the same seed, state_dicts that go both ways, the same loss and gradients."""
    made = []
    for kind in (ours, functools.partial(TORCH_CLASS, dtype=torch.float64)):
        torch.manual_seed(0)
        made.append(kind(WIDTH, CLASSES, **options))
    mine, other = made
    torch.testing.assert_close(mine.state_dict(), other.state_dict(), rtol=0, atol=0)
    other.load_state_dict(mine.state_dict())
    x, target = inputs(6)[0], torch.randint(CLASSES, (6, *options.get("out_features", ())))
    shared = ckptkern.nn.LinearCrossEntropyLoss.from_torch(other, recompute="none")
    assert shared.linear is other.linear
    assert shared.recompute == "none"
    for module in (mine, shared):
        assert_same_within_rounding(gradients(module(x, target), module, x), gradients(other(x, target), other, x))


OWN = dict(logit_scale=0.5, softcap=3.0, z_loss=0.1)


def unfused(module, x, target):
    z = module.linear(x) * 0.5
    z = 3.0 * torch.tanh(z / 3.0)
    counted = target != IGNORED
    loss = F.cross_entropy(z.flatten(0, -2), target.flatten())
    return loss + 0.1 * (torch.logsumexp(z, -1).square() * counted).sum() / counted.sum()


class LoRA(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.base = linear
        self.a, self.b = (nn.Parameter(torch.randn(*s, dtype=torch.float64)) for s in ((2, WIDTH), (CLASSES, 2)))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "none": lambda module: None,
    "lora": lambda module: setattr(module, "linear", LoRA(module.linear)),
    "hook": lambda module: module.linear.register_forward_hook(lambda module, args, y: 2 * y),
    "parametrization": lambda module: parametrize.register_parametrization(module.linear, "weight", Twice()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_own_options_and_a_head_that_is_more_than_its_weight(change):
    """Any leading shape, and what torch's module has not. An adapter on the head counts (trl#5676); logits are not saved."""
    module, (x, target) = ours(WIDTH, CLASSES, bias=True, **OWN), inputs(2, 3, 4)
    CHANGES[change](module)
    assert_same_within_rounding(
        gradients(module(x, target), module, x), gradients(unfused(module, x, target), module, x)
    )
    with saved_tensors([x, target, *module.parameters()]) as saved:
        module(x, target)
    assert saved.bytes < 24 * CLASSES * 8
    assert "softcap=3.0" in repr(module)


@pytest.mark.parametrize("bias", [False, True])
def test_tied_to_an_embedding(bias):
    """One Parameter in two places: its gradient is the sum; no memory is taken for another weight."""
    embedding = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64)
    module = ours(WIDTH, CLASSES, bias=bias, linear_weight=embedding.weight)
    assert module.linear.weight is embedding.weight
    ids, (_, target) = torch.randint(CLASSES, (5,)), inputs(5)
    (found,) = torch.autograd.grad(module(embedding(ids), target), embedding.weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(module.linear(embedding(ids)), target), embedding.weight)
    torch.testing.assert_close(found, expected)
    assert len(list(nn.ModuleList([embedding, module]).parameters())) == 1 + bias


@pytest.mark.parametrize(
    "options", [dict(return_entropy=True, top_k=3), dict(return_lse=True, return_log_probs=True, return_accuracy=True)]
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_it_returns_beside_the_loss(options, reduction):
    """Of the op, and of the linear layer that is called for a hook: the same, and None for what is not asked for."""
    module, (x, target) = ours(WIDTH, CLASSES, bias=True, reduction=reduction, **options, **OWN), inputs(4, 5)
    asked = {"loss", *(name.removeprefix("return_") for name in options)}
    asked |= {"arg_max"} if "return_accuracy" in options else set()
    linear, found = module.linear, []
    for _ in range(2):
        got = module(x, target)
        assert {name for name, one in got._asdict().items() if one is not None} == asked
        tensors = [one for one in tree_leaves(tuple(got)) if one is not None]
        total = sum(one.sum() for one in tensors if one.requires_grad)
        found.append([*(one.detach() for one in tensors), *torch.autograd.grad(total, (x, *linear.parameters()))])
        linear.register_forward_hook(lambda module, args, y: y)
    torch.testing.assert_close(*found)
    assert not isinstance(ours(WIDTH, CLASSES)(x, target), tuple)


WRONG = [
    (dict(weight=torch.ones(3)), ValueError, r"weight must have shape \(12,\), but has \(3,\)"),
    (dict(options=object()), ValueError, "options configure torch's chunking; pass workspace"),
    (dict(recompute="some"), ValueError, "recompute must be one of"),
    (dict(linear_weight=torch.ones(12, 7)), ValueError, r"must be a Parameter of shape \(12, 7\)"),
    (dict(linear_weight=nn.Parameter(torch.ones(7, 12))), ValueError, r"of shape \(12, 7\), not \(7, 12\)"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
def test_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        ours(WIDTH, CLASSES, **options)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn|no such module"):
        ckptkern.nn.LinearCrossEntropyLoss.from_torch(nn.CrossEntropyLoss())
