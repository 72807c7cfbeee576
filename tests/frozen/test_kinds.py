"""Kinds of quantised weights: what each stands for, by its library's own function or by the publisher's formula, and what is
refused."""

import gc

import pytest
import torch
from torch import nn

from ckptkern import Frozen
from ckptkern import frozen as kinds
from ckptkern.memory import peak_memory

F8, U8 = torch.float8_e4m3fn, torch.uint8
SHAPE = 320, 64  # 128 rows at a time are two and a half times as many


def params4bit(kind="nf4", double=True, dtype=torch.bfloat16, device="cpu"):
    """device: None leaves it as it was loaded, not quantised."""
    nn_ = pytest.importorskip("bitsandbytes").nn
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter = nn_.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=double)
    return parameter.to(device) if device else parameter


def of_torchao(config, **options):
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.bfloat16)
    quantization.quantize_(layer, getattr(quantization, config)(**options))
    return layer.weight


def block_fp8(*lead):
    data = torch.randn(*lead, 320, 300).to(F8)
    return data, torch.rand(*lead, 3, 3) + 0.5


def mxfp4(*lead):
    return torch.randint(256, (*lead, 320, 2, 16), dtype=U8), torch.randint(110, 140, (*lead, 320, 2), dtype=U8)


def theirs(data):
    if hasattr(data, "quant_state"):
        return pytest.importorskip("bitsandbytes").functional.dequantize_4bit(data.data, data.quant_state)
    return data.dequantize()


LIBRARIES = {
    "nf4": lambda: params4bit("nf4"),
    "nf4, one quantisation": lambda: params4bit("nf4", double=False),
    "fp4": lambda: params4bit("fp4", dtype=torch.float32),
    "int8": lambda: of_torchao("Int8WeightOnlyConfig"),
    "float8": lambda: of_torchao("Float8WeightOnlyConfig"),
    "intx": lambda: of_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_librarys_own_function_dequantises(name, monkeypatch):
    data = LIBRARIES[name]()
    frozen, wanted = Frozen(data), theirs(data)
    assert (frozen.kind, frozen.shape, frozen.dtype) == (name.partition(",")[0], wanted.shape, wanted.dtype)
    assert torch.equal(frozen.dequantize(), wanted)
    monkeypatch.setattr(kinds, "AT_ONCE", 1)  # 128 rows at a time, and then 64
    assert torch.equal(frozen.dequantize(), wanted)
    assert torch.equal(Frozen(data, dtype=torch.float64).dequantize().to(wanted.dtype), wanted)


def parametrized(shape, **options):
    """(a module with a weight w of experts that bitsandbytes has parametrized, a Frozen of it)."""
    bits = pytest.importorskip("bitsandbytes.nn.parametrize")
    module = nn.Module()
    module.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16())
    bits.replace_parameter_4bit(module, "w", **options)
    return module, Frozen(module.parametrizations.w)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_experts_that_bitsandbytes_has_parametrized(kind, nested):
    """Each alone, in whose scales a block of scales begins anywhere."""
    module, frozen = parametrized((5, 96, 192), quant_type=kind, compress_statistics=nested)
    whole = module.w
    assert (frozen.kind, frozen.shape, frozen.dtype) == (kind, whole.shape, whole.dtype)
    assert torch.equal(frozen.dequantize(), whole)
    for expert in (0, 1, 3, -1, torch.tensor(2)):
        assert torch.equal(frozen[expert].dequantize(), whole[expert])
        assert torch.equal(frozen.mT[expert].dequantize(), whole.mT[expert])
    with peak_memory("cpu") as peak:
        frozen[1].dequantize()
    assert peak.bytes < 1.25 * whole[1].nbytes


def test_grouped_mm_dequantises_one_expert_at_a_time():
    module, frozen = parametrized((16, 256, 256))
    x, offs = (
        torch.randn(40, 256, dtype=torch.bfloat16),
        torch.tensor([5, 5, 9, 20, 21, 33, 34, *[40] * 9], dtype=torch.int32),
    )
    results = []
    for weight in (frozen, module.w):
        rows = x.clone().requires_grad_()
        with peak_memory("cpu") as peak:
            y = torch._grouped_mm(rows, weight.mT, offs)
            y.backward(torch.ones_like(y))
        results.append((y, rows.grad, peak.bytes))
    (ours, theirs), (grad, wanted), (peak, _) = zip(*results, strict=True)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grad, wanted)
    # of 16 experts: some, with what oneDNN takes for each thread
    assert peak < module.w.nbytes / 2


def formula(kind, data, scales):
    """float64, an element at a time as far as scales go."""
    if kind == "block_fp8":
        own = scales.double().repeat_interleave(128, -2)[..., : data.shape[-2], :]
        return data.double() * own.repeat_interleave(128, -1)[..., : data.shape[-1]]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((data % 16, data // 16), -1).flatten(-2).long()
    signed = values[codes % 8] * (1 - 2 * (codes // 8))
    return (signed * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)


RAW = {"block_fp8": block_fp8, "mxfp4": mxfp4}


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kind", RAW)
def test_raw_tensors_by_the_formula(kind, lead, monkeypatch):
    data, scales = RAW[kind](*lead)
    frozen, wanted = Frozen(data, scales, kind=kind), formula(kind, data, scales)
    assert (frozen.dtype, frozen.shape) == (torch.bfloat16, wanted.shape)
    for at_once in (kinds.AT_ONCE, 1):
        monkeypatch.setattr(kinds, "AT_ONCE", at_once)
        assert torch.equal(frozen.dequantize(torch.float32), wanted.float())
        assert torch.equal(frozen.dequantize(), wanted.float().bfloat16())


@pytest.mark.parametrize("name", [*LIBRARIES, *RAW])
def test_what_is_transient_is_counted(name, monkeypatch):
    """Of rows at a time, which are fewer than all; one expert of several takes what one weight takes."""
    frozen = Frozen(*RAW[name](4), kind=name)[1] if name in RAW else Frozen(LIBRARIES[name]())
    monkeypatch.setattr(kinds, "AT_ONCE", 128 * frozen.shape[1])
    frozen.dequantize()  # a library's first call may make tables
    for dtype in (torch.bfloat16, torch.float32):
        gc.collect()  # what is garbage would be freed inside
        with peak_memory("cpu") as peak:
            frozen.dequantize(dtype)
        dense_bytes = frozen.numel() * dtype.itemsize
        beside, transient = peak.bytes - dense_bytes, kinds.frozen_bytes([frozen], dtype)[1] - dense_bytes
        assert 0 <= beside <= transient <= 3 * beside + frozen.numel()


def relaid():
    data = of_torchao("Int8WeightOnlyConfig")
    data.qdata = data.qdata[:, :32]
    return data


def changed(**state):
    data = params4bit()
    vars(data.quant_state).update(state)
    return data


REFUSED = {
    r"of experts \[E, .* with rows of whole blocks of 64 values": lambda: parametrized((3, 64, 96)),
    r"data must be .* not torch\.Tensor": lambda: Frozen(torch.randn(3, 4)),
    r"scales are given without a kind; pass kind='block_fp8' or": lambda: Frozen(*block_fp8()),
    r"kind must be 'block_fp8' or 'mxfp4', not 'nf4'": lambda: Frozen(*block_fp8(), kind="nf4"),
    r"kind='mxfp4' needs data and scales as tensors": lambda: Frozen(block_fp8()[0], kind="mxfp4"),
    r"needs float8 data and floating-point scales, not torch.uint8": lambda: Frozen(*mxfp4(), kind="block_fp8"),
    r"needs data \[n, k\] or .* with scales \(3, 3\), but they have shapes \(320, 300\) and \(3, 2\)": lambda: Frozen(
        block_fp8()[0], torch.ones(3, 2), kind="block_fp8"
    ),
    r"dtype must be float16, .* not torch\.float8": lambda: Frozen(*block_fp8(), kind="block_fp8", dtype=F8),
    r"is not quantised yet; move its module to its device first": lambda: Frozen(params4bit(device=None)),
    r"is packed for inference .* load the weight again": lambda: Frozen(changed(packing_format_for_cpu=True)),
    r"must be nf4 or fp4 .* but is 'nf3' of torch.bfloat16": lambda: Frozen(changed(quant_type="nf3")),
    r"has 10240 bytes for a weight of shape \(320, 65\)": lambda: Frozen(changed(shape=(320, 65))),
    r"must be \[out_features, in_features\] .* is \(320, 64\) .* of data \(320, 32\)": lambda: Frozen(relaid()),
    r"with activation_quantization changes its layer's input too, .* quantise weight-only": lambda: Frozen(
        of_torchao("Int8DynamicActivationIntxWeightConfig")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    with pytest.raises((TypeError, ValueError), match=f"^Frozen: .*{message}"):
        REFUSED[message]()


def test_a_missing_library_says_what_to_install(monkeypatch):
    frozen = Frozen(params4bit())
    monkeypatch.setattr(kinds, "missing", lambda package: f"{package} is not installed: pip install {package}")
    with pytest.raises(ImportError, match=r"a weight of bitsandbytes is dequantised by bitsandbytes\. .* pip install"):
        frozen.dequantize()
