"""The options of convert and the keywords of the model's call; what training calls then ran, and what says so."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import TypedDict

import pytest
import torch
from conversion.steps import assert_same, pair, saved, step
from support.architectures import WIDTH, Llama, Stack, ids, with_tables
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

import ckptkern
from ckptkern import ops
from ckptkern.conversion.report import WARNED

FUSED = {"fused": 2, "checkpointed": 0, "original": 0}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack(Llama, with_tables).train()


@pytest.fixture
def language_model():
    pytest.importorskip("transformers", minversion="5.0")
    from conversion.test_language_models import model_of

    return model_of().model


TOKENS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))

# -- keywords: convert's own, those of the model's call, and those of nobody


class Extra(TypedDict, total=False):
    num_items: int


class Config:
    return_dict = True


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, *, scale=1.0):
        return self.layer(x).relu() * scale


class Anything(nn.Module):
    """As a wrapper, or a model of transformers, takes what it hands on."""

    def __init__(self):
        super().__init__()
        self.inner, self.config = Named(), Config()

    def forward(self, x: Tensor, **kwargs: Unpack[Extra]) -> Tensor:
        return self.inner(x, **{name: value for name, value in kwargs.items() if name == "scale"})


X = torch.randn(4, 8)
MISSPELT = {
    "recompue": ("full", "; did you mean 'recompute'?"), "mode": ("full", ""),
    "workspce": ("1MiB", "; did you mean 'workspace'?"), "excluded": ("*", "; did you mean 'exclude'?"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [Named, Anything])
@pytest.mark.parametrize("name", MISSPELT)
def test_a_keyword_of_nobody(name, kind):
    module, (value, hint) = kind(), MISSPELT[name]
    before = dict(vars(module))
    with pytest.raises(TypeError) as error:
        ckptkern.convert(module, X, **{name: value})
    message = f"convert: neither convert nor the forward of {kind.__name__} has an argument '{name}'"
    assert str(error.value) == message + hint
    assert dict(vars(module)) == before


def test_plan_names_it_too():
    pytest.importorskip("scipy")
    with pytest.raises(TypeError, match=r"plan: neither plan nor the forward of .* 'buget'; did you mean 'budget'\?"):
        ckptkern.plan(Anything(), X, buget="1MiB")


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (Named, {"scale": 2.0}),
        (Anything, {"scale": 2.0}),  # of a module inside
        (Anything, {"num_items": 3}),  # of the TypedDict
        (Anything, {"return_dict": False}),  # of the config
        (Anything, {"anything": X, "nested": {"x": X}}),  # data
    ],
)
def test_a_keyword_of_the_model(kind, keywords):
    ckptkern.convert(kind(), X, **keywords)


# -- options


class WithLoss(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, ids, labels):
        return F.cross_entropy(self.stack(ids).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("compiled", [False, True])
def test_the_workspace_of_every_op(model, compiled, monkeypatch):
    """Layers, and the head with its loss, in an eager call and, from torch 2.13 on, in a compiled one."""
    seen = {}

    def spied(name, op, *args, workspace=None, **kwargs):
        seen.setdefault(name, set()).add(workspace)
        return op(*args, workspace=workspace, **kwargs)

    names = "transformer_layer", "linear_cross_entropy"
    for name in names:
        monkeypatch.setattr(ops, name, functools.partial(spied, name, getattr(ops, name)))
    with_loss, example = WithLoss(model), (ids(), ids())
    heads = not compiled or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    for workspace in ("16MiB",) if compiled else ("16MiB", None):
        ckptkern.convert(with_loss, *example, workspace=workspace)
        seen.clear()
        torch._dynamo.reset()
        (torch.compile(with_loss, backend="eager") if compiled else with_loss)(*example).backward()
        assert seen == {name: {workspace} for name in names[: 1 + heads]}


def test_a_wrong_workspace_is_found_before_the_model_runs():
    with pytest.raises(ValueError, match=r"convert: workspace must be .*, not 'much'"):
        ckptkern.convert(nn.Linear(2, 2), torch.ones(3, 5), workspace="much")


@pytest.mark.slow
def test_a_pair_of_modes(model):
    bytes_ = {}
    for modes in (("full", "none"), ("none", "full"), ("full", "full"), "full", "none"):
        ours, _, conversion = pair(model, ids(), recompute=modes)
        bytes_[modes] = conversion.saved_after
        assert [saved(m, ids()) for m in (ours, model)] == [conversion.saved_after, conversion.saved_before]
    pairs = bytes_["full", "none"], bytes_["none", "full"]
    assert bytes_["full"] == bytes_["full", "full"] < min(pairs) < max(pairs) < bytes_["none"]


def test_a_pair_of_modes_of_parts(model):
    ckptkern.convert(model, ids(), recompute=("selective", "none"), include=["*.self_attn", "*.mlp"])
    assert "forward" not in model.layers[0].__dict__
    parts = [part.forward.recompute for layer in model.layers for part in (layer.self_attn, layer.mlp)]
    assert parts == ["selective", "none"] * 2
    with pytest.raises(ValueError, match="convert: recompute must be one of 'none', 'selective', 'full', not 'some'"):
        ckptkern.convert(model, ids(), recompute=("full", "some"))


def test_a_name_of_nothing_is_an_error(model):
    for option in ("include", "exclude"):
        with pytest.raises(ValueError, match=f"{option}='layer.0' matches no module of Stack; .* 'layers.0'"):
            ckptkern.convert(model, ids(), **{option: ["layers.1", "layer.0"]})
    ckptkern.convert(model, ids(), exclude=nn.Conv2d)  # no name


def test_too_small_an_example(model, language_model):
    with pytest.warns(UserWarning, match="without example inputs it found nothing to convert") as record:
        conversion = ckptkern.convert(model)
    assert record[0].filename == __file__
    assert "give convert a call of the model" in str(conversion)
    assert "give an example of at least two" in str(ckptkern.convert(language_model, TOKENS[:, :1]))


# -- what ran


def test_a_training_call_is_counted_and_no_other(model):
    conversion = ckptkern.convert(model, ids())
    assert conversion.calls == dict.fromkeys(FUSED, 0), "convert's own calls are not training"
    model(ids())
    assert conversion.calls == FUSED
    with torch.no_grad():
        model.eval()(ids())
    model(ids())  # with gradients, such as an adapter's: fused
    assert conversion.calls == FUSED | {"fused": 4}
    assert [row.calls["fused"] for row in conversion if row.name == "layers.1"] == [2]


def test_another_call_than_the_example_is_counted_and_warns_once(model):
    conversion = ckptkern.convert(model, ids())
    x, layers = torch.randn(2, 6, WIDTH), model.layers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layer in (*layers, *layers):
            layer(x, tables=None)
    assert len(caught) == 1
    assert "call of layers.0 (Llama)" in str(caught[0].message)
    assert "tables is None, and was of class tuple in the example for convert" in str(caught[0].message)
    assert conversion.calls == {"fused": 0, "checkpointed": 0, "original": 4}
    ckptkern.convert(model, ids())  # which warns again
    with pytest.warns(UserWarning, match="the example for convert had no other. Give convert a call like"):
        assert_raises_type_error(layers[0], x)


def assert_raises_type_error(layer, x):
    """The layer's own, for a keyword that it does not take."""
    with pytest.raises(TypeError):
        layer(x, **with_tables(x), other=torch.ones(2))


def test_a_call_for_hidden_states_leaves_all_fused(language_model):
    """transformers leaves hooks on layers and their attention after it."""
    inputs = {"input_ids": TOKENS, "use_cache": False}
    language_model.config._attn_implementation = "eager"  # whose attentions a call may ask for
    expected = step(copy.deepcopy(language_model), **inputs)
    conversion = ckptkern.convert(language_model, **inputs)
    states = language_model(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert conversion.calls == FUSED
    assert_same(step(language_model, **inputs), expected)
    assert conversion.calls == FUSED | {"fused": 4}
    assert language_model(**inputs, output_attentions=True).attentions[1].shape == (2, 4, 9, 9)
    assert conversion.calls["fused"] == 4, "what the call asks for is inside of the layers"
    again = ckptkern.convert(language_model, **inputs)  # with the hooks there
    assert {row.replaced_by for row in again.converted} == {"transformer_layer"}


@pytest.mark.slow
def test_padding_that_the_example_had_not_under_a_cache(language_model):
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    inputs = {"input_ids": TOKENS, "attention_mask": mask}
    expected = step(copy.deepcopy(language_model), **inputs, use_cache=False)
    conversion = ckptkern.convert(language_model, input_ids=TOKENS)  # transformers makes a cache
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for options in ({}, {"use_cache": False}):
            assert_same(step(language_model, **inputs, **options), expected)
    assert conversion.calls == FUSED | {"fused": 4}
    ours = [str(warning.message) for warning in caught if "ckptkern" in str(warning.message)]
    assert len(ours) == 1
    assert "use_cache=False" in ours[0]


def test_a_cache_stays_empty_in_a_checkpoint_of_what_has_changed(language_model):
    for layer in language_model.layers:
        layer.mlp.register_forward_hook(lambda module, args, y: 2 * y)
    expected = step(copy.deepcopy(language_model), input_ids=TOKENS)
    conversion = ckptkern.convert(language_model, input_ids=TOKENS, exclude="*.mlp")
    for layer in language_model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, y: None)
    WARNED.clear()
    with pytest.warns(UserWarning, match="does not fill a cache"):
        assert_same(step(language_model, input_ids=TOKENS), expected)
    assert conversion.calls["original"] == 0
    assert conversion.calls["checkpointed"] >= 2


CHANGES = {
    "use_cache, as TRL's SFTTrainer": lambda model: setattr(model.config, "use_cache", not model.config.use_cache),
    "a tokenizer's pad token": lambda model: setattr(model.config, "pad_token_id", 3),
    "what save_pretrained notes": lambda model: model.config.update({"architectures": ["Llama"], "dtype": "float32"}),
    "a name that nobody reads": lambda model: setattr(model.config, "foo", 1),
    "a number that layers read when they are made": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    "a dict that nobody reads": lambda model: model.config.rope_parameters.update(note=1),
    "attributes of layers": lambda model: [setattr(m, "step", 1) for m in model.modules()],
    "gradient checkpointing": lambda model: model.gradient_checkpointing_enable(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_layer_reads_may_change(language_model, change):
    inputs = {"input_ids": TOKENS, "use_cache": False}
    conversion = ckptkern.convert(language_model, **inputs)
    for _ in range(2):
        CHANGES[change](language_model)
        step(language_model, **inputs)
    assert conversion.calls == FUSED | {"fused": 4}


READ = {
    "the configuration": (lambda m: setattr(m.config, "_attn_implementation", "eager"),
                          "config._attn_implementation_internal is 'eager', and was 'ckptkern'"),
    "a number": (lambda m: setattr(m.layers[0].self_attn, "scaling", 0.5), "self_attn.scaling is 0.5, and was "),
    "a function": (lambda m: setattr(m.layers[0].mlp, "forward", lambda x: x), "mlp has a hook, or a forward of its own"),
    "a hook": (lambda m: m.layers[0].mlp.register_forward_hook(lambda *_: None), "mlp has a hook, or a forward of its own"),
    "a module": (lambda m: setattr(m.layers[0].mlp, "act_fn", nn.ReLU()), "mlp.act_fn is another module: a ReLU, and "),
    "a mode": (lambda m: m.layers[0].self_attn.eval(), "self_attn is in evaluation mode, unlike the layer that it is in"),
    "another configuration": (lambda m: setattr(m.layers[0].self_attn, "config", copy.copy(m.config)), "self_attn.config is "),
}  # fmt: skip


@pytest.mark.parametrize("change", READ)
def test_what_a_layer_reads_unfuses_it_with_a_warning(language_model, change):
    inputs, (make, cause) = {"input_ids": TOKENS, "use_cache": False}, READ[change]
    conversion = ckptkern.convert(language_model, **inputs)
    step(language_model, **inputs)
    make(language_model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(language_model, **inputs)
    layers = 2 if change == "the configuration" else 1  # that read it
    assert conversion.calls == {"fused": 6 - 2 * layers, "checkpointed": 2 * layers, "original": 0}
    (message,) = (str(warning.message) for warning in caught)
    assert "a training call of layers.0 (LlamaDecoderLayer) runs an activation checkpoint, not fused: " in message
    assert cause in message
    assert message.endswith(". Convert the model once more, as it is trained now")


class Wrapped(Llama):
    """Looks at one of its caller's keywords, and hands others on, as layers of transformers with gradient checkpointing do."""

    def forward(self, x, tables=None, **kwargs):
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return super().forward(x, tables)


def test_new_names_of_which_one_is_looked_at_are_learned_each():
    torch.manual_seed(0)
    model = Stack(Wrapped, with_tables).train()
    conversion, x = ckptkern.convert(model, ids()), torch.randn(2, 6, WIDTH)
    model(ids())
    tables = with_tables(x)
    for use_cache in (True, False, True):
        model.layers[0](x, **tables, num_items=torch.tensor(7), use_cache=use_cache)
    assert conversion.calls == FUSED | {"fused": 5}
