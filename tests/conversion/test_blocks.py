"""convert on models of convolutions, and on blocks of which it reads nothing: their blocks become activation checkpoints."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from support.convolutions import MODELS, Block, Listed, convs, flat, images
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion.binding import General
from ckptkern.conversion.blocks import Cuts, is_layer, recorded
from ckptkern.conversion.protection import unmoved
from ckptkern.conversion.recorder import loss_of, step_of
from ckptkern.memory import saved_tensors

TOLERANCE = dict(rtol=1e-3, atol=1e-5)


def memory_of(model, call):
    """(bytes that a training call saves, the peak of its step), as tensors come and go."""
    model.train()
    with saved_tensors(model) as saved, unmoved(model):
        model(**call)
    return saved.bytes, step_of(model, ((), call), there=list(model.parameters())).peak


def checkpointed(model, blocks):
    """torch's gradient checkpointing of each block, by its name or class."""
    for name, module in model.named_modules():
        if name in blocks or type(module).__name__ in blocks:
            module.forward = functools.partial(torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=False)
    return model


def step(model, call):
    """Gradients and buffers of a training step."""
    torch.manual_seed(0)
    loss_of(model.train()(**call), None).backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return named | dict(model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_it_takes_no_more_than_gradient_checkpointing_of_each_block(name):
    make, call, blocks = MODELS[name]
    torch.manual_seed(0)
    ours, call = make(), call()
    theirs, eager = checkpointed(copy.deepcopy(ours), blocks), copy.deepcopy(ours)
    keys = list(ours.state_dict())
    conversion = ckptkern.convert(ours, **call, recompute="full")
    assert not [row for row in conversion.left if not row.reason]
    for taken, least in zip(memory_of(ours, call), memory_of(theirs, call), strict=True):
        assert taken <= 1.05 * least, str(conversion)
    assert conversion.calls["original"] == 0
    checkpoints = [m for m in ours.modules() if type(m.__dict__.get("forward")) is General]
    assert not any(m in outer.modules() for outer in checkpoints for m in checkpoints if m is not outer)
    assert {name for name, m in ours.named_modules() if m in checkpoints} <= {row.name for row in conversion.converted}
    assert list(ours.state_dict()) == keys
    for other in (copy.deepcopy(ours), ours):
        torch.testing.assert_close(step(other, call), step(copy.deepcopy(eager), call), **TOLERANCE)
    ckptkern.revert(ours)
    assert memory_of(ours, call)[0] == memory_of(eager, call)[0]


def test_a_sequential_is_cut_between_its_layers():
    model, x = flat(), torch.randn(2, 3, 32, 32)
    eager = copy.deepcopy(model)
    conversion = ckptkern.convert(model, x)
    assert len(conversion.converted) > 1
    assert all(row.name.startswith("[") and row.replaced_by == "checkpoint" for row in conversion.converted)
    (saved, peak), (before, highest) = memory_of(model, {"input": x}), memory_of(eager, {"input": x})
    assert saved < 0.5 * before
    assert peak < 0.9 * highest
    wanted = step(copy.deepcopy(eager), {"input": x})
    torch.testing.assert_close(step(copy.deepcopy(model), {"input": x}), wanted, **TOLERANCE)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager")
    torch.testing.assert_close(step(compiled, {"input": x}), wanted, **TOLERANCE)
    assert torch.equal(model.eval()(x), eager.eval()(x))
    model[0] = nn.Conv2d(3, 8, 3, padding=1)
    with pytest.warns(UserWarning, match="its layers have changed since the check"):
        model.train()(x)


class Encoder(nn.Module):
    """Convolutions in a list, as of a waveform: one checkpoint of all would save least, and peak higher."""

    def __init__(self):
        super().__init__()
        first = nn.Sequential(nn.Conv1d(1, 16, 10, 5), nn.GroupNorm(4, 16), nn.GELU())
        others = [nn.Conv1d(16 if i == 0 else 32, 32, 3 - 2 * (i % 2), 2 - i % 2) for i in range(6)]
        self.layers = nn.ModuleList([first, *(nn.Sequential(layer, nn.GELU()) for layer in others)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Waveform(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x).mT)


def test_layers_are_checkpoints_where_one_of_all_would_peak_higher():
    model = Waveform()
    record = recorded(model, ((), dict(x=torch.randn(2, 1, 8000))))
    cuts = Cuts(record, set(model.modules()))
    chosen, whole = cuts.best(True), list(cuts.whole[model.encoder].values())
    (peak, saved), (highest, least) = map(cuts.peak, (chosen, whole))
    assert peak + saved > highest + least
    assert peak < 0.6 * highest


class Doubling(Block):
    """It saves nothing of its input, so whoever calls it may write into that."""

    def forward(self, x):
        return super().forward(2 * x)


class Reading(nn.Module):
    """A residual stream that somebody changes in place: a recompute would read what it has become."""

    def __init__(self, changes):
        super().__init__()
        self.blocks, self.changes = nn.ModuleList(Doubling(8) for _ in range(4)), changes

    def forward(self, x):
        x = x * 1
        for block in self.blocks:
            y = block(x)
            x = y + x.relu_() if self.changes else y + x.relu()
        return x


class InPlace(nn.Module):
    """A block that writes into what it takes."""

    def __init__(self, c):
        super().__init__()
        self.relu, self.convs = nn.ReLU(inplace=True), nn.Sequential(*convs(c, c))

    def forward(self, x):
        return self.convs(self.relu(x))


@pytest.mark.parametrize("changes", [False, True])
def test_what_is_changed_in_place_later_is_not_taken(changes):
    model, call = Reading(changes), images(8)
    eager = copy.deepcopy(model)
    conversion = ckptkern.convert(model, **call)
    assert [row.name for row in conversion.converted] == ([] if changes else [f"blocks.{i}" for i in range(4)])
    torch.testing.assert_close(step(model, call), step(eager, call), **TOLERANCE)


def test_a_block_that_writes_into_its_input_is_left():
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), InPlace(8)) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(2, 8, 16, 16)
    eager = copy.deepcopy(model)
    conversion = ckptkern.convert(model, x)
    assert conversion.converted
    assert not any(row.kind == "InPlace" for row in conversion.converted)
    torch.testing.assert_close(step(model, {"input": x}), step(eager, {"input": x}), **TOLERANCE)


class Rows(nn.Module):
    """Rows that no op stands for: a running statistic of linear layers, or parameters of its own."""

    def __init__(self, kind):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)
        self.kind, self.gain = kind, nn.Parameter(torch.ones(64))

    def forward(self, x):
        h = self.norm(self.up(x)) if self.kind == "norm" else self.up(x).sin() * self.gain
        return x + self.down(h.cos() * h.sigmoid())


@pytest.mark.parametrize("kind", ["norm", "own"])
def test_members_of_lists_whatever_they_are_made_of(kind):
    model, x = nn.Sequential(*(Rows(kind) for _ in range(4))), torch.randn(32, 16)
    eager = copy.deepcopy(model)
    conversion = ckptkern.convert(model, x)
    assert [row.replaced_by for row in conversion] == ["checkpoint"] * 4, str(conversion)
    torch.testing.assert_close(step(model, {"input": x}), step(eager, {"input": x}), **TOLERANCE)


class Mixed(nn.Module):
    """Members of a list, made of leaves only, beside a layer that becomes one op."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.rows = nn.Sequential(Rows("own"), Rows("own"))

    def forward(self, x):
        return self.rows(self.mlp(x))


def test_members_of_a_list_beside_what_is_fused():
    model, x = Mixed(), torch.randn(32, 16)
    eager = copy.deepcopy(model)
    converted = {row.name: row.replaced_by for row in ckptkern.convert(model, x).converted}
    assert converted == {"mlp": "mlp_block", "rows.0": "checkpoint", "rows.1": "checkpoint"}
    torch.testing.assert_close(step(model, {"x": x}), step(eager, {"x": x}), **TOLERANCE)
    # an expert takes another number of tokens in each call
    assert [is_layer(name, Rows("own")) for name in ("rows.1", "rows", "layers.0.experts.1")] == [True, False, False]


class Flat(nn.Module):
    """Its forward calls layer after layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3)))


@pytest.mark.parametrize("model", [Flat(), nn.Conv2d(3, 4, 3)], ids=["layer after layer", "a layer"])
def test_where_nothing_can_be_converted_it_says_why_and_what_to_do(model):
    text = str(conversion := ckptkern.convert(model, torch.randn(2, 3, 8, 8)))
    assert not conversion.converted
    assert conversion.left
    assert all(row.reason for row in conversion.left)
    assert "checkpoint_sequential" in text
    assert "ckptkern.plan" in text
    pytest.importorskip("scipy")
    assert "checkpoint_sequential" in str(ckptkern.plan(model, torch.randn(2, 3, 8, 8), saved="1GiB"))


def test_what_may_become_a_checkpoint():
    names = lambda **options: [row.name for row in ckptkern.convert(Listed(), **images(16), **options).converted]  # noqa: E731
    assert names() == [f"blocks.{i}" for i in range(4)]
    assert names(include="blocks.1") == ["blocks.1"]
    assert names(exclude="blocks.1") == ["blocks.0", "blocks.2", "blocks.3"]
    assert names(exclude="blocks") == names(otherwise="leave") == names(recompute="none") == []


def test_a_plan_finds_the_blocks():
    pytest.importorskip("scipy")
    model, call = flat(), {"input": torch.randn(2, 3, 32, 32)}
    plan = ckptkern.plan(model, **call, budget="1GiB")
    assert len(plan.strategies) > 1
    with pytest.raises(ckptkern.errors.BudgetError) as error:
        plan.replan(0)
    assert error.value.least < 0.9 * plan.peak
    plan.replan(error.value.least)
    assert memory_of(model, call)[0] == plan.saved
    report = ckptkern.report(Listed().to("meta"), x=torch.randn(2, 16, 32, 32, device="meta"))
    assert report.totals["full"] < 0.2 * report.totals["eager PyTorch"]


class Sampling(Block):
    """It draws from Python's generator, which no recompute turns back."""

    def forward(self, x):
        return super().forward(x * random.random())


class Seeding(Block):
    """It sets the seed of Python's generator before it draws from it, in training alone, another in each block."""

    def __init__(self, channels):
        super().__init__(channels)
        self.seed = id(self)

    def forward(self, x):
        if self.training:
            random.seed(self.seed)
        return super().forward(x * random.random() if self.training else x)


class SeedingLate(Block):
    """It sets the seed after it drew: a recompute begins with this seed, and the first call with another."""

    def forward(self, x):
        factor = random.random()
        random.seed(0)
        return super().forward(x * factor)


class Auxiliary(Listed):
    """Some blocks run in training alone."""

    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, x):
        for block in self.more if self.training else ():
            x = x + block(x)
        return super().forward(x)


def test_blocks_of_training_alone_and_of_other_generators():
    for unseeded in (Sampling, SeedingLate):
        conversion = ckptkern.convert(nn.Sequential(*(unseeded(8) for _ in range(4))), images(8)["x"])
        assert not conversion.converted
        assert "Python's or NumPy's random numbers" in str(conversion)
    model = nn.Sequential(*(Seeding(8) for _ in range(4)))
    eager, conversion = copy.deepcopy(model), ckptkern.convert(model, images(8)["x"])
    assert [row.replaced_by for row in conversion.converted] == 4 * ["checkpoint"], conversion
    assert all("it runs in parts" in row.reason for row in conversion.converted)
    call = {"input": images(8)["x"]}
    torch.testing.assert_close(step(model, call), step(eager, call), **TOLERANCE)
    model = Auxiliary()
    eager, converted = copy.deepcopy(model), ckptkern.convert(model, **images(16)).converted
    assert [row.name for row in converted if row.name.startswith("more")] == ["more.0", "more.1"]
    call = images(16)
    torch.testing.assert_close(step(model, call), step(eager, call), **TOLERANCE)
