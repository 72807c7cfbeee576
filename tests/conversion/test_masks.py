"""Padding masks of transformers' models, which converted layers get as they were given, [B, S]."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern.conversion.binding import Segment

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function  # noqa: E402

from ckptkern.conversion import masks  # noqa: E402

V, S = 97, 13
BASE = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2 = dict(
    vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", BASE),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "PhiForCausalLM": ("PhiConfig", BASE),
    "Qwen3ForCausalLM": ("Qwen3Config", BASE | dict(head_dim=8)),
    "MistralForCausalLM": ("MistralConfig", BASE | dict(sliding_window=5)),
    "Qwen2ForCausalLM": ("Qwen2Config", BASE | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        BASE | dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    ),
    "Phi3ForCausalLM": ("Phi3Config", BASE | dict(sliding_window=20)),
    "GraniteSWAForCausalLM": (
        "GraniteSWAConfig", BASE | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    ),
    "FlintForCausalLM": (
        "FlintConfig", BASE | dict(head_dim=8, sliding_window=5, layer_types=["full_attention", "sliding_attention"]),
    ),
}  # fmt: skip
MODELS = {name: one for name, one in MODELS.items() if hasattr(transformers, one[0])}  # older releases have fewer
WITH_SINKS = [name for name in ("GraniteSWAForCausalLM", "FlintForCausalLM") if name in MODELS]


def model_of(name: str = "LlamaForCausalLM", **changes) -> nn.Module:
    config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings | changes)).train()
    for key, one in model.named_parameters():
        if key.endswith("sinks"):
            nn.init.normal_(one)
    return model


def batch(seed: int = 0, padded: bool = True, length: int = S) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4], mask[1, -3:] = 0, 0
    return {
        "input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask, "use_cache": False,
    }  # fmt: skip


def converted(model: nn.Module, example: dict | None = None) -> nn.Module:
    model = copy.deepcopy(model)
    conversion = ckptkern.convert(model, **(batch(9, padded=False) if example is None else example))
    assert any(row.replaced_by == "transformer_layer" for row in conversion.converted), str(conversion)
    return model


def step(model: nn.Module, **kwargs) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**kwargs).loss
    loss.backward()
    grads = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    floor = 1e-2 * max(t.norm() for name, t in theirs.items() if name != "loss")
    for name, want in theirs.items():
        assert (ours[name] - want).norm() <= 2e-5 * (want.norm() + floor), name


@pytest.fixture
def masks_of_layers(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the bool tensors that fused layers get."""
    shapes, own = [], Segment.__call__

    def call(self, flat, *args, **kwargs):
        if self.op == "transformer_layer":
            shapes.extend(tuple(t.shape) for t in flat if isinstance(t, Tensor) and t.dtype == torch.bool)
        return own(self, flat, *args, **kwargs)

    monkeypatch.setattr(Segment, "__call__", call)
    return shapes


@pytest.mark.parametrize("name", MODELS)
def test_padding_stays_two_dimensional(name: str, masks_of_layers) -> None:
    """Gradients of a padded batch, of one that is not, and of another length are those of the model as it was."""
    theirs = model_of(name)
    ours = converted(theirs)
    assert ours.config._attn_implementation == masks.NAME
    for kwargs, wanted in (
        (batch(1), (2, S)), (batch(2, length=27), (2, 27)), (batch(3, padded=False), None),
        (batch(4, padded=False, length=29), None),
    ):  # fmt: skip
        masks_of_layers.clear()
        assert_same(step(ours, **kwargs), step(theirs, **kwargs))
        assert set(masks_of_layers) == ({wanted} if wanted else set())


@pytest.mark.parametrize("changes", [
    dict(kv_length=20), dict(q_offset=3), dict(q_offset=torch.tensor(0)), dict(use_vmap=True), dict(allow_is_causal_skip=False),
    dict(kv_offset=2), dict(mask_function=sliding_window_causal_mask_function(4), local_size=4),
    dict(attention_mask=torch.arange(8).view(2, 4) % 3 > 0),
], ids=" ".join)  # fmt: skip
def test_what_is_more_than_causal_is_transformers_own(changes: dict) -> None:
    arguments = dict(batch_size=2, q_length=10, kv_length=10, attention_mask=torch.rand(2, 10) > 0.5) | changes
    arguments["attention_mask"] = torch.nn.functional.pad(arguments["attention_mask"], (0, arguments["kv_length"] - 10))
    assert torch.equal(masks.mask_function(**arguments), sdpa_mask(**arguments))
    usual = dict(batch_size=2, q_length=10, kv_length=10, attention_mask=torch.rand(2, 10) > 0.5)
    assert masks.mask_function(**usual) is usual["attention_mask"]
    windowed = usual | dict(mask_function=sliding_window_causal_mask_function(4), local_size=4)
    config = transformers.MistralConfig(sliding_window=4)
    assert masks.mask_function(**windowed, config=config) is usual["attention_mask"]
    for other in (transformers.MistralConfig(sliding_window=5), transformers.LlamaConfig()):
        assert torch.equal(masks.mask_function(**windowed, config=other), sdpa_mask(**windowed))
    config.attention_chunk_size = 4
    assert torch.equal(masks.mask_function(**windowed, config=config), sdpa_mask(**windowed))


def test_no_square_is_written(monkeypatch) -> None:
    """Neither the mask nor what is made of it has rows and columns; the model as it was makes both."""
    squares = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for one in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(one, Tensor) and one.dim() >= 2 and one.shape[-1] == one.shape[-2] == 61:
                    squares.append(func)
            return result

    theirs = model_of(hidden_size=32)
    ours = converted(theirs)
    for model, wanted in ((ours, False), (theirs, True)):
        squares.clear()
        kwargs = batch(1, length=61)
        with Seen():
            model(**kwargs).loss.backward()
        assert bool(squares) is wanted, squares


@pytest.mark.parametrize(
    ("padded", "name"),
    [(False, "LlamaForCausalLM"), (True, "LlamaForCausalLM"), *((True, name) for name in WITH_SINKS[1:])],
)
def test_compiled(padded: bool, name: str, masks_of_layers) -> None:
    """Whole graphs. Where no mask is given, transformers makes one [B, 1, S, S] of what may be packed; here it is [B, S]."""
    theirs = model_of(name)
    ours = torch.compile(converted(theirs), fullgraph=True)
    kwargs = batch(1, padded)
    if not padded:
        del kwargs["attention_mask"]
    masks_of_layers.clear()
    assert_same(step(ours, **kwargs), step(theirs, **kwargs))
    assert set(masks_of_layers) == {(2, S)}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", *WITH_SINKS])
@pytest.mark.parametrize("exclude", [("model.layers.1", "lm_head"), ("*",)])
def test_layers_that_were_not_replaced(exclude, name) -> None:
    """They get the same mask and compute the same; without gradients all run as they were."""
    theirs, kwargs = model_of(name), batch(1)
    ours = copy.deepcopy(theirs)
    ckptkern.convert(ours, **batch(9), exclude=exclude)
    assert ours.config._attn_implementation == masks.NAME
    assert_same(step(ours, **kwargs), step(theirs, **kwargs))
    seen = kwargs["attention_mask"].bool()
    with torch.no_grad():
        logits = [model.eval()(**kwargs).logits for model in (ours, theirs)]
    torch.testing.assert_close(*(one[seen] for one in logits))
    assert all(one.isfinite().all() for one in logits)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", *WITH_SINKS])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(cache, name) -> None:
    """Padding on the left, a cache, and steps of one token."""
    theirs = model_of(name).eval()
    ours = converted(theirs).eval()
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, cache_implementation=cache)
    assert torch.equal(*(model.generate(ids, **options) for model in (ours, theirs)))


def test_dropout_of_layers_that_were_not_replaced() -> None:
    """attention_dropout of a layer applies in training, and not in evaluation."""
    model = model_of(attention_dropout=0.5)
    ckptkern.convert(model, **batch(9), exclude="*")
    kwargs = batch(1)
    losses = [model(**kwargs).loss.item() for _ in range(2)]
    assert losses[0] != losses[1]
    model.eval()
    assert model(**kwargs).loss.item() == model(**kwargs).loss.item()


def test_revert_and_who_else_sets_it() -> None:
    theirs = model_of()
    ours = converted(theirs)
    for model in (ours, theirs):
        model.set_attn_implementation("eager")  # the user's choice stays, and layers run as they were
    assert_same(step(ours, **batch(1)), step(theirs, **batch(1)))
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
def test_models_with_sinks_have_no_other_attention_to_give_back() -> None:
    ours = model_of(WITH_SINKS[0])
    assert ours.config._attn_implementation == "eager"
    ckptkern.convert(ours, **batch(9))
    assert ours.config._attn_implementation == masks.NAME
    ckptkern.revert(ours)
    assert ours.config._attn_implementation == "eager"
    llama = model_of()
    llama.set_attn_implementation("eager")  # a choice, of two
    assert not masks.adopt(llama)
    ours.model.layers[0].self_attn.sinks = None
    assert not masks.adopt(ours), "rows that see nothing are means with eager attention, without a sink"


@pytest.mark.skipif(not WITH_SINKS, reason="this release of transformers has no such models")
def test_sinks_are_not_lost() -> None:
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


def test_models_that_ask_for_the_implementation_keep_it() -> None:
    """Falcon looks for "sdpa" by name; a model without flash attention need not hand masks of two dimensions on."""
    small = dict(
        vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, bos_token_id=0, eos_token_id=0
    )
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**small))
    assert not masks.adopt(falcon)
    assert falcon.config._attn_implementation == "sdpa"
    llama = model_of()
    kind = type("WithoutFlash", (type(llama),), {"_supports_flash_attn": False, "__module__": type(llama).__module__})
    llama.__class__ = kind
    assert [m for m, _ in masks._configurations(llama) if not masks._takes_padding(m)] == [llama]


def test_a_model_with_a_window_for_each_layer_keeps_its_implementation() -> None:
    """Its configuration has no one window, and raises for who asks for it."""
    mistral = model_of("MistralForCausalLM")
    assert masks._takes_padding(mistral)
    config = model_of("MistralForCausalLM", per_layer_config={0: {"sliding_window": None}}).config
    if not hasattr(config, "per_layer_attributes"):
        pytest.skip("this transformers has one configuration for all layers")
    mistral.config = config
    assert not masks._takes_padding(mistral)


def test_a_model_that_cannot_take_it_is_converted_all_the_same(monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("no masks of two dimensions here")

    monkeypatch.setattr(masks, "mask_function", broken)
    theirs = model_of()
    ours = converted(theirs, batch(9))
    assert ours.config._attn_implementation == "sdpa"
    assert_same(step(ours, **batch(1)), step(theirs, **batch(1)))


def test_saved_and_in_another_process(tmp_path: Path) -> None:
    """The name is not in a saved configuration, and a pickled model knows its implementation where nothing was converted."""
    ours = converted(model_of(), batch(9))
    ours.config.save_pretrained(tmp_path)
    assert masks.NAME not in (tmp_path / "config.json").read_text()
    kwargs = batch(1)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((ours, kwargs)))
    code = (
        f"import pickle; model, kwargs = pickle.load(open({str(tmp_path / 'model.pickle')!r}, 'rb'));"
        "print(model(**kwargs).loss.item())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout.split()[-1]) == pytest.approx(ours(**kwargs).loss.item(), rel=1e-6)
