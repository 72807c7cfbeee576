"""`otherwise`: a layer that is no fused op as a whole runs as an activation checkpoint around what is fused inside."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from conversion.steps import (
    assert_same,
    assert_same_steps,
    by_deepcopy,
    by_pickle,
    compiled,
    pair,
    saved,
    step,
    variant,
)
from support.architectures import (
    WIDTH,
    Choosing,
    Gated,
    Llama,
    Noisy,
    Scaled,
    Stack,
    fused_of,
    ids,
    nothing,
    with_tables,
)
from torch import nn

import ckptkern
from ckptkern.conversion.binding import Fused, General


class Layer(Scaled):
    """Another layer changes what it gives."""

    def __init__(self):
        super().__init__()
        self.losses, self.calls = [], 0
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.ones(20000, WIDTH))

    def forward(self, x, tables=None, attention_mask=None):
        return self.change(x, super().forward(x, tables, attention_mask))


def count(self, x, y):
    """Each forward gives another result."""
    self.calls += 1
    return y * self.calls


def log(self, x, y):
    """As routers collect their losses."""
    self.losses.append(float(x.detach().sum()))
    return y


def average(self, x, y):
    self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
    return y - self.mean


def large(self, x, y):
    """A buffer that is not copied, and read."""
    self.queue[: len(x)] += x.detach().mean()
    return torch.sin(y) * self.queue[0]


CALLS = itertools.count()


def grow(self, x, y):
    """Recompute has other shapes than forward."""
    return y + torch.sin(x.repeat(next(CALLS) + 1, 1, 1)).sum(0)


def tell(self, x, y):
    """A second output, such as a router's logits, is another in each forward."""
    return y, torch.sin(y) * next(CALLS)


def change_arguments(self, x, y):
    return x.add_(y) - x + y


class Normed(Scaled):
    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x, tables=None, attention_mask=None):
        return self.statistics(super().forward(x, tables, attention_mask).transpose(1, 2)).transpose(1, 2)


class Stage(nn.Module):
    """Layers in a layer: the inner ones are checkpoints."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x, tables=None):
        for block in self.blocks:
            x = torch.tanh(block(x, tables))
        return x


class Marked(Stage):
    """As transformers marks what its gradient checkpointing runs as a region."""

    gradient_checkpointing = False


class Wrapping(nn.Module):
    """A stage, marked itself, of marked layers."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Marked()])

    def forward(self, x, tables=None):
        return torch.tanh(self.stages[0](x, tables))


class Routed(Scaled):
    """Experts in a list, which are no layers."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleList(Gated() for _ in range(2))
        del self.post_attention_layernorm

    def second(self, x):
        return sum(torch.sin(linear(x)) for linear in self.mlp)


def model_of(kind=Scaled):
    torch.manual_seed(0)
    return Stack(kind, with_tables).train()


def converted(kind=Scaled, **options):
    return pair(model_of(kind), ids(), **{"recompute": "full"} | options)


def replaced_layers(conversion):
    return [row.replaced_by for row in conversion if row.name in ("layers.0", "layers.1")]


@pytest.mark.parametrize(
    ("kind", "mode"), [(Scaled, "full"), (Scaled, "selective"), (Noisy, "full"), (Routed, "selective")]
)
def test_a_layer_that_is_no_op_is_a_checkpoint(kind, mode):
    ours, theirs, conversion = converted(kind, recompute=mode)
    assert replaced_layers(conversion) == ["checkpoint"] * 2
    for row in conversion.converted:
        if row.name.count(".") == 1:
            assert row.reason
            assert row.saved_before > 4 * row.saved_after  # its input, and a random state
        else:
            assert row.saved_before is row.saved_after is None
    assert "attention_block" in fused_of(conversion)
    assert type(ours.layers[0].forward) is General
    if kind is not Noisy:
        assert_same_steps(ours, theirs, ids())
    for copied in (by_deepcopy, by_pickle):
        other = copied(ours)
        assert saved(other, ids()) == saved(ours, ids())
        assert all(layer.forward.module is layer for layer in other.layers)
    assert not any(type(vars(m).get("forward")) is General for m in ckptkern.revert(ours).modules())
    left = ckptkern.convert(ours, ids(), recompute=mode, otherwise="leave")
    assert replaced_layers(left) == [None] * 2


@pytest.mark.parametrize("hooked", [False, True])
def test_a_recompute_that_rounds_otherwise_decides_as_forward(hooked, monkeypatch):
    """A layer with hooks inside becomes a checkpoint by another way."""
    theirs = model_of(Choosing)
    if hooked:
        for layer in theirs.layers:
            layer.router.register_forward_hook(lambda module, args, y: None)
    ours, theirs, _ = pair(theirs, ids(), recompute="full")
    expected = step(theirs, ids())
    assert [layer.forward.context_fn for layer in ours.layers] == [ckptkern.saved_decisions] * 2
    monkeypatch.setattr(Choosing, "noise", 1e-3)
    assert_same(step(ours, ids()), expected, 1e-2)
    for layer in ours.layers:
        layer.forward.context_fn = torch.utils.checkpoint.noop_context_fn
    with pytest.raises(AssertionError, match="differs from the original's"):
        assert_same(step(ours, ids()), expected, 0.1)


def test_it_saves_what_gradient_checkpointing_saves():
    # torch's keeps further arguments, such as tables, where no hook sees them
    ours, theirs, _ = pair(Stack(Scaled, nothing).train(), ids(), recompute="full")
    assert ours.layers[0].forward.context_fn is torch.utils.checkpoint.noop_context_fn, "it decides nothing"
    for layer in theirs.layers:  # torch's, by hand
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    assert saved(ours, ids()) <= 1.05 * saved(theirs, ids())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (log, "its forward fills losses"),
        (large, "as an activation checkpoint it raises CheckpointError"),
        (grow, "as an activation checkpoint it raises"),
        (tell, "its numbers differ as an activation checkpoint"),
        (change_arguments, "changes its arguments in place"),
    ],
)
def test_a_layer_is_left_where_a_recompute_would_be_wrong(change, reason):
    conversion = converted(variant(Layer, change=change))[-1]
    assert replaced_layers(conversion) == [None] * 2
    assert reason in next(row.reason for row in conversion if row.name == "layers.0")


CHANGED = {
    "as it is": lambda layer: None,
    "a frozen weight": lambda layer: layer.self_attn.q_proj.requires_grad_(False),
    "a hook inside": lambda layer: layer.self_attn.q_proj.register_forward_hook(lambda module, args, y: None),
}


@pytest.mark.parametrize("before", CHANGED)
@pytest.mark.parametrize("change", [count, average, large])
def test_what_forward_updates_is_updated_once(change, before):
    model = model_of(variant(Layer, change=change))
    for layer in model.layers:
        CHANGED[before](layer)
    ours, theirs, conversion = pair(model, ids(), recompute="full")
    assert replaced_layers(conversion) == [None if change is large else "checkpoint"] * 2
    for _ in range(2):
        assert_same_steps(ours, theirs, ids())
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert layer.calls == other.calls
        torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))


def test_a_16_bit_layer_is_compared_in_float32():
    ours, _, conversion = pair(model_of().bfloat16(), ids(), recompute="full")
    assert replaced_layers(conversion) == ["checkpoint"] * 2
    assert all(p.dtype is torch.bfloat16 for p in ours.parameters())


@pytest.mark.slow
def test_a_plan_and_a_report_of_checkpoints_around_fused_ops():
    ours, _, _ = converted()
    assert "checkpoint" in str(ckptkern.report(ours, ids()))
    plan = ckptkern.plan(ours, ids(), saved="1GiB")
    assert set(map(str, plan.strategies.values())) <= {"none", "full"}


@pytest.mark.slow
def test_the_innermost_layers_are_checkpoints_but_for_marked_ones():
    """As T5's layers are marked, whose sublayers are a list, and MobileBERT's."""
    for kind, of, inside in (
        (Stage, lambda layer: layer.blocks, lambda layer: [layer]),
        (Marked, lambda layer: [layer], lambda layer: layer.blocks),
        (Wrapping, lambda layer: layer.stages, lambda layer: [layer]),
    ):
        ours, theirs, _ = converted(kind)
        for layer in ours.layers:
            assert {type(inner.forward) for inner in of(layer)} == {General}, kind
            assert not any("forward" in vars(inner) for inner in inside(layer)), kind
        assert_same_steps(ours, theirs, ids())


def test_running_statistics_are_updated_once():
    ours, theirs, conversion = converted(Normed)
    assert replaced_layers(conversion) == ["checkpoint"] * 2
    assert_same_steps(ours, theirs, ids())
    for (name, buffer), other in zip(theirs.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, msg=lambda text, name=name: f"{name}: {text}")


def test_none_saves_everything_and_a_whole_layer_is_fused():
    assert "checkpoint" not in fused_of(converted(recompute="none")[-1])
    ours, _, conversion = converted(Llama)
    assert fused_of(conversion) == ["transformer_layer"] * 2
    assert type(ours.layers[0].forward) is Fused
    with pytest.raises(ValueError, match="convert: otherwise must be one of 'leave', 'checkpoint', not 'keep'"):
        ckptkern.convert(ours, ids(), otherwise="keep")


def test_what_may_not_be_converted_is_no_checkpoint():
    for which in ({"exclude": "layers.0"}, {"include": "*.self_attn"}):
        assert "forward" not in converted(**which)[0].layers[0].__dict__


@pytest.mark.slow
def test_a_compiled_checkpoint():
    ours, theirs, _ = converted()
    assert_same_steps(compiled(ours), theirs, ids())
