"""convert on vision and diffusion models of diffusers and transformers: adaptive norms, and biases that attention computes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conversion.steps import assert_same_steps, by_pickle, calls_of, is_floating, pair

import ckptkern

IMAGES = dict(
    image_size=32, patch_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4) | NO_DROPOUT
DIFFUSION = dict(
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=8,
    num_layers=2,
    sample_size=8,
    patch_size=2,
)


def images(B):
    return {"pixel_values": torch.randn(B, 3, 32, 32)}


def labelled(B):
    steps = {"timestep": torch.arange(B) + 3, "class_labels": torch.arange(B) % 10, "return_dict": False}
    return {"hidden_states": torch.randn(B, 4, 8, 8)} | steps


# a model's library, the class of its settings, these, its call, and how many modules of which classes ops replace
MODELS = {
    "DiTTransformer2DModel": (
        "diffusers", "", DIFFUSION | dict(num_embeds_ada_norm=10), labelled, {"BasicTransformerBlock": 2}
    ),
    "SwinModel": ("transformers", "SwinConfig", SWIN, images, {"SwinAttention": 4, "SwinMLP": 4}),
}  # fmt: skip


def model_of(name, **changes):
    library, config, settings, *_ = MODELS[name]
    module = pytest.importorskip(library, minversion="5.0" if library == "transformers" else None)
    settings = settings | changes
    torch.manual_seed(0)
    model = getattr(module, name)(getattr(module, config)(**settings)) if config else getattr(module, name)(**settings)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # tables and gates that begin at zero
    return model.train()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients(name):
    """At other batches than the example's, in a copy in another dtype, which what is computed follows."""
    *_, call, replaced = MODELS[name]
    ours, theirs, conversion = pair(model_of(name), **call(2))
    ops = Counter(row.kind for row in conversion.converted if row.replaced_by not in ("checkpoint", "linear_act"))
    assert ops == replaced, str(conversion)
    for B in (2, 5, 1):
        kwargs = call(B)
        assert_same_steps(ours, theirs, **kwargs)
    assert calls_of(ours)["original"] == 0
    kwargs = {key: value.bfloat16() if is_floating(value) else value for key, value in call(3).items()}
    low = by_pickle(ours).bfloat16()
    assert_same_steps(low, theirs.bfloat16(), **kwargs, tolerance=0.1)


@pytest.mark.slow
def test_attention_over_many_windows_is_replaced():
    """Whose key bias has a gradient of rounding alone, that of 6,272 tokens in float32."""
    sizes = dict(image_size=112, patch_size=4, embed_dim=96, depths=[2], num_heads=[3], window_size=7)
    model = model_of("SwinModel", **sizes)
    rows = ckptkern.convert(model, pixel_values=torch.randn(8, 3, 112, 112)).converted
    assert [row.replaced_by for row in rows if row.kind == "SwinAttention"] == ["attention_block"] * 2
