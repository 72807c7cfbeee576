"""The norm before an LM head saves its input alone: run in chunks of tokens, whose insides backward recomputes."""

from __future__ import annotations

import copy

import pytest
import torch
from conversion.test_heads import LM, WIDTH, V, assert_same_step, ids, model_of, step
from torch import Tensor, nn

import ckptkern
from ckptkern.conversion.norms import Norm
from ckptkern.memory import peak_memory, saved_tensors


class RMSNorm(nn.Module):
    """As transformers write it."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return y if self.bias is None else y + self.bias


class OverTokens(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6))


class FixedTable(RMSNorm):
    """It has a buffer, so it is left: a second forward might change it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def with_norm(norm: nn.Module, **options) -> LM:
    model = model_of(**options)
    model.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
    return model


def norm_row(model: nn.Module, **options) -> ckptkern.conversion.Row | None:
    rows = ckptkern.convert(model, ids(), ids(1), **options).rows
    return next((row for row in rows if row.name == "body.1"), None)


def saved(model: LM) -> int:
    with saved_tensors(model) as found:
        model(ids(2), ids(3))
    return found.bytes


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_saves_its_input_and_computes_the_same(bias: bool, recompute: str) -> None:
    theirs = with_norm(RMSNorm(bias))
    ours, without = copy.deepcopy(theirs), copy.deepcopy(theirs)
    row = norm_row(ours, recompute=recompute)
    assert norm_row(without, recompute=recompute, exclude="body.1") is None
    x = ids().numel() * WIDTH * 4
    assert row.replaced_by == "tiled"
    assert row.saved_after == x
    assert row.saved_before == 2 * x + x // WIDTH  # and a number for each token
    assert saved(without) - saved(ours) == x + x // WIDTH
    assert_same_step(ours, theirs)
    assert_same_step(without, theirs)


def test_it_takes_tokens_in_chunks_within_the_workspace() -> None:
    theirs = with_norm(RMSNorm())
    model = copy.deepcopy(theirs)
    assert norm_row(model, workspace="64KiB").replaced_by == "tiled"
    norm, size = model.body[1], 8192
    x = torch.randn(size, WIDTH, requires_grad=True)
    norm(x).sum().backward()
    peaks = {}
    for name, one in (("ours", norm), ("theirs", theirs.body[1])):
        one.weight.grad = torch.zeros(WIDTH)
        with peak_memory("cpu") as peak:
            one(x).backward(x.detach())
        peaks[name] = peak.bytes
    assert peaks["ours"] < 2 * x.nbytes + 2**16 < peaks["theirs"], peaks  # y and dx; x.grad is there


@pytest.mark.parametrize("kind", [OverTokens, FixedTable, lambda: nn.LayerNorm(WIDTH)])
def test_what_is_not_a_norm_of_each_token_or_saves_little_is_left(kind) -> None:
    theirs = with_norm(kind())
    ours = copy.deepcopy(theirs)
    row = norm_row(ours)
    assert row is None or row.replaced_by is None
    assert not isinstance(ours.body[1].forward, Norm)
    assert_same_step(ours, theirs)


def test_a_norm_that_no_head_reads_is_left() -> None:
    class Scaled(LM):
        def hidden(self, ids: Tensor) -> Tensor:
            return super().hidden(ids) * 2.0

    torch.manual_seed(0)
    model = Scaled()
    model.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), RMSNorm())
    assert norm_row(model) is None


def test_the_original_forward_runs_without_gradients_in_transforms_and_after_revert() -> None:
    theirs = with_norm(RMSNorm())
    ours = copy.deepcopy(theirs)
    assert norm_row(ours, recompute="none") is None
    norm_row(ours)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert torch.equal(ours.body[1](x), theirs.body[1](x))
    gradient = torch.func.grad(lambda x: ours.body[1](x).square().sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: theirs.body[1](x).square().sum())(x))
    assert_same_step(copy.deepcopy(ours), theirs)
    ckptkern.revert(ours)
    assert "forward" not in vars(ours.body[1])
    assert step(ours)["loss"] == step(theirs)["loss"]


def test_logits_have_the_number_of_classes() -> None:
    ours = with_norm(RMSNorm())
    norm_row(ours)
    assert ours(ids(), ids(1))[0].shape[-1] == V
