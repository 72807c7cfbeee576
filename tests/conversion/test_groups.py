"""`every`: layers that a model calls one by one are one region."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from conversion.steps import assert_same, assert_same_steps, saved, step, variant
from support.architectures import GPT, WIDTH, B, Choosing, Llama, Noisy, S, Scaled, Stack, ids, nothing, with_tables
from torch import nn
from torch.utils.checkpoint import CheckpointError

import ckptkern
from ckptkern.memory import saved_tensors

X = B * S * WIDTH * 4  # bytes of a layer's input
LAYERS = 7


class Frame(Stack):
    """A model that calls its layers in some order and does something with what each returns."""

    order: Iterable[int] = range(LAYERS)

    def between(self, i, x, seen):
        return x

    def forward(self, tokens):
        x, seen = self.embed(tokens), []
        for i in self.order:
            x = self.layers[i](x, **self.calls(x))
            x = self.between(i, x[0] if isinstance(x, tuple) else x, seen)
        return self.head(x + sum(map(torch.sin, seen)))


def adds(self, i, x, seen):
    return x + 1 if i == 0 else x


def changes(self, i, x, seen):
    return x.mul_(2) if i == 0 else x


def collects(self, i, x, seen):
    seen.append(x)  # is used elsewhere, too
    return x


def samples(self, i, x, seen):
    torch.rand(3)  # as a model with layer dropout
    return x


def model_of(layer=Llama, kind=Frame):
    torch.manual_seed(0)
    return kind(layer, nothing if layer in (with_tuple, torchs) else with_tables, LAYERS).train()


def with_tuple():
    return GPT(0.25)


def torchs():
    return nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True)


def grouped(model, every=3):
    return ckptkern.convert(model, ids(), recompute="full", every=every)


def assert_as_alone(model, every=3, run=step):
    """Compares a training step with layers one by one and in regions."""
    grouped(model, 1)
    alone = run(model, ids())
    conversion = grouped(model, every)
    assert_same(run(model, ids()), alone, 1e-6)
    return conversion


THREES, AFTER_THE_FIRST = [[0, 1, 2], [3, 4, 5]], [[1, 2], [3, 4, 5]]
CASES = {
    "twos": (Llama, Frame, 2, [[0, 1], [2, 3], [4, 5]]),
    "threes": (Llama, Frame, 3, THREES),
    "all": (Llama, Frame, LAYERS, []),
    "checkpoints": (Scaled, Frame, 3, THREES),
    "torch's": (torchs, Frame, 3, THREES),
    "tuples, with dropout": (with_tuple, Frame, 3, THREES),  # whose masks recompute samples again
    "numbers sampled between layers": (Noisy, variant(Frame, between=samples), 3, THREES),
    "collecting": (Llama, variant(Frame, between=collects), 3, THREES),
    "another input": (Llama, variant(Frame, between=adds), 3, AFTER_THE_FIRST),
    "another input of checkpoints": (Scaled, variant(Frame, between=adds), 3, AFTER_THE_FIRST),
    # not a fused layer in place: autograd refuses to change what it saves
    "changed in place": (Scaled, variant(Frame, between=changes), 3, AFTER_THE_FIRST),
    "layers called again": (Llama, variant(Frame, order=(0, 1, 2, 0, 1, 2, 3, 4, 5, 6)), 3, THREES),
}


@pytest.mark.parametrize("name", CASES)
def test_a_region_of_layers_computes_the_same(name):
    layer, kind, every, groups = CASES[name]
    conversion = assert_as_alone(model_of(layer, kind), every)
    assert conversion.groups == [[f"layers.{i}" for i in some] for some in groups]
    assert all(f"{some[0]} to {some[-1]} are one region" in str(conversion) for some in conversion.groups)


@pytest.mark.parametrize("every", [2, 3])
def test_a_region_saves_its_first_input(every):
    model, whole = model_of(), {}
    for k in (1, every):
        conversion = grouped(model, k)
        whole[k] = saved(model, ids())
        assert conversion.saved_after == whole[k]
    inside = (LAYERS - 1) // every * (every - 1)  # layers whose input is saved no more
    assert 0 <= whole[every] - (whole[1] - inside * X) < 1024 * LAYERS, "random states alone are added"


def test_a_layer_that_is_called_again_begins_a_region():
    grouped(model := model_of(kind=CASES["layers called again"][1]))
    with saved_tensors(model) as saved:
        model(ids())
    assert [shape for shape, *_ in saved.tensors].count((B, S, WIDTH)) == 4, "of three regions and of the last layer"


def test_layers_may_be_left_out():
    grouped(model := model_of())
    for skipped in ((0,), (1,), (2, 3), (1, 4)):
        model.order = [i for i in range(LAYERS) if i not in skipped]
        ours = step(model, ids())
        assert_same(ours, step(ckptkern.revert(copy.deepcopy(model)), ids()))


@pytest.mark.parametrize("when", ["between layers", "before backward"])
def test_a_parameter_that_changes_is_an_error(when):
    grouped(model := model_of())
    x = torch.randn(B, S, WIDTH, requires_grad=True)
    y = model.layers[0](x, **with_tables(x)) if when == "between layers" else model(ids())
    with torch.no_grad():
        model.layers[1 - (when == "between layers")].mlp.up_proj.weight.mul_(2)
    if when == "before backward":
        with pytest.raises(CheckpointError, match=r"mlp.up_proj.weight.* of the region Llama"):
            y.sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        model.layers[1](y, **with_tables(x)).square().sum().backward()


@pytest.mark.parametrize("layer", [Llama, Scaled, with_tuple])
def test_a_mode_may_change_before_backward(layer):
    def run(model, tokens):
        torch.manual_seed(1)
        loss = model.train()(tokens).square().mean()
        model.eval()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert not any(m.training for m in model.modules())
        return {"output": loss.detach()} | dict(zip(dict(model.named_parameters()), grads, strict=True))

    assert_as_alone(model_of(layer), run=run)


@pytest.mark.slow
def test_frozen_layers_and_a_second_backward():
    model = model_of()
    for module in (model.embed, *model.layers[:4]):
        module.requires_grad_(False)

    def twice(model, tokens):
        model.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    assert_as_alone(model, run=twice)


@pytest.mark.slow
def test_a_router_decides_in_a_region_as_in_forward():
    """Its recompute rounds otherwise, by an injected difference."""
    model = model_of(Choosing)
    assert assert_as_alone(model).groups
    alone = step(model, ids())
    for layer in model.layers:
        layer.noise = 1e-4  # more than between any two scores
    assert_same(step(model, ids()), alone, 5e-3)


def test_copies_have_regions_of_their_own():
    grouped(model := model_of())
    expected = step(model, ids())
    for layers in (copy.deepcopy(model).layers, pickle.loads(pickle.dumps(model.layers))):
        groups = [layer.forward.group[0] for layer in layers[:6]]
        assert groups[0] is groups[1] is groups[2] is not groups[3]
        assert groups[0] is not model.layers[0].forward.group[0]
    assert_same(step(copy.deepcopy(model), ids()), expected, 1e-6)
    assert not any("forward" in vars(m) for m in ckptkern.revert(model).modules())


@pytest.mark.slow
def test_threads_share_a_model():
    grouped(model := model_of())
    expected = [step(model, ids(seed)) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for ours, alone in zip(pool.map(lambda seed: step(model, ids(seed)), range(4)), expected, strict=True):
            assert_same(ours, alone, 1e-6)


@pytest.mark.slow
def test_calls_without_gradients_and_compiled_ones_run_as_they_are():
    model = model_of()
    model.layers, model.order = model.layers[:3], range(3)
    assert grouped(model, 2).groups
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), model(ids()))
    torch._dynamo.reset()
    assert_same_steps(torch.compile(model, backend="aot_eager"), model, ids())


@pytest.mark.slow
def test_transformers_hidden_states_and_caches():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from conversion.test_language_models import model_of

    model = model_of(num_hidden_layers=LAYERS)
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    run = partial(step, model, tokens, labels=tokens)

    def steps():
        """With a cache, with all hidden states, and after a prompt, to whose keys and values each layer adds its own."""
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens, past_key_values=cache)
        states = run(of=lambda out: sum(h.square().mean() for h in out.hidden_states), output_hidden_states=True)
        return run(), states, run(past_key_values=cache)

    expected = steps()
    assert len(ckptkern.convert(model, tokens, labels=tokens, recompute="full", every=3).groups) == 2
    for ours, theirs in zip(steps(), expected, strict=True):
        assert_same(ours, theirs)
    with torch.no_grad():  # generation fills its cache
        assert model.eval().generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 12)


@pytest.mark.slow
def test_what_is_refused():
    # between all layers something is computed
    with pytest.warns(UserWarning, match="every=2 forms no group of layers"):
        conversion = grouped(model_of(kind=variant(Frame, between=lambda self, i, x, seen: x + 0)), 2)
    assert conversion.groups == []
    with pytest.raises(ValueError, match="convert: every must be an integer of at least 1, not 0"):
        grouped(model_of(), 0)
    grouped(model := model_of())
    for function in (ckptkern.plan, ckptkern.report):
        with pytest.raises(ValueError, match="Convert without every"):
            function(model, ids())


def test_a_stack_that_a_model_iterates_over_says_so():
    model = model_of(kind=Stack)
    model.layers = ckptkern.nn.LayerStack(model.layers)
    ckptkern.nn.sequential._warn_of_iteration.cache_clear()
    with pytest.warns(UserWarning, match="a model's forward iterates over the stack"):
        model(ids())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids())  # once
