"""LinearCrossEntropyLoss: torch's constructor, state and results; tied weights; what is called because no op stands for it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support.cases import assert_same_within_rounding
from support.drop_ins import Adapter
from torch import nn
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
    modules = []
    for kind in (ours, functools.partial(TORCH_CLASS, dtype=torch.float64)):
        torch.manual_seed(0)
        modules.append(kind(WIDTH, CLASSES, **options))
    mine, other = modules
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


CHANGES = {
    "none": lambda module: None,
    "adapter": lambda module: setattr(module, "linear", Adapter(module.linear)),
    "hook": lambda module: module.linear.register_forward_hook(lambda module, args, y: 2 * y),
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
    module, ids = ours(WIDTH, CLASSES, bias=bias, linear_weight=embedding.weight), torch.randint(CLASSES, (5,))
    _, target = inputs(5)
    assert module.linear.weight is embedding.weight
    losses = module(embedding(ids), target), F.cross_entropy(module.linear(embedding(ids)), target)
    torch.testing.assert_close(*(torch.autograd.grad(loss, embedding.weight) for loss in losses))
    assert len(list(module.parameters())) == 1 + bias


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("returned", ["entropy lse", "log_probs accuracy"])
def test_what_it_returns_beside_the_loss(returned, reduction):
    """Of the op, and of the linear layer that is called for a hook: the same, and None for what is not asked for."""
    options = {f"return_{name}": True for name in returned.split()} | ({"top_k": 3} if "entropy" in returned else {})
    module, (x, target) = ours(WIDTH, CLASSES, bias=True, reduction=reduction, **options, **OWN), inputs(4, 5)
    linear, results = module.linear, []
    for _ in range(2):
        got = {name: value for name, value in module(x, target)._asdict().items() if value is not None}
        assert got.keys() == {"loss", *returned.split(), "top_k" if "entropy" in returned else "arg_max"}
        total = sum(value.sum() for value in tree_leaves(got) if value.requires_grad)
        results.append((got, torch.autograd.grad(total, (x, *linear.parameters()))))
        linear.register_forward_hook(lambda module, args, y: y)
    torch.testing.assert_close(*results)
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
    with pytest.raises(TypeError, match=r"module must be a torch\.nn|no class of this name"):
        ckptkern.nn.LinearCrossEntropyLoss.from_torch(nn.CrossEntropyLoss())
