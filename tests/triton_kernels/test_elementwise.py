"""Activations over the whole range of each dtype; relu's backward from z, y and bits."""

import math

import pytest
import torch
import triton
from support.cases import every_other
from support.kernel_cases import ACTIVATIONS, DTYPES

from ckptkern import eager, triton_kernels
from ckptkern.memory import peak_memory
from ckptkern.triton_kernels import elementwise
from ckptkern.triton_kernels.tile import Tile

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def values(dtype, device):
    """All 16-bit patterns of the dtype; of float32 as many, spread over all exponents."""
    low = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype is torch.float32:
        return (low << 16 | torch.randint(0, 2**16, low.shape).to(torch.int32)).view(dtype).to(device)
    return low.to(torch.int16).view(dtype).to(device)


def _gelu_cdf(z):
    return torch.special.erfc(-z * 0.5**0.5) / 2


def _tanh_gate(z):
    return torch.sigmoid((8 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))


# act(z) in float64, without the cancellation of 1 + erf and 1 + tanh; act'(z) is autograd's.
EXACT = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z) ** 2,
    "gelu": lambda z: z * _gelu_cdf(z),
    "gelu_tanh": lambda z: z * _tanh_gate(z),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": lambda z: z * torch.sigmoid(z),
    "identity": lambda z: z * 1,
}


def same(a, b):
    return (a == b) | (a.isnan() & b.isnan())


def assert_accurate_in_every_binade(ours, eagers, exact, z):
    """Twice eager's error at most, for the greatest error among all z of one sign and exponent, plus an ulp of the
    greatest result.

    Compiled, tl.exp rounds its argument times log2(e), which costs |z| half ulps of the result; PyTorch's exp does not.
    Where z or PyTorch's own result is NaN or infinite, ours is PyTorch's or the exact one.
    """
    finite = z.isfinite() & eagers.isfinite()
    assert (same(ours, eagers) | same(ours, exact.to(z.dtype)))[~finite].all()
    eps = torch.finfo(eagers.dtype).eps
    ours, eagers, exact, z = (t[finite].double() for t in (ours, eagers, exact, z))
    binade = torch.where(z == 0, 0, z.abs().log2().floor() + 200).long() + 400 * (z < 0)

    def greatest(values):
        return torch.zeros(800, dtype=torch.double, device=z.device).scatter_reduce_(0, binade, values.abs(), "amax")

    bound = 2 * greatest(eagers - exact) + greatest(exact) * eps
    if not triton.knobs.runtime.interpret:
        bound += 0.625 * greatest(exact * z) * eps
    worst = greatest(ours - exact)
    assert (worst <= bound).all(), f"errors of z near {z[((worst > bound)[binade])][:3].tolist()}"


@each_activation
@each_dtype
def test_whole_range(activation, dtype, device, interpreted):
    """act(z), act'(z) and relu's mask through the launchers: with K = 0 the pre-activation is the bias itself.

    ReLU's gradient is 0 at 0, and NaN passes through, as in torch.
    """
    z = values(dtype, device)
    nothing, dh = (z.new_empty(1, 0), z.new_empty(z.numel(), 0)), torch.ones_like(z)
    tile = {"tile": Tile(1, 65536, 1, 4, 1)} if interpreted else {}
    h, saved, bits = triton_kernels.linear_fwd(*nothing, z, activation, "ieee", save_z=True, save_bits=True, **tile)
    dz, _ = triton_kernels.linear_bwd(*nothing, z, dh[None], activation, "ieee", **tile)
    assert same(saved[0], z).all()
    assert torch.equal(bits, eager.pack_bits(~(z <= 0)[None]))
    exact, slope = exact_of(z, activation)
    assert_accurate_in_every_binade(h[0], eager.act(z, activation), exact, z)
    assert_accurate_in_every_binade(dz[0], eager.ACTIVATIONS[activation].grad(dh, z), slope, z)


each_16_bits = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def exact_of(z, activation):
    """(act(z), act'(z)) in float64."""
    wide = z.double().requires_grad_()
    exact = EXACT[activation](wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    return exact.detach(), slope


def act_and_slope(z, activation):
    """((ours, exact) of act(z), the same of act'(z)) of a vector z of 16-bit numbers; exact in float64."""
    rows = torch.nn.functional.pad(z, (0, -z.numel() % 128)).view(-1, 128)
    ours = triton_kernels.act_fwd(rows, None, activation)
    slopes, _ = triton_kernels.act_bwd(torch.ones_like(rows), rows, activation)
    return zip((t.view(-1)[: z.numel()] for t in (ours, slopes)), exact_of(z, activation), strict=True)


@each_activation
@each_16_bits
def test_the_short_formulas_round_as_exact_ones(activation, dtype, device):
    """The error is that of rounding the exact value to 16 bits: to a thousandth over all z in [-20, 20], and to a twentieth in
    each of its 40 parts, so that the left tail counts as well."""
    z = values(dtype, device)
    z = z[z.abs() <= 20]
    for ours, exact in act_and_slope(z, activation):
        error, ideal = (ours.double() - exact) ** 2, (exact.to(dtype).double() - exact) ** 2
        error, ideal = (torch.where(exact.abs() < 2.0**-120, 0, t) for t in (error, ideal))
        assert error.sum().sqrt() <= 1.001 * ideal.sum().sqrt()
        part = z.double().floor().long() + 20
        error, ideal = (
            torch.zeros(41, dtype=torch.double, device=device).index_add_(0, part, t) for t in (error, ideal)
        )
        assert (error.sqrt() <= 1.05 * ideal.sqrt()).all(), (error / ideal).sqrt().tolist()


@each_activation
@each_dtype
def test_the_forms_of_an_activation_agree(activation, dtype):
    """In place or not, act(z) and dy act'(z) have the same bits, in z's own dtype. In place, the result is the argument's
    memory, and at most `temporaries` more like it are allocated meanwhile."""
    z, dy = torch.randn(64, 33).to(dtype) * 3, torch.randn(64, 33).to(dtype)
    form, held = eager.ACTIVATIONS[activation], []
    for result, in_place, over, args in (
        (form.act(z), form.act_, z, ()),
        (form.grad(dy, z), form.grad_, dy, (z,)),
    ):
        over = over.clone()
        with peak_memory("cpu") as peak:
            written = in_place(over, *args)
        held.append(round(peak.bytes / over.nbytes))
        assert written.data_ptr() == over.data_ptr()
        assert result.dtype == dtype
        assert torch.equal(result, over)
    assert max(held) == form.temporaries, held


def test_rows_longer_than_65535_blocks(monkeypatch):
    """A grid's second dimension holds no more."""
    grids = []
    monkeypatch.setattr(elementwise, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    x, rng = torch.empty(1, 2**25, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    elementwise.dropout(x, rng, 6554, 1.1)
    elementwise.act_fwd(x, x, "silu")
    elementwise.act_bwd(x, x, "silu")
    assert len(grids) == 3
    assert all(size <= 65535 for grid in grids for size in grid[1:]), grids


SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40]


@each_dtype
@pytest.mark.parametrize("saved", ["z", "y", "bits"])
def test_relu_backward_of_special_values(dtype, saved, device):
    """Every dy meets every z: dy passes, NaN and infinities included, exactly where torch lets it pass.

    From z, from relu's own output (the tensor that the next layer saves) and from the 1-bit mask alike.
    """
    special = torch.tensor(SPECIAL, device=device).to(dtype)
    dy, z = (t.contiguous() for t in torch.meshgrid(special, special, indexing="ij"))
    expected = torch.autograd.grad(torch.relu(z.requires_grad_()), z, dy)[0]
    z = z.detach()
    operand = {"z": z, "y": torch.relu(z), "bits": eager.pack_bits(~(z <= 0))}[saved]
    dz, db = triton_kernels.act_bwd(dy, operand, "relu", bits=saved == "bits", db=True)
    assert torch.equal(dz.isnan(), expected.isnan())
    assert torch.equal(dz.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(db.isnan(), expected.float().sum(0).isnan())


SUMS = [
    ((65, 33), (torch.bfloat16, True)),
    ((130, 70), (True, torch.float16)),
    ((0, 5), (True,)),
    ((7, 3, 11), (True, True)),
]


@pytest.mark.parametrize(("shape", "wanted"), SUMS, ids=str)
def test_sums_of_rows_are_rounded_once(monkeypatch, shape, wanted, device):
    """One launch for all. Whole numbers of ten bits: float32 adds them exactly, and 16 bits do not hold one of them."""
    partials = [torch.randint(-1023, 1024, shape, device=device).float() for _ in wanted]
    launched, launch = [], elementwise.launch
    monkeypatch.setattr(elementwise, "launch", lambda *args, **options: launched.append(launch(*args, **options)))
    none, *ours = elementwise.row_sums((None, *partials), (False, *wanted))
    assert none is None
    assert len(launched) == 1
    for partial, dtype, total in zip(partials, wanted, ours, strict=True):
        expected = partial.double().sum(0).to(torch.float32 if dtype is True else dtype)
        assert total.dtype == expected.dtype
        assert torch.equal(total, expected)


@pytest.mark.parametrize("shape", [(1, 1), (37, 40), (33, 77), (0, 8), (5, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relus_bits(dtype, shape, device):
    """Those of z and of relu(z); NaN has passed and -0.0 has not; a row's last byte is filled with zeros."""
    z = torch.randn(shape, device=device).to(dtype)
    for place, value in enumerate((math.nan, -0.0, 0.0, math.inf, -math.inf)[: z.numel()]):
        z.view(-1)[place * 7 % z.numel()] = value
    expected = eager.pack_bits(~(z <= 0))
    for h in (z, torch.relu(z), every_other(z)):
        bits = triton_kernels.relu_bits(h)
        assert torch.equal(bits, expected)
        assert bits.dtype == torch.uint8
    dy = torch.randn(shape, device=device).to(dtype)
    assert torch.equal(triton_kernels.act_bwd(dy, expected, "relu", bits=True)[0], torch.where(z <= 0, 0, dy))
