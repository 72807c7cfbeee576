"""convert of MoE layers whose experts bitsandbytes (replace_parameter_4bit) or torchao (FqnToConfig) holds in 4 or 8 bits, as
fused [E, n, k] parameters: against the same model before the conversion, with what is saved and what stands at the peak."""

import copy

import pytest
import torch
from conversion.steps import assert_same, assert_same_steps, pair, saved, step
from conversion.test_language_models import model_of
from torch import nn

import ckptkern
from ckptkern.conversion.convert import removing_adapters

bits = pytest.importorskip("bitsandbytes.nn.parametrize")
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
IDS = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": IDS, "labels": IDS, "use_cache": False}
WEIGHTS = ("gate_up_proj", "down_proj")


def experts_of(model):
    return [m for m in model.modules() if "gate_up_proj" in m._parameters]


def dense(model):
    for m in experts_of(model):
        m.requires_grad_(False)
    return model


def nf4(model, **options):
    for m in experts_of(model):
        for name in WEIGHTS:
            bits.replace_parameter_4bit(m, name, **options)
    return model


def nested(model):
    return nf4(model, compress_statistics=True)


def int8(model):
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.FqnToConfig({rf"re:.*\.{name}": quantization.Int8WeightOnlyConfig() for name in WEIGHTS})
    quantization.quantize_(model, config, filter_fn=None)
    model.set_experts_implementation("eager")  # torch's grouped_mm takes no Int8Tensor
    return model


def mixtral(quantise, experts=16):
    return quantise(model_of("MixtralForCausalLM", **SIZES, num_local_experts=experts))


def adapted(model, **targets):
    """With peft's LoRA, random at first."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, **targets)).train()
    for path, p in model.named_parameters():
        if "lora_" in path:
            nn.init.normal_(p, std=0.2)
    return model


def on_attention(model):
    return adapted(model, target_modules=["q_proj", "o_proj"])


def on_experts(model, *names):
    """peft matches a parametrized parameter by its full path."""
    targets = [
        f"{path}.{name}"
        for path, m in model.named_modules()
        for name in names
        if name in getattr(m, "parametrizations", ())
    ]
    return adapted(model, target_modules=[], target_parameters=targets)


def layer_of(conversion):
    return next(row for row in conversion if row.kind.endswith("DecoderLayer"))


MODELS = {
    "nf4": lambda: mixtral(nf4),
    "nf4, two quantisations, LoRA on attention": lambda: on_attention(mixtral(nested)),
    "int8": lambda: mixtral(int8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_quantised_experts_are_part_of_the_fused_layer(name):
    """The same step and state_dict. The same model with dense experts saves as much, and peaks no lower but by one expert."""
    ours, theirs, conversion = pair(MODELS[name](), **CALL, recompute="full", workspace="64KiB")
    assert layer_of(conversion).replaced_by == "transformer_layer", str(conversion)
    assert_same_steps(ours, theirs, **CALL)
    for (key, tensor), (name_, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert key == name_
        assert tensor is other or torch.equal(getattr(tensor, "qdata", tensor), getattr(other, "qdata", other))
    like = mixtral(dense)
    like = on_attention(like) if "LoRA" in name else like
    of_dense = ckptkern.convert(like, **CALL, recompute="full", workspace="64KiB")
    assert conversion.saved_after == of_dense.saved_after < conversion.saved_before / 10
    whole = sum(p.nbytes for p in experts_of(like)[0].parameters())
    assert conversion.peak_after < of_dense.peak_after + whole / 8 < conversion.peak_before - whole


def restored(state, model):
    """The model with what state_dict saved of 4-bit experts."""
    for path, m in list(model.named_modules()):
        for name in WEIGHTS if "gate_up_proj" in m._parameters else ():
            key = f"{path}.{name}"
            m._parameters[name] = nn.Parameter(state.pop(key), requires_grad=False)
            of_key = {
                entry.removeprefix(f"{key}."): state.pop(entry) for entry in list(state) if entry.startswith(f"{key}.")
            }
            bits.replace_parameter_4bit_prequantized(m, name, of_key, torch.device("cpu"))
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model


def test_a_state_dict_of_a_converted_model_restores_its_4_bits(tmp_path):
    model = mixtral(nested)
    ckptkern.convert(model, **CALL)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = restored(torch.load(tmp_path / "model.pt"), mixtral(lambda model: model))
    torch.testing.assert_close(other(**CALL).loss, model(**CALL).loss)


@pytest.mark.slow
def test_lora_on_a_weight_of_4_bit_experts_is_trained():
    """Three steps. peft 0.21.2 removes its adapter after the first call of a model of which a weight is quantised, so that the
    original is a new copy each time."""
    model = on_experts(mixtral(nf4), "down_proj")
    ours, _, conversion = pair(model, **CALL, recompute="full")
    assert layer_of(conversion).replaced_by == "transformer_layer", str(conversion)
    for _ in range(3):
        theirs = copy.deepcopy(model)
        theirs.load_state_dict(
            {name: tensor for name, tensor in ours.state_dict().items() if "lora_" in name}, strict=False
        )
        actual = step(ours, **CALL)
        assert_same(actual, step(theirs, **CALL))
        with torch.no_grad():
            for name, p in ours.named_parameters():
                if "lora_" in name:
                    p -= 0.1 * actual[name]
    assert conversion.calls["original"] == conversion.calls["checkpointed"] == 0


def test_peft_ignores_one_of_two_adapters_of_4_bit_experts_and_so_does_the_checkpoint():
    """It reads the inner weight while torch caches what is parametrized; the fused op would have both."""
    ours, theirs, conversion = pair(on_experts(mixtral(nf4), *WEIGHTS), **CALL)
    assert layer_of(conversion).replaced_by == "checkpoint", str(conversion)
    actual, wanted = step(ours, **CALL), step(theirs, **CALL)
    assert_same(actual, wanted)
    ignored = {name.split(".lora_")[0] for name, grad in wanted.items() if "lora_" in name and not grad.any()}
    if not ignored:
        pytest.skip("this release of peft has both")
    assert len(ignored) == 2, "one in each layer"


def test_what_peft_leaves_behind_is_there_while_a_model_is_converted_only():
    layer = pytest.importorskip("peft.tuners.lora.layer")
    own = getattr(layer, "_LoraFactorsProxy", None)
    with removing_adapters():
        assert own is None or layer._LoraFactorsProxy is not own
    assert getattr(layer, "_LoraFactorsProxy", None) is own


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_checkpoint_dequantises_one_expert_at_a_time(implementation):
    """GPT-OSS' experts are transposed and interleaved, so that no op stands for them."""
    conversions = []
    for quantise in (nested, dense):
        model = quantise(model_of("GptOssForCausalLM", **SIZES, num_local_experts=16, head_dim=32))
        model.set_experts_implementation(implementation)
        ours, theirs, conversion = pair(model, **CALL, recompute="full")
        assert layer_of(conversion).replaced_by == "checkpoint"
        assert_same_steps(ours, theirs, **CALL, tolerance=1e-4)
        conversions.append(conversion)
    of_4_bits, of_dense = conversions
    whole = sum(p.nbytes for p in experts_of(model)[0].parameters())
    assert of_4_bits.saved_after == of_dense.saved_after
    assert of_4_bits.peak_after < of_dense.peak_after + whole / 16 < of_4_bits.peak_before - whole


@pytest.mark.parametrize("quantise", [nf4, int8])
def test_experts_by_transformers_interface_save_no_dequantised_weights(quantise):
    ckptkern.conversion.moe.register_experts()
    theirs = mixtral(quantise)
    ours, like = copy.deepcopy(theirs), mixtral(dense)
    for model in (ours, like):
        model.set_experts_implementation("ckptkern")
    assert_same_steps(ours, theirs, **CALL)
    scales = sum(
        m[0].quant_state.absmax.nbytes
        for m in ours.modules()
        if isinstance(m, nn.utils.parametrize.ParametrizationList)
    )
    assert saved(ours, **CALL) <= saved(like, **CALL) + scales


def test_rows_that_are_no_whole_blocks_stay_as_bitsandbytes_has_them():
    model = nf4(model_of("MixtralForCausalLM", **SIZES | dict(intermediate_size=96)))
    ours, theirs, conversion = pair(model, **CALL)
    assert layer_of(conversion).replaced_by == "checkpoint"
    assert_same_steps(ours, theirs, **CALL)
