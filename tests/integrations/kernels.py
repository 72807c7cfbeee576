"""Tests of transformers' models with layers of `ckptkern.hub`, which test_hub.py runs in a process of their own."""

import re
from pathlib import Path

import kernels
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from ckptkern import hub, memory
from ckptkern.hub import layers

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
IDS = torch.arange(48).reshape(2, 24) % 64
NEIGHBOURS = ("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MistralMLP", "model.layers.*.mlp")
CASES = [  # a model, its options, the mapping, a class to register, a module's path, its layer
    ("LlamaForCausalLM", {}, {"LlamaMLP": "SwiGLUMLP"}, None, "model.layers.0.mlp"),
    ("MistralForCausalLM", {}, {NEIGHBOURS: "RMSNormMLP"}, None, "model.layers.0.post_attention_layernorm"),
    ("GemmaForCausalLM", {}, {NEIGHBOURS: "RMSNormMLP"}, None, "model.layers.0.post_attention_layernorm"),  # 1 + weight
    ("GemmaForCausalLM", {}, {"GeGLUMLP": "GeGLUMLP"}, GemmaMLP, "model.layers.0.mlp"),
    ("CLIPTextModel", {}, {"MLP": "MLP"}, CLIPMLP, "encoder.layers.0.mlp"),
    ("MixtralForCausalLM", {}, {"Experts": "Experts"}, MixtralExperts, "model.layers.0.mlp.experts"),
    ("Phi3ForCausalLM", {"pad_token_id": 0}, {"Phi3MLP": "SwiGLUMLP"}, None, "model.layers.0.mlp"),  # one weight
    ("Gemma2ForCausalLM", {}, {"Gemma2MLP": "GeGLUMLP"}, None, "model.layers.0.mlp"),  # another name of its activation
    (
        "Qwen2MoeForCausalLM",
        {"shared_expert_intermediate_size": 40},
        {"Qwen2MoeMLP": "SwiGLUMLP"},
        None,
        "model.layers.0.mlp.shared_expert",  # its class takes the size
    ),
]


def build(name: str, **options) -> transformers.PreTrainedModel:
    config = getattr(transformers, name).config_class(**SIZES, **options, attn_implementation="eager")
    config.num_key_value_heads, config.head_dim = 4, 8
    return getattr(transformers, name)(config)


def outcome(model, training=True):
    """{"y": logits or states, name: gradient of a weighted sum}, and the bytes that a training call saves."""
    model.train(training)
    with memory.saved_tensors(model) as saved:
        output = model(input_ids=IDS)
    y = output.logits if "logits" in output else output.last_hidden_state
    results = {"y": y.detach()}
    if training:
        model.zero_grad()
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).mean().backward()
        results |= {unfused(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return results, saved.bytes


def unfused(name: str) -> str:
    return name.replace("layernorm.norm.", "layernorm.").replace("post_attention_layernorm.mlp.", "mlp.")


def forward_at(model, path):
    return model.get_submodule(path).forward.__func__


@pytest.mark.parametrize(("name", "options", "mapping", "cls", "path"), CASES)
def test_a_layer_in_a_model(name, options, mapping, cls, path, tmp_path):
    """Training, evaluation, and files with the model's own names; for a second model, too, and none for a third."""
    model = build(name, **options)
    model.save_pretrained(tmp_path / "before")
    (layer,) = mapping.values()
    if cls is not None:
        kernels.replace_kernel_forward_from_hub(cls, layer)
    load = type(model).from_pretrained
    config = hub.kernel_config(mapping)
    expected, saved = outcome(model)
    for _ in range(2):
        ours = load(tmp_path / "before", use_kernels=True, kernel_config=config, attn_implementation="eager")
        actual, less = outcome(ours)
        assert forward_at(ours, path) is getattr(layers, layer).forward
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
        assert less < saved
    torch.testing.assert_close(outcome(ours, False)[0], outcome(model, False)[0], atol=1e-6, rtol=1e-4)
    assert forward_at(ours, path) is getattr(layers, layer).forward
    ours.save_pretrained(tmp_path / "after")
    plain = load(tmp_path / "before", attn_implementation="eager")
    assert forward_at(plain, path) is type(model.get_submodule(path)).forward
    torch.testing.assert_close(plain.state_dict(), model.state_dict(), atol=0, rtol=0)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("before", "after"))
    torch.testing.assert_close(after, before, atol=0, rtol=0)


def adapt(model):
    torch.manual_seed(1)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["gate_proj"], init_lora_weights=False), model)


def hook(model):
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features == SIZES["intermediate_size"]:
            module.register_forward_hook(lambda module, args, y: 2 * y)


@pytest.mark.parametrize("change", [adapt, hook])
def test_a_changed_module_runs_its_own_forward_as_a_checkpoint(change, tmp_path):
    model = build("Qwen2ForCausalLM")
    model.save_pretrained(tmp_path)
    ours = type(model).from_pretrained(
        tmp_path,
        use_kernels=True,
        kernel_config=hub.kernel_config({"Qwen2MLP": "SwiGLUMLP"}),
        attn_implementation="eager",
    )
    change(model)
    change(ours)
    (expected, saved), (actual, less) = outcome(model), outcome(ours)
    assert ours.model.layers[0].mlp.forward.__func__ is layers.SwiGLUMLP.forward
    assert (change is adapt) == any("lora_A" in name for name in actual)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert less < saved


def test_a_layer_name_that_no_module_has(tmp_path):
    build("PhiForCausalLM").save_pretrained(tmp_path)
    config = hub.kernel_config({"PhiMLP": "MLP", "LlamaMLP": "MLP"})
    with pytest.raises(ValueError, match="'LlamaMLP'"):
        transformers.PhiForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=config)


@pytest.mark.parametrize("name", ["Olmo2", "Mixtral", "Olmo"])
def test_neighbours_that_are_no_norm_and_mlp(name, tmp_path):
    """A norm behind the MLP, an MoE block, and a norm without a weight: later models are as before."""
    model = build(f"{name}ForCausalLM")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{name}DecoderLayer"):
        type(model).from_pretrained(
            tmp_path, use_kernels=True, kernel_config=hub.kernel_config({NEIGHBOURS: "RMSNormMLP"})
        )
    torch.testing.assert_close(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "mapping",
    [
        {(("RMSNorm", "model.layers.*.pre_feedforward_layernorm"), ("Gemma2MLP", "model.layers.*.mlp")): "RMSNormMLP"},
        {NEIGHBOURS: "SwiGLUMLP"},
        {"MistralMLP": "RMSNormMLP"},
    ],
)
def test_layers_for_other_neighbours(mapping):
    with pytest.raises(ValueError, match="post_attention_layernorm and mlp"):
        hub.kernel_config(mapping)


def test_the_page(tmp_path, monkeypatch):
    """Runs the blocks of the documentation, with transformers' own class on a CPU, too."""
    from transformers.utils import kernel_config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu", "cuda"])
    page = Path(__file__).parents[2] / "docs/how-to/hub.md"
    namespace = {"__name__": "hub", "torch": torch}
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
