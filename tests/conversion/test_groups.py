"""`every`: layers that a model calls one by one are one region."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from support.architectures import GPT, WIDTH, B, Choosing, Llama, S, Scaled, Stack, ids, results, with_tables
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import ckptkern
from ckptkern.memory import saved_tensors

X = B * S * WIDTH * 4  # bytes of a layer's input
LAYERS = 7
KINDS = {"fused": Llama, "checkpoint": Scaled, "tuple": lambda: GPT(0.25)}


def model_of(layer=Llama, kind: type[Stack] = Stack) -> Stack:
    torch.manual_seed(0)
    return kind(layer, (lambda x: {}) if layer is KINDS["tuple"] else with_tables, LAYERS).train()


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        torch.testing.assert_close(ours[name], one, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def ways(model: nn.Module, every: int, run=results) -> tuple[dict[str, Tensor], dict[str, Tensor], ckptkern.Conversion]:
    """(a training step of the converted model, the same in regions of `every` layers, the second's conversion)."""
    ckptkern.convert(model, ids(), recompute="full")
    torch.manual_seed(1)
    alone = run(model)
    conversion = ckptkern.convert(model, ids(), recompute="full", every=every)
    torch.manual_seed(1)
    return alone, run(model), conversion


@pytest.mark.parametrize("every", [2, 3, LAYERS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_of_layers_computes_the_same(kind: str, every: int) -> None:
    """With dropout, whose masks recompute samples again."""
    alone, grouped, conversion = ways(model_of(KINDS[kind]), every)
    equal(grouped, alone)
    names = [[f"layers.{i}" for i in range(start, start + every)] for start in range(0, LAYERS - every, every)]
    assert conversion.groups == names
    assert all(f"{some[0]} to {some[-1]} are one region" in str(conversion) for some in names)


@pytest.mark.parametrize("every", [2, 3])
def test_a_region_saves_its_first_input(every: int) -> None:
    model = model_of()
    whole = {}
    for k in (1, every):
        conversion = ckptkern.convert(model, ids(), recompute="full", every=k)
        with saved_tensors(model) as saved:
            model(ids())
        whole[k] = saved.bytes
        assert conversion.saved_after == saved.bytes
    grouped = (LAYERS - 1) // every * (every - 1)  # layers whose input is saved no more
    assert 0 <= whole[every] - (whole[1] - grouped * X) < 1024 * LAYERS, "random states alone are added"


def test_recompute_has_the_random_state_of_each_layer() -> None:
    """A model that draws numbers between its layers, as one with layer dropout does."""

    class Noisy(Scaled):
        def forward(self, x: Tensor, tables=None, attention_mask: Tensor | None = None) -> Tensor:
            return nn.functional.dropout(super().forward(x, tables, attention_mask), 0.3, self.training)

    class Between(Stack):
        def forward(self, given: Tensor, **kwargs) -> Tensor:
            x = self.embed(given)
            for layer in self.layers:
                torch.rand(3)
                x = layer(x, **self.calls(x))
            return self.head(x)

    alone, grouped, conversion = ways(model_of(Noisy, Between), 3)
    assert len(conversion.groups) == 2
    equal(grouped, alone)


class Collecting(Stack):
    """What passes between the layers is used elsewhere, too."""

    def forward(self, given: Tensor, **kwargs) -> Tensor:
        x = self.embed(given)
        found = []
        for layer in self.layers:
            x = layer(x, **self.calls(x))
            found.append(x)
        return self.head(x + sum(torch.sin(one) for one in found))


class Adding(Stack):
    """Adds to what the first layer returned."""

    def forward(self, given: Tensor, **kwargs) -> Tensor:
        x = self.embed(given)
        for i, layer in enumerate(self.layers):
            x = layer(x, **self.calls(x))
            x = x + 1 if i == 0 else x
        return self.head(x)


class InPlace(Stack):
    def forward(self, given: Tensor, **kwargs) -> Tensor:
        x = self.embed(given)
        for i, layer in enumerate(self.layers):
            x = layer(x, **self.calls(x))
            if i == 0:
                x.mul_(2)
        return self.head(x)


class Skipping(Stack):
    """Runs some of its layers, as with layer dropout."""

    skipped = ()

    def forward(self, given: Tensor, **kwargs) -> Tensor:
        x = self.embed(given)
        for i, layer in enumerate(self.layers):
            x = x if i in self.skipped else layer(x, **self.calls(x))
        return self.head(x)


def test_what_passes_between_layers_can_be_used() -> None:
    alone, grouped, conversion = ways(model_of(kind=Collecting), 3)
    assert len(conversion.groups) == 2
    equal(grouped, alone)


@pytest.mark.parametrize(("layer", "kind"), [(Llama, Adding), (Scaled, Adding), (Scaled, InPlace)])
def test_a_layer_with_another_input_begins_a_region(layer: type, kind: type[Stack]) -> None:
    """Not a fused layer in place: autograd refuses to change what it saves."""
    alone, grouped, conversion = ways(model := model_of(layer, kind), 3)
    assert conversion.groups == [["layers.1", "layers.2"], ["layers.3", "layers.4", "layers.5"]]
    equal(grouped, alone)
    conversion = ckptkern.convert(model, ids(), recompute="full", every=3)
    results(model)
    calls = [sum(row.calls.values()) for row in conversion if row.name.count(".") == 1]
    # recompute stops in the region's last layer; a checkpoint is counted when it begins, a fused layer when it ends
    assert calls == ([1, 2, 1, 2, 2, 1, 1] if layer is Llama else [1, 2, 2, 2, 2, 2, 1])


@pytest.mark.parametrize("skipped", [(0,), (1,), (2, 3), (1, 4)])
def test_layers_may_be_left_out(skipped: tuple[int, ...]) -> None:
    model = model_of(kind=Skipping)
    ckptkern.convert(model, ids(), recompute="full", every=3)
    model.skipped = skipped
    grouped = results(model)
    ckptkern.revert(model)
    equal(grouped, results(model))


def test_a_layer_that_is_called_again_begins_a_region() -> None:
    class Repeating(Stack):
        def forward(self, given: Tensor, **kwargs) -> Tensor:
            x = self.embed(given)
            for i in (0, 1, 2, 0, 1, 2, 3, 4, 5, 6):
                x = self.layers[i](x, **self.calls(x))
            return self.head(x)

    alone, grouped, conversion = ways(model := model_of(kind=Repeating), 3)
    assert len(conversion.groups) == 2
    equal(grouped, alone)
    with saved_tensors(model) as saved:
        model(ids())
    inputs = [shape for shape, *_ in saved.tensors if shape == (B, S, WIDTH)]
    assert len(inputs) == 4, "of three regions and of the last layer"


@pytest.mark.parametrize("every", [2, 3])
def test_a_parameter_that_changes_between_layers_is_an_error(every: int) -> None:
    model = model_of()
    ckptkern.convert(model, ids(), recompute="full", every=every)
    x = torch.randn(B, S, WIDTH, requires_grad=True)
    y = model.layers[0](x, **with_tables(x))
    with torch.no_grad():
        model.layers[0].input_layernorm.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        model.layers[1](y, **with_tables(x)).square().sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mode_may_change_before_backward(kind: str) -> None:
    def step(model: nn.Module) -> dict[str, Tensor]:
        model.train().zero_grad()
        loss = model(ids()).square().mean()
        model.eval()
        loss.backward()
        assert not any(m.training for m in model.modules())
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    alone, grouped, _ = ways(model_of(KINDS[kind]), 3, step)
    equal(grouped, alone)


def test_a_changed_parameter_is_named() -> None:
    model = model_of()
    ckptkern.convert(model, ids(), recompute="full", every=3)
    y = model(ids())
    with torch.no_grad():
        model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(CheckpointError, match=r"mlp.up_proj.weight.* of the region Llama"):
        y.sum().backward()


def test_frozen_layers_and_a_second_backward() -> None:
    model = model_of()
    model.embed.requires_grad_(False)
    for layer in model.layers[:4]:
        layer.requires_grad_(False)

    def twice(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(ids()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    alone, grouped, _ = ways(model, 3, twice)
    equal(grouped, alone)


def test_a_router_decides_in_a_region_as_in_forward() -> None:
    """Its recompute rounds otherwise, by an injected difference."""
    model = model_of(Choosing)
    alone, grouped, conversion = ways(model, 3)
    assert conversion.groups
    equal(grouped, alone)
    for layer in model.layers:
        layer.noise = 1e-4  # more than between any two scores
    disturbed = results(model)
    for name, one in alone.items():
        scale = one.norm()
        assert (disturbed[name] - one).norm() <= 5e-3 * scale, name


def test_copies_have_regions_of_their_own() -> None:
    model = model_of()
    ckptkern.convert(model, ids(), recompute="full", every=3)
    expected = results(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.layers))):
        layers = other if isinstance(other, nn.ModuleList) else other.layers
        groups = [layer.forward.group[0] for layer in layers[:6]]
        assert groups[0] is groups[1] is groups[2] is not groups[3]
        assert groups[0] is not model.layers[0].forward.group[0]
    equal(results(copy.deepcopy(model)), expected)
    ckptkern.revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_two_threads_share_a_model() -> None:
    model, found = model_of(), {}
    ckptkern.convert(model, ids(), recompute="full", every=3)
    parameters = list(model.parameters())

    def gradients(seed: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(ids(seed)).square().mean(), parameters)

    expected = {seed: gradients(seed) for seed in range(4)}
    threads = [threading.Thread(target=lambda n=n: found.update({n: gradients(n)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, some in expected.items():
        for ours, theirs in zip(found[seed], some, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_calls_without_gradients_and_compiled_ones_run_as_they_are() -> None:
    model = model_of()
    ckptkern.convert(model, ids(), recompute="full", every=3)
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), model(ids()))
    compiled, expected = torch.compile(model, backend="aot_eager"), results(model)
    model.zero_grad()
    compiled(ids()).sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(ids()).sum().backward()
    equal(ours, {name: p.grad for name, p in model.named_parameters()})
    assert expected.keys() >= ours.keys()


def test_torchs_encoder_layers_are_grouped() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True)
    torch.manual_seed(0)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).train()
    x = torch.randn(B, S, WIDTH)

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    ckptkern.convert(model, x, recompute="full")
    alone = step()
    assert len(ckptkern.convert(model, x, recompute="full", every=3).groups) == 2
    equal(step(), alone)
    ckptkern.revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_transformers_hidden_states_and_caches() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))

    def step(**kwargs) -> dict[str, Tensor]:
        model.zero_grad()
        out = model(tokens, labels=tokens, **kwargs)
        (out.loss + sum(h.square().mean() for h in out.hidden_states or ())).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    calls = [{}, {"use_cache": False}, {"use_cache": False, "output_hidden_states": True}]
    expected = [step(**kwargs) for kwargs in calls]
    assert len(ckptkern.convert(model, tokens, labels=tokens, recompute="full", every=3).groups) == 2
    for kwargs, theirs in zip(calls, expected, strict=True):
        equal(step(**kwargs), theirs)
    ckptkern.revert(model)
    found = []
    for every in (None, 3):  # a prompt's keys and values in a cache, to which each layer adds its own
        if every:
            ckptkern.convert(model, tokens, labels=tokens, recompute="full", every=every)
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            model(tokens, past_key_values=cache)
        found.append(step(past_key_values=cache))
    equal(*found)
    model.eval()
    with torch.no_grad():  # generation fills its cache
        assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_what_no_group_can_be_made_of_is_said() -> None:
    class Changing(Stack):
        def forward(self, given: Tensor, **kwargs) -> Tensor:
            x = self.embed(given)
            for layer in self.layers:
                x = layer(x + 0, **self.calls(x))
            return self.head(x)

    with pytest.warns(UserWarning, match="every=2 forms no group of layers"):
        conversion = ckptkern.convert(model_of(kind=Changing), ids(), every=2)
    assert conversion.groups == []
    with pytest.raises(ValueError, match="convert: every must be an integer of at least 1, not 0"):
        ckptkern.convert(model_of(), ids(), every=0)


def test_plan_and_report_want_layers_that_are_alone() -> None:
    model = model_of()
    ckptkern.convert(model, ids(), every=2)
    for function in (ckptkern.plan, ckptkern.report):
        with pytest.raises(ValueError, match="convert without every first"):
            function(model, ids())


def test_a_stack_that_a_model_iterates_over_says_so() -> None:
    model = model_of()
    model.layers = ckptkern.nn.LayerStack(model.layers)
    ckptkern.nn.sequential._warn_of_iteration.cache_clear()
    with pytest.warns(UserWarning, match="a model's forward iterates over the stack"):
        model(ids())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids())  # once
        assert len(list(model.layers)) == LAYERS
