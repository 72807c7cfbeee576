"""convert on transformers' language models, called with labels: heads, experts and layers together."""

from __future__ import annotations

import copy
import re
import weakref

import pytest
import torch
from torch import Tensor, nn

import ckptkern
from ckptkern.conversion.arguments import in_form
from ckptkern.conversion.logits import Logits
from ckptkern.memory import saved_tensors
from ckptkern.parallel.roles import templates_of

transformers = pytest.importorskip("transformers", minversion="5.0")

V = 97
BASE = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WIDE = BASE | dict(head_dim=8)
SPARSE = WIDE | dict(num_experts=4, moe_intermediate_size=24, num_experts_per_tok=2)
LATENT = BASE | dict(
    num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
)  # fmt: skip
WINDOWED = WIDE | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
FULL = dict(layer_types=["full_attention"] * 2)  # no linear attention
DEEPSEEK = LATENT | dict(
    n_routed_experts=4, moe_intermediate_size=24, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
KIMI = LATENT | dict(
    num_local_experts=4, moe_intermediate_size=24, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
    mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64
)
GLM = WIDE | dict(
    n_routed_experts=8, moe_intermediate_size=24, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=0,
)  # fmt: skip
NEXT = SPARSE | dict(
    shared_expert_intermediate_size=20, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8,
)  # fmt: skip
SMALL = dict(
    vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", BASE),
    "tied LlamaForCausalLM": ("LlamaConfig", BASE | dict(tie_word_embeddings=True)),
    "GPT2LMHeadModel": ("GPT2Config", SMALL),
    "Gemma2ForCausalLM": ("Gemma2Config", WIDE),
    "CohereForCausalLM": ("CohereConfig", BASE | dict(logit_scale=0.25)),
    "GraniteForCausalLM": ("GraniteConfig", BASE | dict(logits_scaling=4.0)),
    "PhiForCausalLM": ("PhiConfig", BASE),
    "MixtralForCausalLM": ("MixtralConfig", BASE | dict(num_local_experts=4)),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", SPARSE),
    "GPTJForCausalLM": ("GPTJConfig", SMALL | dict(rotary_dim=4)),
    "BloomForCausalLM": ("BloomConfig", dict(vocab_size=V, hidden_size=32, n_layer=2, n_head=4)),
    "MptForCausalLM": ("MptConfig", dict(vocab_size=V, d_model=32, n_layers=2, n_heads=4, max_seq_len=32)),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", DEEPSEEK | dict(rope_parameters=YARN)),
    "halves DeepseekV3ForCausalLM": ("DeepseekV3Config", DEEPSEEK | dict(q_lora_rank=None, rope_interleave=False)),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", DEEPSEEK),
    "Glm4MoeLiteForCausalLM": ("Glm4MoeLiteConfig", DEEPSEEK),
    "KimiLinearForCausalLM": ("KimiLinearConfig", KIMI),
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", LATENT),
    "YoutuForCausalLM": ("YoutuConfig", LATENT),
    "GptOssForCausalLM": ("GptOssConfig", WINDOWED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", WINDOWED),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", SPARSE | FULL | dict(shared_expert_intermediate_size=24)),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", WIDE | FULL),
    "AfmoeForCausalLM": ("AfmoeConfig", SPARSE | WINDOWED | dict(num_dense_layers=1)),
    "Lfm3ForCausalLM": ("Lfm3Config", WINDOWED),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", SPARSE | dict(shared_expert_intermediate_size=20)),
    "OlmoeForCausalLM": ("OlmoeConfig", BASE | dict(num_experts=4, num_experts_per_tok=2)),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", GLM),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", BASE | dict(num_local_experts=4, num_experts_per_tok=2)),
    "linear Qwen3NextForCausalLM": ("Qwen3NextConfig", NEXT),
    "grouped DeepseekV2ForCausalLM": ("DeepseekV2Config", DEEPSEEK | dict(topk_method="group_limited_greedy")),
}
MODELS = {name: one for name, one in MODELS.items() if hasattr(transformers, one[0])}  # older releases have fewer
# layers that are one op
LAYERS = dict.fromkeys(
    (
        "Mixtral", "Qwen3Moe", "Qwen2Moe", "Olmoe", "Glm4Moe", "GraniteMoe", "DeepseekV3", "DeepseekV2", "Glm4MoeLite",
        "KimiLinear", "MiniCPM3", "Youtu", "GraniteSWA", "Qwen3_5", "Lfm3", "GPTJ", "Bloom", "Mpt",
    ), 2,
)  # fmt: skip


def model_of(name: str) -> nn.Module:
    config, settings = MODELS[name]
    if not hasattr(transformers, config):
        pytest.skip(f"this version of transformers has no {config}")
    torch.manual_seed(0)
    model = getattr(transformers, name.split()[-1])(getattr(transformers, config)(**settings))
    for key, one in model.named_parameters():
        if key.endswith("sinks"):
            nn.init.normal_(one)
    return model.train()


def batch(seed: int = 0, length: int = 11) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (2, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def converted(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    replaced = [row.replaced_by for row in ckptkern.convert(model, **batch()).converted]
    assert replaced.count("linear_cross_entropy") == 1
    kind = type(model).__name__.removesuffix("ForCausalLM")
    assert ("moe_mlp" in replaced) == (kind == "Afmoe"), "the router of Afmoe is not read"
    if kind in LAYERS:
        assert replaced.count("transformer_layer") == LAYERS[kind], replaced
    return model


def gradients(model: nn.Module, **kwargs) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**kwargs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    floor = 1e-2 * max(t.norm() for name, t in theirs.items() if name != "loss")
    assert abs(ours["loss"] / theirs["loss"] - 1) < 1e-6
    for name, want in theirs.items():
        assert (ours[name] - want).norm() <= 2e-5 * (want.norm() + floor), name


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_saved_bytes(name: str) -> None:
    theirs = model_of(name)
    ours = converted(theirs)
    for kwargs in (batch(1), batch(2, 17), batch(3) | {"num_items_in_batch": torch.tensor(40)}):
        assert_same(gradients(ours, **kwargs), gradients(theirs, **kwargs))
    saved = []
    for model in (ours, theirs):
        with saved_tensors(model) as found:
            model(**batch(4))
        saved.append(found)
    assert not any(V in shape for shape, _, _ in saved[0].tensors), str(saved[0])
    assert any(V in shape for shape, _, _ in saved[1].tensors)
    assert saved[0].bytes < saved[1].bytes * 0.5


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in (
            "GPT2LMHeadModel",
            "Gemma2ForCausalLM",
            "Qwen3MoeForCausalLM",
            "GptOssForCausalLM",
            "Qwen3_5ForCausalLM",
        )
        if name in MODELS
    ],
)
def test_a_training_run(name: str) -> None:
    theirs = model_of(name)
    ours, losses = converted(theirs), []
    for model in (ours, theirs):
        optimizer, found = torch.optim.AdamW(model.parameters(), 3e-3), []
        for seed in range(8):
            loss = model(**batch(seed % 2)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][-1] < 0.95 * losses[1][0]


@pytest.mark.parametrize("name", ["tied LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_logits_are_there_for_who_reads_them(name: str) -> None:
    theirs = model_of(name)
    ours = converted(theirs)
    out = ours(**batch())
    assert isinstance(out.logits, Logits)
    assert not out.logits.made
    torch.testing.assert_close(out.logits + 0, theirs(**batch()).logits, rtol=1e-5, atol=1e-6)
    ids = batch()["input_ids"]
    logits = [model(ids, use_cache=False).logits.log_softmax(-1) for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert type(ours(ids).logits) is Tensor
    generated = [model.eval().generate(ids, max_new_tokens=4, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*generated)


def test_bfloat16_loses_nothing() -> None:
    """Logits are not rounded: the loss is nearer to float64's than that of the model as it was."""
    theirs = model_of("LlamaForCausalLM")
    exact = copy.deepcopy(theirs).double()
    ours, errors = converted(theirs.bfloat16()), []
    for model in (ours, theirs):
        errors.append([abs(float(model(**batch(s)).loss.detach() - exact(**batch(s)).loss.detach())) for s in range(6)])
    assert ours(**batch()).loss.dtype == theirs(**batch()).loss.dtype == torch.float32
    assert sum(errors[0]) <= 2 * sum(errors[1])


@pytest.mark.parametrize("place", ["before", "after"])
def test_adapters_on_the_head_are_not_bypassed(place: str) -> None:
    """Those that are there are part of the loss; those that come later run."""
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    theirs = model_of("LlamaForCausalLM")
    if place == "after":
        ours = adapted(converted(theirs))
        theirs = adapted(theirs)
    else:
        theirs = adapted(theirs)
        ours = copy.deepcopy(theirs)
        assert "lm_head" in str([row.name for row in ckptkern.convert(ours, **batch()).converted])
    mine, want = (gradients(model, **batch(1)) for model in (ours, theirs))
    assert any("lm_head.lora_B" in key for key in want)
    assert_same(mine, want)


@pytest.mark.parametrize("asked", ["in the call", "by the configuration", "before it was converted"])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM"])
def test_an_auxiliary_loss_of_the_routers_logits(name: str, asked: str) -> None:
    """transformers' hooks on routers get the fused layers' logits: the loss has its part, its gradients, and no layer runs
    another forward."""
    theirs = model_of(name)
    kwargs = batch(1) | {"output_router_logits": True}
    if asked == "by the configuration":
        theirs.config.output_router_logits = True
        kwargs = batch(1)
    if asked == "before it was converted":
        theirs(**kwargs)
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, **batch())
    for _ in range(2):
        assert_same(gradients(ours, **kwargs), gradients(theirs, **kwargs))
    mine, want = ours(**kwargs), theirs(**kwargs)
    assert want.aux_loss > 0
    torch.testing.assert_close(mine.aux_loss, want.aux_loss)
    torch.testing.assert_close(mine.router_logits, want.router_logits)
    grads = [
        torch.autograd.grad(one.aux_loss, [*m.parameters()], allow_unused=True)
        for one, m in ((mine, ours), (want, theirs))
    ]
    for ours_, theirs_ in zip(*grads, strict=True):
        assert (ours_ is None) == (theirs_ is None) or not (theirs_ if ours_ is None else ours_).any()
        if ours_ is not None and theirs_ is not None:
            torch.testing.assert_close(ours_, theirs_, rtol=1e-3, atol=1e-6)
    layers = [row for row in conversion if row.replaced_by == "transformer_layer"]
    assert len(layers) == 2
    assert all(row.calls["fused"] == 3 and not row.calls["checkpointed"] for row in layers)


@pytest.mark.parametrize("recompute", ["none", "full", ("selective", "full"), ("full", "none")], ids=str)
def test_a_layer_with_experts_in_each_mode(recompute: str | tuple[str, str]) -> None:
    theirs = model_of("Qwen2MoeForCausalLM")
    ours = copy.deepcopy(theirs)
    conversion = ckptkern.convert(ours, **batch(), recompute=recompute)
    assert [row.replaced_by for row in conversion if ".layers." in row.name] == ["transformer_layer"] * 2
    kwargs = batch(1) | {"output_router_logits": True}
    assert_same(gradients(ours, **kwargs), gradients(theirs, **kwargs))
    with pytest.raises(TypeError, match="has a router and experts, which are not split"):
        templates_of(ours.model.layers[0])


def test_an_auxiliary_loss_in_an_activation_checkpoint() -> None:
    """A layer that is no op, with a block that is: forward and recompute run the same, though transformers collects in one."""
    theirs = model_of("DeepseekV3ForCausalLM")
    ours = converted(theirs)
    kwargs = batch(1) | {"output_router_logits": True}
    for _ in range(2):
        assert_same(gradients(ours, **kwargs), gradients(theirs, **kwargs))


def test_other_hooks_and_other_experts() -> None:
    """What the fused call does not do runs as an activation checkpoint of the layer."""
    theirs = model_of("MixtralForCausalLM")
    ours = converted(theirs)
    seen: list[int] = []
    hook = ours.model.layers[0].mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    assert_same(gradients(ours, **batch(1)), gradients(theirs, **batch(1)))
    assert seen
    hook.remove()
    kwargs = batch(1) | {"output_router_logits": True, "output_attentions": True}
    for model in (ours, theirs):
        model.set_attn_implementation("eager")
    assert_same(gradients(ours, **kwargs), gradients(theirs, **kwargs))
    for model in (ours, theirs):
        model.set_experts_implementation("eager")
    assert_same(gradients(ours, **batch(1)), gradients(theirs, **batch(1)))


class ClampedFar(torch.nn.Module):
    """Mixed into experts: no ordinary row is so large, and none behind a norm."""

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        return super().forward(hidden_states.clamp(-100, 100), *routing)


def test_a_layer_whose_experts_clamp_is_left() -> None:
    theirs = model_of("MixtralForCausalLM")
    for layer in theirs.model.layers:
        kind = type(layer.mlp.experts)
        layer.mlp.experts.__class__ = type(f"Clamped{kind.__name__}", (ClampedFar, kind), {})
    ours = copy.deepcopy(theirs)
    rows = {row.name: row for row in ckptkern.convert(ours, **batch())}
    assert rows["model.layers.0"].replaced_by == "checkpoint"
    assert re.search("its MoE block: with inputs .* times as large the numbers differ", rows["model.layers.0"].reason)
    assert "model.layers.0.mlp" not in rows
    assert_same(gradients(ours, **batch(1)), gradients(theirs, **batch(1)))


@pytest.mark.parametrize("seed", range(4))
def test_layers_with_experts_in_bfloat16(seed: int) -> None:
    """Some tokens go elsewhere where scores round otherwise, which is no other forward."""
    config = transformers.MixtralConfig(
        **MODELS["MixtralForCausalLM"][1] | dict(num_local_experts=16, num_hidden_layers=1)
    )
    torch.manual_seed(seed)
    model = transformers.MixtralForCausalLM(config).bfloat16().train()
    with torch.no_grad():  # so that another expert shows beside the residual
        for weight in model.model.layers[0].mlp.experts.parameters():
            weight.mul_(20)
    rows = {row.name: row for row in ckptkern.convert(model, **batch(seed, 17))}
    assert rows["model.layers.0"].replaced_by == "transformer_layer", rows["model.layers.0"].reason


def test_a_layer_that_steps_aside_takes_forwards_choice_in_recompute() -> None:
    """A hook inside sends a layer to its original forward as an activation checkpoint. In its recompute another h reaches the
    router, to which all experts are nearly alike: their weights stay, and the best would be others."""
    theirs = model_of("MixtralForCausalLM")
    ours = converted(theirs)
    calls: list[int] = []

    def noise(module: nn.Module, args: tuple) -> tuple:
        calls.append(1)
        h = args[0]
        return (h if len(calls) == 1 else h + torch.randn_like(h),)

    for model in (theirs, ours):
        with torch.no_grad():
            model.model.layers[0].mlp.gate.weight.mul_(1e-2)
    ours.model.layers[0].mlp.gate.register_forward_pre_hook(noise)
    mine, want = gradients(ours, **batch(1)), gradients(theirs, **batch(1))
    assert len(calls) == 2
    for name, one in want.items():
        if name != "model.layers.0.mlp.gate.weight":
            torch.testing.assert_close(mine[name], one, rtol=1e-2, atol=1e-2 * float(one.abs().max()), msg=name)


def test_rotary_tables_in_another_form_are_made_once() -> None:
    """Each column of Ernie's tables stands twice: the op's tables are others than the model's, and one pair for all layers."""
    model = transformers.Ernie4_5Model(transformers.Ernie4_5Config(**WIDE | dict(num_hidden_layers=3))).train()
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}
    ckptkern.convert(model, **inputs, recompute="full")
    with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        model(**inputs).last_hidden_state.sum().backward()
    assert sum(tuple(shape) == (1, 11, 8) for shape, _, _ in saved.tensors) == 2


def test_a_rotary_table_that_changes_is_made_again() -> None:
    table = torch.rand(1, 7, 4)
    first, again = (in_form(table, "twice", 5) for _ in range(2))
    assert first is again
    assert in_form(table, "each twice", 5) is not first
    assert in_form(table, "twice", 6).shape == (1, 6, 8)
    table.mul_(2)
    changed = in_form(table, "twice", 5)
    assert torch.equal(changed, torch.cat((table, table), -1)[:, :5])
    assert not torch.equal(changed, first)
    with torch.inference_mode():
        assert in_form(torch.rand(1, 7, 4), "twice", 7).is_inference()
        assert in_form(table, "each twice", 7).is_inference()
    assert not in_form(table, "each twice", 7).is_inference()
    traced = torch.jit.trace(lambda t: in_form(t, "twice", 7), table)
    other = torch.rand(1, 7, 4)
    assert torch.equal(traced(other), torch.cat((other, other), -1))
    held = weakref.ref(changed)
    del changed, table, traced
    assert held() is None


def test_without_labels_the_table_says_what_is_missing() -> None:
    model = model_of("LlamaForCausalLM")
    conversion = ckptkern.convert(model, batch()["input_ids"], use_cache=False)
    assert [row.name for row in conversion.left] == ["lm_head"]
    assert "with labels" in str(conversion)


def test_a_stack_of_converted_layers_saves_every_second_input() -> None:
    torch.manual_seed(0)
    settings = BASE | dict(num_hidden_layers=6)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).train()
    ours = copy.deepcopy(theirs)
    ckptkern.convert(ours, **batch(), recompute="full")
    saved = []
    for every in (None, 2, 3):
        layers = ours.model.layers
        if every is not None:
            layers = layers[0] if isinstance(layers[0], ckptkern.nn.LayerStack) else layers
            ours.model.layers = nn.ModuleList([ckptkern.nn.LayerStack(layers, every=every)])
        with saved_tensors(ours) as found:
            loss = ours(**batch(4)).loss
        saved.append(sum(shape[-1:] == (32,) for shape, _, _ in found.tensors))
        loss.backward()
        ours.zero_grad()
    assert saved == [6 + 2, 4 + 2, 4 + 2], (
        saved
    )  # of every group but the last, and of each layer of the last; norm and head
    ours.model.layers = nn.ModuleList(ours.model.layers[0])
    names = ours.state_dict().keys()
    assert names == theirs.state_dict().keys()
    ours.model.layers = nn.ModuleList([ckptkern.nn.LayerStack(ours.model.layers, every=2)])
    mine = {name.replace("layers.0.", "layers."): g for name, g in gradients(ours, **batch(1)).items()}
    assert_same(mine, gradients(theirs, **batch(1)))
