"""convert on transformers' language models, called with labels: heads, experts, layers and padding masks together."""

from __future__ import annotations

import copy
import functools
import re
import weakref

import pytest
import torch
from conversion.steps import assert_same, assert_same_steps, pair, step, variant
from torch import Tensor, nn

import ckptkern
from ckptkern.conversion.arguments import in_form
from ckptkern.conversion.binding import Segment
from ckptkern.memory import saved_tensors
from ckptkern.parallel.roles import places_of

transformers = pytest.importorskip("transformers", minversion="5.0")

from ckptkern.conversion import masks  # noqa: E402

V, S = 97, 13
BASE = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WIDE = BASE | dict(head_dim=8)
SPARSE = WIDE | dict(num_experts=4, moe_intermediate_size=24, num_experts_per_tok=2)
LATENT = BASE | dict(
    num_key_value_heads=4,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
)
WINDOWED = WIDE | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
DEEPSEEK = LATENT | dict(
    n_routed_experts=4,
    moe_intermediate_size=24,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64
)
NEXT = SPARSE | dict(
    shared_expert_intermediate_size=20,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
SMALL = dict(
    vocab_size=V,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=32,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", BASE),
    "tied LlamaForCausalLM": ("LlamaConfig", BASE | dict(tie_word_embeddings=True)),
    "GPT2LMHeadModel": ("GPT2Config", SMALL),
    "Gemma2ForCausalLM": ("Gemma2Config", WIDE),
    "MixtralForCausalLM": ("MixtralConfig", BASE | dict(num_local_experts=4)),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", DEEPSEEK | dict(rope_parameters=YARN)),
    "GptOssForCausalLM": ("GptOssConfig", WINDOWED | dict(num_local_experts=4, num_experts_per_tok=2)),
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", WINDOWED),
    "AfmoeForCausalLM": ("AfmoeConfig", SPARSE | WINDOWED | dict(num_dense_layers=1)),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", SPARSE | dict(shared_expert_intermediate_size=20)),
    "OlmoeForCausalLM": ("OlmoeConfig", BASE | dict(num_experts=4, num_experts_per_tok=2)),
    "linear Qwen3NextForCausalLM": ("Qwen3NextConfig", NEXT),
    "MistralForCausalLM": ("MistralConfig", BASE | dict(sliding_window=5)),
    "FlintForCausalLM": ("FlintConfig", WINDOWED),
}
MODELS = {name: entry for name, entry in MODELS.items() if hasattr(transformers, entry[0])}  # older releases have fewer
CHECKPOINTS = ("GPT2", "Gemma2", "GptOss", "Afmoe", "Qwen3Next")  # of whose layers not all are one op
PADDED = ("Llama", "GPT2", "Mistral", "GraniteSWA", "Flint")  # whose layers get padding masks as they are given
# others differ in what the small architectures have, too; more families are in benchmarks/conversion/families.py
SHORT = (
    "tied LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM",
    "GptOssForCausalLM", "GraniteSWAForCausalLM", "MistralForCausalLM", "linear Qwen3NextForCausalLM",
)  # fmt: skip


def kind_of(model):
    return type(model).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")


def model_of(name="LlamaForCausalLM", **changes):
    config, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name.split()[-1])(getattr(transformers, config)(**settings | changes))
    for key, p in model.named_parameters():
        if key.endswith("sinks"):
            nn.init.normal_(p)
    return model.train()


def batch(seed=0, length=S, padded=False):
    """Padded on both sides, or without a mask, and some tokens that no loss counts."""
    ids = torch.randint(3, V, (2, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4], mask[1, -3:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False} | ({"attention_mask": mask} if padded else {})


@functools.cache
def _converted(name):
    ours, theirs, conversion = pair(model_of(name), **batch())
    replaced = [row.replaced_by for row in conversion.converted]
    assert replaced.count("linear_cross_entropy") == 1
    kind = kind_of(theirs)
    assert ("moe_mlp" in replaced) == (kind == "Afmoe"), "the router of Afmoe is not read"
    assert kind in CHECKPOINTS or replaced.count("transformer_layer") == 2, str(conversion)
    return ours, theirs


def converted(name="LlamaForCausalLM"):
    """Copies of (the converted model, the model as it was)."""
    return copy.deepcopy(_converted(name))


@pytest.fixture
def masks_of_layers(monkeypatch):
    """The shapes of the bool tensors that fused layers get."""
    shapes, own = [], Segment.__call__

    def call(self, flat, *args, **kwargs):
        if self.op == "transformer_layer":
            shapes.extend(tuple(t.shape) for t in flat if isinstance(t, Tensor) and t.dtype == torch.bool)
        return own(self, flat, *args, **kwargs)

    monkeypatch.setattr(Segment, "__call__", call)
    return shapes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in MODELS]
)
def test_loss_gradients_bytes_and_masks(name, masks_of_layers):
    ours, theirs = converted(name)
    for kwargs, mask in (
        (batch(1), None),
        (batch(2, 17) | {"num_items_in_batch": torch.tensor(40)}, None),
        (batch(3, 27, padded=True), (2, 27)),
    ):
        masks_of_layers.clear()
        assert_same_steps(ours, theirs, **kwargs)
        if kind_of(theirs) in PADDED:
            assert ours.config._attn_implementation == masks.NAME
            assert {*masks_of_layers} == ({mask} if mask else set()), "a mask of two dimensions is written out"
    results = []
    for model in (ours, theirs):
        with saved_tensors(model) as saved:
            model(**batch(4))
        results.append((saved.bytes, any(V in shape for shape, _, _ in saved.tensors)))
    (after, our_logits), (before, their_logits) = results
    assert (our_logits, their_logits) == (False, True)
    assert after < before / 2


# -- routers and experts


ROUTED = batch(1) | {"output_router_logits": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("Qwen2MoeForCausalLM", "in the call"),
        ("MixtralForCausalLM", "by the configuration"),
        ("OlmoeForCausalLM", "before it was converted"),
    ],
)
def test_an_auxiliary_loss_of_the_routers_logits(name, asked):
    """transformers' hooks on routers get the fused layers' logits: the loss has its part, its gradients, and no layer runs
    another forward."""
    theirs, kwargs = model_of(name), ROUTED
    if asked == "by the configuration":
        theirs.config.output_router_logits = True
        kwargs = batch(1)
    if asked == "before it was converted":
        theirs(**kwargs)
    ours, theirs, conversion = pair(theirs, **batch())
    for _ in range(2):
        assert_same_steps(ours, theirs, **kwargs)
    assert theirs(**kwargs).aux_loss > 0
    assert_same_steps(ours, theirs, of=lambda out: out.aux_loss, tolerance=1e-4, **kwargs)
    torch.testing.assert_close(ours(**kwargs).router_logits, theirs(**kwargs).router_logits)
    layers = [row for row in conversion if row.replaced_by == "transformer_layer"]
    assert len(layers) == 2
    assert all(row.calls["fused"] == 4 and not row.calls["checkpointed"] for row in layers)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", ("selective", "full"), ("full", "none")], ids=str)
def test_a_layer_with_experts_in_each_mode(recompute):
    ours, theirs, conversion = pair(model_of("Qwen2MoeForCausalLM"), **batch(), recompute=recompute)
    assert [row.replaced_by for row in conversion if ".layers." in row.name] == ["transformer_layer"] * 2
    assert_same_steps(ours, theirs, **ROUTED)
    with pytest.raises(TypeError, match="has a router and experts, which are not split"):
        places_of(ours.model.layers[0], 2, False)


@pytest.mark.slow
def test_other_hooks_and_other_experts():
    """What the fused call does not do runs as an activation checkpoint of the layer."""
    ours, theirs = converted("MixtralForCausalLM")
    seen = []
    hook = ours.model.layers[0].mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    assert_same_steps(ours, theirs, **batch(1))
    assert seen
    hook.remove()
    for model in (ours, theirs):
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
    for kwargs in (ROUTED | {"output_attentions": True}, batch(1)):
        assert_same_steps(ours, theirs, **kwargs)


def test_a_layer_whose_experts_clamp_is_left():
    """No ordinary row is so large, and none behind a norm."""
    theirs = model_of("MixtralForCausalLM")
    for layer in theirs.model.layers:
        kind = type(layer.mlp.experts)
        layer.mlp.experts.__class__ = variant(
            kind, forward=lambda self, x, *routing, kind=kind: kind.forward(self, x.clamp(-100, 100), *routing)
        )
    ours, theirs, conversion = pair(theirs, **batch())
    rows = {row.name: row for row in conversion}
    assert rows["model.layers.0"].replaced_by == "checkpoint"
    assert re.search("its MoE block: with inputs .* times as large the numbers differ", rows["model.layers.0"].reason)
    assert "model.layers.0.mlp" not in rows
    assert_same_steps(ours, theirs, **batch(1))


@pytest.mark.parametrize("seed", range(2))
def test_layers_with_experts_in_bfloat16(seed):
    """Some tokens go elsewhere where scores round otherwise, which is no other forward."""
    model = model_of("MixtralForCausalLM", num_local_experts=16, num_hidden_layers=1).bfloat16()
    torch.manual_seed(seed)
    with torch.no_grad():  # so that another expert shows beside the residual
        for weight in model.model.layers[0].mlp.experts.parameters():
            weight.copy_(20 * 0.02 * torch.randn_like(weight))
    rows = {row.name: row for row in ckptkern.convert(model, **batch(seed, 17))}
    assert rows["model.layers.0"].replaced_by == "transformer_layer", rows["model.layers.0"].reason


def test_a_layer_that_steps_aside_takes_forwards_choice_in_recompute():
    """A hook inside sends a layer to its original forward as an activation checkpoint. In its recompute another h reaches the
    router, to which all experts are nearly alike: their weights stay, and the best would be others."""
    ours, theirs = converted("MixtralForCausalLM")
    calls = []

    def noise(module, args):
        calls.append(1)
        return (args[0] if len(calls) == 1 else args[0] + torch.randn_like(args[0]),)

    for model in (theirs, ours):
        gate = model.model.layers[0].mlp.gate
        gate.weight.data.mul_(1e-2)
    gate.register_forward_pre_hook(noise)
    mine, want = step(ours, **batch(1)), step(theirs, **batch(1))
    assert len(calls) == 2
    del want["model.layers.0.mlp.gate.weight"], mine["model.layers.0.mlp.gate.weight"]
    assert_same(mine, want, 1e-2)


# -- rotary tables


def test_rotary_tables_in_another_form_are_made_once():
    """Each column of Ernie's tables stands twice: the op's tables are others than the model's, and one pair for all layers."""
    model = transformers.Ernie4_5Model(transformers.Ernie4_5Config(**WIDE | dict(num_hidden_layers=3))).train()
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}
    ckptkern.convert(model, **inputs, recompute="full")
    with saved_tensors(exclude=[*model.parameters(), *model.buffers()]) as saved:
        model(**inputs).last_hidden_state.sum().backward()
    assert sum(tuple(shape) == (1, S, 8) for shape, _, _ in saved.tensors) == 2


def test_a_rotary_table_that_changes_is_made_again():
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
        assert in_form(table, "each twice", 7).is_inference()
    assert not in_form(table, "each twice", 7).is_inference()
    traced, other = torch.jit.trace(lambda t: in_form(t, "twice", 7), table), torch.rand(1, 7, 4)
    assert torch.equal(traced(other), torch.cat((other, other), -1))
    held = weakref.ref(changed)
    del changed, table, traced
    assert held() is None
