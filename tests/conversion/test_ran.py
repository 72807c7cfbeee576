"""What training calls of converted modules ran, and what says so: counts, warnings, names that match nothing."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.architectures import WIDTH, Llama, Stack, ids, with_tables
from torch import Tensor, nn

import ckptkern
from ckptkern.conversion.binding import warn_again
from ckptkern.memory import saved_tensors

FUSED = {"fused": 2, "checkpointed": 0, "original": 0}


@pytest.fixture
def model() -> Stack:
    torch.manual_seed(0)
    return Stack(Llama, with_tables).train()


@pytest.fixture
def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    return transformers.LlamaModel(config).train()


def step(model: nn.Module, **kwargs) -> dict[str, Tensor]:
    model.zero_grad()
    model(**kwargs).last_hidden_state.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def tokens() -> Tensor:
    return torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def test_a_training_call_is_counted_and_no_other(model: Stack) -> None:
    conversion = ckptkern.convert(model, ids())
    assert conversion.calls == dict.fromkeys(FUSED, 0), "convert's own calls are not training"
    model(ids())
    assert conversion.calls == FUSED
    with torch.no_grad():
        model.eval()(ids())
    model(ids())  # with gradients, such as an adapter's: fused
    assert conversion.calls == FUSED | {"fused": 4}
    assert [row.calls["fused"] for row in conversion if row.name == "layers.1"] == [2]


def test_another_call_than_the_example_is_counted_and_warns_once(model: Stack) -> None:
    conversion = ckptkern.convert(model, ids())
    x, layers = torch.randn(2, 6, WIDTH, dtype=torch.float32), model.layers
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for layer in (*layers, *layers):
            layer(x, tables=None)
    assert len(found) == 1
    assert "call of Llama" in str(found[0].message)
    assert "tables is None, and was of class tuple in the example for convert" in str(found[0].message)
    assert conversion.calls == {"fused": 0, "checkpointed": 0, "original": 4}


def test_a_keyword_that_the_example_had_not(model: Stack) -> None:
    ckptkern.convert(model, ids())
    x = torch.randn(2, 6, WIDTH)
    with (
        pytest.warns(
            UserWarning, match="the example for convert had no other. Give convert a call like those of training"
        ),
        pytest.raises(TypeError),
    ):
        model.layers[0](x, **with_tables(x), other=torch.ones(2))


def test_what_is_no_longer_as_it_was_is_a_checkpoint(model: Stack) -> None:
    conversion = ckptkern.convert(model, ids())
    model.layers[0].mlp.register_forward_hook(lambda module, args, y: 2 * y)
    model(ids())
    assert conversion.calls == {"fused": 1, "checkpointed": 1, "original": 0}


def test_a_pair_of_modes(model: Stack) -> None:
    saved = {}
    for modes in (("full", "none"), ("none", "full"), ("full", "full"), "full", "none"):
        other = copy.deepcopy(model)
        conversion = ckptkern.convert(other, ids(), recompute=modes)
        assert {row.replaced_by for row in conversion.converted} >= {"transformer_layer"}
        saved[modes] = conversion.saved_after
    assert saved["full"] == saved["full", "full"] < min(saved["full", "none"], saved["none", "full"])
    assert max(saved["full", "none"], saved["none", "full"]) < saved["none"]


def test_a_pair_of_modes_of_parts(model: Stack) -> None:
    ckptkern.convert(model, ids(), recompute=("selective", "none"), exclude="layers.?")
    assert "forward" not in model.layers[0].__dict__
    ckptkern.convert(model, ids(), recompute=("selective", "none"), include=["*.self_attn", "*.mlp"])
    assert [layer.self_attn.forward.recompute for layer in model.layers] == ["selective"] * 2
    assert [layer.mlp.forward.recompute for layer in model.layers] == ["none"] * 2
    with pytest.raises(ValueError, match="convert: recompute must be one of 'none', 'selective', 'full', not 'some'"):
        ckptkern.convert(model, ids(), recompute=("full", "some"))


def test_a_name_of_nothing_is_an_error(model: Stack) -> None:
    for option in ("include", "exclude"):
        with pytest.raises(ValueError, match=f"{option}='layer.0' is the name of no module of Stack; .* 'layers.0'"):
            ckptkern.convert(model, ids(), **{option: ["layers.1", "layer.0"]})
    ckptkern.convert(model, ids(), exclude=nn.Conv2d)  # no name


def test_without_an_example_nothing_is_found(model: Stack) -> None:
    with pytest.warns(UserWarning, match="without example inputs it found nothing to convert"):
        conversion = ckptkern.convert(model)
    assert "give convert a call of the model" in str(conversion)


def test_one_token_is_too_few(language_model: nn.Module) -> None:
    assert "give an example of at least two" in str(ckptkern.convert(language_model, tokens()[:, :1]))


def test_the_table_says_what_the_whole_model_saves(model: Stack) -> None:
    conversion = ckptkern.convert(model, ids())
    with saved_tensors(model) as after:
        model(ids())
    with saved_tensors(model) as before:
        ckptkern.revert(model)(ids())
    assert (conversion.saved_before, conversion.saved_after) == (before.bytes, after.bytes)


def test_a_call_for_hidden_states_leaves_all_fused(language_model: nn.Module) -> None:
    """transformers leaves hooks on layers and their attention after it."""
    given = {"input_ids": tokens(), "use_cache": False}
    language_model.config._attn_implementation = "eager"  # whose attentions a call may ask for
    expected = step(copy.deepcopy(language_model), **given)
    conversion = ckptkern.convert(language_model, **given)
    states = language_model(**given, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert conversion.calls == FUSED
    torch.testing.assert_close(step(language_model, **given), expected, rtol=1e-4, atol=1e-6)
    assert conversion.calls == FUSED | {"fused": 4}
    assert language_model(**given, output_attentions=True).attentions[1].shape == (2, 4, 9, 9)
    assert conversion.calls["fused"] == 4, "what the call asks for is inside of the layers"
    again = ckptkern.convert(language_model, **given)  # with the hooks there
    assert {row.replaced_by for row in again.converted} == {"transformer_layer"}


def test_padding_that_the_example_had_not_under_a_cache(language_model: nn.Module) -> None:
    mask = torch.ones_like(tokens())
    mask[1, :4] = 0
    given = {"input_ids": tokens(), "attention_mask": mask}
    expected = step(copy.deepcopy(language_model), **given, use_cache=False)
    conversion = ckptkern.convert(language_model, input_ids=tokens())  # transformers makes a cache
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for options in ({}, {"use_cache": False}):
            torch.testing.assert_close(step(language_model, **given, **options), expected, rtol=1e-4, atol=1e-6)
    assert conversion.calls == FUSED | {"fused": 4}
    ours = [str(one.message) for one in found if "ckptkern" in str(one.message)]
    assert len(ours) == 1
    assert "use_cache=False" in ours[0]


def test_a_cache_stays_empty_in_a_checkpoint_of_what_has_changed(language_model: nn.Module) -> None:
    given = {"input_ids": tokens()}
    for layer in language_model.layers:
        layer.mlp.register_forward_hook(lambda module, args, y: 2 * y)
    expected = step(copy.deepcopy(language_model), **given)
    conversion = ckptkern.convert(language_model, **given, exclude="*.mlp")
    for layer in language_model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, y: None)
    warn_again()
    with pytest.warns(UserWarning, match="does not fill a cache"):
        found = step(language_model, **given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert conversion.calls["original"] == 0
    assert conversion.calls["checkpointed"] >= 2


def test_a_trainer_that_sets_use_cache_changes_nothing(language_model: nn.Module) -> None:
    """TRL's SFTTrainer sets it in the configuration, which layers hold. Another setting of it may matter."""
    conversion = ckptkern.convert(language_model, input_ids=tokens(), use_cache=False)
    layers = [row for row in conversion if row.name.startswith("layers.")]
    for value in (False, True):
        language_model.config.use_cache = value
        step(language_model, input_ids=tokens(), use_cache=False)
    assert [row.calls["fused"] for row in layers] == [2, 2]
    language_model.config.rms_norm_eps = 0.1
    step(language_model, input_ids=tokens(), use_cache=False)
    assert [row.calls["checkpointed"] for row in layers] == [1, 1]
