"""Narrow chains in one kernel: against the same chain layer by layer, for any row tile and any number of programs."""

import itertools

import pytest
import torch
from support.kernel_cases import ACTIVATIONS, DTYPES, assert_accurate, assert_equal

from ckptkern import eager, triton_kernels
from ckptkern.triton_kernels import pack_stack, stack_bwd, stack_fwd, stack_width
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


def chain(backend, x, weights, biases, dy, activation, *, block_m=None, programs=None):
    """y, dx and each layer's dw and db, by the two kernels or by their reference implementations."""
    width = backend.stack_width(x, [x.shape[1], *(w.shape[0] for w in weights)])
    packed = backend.pack_stack(weights, biases, width, x.dtype)
    relu = activation == "relu"
    fwd = {"block_m": block_m} if backend is triton_kernels else {}
    y, bits = backend.stack_fwd(x, *packed, dy.shape[1], activation, "ieee", save_bits=relu, **fwd)
    bwd = {**fwd, "programs": programs} if fwd else {}
    dx, dw, db = backend.stack_bwd(x, *packed, dy, bits, activation, "ieee", **bwd)
    results = {"y": y, "dx": dx, **({"bits": bits} if relu else {})}
    for i, w in enumerate(weights):
        N, K = w.shape
        results[f"dw{i}"] = dw[i, :N, :K]
        if biases:
            results[f"db{i}"] = db[i, :N]
    assert biases or db is None
    return results


def narrow(*arguments, **launch):
    return chain(triton_kernels, *arguments, **launch)


def layer_by_layer(x, weights, biases, dy, activation, double=False):
    """The reference implementation; dw and db in float32, as accumulated."""
    if double:
        x, dy = x.double(), dy.double()
        weights, biases = ([t.double() for t in tensors] for tensors in (weights, biases))
    return chain(eager, x, weights, biases, dy, activation)


def assert_like_layers(x, weights, biases, dy, activation, **options):
    arguments = (x, weights, biases, dy, activation)
    eagers, exact = layer_by_layer(*arguments), layer_by_layer(*arguments, double=True)
    ours = narrow(*arguments, **options)
    assert_accurate(ours, {name: eagers[name] for name in ours}, {name: exact[name] for name in ours})
    return ours


@pytest.mark.sampled
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_activation(activation, dtype, device):
    weights, biases = chain_of(WIDTHS, dtype, device)
    x, dy = torch.randn(75, 29, device=device).to(dtype), torch.randn(75, 21, device=device).to(dtype)
    assert_like_layers(x, weights, biases, dy, activation, block_m=64, programs=1)


CHAINS = [[1, 1], [32, 32, 32], [33, 64, 40], [64, 64], [5, 0, 3], [0, 4, 4], [6, 5, 0]]


@pytest.mark.sampled
@pytest.mark.parametrize("widths", CHAINS, ids=str)
@pytest.mark.parametrize("rows", [45, 1, 0])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_widths_and_rows(widths, rows, activation, device):
    """Full and padded widths, one layer, one row, and nothing at all in each direction; no bias."""
    weights, biases = chain_of(widths, torch.float32, device, bias=False)
    x, dy = torch.randn(rows, widths[0], device=device), torch.randn(rows, widths[-1], device=device)
    assert_like_layers(x, weights, biases, dy, activation)


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_row_tile_and_any_number_of_programs(activation, dtype, device):
    """On integers, whose sums are exact in any order, every launch gives the same bits of everything."""
    weights, biases = chain_of([9, 5, 7], dtype, device, integer=True)
    x = torch.randint(-1, 2, (75, 9), device=device).to(dtype)
    dy = torch.randint(-1, 2, (75, 7), device=device).to(dtype)
    expected = layer_by_layer(x, weights, biases, dy, activation, double=True)
    for block_m, programs in [(16, 1), (16, 3), (16, 5), (32, 2), (64, 7), (128, 1)]:
        ours = narrow(x, weights, biases, dy, activation, block_m=block_m, programs=programs)
        assert_equal({name: t.double() for name, t in ours.items()}, {name: expected[name].double() for name in ours})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_float32_for_any_number_of_programs(dtype, device):
    """y, dx and bits do not depend on the number of programs, dw and db only by float32 summation."""
    weights, biases = chain_of(WIDTHS, dtype, device)
    x, dy = torch.randn(150, 29, device=device).to(dtype), torch.randn(150, 21, device=device).to(dtype)
    runs = [narrow(x, weights, biases, dy, "gelu", block_m=32, programs=programs) for programs in (1, 2, 5)]
    for run in runs[1:]:
        for name, value in run.items():
            if name.startswith("d") and name != "dx":
                torch.testing.assert_close(value, runs[0][name], rtol=2e-6, atol=2e-5)
            else:
                assert torch.equal(value, runs[0][name]), name


def test_runs_are_equal(device, repeats):
    """The first call equals the others bit for bit (cherimoya#50, mamba#827)."""
    weights, biases = chain_of(WIDTHS, torch.float32, device)
    x, dy = torch.randn(40, 29, device=device), torch.randn(40, 21, device=device)
    first = narrow(x, weights, biases, dy, "relu", block_m=16)
    for _ in range(repeats):
        assert_equal(narrow(x, weights, biases, dy, "relu", block_m=16), first)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_strided_and_expanded(activation, device):
    """x and dy of any strides, stride 0 among them; x without a gradient changes nothing else."""
    weights, biases = chain_of(WIDTHS, torch.float32, device)
    wide = torch.randn(37, 60, device=device)
    for x, dy in [
        (wide[:, 3:32], wide[:, 7:28]),
        (wide.t().contiguous().t()[:, :29], wide[:, ::2][:, :21]),
        (wide[:, :29], wide.new_ones(1, 1).expand(37, 21)),
        (wide[:1, :29].expand(37, 29), wide[:1, :21].expand(37, 21)),
    ]:
        strided = narrow(x, weights, biases, dy, activation)
        assert_equal(strided, narrow(x.contiguous(), weights, biases, dy.contiguous(), activation))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_dx_is_made_only_where_wanted(activation, device, interpreted):
    weights, biases = chain_of(WIDTHS, torch.float32, device)
    x, dy = torch.randn(20, 29, device=device), torch.randn(20, 21, device=device)
    packed = pack_stack(weights, biases, 32 if interpreted else stack_width(x, WIDTHS), x.dtype)
    _, bits = stack_fwd(x, *packed, 21, activation, "ieee", save_bits=activation == "relu")
    _, dw, db = stack_bwd(x, *packed, dy, bits, activation, "ieee")
    none, dw_alone, db_alone = stack_bwd(x, *packed, dy, bits, activation, "ieee", dx=False)
    assert none is None
    assert torch.equal(dw_alone, dw)
    assert torch.equal(db_alone, db)


@pytest.mark.parametrize("activation", ["relu", "identity"])
def test_rows_beyond_the_last_add_nothing(activation, device):
    """The chain of an absent row starts at 0 and may overflow where no real row does: 0 times inf is NaN in dw."""
    weights = [torch.ones(1, 1, device=device, dtype=torch.float16)] * 3
    biases = [torch.full((1,), 60000.0, device=device, dtype=torch.float16), *[weights[0].new_full((1,), 6000.0)] * 2]
    x = torch.full((5, 1), -59000.0, device=device, dtype=torch.float16)
    ours = assert_like_layers(x, weights, biases, torch.ones_like(x), activation)
    assert all(t.isfinite().all() for t in ours.values())


def test_nan_passes_relu(device):
    weights, biases = chain_of([4, 4, 4], torch.float32, device)
    x, dy = torch.randn(3, 4, device=device), torch.ones(3, 4, device=device)
    x[1] = float("nan")
    ours, expected = (way(x, weights, biases, dy, "relu") for way in (narrow, layer_by_layer))
    assert ours["y"][1].isnan().all()
    for name in ("y", "dx"):
        assert torch.equal(ours[name].isnan(), expected[name].isnan())
    assert torch.equal(eager.unpack_bits(ours["bits"], 4), eager.unpack_bits(expected["bits"], 4))


@pytest.mark.parametrize(
    ("arch", "narrow"), [(INTERPRETER, 32), (80, 32), (90, 64)]
)  # sm_90 wants dot dimensions of 64
def test_stack_width(arch, narrow, monkeypatch):
    monkeypatch.setattr(triton_kernels.stack, "arch_of", lambda x: arch)
    x = torch.empty(1, 1)
    assert stack_width(x, [3, 32, 1]) == narrow
    assert stack_width(x, [3, 33, 1]) == 64
    assert stack_width(x, [64, 64]) == 64
    assert stack_width(x, [65, 2]) is None


def test_pack_stack_casts_and_pads_with_zeros():
    weights, biases = chain_of([3, 5, 2], torch.float32)
    packed, packed_b = pack_stack(weights, biases, 32, torch.bfloat16)
    assert packed.shape == (2, 32, 32)
    assert packed_b.shape == (2, 32)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        assert torch.equal(packed[i, : w.shape[0], : w.shape[1]], w.bfloat16())
        assert torch.equal(packed_b[i, : b.shape[0]], b.bfloat16())
    assert packed.count_nonzero() == sum(w.numel() for w in weights)
    assert packed_b.count_nonzero() == sum(b.numel() for b in biases)
