"""Narrow chains in one kernel: against the same chain layer by layer, for any row tile and any number of programs."""

import itertools

import pytest
import torch
from support import launchers as eager
from support.kernel_cases import DTYPES, assert_equal, check_results

from ckptkern import triton_kernels
from ckptkern.triton_kernels import pack_stack, stack_width
from ckptkern.triton_kernels.tile import INTERPRETER

WIDTHS = [29, 17, 32, 21]  # unaligned inside one padded width, shrinking and growing


def chain_of(widths, dtype, device="cpu", bias=True, integer=False):
    """(weights, biases). Integer ones make every float32 sum exact, whatever its order."""

    def draw(*shape):
        if integer:
            return torch.randint(-1, 2, shape).to(device, dtype)
        return (torch.randn(shape) / max(shape[-1], 1) ** 0.5).to(device, dtype)

    weights = [draw(n, k) for k, n in itertools.pairwise(widths)]
    return weights, [draw(n) for n in widths[1:]] if bias else []


def chain(backend, x, weights, biases, dy, activation, **launch):
    """y, dx and each layer's dw and db, by the two kernels or by their reference implementations."""
    width = backend.stack_width(x, [x.shape[1], *(w.shape[0] for w in weights)])
    packed = backend.pack_stack(weights, biases, width, x.dtype)
    tile = {name: value for name, value in launch.items() if name == "block_m"}
    y, bits = backend.stack_fwd(x, *packed, dy.shape[1], activation, "ieee", save_bits=activation == "relu", **tile)
    dx, dw, db = backend.stack_bwd(x, *packed, dy, bits, activation, "ieee", **launch)
    if backend is triton_kernels:
        none, *alone = backend.stack_bwd(x, *packed, dy, bits, activation, "ieee", dx=False, **launch)
        assert none is None
        assert_equal(dict(enumerate(alone)), {0: dw, 1: db})
    results = {"y": y, "dx": dx, **({"bits": bits} if bits is not None else {})}
    for i, (N, K) in enumerate(w.shape for w in weights):
        results |= {f"dw{i}": dw[i, :N, :K]} | ({f"db{i}": db[i, :N]} if biases else {})
    assert biases or db is None
    return results


def layer_by_layer(x, weights, biases, dy, activation):
    """The exact result: the reference implementation in float64."""
    x, dy, *both = x.double(), dy.double(), *([t.double() for t in tensors] for tensors in (weights, biases))
    return chain(eager, x, *both, dy, activation)


def all_three(*arguments, **launch):
    ours, eagers = chain(triton_kernels, *arguments, **launch), chain(eager, *arguments)
    return ours, eagers, layer_by_layer(*arguments)


CHAINS = [WIDTHS, [1, 1], [32, 32, 32], [33, 64, 40], [64, 64], [5, 0, 3], [0, 4, 4], [6, 5, 0]]


@pytest.mark.parametrize("widths", CHAINS, ids=str)
@pytest.mark.parametrize(("rows", "activation"), [(45, "relu2"), (1, "relu"), (0, "silu")])
def test_widths_and_rows(widths, rows, activation, device):
    """Full and padded widths, one layer, one row, and nothing at all in each direction; no bias."""

    def results():
        weights, biases = chain_of(widths, torch.float32, device, bias=False)
        x, dy = torch.randn(rows, widths[0], device=device), torch.randn(rows, widths[-1], device=device)
        return all_three(x, weights, biases, dy, activation)

    check_results(results)


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_row_tile_and_any_number_of_programs(activation, dtype, device):
    """On integers, whose sums are exact in any order, every launch gives the same bits of everything."""
    weights, biases = chain_of([9, 5, 7], dtype, device, integer=True)
    x, dy = (torch.randint(-1, 2, (75, width), device=device).to(dtype) for width in (9, 7))
    expected = layer_by_layer(x, weights, biases, dy, activation)
    for block_m, programs in [(16, 1), (16, 3), (32, 2), (64, 7), (128, 1)]:
        ours = chain(triton_kernels, x, weights, biases, dy, activation, block_m=block_m, programs=programs)
        assert_equal({name: t.double() for name, t in ours.items()}, {name: expected[name].double() for name in ours})


@pytest.mark.parametrize(
    ("activation", "x", "biases"),
    [("relu", -59e3, (60e3, 6e3, 6e3)), ("identity", -59e3, (60e3, 6e3, 6e3)), ("relu2", -299.0, (300.0, 0.0, 0.0))],
)
def test_rows_beyond_the_last_add_nothing(activation, x, biases, device):
    """The chain of an absent row starts at 0 and may overflow where no real row does: 0 times inf is NaN in dw."""
    rows = torch.full((5, 1), x, device=device, dtype=torch.float16)
    weights, biases = [torch.ones_like(rows[:1])] * 3, [rows.new_full((1,), bias) for bias in biases]
    ours = check_results(lambda: all_three(rows, weights, biases, torch.ones_like(rows), activation))
    assert all(t.isfinite().all() for t in ours.values())


def test_nan_passes_relu(device):
    weights, biases = chain_of([4, 4, 4], torch.float32, device)
    x, dy = torch.randn(3, 4, device=device), torch.ones(3, 4, device=device)
    x[1] = float("nan")
    ours, expected = (chain(backend, x, weights, biases, dy, "relu") for backend in (triton_kernels, eager))
    assert ours["y"][1].isnan().all()
    for name in ("y", "dx"):
        assert torch.equal(ours[name].isnan(), expected[name].isnan())


@pytest.mark.parametrize(
    ("arch", "narrow"), [(INTERPRETER, 32), (80, 32), (90, 64)]
)  # sm_90 wants dot dimensions of 64
def test_stack_width(arch, narrow, monkeypatch):
    monkeypatch.setattr(triton_kernels.stack, "arch_of", lambda x: arch)
    x = torch.empty(1, 1)
    assert [stack_width(x, widths) for widths in ([3, 32, 1], [3, 33, 1], [64, 64], [65, 2])] == [narrow, 64, 64, None]


def test_pack_stack_casts_and_pads_with_zeros():
    weights, biases = chain_of([3, 5, 2], torch.float32)
    for packed, tensors in zip(pack_stack(weights, biases, 32, torch.bfloat16), (weights, biases), strict=True):
        assert packed.shape == (2, *(32,) * tensors[0].dim())
        for layer, tensor in zip(packed, tensors, strict=True):
            assert torch.equal(layer[tuple(map(slice, tensor.shape))], tensor.bfloat16())
        assert packed.count_nonzero() == sum(tensor.numel() for tensor in tensors)
