"""The norm before an LM head saves its input alone: run in chunks of tokens, whose insides backward recomputes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conversion.steps import saved
from conversion.test_heads import LM, WIDTH, S, V, assert_same_step, ids
from support.architectures import RMSNorm
from torch import nn

import ckptkern
from ckptkern.conversion.tiled import Tiled
from ckptkern.memory import peak_memory


class Biased(RMSNorm):
    def __init__(self):
        super().__init__(WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.bias


class OverTokens(Biased):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6))


class Counting(Biased):
    """It has a buffer, so it is left: a second forward might change it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


def converted(norm, kind=LM, **options):
    """Returns (a converted model with this norm before its head, the model as it was, the norm's row)."""
    torch.manual_seed(0)
    theirs = kind()
    theirs.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
    theirs.body.register_buffer("state", torch.zeros(()))  # so that body itself stays
    ours = copy.deepcopy(theirs)
    rows = ckptkern.convert(ours, ids(), ids(1), **options).rows
    return ours, theirs, next((row for row in rows if row.name == "body.1"), None)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", [partial(RMSNorm, WIDTH), Biased])
def test_it_saves_its_input_and_computes_the_same(kind, recompute):
    ours, theirs, row = converted(norm := kind(), recompute=recompute)
    without, _, none = converted(norm, recompute=recompute, exclude="body.1")
    x = ids().numel() * WIDTH * 4
    assert none is None
    assert row.replaced_by == "tiled"
    assert (row.saved_before, row.saved_after) == (2 * x + x // WIDTH, x)  # and a number for each token
    assert saved(without, ids(2), ids(3)) - saved(ours, ids(2), ids(3)) == x + x // WIDTH
    assert_same_step(ours, theirs)
    assert_same_step(copy.deepcopy(ours), theirs)
    ckptkern.revert(ours)
    assert "forward" not in vars(ours.body[1])


def test_it_takes_tokens_in_chunks_within_the_workspace():
    ours, theirs, _ = converted(Biased(), workspace="64KiB")
    x = torch.randn(8192, WIDTH, requires_grad=True)
    ours.body[1](x).sum().backward()
    peaks = []
    for norm in (ours.body[1], theirs.body[1]):
        norm.weight.grad = torch.zeros(WIDTH)
        with peak_memory("cpu") as peak:
            norm(x).backward(x.detach())
        peaks.append(peak.bytes)
    assert peaks[0] < 2 * x.nbytes + 2**16 < peaks[1], peaks  # y and dx; x.grad is there


class Dropping(Biased):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


def test_its_recompute_samples_the_same_dropout():
    ours, theirs, row = converted(Dropping(), recompute="full")
    assert row.replaced_by == "tiled"
    assert_same_step(ours, theirs)


@pytest.mark.parametrize("kind", [OverTokens, Counting, lambda: nn.LayerNorm(WIDTH)])
def test_what_is_not_a_norm_of_each_token_or_saves_little_is_left(kind):
    ours, theirs, row = converted(kind())
    assert row is None or row.replaced_by is None
    assert not isinstance(ours.body[1].forward, Tiled)
    assert_same_step(ours, theirs)


class Scaled(LM):
    def hidden(self, ids):
        return super().hidden(ids) * 2.0


def test_a_norm_that_no_head_reads_is_left():
    assert converted(Biased(), Scaled)[2] is None
    assert converted(Biased(), recompute="none")[2] is None


def test_the_original_forward_runs_without_gradients_and_in_transforms():
    ours, theirs, _ = converted(Biased())
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert torch.equal(ours.body[1](x), theirs.body[1](x))
    gradients = [torch.func.grad(lambda x, norm=m.body[1]: norm(x).square().sum())(x) for m in (ours, theirs)]
    torch.testing.assert_close(*gradients)


class Transform(nn.Module):
    """BERT's, before its head."""

    def __init__(self, p=0.0):
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.norm(F.gelu(self.dense(x))))


class Embeddings(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words, self.norm = nn.Embedding(V, WIDTH, **options), nn.LayerNorm(WIDTH)
        self.places = nn.Embedding(S, WIDTH)

    def forward(self, ids):
        return self.norm(self.words(ids) + self.places(torch.arange(ids.shape[-1])))


class Bert(LM):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.body = Embeddings(), Transform(**options)
        self.head.weight = self.embed.words.weight

    def hidden(self, ids):
        return self.body(self.embed(ids))


def test_a_transform_before_the_head_and_embeddings_save_their_inputs():
    torch.manual_seed(0)
    theirs = Bert()
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, ids(), ids(1), recompute="full")
    assert {row.name: row.replaced_by for row in conversion.converted} == {
        "embed": "checkpoint",
        "body": "tiled",
        "head": "linear_cross_entropy",
    }
    saves = {row.name: row.saved_after for row in conversion.converted}
    assert (saves["embed"], saves["body"]) == (0, ids().numel() * WIDTH * 4)
    assert_same_step(ours, theirs)
    assert conversion.calls == {"fused": 4, "checkpointed": 2, "original": 0}
    ours.body.dense.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="dense has a hook"):
        assert_same_step(ours, theirs)


def test_dropout_of_a_transform_is_that_of_forward():
    torch.manual_seed(0)
    model = Bert(p=0.5)
    conversion = ckptkern.convert(model, ids(), ids(1), recompute="full", workspace=1)
    assert "body" in {row.name for row in conversion.converted}
    x = torch.randn(512, WIDTH, requires_grad=True)
    y = model.train().body(x)
    y.sum().backward()
    assert 0.3 < float((y == 0).float().mean()) < 0.7
    torch.testing.assert_close(model.body.norm.bias.grad, 2.0 * (y != 0).float().sum(0))


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}, {"padding_idx": 3}], ids=str)
def test_embeddings_with_other_gradients_or_forwards_are_left(options):
    model = Bert()
    model.embed, model.head = Embeddings(**options), nn.Linear(WIDTH, V)
    conversion = ckptkern.convert(model, ids(), ids(1), recompute="full")
    assert ("embed" in {row.name for row in conversion.converted}) == ("padding_idx" in options)


class Projected(Embeddings):
    """RoCBert's: a linear layer projects embeddings side by side."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids):
        words = self.words(ids)
        return self.norm(self.dense(torch.cat([words, self.places(torch.arange(ids.shape[-1])).expand_as(words)], -1)))


def test_embeddings_with_a_projection_save_the_ids():
    theirs = Bert()
    theirs.embed, theirs.head = Projected(), nn.Linear(WIDTH, V)
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, ids(), ids(1), recompute="full")
    assert {row.name: row.saved_after for row in conversion.converted}["embed"] == 0
    assert_same_step(ours, theirs)


class Bags(Embeddings):
    def __init__(self, **options):
        super().__init__()
        self.words = nn.EmbeddingBag(V, WIDTH, **options)

    def forward(self, ids):
        return self.norm(self.words(ids.flatten()[:, None]).view(*ids.shape, WIDTH))


@pytest.mark.parametrize("kind", [partial(Bags, sparse=True), partial(Bags, max_norm=1.0)])
def test_embeddings_of_other_classes_are_left(kind):
    model = Bert()
    model.embed, model.head = kind(), nn.Linear(WIDTH, V)
    conversion = ckptkern.convert(model, ids(), ids(1), recompute="full")
    assert {row.name for row in conversion.converted} == {"body", "head"}


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(V, WIDTH), nn.LayerNorm(WIDTH)
        self.dense, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return self.norm(self.out(F.gelu(self.dense(self.words(ids)))))


class OfIds(LM):
    def __init__(self):
        super().__init__()
        self.body = Whole()

    def hidden(self, ids):
        return self.body(ids)


def test_a_model_that_is_called_with_ids_is_no_embedding():
    conversion = ckptkern.convert(model := OfIds(), ids(), ids(1), recompute="full")
    assert [row.name for row in conversion.converted] == ["head"]
    wrapper = nn.Sequential()
    wrapper.inner, wrapper.forward = ckptkern.revert(model), lambda *call: model(*call)
    assert "inner" not in {row.name for row in ckptkern.convert(wrapper, ids(), ids(1), recompute="full").converted}


class Keeping(Transform):
    last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_transform_that_keeps_a_tensor_is_left():
    model = Bert()
    model.body = Keeping()
    conversion = ckptkern.convert(model, ids(), ids(1), recompute="full")
    assert {row.name for row in conversion.converted} == {"embed", "head"}
    assert model.body.last is None


class Within(Transform):
    """Roberta's: the transform and the head are one module."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(WIDTH, V)

    def forward(self, x):
        z = self.decoder(super().forward(x))
        return z if self.scale == 1.0 else self.scale * z


class Scaling(Within):
    scale = 2.0


class Adding(Within):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(V))

    def forward(self, x):
        return super().forward(x) + self.bias


class Mixing(Within):
    def forward(self, x):
        return super().forward(x.cumsum(-2))


class KeepingWithin(Within):
    last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Aside(Within):
    def forward(self, x):
        super().forward(x)
        return self.decoder(x)


class Roberta(LM):
    def __init__(self, head):
        super().__init__()
        self.head = head
        head.decoder.weight = self.embed.weight


def within(kind, **options):
    """Returns (a converted model whose head is inside this module, the model as it was, what replaces its modules)."""
    torch.manual_seed(0)
    theirs = Roberta(kind())
    ours = copy.deepcopy(theirs)
    rows = ckptkern.convert(ours, ids(), ids(1), recompute="full", **options).converted
    return ours, theirs, {row.name: row for row in rows}


def test_a_module_with_the_head_inside_runs_in_chunks_up_to_the_head():
    ours, theirs, rows = within(Within)
    assert {name: row.replaced_by for name, row in rows.items()} == {
        "head": "tiled",
        "head.decoder": "linear_cross_entropy",
    }
    x = ids().numel() * WIDTH * 4
    assert (rows["head"].saved_before, rows["head"].saved_after) == (
        3 * x + x // WIDTH * 2,
        x,
    )  # and the norm's statistics
    assert_same_step(ours, theirs)
    assert_same_step(copy.deepcopy(ours), theirs)
    with torch.no_grad():
        assert torch.equal(ours.eval()(ids(2))[0], theirs.eval()(ids(2))[0])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.head.decoder, theirs.head.decoder = (nn.Sequential(copy.deepcopy(theirs.head.decoder)) for _ in range(2))
    assert_same_step(ours.train(), theirs.train())  # as when a LoRA layer takes its place


def test_a_head_inside_costs_no_more_than_its_input():
    ours, theirs = (within(Within, workspace="64KiB")[0] for _ in range(2))
    theirs.head.forward.unbind()
    peaks, length = [], 4096
    for model in (ours, theirs):
        model.zero_grad(set_to_none=False)
        with peak_memory("cpu") as peak:
            model(ids(2, length), ids(3, length))[1].backward()
        peaks.append(peak.bytes)
    x = ids(2, length).numel() * WIDTH * 4
    assert peaks[0] < peaks[1] - x, [bytes_ / x for bytes_ in peaks]


@pytest.mark.parametrize("kind", [Scaling, Adding, Mixing, KeepingWithin, Aside])
def test_a_module_that_does_more_than_the_head_or_mixes_tokens_is_left(kind):
    ours, theirs, rows = within(kind)
    assert "head" not in rows
    assert_same_step(ours, theirs)


def test_a_result_that_is_no_longer_the_heads_is_the_original_forwards():
    ours, theirs, _ = within(Within)
    ours.head.scale = theirs.head.scale = 2.0
    with pytest.warns(UserWarning, match="its result is not that of decoder"):
        assert_same_step(ours, theirs)
