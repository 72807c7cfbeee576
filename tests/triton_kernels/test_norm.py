"""LayerNorm and RMSNorm kernels against their eager references and float64, and the bits that a recomputation leans on."""

import itertools

import pytest
import torch
from support.cases import every_other, padded_rows, transposed
from support.kernel_cases import DTYPES, SUMS_OF_ROWS, assert_accurate, assert_equal, far_apart

from ckptkern import eager
from ckptkern.triton_kernels import norm

KINDS = ("layer", "rms")
EPS = 1e-5
# rows [M, D]: padding in both directions, several tiles for each of the interpreter's three programs and the last one
# not full, and rows alone in a tile
SHAPES = [(600, 1), (300, 3), (300, 40), (90, 96), (9, 1000), (4, 4096), (7, 4100)]


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


def assert_like_eager(t, kind, out_dtype=None, eps=EPS):
    assert_accurate(
        forward(norm, t, kind, out_dtype, eps),
        forward(eager, t, kind, out_dtype, eps),
        forward(eager, upcast(t), kind, eps=eps),
    )
    ours, reference = backward(norm, t, kind, eps), backward(eager, t, kind, eps)
    exact = backward(eager, upcast(t), kind, eps)
    assert_accurate({"dx": ours.pop("dx")}, {"dx": reference.pop("dx")}, {"dx": exact.pop("dx")})
    # A sum of M terms may be smaller than they are by cancellation: one float32 rounding of the terms' size is granted.
    terms = {"dweight": norm_of_rows(t["x"].double(), kind, eps) * t["dxn"].double(), "dbias": t["dxn"].double()}
    for name, value in ours.items():
        assert value.dtype == torch.float32
        bound = (
            2 * distance(reference[name], exact[name])
            + torch.finfo(torch.float32).eps * terms[name].abs().sum(0).norm()
        )
        assert distance(value, exact[name]) <= bound, name


def distance(value, reference):
    return (value.double() - reference).norm()


def norm_of_rows(x, kind, eps):
    return eager.norm_fwd(x, None, None, eps, kind, x.dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "D"), SHAPES)
def test_against_eager(M, D, dtype, kind, device):
    assert_like_eager(inputs(M, D, dtype, device), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_outside_of_registers_over_several_tiles(dtype, kind, device, architecture):
    """Rows too long for sums in registers, and several tiles for each program, which then adds to what it has written."""
    if architecture is not None:
        pytest.skip("some hundred rows of this length take the emulator minutes")
    t = inputs(600 if device == "cuda" else 7, 9000, dtype, device)
    tile = norm.row_tile(t["x"])
    assert not tile.HELD
    assert len(t["x"]) // tile.BLOCK_M >= 2 * norm.programs(norm.arch_of(t["x"]), tile.num_warps)
    assert_like_eager(t, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("M", "D"), [(0, 40), (1, 1), (1, 40), (5, 0), (0, 0)])
def test_few_rows_or_none(M, D, kind, device):
    """Empty batches, sizes of one, features of zero (attention-gym#260, mamba#387)."""
    assert_like_eager(inputs(M, D, torch.float32, device), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "weight", "grad"),
    [t for t in itertools.product((torch.float32, torch.bfloat16), repeat=3) if len(set(t)) > 1]
    + [(torch.float16, torch.float32, torch.float16), (torch.float16, torch.float32, torch.float32)],
    ids=str,
)
def test_mixed_dtypes(x, weight, grad, kind, device):
    """float32 weights under 16-bit rows, a float32 residual stream with 16-bit matmuls around it."""
    t = inputs(9, 40, torch.float32, device)
    kinds = {"x": x, "residual": x, "weight": weight, "bias": weight, "dxn": grad, "addend": grad}
    assert_like_eager({name: t[name].to(dtype) for name, dtype in kinds.items()}, kind, out_dtype=grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [40, 4100, 9000])
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addend(dtype, kind, device):
    """The norm of a sum is that of the rounded sum, which backward can be given: bit by bit."""
    t = inputs(70, 96, dtype, device)
    t["addend"] = t["addend"].float()
    ours = forward(norm, t, kind, addend=t["addend"], keep_sum=True)
    assert torch.equal(ours["sum"], (t["x"].float() + t["addend"]).to(dtype))
    assert_equal({"xn": ours["xn"]}, forward(norm, t | {"x": ours["sum"]}, kind))
    assert_equal({"xn": ours["xn"]}, forward(norm, t, kind, addend=t["addend"]))
    reference = forward(eager, t, kind, addend=t["addend"], keep_sum=True)
    assert torch.equal(reference["sum"], ours["sum"])
    exact = forward(eager, upcast(t) | {"x": ours["sum"].double()}, kind)
    assert_accurate({"xn": ours["xn"]}, {"xn": reference["xn"]}, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [norm, eager], ids=["triton", "eager"])
def test_one_rounding(backend, dtype, kind, device):
    """16-bit results are the float32 ones rounded, which a rounding on the way would move in every fourth element.

    One in a hundred is granted: on a GPU float32 rows may lie in another layout, whose sums differ in the last bit.
    """
    t = inputs(37, 40, dtype, device)
    wide = {name: one.float() for name, one in t.items()}
    pairs = [
        (forward(backend, t, kind)["xn"], forward(backend, wide, kind)["xn"]),
        (backward(backend, t, kind)["dx"], backward(backend, wide, kind)["dx"]),
    ]
    for ours, unrounded in pairs:
        assert (ours != unrounded.to(dtype)).float().mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "D"), [(150, 40), (5, 1000), (4, 9000)])
def test_backward_recomputes_the_bits_of_forward(M, D, dtype, kind, device):
    """With dxn one in row m and zero elsewhere dweight is h[m], which forward gives without weight and bias."""
    t = inputs(M, D, dtype, device)
    h = norm.norm_fwd(t["x"], None, None, EPS, kind, torch.float32)
    for m in (0, M // 2, M - 1):
        dxn = torch.zeros_like(t["x"])
        dxn[m] = 1
        _, dweight, dbias = norm.norm_bwd(dxn, t["x"], None, EPS, kind, need_dweight=True, need_dbias=True)
        assert torch.equal(dweight, h[m])
        assert torch.equal(dbias, torch.ones_like(dbias))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_chunks(kind, device):
    """xn and dx of a row are the same bits in any chunk of rows: chunks of a workspace need that."""
    t = inputs(150, 40, torch.bfloat16, device)
    chunk = {name: one[37:101] if one.dim() == 2 else one for name, one in t.items()}
    assert_equal(forward(norm, chunk, kind), {"xn": forward(norm, t, kind)["xn"][37:101]})
    assert torch.equal(backward(norm, chunk, kind)["dx"], backward(norm, t, kind)["dx"][37:101])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [40, 9000])
def test_runs_are_equal(D, kind, device, repeats):
    """The first call equals the others bit for bit (cherimoya#50, mamba#827)."""
    t = inputs(150 if D == 40 else 4, D, torch.float32, device)
    first = forward(norm, t, kind) | backward(norm, t, kind)
    for _ in range(repeats):
        assert_equal(forward(norm, t, kind) | backward(norm, t, kind), first)


@pytest.mark.parametrize("layout", [transposed, padded_rows, every_other], ids=lambda f: f.__name__)
def test_strides(layout, device):
    """Any strides of any input give the bits of contiguous ones, and no input is written."""
    t = inputs(37, 40, torch.bfloat16, device)
    strided = {name: layout(one) if one.dim() == 2 or layout is every_other else one for name, one in t.items()}
    assert any(not one.is_contiguous() for one in strided.values())
    before = {name: one.clone() for name, one in strided.items()}

    def everything(t):
        return forward(norm, t, "layer", addend=t["addend"], keep_sum=True) | backward(norm, t, "layer")

    assert_equal(everything(strided), everything(t))
    assert_equal(strided, before)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_expanded_gradient(dims, device):
    """A gradient from .sum() has strides (0, 0)."""
    t = inputs(37, 40, torch.float32, device)
    full = t["dxn"]
    for dim in dims:
        full = full.narrow(dim, 0, 1)
    full = full.expand(37, 40)
    expanded, dense = (backward(norm, t | {"dxn": dxn}, "rms") for dxn in (full, full.contiguous()))
    assert_equal(expanded, dense, {"dx", *SUMS_OF_ROWS})


def test_offsets_beyond_int32(device):
    """The third row starts more than 2**31 elements after the first."""
    t = inputs(3, 40, torch.bfloat16, device)
    apart = {name: far_apart(one) if one.dim() == 2 else one for name, one in t.items()}
    assert_equal(forward(norm, apart, "layer"), forward(norm, t, "layer"))
    assert_equal(backward(norm, apart, "layer"), backward(norm, t, "layer"), SUMS_OF_ROWS)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_a_tile_gives_no_nan(kind, device):
    """eps = 0: a padded row has no variance, and 0 * inf would reach the sums of the real rows."""
    assert_like_eager(inputs(9, 40, torch.float32, device), kind, eps=0.0)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(value, kind, device):
    t = inputs(9, 40, torch.float32, device)
    bad = t | {"x": t["x"].clone()}
    bad["x"][4, 7] = value
    others = [m for m in range(9) if m != 4]
    ours, dx = forward(norm, bad, kind)["xn"], backward(norm, bad, kind)["dx"]
    assert torch.equal(ours[others], forward(norm, t, kind)["xn"][others])
    assert torch.equal(dx[others], backward(norm, t, kind)["dx"][others])
    reference = forward(eager, bad, kind)["xn"]
    assert torch.equal(ours.isnan(), reference.isnan())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 1e3), (torch.float16, 6e4)], ids=str)
def test_large_mean(dtype, shift, kind, device):
    """The variance is that of x - mean: E x^2 - mean^2 would lose all its digits. In fp16 x^2 would overflow."""
    assert_like_eager(inputs(9, 1000, dtype, device, shift=shift), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_gradients(kind):
    """The eager pair is forward and its derivative, in float64; with residual r, dx is that of xn . dxn + x . r."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, residual):
            ctx.save_for_backward(x, weight, residual)
            return eager.norm_fwd(x, weight, bias, EPS, kind, x.dtype), (x * residual).sum()

        @staticmethod
        def backward(ctx, dxn, dsum):
            x, weight, residual = ctx.saved_tensors
            dx, dweight, dbias = eager.norm_bwd(
                dxn, x, weight, EPS, kind, residual=residual * dsum, need_dweight=weight is not None, need_dbias=True
            )
            return dx, dweight, dbias, None

    t = upcast(inputs(4, 7, torch.float32))
    for weight in (t["weight"].requires_grad_(), None):
        leaves = (t["x"].requires_grad_(), weight, t["bias"].requires_grad_(), t["residual"])
        assert torch.autograd.gradcheck(Norm.apply, leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_is_torch(dtype):
    """The reference is torch's own layer_norm and rms_norm, and dx under autograd the same to a rounding."""
    t = inputs(9, 40, dtype)
    x = t["x"].requires_grad_()
    expected = {
        "layer": torch.nn.functional.layer_norm(x, (40,), t["weight"], t["bias"], EPS),
        "rms": torch.nn.functional.rms_norm(x, (40,), t["weight"], EPS),
    }
    for kind, xn in expected.items():
        t["bias"] = t["bias"] if kind == "layer" else None
        exact = forward(eager, {name: one.detach().double() for name, one in t.items() if one is not None}, kind)
        assert_accurate(forward(eager, t | {"x": x.detach()}, kind), {"xn": xn}, exact)
        (dx,) = torch.autograd.grad(xn, x, t["dxn"])
        wide = upcast({name: one.detach() for name, one in t.items() if one is not None})
        ours = backward(eager, {**t, "x": x.detach()}, kind, residual=None)
        reference = backward(eager, wide, kind, residual=None)
        assert_accurate({"dx": ours["dx"]}, {"dx": dx}, {"dx": reference["dx"]})
