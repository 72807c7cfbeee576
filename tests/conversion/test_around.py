"""`otherwise`: a layer that is no fused op as a whole runs as an activation checkpoint around what is fused inside."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle

import pytest
import torch
from support.architectures import (
    WIDTH,
    Choosing,
    Gated,
    Llama,
    RMSNorm,
    Scaled,
    Stack,
    fused_of,
    ids,
    results,
    with_tables,
)
from torch import Tensor, nn

import ckptkern
from ckptkern.conversion import around as _around
from ckptkern.conversion.binding import Fused, General
from ckptkern.memory import saved_tensors


class Dropped(Scaled):
    """Which draws numbers."""

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        return nn.functional.dropout(super().forward(x, tables, attention_mask), 0.3, self.training)


class Counting(Scaled):
    """Which keeps state: each forward gives another result."""

    calls = 0

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x, tables, attention_mask) * self.calls


class Logging(Scaled):
    """Which collects what it computes, as routers collect their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        self.losses.append(float(x.detach().sum()))
        return super().forward(x, tables, attention_mask)


class Growing(Scaled):
    """Whose recompute has other shapes than its forward."""

    calls = itertools.count()

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, tables, attention_mask) + torch.sin(x.repeat(next(self.calls) + 1, 1, 1)).sum(0)


class Telling(Scaled):
    """A second output with a graph, such as a router's logits."""

    def forward(self, x: Tensor, tables=None) -> tuple[Tensor, Tensor]:
        y = super().forward(x, tables)
        return y, torch.sigmoid(y.sum(-1))


class Normed(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        return self.statistics(super().forward(x, tables, attention_mask).transpose(1, 2)).transpose(1, 2)


class Averaging(Scaled):
    """Which subtracts a running mean that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x, tables, attention_mask) - self.mean


class Stage(nn.Module):
    """Layers in a layer: the inner ones are checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Tensor, tables=None) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x, tables))
        return x


class Marked(Stage):
    """As transformers marks what its gradient checkpointing runs as a region."""

    gradient_checkpointing = False


class Wrapping(nn.Module):
    """A stage, marked itself, of marked layers."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Marked()])

    def forward(self, x: Tensor, tables=None) -> Tensor:
        return torch.tanh(self.stages[0](x, tables))


class Routed(Scaled):
    """Experts in a list, which are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleList(Gated() for _ in range(2))
        self.norm = RMSNorm(WIDTH)

    def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
        x = x + torch.tanh(self.self_attn(self.norm(x), tables, attention_mask)[0])
        return x + sum(torch.sin(one(x)) for one in self.mlp)


def model_of(layer: type[nn.Module]) -> Stack:
    torch.manual_seed(0)
    return Stack(layer, with_tables).train()


def saved(model: nn.Module) -> int:
    with saved_tensors(model) as found:
        model(ids())
    return found.bytes


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("layer", [Scaled, Dropped, Routed])
def test_a_layer_that_is_no_op_is_a_checkpoint(layer: type[nn.Module], mode: str) -> None:
    model = model_of(layer)
    plain, left = results(model), ckptkern.convert(copy.deepcopy(model), ids(), recompute=mode, otherwise="leave")
    conversion = ckptkern.convert(model, ids(), recompute=mode)
    rows = {row.name: row for row in conversion}
    for i in range(2):
        row = rows[f"layers.{i}"]
        assert row.replaced_by == "checkpoint"
        assert row.reason
        assert row.saved_before > 4 * row.saved_after  # its input, and a random state
        assert type(model.layers[i].forward) is General
        inner = [one for one in conversion.converted if one.name.startswith(f"layers.{i}.")]
        assert inner
        assert all(one.saved_before is one.saved_after is None for one in inner)
    assert "attention_block" in fused_of(conversion)
    assert [row.replaced_by for row in left if row.name == "layers.0"] == [None]
    if layer is not Dropped:
        for name, one in results(model).items():
            torch.testing.assert_close(one, plain[name], rtol=1e-4, atol=1e-6)
    ckptkern.revert(model)
    assert type(model.layers[0].forward) is not General


@pytest.mark.parametrize("hooked", [False, True])
def test_a_recompute_that_rounds_otherwise_decides_as_forward(hooked: bool, monkeypatch) -> None:
    """A layer with hooks inside becomes a checkpoint by another way."""
    model = model_of(Choosing)
    if hooked:
        for layer in model.layers:
            layer.router.register_forward_hook(lambda module, args, y: None)
    expected = results(model)
    ckptkern.convert(model, ids(), recompute="full")
    assert [layer.forward.context_fn for layer in model.layers] == [ckptkern.saved_decisions] * 2
    monkeypatch.setattr(Choosing, "noise", 1e-3)
    for name, one in results(model).items():
        torch.testing.assert_close(one, expected[name], rtol=1e-2, atol=1e-4, msg=name)
    for layer in model.layers:
        layer.forward.context_fn = torch.utils.checkpoint.noop_context_fn
    name = "layers.1.mlp.0.up_proj.weight"
    assert (results(model)[name] - expected[name]).norm() > 0.1 * expected[name].norm()


def test_a_layer_without_decisions_runs_without_their_mode() -> None:
    model = model_of(Scaled)
    ckptkern.convert(model, ids(), recompute="full")
    assert model.layers[0].forward.context_fn is torch.utils.checkpoint.noop_context_fn


def test_it_saves_what_gradient_checkpointing_saves() -> None:
    model = Stack(
        Scaled, lambda x: {}
    ).train()  # torch's keeps further arguments, such as tables, where no hook sees them
    fused = copy.deepcopy(model)
    ckptkern.convert(fused, ids(), recompute="full")
    for layer in model.layers:  # torch's, by hand
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    assert saved(fused) <= 1.05 * saved(model)


def test_a_layer_is_left_where_a_recompute_would_be_wrong() -> None:
    for layer, reason in (
        (Counting, "its forward changes the attribute calls"),
        (Logging, "its forward changes the attribute losses"),
        (Averaging, "its forward changes a buffer"),
        (Growing, "as an activation checkpoint it raises"),
    ):
        conversion = ckptkern.convert(model_of(layer), ids(), recompute="full")
        found = [row for row in conversion if row.name == "layers.0"]
        assert [row.replaced_by for row in found] == [None], layer
        assert reason in found[0].reason


def test_every_output_is_compared() -> None:
    layer, x = Telling(), torch.randn(2, 6, WIDTH)
    found = _around.around(layer, [((x,), with_tables(x))])
    whole = found.results(layer.forward)
    assert whole[0].shape == (2 * 6 * (WIDTH + 1),)
    other = found.results(lambda *args, **kwargs: (layer(*args, **kwargs)[0], torch.sigmoid(args[0].sum(-1))))
    assert not torch.allclose(whole[0], other[0])


def test_a_16_bit_layer_is_compared_in_float32() -> None:
    model = model_of(Scaled).bfloat16()
    conversion = ckptkern.convert(model, ids(), recompute="full")
    assert [row.replaced_by for row in conversion if row.name in ("layers.0", "layers.1")] == ["checkpoint"] * 2
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())


def test_a_plan_and_a_report_of_checkpoints_around_fused_ops() -> None:
    model = model_of(Scaled)
    ckptkern.convert(model, ids(), recompute="full")
    assert "checkpoint" in str(ckptkern.report(model, ids()))
    plan = ckptkern.plan(model, ids(), saved="1GiB")
    assert set(map(str, plan.strategies.values())) <= {"none", "full"}


def test_the_innermost_layers_are_checkpoints() -> None:
    model = model_of(Stage)
    ckptkern.convert(model, ids(), recompute="full")
    for stage in model.layers:
        assert "forward" not in stage.__dict__
        assert [type(block.forward) for block in stage.blocks] == [General] * 2


def test_running_statistics_are_updated_once() -> None:
    theirs, ours = model_of(Normed), model_of(Normed)
    conversion = ckptkern.convert(ours, ids(), recompute="full")
    assert [row.replaced_by for row in conversion if row.name.count(".") == 1] == ["checkpoint"] * 2
    expected, found = results(theirs), results(ours)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one)
    for (name, one), other in zip(theirs.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")


def test_a_layer_that_transformers_checkpoints_is_one_with_the_lists_inside() -> None:
    """Such as T5's layers, whose sublayers are a list, and MobileBERT's."""
    expected = results(model := model_of(Marked))
    conversion = ckptkern.convert(model, ids(), recompute="full")
    for stage in model.layers:
        assert type(stage.forward) is General
        assert not any("forward" in block.__dict__ for block in stage.blocks)
    ours = results(model)
    for name, one in expected.items():
        torch.testing.assert_close(ours[name], one)
    assert [row.calls["checkpointed"] for row in conversion if row.replaced_by == "checkpoint"] == [1, 1]
    outer = model_of(Wrapping)
    ckptkern.convert(outer, ids(), recompute="full")
    assert [type(inner.forward) for layer in outer.layers for inner in layer.stages] == [General] * 2


def test_none_saves_everything_and_a_whole_layer_is_fused() -> None:
    assert "checkpoint" not in fused_of(ckptkern.convert(model_of(Scaled), ids(), recompute="none"))
    model = model_of(Llama)
    assert fused_of(ckptkern.convert(model, ids())) == ["transformer_layer"] * 2
    assert type(model.layers[0].forward) is Fused
    with pytest.raises(ValueError, match="convert: otherwise must be one of 'leave', 'checkpoint', not 'keep'"):
        ckptkern.convert(model, ids(), otherwise="keep")


def test_what_may_not_be_converted_is_no_checkpoint() -> None:
    for which in ({"exclude": "layers.0"}, {"include": "*.self_attn"}):
        model = model_of(Scaled)
        ckptkern.convert(model, ids(), **which)
        assert "forward" not in model.layers[0].__dict__


def test_a_copy_and_a_pickle_are_checkpoints() -> None:
    model = model_of(Scaled)
    ckptkern.convert(model, ids(), recompute="full")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved(other) == saved(model)
        assert all(one.forward.module is one for one in other.layers)


def test_a_compiled_checkpoint() -> None:
    model = model_of(Scaled)
    plain = results(model)
    ckptkern.convert(model, ids(), recompute="full")
    compiled = torch.compile(model, backend="aot_eager")
    for name, one in results(compiled).items():
        torch.testing.assert_close(one, plain[name.removeprefix("_orig_mod.")], rtol=1e-4, atol=1e-6)


class Cache:
    """As transformers' caches are asked."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.seen)


class Caching(Scaled):
    def forward(self, x: Tensor, tables=None, past_key_values: Cache | None = None) -> Tensor:
        if past_key_values is not None:
            past_key_values.seen.append(x)
        return super().forward(x, tables)


def test_a_cache_stays_empty_in_training() -> None:
    model = Stack(Caching, lambda x: with_tables(x) | {"past_key_values": Cache()}).train()
    ckptkern.convert(model, ids(), recompute="full")
    layer, cache = model.layers[0], Cache()
    assert type(layer.forward) is General
    x = torch.randn(2, 6, WIDTH, requires_grad=True)
    layer(x, **with_tables(x), past_key_values=cache).sum().backward()
    assert cache.seen == []
    with torch.no_grad():  # generation reads it
        layer.eval()(x, **with_tables(x), past_key_values=cache)
    assert len(cache.seen) == 1
    layer.train()(x, **with_tables(x), past_key_values=cache)  # with what is in it, the forward runs as it is
    assert len(cache.seen) == 2


def test_what_is_no_layer() -> None:
    assert not _around.is_layer("mlp", Llama())
    assert not _around.is_layer("layers.0", nn.Linear(2, 2))
    assert not _around.is_layer("experts.0", Gated())
    assert _around.is_layer("layers.0", Llama())
