"""Norms of rows, and of heads with their rotary embedding: against eager PyTorch and float64; the bits that a recomputation
leans on; in place."""

from collections.abc import Callable

import pytest
import torch
from support.cases import every_other
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, assert_equal, check_results

from ckptkern import eager
from ckptkern.benchmarks.compiling import instead_of_launches
from ckptkern.triton_kernels import norm, rotary

EPS = 1e-5
BF16 = torch.bfloat16
BACKENDS = ["triton", "eager"]
# A norm of rows; of heads: none; of one weight, or of one for each head. A layer norm has a bias, too.
ROWS = ("layer", "rms")
HEADS = ("none", "rms", "rms own rows", "layer", "layer own rows")
each_kind = pytest.mark.parametrize("kind", ROWS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
quiet = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter


class Rows:
    """norm_fwd and norm_bwd; M x D rows with a mean of `shift`, and a residual like them."""

    SHAPE, ROW, CHUNK = (37, 40), (4,), (slice(5, 29),)
    LONG = (150, 40), (5, 9000)

    def inputs(self, shape, dtype, device="cpu", kind="layer", shift=0.5):
        weight, bias = 1 + torch.randn(shape[-1]) / 2, torch.randn(shape[-1])
        t = {name: torch.randn(shape) for name in ("x", "residual", "dy")} | {"weight": weight, "bias": bias}
        t["x"] += shift
        return {name: tensor.to(device, dtype) for name, tensor in t.items()} | {"kind": kind}

    def forward(self, backend, t, eps=EPS, out_dtype=None, **options):
        backend = norm if backend == "triton" else eager
        out_dtype = out_dtype or t["x"].dtype
        return backend.norm_fwd(t["x"], t.get("weight"), t.get("bias"), eps, t["kind"], out_dtype, **options)

    def backward(self, backend, t, eps=EPS, **options):
        """Every result by name; all of them unless options say otherwise."""
        backend = norm if backend == "triton" else eager
        options = {"residual": t.get("residual"), "need_dweight": True, "need_dbias": True} | options
        results = backend.norm_bwd(t["dy"], t["x"], t.get("weight"), eps, t["kind"], **options)
        return {name: r for name, r in zip(("dx", "dweight", "dbias"), results, strict=True) if r is not None}


class Heads:
    """heads_fwd and heads_bwd of [B, S, H, D], of which R elements turn; cos and sin differ in every element, unlike a model's:
    each must be read where it belongs."""

    SHAPE, ROW, CHUNK = (2, 19, 11, 40, 24), (1, 2, 1), (slice(1, None), slice(5, 17), slice(2, None))
    LONG = SHAPE, (2, 19, 11, 40, 0)

    def inputs(self, shape, dtype, device="cpu", kind="rms", interleaved=False):
        B, S, H, D, R = shape
        rows = (H, D) if "own" in kind else (D,)
        t = {name: torch.randn(B, S, H, D).to(dtype) for name in ("dy", "x")}
        t |= {} if kind == "none" else {"weight": (1 + torch.randn(rows) / 2).to(dtype)}
        t |= {"bias": torch.randn(rows).to(dtype)} if "layer" in kind else {}
        t |= {name: torch.randn(B, S, R) for name in ("cos", "sin")} if R else {}
        return {name: tensor.to(device) for name, tensor in t.items()} | {"interleaved": interleaved}

    def forward(self, backend, t, eps=EPS, out_dtype=None, **options):
        backend, kind = rotary if backend == "triton" else eager, "layer" if "bias" in t else "rms"
        arguments = t["x"], t.get("weight"), eps, t.get("cos"), t.get("sin"), t["interleaved"]
        return backend.heads_fwd(*arguments, bias=t.get("bias"), kind=kind, **options)

    def backward(self, backend, t, eps=EPS, **options):
        backend, kind = rotary if backend == "triton" else eager, "layer" if "bias" in t else "rms"
        arguments = t["dy"], t["x"], t.get("weight"), eps, t.get("cos"), t.get("sin"), t["interleaved"]
        options = {"need_dweight": "weight" in t, "need_dbias": "bias" in t} | options
        results = backend.heads_bwd(*arguments, kind=kind, **options)
        return {
            name: tensor
            for name, tensor in zip(("dx", "dweight", "dbias"), results, strict=False)
            if tensor is not None
        }


rows, heads = Rows(), Heads()
EACH = [pytest.param(rows, kind, id=f"rows-{kind}") for kind in ROWS]
EACH += [pytest.param(heads, kind, id=f"heads-{kind}") for kind in ("rms", "layer own rows")]
each = pytest.mark.parametrize(("of", "kind"), EACH)


def changed(t: dict, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    return {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in t.items()}


def both(of, backend, t, eps=EPS, out_dtype=None):
    return {"y": of.forward(backend, t, eps, out_dtype)} | of.backward(backend, t, eps)


def assert_like_eager(of, draw, eps=EPS, out_dtype=None):
    def results():
        t = draw()
        ours, eagers = (both(of, backend, t, eps, out_dtype) for backend in BACKENDS)
        return ours, eagers, both(of, "eager", changed(t, torch.Tensor.double), eps)

    check_results(results, slack=2e-7)


# -- like eager ---------------------------------------------------------------------------------------------------------

# rows [M, D]: padding in both directions, several tiles for each of the interpreter's three programs and the last one
# not full, rows alone in a tile, one row, no row, no feature (attention-gym#260, mamba#387)
SHAPES = [(600, 1), (300, 40), (90, 96), (9, 1000), (4, 4096), (7, 4100), (0, 40), (1, 1), (1, 40), (5, 0), (0, 0)]
# (B, S, H, D, R): more tokens than a tile has and more heads than a program, with a part left over; nothing, a part and
# all of a row turns; odd sizes; rows longer than a head ever is; nothing at all
SHAPES_OF_HEADS = [
    (2, 19, 11, 96, 96), (1, 37, 2, 40, 24), (2, 3, 3, 40, 40), (3, 7, 9, 40, 0), (1, 5, 2, 3, 2), (2, 5, 1, 1, 0),
    (1, 3, 2, 1000, 1000), (1, 2, 1, 4100, 4096), (0, 5, 3, 40, 24), (2, 0, 3, 40, 24), (2, 5, 0, 40, 24), (2, 5, 3, 0, 0),
]  # fmt: skip
# dtypes of x, of parameters and angles, of gradients: float32 weights under 16-bit rows, a float32 residual stream
MIXED = [(dtype,) * 3 for dtype in DTYPES] + [
    (torch.float32, torch.float32, BF16),
    (BF16, torch.float32, BF16),
    (torch.float16, torch.float32, torch.float32),
    (torch.float32, BF16, torch.float32),
]


def of_dtypes(t: dict, x: torch.dtype, rest: torch.dtype, grad: torch.dtype) -> dict:
    dtypes = dict.fromkeys(("x", "residual"), x) | {"dy": grad}
    return {
        name: value.to(dtypes.get(name, rest)) if isinstance(value, torch.Tensor) else value
        for name, value in t.items()
    }


@pytest.mark.parametrize("case", pairwise(shape=SHAPES, dtypes=MIXED, kind=ROWS))
def test_rows_like_eager(case, device):
    def draw():
        return of_dtypes(rows.inputs(case["shape"], torch.float32, device, case["kind"]), *case["dtypes"])

    assert_like_eager(rows, draw, out_dtype=case["dtypes"][-1])


@pytest.mark.parametrize("case", pairwise(shape=SHAPES_OF_HEADS, dtypes=MIXED, interleaved=(False, True), kind=HEADS))
def test_heads_like_eager(case, device):
    def draw():
        x, rest, _ = case["dtypes"]
        t = heads.inputs(case["shape"], torch.float32, device, case["kind"], case["interleaved"])
        return of_dtypes(t, x, rest, x)

    assert_like_eager(heads, draw)


@each_kind
def test_sums_outside_of_registers_over_several_tiles(kind, device, architecture):
    """Rows too long for sums in registers, and several tiles for each program, which then adds to what it has written."""
    if architecture is not None:
        pytest.skip("some hundred rows of this length take the emulator minutes")
    shape = 600 if device == "cuda" else 7, 9000
    x = rows.inputs(shape, BF16, device)["x"]
    tile = norm.row_tile(x)
    assert not tile.HELD
    assert len(x) // tile.BLOCK_M >= 2 * norm.programs(norm.arch_of(x), tile.num_warps)
    assert_like_eager(rows, lambda: rows.inputs(shape, BF16, device, kind))


@each_kind
@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 1e3), (torch.float16, 6e4)], ids=str)
def test_large_mean(dtype, shift, kind, device):
    """The variance is that of x - mean: E x^2 - mean^2 would lose all its digits. In fp16 x^2 would overflow."""
    assert_like_eager(rows, lambda: rows.inputs((9, 1000), dtype, device, kind, shift))


@quiet
@each
def test_padding_of_a_tile_gives_no_nan(of, kind, device):
    """eps = 0: a padded row has no variance, and 0 * inf would reach the sums of the real rows."""
    shape = (9, 40) if of is rows else (1, 5, 2, 40, 24)
    assert_like_eager(of, lambda: of.inputs(shape, torch.float32, device, kind), eps=0.0)


@quiet
@each
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(value, of, kind, device):
    t = of.inputs(of.SHAPE, torch.float32, device, kind)
    bad = t | {"x": t["x"].clone()}
    bad["x"][(*of.ROW, 7)] = value
    ours, expected = both(of, "triton", bad), both(of, "triton", t)
    for name in ("y", "dx"):
        good = (ours[name] == expected[name]).all(-1)
        good[of.ROW] = True
        assert good.all(), name
    assert torch.equal(ours["y"].isnan(), of.forward("eager", bad).isnan())


# -- bits ---------------------------------------------------------------------------------------------------------------


@each
@each_backend
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_one_rounding(dtype, backend, of, kind, device):
    """16-bit results are the float32 ones rounded, which a rounding on the way would move in every fourth element.

    One in a hundred is granted: on a GPU float32 rows may lie in another layout, whose sums differ in the last bit.
    """
    t = of.inputs(of.SHAPE, dtype, device, kind)
    ours, unrounded = both(of, backend, t), both(of, backend, changed(t, torch.Tensor.float))
    for name in ("y", "dx"):
        assert (ours[name] != unrounded[name].to(dtype)).float().mean() < 0.01, name


@each
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_backward_recomputes_the_bits_of_forward(dtype, of, kind, device):
    """With dy one in one row and zero elsewhere dweight is h of that row, which forward gives with a weight of ones."""
    for shape in of.LONG:
        t = of.inputs(shape, dtype, device, kind.removesuffix(" own rows"))
        neutral = {"weight": torch.ones, "bias": torch.zeros, "cos": torch.ones, "sin": torch.zeros}
        t |= {name: make(t[name].shape, device=device) for name, make in neutral.items() if name in t}
        out = {"out_dtype": torch.float32} if of is rows else {"out": torch.empty_like(t["x"], dtype=torch.float32)}
        h = of.forward("triton", t, **out)
        for row in ([0] * len(of.ROW), of.ROW, [-1] * len(of.ROW)):
            dy = torch.zeros_like(t["x"])
            dy[tuple(row)] = 1
            assert torch.equal(of.backward("triton", t | {"dy": dy})["dweight"], h[tuple(row)])


@each
def test_rows_do_not_depend_on_chunks(of, kind, device):
    """y and dx of a row are the same bits in any chunk of rows or heads, and whatever else is wanted: chunks of a workspace
    need that."""
    t = of.inputs(of.SHAPE, BF16, device, kind.removesuffix(" own rows"))
    chunk = changed(t, lambda tensor: tensor[of.CHUNK[: tensor.dim() - 1]] if tensor.dim() > 1 else tensor)
    whole = both(of, "triton", t)
    assert torch.equal(of.forward("triton", chunk), whole["y"][of.CHUNK])
    assert_equal(of.backward("triton", chunk, need_dweight=False, need_dbias=False), {"dx": whole["dx"][of.CHUNK]})


@each_kind
@pytest.mark.parametrize("D", [40, 9000])
def test_optional_arguments(D, kind, device):
    """Without weight, bias and residual the kernels do what they do with ones and zeros; results keep their bits."""
    t = rows.inputs((5, D), BF16, device, kind)
    bare = {name: t[name] for name in ("x", "dy", "kind")}
    neutral = bare | {"weight": torch.ones_like(t["weight"])}
    neutral |= {"bias": torch.zeros_like(t["bias"]), "residual": torch.zeros_like(t["x"])}
    expected = both(rows, "triton", neutral)
    assert_equal(both(rows, "triton", bare), expected)
    for name in ("dweight", "dbias"):
        some = rows.backward("triton", bare, **{f"need_{name}": False})
        assert_equal(some, {other: expected[other] for other in ("dx", "dweight", "dbias") if other != name})


# -- heads alone --------------------------------------------------------------------------------------------------------


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def one_for_all(x):
    return x[:1, :1, :1, :1].expand(x.shape)


@pytest.mark.parametrize("layout", [heads_first, every_other, one_for_all], ids=lambda f: f.__name__)
def test_strides(layout, device):
    """Strides that results which are written over inputs cannot have give the bits of contiguous inputs."""
    t = heads.inputs((2, 19, 3, 40, 24), BF16, device)
    strided = changed(t, lambda tensor: layout(tensor) if tensor.dim() == 4 else tensor)
    assert not strided["x"].is_contiguous()
    assert_equal(both(heads, "triton", strided), both(heads, "triton", changed(strided, torch.Tensor.contiguous)))


def test_angles_broadcast(device):
    """[S, R], [1, S, R], an expanded and a repeated [B, S, R] give the same bits."""
    t = heads.inputs((3, 7, 2, 40, 24), BF16, device)
    expected = both(heads, "triton", t | {name: t[name][0] for name in ("cos", "sin")})
    for lead, change in ((1, torch.clone), (3, torch.clone), (3, torch.Tensor.contiguous)):
        broadcast = {name: change(t[name][:1].expand(lead, 7, 24)) for name in ("cos", "sin")}
        assert_equal(both(heads, "triton", t | broadcast), expected)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
@each_backend
def test_in_place(backend, interleaved, device):
    """Over x and over dy, in a slice of a packed projection: the bits of a result of its own; nothing else written."""
    t = heads.inputs(heads.SHAPE, BF16, device, interleaved=interleaved)
    expected = both(heads, backend, t)
    for run, name, result in ((heads.forward, "x", "y"), (heads.backward, "x", "dx"), (heads.backward, "dy", "dx")):
        wide = torch.randn(2, 19, 15, 40, device=device).to(BF16)
        wide[:, :, 2:13] = t[name]
        after, over = wide.clone(), wide[:, :, 2:13]
        results = run(backend, t | {name: over}, out=over)
        after[:, :, 2:13] = expected[result]
        assert (results if result == "y" else results["dx"]) is over
        assert torch.equal(wide, after)


def test_out_of_another_shape_raises(device):
    t = heads.inputs((1, 5, 2, 40, 24), torch.float32, device)
    for out in (torch.empty(1, 5, 2, 41, device=device), torch.empty(1, 5, 2, 80, device=device)[..., ::2]):
        for run in (heads.forward, heads.backward):
            with pytest.raises(ValueError, match="out must have shape"):
                run("triton", t, out=out)


@pytest.mark.parametrize("weight", ["one", "of each head", "none"])
def test_sums_of_heads_have_a_partial_row_for_each_program(weight):
    """Of 16,384 tokens on sm_90. Every tile of tokens is a program where each head has a weight, or nothing is summed."""
    dy = torch.empty(2, 8192, 32, 128, dtype=BF16, device="meta")
    w = None if weight == "none" else torch.empty((128,) if weight == "one" else (32, 128), device="meta")
    grids = []
    with instead_of_launches(lambda kernel, grid, args, kwargs: grids.append(grid), 90):
        rotary.heads_bwd(dy, dy, w, EPS, None, None, need_dweight=w is not None)
    tiles, heads = 16384 // rotary.head_tile(128, 0).BLOCK_S, 32 // rotary.HEADS
    most = norm.programs(90, rotary.WARPS) if weight == "one" else tiles * heads
    assert 0.9 * most < grids[0][0] * grids[0][1] <= most
    assert grids[0][1] == heads
