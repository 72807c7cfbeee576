"""convert on models that peft has adapted: against the same model before the conversion, in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from conversion import steps
from conversion.steps import assert_same
from conversion.test_language_models import model_of
from peft import LoHaConfig, LoraConfig, VeraConfig, get_peft_model
from support.architectures import fused_of
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern

VOCABULARY = 48
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
MODELS = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen": "Qwen2MoeForCausalLM"}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYER, CHECKPOINT, HEAD = "transformer_layer", "checkpoint", "linear_cross_entropy"
IDS = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
CALL = {"input_ids": IDS, "labels": IDS, "use_cache": False}


def randomized(model, std=0.4):
    """Gives every adapter numbers at which it counts."""
    for path, p in model.named_parameters():
        if p.requires_grad or "lora_" in path:
            nn.init.normal_(p, std=std)
    return model


def adapted(name, config=LoraConfig, **options):
    model = model_of(MODELS[name], **SMALL)
    options = ({"lora_alpha": 6} if config is LoraConfig else {}) | {"r": 3, "target_modules": []} | options
    return randomized(get_peft_model(model, config(**options)).train())


def step(model, seed=2, **more):
    return steps.step(model, seed=seed, **CALL, **more)


def assert_as_original(ours, theirs, **more):
    assert_same(step(ours, **more), step(theirs, **more), 1e-4)


def convert(model, **options):
    return ckptkern.convert(model, **CALL, **options)


def assert_converted(model, *replaced_by):
    """The same loss and gradients as before, by these ops."""
    theirs = step(model)
    conversion = convert(model)
    # modules inside a checkpoint may be tiled
    assert [kind for kind in fused_of(conversion) if kind != "tiled"] == [*replaced_by], str(conversion)
    assert_same(step(model), theirs, 1e-4)
    return conversion


FUSED = {
    "experts and attention": ("mixtral", dict(target_parameters=EXPERTS, target_modules=["q_proj", "o_proj"])),
    "one weight of experts": ("mixtral", dict(target_parameters=EXPERTS[1:])),
    "a shared expert, too": ("qwen", dict(target_parameters=EXPERTS[:1], target_modules=["gate_proj", "down_proj"])),
    "the head": ("llama", dict(target_modules=["q_proj", "lm_head"])),
    "the embeddings, outside of the layers": ("llama", dict(target_modules=["embed_tokens", "v_proj"])),
    "rsLoRA": ("llama", dict(use_rslora=True, target_modules=[*ATTENTION, "up_proj", "down_proj"])),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FUSED)
def test_adapters_are_part_of_the_fused_ops(case):
    name, options = FUSED[case]
    model = adapted(name, **options)
    conversion = assert_converted(model, LAYER, HEAD)
    assert "lm_head" in conversion.converted[1].name
    if case == "rsLoRA":
        scales = {m.scaling["default"] for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)}
        assert scales == {6 / 3**0.5}


NAMED = {
    "DoRA": (dict(use_dora=True), "DoraLinearVariant (mlp.up_proj)"),
    "VeRA": (dict(config=VeraConfig), "peft.tuners.vera.layer.Linear (mlp.up_proj)"),
    "LoHa": (dict(config=LoHaConfig), "peft.tuners.loha.layer.Linear (mlp.up_proj)"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_other_adapters_are_activation_checkpoints_that_are_named(kind):
    options, name = NAMED[kind]
    conversion = assert_converted(adapted("llama", target_modules=["up_proj"], **options), CHECKPOINT, HEAD)
    assert name in conversion.converted[0].reason


def test_a_router_with_an_adapter_is_named():
    conversion = assert_converted(adapted("mixtral", target_parameters=["gate.weight", *EXPERTS]), CHECKPOINT, HEAD)
    assert "an adapter of an MoE's router or gate (mlp.gate)" in conversion.converted[0].reason


@pytest.mark.slow
def test_what_changes_in_adapters_of_experts_later_counts():
    """Without them, merged, and with another scale the converted model is what the model is."""
    ours = adapted("mixtral", target_parameters=EXPERTS)
    theirs = copy.deepcopy(ours)
    convert(ours)
    for m in (ours, theirs):
        m.add_adapter("other", LoraConfig(r=2, target_modules=[], target_parameters=EXPERTS))
        m.set_adapter("other")
        for path, p in m.named_parameters():
            if "other" in path:
                nn.init.constant_(p, 0.1)
    assert_as_original(ours, theirs)
    for m in (ours, theirs):
        m.set_adapter("default")
        m.get_input_embeddings().requires_grad_(True)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_as_original(ours, theirs)
    for change in ("merge_adapter", "unmerge_adapter"):
        for m in (ours, theirs):
            getattr(m, change)()
        assert_as_original(ours, theirs)


def test_two_adapters_of_experts_are_an_activation_checkpoint():
    model = adapted("mixtral", target_parameters=EXPERTS)
    model.add_adapter("other", LoraConfig(r=2, target_modules=[], target_parameters=EXPERTS))
    model.base_model.set_adapter(["default", "other"])
    conversion = assert_converted(randomized(model, 0.3), CHECKPOINT, HEAD)
    assert "a weight of its experts has several adapters" in conversion.converted[0].reason


def test_experts_inside_of_an_adapter_are_no_region_without_it():
    """Their parameters are others while the adapter calls them."""
    model = adapted("mixtral", target_parameters=EXPERTS)
    theirs, conversion = step(model), convert(model, include="*.experts.base_layer.base_layer")
    assert fused_of(conversion) == [], str(conversion)
    assert "parametrizations inside last for one call" in next(iter(conversion)).reason
    assert_same(step(model), theirs, 1e-4)


def test_logits_of_a_head_with_an_adapter_are_its_values():
    """And are of the loss's mask, where they are read after it."""
    model = adapted("llama", target_modules=["lm_head"], lora_dropout=0.5)
    original = copy.deepcopy(model)
    convert(model)
    output = model(**CALL)
    values = output.logits + torch.zeros(())  # which is not followed
    assert type(values) is Tensor
    torch.testing.assert_close(F.cross_entropy(values[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()), output.loss)
    losses = [step(model, seed)["output"] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=IDS).logits, original.eval()(input_ids=IDS).logits)


def test_what_changes_in_an_adapter_of_the_head_later_counts():
    ours = adapted("llama", target_modules=["lm_head"], lora_dropout=0.3)
    theirs = copy.deepcopy(ours)
    convert(ours)
    for p, scale in ((1.0, 2.0), (0.0, 2.0), (0.0, 0.5)):
        for m in (ours, theirs):
            head = m.base_model.model.lm_head
            head.lora_dropout["default"].p, head.scaling["default"] = p, scale
        assert_as_original(ours, theirs)


MIXED = ["default", "other"]  # the adapter of each sample


@pytest.mark.parametrize("fuses", [True, False])
def test_each_sample_has_its_adapter_in_a_mixed_batch(fuses):
    """In forward, and in what backward recomputes, when peft's hooks are gone; also of a layer that is a checkpoint anyway."""
    options = dict(target_modules=["v_proj", "down_proj", "lm_head"])
    ours = adapted("llama", **options)
    ours.add_adapter("other", LoraConfig(r=2, **options))
    for path, p in ours.named_parameters():
        if "other" in path:
            p.requires_grad_(True)
    randomized(ours).eval()  # peft takes adapter_names in evaluation only
    if not fuses:
        ours.base_model.set_adapter(MIXED)
    theirs = copy.deepcopy(ours)
    conversion = convert(ours)
    assert fused_of(conversion)[0] == (LAYER if fuses else CHECKPOINT)
    want = step(theirs, adapter_names=MIXED)
    assert all(any(name in path and tensor.any() for path, tensor in want.items()) for name in MIXED)
    assert_same(step(ours, adapter_names=MIXED), want, 1e-4)
    assert_as_original(ours, theirs)
    assert conversion.calls["checkpointed"] > 0
