"""convert on models that compute their loss: the head and F.cross_entropy become one op."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from conversion import steps
from conversion.steps import assert_same, by_deepcopy, by_pickle, pair, saved
from conversion.test_convert import OF_LINEAR
from support.architectures import LoRA
from support.cases import assert_as_exact
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.logits import Logits
from ckptkern.memory import saved_tensors

V, WIDTH, B, S = 67, 16, 2, 9
Loss = Callable[["LM", Tensor, Tensor], Tensor]


def flat(model, logits, targets, **options):
    return F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1), **options)


class LM(nn.Module):
    """A language model in which each way of computing a loss is one function."""

    def __init__(self, loss=flat, bias=False, tied=True):
        super().__init__()
        self.embed, self.body = nn.Embedding(V, WIDTH), nn.Sequential(nn.LayerNorm(WIDTH))
        self.head, self.loss = nn.Linear(WIDTH, V, bias), loss
        if tied:
            self.head.weight = self.embed.weight
        self.added = nn.Parameter(torch.randn(V))
        self.class_weights = torch.rand(V)

    def hidden(self, ids):
        return self.body(self.embed(ids).cumsum(1) + self.embed(ids).roll(3, -1).tanh())

    def forward(self, ids, targets=None):
        logits = self.head(self.hidden(ids))
        return logits, None if targets is None else self.loss(self, logits, targets)


def ids(seed=0, length=S):
    tokens = torch.randint(0, V, (B, length), generator=torch.Generator().manual_seed(seed))
    tokens[0, 4] = 3
    return tokens


def model_of(loss=flat, **options):
    torch.manual_seed(0)
    return LM(loss, **options)


def converted(model):
    """A copy, whose head must be replaced."""
    ours, _, conversion = pair(model, ids(), ids(1))
    assert [row.replaced_by for row in conversion if row.name == "head"] == ["linear_cross_entropy"], str(conversion)
    return ours


@functools.cache
def _converted_pair(**options):
    theirs = model_of(**options)
    return converted(theirs), theirs


def converted_pair(loss=flat, **options):
    """Copies of (the converted model, the model as it was), which are then given the loss."""
    ours, theirs = copy.deepcopy(_converted_pair(**options))
    ours.loss = theirs.loss = loss
    return ours, theirs


def step(model, seed=2, length=S, **options):
    return steps.step(model, ids(seed, length), ids(seed + 1, length), of=lambda result: result[1], **options)


def keeps_logits(model):
    with saved_tensors([*model.parameters(), model.class_weights]) as saved:
        model(ids(), ids(1))
    return any(V in shape and shape.numel() > V for shape, _, _ in saved.tensors)


def assert_same_step(ours, theirs):
    for seed in (2, 5):
        assert_same(step(ours, seed), step(theirs, seed))


# -- what models do with logits


def in_chunks(model, logits, targets):
    return sum(flat(model, logits[:, i : i + 3], targets[:, i : i + 3], reduction="sum") for i in (0, 3, 6)) / 7


COVERED = {
    "flat": flat,
    "viewed": lambda m, z, t: F.cross_entropy(z.view(-1, z.shape[-1]), target=t.view(-1)),
    "shifted": lambda m, z, t: flat(m, z[..., :-1, :].contiguous(), t[..., 1:]),
    "as float": lambda m, z, t: nn.CrossEntropyLoss()(z.float().flatten(0, 1), t.flatten()),
    "to its own device": lambda m, z, t: flat(m, z.to(t.device).to(torch.float32), t),
    "capped and scaled": lambda m, z, t: flat(m, torch.tanh(z * 0.5) * 2 * 3, t),
    "smoothed": lambda m, z, t: flat(m, z, t, label_smoothing=0.2),
    "ignored": lambda m, z, t: flat(m, z, t, ignore_index=3),
    "padded": lambda m, z, t: flat(m, z, F.pad(t, (0, 1), value=-100)[:, 1:]),
    "summed": lambda m, z, t: flat(m, z, t, reduction="sum") / torch.tensor(7),
    "of each token": lambda m, z, t: (F.cross_entropy(z.transpose(1, 2), t, reduction="none") * torch.arange(S)).mean(),
    "permuted, shifted, copied": lambda m, z, t: F.cross_entropy(z.movedim(2, 1)[..., 1:].contiguous(), t[:, 1:]),
    "tokens first": lambda m, z, t: flat(m, z.transpose(0, 1).contiguous(), t.t()),
    "weighted": lambda m, z, t: flat(m, z, t, weight=m.class_weights),
    "with an added buffer": lambda m, z, t: flat(m, z / 2 + m.class_weights + m.class_weights[None, None], t),
    "one token": lambda m, z, t: F.cross_entropy(z[0, 1], t[0, 1]) + F.cross_entropy(z[1], t[1]),
    "every second": lambda m, z, t: flat(m, z.float()[1:, ::2].clone(), t[1:, ::2]),
    "in chunks": in_chunks,
    "of log_softmax": lambda m, z, t: F.nll_loss(F.log_softmax(z, dim=-1).flatten(0, 1), t.flatten(), m.class_weights),
    "negative": lambda m, z, t: nn.NLLLoss(ignore_index=3)(torch.log_softmax(-z.transpose(1, 2), 1, torch.float32), t),
    "masked rows": lambda m, z, t: F.cross_entropy(z[:, 1:][t[:, 1:] != 3], t[:, 1:][t[:, 1:] != 3]),
}


@pytest.mark.parametrize("loss", COVERED)
def test_a_loss_without_logits(loss):
    for bias in (False, True):
        theirs = model_of(COVERED[loss], bias=bias)
        ours = converted(theirs)
        assert_same_step(ours, theirs)
        assert [keeps_logits(model) for model in (ours, theirs)] == [False, True]


def z_loss(model, logits, targets):
    return flat(model, logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def measured(model, logits, targets):
    with torch.no_grad():
        model.accuracy = (logits.argmax(-1) == targets).float().mean()
    return flat(model, logits, targets)


def changed_after_a_copy(model, logits, targets):
    sublayer = logits / 2
    logits[:, 0] = 0.0
    return flat(model, sublayer, targets) + flat(model, logits, targets)


class Doubled(torch.autograd.Function):
    """Someone's own node, to which logits come past __torch_function__."""

    @staticmethod
    def forward(ctx, z):
        return 2 * z

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


READ = {
    "also a z-loss": z_loss,
    "also an argmax": measured,
    "also detached": lambda m, z, t: flat(m, z, t) + z.detach().square().mean() * m.added.sum(),
    "also another's node": lambda m, z, t: flat(m, z, t) + Doubled.apply(z[:, 1:] / 3).tanh().mean(),
}
LEFT = {
    "a detached head": lambda m, z, t: flat(m, z.detach(), t) + m.added.square().sum() + 0 * z.sum(),
    "listed rows": lambda m, z, t: F.cross_entropy(z.flatten(0, 1)[[1, 0, 5]], t.flatten()[:3]),
    "an added parameter": lambda m, z, t: flat(m, z + m.added, t),
    "a number for each logit": lambda m, z, t: flat(m, z + torch.arange(S * V).view(S, V) % 5.0, t),
    "capped, then added to": lambda m, z, t: flat(m, torch.tanh(z) + m.class_weights, t),
    "added to in place": lambda m, z, t: flat(m, z.add_(m.class_weights), t),
    "scaled by a parameter": lambda m, z, t: flat(m, z * m.added[0], t),
    "changed after a copy": changed_after_a_copy,
    "changed in place": lambda m, z, t: flat(m, z.div_(2), t),
    "hidden classes": lambda m, z, t: flat(m, z.masked_fill(torch.arange(V) == 66, -1e4), t.clamp(max=65)),
    "fewer classes": lambda m, z, t: F.cross_entropy(z[..., :66].reshape(-1, 66), t.flatten().clamp(max=65)),
    "viewed across tokens": lambda m, z, t: F.cross_entropy(z.reshape(B, V, S), t),
    "probabilities": lambda m, z, t: F.cross_entropy(z.flatten(0, 1), F.one_hot(t.flatten(), V).float()),
    "rounded": lambda m, z, t: flat(m, (z * 64).round() / 64 + z, t),
    "a negative cap": lambda m, z, t: flat(m, torch.tanh(z) * -3, t),
}


@pytest.mark.parametrize("loss", READ)
def test_logits_that_are_read_as_well(loss):
    theirs = model_of(READ[loss])
    with pytest.warns(UserWarning, match="forward also passes the logits of head to") as record:
        ours = converted(theirs)
    assert record[0].filename == steps.__file__
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("loss", LEFT)
def test_another_loss_is_left(loss):
    ours, theirs, conversion = pair(model_of(LEFT[loss]), ids(), ids(1))
    head = [row for row in conversion if row.name == "head"]
    assert [row.replaced_by for row in head] in ([], [None]), str(conversion)
    assert all(row.reason for row in head)
    assert "forward" not in vars(ours.head)
    assert_same_step(ours, theirs)
    assert_same_step(*converted_pair(LEFT[loss]))  # where the example had another


# -- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Also where the loss is outside of it, and logits are read there."""
    ours, theirs = converted_pair(lambda m, z, t: flat(m, z.float(), t), tied=False)

    def run(model, autocast=True):
        with torch.autocast("cpu", dtype, enabled=autocast):
            logits, inside = model(ids(2), ids(3))
        assert logits.dtype == (dtype if autocast else torch.float64)
        outside = flat(model, logits.float(), ids(3)) + logits.float().square().mean()
        used = {name: p for name, p in model.named_parameters() if name != "added"}
        return dict(zip(used, torch.autograd.grad(inside + outside, list(used.values())), strict=True))

    assert_as_exact(run(ours), run(theirs), run(copy.deepcopy(theirs).double(), autocast=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_losss_dtype_is_the_originals(dtype):
    theirs = model_of().to(dtype)
    torch.testing.assert_close(*(model(ids(), ids(1))[1] for model in (converted(theirs), theirs)))


# -- what else a model's user does


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_is_converted_and_on_its_own(copied):
    before, theirs = converted_pair()
    ours = copied(before)
    assert ours.head.weight is ours.embed.weight
    assert_same_step(ours, theirs)
    assert not keeps_logits(ours)
    assert not any("forward" in vars(m) for m in ckptkern.revert(ours).modules())
    assert [keeps_logits(model) for model in (ours, before)] == [True, False]


class Named(Tensor):
    pass


OWN_FORWARD = {name: lambda model, change=change: change(model.head) for name, change in OF_LINEAR.items()} | {
    "a sparse weight": lambda model: setattr(
        model.head, "weight", nn.Parameter(model.head.weight.detach().to_sparse_csr(), False)
    ),
    "a subclass of tensors": lambda model: model.body.register_forward_hook(lambda m, args, y: y.as_subclass(Named)),
}
LATER = {"another weight": OWN_FORWARD.pop("another weight")}
BEFORE = OWN_FORWARD | {
    "LoRA": lambda model: setattr(model, "head", LoRA(model.head)),
    "a frozen head": lambda model: model.head.requires_grad_(False),
}
LATER |= BEFORE | {"another layer": lambda model: setattr(model, "head", nn.Linear(WIDTH, V))}


@pytest.mark.parametrize("change", LATER)
def test_a_later_change_counts(change):
    ours, theirs = converted_pair(tied=False)
    for model in (ours, theirs):
        torch.manual_seed(1)
        LATER[change](model)
    assert_same_step(ours, theirs)
    assert type(ours.head(ours.hidden(ids()))) is not Logits or change not in OWN_FORWARD


@pytest.mark.parametrize("change", BEFORE)
def test_what_was_there_before_is_read(change):
    ours, theirs = model_of(tied=False), model_of(tied=False)
    for model in (ours, theirs):
        torch.manual_seed(1)
        BEFORE[change](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conversion = ckptkern.convert(ours, ids(), ids(1))
    assert [row.name for row in conversion.converted] == (["head"] if change in ("a frozen head", "LoRA") else [])
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_and_the_table(dtype):
    theirs, bytes_ = model_of(lambda m, z, t: flat(m, z.float(), t)).to(dtype), {}
    before = saved(theirs, ids(), ids(1))
    for mode in ("none", "selective", "full"):
        model, _, conversion = pair(theirs, ids(), ids(1), recompute=mode)
        (row,) = conversion
        assert (row.name, row.kind) == ("head", "Linear")
        if mode == "none" and dtype is torch.float32:  # both save 4 bytes of a logit
            assert (row.replaced_by, row.reason) == (None, "linear_cross_entropy does not save less")
            continue
        assert row.replaced_by == "linear_cross_entropy"
        bytes_[mode] = saved(model, ids(), ids(1))
        assert before - bytes_[mode] == row.saved_before - row.saved_after
    assert bytes_["selective"] == bytes_["full"] < bytes_.get("none", 10**9)


@pytest.mark.parametrize(
    ("wrong", "reason"), [("loss", "the loss is"), ("gradient", "the numbers of linear_cross_entropy")]
)
def test_an_op_that_were_wrong_is_not_used(monkeypatch, wrong, reason):
    right = ckptkern.ops.linear_cross_entropy

    def op(x, *args, **kwargs):
        more = 0.1 * x.square().mean()
        return right(x, *args, **kwargs) + (more if wrong == "loss" else more - more.detach())

    monkeypatch.setattr(ckptkern.ops, "linear_cross_entropy", op)
    conversion = ckptkern.convert(model_of(), ids(), ids(1))
    assert not conversion.converted
    assert reason in str(conversion)


UNCOUNTED = {
    "padding": lambda m, z, t: flat(m, z, torch.full_like(t, -100)),
    "padding, summed": lambda m, z, t: flat(m, z, torch.full_like(t, 3), ignore_index=3, reduction="sum"),
    "one token, shifted": lambda m, z, t: flat(m, z[:, :0], t[:, :0]),
    "padding, of log-probabilities": lambda m, z, t: F.nll_loss(
        z.flatten(0, 1).log_softmax(-1), torch.full((B * S,), -100)
    ),
}


@pytest.mark.parametrize("loss", UNCOUNTED)
def test_an_example_without_labels_that_count(loss):
    conversion = ckptkern.convert(model_of(UNCOUNTED[loss]), ids(), ids(1))
    (head,) = [row for row in conversion if row.name == "head"]
    assert head.replaced_by is None
    assert head.reason.startswith(
        "no label of the example counts: all are ignore_index (-100), or its sequences are of one"
    )


def test_what_is_asked_and_what_is_missing():
    model = model_of()
    for options, replaced_by in (
        ({"include": "head"}, ["linear_cross_entropy"]),
        ({"exclude": "head"}, []),
        ({"targets": None}, []),
    ):
        rows = ckptkern.convert(model, ids(), **{"targets": ids(1)} | options).converted
        assert [row.replaced_by for row in rows] == replaced_by
    assert [row.replaced_by for row in ckptkern.convert(model, ids(), include="head")] == ["linear_act"]
    assert "head: the example's call has no F.cross_entropy of its logits. With labels" in str(
        ckptkern.convert(model, ids())
    )


def test_functional_calls_and_transforms():
    ours, theirs = converted_pair()
    parameters = {name: torch.randn_like(p).requires_grad_() for name, p in theirs.named_parameters()}

    def loss(parameters, model):
        return torch.func.functional_call(model, parameters, (ids(), ids(1)))[1]

    for run in (loss, torch.func.grad(loss)):
        torch.testing.assert_close(*(run(parameters, model) for model in (ours, theirs)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    grads = []
    for model in converted_pair():
        run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
        run(lambda h, m=model: flat(m, m.head(h), ids(1)), model.hidden(ids())).backward()
        grads.append(model.embed.weight.grad)
    torch.testing.assert_close(*grads)
