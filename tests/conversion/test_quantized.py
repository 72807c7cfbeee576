"""convert of layers with quantised weights, with and without LoRA: fused where the library multiplies by the dequantised
weight, and a checkpoint with the reason where it does something else."""

import copy
import functools
import re

import pytest
import torch
from conversion.steps import assert_same_steps, compiled, pair, saved, step
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.conversion import quantized

DIM = 64
IDS = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": IDS, "labels": IDS, "use_cache": False}


def linear4bit(linear, repacks=True):
    """repacks: as on a CPU with AVX512-BF16, whatever this one is."""
    nn_ = pytest.importorskip("bitsandbytes").nn
    quantized = nn_.Linear4bit(
        *linear.weight.shape[::-1], linear.bias is not None, compute_dtype=linear.weight.dtype, quant_type="nf4"
    )
    quantized.weight = nn_.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to("cpu")
    quantized.bias = linear.bias
    quantized.support_avx512bf16_for_cpu = repacks
    return quantized


def of_torchao(linear, config="Int8WeightOnlyConfig"):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(linear, getattr(quantization, config)())
    return linear


def llama(quantise, adapts=True, dtype=torch.float32):
    """A small Llama of transformers whose layers have quantised weights, and peft's LoRA on them."""
    pytest.importorskip("transformers", minversion="5.0")
    from conversion.test_language_models import model_of

    model = model_of(hidden_size=DIM, intermediate_size=2 * DIM).to(dtype)
    for name, linear in list(model.model.named_modules()):
        if isinstance(linear, nn.Linear):
            model.model.set_submodule(name, quantise(linear))
    if adapts:
        peft = pytest.importorskip("peft")
        model.is_loaded_in_4bit = quantise is not of_torchao
        targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantise", "adapts"),
    [(linear4bit, True), (functools.partial(linear4bit, repacks=False), True), (of_torchao, False)],
    ids=["linear4bit", "linear4bit-of a CPU that packs nothing", "of_torchao"],
)
def test_a_llama_with_quantised_weights(quantise, adapts):
    """The same step, and what is saved is no more than of the same model with dense weights."""
    ours, theirs, conversion = pair(llama(quantise, adapts), **CALL)
    layers = [row for row in conversion if row.kind == "LlamaDecoderLayer"]
    assert [row.replaced_by for row in layers] == ["transformer_layer"] * 2
    assert_same_steps(ours, theirs, **CALL, tolerance=1e-3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    dense = llama(lambda linear: linear, adapts)
    if not adapts:
        dense.model.layers.requires_grad_(False)
    ckptkern.convert(dense, **CALL)
    assert saved(ours, **CALL) == saved(dense, **CALL)


def kbit():
    """As peft's prepare_model_for_kbit_training leaves it: quantised layers compute in bfloat16, all else is float32."""
    model = llama(linear4bit, dtype=torch.bfloat16)
    for module in model.modules():
        if not isinstance(module, type(linear4bit(nn.Linear(2, 2)))):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "autocast"), [(functools.partial(llama, linear4bit, dtype=torch.bfloat16), False), (kbit, True)]
)
def test_in_16_bits(make, autocast):
    """Within twice the error of the library's own step, against a step in float32."""
    exact = make().float()
    for layer in exact.modules():
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = torch.float32
    exact, model = step(exact, **CALL), make()

    def error():
        actual = step(model, **CALL, autocast=torch.bfloat16 if autocast else None)
        return sum(
            float((actual[name].float() - expected).norm()) for name, expected in exact.items() if name != "output"
        )

    theirs, conversion = error(), ckptkern.convert(model, **CALL)
    assert sum(row.replaced_by == "transformer_layer" for row in conversion) == 2
    ours = error()
    assert conversion.calls["fused"]
    assert not conversion.calls["original"]
    assert ours <= 2 * theirs


class MLP(nn.Module):
    def __init__(self, quantise=lambda linear: linear, bias=False):
        super().__init__()
        self.up, self.down = (quantise(nn.Linear(DIM, DIM, bias)) for _ in range(2))

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Twice(nn.Linear):
    """A library whose forward does something else with its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


class Quantised(nn.Linear):
    """As transformers' FP8Linear: a float8 weight, whose scale only the module applies, and plain weights as nn.Linear does."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * (1 if self.weight.itemsize > 1 else 0.5))


def float8(linear):
    quantized = Quantised(DIM, DIM, bias=False)
    quantized.weight = nn.Parameter(linear.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    return quantized


def twice(linear):
    quantized = of_torchao(linear)
    quantized.__class__ = Twice
    return quantized


def linear8bit(linear):
    nn_ = pytest.importorskip("bitsandbytes").nn
    quantized = nn_.Linear8bitLt(DIM, DIM, bias=False, has_fp16_weights=False)
    quantized.weight = nn_.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False).to("cpu")
    return quantized


LEFT = {
    "8-bit activations of bitsandbytes": (
        linear8bit,
        r"up\.weight is a Int8Params\. Frozen: data must be bitsandbytes' Params4bit",
    ),
    "8-bit activations of torchao": (
        functools.partial(of_torchao, config="Int8DynamicActivationInt8WeightConfig"),
        r"up\.weight is a Int8Tensor\. Frozen: a torchao Int8Tensor with act_quant_kwargs changes its layer's input too",
    ),
    "a float8 weight": (float8, r"up\.weight is torch\.float8_e4m3fn, whose scale only its module knows"),
    "another forward": (twice, r"the forward of up differs from its dequantised weight's by 5\.0e-01"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_multiplies_otherwise_is_a_checkpoint_with_the_reason(name):
    quantise, reason = LEFT[name]
    model = nn.Sequential(MLP(quantise))
    x = torch.randn(2, 5, DIM, requires_grad=True)
    conversion = ckptkern.convert(model, x)
    row = next(row for row in conversion.rows if row.kind == "MLP")
    assert row.replaced_by == "checkpoint"
    assert re.search(reason, row.reason)


def test_a_weight_that_the_library_changes_is_read_anew():
    """Merging puts another weight there; packing it anew for inference changes it in place, and is refused."""
    model, x = MLP(linear4bit, bias=True), torch.randn(2, 5, DIM, requires_grad=True)
    ckptkern.convert(model, x)
    assert ckptkern.conversion.binding.Fused is type(model.forward)
    torch.testing.assert_close(model(x), type(model).forward(model, x))
    model.up.weight = linear4bit(nn.Linear(DIM, DIM)).weight
    y = model(x)
    torch.testing.assert_close(y, type(model).forward(model, x))
    torch.testing.assert_close(copy.deepcopy(model)(x), y)
    model.up.weight.quant_state.absmax = model.up.weight.quant_state.absmax.clone().roll(1)
    torch.testing.assert_close(model(x), type(model).forward(model, x))
    assert model.forward.calls["fused"] > 0 == model.forward.calls["original"]
    model.up.weight.quant_state.packing_format_for_cpu = True
    model.up.weight.quant_state.absmax = model.up.weight.quant_state.absmax.clone()
    with pytest.raises(ValueError, match=r"is packed for inference on this CPU"):
        model(x)


def test_a_layer_of_bitsandbytes_multiplies_in_its_own_dtype():
    """Its weight was quantised from float32, and its compute_dtype is bfloat16, as its input."""
    model, x = MLP(linear4bit), torch.randn(2, 5, DIM, dtype=torch.bfloat16, requires_grad=True)
    for linear in (model.up, model.down):
        linear.compute_dtype = torch.bfloat16
        assert linear.weight.quant_state.dtype == torch.float32
    conversion = ckptkern.convert(model, x)
    y = model(x)
    assert conversion.calls["fused"] == 1
    torch.testing.assert_close(y, type(model).forward(model, x), rtol=0.03, atol=0.01)


def test_an_evaluation_while_converting_packs_no_weight():
    """As bitsandbytes does in calls without gradients on a CPU with AVX512-BF16."""
    model = MLP(linear4bit)
    with quantized.not_repacked(model):
        assert not model.up.support_avx512bf16_for_cpu
    seen = []
    forward = model.up.forward

    def repacks(x):
        seen.append(model.up.support_avx512bf16_for_cpu and not model.up.training and not x.requires_grad)
        return forward(x)

    model.up.forward = repacks
    ckptkern.convert(model, torch.randn(2, 5, DIM), include="down")
    assert seen
    assert not any(seen)
    assert model.up.support_avx512bf16_for_cpu
    assert model.down.support_avx512bf16_for_cpu


def test_a_compiled_model_takes_frozen_weights_as_inputs():
    model, x = MLP(linear4bit), torch.randn(2, 5, DIM, requires_grad=True)
    ckptkern.convert(model, x)
    y = model(x)
    torch.testing.assert_close(compiled(model)(x), y)


def rounded(values):
    """With a straight-through gradient, as fake quantisation is trained."""
    return values + ((values * 4).round() / 4 - values).detach()


def linear_that(forward):
    return type("Own", (nn.Linear,), {"forward": forward})


def with_another_gradient(self, x):
    return F.linear((x + x.detach()) / 2 if self.training else x, self.weight, self.bias)


OWN = {
    "quantises its weight": linear_that(lambda self, x: F.linear(x, rounded(self.weight), self.bias)),
    "quantises its input": linear_that(lambda self, x: F.linear(rounded(x), self.weight, self.bias)),
    "quantises in training": linear_that(
        lambda self, x: F.linear(rounded(x) if self.training else x, self.weight, self.bias)
    ),
    "quantises in evaluation": linear_that(
        lambda self, x: F.linear(x if self.training else rounded(x), self.weight, self.bias)
    ),
    "quantises with gradients": linear_that(
        lambda self, x: F.linear(rounded(x) if torch.is_grad_enabled() else x, self.weight, self.bias)
    ),
    "quantises in bfloat16": linear_that(
        lambda self, x: F.linear(rounded(x) if x.dtype == torch.bfloat16 else x, self.weight, self.bias)
    ),
    "quantises under autocast": linear_that(
        lambda self, x: F.linear(rounded(x) if torch.is_autocast_enabled("cpu") else x, self.weight, self.bias)
    ),
    "has another gradient in training": linear_that(with_another_gradient),
    "has a __call__": type("Own", (nn.Linear,), {"__call__": lambda self, x: nn.Linear.__call__(self, rounded(x))}),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_linear_layer_with_a_forward_of_its_own_is_none(kind):
    """Also where a dropout keeps the check of the whole from running in training."""
    ours, theirs, conversion = pair(BranchOf(OWN[kind]).train(), x := torch.randn(2, 5, DIM))
    assert not conversion.converted
    assert re.search(r"is not a linear layer but|numbers differ", conversion.rows[0].reason)
    assert_same_steps(ours, theirs, x)


class BranchOf(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(DIM), kind(DIM, DIM), kind(DIM, DIM), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize(
    "forward", [lambda self, x: F.linear(x, self.weight, self.bias), lambda self, x: x @ self.weight.T + self.bias]
)
def test_a_forward_of_its_own_that_computes_the_same_is_fused(forward):
    conversion = ckptkern.convert(BranchOf(linear_that(forward)).train(), torch.randn(2, 5, DIM))
    assert [row.replaced_by for row in conversion] == ["mlp_block"]


def in_layers(module, name):
    return isinstance(module, nn.Linear) and "layers" in name


def everywhere(module, name):
    return isinstance(module, nn.Linear)


def of_qat(model, which=in_layers, **config):
    qat = pytest.importorskip("torchao.quantization.qat")
    config = {name: qat.IntxFakeQuantizeConfig(**options) for name, options in config.items()}
    pytest.importorskip("torchao.quantization").quantize_(model, qat.QATConfig(**config, step="prepare"), which)
    model(**CALL)  # its fake quantisers note in the first call what they are


INT4 = {"dtype": torch.int4, "group_size": 32}
INT8 = {"dtype": torch.int8, "granularity": "per_token", "is_symmetric": False}


def of_float8(model):
    float8_ = pytest.importorskip("torchao.float8")
    config = float8_.Float8LinearConfig(emulate=True)
    float8_.convert_to_float8_training(model, module_filter_fn=in_layers, config=config)


def of_trained_weights(model):
    training = pytest.importorskip("torchao.prototype.quantized_training")
    config = training.Int8MixedPrecisionTrainingConfig()
    pytest.importorskip("torchao.quantization").quantize_(model, config, in_layers)


def of_torch_qat(model):
    for name, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            linear.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
            model.model.layers.set_submodule(name, torch.ao.nn.qat.Linear.from_float(linear))


PREPARED = {
    "int4 weights": (functools.partial(of_qat, weight_config=INT4), r"is not a linear layer"),
    "int8 activations": (
        functools.partial(of_qat, activation_config=INT8, weight_config=INT4), r"is not a linear layer",
    ),
    "a head": (functools.partial(of_qat, which=everywhere, weight_config=INT4), r"is not a linear layer"),
    "float8": (of_float8, r"is not a linear layer but Float8Linear"),
    "trained quantised weights": (of_trained_weights, r"q_proj\.weight is a Int8Mixed\w+ that is trained, and no op"),
    "torch.ao": (of_torch_qat, r"is not a linear layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREPARED)
def test_a_llama_prepared_for_quantised_training(name):
    prepare, reason = PREPARED[name]
    model = llama(lambda linear: linear, adapts=False)
    prepare(model)
    ours, theirs, conversion = pair(model.train(), **CALL)
    layers = [row for row in conversion if row.kind == "LlamaDecoderLayer"]
    assert all(row.replaced_by in (None, "checkpoint") and re.search(reason, row.reason) for row in layers)
    assert [row.replaced_by for row in conversion if row.name == "lm_head"] == (
        [None] if name == "a head" else ["linear_cross_entropy"]
    )
    assert_same_steps(ours, theirs, **CALL)


def test_fake_quantisation_that_is_enabled_later():
    model = llama(lambda linear: linear, adapts=False)
    of_qat(model, weight_config=INT4)

    def enable(model, enabled):
        for module in model.modules():
            if hasattr(module, "enabled"):
                module.enabled = enabled

    enable(model, False)
    ours, theirs, conversion = pair(model.train(), **CALL)
    assert [row.replaced_by for row in conversion][:2] == ["transformer_layer"] * 2
    for m in (ours, theirs):
        enable(m, True)
    assert_same_steps(ours, theirs, **CALL)


def test_a_quantised_weight_that_is_trained_is_none():
    linear = of_torchao(nn.Linear(DIM, DIM, bias=False))
    linear.weight.requires_grad_()
    assert "is a Int8Tensor that is trained, and no op computes its gradient" in quantized.why_unreadable(linear)
