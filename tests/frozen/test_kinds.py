"""Kinds of quantised weights: what each stands for, by its library's own function or by the publisher's formula, and what is
refused."""

import pytest
import torch
from torch import nn

from ckptkern import Frozen
from ckptkern.errors import DtypeError, ShapeError
from ckptkern.frozen import kinds
from ckptkern.memory import peak_memory

F8, U8 = torch.float8_e4m3fn, torch.uint8
SHAPE = 320, 64  # 128 rows at a time are two and a half times as many


def params4bit(kind="nf4", double=True, shape=SHAPE, dtype=torch.bfloat16):
    nn_ = pytest.importorskip("bitsandbytes").nn
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return nn_.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=double).to("cpu")


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


def formula(kind, data, scales):
    """float64, an element at a time as far as scales go."""
    if kind == "block_fp8":
        own = scales.double().repeat_interleave(128, -2)[..., : data.shape[-2], :]
        return data.double() * own.repeat_interleave(128, -1)[..., : data.shape[-1]]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((data % 16, data // 16), -1).flatten(-2).long()
    signed = values[codes % 8] * (1 - 2 * (codes // 8))
    return (signed * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize(("kind", "make"), [("block_fp8", block_fp8), ("mxfp4", mxfp4)])
def test_raw_tensors_by_the_formula(kind, make, lead, monkeypatch):
    data, scales = make(*lead)
    frozen, wanted = Frozen(data, scales, kind=kind), formula(kind, data, scales)
    assert frozen.dtype == torch.bfloat16
    assert frozen.shape == wanted.shape
    for at_once in (kinds.AT_ONCE, 1):
        monkeypatch.setattr(kinds, "AT_ONCE", at_once)
        torch.testing.assert_close(frozen.dequantize(torch.float32), wanted.float(), rtol=0, atol=0)
        torch.testing.assert_close(frozen.dequantize(), wanted.float().bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*LIBRARIES, "block_fp8", "mxfp4"])
def test_what_is_transient_is_counted(name, monkeypatch):
    """Of rows at a time, which are fewer than all; one expert of several takes what one weight takes."""
    raw = {"block_fp8": block_fp8, "mxfp4": mxfp4}
    frozen = Frozen(*raw[name](4), kind=name)[1] if name in raw else Frozen(LIBRARIES[name]())
    monkeypatch.setattr(kinds, "AT_ONCE", 128 * frozen.shape[1])
    frozen.dequantize()  # a library's first call may make tables
    for dtype in (torch.bfloat16, torch.float32):
        with peak_memory("cpu") as peak:
            frozen.dequantize(dtype)
        transient = kinds.transient_bytes(frozen.layout_, dtype)
        beside = peak.bytes - frozen.numel() * dtype.itemsize
        assert 0 <= beside <= transient <= 3 * beside + frozen.numel()


def unquantised():
    return pytest.importorskip("bitsandbytes").nn.Params4bit(torch.randn(4, 64), requires_grad=False)


def relaid():
    data = of_torchao("Int8WeightOnlyConfig")
    data.qdata = data.qdata[:, :32]
    return data


def changed(**state):
    data = params4bit()
    for name, value in state.items():
        setattr(data.quant_state, name, value)
    return data


REFUSED = {
    "a plain tensor": (lambda: (torch.randn(3, 4),), {}, TypeError, r"data must be .* not torch\.Tensor"),
    "scales alone": (block_fp8, {}, TypeError, r"scales are given without a kind; pass kind='block_fp8' or"),
    "a kind": (block_fp8, {"kind": "nf4"}, ValueError, r"kind must be 'block_fp8' or 'mxfp4', not 'nf4'"),
    "no scales": (lambda: block_fp8()[:1], {"kind": "mxfp4"}, TypeError, r"kind='mxfp4' needs data and scales as tensors"),
    "dtypes": (mxfp4, {"kind": "block_fp8"}, DtypeError, r"needs float8 data and floating-point scales, not torch.uint8"),
    "shapes": (
        lambda: (block_fp8()[0], torch.ones(3, 2)), {"kind": "block_fp8"}, ShapeError,
        r"needs data \[n, k\] or .* with scales \(3, 3\), but they have shapes \(320, 300\) and \(3, 2\)",
    ),
    "widths": (lambda: (mxfp4()[0][..., :8], mxfp4()[1]), {"kind": "mxfp4"}, ShapeError, r"needs data \[n, k / 32, 16\]"),
    "dtype": (block_fp8, {"kind": "block_fp8", "dtype": F8}, DtypeError, r"dtype must be float16, .* not torch\.float8"),
    "not yet": (lambda: (unquantised(),), {}, ValueError, r"is not quantised yet; move its module to its device first"),
    "packed anew": (
        lambda: (changed(packing_format_for_cpu=True),), {}, ValueError, r"is packed for inference .* load the weight again"
    ),
    "another type": (lambda: (changed(quant_type="nf3"),), {}, ValueError, r"takes nf4 and fp4 .* not 'nf3' of torch.bfloat16"),
    "another size": (lambda: (changed(shape=(320, 65)),), {}, ShapeError, r"has 10240 bytes for a weight of shape \(320, 65\)"),
    "another layout": (
        lambda: (relaid(),), {}, ShapeError, r"must be \[out_features, in_features\] .* is \(320, 64\) .* of data \(320, 32\)"
    ),
    "quantised activations": (
        lambda: (of_torchao("Int8DynamicActivationInt8WeightConfig"),), {}, TypeError,
        r"a torchao Int8Tensor with act_quant_kwargs changes its layer's input too, .* quantise weight-only",
    ),
    "quantised activations of ints": (
        lambda: (of_torchao("Int8DynamicActivationIntxWeightConfig"),), {}, TypeError, r"with activation_quantization changes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, options, error, message = REFUSED[name]
    data = make()
    with pytest.raises(error, match=rf"^Frozen: .*{message}"):
        Frozen(*data, **options)


def test_a_missing_library_says_what_to_install(monkeypatch):
    frozen = Frozen(params4bit())
    monkeypatch.setattr(kinds, "missing", lambda package: f"{package} is not installed: pip install {package}")
    with pytest.raises(ImportError, match=r"a weight of bitsandbytes is dequantised by bitsandbytes\. .* pip install"):
        frozen.dequantize()
