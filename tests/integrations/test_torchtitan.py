"""torchtitan's own overrides put the feed-forward into Llama 3, with equal outputs, gradients and state; or convert it."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("torchtitan.models.llama3", reason="needs torchtitan")
pytest.importorskip("torchtitan.trainer", reason="needs what torchtitan's trainer imports")

from torchtitan.components.optimizer import default_adamw
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from ckptkern.integrations import torchtitan as ours

NAME = "ckptkern.integrations.torchtitan."


def configured(*imports):
    config = llama3_debugmodel()
    config.optimizer = default_adamw()
    config.optimizer.implementation = "for-loop"
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex_attention has no backward on a CPU
    config.model_spec.model.update_from_config(config=config)
    return config, apply_overrides(OverrideConfig(imports=[*imports]), config)


def built(config):
    model = config.model_spec.model.build()
    model.verify_module_protocol()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def step(model):
    saved = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.arange(128).view(2, 64))
    output.square().mean().backward()
    return output.detach(), [p.grad for p in model.parameters()], sum(saved.values())


@pytest.mark.parametrize("options", [{}, {"recompute": "none", "workspace": "64KiB"}])
def test_feed_forward(options):
    plain = built(configured()[0])
    config, lines = configured((f"{NAME}feed_forward", options))
    model = built(config)
    assert len(lines) == 2
    assert all(type(x.feed_forward) is ours.RecomputedFeedForward for x in model.layers.values())
    assert {**model.layers["0"].feed_forward.options} == {"recompute": "full", "workspace": None, **options}
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    (wanted, grads, before), (got, mine, after) = step(plain), step(model)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(mine, grads)
    if not options:
        assert after < 0.7 * before


class Scaled(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


@pytest.mark.parametrize("which", ["bias", "class"])
def test_other_linear_layers_stay(which):
    """Biases, float8, adapters: the fused call would leave out what they compute."""
    config = configured()[0].model_spec.model.layers[0].feed_forward
    if which == "bias":
        config.w2.bias = True
    else:
        config.w1 = Scaled.Config(in_features=256, out_features=768)
    assert ours.feed_forward(config) is config


def test_convert():
    config, lines = configured((f"{NAME}convert", {"recompute": "full"}))
    assert len(lines) == 1
    model = built(config)
    optimizers = config.optimizer.build(model_parts=[model])
    assert type(optimizers) is ours.ConvertingOptimizers
    before = list(model.state_dict())
    step(model)
    assert list(model.state_dict()) == before
    assert all("forward" in layer.__dict__ for layer in model.layers.values())
    optimizers.step()
