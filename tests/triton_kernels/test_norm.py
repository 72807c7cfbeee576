"""LayerNorm and RMSNorm kernels against their eager references and float64, and the bits that a recomputation leans on."""

import itertools

import pytest
import torch
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, assert_equal, check_results

from ckptkern import eager
from ckptkern.triton_kernels import norm

EPS = 1e-5
each_kind = pytest.mark.parametrize("kind", ["layer", "rms"])


def inputs(M, D, dtype, device="cpu", shift=0.5):
    """x, addend, residual, dxn [M, D], weight and bias [D], x with a mean of `shift`."""
    x, addend, residual, dxn = (torch.randn(M, D) for _ in range(4))
    weight, bias = 1 + torch.randn(D) / 2, torch.randn(D)
    named = {"x": x + shift, "addend": addend, "residual": residual, "dxn": dxn, "weight": weight, "bias": bias}
    return {name: t.to(device, dtype) for name, t in named.items()}


def forward(backend, t, kind, out_dtype=None, eps=EPS, **options):
    out_dtype = out_dtype or t["x"].dtype
    results = backend.norm_fwd(t["x"], t.get("weight"), t.get("bias"), eps, kind, out_dtype, **options)
    return dict(zip(("xn", "sum"), results, strict=True)) if options.get("keep_sum") else {"xn": results}


def backward(backend, t, kind, eps=EPS, **options):
    """Every result by name; all of them unless options say otherwise."""
    options = {"residual": t.get("residual"), "need_dweight": True, "need_dbias": True} | options
    results = backend.norm_bwd(t["dxn"], t["x"], t.get("weight"), eps, kind, **options)
    return {name: r for name, r in zip(("dx", "dweight", "dbias"), results, strict=True) if r is not None}


def upcast(t):
    return {name: one.double() for name, one in t.items()}


def both(backend, t, kind, out_dtype=None, eps=EPS):
    return forward(backend, t, kind, out_dtype, eps) | backward(backend, t, kind, eps)


def assert_like_eager(draw, kind, out_dtype=None, eps=EPS):
    def results():
        t = draw()
        return (
            both(norm, t, kind, out_dtype, eps),
            both(eager, t, kind, out_dtype, eps),
            both(eager, upcast(t), kind, eps=eps),
        )

    check_results(results)


# rows [M, D]: padding in both directions, several tiles for each of the interpreter's three programs and the last one
# not full, rows alone in a tile, one row, no row, no feature (attention-gym#260, mamba#387)
SHAPES = [(600, 1), (300, 40), (90, 96), (9, 1000), (4, 4096), (7, 4100), (0, 40), (1, 1), (1, 40), (5, 0), (0, 0)]


# dtypes of x, of weight and bias, of gradients: float32 weights under 16-bit rows, a float32 residual stream
MIXED = [(dtype,) * 3 for dtype in DTYPES] + [
    (torch.float32, torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float16, torch.float32, torch.float32), (torch.float32, torch.bfloat16, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("case", pairwise(shape=SHAPES, dtypes=MIXED, kind=("layer", "rms")))
def test_like_eager(case, device):
    x, weight, grad = case["dtypes"]
    dtypes = {"x": x, "residual": x, "weight": weight, "bias": weight, "dxn": grad}

    def draw():
        t = inputs(*case["shape"], torch.float32, device)
        return {name: t[name].to(dtype) for name, dtype in dtypes.items()}

    assert_like_eager(draw, case["kind"], out_dtype=grad)


@each_kind
def test_sums_outside_of_registers_over_several_tiles(kind, device, architecture):
    """Rows too long for sums in registers, and several tiles for each program, which then adds to what it has written."""
    if architecture is not None:
        pytest.skip("some hundred rows of this length take the emulator minutes")
    t = inputs(600 if device == "cuda" else 7, 9000, torch.bfloat16, device)
    tile = norm.row_tile(t["x"])
    assert not tile.HELD
    assert len(t["x"]) // tile.BLOCK_M >= 2 * norm.programs(norm.arch_of(t["x"]), tile.num_warps)
    assert_like_eager(lambda: inputs(*t["x"].shape, torch.bfloat16, device), kind)


@each_kind
@pytest.mark.parametrize("D", [40, 9000])
def test_optional_arguments(D, kind, device):
    """Without weight, bias and residual the kernels do what they do with ones and zeros; results keep their bits."""
    t = inputs(5, D, torch.bfloat16, device)
    bare = {name: t[name] for name in ("x", "dxn")}
    neutral = bare | {"weight": torch.ones_like(t["weight"]), "bias": torch.zeros_like(t["bias"])}
    assert_equal(forward(norm, bare, kind), forward(norm, neutral, kind))
    everything = backward(norm, bare, kind)
    assert_equal(everything, backward(norm, neutral | {"residual": torch.zeros_like(t["x"])}, kind))
    for need_dweight, need_dbias in itertools.product((False, True), repeat=2):
        some = backward(norm, bare, kind, need_dweight=need_dweight, need_dbias=need_dbias)
        assert_equal(some, {name: everything[name] for name in some})
        assert ("dweight" in some, "dbias" in some) == (need_dweight, need_dbias)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_addend(dtype, kind, device):
    """The norm of a sum is that of the rounded sum, which backward can be given: bit by bit."""
    t = inputs(70, 96, dtype, device)
    addend = t["addend"].float()
    ours = forward(norm, t, kind, addend=addend, keep_sum=True)
    assert torch.equal(ours["sum"], (t["x"].float() + addend).to(dtype))
    assert torch.equal(forward(eager, t, kind, addend=addend, keep_sum=True)["sum"], ours["sum"])
    assert_equal({"xn": ours["xn"]}, forward(norm, t | {"x": ours["sum"]}, kind))
    assert_equal({"xn": ours["xn"]}, forward(norm, t, kind, addend=addend))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [norm, eager], ids=["triton", "eager"])
def test_one_rounding(backend, dtype, kind, device):
    """16-bit results are the float32 ones rounded, which a rounding on the way would move in every fourth element.

    One in a hundred is granted: on a GPU float32 rows may lie in another layout, whose sums differ in the last bit.
    """
    t = inputs(37, 40, dtype, device)
    ours, unrounded = (both(backend, one, kind) for one in (t, {name: one.float() for name, one in t.items()}))
    for name in ("xn", "dx"):
        assert (ours[name] != unrounded[name].to(dtype)).float().mean() < 0.01, name


@each_kind
@pytest.mark.parametrize(
    ("dtype", "M", "D"), [(torch.bfloat16, 150, 40), (torch.float32, 5, 1000), (torch.float16, 4, 9000)]
)
def test_backward_recomputes_the_bits_of_forward(dtype, M, D, kind, device):
    """With dxn one in row m and zero elsewhere dweight is h[m], which forward gives without weight and bias."""
    t = inputs(M, D, dtype, device)
    h = norm.norm_fwd(t["x"], None, None, EPS, kind, torch.float32)
    for m in (0, M // 2, M - 1):
        dxn = torch.zeros_like(t["x"])
        dxn[m] = 1
        _, dweight, dbias = norm.norm_bwd(dxn, t["x"], None, EPS, kind, need_dweight=True, need_dbias=True)
        assert torch.equal(dweight, h[m])
        assert torch.equal(dbias, torch.ones_like(dbias))


@each_kind
def test_rows_do_not_depend_on_chunks(kind, device):
    """xn and dx of a row are the same bits in any chunk of rows: chunks of a workspace need that."""
    t = inputs(150, 40, torch.bfloat16, device)
    chunk = {name: one[37:101] if one.dim() == 2 else one for name, one in t.items()}
    ours, whole = both(norm, chunk, kind), both(norm, t, kind)
    assert_equal({name: ours[name] for name in ("xn", "dx")}, {name: whole[name][37:101] for name in ("xn", "dx")})


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
@each_kind
def test_padding_of_a_tile_gives_no_nan(kind, device):
    """eps = 0: a padded row has no variance, and 0 * inf would reach the sums of the real rows."""
    assert_like_eager(lambda: inputs(9, 40, torch.float32, device), kind, eps=0.0)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
@each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(value, kind, device):
    t = inputs(9, 40, torch.float32, device)
    bad, others = t | {"x": t["x"].clone()}, [m for m in range(9) if m != 4]
    bad["x"][4, 7] = value
    ours, expected = both(norm, bad, kind), both(norm, t, kind)
    for name in ("xn", "dx"):
        assert torch.equal(ours[name][others], expected[name][others]), name
    assert torch.equal(ours["xn"].isnan(), forward(eager, bad, kind)["xn"].isnan())


@each_kind
@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 1e3), (torch.float16, 6e4)], ids=str)
def test_large_mean(dtype, shift, kind, device):
    """The variance is that of x - mean: E x^2 - mean^2 would lose all its digits. In fp16 x^2 would overflow."""
    assert_like_eager(lambda: inputs(9, 1000, dtype, device, shift=shift), kind)


@each_kind
@pytest.mark.parametrize("weighted", [True, False])
def test_eager_is_torch(kind, weighted):
    """The reference and its gradients are those of torch's own layer_norm and rms_norm; with residual r, dx is that of
    xn . dxn + x . r."""
    t = upcast(inputs(9, 40, torch.float32))
    t |= {} if weighted else {"weight": None}
    t |= {} if kind == "layer" else {"bias": None}
    leaves = [one.requires_grad_() for name in ("x", "weight", "bias") if (one := t[name]) is not None]
    if kind == "layer":
        xn = torch.nn.functional.layer_norm(t["x"], (40,), t["weight"], t["bias"], EPS)
    else:
        xn = torch.nn.functional.rms_norm(t["x"], (40,), t["weight"], EPS)
    exact = torch.autograd.grad((xn * t["dxn"] + t["x"] * t["residual"]).sum(), leaves)
    t = {name: one if one is None else one.detach() for name, one in t.items()}
    torch.testing.assert_close(forward(eager, t, kind)["xn"], xn.detach(), rtol=1e-12, atol=1e-12)
    ours = backward(eager, t, kind, need_dweight=weighted, need_dbias=kind == "layer")
    torch.testing.assert_close(tuple(ours.values()), exact, rtol=1e-11, atol=1e-11)
