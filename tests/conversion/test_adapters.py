"""convert on layers with low-rank adapters on frozen weights: they are read into the fused op, and watched."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.architectures import (
    ARCHITECTURES,
    WIDTH,
    LoRA,
    adapted,
    fused_of,
    ids,
    over_inputs,
    results,
    saved,
    with_tables,
)
from support.cases import assert_as_exact
from torch import Tensor, nn

import ckptkern


def model_of(name: str, only: str = "", **options) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].model().train()
    for layer in model.layers:
        adapted(layer, only, **options)
    return model


def adapters(model: nn.Module) -> list[LoRA]:
    return [m for m in model.modules() if isinstance(m, LoRA)]


# the projections apart, packed, by the numbers of a fused gate, with transposed weights, in parallel
CASES = [
    ("llama", ""), ("llama", "q_proj"), ("phi3", ""), ("gpt", ""), ("bert", ""), ("parallel", ""), ("decoder", ""),
    ("buffers", "c_"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "only"), CASES)
def test_adapters_are_part_of_the_fused_op(name: str, only: str) -> None:
    model = model_of(name, only)
    theirs, before = over_inputs(model), saved(model)
    reference = over_inputs(copy.deepcopy(model).double())
    conversion = ckptkern.convert(model, ids())
    assert fused_of(conversion) == [*ARCHITECTURES[name].replaced_by] * 2, str(conversion)
    ours = over_inputs(model)
    assert ours.keys() == theirs.keys(), "frozen weights have no gradient"
    assert any("lora_A.default" in key for key in ours)
    # of a key's bias, whose gradient is 0
    norms = {key: value.norm() for key, value in reference.items()}
    chosen = [key for key, norm in norms.items() if norm > 1e-12 * max(norms.values())]
    assert_as_exact(*({key: one[key] for key in chosen} for one in (ours, theirs, reference)))
    assert saved(model) < before / 2


def test_sixteen_bits_under_autocast() -> None:
    model = model_of("llama")
    theirs = over_inputs(model, torch.bfloat16)
    reference = over_inputs(copy.deepcopy(model).double())
    ckptkern.convert(model, ids())
    assert_as_exact(over_inputs(model, torch.bfloat16), theirs, reference)


def test_each_adapters_dropout_is_read_in_each_call() -> None:
    """p = 1 leaves nothing of an adapter, and of others all."""
    model = model_of("llama", p=0.3)
    original = copy.deepcopy(model)
    assert fused_of(ckptkern.convert(model, ids())) == ["transformer_layer"] * 2
    for one in (model, original):
        for i, adapter in enumerate(adapters(one)):
            adapter.dropout.p = float(i % 3 == 0)
    theirs, ours = results(original), results(model)
    torch.testing.assert_close(ours, theirs)


def test_masks_are_new_in_each_step_and_old_in_each_recompute() -> None:
    model = model_of("llama", p=0.3)
    ckptkern.convert(model, ids(), recompute="full")
    grads = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        grads.append(results(model))
    assert all(torch.equal(grads[0][key], grads[1][key]) for key in grads[0])
    assert grads[0]["loss"] != grads[2]["loss"]


def choose(adapter: LoRA) -> None:
    adapter._active = ["other"]


def choose_in_place(adapter: LoRA) -> None:
    adapter._active[0] = "other"


def renew(adapter: LoRA) -> None:
    adapter.lora_A = nn.ModuleDict(
        {name: nn.Linear(*one.weight.shape[::-1], bias=False) for name, one in adapter.lora_A.items()}
    )


def merge(adapter: LoRA) -> None:
    adapter._disabled = True
    with torch.no_grad():
        update = adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight
        adapter.base_layer.weight += adapter.scaling["default"] * update


LATER: dict[str, Callable[[LoRA], None]] = {
    "another adapter": choose,
    "another adapter, in place": choose_in_place,
    "two adapters": lambda adapter: adapter._active.append("other"),
    "another scale": lambda adapter: adapter.scaling.update(default=0.25),
    "no adapter": lambda adapter: setattr(adapter, "_disabled", True),
    "merged": merge,
    "new weights": renew,
}


@pytest.mark.parametrize("what", LATER)
def test_what_is_done_to_adapters_later_counts(what: str) -> None:
    model = model_of("llama", "q_proj")
    converted = copy.deepcopy(model)
    ckptkern.convert(converted, ids())
    converted(ids())
    for one in (model, converted):
        torch.manual_seed(1)
        for adapter in adapters(one):
            LATER[what](adapter)
    theirs, ours = results(model), results(converted)
    torch.testing.assert_close(ours, theirs)


def replaced(adapter: LoRA) -> None:
    """As peft's set_adapter of the active one, and its rescale_adapter_scale after the context."""
    adapter._active, adapter.scaling = list(adapter._active), dict(adapter.scaling)


def there_and_back(adapter: LoRA) -> None:
    adapter._disabled = True
    adapter._disabled = False


@pytest.mark.parametrize("change", [replaced, there_and_back])
def test_what_changes_nothing_leaves_the_layer_fused(change: Callable[[LoRA], None]) -> None:
    model = model_of("llama", "q_proj")
    ckptkern.convert(model, ids())
    x = torch.randn(2, 6, WIDTH, requires_grad=True)

    def node() -> str:
        return type(model.layers[0](x, **with_tables(x)).grad_fn).__name__

    for adapter in adapters(model):
        change(adapter)
    assert node() == "TransformerLayerFunctionBackward"
    adapters(model)[0].scaling["default"] = 0.75
    assert node() != "TransformerLayerFunctionBackward"


def test_tensors_in_containers_are_not_compared() -> None:
    """Their == has no truth value; another container of them is a change."""
    model = model_of("llama", "q_proj")
    for adapter in adapters(model):
        adapter.pairs = [[torch.ones(2), torch.ones(2)]]
    ckptkern.convert(model, ids())
    theirs = results(model)
    for adapter in adapters(model):
        adapter.pairs = [[torch.ones(2), torch.ones(2)]]
    torch.testing.assert_close(results(model), theirs)


class OneMask(nn.Module):
    """Gate and up read what one dropout gave."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.a, self.c = (nn.Linear(8, 2, bias=False) for _ in "ac")
        self.b, self.d = (nn.Linear(2, 8, bias=False) for _ in "bd")
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.dropout(x)
        gate, up = self.gate(x) + self.b(self.a(dropped)), self.up(x) + self.d(self.c(dropped))
        return x + self.down(nn.functional.silu(gate) * up)


def test_one_mask_of_two_adapters_is_not_two() -> None:
    conversion = ckptkern.convert(nn.Sequential(OneMask(), nn.Identity()), torch.randn(4, 8))
    assert fused_of(conversion) == [], str(conversion)


UNREAD = {
    "a bias": (lambda: model_of("llama", "q_proj", bias=True), "linear layer"),
    "dropout before a split weight": (lambda: model_of("phi3", "gate_up", p=0.3), "dropout of a weight that is split"),
}


@pytest.mark.parametrize("what", UNREAD)
def test_others_are_activation_checkpoints_with_their_reason(what: str) -> None:
    make, reason = UNREAD[what]
    conversion = ckptkern.convert(make(), ids())
    assert fused_of(conversion) == ["checkpoint"] * 2
    assert all("as with adapters" in row.reason and reason in row.reason for row in conversion.converted), str(
        conversion
    )


def test_two_active_adapters_are_an_activation_checkpoint() -> None:
    model = model_of("llama", "up_proj")
    for adapter in adapters(model):
        adapter._active.append("other")
    theirs = results(model)
    assert fused_of(ckptkern.convert(model, ids())) == ["checkpoint"] * 2
    torch.testing.assert_close(results(model), theirs)


class HookedInCalls(nn.Module):
    """As peft hands arguments to adapters: by hooks that last for the model's call."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        hooks = [one.register_forward_hook(lambda module, args, y: 2 * y) for one in adapters(self.model)]
        try:
            return self.model(tokens)
        finally:
            for hook in hooks:
                hook.remove()


def test_hooks_that_last_for_a_call_are_not_lost_in_backward() -> None:
    model = HookedInCalls(model_of("llama", "q_proj"))
    theirs = results(model)
    conversion = ckptkern.convert(model, ids())
    assert fused_of(conversion) == ["mlp_block"] * 2
    assert any("last for a call" in row.reason for row in conversion)
    torch.testing.assert_close(results(model), theirs)
