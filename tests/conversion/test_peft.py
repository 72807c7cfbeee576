"""convert on models that peft has adapted: against the same model before the conversion, in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoHaConfig, LoraConfig, VeraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from support.architectures import fused_of
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import ckptkern
from ckptkern import Conversion

VOCABULARY = 48
SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **MOE)),
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def batch(seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))


def adapted(name: str, **options) -> nn.Module:
    """With a LoRA whose every matrix is random."""
    torch.manual_seed(0)
    options = {"r": 3, "lora_alpha": 6, "target_modules": [], **options}
    model = get_peft_model(MODELS[name](), LoraConfig(**options)).train()
    for path, p in model.named_parameters():
        if "lora_" in path:
            nn.init.normal_(p, std=0.4)
    return model


def step(model: nn.Module, seed: int = 2, **more) -> dict[str, Tensor]:
    """The loss and the gradients of what is trained."""
    ids = batch()
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
    loss.backward()
    return {"loss": loss.detach()} | {path: p.grad for path, p in model.named_parameters() if p.grad is not None}


def convert(model: nn.Module, **options) -> Conversion:
    ids = batch()
    return ckptkern.convert(model, input_ids=ids, labels=ids, use_cache=False, **options)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for path, expected in theirs.items():
        assert float((ours[path] - expected).norm()) <= 1e-4 * max(float(expected.norm()), 1e-3), path


def assert_converted(model: nn.Module, *replaced_by: str) -> Conversion:
    """The same loss and gradients as before, by these ops."""
    theirs = step(model)
    conversion = convert(model)
    assert fused_of(conversion) == [*replaced_by], str(conversion)
    assert_same(step(model), theirs)
    return conversion


HEAD = "linear_cross_entropy"


@pytest.mark.parametrize(("name", "parameters", "modules"), [
    ("mixtral", EXPERTS, ["q_proj", "o_proj"]),
    ("mixtral", EXPERTS[1:], []),
    ("qwen", EXPERTS[:1], ["gate_proj", "down_proj"]),  # of the shared expert, too
])  # fmt: skip
def test_adapters_of_experts_are_part_of_the_fused_layer(name: str, parameters: list[str], modules: list[str]) -> None:
    assert_converted(adapted(name, target_parameters=parameters, target_modules=modules), "transformer_layer", HEAD)


def test_what_changes_in_adapters_of_experts_later_counts() -> None:
    """Without them, merged, and with another scale the converted model is what the model is."""
    model = adapted("mixtral", target_parameters=EXPERTS)
    original = copy.deepcopy(model)
    convert(model)
    for one in (model, original):
        one.add_adapter("other", LoraConfig(r=2, target_modules=[], target_parameters=EXPERTS))
        one.set_adapter("other")
        for path, p in one.named_parameters():
            if "other" in path:
                nn.init.constant_(p, 0.1)
    assert_same(step(model), step(original))
    for one in (model, original):
        one.set_adapter("default")
    with model.disable_adapter(), original.disable_adapter():
        for one in (model, original):
            one.get_input_embeddings().requires_grad_(True)
        assert_same(step(model), step(original))
    model.merge_adapter()
    original.merge_adapter()
    assert_same(step(model), step(original))
    model.unmerge_adapter()
    original.unmerge_adapter()
    assert_same(step(model), step(original))


def test_two_adapters_of_experts_are_an_activation_checkpoint() -> None:
    model = adapted("mixtral", target_parameters=EXPERTS)
    model.add_adapter("other", LoraConfig(r=2, target_modules=[], target_parameters=EXPERTS))
    model.base_model.set_adapter(["default", "other"])
    for p in model.parameters():
        p.data.normal_(std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    conversion = assert_converted(model, "checkpoint", HEAD)
    assert "several adapters of one weight of its experts" in conversion.converted[0].reason


def test_experts_inside_of_an_adapter_are_no_region_without_it() -> None:
    """Their parameters are others while the adapter calls them."""
    model = adapted("mixtral", target_parameters=EXPERTS)
    theirs, conversion = step(model), convert(model, include="*.experts.base_layer.base_layer")
    assert fused_of(conversion) == [], str(conversion)
    assert "parametrizations inside that last for a call" in next(iter(conversion)).reason
    assert_same(step(model), theirs)


def test_a_router_with_an_adapter_is_named() -> None:
    conversion = assert_converted(adapted("mixtral", target_parameters=["gate.weight", *EXPERTS]), "checkpoint", HEAD)
    assert "an adapter of an MoE's router or gate (mlp.gate)" in conversion.converted[0].reason


def test_an_adapter_of_the_head_is_part_of_its_loss() -> None:
    conversion = assert_converted(adapted("llama", target_modules=["q_proj", "lm_head"]), "transformer_layer", HEAD)
    assert "lm_head" in conversion.converted[1].name


def test_logits_of_a_head_with_an_adapter_are_its_values() -> None:
    """And are of the loss's mask, where they are read after it."""
    model = adapted("llama", target_modules=["lm_head"], lora_dropout=0.5)
    ids, original = batch(), copy.deepcopy(model)
    convert(model)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    values = output.logits + torch.zeros(())  # which is not followed
    assert type(values) is Tensor
    torch.testing.assert_close(F.cross_entropy(values[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), output.loss)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, original.eval()(input_ids=ids).logits)
    model.train()
    losses = [step(model, seed)["loss"] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_what_changes_in_an_adapter_of_the_head_later_counts() -> None:
    model = adapted("llama", target_modules=["lm_head"], lora_dropout=0.3)
    original = copy.deepcopy(model)
    convert(model)
    for p, scale in ((1.0, 2.0), (0.0, 2.0), (0.0, 0.5)):
        for one in (model, original):
            head = one.base_model.model.lm_head
            head.lora_dropout["default"].p, head.scaling["default"] = p, scale
        assert_same(step(model), step(original))


def test_the_embeddings_adapter_stays_outside_of_the_layers() -> None:
    assert_converted(adapted("llama", target_modules=["embed_tokens", "v_proj"]), "transformer_layer", HEAD)


MIXED = ["default", "other"]  # the adapter of each sample


def with_other(name: str, **options) -> nn.Module:
    model = adapted(name, **options)
    model.add_adapter("other", LoraConfig(r=2, **options))
    for path, p in model.named_parameters():
        if "other" in path:
            nn.init.normal_(p, std=0.4)
            p.requires_grad_(True)
    return model.eval()  # peft takes adapter_names in evaluation only


@pytest.mark.parametrize("fuses", [True, False])
def test_each_sample_has_its_adapter_in_a_mixed_batch(fuses: bool) -> None:
    """In forward, and in what backward recomputes, when peft's hooks are gone; also of a layer that is a checkpoint anyway."""
    model = with_other("llama", target_modules=["v_proj", "down_proj", "lm_head"])
    if not fuses:
        model.base_model.set_adapter(MIXED)
    original = copy.deepcopy(model)
    conversion = convert(model)
    assert fused_of(conversion)[0] == ("transformer_layer" if fuses else "checkpoint")
    theirs = step(original, adapter_names=MIXED)
    assert all(any(name in path for path in theirs) for name in MIXED)
    assert_same(step(model, adapter_names=MIXED), theirs)
    assert_same(step(model), step(original))
    assert conversion.calls["checkpointed"] > 0


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {  # that are an initialisation, a scale or an optimiser, and nothing else
    "rsLoRA": dict(use_rslora=True), "PiSSA": dict(init_lora_weights="pissa"), "OLoRA": dict(init_lora_weights="olora"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_begins_or_scales_otherwise_is_a_low_rank_update(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]()
    before = copy.deepcopy(model.state_dict())
    config = LoraConfig(r=3, lora_alpha=6, target_modules=[*ATTENTION, "up_proj", "down_proj"], **KINDS[kind])
    model = get_peft_model(model, config).train()
    if kind == "rsLoRA":
        for path, p in model.named_parameters():
            if "lora_B" in path:
                nn.init.normal_(p, std=0.4)
        (scale,) = {m.scaling["default"] for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)}
        assert scale == 6 / 3**0.5
    else:  # a part of the weight is in the adapter
        name = "model.layers.0.mlp.up_proj.weight"
        left = dict(model.named_parameters())[f"base_model.model.{name.replace('.weight', '.base_layer.weight')}"]
        assert not torch.allclose(left, before[name])
    assert_converted(model, "transformer_layer", HEAD)


def test_groups_of_an_optimizer_step_as_without_conversion() -> None:
    """LoRA+ gives B another rate than A."""
    model = adapted("llama", target_modules=ATTENTION)
    models = [model, copy.deepcopy(model)]
    convert(model)
    for one in models:
        optimizer = create_loraplus_optimizer(one, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=4.0)
        assert {0.1, 0.4} <= {group["lr"] for group in optimizer.param_groups}
        step(one)
        optimizer.step()
    ours, theirs = ({path: p.detach() for path, p in one.named_parameters() if p.requires_grad} for one in models)
    assert_same(ours, theirs)


NAMED = {
    "DoRA": (lambda: LoraConfig(r=3, use_dora=True, target_modules=["up_proj"]), "DoraLinearVariant (mlp.up_proj)"),
    "VeRA": (lambda: VeraConfig(r=3, target_modules=["up_proj"]), "peft.tuners.vera.layer.Linear (mlp.up_proj)"),
    "LoHa": (lambda: LoHaConfig(r=3, target_modules=["up_proj"]), "peft.tuners.loha.layer.Linear (mlp.up_proj)"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_other_adapters_are_activation_checkpoints_that_are_named(kind: str) -> None:
    make, name = NAMED[kind]
    torch.manual_seed(0)
    model = get_peft_model(MODELS["llama"](), make()).train()
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.4)
    conversion = assert_converted(model, "checkpoint", HEAD)
    assert name in conversion.converted[0].reason
