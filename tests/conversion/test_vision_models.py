"""convert on vision and diffusion models of diffusers and transformers: adaptive norms, and biases that attention computes."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ckptkern

IMAGES = dict(
    image_size=32, patch_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4) | NO_DROPOUT
DIFFUSION = dict(
    num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8
)


def images(B: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(B, 3, 32, 32)}


def labelled(B: int) -> dict[str, Any]:
    noise = torch.randn(B, 4, 8, 8)
    return {
        "hidden_states": noise,
        "timestep": torch.arange(B) + 3,
        "class_labels": torch.arange(B) % 10,
        "return_dict": False,
    }


def captioned(B: int) -> dict[str, Any]:
    given = {"hidden_states": torch.randn(B, 4, 8, 8), "timestep": torch.arange(B) + 3, "return_dict": False}
    size = {"resolution": None, "aspect_ratio": None}
    return given | {"encoder_hidden_states": torch.randn(B, 5, 12), "added_cond_kwargs": size}


class Model(NamedTuple):
    """config: the class of its settings. replaced: the classes of the modules that ops replace, and how many."""

    library: str
    config: str
    settings: dict[str, Any]
    call: Callable[[int], dict[str, Any]]
    replaced: dict[str, int]


DIT = DIFFUSION | dict(patch_size=2, num_embeds_ada_norm=10)
PIXART = DIFFUSION | dict(patch_size=2, cross_attention_dim=16, caption_channels=12)
MODELS = {
    "DiTTransformer2DModel": Model("diffusers", "", DIT, labelled, {"BasicTransformerBlock": 2}),
    "PixArtTransformer2DModel": Model(
        "diffusers", "", PIXART, captioned,
        {"BasicTransformerBlock": 2, "TimestepEmbedding": 1, "PixArtAlphaTextProjection": 1},
    ),
    "BeitModel": Model(
        "transformers", "BeitConfig", IMAGES | NO_DROPOUT | dict(use_relative_position_bias=True), images, {"BeitLayer": 2}
    ),
    "Dinov2Model": Model("transformers", "Dinov2Config", IMAGES | NO_DROPOUT, images, {"Dinov2Layer": 2}),
    "Swinv2Model": Model(
        "transformers", "Swinv2Config", SWIN, images, {"Swinv2Attention": 4},
    ),
    "SwinModel": Model("transformers", "SwinConfig", SWIN, images, {"SwinAttention": 4, "SwinMLP": 4}),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    library, config, settings, *_ = MODELS[name]
    module = pytest.importorskip(library, minversion="5.0" if library == "transformers" else None)
    torch.manual_seed(0)
    model = getattr(module, name)(getattr(module, config)(**settings)) if config else getattr(module, name)(**settings)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # tables and gates that begin at zero
    return model.train()


def converted(name: str) -> tuple[nn.Module, nn.Module]:
    """(converted, as it was)."""
    model = model_of(name)
    ours = copy.deepcopy(model)
    conversion = ckptkern.convert(ours, **MODELS[name].call(2))
    found = Counter(row.kind for row in conversion.converted if row.replaced_by not in ("checkpoint", "linear_act"))
    assert found == MODELS[name].replaced, str(conversion)
    return ours, model


def results(model: nn.Module, call: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The first output, and the gradients of parameters, with one state of torch's generator: DiT drops labels."""
    torch.manual_seed(seed)
    y = model(**call)[0].float()
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    grads = torch.autograd.grad(y, [p for _, p in found], dy, allow_unused=True)
    return {"y": y.detach()} | {name: g for (name, _), g in zip(found, grads, strict=True) if g is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    floor = 1e-2 * max(one.float().norm() for name, one in theirs.items() if name != "y")
    for name, want in theirs.items():
        assert (ours[name] - want).float().norm() <= tolerance * (want.float().norm() + floor), name


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_at_other_batches(name: str) -> None:
    ours, theirs = converted(name)
    for B in (2, 5, 1):
        torch.manual_seed(B)
        call = MODELS[name].call(B)
        assert_same(results(ours, call), results(theirs, call))
    assert not any(m.forward.calls["original"] for m in ours.modules() if hasattr(m.forward, "calls"))


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_in_another_dtype(name: str) -> None:
    """What is computed follows the dtype of the input."""
    ours, theirs = converted(name)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    ours, theirs = torch.load(file, weights_only=False).bfloat16(), theirs.bfloat16()
    call = MODELS[name].call(3)
    call = {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
    assert_same(results(ours, call), results(theirs, call), 0.1)


def test_attention_over_many_windows_is_replaced() -> None:
    """Whose key bias has a gradient of rounding alone, that of 6,272 tokens in float32."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = dict(image_size=112, patch_size=4, embed_dim=96, depths=[2], num_heads=[3], window_size=7)
    torch.manual_seed(0)
    model = transformers.SwinModel(transformers.SwinConfig(**SWIN | sizes))
    rows = ckptkern.convert(model, pixel_values=torch.randn(8, 3, 112, 112)).converted
    assert [row.replaced_by for row in rows if row.kind == "SwinAttention"] == ["attention_block"] * 2


@pytest.mark.parametrize("name", ["DiTTransformer2DModel", "SwinModel"])
def test_compiled(name: str) -> None:
    ours, theirs = converted(name)
    torch._dynamo.reset()
    call = MODELS[name].call(2)
    ours.eval().compile(backend="aot_eager")
    assert_same(results(ours, call), results(theirs.eval(), call))
