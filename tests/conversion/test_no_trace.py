"""convert leaves no trace in a model but what it replaces, whatever its forward does."""

from __future__ import annotations

import copy
import random
from typing import ClassVar

import numpy
import pytest
import torch
from conversion.steps import variant
from support.architectures import ARCHITECTURES, WIDTH, Llama, Stack, fused_of, ids, with_tables
from support.traces import changes, seen, traces
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckptkern


class Options:
    """A configuration in which others are."""

    def __init__(self, inner=None):
        self.inner, self.seen, self.problem_type, self.history = inner, 0, None, [[]]


class Forgetful(Llama):
    """A layer of which each call notes something in a way of its own."""

    def __init__(self, note):
        super().__init__()
        self.note, self.count, self.names, self.lists, self.sets = note, 0, {"a": {}}, [1], {1}
        self.config, self.cached, self.mask = Options(Options()), torch.zeros(2), None
        self.generator, self.scale = torch.Generator(), nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(2), persistent=False)
        self.register_buffer("table", None)
        self.handle = self.mlp.register_forward_hook(lambda *_: None)

    def forward(self, *args, **kwargs):
        NOTES[self.note](self)
        return super().forward(*args, **kwargs)


def raised_gradient(module):
    with torch.enable_grad():
        module.mlp.up_proj.weight.square().sum().backward()


NOTES = {
    "torch's generator": lambda m: torch.rand(1),
    "Python's generator": lambda m: random.random(),
    "NumPy's generator": lambda m: numpy.random.rand(),
    "a generator of its own": lambda m: torch.rand(1, generator=m.generator),
    "a number": lambda m: setattr(m, "count", m.count + 1),
    "a new attribute": lambda m: setattr(m, "last", [m.count]),
    "an attribute less": lambda m: vars(m).pop("count", None),
    "an attribute of a leaf": lambda m: setattr(m.input_layernorm, "rows", 2),
    "a list": lambda m: m.lists.append(2),
    "another item of a list": lambda m: m.lists.__setitem__(0, m.lists[0] + 1),
    "a dict in a dict": lambda m: m.names["a"].update(b=1),
    "a set": lambda m: m.sets.add(2),
    "another dict": lambda m: setattr(m, "names", {}),
    "a configuration": lambda m: setattr(m.config, "problem_type", "regression"),
    "a new attribute of a configuration": lambda m: setattr(m.config, "more", 1),
    "a configuration in one": lambda m: setattr(m.config.inner, "seen", m.config.inner.seen + 1),
    "a list of a configuration": lambda m: m.config.history.append(1),
    "a tensor": lambda m: setattr(m, "cached", torch.ones(2)),
    "a tensor's values": lambda m: m.cached.add_(1),
    "a tensor's memory": lambda m: setattr(m.cached, "data", torch.ones(3)),
    "a buffer": lambda m: m.steps.add_(1),
    "a buffer that was None": lambda m: setattr(m, "table", torch.ones(2)),
    "a new buffer": lambda m: m.register_buffer("more", torch.ones(2)),
    "a new module": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "a vector's values": lambda m: m.scale.data.clamp_(max=0.5),
    "a parameter's memory": lambda m: setattr(m.scale, "data", m.scale.data * 2),
    "a parameter's attribute": lambda m: setattr(m.mlp.up_proj.weight, "packed", True),
    "a frozen parameter": lambda m: m.scale.requires_grad_(False),
    "a gradient": raised_gradient,
    "a hook": lambda m: m.mlp.up_proj.register_forward_hook(lambda *_: None),
    "a pre-hook": lambda m: m.mlp.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda m: m.mlp.register_full_backward_hook(lambda *_: None),
    "a hook less": lambda m: m.handle.remove(),
    "a mode": lambda m: m.mlp.up_proj.train(not m.mlp.up_proj.training),
}


def assert_no_trace(model, *args, **kwargs):
    """Neither convert leaves one, but forwards, nor revert. Returns the conversion."""
    torch.manual_seed(5)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.5) if i % 2 else None
    before = seen(model)
    conversion = ckptkern.convert(model, *args, **kwargs)
    assert not traces(before, seen(model))
    ckptkern.revert(model)
    assert not changes(before, seen(model))
    return conversion


@pytest.mark.parametrize("note", NOTES)
def test_what_a_forward_notes(note):
    torch.manual_seed(0)
    assert_no_trace(Stack(lambda: Forgetful(note), with_tables).train(), ids())


LINEAR = {
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "spectral_norm by a hook": nn.utils.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "weight_norm by a hook": nn.utils.weight_norm,
    "hooks": lambda linear: linear.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", LINEAR)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_with_something_around_their_weights(change):
    model = Stack(Llama, with_tables).train()
    for layer in model.layers:
        LINEAR[change](layer.mlp.up_proj)
    LINEAR[change](model.head)
    assert_no_trace(model, ids())


MODELS = {
    "Jamba": dict(
        mamba_d_state=4, mamba_dt_rank=4, mamba_expand=1, use_mamba_kernels=False, num_experts=2, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    ),
    "HunYuanMoEV1": dict(num_experts=2, moe_topk=1, moe_intermediate_size=32, head_dim=8),
    "Llama": {},
    "Qwen3Moe": dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, head_dim=8),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_sequence_classifiers(name):
    """Which set their configuration's problem_type when they first compute a loss."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=3,
        pad_token_id=0,
        **MODELS[name],
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).train()
    tokens = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    assert_no_trace(model, input_ids=tokens, labels=torch.tensor([0, 2]))
    assert config.problem_type is None


def test_statistics_and_torchs_own_layers():
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    model = nn.Sequential(nn.BatchNorm1d(6), encoder, nn.BatchNorm1d(6)).train()
    before = seen(model)
    assert len(ckptkern.convert(model, torch.randn(2, 6, WIDTH, generator=torch.Generator())).converted) == 1
    moved = changes(before, seen(model))
    assert {name.rpartition(".")[2] for name in moved} == {
        "__class__",
        "_ckptkern_class",
        "forward",
        "recompute",
        "workspace",
    }
    ckptkern.revert(model)
    assert not changes(before, seen(model))


def test_the_example_stays_as_it_is():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, seen):
            seen.append(1)
            return self.layer(x.add_(1))

    x, notes = torch.zeros(4, 8), []
    ckptkern.convert(Adds(), x, seen=notes)
    assert not x.any()
    assert notes == []


def calls_until(count):
    """Returns a layer that is interrupted after so many calls."""
    left = [count]

    def forward(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return Llama.forward(self, *args, **kwargs)

    return variant(Llama, forward=forward)()


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_an_error_leaves_nothing(every):
    """Wherever it is raised, and what was converted before it, torch's own layers too."""
    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    model = nn.Sequential(encoder, Llama(), calls_until(every)).train()
    before = seen(model)
    with pytest.raises(KeyboardInterrupt):
        ckptkern.convert(model, torch.randn(2, 6, WIDTH, generator=torch.Generator()))
    assert not changes(before, seen(model))


def test_equal_conversions_give_equal_rows_whatever_the_seed():
    model, rows = ARCHITECTURES["llama"].model(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        rows.append(ckptkern.convert(copy.deepcopy(model), ids()).rows)
    assert rows[0] == rows[1]
    assert max(row.error for row in rows[0] if row.error) > 0


def test_new_arguments_in_a_training_step():
    """What a converted layer tries then moves neither random states nor gradients."""

    def forward(self, x, tables=None, attention_mask=None, **options):
        numpy.random.rand()
        return Llama.forward(self, x, tables, attention_mask)

    model = Stack(variant(Llama, forward=forward), with_tables).train()
    assert fused_of(ckptkern.convert(model, ids())) == ["transformer_layer"] * 2
    layer, x = model.layers[0], torch.randn(2, 6, WIDTH, requires_grad=True)
    layer(x, **with_tables(x)).square().sum().backward()
    before = seen(model)
    layer(x, **with_tables(x), number=3)
    assert not traces(before, seen(model))


class Held(nn.Module):
    """Runs out of memory where a forward with gradients holds what more than four of these have returned."""

    alive: ClassVar[list[StorageWeakRef]] = []

    def forward(self, x):
        y = (2 * x).sin()
        Held.alive[:] = [storage for storage in Held.alive if not storage.expired()]
        Held.alive.append(StorageWeakRef(y.untyped_storage()))
        if torch.is_grad_enabled() and len(Held.alive) > 4:
            raise torch.OutOfMemoryError
        return y.cos()


def test_a_model_whose_step_does_not_fit_is_measured():
    """Its bytes are counted without being held, and it has no peak."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Held()) for _ in range(8)))
    conversion = ckptkern.convert(model, torch.randn(4, 8))
    assert conversion.saved_before > 0
    assert conversion.peak_before is None


def test_the_peak_takes_no_profiler(monkeypatch):
    """It would take seconds on a GPU, and end the user's."""
    monkeypatch.setattr(torch.profiler, "profile", None)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    assert ckptkern.convert(model, torch.randn(4, 8)).peak_after > 0
