"""Token-wise modules that read values run in chunks of tokens inside layers that are activation checkpoints."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conversion.test_parts import LAYERS, WORKSPACE, D, Layer, Model, Switches, attention, peak, step
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion import revert

EXPERTS, TOP, WIDE = 4, 2, 4 * D


class Experts(nn.Module):
    """Groups tokens by expert, in groups whose sizes it reads on the host."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDE, D) * D**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, D, WIDE) * WIDE**-0.5)

    def weighted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x).softmax(-1).topk(TOP)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.weighted(rows)
        order = chosen.flatten().argsort(stable=True)
        groups = rows[order // TOP].split(chosen.flatten().bincount(minlength=EXPERTS).tolist())
        parts = [F.silu(part @ up.T) @ down.T for part, up, down in zip(groups, self.up, self.down, strict=True)]
        results = torch.cat(parts) * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // TOP, results).view_as(x)


def converted(
    kind: type[Experts], layer: type[Layer], tokens: int = 256
) -> tuple[nn.Module, nn.Module, ckptkern.Conversion]:
    """Returns (a converted model, the model as it was, the table)."""
    theirs = Model(attention, F.gelu)
    for i, inner in enumerate(theirs.layers):
        torch.manual_seed(i)
        inner.__class__, inner.mlp = layer, kind()
    ours = copy.deepcopy(theirs)
    return ours, theirs, ckptkern.convert(ours, torch.randn(1, tokens, D), recompute="full", workspace=WORKSPACE)


def assert_same_steps(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    results = []
    for m in (ours, theirs):
        torch.manual_seed(1)
        results.append(step(m, x))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * max(float(b.norm()), 1e-3)


@pytest.mark.parametrize(("layer", "how"), [(Layer, "in parts: "), (Switches, "as a whole: ")])
def test_experts_that_read_counts_run_in_chunks_of_tokens(layer, how):
    ours, theirs, conversion = converted(Experts, layer)
    rows = {row.name: row for row in conversion}
    for i in range(LAYERS):
        assert rows[f"layers.{i}"].replaced_by == "checkpoint"
        assert f"it runs {how}" in rows[f"layers.{i}"].reason
        assert rows[f"layers.{i}.mlp"].replaced_by == "tiled"
    x = torch.randn(2, 300, D)
    for m in (ours, pickle.loads(pickle.dumps(ours))):
        assert_same_steps(m, theirs, x)
    assert conversion.calls["original"] == 0
    x = torch.randn(1, 1024, D)
    checkpointed = copy.deepcopy(theirs)
    for one in checkpointed.layers:
        one.forward = ckptkern.checkpointed(one.forward)
    # of each pair of token and expert: an input, two results of up and silu, and the result of down with its product
    inside = 4 * 1024 * TOP * (2 * WIDE + 2 * D)
    assert peak(ours, x) < peak(checkpointed, x) - inside + WORKSPACE
    ours.layers[0].mlp.router = nn.Linear(D, EXPERTS, bias=False)
    theirs.layers[0].mlp.router = copy.deepcopy(ours.layers[0].mlp.router)
    with pytest.warns(UserWarning, match="router is another module"):
        assert_same_steps(ours, theirs, x)
    revert(ours)
    assert all("forward" not in vars(m) for m in ours.modules())


class Fused(nn.Module):
    """Experts that are one op each, in a loop."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, WIDE), nn.GELU(), nn.Linear(WIDE, D)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        y = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            y = y.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return y.view_as(x)


@pytest.mark.parametrize("layer", [Layer, Switches])
def test_fused_experts_run_in_chunks_of_tokens(layer, recwarn):
    ours, theirs, conversion = converted(Fused, layer)
    rows = {row.name: row.replaced_by for row in conversion}
    assert (rows["layers.0.mlp"], rows["layers.0.mlp.experts.0"]) == ("tiled", "mlp_block")
    assert_same_steps(ours, theirs, torch.randn(1, 700, D))
    assert not any("not fused" in str(warning.message) for warning in recwarn)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        experts = Experts()
        self.first, self.second = nn.ModuleList([experts]), nn.ModuleList([experts])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first[0](x)
        return y - y.mean(-2, keepdim=True) + self.second[0](x)


def test_experts_with_two_names_run_in_chunks_of_tokens():
    ours, theirs, conversion = converted(Shares, Switches)
    assert "tiled" in {row.replaced_by for row in conversion if "layers.0" in row.name}
    assert_same_steps(ours, theirs, torch.randn(1, 700, D))


class Limited(Experts):
    """Drops tokens beyond an expert's capacity, nearly twice its even share, so that few samples show it."""

    def weighted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().weighted(x)
        places = F.one_hot(chosen.flatten(), EXPERTS).cumsum(0).gather(1, chosen.view(-1, 1)).view_as(chosen)
        return weights * (places <= self.capacity(len(x))), chosen

    def capacity(self, tokens: int) -> float:
        return 1.9 * TOP / EXPERTS * tokens


class LimitedInTraining(Limited):
    def capacity(self, tokens: int) -> float:
        return super().capacity(tokens) if self.training else tokens


class LimitedTo(Limited):
    def capacity(self, tokens: int) -> float:
        return 300


class Adding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, loss):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, torch.ones(())


class Balanced(Experts):
    """Adds the gradient of an auxiliary loss, as DeepSeek's gate does."""

    def weighted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().weighted(x)
        return Adding.apply(weights, 1e-4 * self.router(x).softmax(-1).mean(0).square().sum()), chosen


class Centred(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.1 * x.mean(-2, keepdim=True))


class Placed(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-3 * torch.arange(x.shape[-2])[:, None])


class Keeping(Experts):
    last = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Limited, LimitedInTraining, LimitedTo, Balanced, Centred, Placed, Keeping])
def test_experts_that_look_token_wise_stay_whole(kind):
    ours, theirs, conversion = converted(kind, Switches, tokens=700)
    assert all(row.replaced_by != "tiled" for row in conversion)
    assert_same_steps(ours, theirs, torch.randn(1, 700, D))


class Hooked(Experts):
    def __init__(self):
        super().__init__()
        self.router.register_forward_hook(nothing)


def nothing(*_):
    return None


def test_experts_with_hooks_stay_whole_without_a_warning(recwarn):
    _, _, conversion = converted(Hooked, Switches)
    assert not any(row.replaced_by == "tiled" and row.name.endswith("mlp") for row in conversion)
    assert not any("has a hook" in str(warning.message) for warning in recwarn)


class Sampling(Experts):
    def weighted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().weighted(x)
        return F.dropout(weights, 0.1, self.training), chosen


def test_the_recompute_of_chunks_samples_the_same_dropout():
    """A CPU samples for the chunks of one sequence what it samples for the whole."""
    ours, theirs, conversion = converted(Sampling, Switches)
    assert "tiled" in {row.replaced_by for row in conversion}
    assert_same_steps(ours, theirs, torch.randn(1, 700, D))


def test_wrong_chunks_leave_a_checkpoint_of_the_whole(monkeypatch):
    """The layer's check runs with chunks: it sees what the check of the module alone did not."""
    monkeypatch.setattr("ckptkern.conversion.tiled.check_token_wise", lambda *_: None)
    ours, theirs, conversion = converted(Centred, Switches)
    assert all(row.replaced_by != "tiled" for row in conversion)
    assert_same_steps(ours, theirs, torch.randn(1, 700, D))
