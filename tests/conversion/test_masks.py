"""Padding masks of transformers' models, which converted layers get as they were given, [B, S]."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from conversion.steps import assert_same_steps, compiled, pair
from conversion.test_language_models import MODELS, S, V, batch, converted, masks_of_layers, model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from ckptkern.conversion import masks  # noqa: E402
from ckptkern.memory import peak_memory  # noqa: E402

__all__ = ["masks_of_layers"]  # a fixture
WITH_SINKS = [name for name in ("GraniteSWAForCausalLM", "FlintForCausalLM") if name in MODELS]
PADDED = batch(1, padded=True)


def window(size):
    return dict(mask_function=sliding_window_causal_mask_function(size), local_size=size)


@pytest.mark.parametrize(
    "changes",
    [
        dict(kv_length=20),
        dict(q_offset=3),
        dict(q_offset=torch.tensor(0)),
        dict(use_vmap=True),
        dict(allow_is_causal_skip=False),
        dict(kv_offset=2),
        window(4),
        dict(mask_function=bidirectional_mask_function, allow_is_causal_skip=False),
        dict(mask_function=sliding_window_bidirectional_mask_function(3), q_length=1, kv_length=10),
        dict(attention_mask=torch.arange(8).view(2, 4) % 3 > 0),
    ],
    ids=" ".join,
)
def test_what_is_more_than_causal_is_transformers_own(changes):
    usual = dict(batch_size=2, q_length=10, kv_length=10, attention_mask=torch.rand(2, 10) > 0.5)
    arguments = usual | changes
    arguments["attention_mask"] = torch.nn.functional.pad(arguments["attention_mask"], (0, arguments["kv_length"] - 10))
    assert torch.equal(masks.mask_function(**arguments), sdpa_mask(**arguments))
    assert masks.mask_function(**usual) is usual["attention_mask"]


def test_a_window_is_the_configurations():
    windowed = dict(batch_size=2, q_length=10, kv_length=10, attention_mask=torch.rand(2, 10) > 0.5) | window(4)
    config = transformers.MistralConfig(sliding_window=4)
    assert masks.mask_function(**windowed, config=config) is windowed["attention_mask"]
    config.attention_chunk_size = 4
    for other in (transformers.MistralConfig(sliding_window=5), transformers.LlamaConfig(), config):
        assert torch.equal(masks.mask_function(**windowed, config=other), sdpa_mask(**windowed))


def test_a_mask_s_differences_of_places_are_of_some_rows_at_a_time():
    arguments = dict(batch_size=1, q_length=512, kv_length=512, allow_is_causal_skip=False)
    arguments["mask_function"] = sliding_window_bidirectional_mask_function(3)
    peaks = []
    for function in (sdpa_mask, masks.mask_function):
        with peak_memory("cpu") as peak:
            mask = function(**arguments)
        peaks.append(peak.bytes / mask.nbytes)
    assert peaks[1] < 3.5 < 16 < peaks[0], peaks


def test_no_square_is_written():
    """Neither the mask nor what is made of it has rows and columns; the model as it was makes both."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for part in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(part, Tensor) and part.dim() >= 2 and part.shape[-1] == part.shape[-2] == 61:
                    squares.append(func)
            return result

    for model, wanted in zip(converted(), (False, True), strict=True):
        squares = []
        with Seen():
            model(**batch(1, 61, padded=True)).loss.backward()
        assert bool(squares) is wanted, squares


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "padded"),
    [("LlamaForCausalLM", False)]
    + [pytest.param(name, True, marks=pytest.mark.long) for name in ("LlamaForCausalLM", *WITH_SINKS[1:])],
)
def test_compiled(name, padded, masks_of_layers):
    """Whole graphs. Where no mask is given, transformers makes one [B, 1, S, S] of what may be packed; here it is [B, S]."""
    ours, theirs = converted(name)
    masks_of_layers.clear()  # of the conversion
    assert_same_steps(compiled(ours), theirs, **batch(1, padded=padded))
    assert set(masks_of_layers) == {(2, S)}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", *WITH_SINKS[:1]])
@pytest.mark.parametrize("exclude", [("model.layers.1", "lm_head"), ("*",)])
def test_layers_that_were_not_replaced(exclude, name):
    """They get the same mask and compute the same; without gradients all run as they were."""
    ours, theirs, _ = pair(model_of(name), **batch(9), exclude=exclude)
    assert ours.config._attn_implementation == masks.NAME
    assert_same_steps(ours, theirs, **PADDED)
    seen = PADDED["attention_mask"].bool()
    with torch.no_grad():
        logits = [model.eval()(**PADDED).logits for model in (ours, theirs)]
    torch.testing.assert_close(*(z[seen] for z in logits))
    assert logits[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "cache"),
    [("LlamaForCausalLM", None), *((name, "static") for name in ("LlamaForCausalLM", *WITH_SINKS[:1]))],
)
def test_generation(cache, name):
    """Padding on the left, a cache, and steps of one token."""
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, cache_implementation=cache)
    assert torch.equal(*(model.eval().generate(ids, **options) for model in converted(name)))


def test_dropout_of_layers_that_were_not_replaced():
    """attention_dropout of a layer applies in training, and not in evaluation."""
    model = model_of(attention_dropout=0.5)
    ckptkern.convert(model, **batch(9), exclude="*")
    assert len({model(**PADDED).loss.item() for _ in range(2)}) == 2
    model.eval()
    assert len({model(**PADDED).loss.item() for _ in range(2)}) == 1


def test_revert_and_who_else_sets_it():
    ours, theirs = converted()
    for model in (ours, theirs):
        model.set_attn_implementation("eager")  # the user's choice stays, and layers run as they were
    assert_same_steps(ours, theirs, **PADDED)
    ckptkern.revert(ours)
    assert ours.config._attn_implementation == "eager"
    ckptkern.convert(ours, **batch(9))
    assert ours.config._attn_implementation == "eager"
    ours.set_attn_implementation("sdpa")
    ckptkern.convert(ours, **batch(9))
    assert ours.config._attn_implementation == masks.NAME
    ckptkern.revert(ours)
    assert ours.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not WITH_SINKS, reason="this release of transformers has no such models")
def test_models_with_sinks_have_no_other_attention_to_give_back():
    ours, _ = converted(WITH_SINKS[0])
    assert ours.config._attn_implementation == masks.NAME
    ckptkern.revert(ours)
    assert ours.config._attn_implementation == "eager"
    llama = model_of()
    llama.set_attn_implementation("eager")  # a choice, of two
    assert not masks.adopt(llama)
    ours.model.layers[0].self_attn.sinks = None
    assert not masks.adopt(ours), "rows that see nothing are means with eager attention, without a sink"


@pytest.mark.skipif(not WITH_SINKS, reason="this release of transformers has no such models")
def test_sinks_are_not_lost():
    """What goes with them and the implementation cannot compute is an error, and never attention without sinks."""
    layer, q = model_of(WITH_SINKS[0]).model.layers[0].self_attn, torch.randn(1, 4, 6, 8)
    for name in ("softcap", "position_bias", "cache", "output_attentions"):
        with pytest.raises(NotImplementedError, match="attention with sinks takes neither softcap"):
            masks.attention_forward(layer, q, q, q, None, s_aux=layer.sinks, **{name: True})
    for mask in (None, torch.rand(1, 1, 6, 6) > 0.5, torch.randn(1, 1, 6, 6)):
        for causal in (True, False):
            y, _ = masks.attention_forward(layer, q, q, q, mask, s_aux=layer.sinks, is_causal=causal)
            wanted = ckptkern.scaled_dot_product_attention(
                q, q, q, mask, is_causal=causal and mask is None, sinks=layer.sinks
            )
            torch.testing.assert_close(y.transpose(1, 2), wanted)


def test_models_that_ask_for_the_implementation_keep_it():
    """Falcon looks for "sdpa" by name; a model without flash attention need not hand masks of two dimensions on."""
    config = transformers.FalconConfig(vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    falcon = transformers.FalconForCausalLM(config)
    assert not masks.adopt(falcon)
    assert falcon.config._attn_implementation == "sdpa"
    llama = model_of()
    kind = type("WithoutFlash", (type(llama),), {"_supports_flash_attn": False, "__module__": type(llama).__module__})
    llama.__class__ = kind
    assert [m for m, _ in masks.configurations(llama) if not masks._takes_padding(m)] == [llama]


def test_a_model_with_a_window_for_each_layer_keeps_its_implementation():
    """Its configuration has no one window, and raises for who asks for it."""
    mistral = model_of("MistralForCausalLM")
    assert masks._takes_padding(mistral)
    mistral.config = model_of("MistralForCausalLM", per_layer_config={0: {"sliding_window": None}}).config
    if not hasattr(mistral.config, "per_layer_attributes"):
        pytest.skip("this transformers has one configuration for all layers")
    assert not masks._takes_padding(mistral)


def test_a_model_that_cannot_take_it_is_converted_all_the_same(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no masks of two dimensions here")

    monkeypatch.setattr(masks, "mask_function", broken)
    ours, theirs, _ = pair(model_of(), **batch(9))
    assert ours.config._attn_implementation == "sdpa"
    assert_same_steps(ours, theirs, **PADDED)


@pytest.mark.slow
def test_saved_and_in_another_process(tmp_path):
    """The name is not in a saved configuration, and a pickled model knows its implementation where nothing was converted."""
    ours, _ = converted()
    ours.config.save_pretrained(tmp_path)
    assert masks.NAME not in (tmp_path / "config.json").read_text()
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((ours, PADDED)))
    code = "import pickle; model, kwargs = pickle.load(open('model.pickle', 'rb')); print(model(**kwargs).loss.item())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout.split()[-1]) == pytest.approx(ours(**PADDED).loss.item(), rel=1e-6)
