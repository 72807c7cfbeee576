"""ckptkern.storage.compress: bounds of the errors, and the figures of the docs."""

import contextlib
import sys

import pytest
import torch
import torch.nn.functional as F
from support.stores import gradients, store_of, through, watch
from torch import nn

from ckptkern.memory import peak_memory, saved_tensors
from ckptkern.storage import compress

MODULE = sys.modules[compress.__module__]  # the attribute of that name is the class


HALF = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}  # of a unit in the last place, and some


@pytest.mark.parametrize("method", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1,), (127,), (129,), (7, 300)])
@pytest.mark.parametrize("block", [1, 128])
def test_lossy_errors_are_bounded(method, dtype, shape, block, monkeypatch):
    monkeypatch.setattr(MODULE, "CHUNK", 512)
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    blocks = F.pad(x.float().view(-1), (0, -x.numel() % block)).view(-1, block)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: x.numel()].view(shape)
    (restored,) = through(compress(method, block=block, min_bytes=0), x)
    assert restored.dtype == dtype
    assert method == "fp8" or torch.equal(restored.sign(), x.sign())
    size, error = x.float().abs(), (restored.float() - x.float()).abs()
    bounds = {
        "fp8": torch.where(size > largest * 2**-14, size / 16, largest * 2**-17),
        "int8": torch.where(size < largest / 250, largest / 125, largest / 250),
    }
    assert (error <= bounds[method] * 1.0001 + restored.float().abs() * HALF[dtype]).all(), error.max()


@pytest.mark.parametrize("method", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", HALF)
def test_lossy_special_values(method, dtype):
    inf, nan, info = float("inf"), float("nan"), torch.finfo(dtype)
    zero, special, undefined, large, small = (
        torch.tensor(row, dtype=dtype)
        for row in (
            4 * [0.0],
            [inf, 1, nan, -inf],
            4 * [nan],
            [info.max, -info.max, 1, 0],
            [info.smallest_normal / 2, 0, 0, 0],
        )
    )
    restored = through(compress(method, block=4, min_bytes=0), zero, special, undefined, large, small)
    torch.testing.assert_close(restored[:3], [zero, special, undefined], equal_nan=True, rtol=0.01, atol=0)
    torch.testing.assert_close(restored[3], large, rtol=2**-7, atol=info.max / 125)
    assert restored[3][2] > 0 == restored[3][3]
    assert restored[4].isfinite().all()
    assert not restored[4][1:].any()


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_only_floating_tensors_and_no_parameters_are_compressed(method):
    keep = compress(method, min_bytes=0)
    puts = watch(keep)
    tensors = torch.arange(8), torch.ones(8, dtype=torch.bool), torch.randn(8, dtype=torch.complex64)
    tensors += nn.Parameter(torch.randn(8)), torch.randn(0)
    for restored, tensor in zip(through(keep, *tensors), tensors, strict=True):
        assert torch.equal(restored, tensor)
    through(keep, torch.randn(8, dtype=torch.float64))
    assert puts == []


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_lossy_keeps_strides_and_is_about_a_byte_an_element(method):
    keep, x = compress(method, min_bytes=0), torch.randn(64, 48).t()[::2]
    with torch.device("meta"):
        (restored,) = through(keep, x)
    assert restored.stride() == x.stride()
    torch.testing.assert_close(restored, x, rtol=0.07, atol=0.03)
    packed = keep.put(torch.randn(12800))
    assert sum(keep._then.get(part).nbytes for part in (packed.codes, packed.scales)) == 12800 + 4 * 100


FIGURES = {  # store, and the largest relative error of the gradient
    "offload(min_bytes=0)": 0,
    "compress('fp8', min_bytes=0)": 0.05,
    "compress('int8', min_bytes=0)": 0.02,
    "compress('int8', min_bytes=0, then=offload())": 0.02,
}


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_errors_of_the_docs(activation):
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), activation())]
    module, x, target = nn.Sequential(*layers), torch.randn(512, 256), torch.randn(512, 256)

    def step(keep):
        """(the gradients as one vector, bytes saved on the device)."""
        with saved_tensors(module) as saved, keep:
            loss = F.mse_loss(module(x), target)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, [*module.parameters()])), saved.bytes

    (expected, before), errors = step(contextlib.nullcontext()), {}
    print(
        f"\n4 x Linear(256, 256)+{activation.__name__}, 512 tokens, float32: bytes saved on the device; gradient error"
    )
    for name, bound in FIGURES.items():
        actual, after = step(store_of(name))
        error = errors[name] = ((actual - expected).norm() / expected.norm()).item()
        print(f"{name:46} {before:8} -> {after:8}  {error:.1e}")
        assert after < before
        assert (0 < error <= bound) if bound else error == 0
    assert len({error for name, error in errors.items() if "int8" in name}) == 1


@pytest.mark.slow
def test_stores_lower_the_peak():
    module = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())])
    x, peaks = torch.randn(1024, 512), []
    print("\n8 x Linear(512, 512)+GELU, 1024 tokens, float32: peak of both passes above the start, gradients in it")
    for name in ("nothing", "offload(prefetch=0)", "offload(prefetch=2)", "compress('int8')"):
        keep = contextlib.nullcontext() if name == "nothing" else store_of(name)
        gradients(module, x, keep)
        module.zero_grad()
        with peak_memory("cpu") as peak:
            gradients(module, x, keep)
        peaks.append(peak.bytes)
        print(f"{name:33} {peak.bytes / 1e6:.1f} MB")
    nothing, without, ahead, int8 = peaks
    assert without < ahead < 0.7 * nothing
    assert int8 < 0.7 * nothing
