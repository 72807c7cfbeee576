"""convert on layers with low-rank adapters on frozen weights: they are read into the fused op, and watched."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from conversion.steps import assert_same, assert_same_steps, calls_of, pair, saved, step, variant
from support.architectures import ARCHITECTURES, Gated, Llama, LoRA, Stack, adapted, fused_of, ids
from torch import nn


def model_of(name="llama", only="", **options):
    torch.manual_seed(0)
    model = ARCHITECTURES[name].model().train()
    for layer in model.layers:
        adapted(layer, only, **options)
    return model


@functools.cache
def _converted(only, p):
    ours, theirs, conversion = pair(model_of(only=only, p=p), ids())
    assert fused_of(conversion) == ["transformer_layer"] * 2, str(conversion)
    return ours, theirs


def converted(only="q_proj", p=0.0):
    """Returns copies of (the converted model, the model as it was), whose guard is ready."""
    ours, theirs = copy.deepcopy(_converted(only, p))
    ours(ids())
    return ours, theirs


def adapters(model):
    return [m for m in model.modules() if isinstance(m, LoRA)]


# the projections apart, packed, by the numbers of a fused gate, with transposed weights, in parallel
CASES = [
    ("llama", ""), ("llama", "q_proj"), ("phi3", ""), ("gpt", ""), ("bert", ""), ("parallel", ""), ("decoder", ""),
    ("buffers", "qkv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "only"), CASES)
def test_adapters_are_part_of_the_fused_op(name, only):
    ours, theirs, conversion = pair(model_of(name, only), ids())
    assert fused_of(conversion) == [*ARCHITECTURES[name].replaced_by] * 2, str(conversion)
    assert saved(ours, ids()) < saved(theirs, ids()) / 2
    ours, theirs = ours.double(), theirs.double()
    gradients = step(ours, ids(2))
    assert any("lora_A.default" in key for key in gradients)
    assert_same(gradients, step(theirs, ids(2)), 1e-9)
    assert calls_of(ours)["checkpointed"] == calls_of(ours)["original"] == 0


def test_each_adapters_dropout_is_read_in_each_call():
    """p = 1 leaves nothing of an adapter, and of others all."""
    ours, theirs = converted("", 0.3)
    for model in (ours, theirs):
        for i, adapter in enumerate(adapters(model)):
            adapter.dropout.p = float(i % 3 == 0)
    assert_same_steps(ours, theirs, ids())


def renew(adapter):
    adapter.lora_A = nn.ModuleDict(
        {name: nn.Linear(*linear.weight.shape[::-1], bias=False) for name, linear in adapter.lora_A.items()}
    )


def merge(adapter):
    adapter._disabled = True
    with torch.no_grad():
        update = adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight
        adapter.base_layer.weight += adapter.scaling["default"] * update


LATER = {
    "another adapter": lambda adapter: setattr(adapter, "_active", ["other"]),
    "another adapter, in place": lambda adapter: adapter._active.__setitem__(0, "other"),
    "two adapters": lambda adapter: adapter._active.append("other"),
    "another scale": lambda adapter: adapter.scaling.update(default=0.25),
    "no adapter": lambda adapter: setattr(adapter, "_disabled", True),
    "merged": merge,
    "new weights": renew,
}


@pytest.mark.parametrize("change", LATER)
def test_what_is_done_to_adapters_later_counts(change):
    ours, theirs = converted()
    for model in (ours, theirs):
        torch.manual_seed(1)
        for adapter in adapters(model):
            LATER[change](adapter)
    assert_same_steps(ours, theirs, ids())


def replaced(adapter):
    """As peft's set_adapter of the active one, and its rescale_adapter_scale after the context."""
    adapter._active, adapter.scaling = list(adapter._active), dict(adapter.scaling)


def there_and_back(adapter):
    adapter._disabled = True
    adapter._disabled = False


def with_tensors(adapter):
    """Their == has no truth value; another container of them is a change."""
    adapter.pairs = [[torch.ones(2), torch.ones(2)]]


def test_what_each_call_reads_leaves_the_layer_fused():
    ours, theirs = converted()
    for change, fused in (
        (replaced, 4),
        (there_and_back, 6),
        (lambda adapter: adapter.scaling.update(default=0.75), 8),
    ):
        for adapter in (*adapters(ours), *adapters(theirs)):
            change(adapter)
        assert_same_steps(ours, theirs, ids())
        assert calls_of(ours)["fused"] == fused, change


def test_tensors_in_containers_are_not_compared():
    theirs = model_of(only="q_proj")
    for adapter in adapters(theirs):
        with_tensors(adapter)
    ours, theirs, _ = pair(theirs, ids())
    for adapter in adapters(ours):
        with_tensors(adapter)
    assert_same_steps(ours, theirs, ids())


def with_one_mask(self, x):
    """Gate and up read what one dropout gave."""
    dropped = self.gate_proj.dropout(x)
    gate, up = (
        linear.base_layer(x) + linear.lora_B["default"](linear.lora_A["default"](dropped))
        for linear in (self.gate_proj, self.up_proj)
    )
    return self.down_proj(nn.functional.silu(gate) * up)


UNREAD = {
    "a bias": (lambda: model_of(only="q_proj", bias=True), "linear layer"),
    "one mask of two adapters": (
        lambda: Stack(lambda: adapted(Llama(mlp=variant(Gated, forward=with_one_mask)()), "mlp", p=0.5)),
        "share one dropout's mask",
    ),
    "dropout before a split weight": (
        lambda: model_of("phi3", "gate_up", p=0.3),
        "a split weight has a low-rank update with dropout",
    ),
}


@pytest.mark.parametrize("adapter", UNREAD)
def test_others_are_activation_checkpoints_with_their_reason(adapter):
    make, reason = UNREAD[adapter]
    ours, theirs, conversion = pair(make(), ids())
    assert fused_of(conversion) == ["checkpoint"] * 2
    for row in conversion.converted:
        assert "as with adapters" in row.reason
        assert reason in row.reason
    assert_same_steps(ours, theirs, ids())
