"""Norm and rotary embedding of heads against the eager reference, float64 and the models' own formulas; in place; bits."""

import itertools

import pytest
import torch
from support.cases import every_other
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, assert_equal

from ckptkern import eager
from ckptkern.triton_kernels import rotary

EPS = 1e-6
# (B, S, H, D, R): more tokens than a tile has and more heads than a program, with a part left over; nothing, a part and
# all of a row turns; odd sizes; rows longer than a head ever is
SHAPES = [
    (2, 19, 11, 96, 96),
    (1, 37, 2, 40, 24),
    (2, 3, 3, 40, 40),
    (3, 7, 9, 40, 0),
    (1, 5, 2, 3, 2),
    (2, 5, 1, 1, 0),
    (1, 3, 2, 1000, 1000),
    (1, 2, 1, 4100, 4096),
]


def angles(B, S, R, device="cpu"):
    """cos and sin [B, S, R] that differ in every element, unlike a model's: each must be read where it belongs."""
    return (torch.randn(B, S, R, device=device), torch.randn(B, S, R, device=device)) if R else (None, None)


def inputs(B, S, H, D, R, dtype, device="cpu", weight=True):
    x, dy = torch.randn(B, S, H, D).to(device, dtype), torch.randn(B, S, H, D).to(device, dtype)
    cos, sin = angles(B, S, R, device)
    t = {"dy": dy, "x": x, "weight": (1 + torch.randn(D) / 2).to(device, dtype), "cos": cos, "sin": sin}
    return {name: one for name, one in t.items() if one is not None and (weight or name != "weight")}


def upcast(t):
    return {name: one.double() for name, one in t.items()}


def forward(backend, t, interleaved=False, eps=EPS, **options):
    return backend.heads_fwd(t["x"], t.get("weight"), eps, t.get("cos"), t.get("sin"), interleaved, **options)


def backward(backend, t, interleaved=False, eps=EPS, **options):
    options = {"need_dweight": "weight" in t} | options
    arguments = t["dy"], t["x"], t.get("weight"), eps, t.get("cos"), t.get("sin"), interleaved
    return backend.heads_bwd(*arguments, **options)[: 2 + options.get("need_dbias", False)]


def assert_close(ours, reference, exact, terms):
    """Twice eager's error at most, and one float32 rounding of the terms that a sum or difference is made of: they may
    cancel."""
    assert ours.dtype == reference.dtype
    assert ours.shape == exact.shape
    slack = torch.finfo(torch.float32).eps * terms.norm()
    assert (ours.double() - exact).norm() <= 2 * (reference.double() - exact).norm() + slack


def assert_like_eager(t, interleaved, eps=EPS):
    wide = upcast(t)
    exact = forward(eager, wide, interleaved, eps)
    assert_close(forward(rotary, t, interleaved, eps), forward(eager, t, interleaved, eps), exact, exact)
    (dx, dweight), (reference_dx, reference_dweight) = (backward(one, t, interleaved, eps) for one in (rotary, eager))
    exact_dx, exact_dweight = backward(eager, wide, interleaved, eps)
    without_norm = {name: one for name, one in wide.items() if name != "weight"}
    dz, _ = backward(eager, without_norm, interleaved)
    if "weight" not in t:
        assert dweight is None
        return assert_close(dx, reference_dx, exact_dx, dz)
    r = torch.rsqrt(wide["x"].square().mean(-1, keepdim=True) + eps)
    assert_close(dx, reference_dx, exact_dx, dz * wide["weight"] * r)
    assert dweight.dtype == torch.float32
    assert_close(dweight, reference_dweight, exact_dweight, (dz * wide["x"] * r).abs().sum((0, 1, 2)))


@pytest.mark.sampled
@pytest.mark.parametrize("case", pairwise(shape=SHAPES, dtype=DTYPES, interleaved=(False, True), weight=(False, True)))
def test_against_eager(case, device):
    assert_like_eager(inputs(*case["shape"], case["dtype"], device, case["weight"]), case["interleaved"])


@pytest.mark.parametrize(("kind", "own_rows"), [("layer", False), ("layer", True), ("rms", True)])
@pytest.mark.parametrize(
    ("interleaved", "shape"), [(False, (1, 19, 9, 40, 24)), (True, (2, 3, 2, 24, 24)), (False, (1, 3, 2, 6, 0))]
)
def test_norms_against_eager(shape, interleaved, kind, own_rows, device):
    """Layer norms, biases, and a row of the weight and bias for each head."""
    t = inputs(*shape, torch.bfloat16, device)
    rows = (shape[2], shape[3]) if own_rows else (shape[3],)
    weight, bias = (torch.randn(rows, device=device) for _ in range(2))

    def both(backend, t):
        y = backend.heads_fwd(
            t["x"], t["weight"], EPS, t.get("cos"), t.get("sin"), interleaved, bias=t["bias"], kind=kind
        )
        made = backward(backend, t, interleaved, kind=kind, need_dbias=True)
        return dict(zip(("y", "dx", "dweight", "dbias"), (y, *made), strict=True))

    t |= {"weight": weight, "bias": bias}
    ours, reference, exact = both(rotary, t), both(eager, t), both(eager, upcast(t))
    for name in exact:
        # one float32 rounding of the terms of a sum
        assert_close(ours[name], reference[name], exact[name], 30 * exact[name].abs() + exact["dx"].norm())


@pytest.mark.parametrize("own_rows", [False, True], ids=["one row", "own rows"])
def test_eager_layer_norms_are_torchs(own_rows):
    t = upcast(inputs(2, 5, 3, 40, 24, torch.float32))
    x = t["x"].requires_grad_()
    weight, bias = (torch.randn((3, 40) if own_rows else 40, dtype=torch.float64, requires_grad=True) for _ in range(2))
    z = torch.nn.functional.layer_norm(x, (40,), eps=EPS) * weight + bias
    y = torch.cat((llama(z[..., :24], t["cos"], t["sin"]), z[..., 24:]), -1)
    expected = torch.autograd.grad(y, (x, weight, bias), t["dy"])
    t = {name: one.detach() for name, one in (t | {"weight": weight}).items()}
    ours = eager.heads_fwd(t["x"], t["weight"], EPS, t["cos"], t["sin"], bias=bias.detach(), kind="layer")
    torch.testing.assert_close(ours, y.detach(), rtol=1e-12, atol=1e-12)
    ours = backward(eager, t, kind="layer", need_dbias=True)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 5, 3, 40, 24), (2, 0, 3, 40, 24), (2, 5, 0, 40, 24), (2, 5, 3, 0, 0)], ids=str)
def test_nothing(shape, device):
    """Empty batches, sizes of one, features of zero (attention-gym#260, mamba#387)."""
    t = inputs(*shape, torch.float32, device)
    y, (dx, dweight) = forward(rotary, t), backward(rotary, t)
    assert y.shape == dx.shape == shape[:4]
    assert torch.equal(dweight, torch.zeros(shape[3], device=device))


@pytest.mark.parametrize(("x", "rest"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_mixed_dtypes(x, rest, device):
    """float32 weight and angles under 16-bit heads, and the other way round."""
    t = inputs(2, 5, 3, 40, 24, torch.float32, device)
    assert_like_eager({name: one.to(x if name in ("x", "dy") else rest) for name, one in t.items()}, False)


def llama(x, cos, sin):
    """transformers' apply_rotary_pos_emb, unsqueeze_dim=2."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos.unsqueeze(2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(2)


def gptj(x, cos, sin):
    """transformers' GPT-J: rotate_every_two."""
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(2) + rotated * sin.unsqueeze(2)


@pytest.mark.parametrize(("formula", "interleaved"), [(llama, False), (gptj, True)])
@pytest.mark.parametrize("R", [40, 24])
def test_eager_is_the_models_formula(R, formula, interleaved):
    """Qwen3's order, RMSNorm and then the first R elements rotated: forward and autograd's backward in float64."""
    t = upcast(inputs(2, 5, 3, 40, R, torch.float32))
    x, weight = t["x"].requires_grad_(), t["weight"].requires_grad_()
    z = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))
    y = torch.cat((formula(z[..., :R], t["cos"], t["sin"]), z[..., R:]), -1)
    dx, dweight = torch.autograd.grad(y, (x, weight), t["dy"])
    t = {name: one.detach() for name, one in t.items()}
    torch.testing.assert_close(forward(eager, t, interleaved), y.detach(), rtol=1e-13, atol=1e-13)
    ours = backward(eager, t, interleaved)
    torch.testing.assert_close(ours, (dx, dweight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("weight", [True, False])
def test_eager_gradients(interleaved, weight):
    class Heads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, cos, sin):
            ctx.save_for_backward(x, weight, cos, sin)
            return eager.heads_fwd(x, weight, EPS, cos, sin, interleaved)

        @staticmethod
        def backward(ctx, dy):
            x, weight, cos, sin = ctx.saved_tensors
            needed = weight is not None
            return *eager.heads_bwd(dy, x, weight, EPS, cos, sin, interleaved, need_dweight=needed)[:2], None, None

    t = upcast(inputs(2, 2, 2, 5, 4, torch.float32))
    x, weight = t["x"].requires_grad_(), t["weight"].requires_grad_() if weight else None
    assert torch.autograd.gradcheck(Heads.apply, (x, weight, t["cos"], t["sin"]))


def model_angles(S, R, interleaved, device):
    """[S, R] as models make them: cos^2 + sin^2 = 1, and the same angle for both of a pair."""
    angle = torch.arange(S)[:, None] / 100.0 ** (torch.arange(R // 2) / R)
    angle = angle.repeat_interleave(2, 1) if interleaved else torch.cat((angle, angle), 1)
    return angle.cos().to(device), angle.sin().to(device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_backward_turns_back(backend, dtype, interleaved, device):
    """Rotated there and back, a pair is off by the roundings of its length: y's, dx's and a few in float32."""
    x = torch.randn(2, 37, 3, 40).to(device, dtype)
    cos, sin = model_angles(37, 24, interleaved, device)
    y = backend.heads_fwd(x, None, EPS, cos, sin, interleaved)
    back, *_ = backend.heads_bwd(y, x, None, EPS, cos, sin, interleaved)
    pairs = x[..., :24].double()
    pairs = pairs.unflatten(-1, (12, 2)) if interleaved else pairs.unflatten(-1, (2, 12)).transpose(-1, -2)
    length = pairs.norm(dim=-1).repeat_interleave(2, -1) if interleaved else pairs.norm(dim=-1).repeat(1, 1, 1, 2)
    bound = 2 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    assert ((back - x)[..., :24].abs() <= bound * length).all()
    assert torch.equal(back[..., 24:], x[..., 24:])
    assert not torch.allclose(y[..., :24].float(), x[..., :24].float(), atol=0.1)


def test_angles_broadcast(device):
    """[S, R], [1, S, R], an expanded and a repeated [B, S, R] give the same bits."""
    t = inputs(3, 7, 2, 40, 24, torch.bfloat16, device)
    cos, sin = t["cos"][0], t["sin"][0]
    forms = [
        (cos, sin),
        (cos[None], sin[None]),
        (cos.expand(3, 7, 24), sin.expand(3, 7, 24)),
        (cos.repeat(3, 1, 1), sin[None]),
        (cos.t().contiguous().t(), sin),
    ]
    ours = [
        {"y": forward(rotary, t | form), **dict(zip(("dx", "dweight"), backward(rotary, t | form), strict=True))}
        for form in ({"cos": c, "sin": s} for c, s in forms)
    ]
    for one in ours[1:]:
        assert_equal(one, ours[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_in_place(backend, interleaved, device):
    """Over x, over dy, over a slice of a packed projection: the bits of a result of its own; nothing else written."""
    t = inputs(2, 19, 11, 40, 24, torch.bfloat16, device)
    y, (dx, dweight) = forward(backend, t, interleaved), backward(backend, t, interleaved)

    packed = torch.randn(2, 19, 15, 40, device=device).to(torch.bfloat16)
    packed[:, :, 2:13] = t["x"]
    before, x = packed.clone(), packed[:, :, 2:13]
    assert forward(backend, t | {"x": x}, interleaved, out=x) is x
    assert torch.equal(packed[:, :, 2:13], y)
    assert torch.equal(packed[:, :, :2], before[:, :, :2])
    assert torch.equal(packed[:, :, 13:], before[:, :, 13:])

    for name in ("dy", "x"):
        target = t[name].clone()
        ours, ours_dweight = backward(backend, t | {name: target}, interleaved, out=target)
        assert ours is target
        assert torch.equal(target, dx)
        assert torch.equal(ours_dweight, dweight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_one_rounding(backend, dtype, device):
    """16-bit results are the float32 ones rounded, which a rounding on the way would move in every fourth element.

    One in a hundred is granted: on a GPU float32 rows may lie in another layout, whose sums differ in the last bit.
    """
    t = inputs(2, 19, 3, 40, 24, dtype, device)
    wide = {name: one.float() for name, one in t.items()}
    pairs = [
        (forward(backend, t), forward(backend, wide)),
        (backward(backend, t)[0], backward(backend, wide)[0]),
    ]
    for ours, unrounded in pairs:
        assert (ours != unrounded.to(dtype)).float().mean() < 0.01


def test_out_has_its_own_dtype(device):
    t = inputs(1, 5, 2, 40, 24, torch.bfloat16, device)
    out = torch.empty(1, 5, 2, 40, device=device)
    wide = {name: one.float() for name, one in t.items()}
    assert torch.equal(forward(rotary, t, out=out), forward(rotary, wide))
    assert torch.equal(backward(rotary, t, out=out)[0], backward(rotary, wide)[0])


@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_nothing_to_do_is_a_copy(backend, device):
    t = inputs(1, 5, 2, 40, 0, torch.float32, device, weight=False)
    for ours, given in ((forward(backend, t), t["x"]), (backward(backend, t)[0], t["dy"])):
        assert torch.equal(ours, given)
        assert ours.data_ptr() != given.data_ptr()


def test_out_of_another_shape_raises(device):
    t = inputs(1, 5, 2, 40, 24, torch.float32, device)
    for out in (torch.empty(1, 5, 2, 41, device=device), torch.empty(1, 5, 2, 80, device=device)[..., ::2]):
        with pytest.raises(ValueError, match="out must have shape"):
            forward(rotary, t, out=out)
        with pytest.raises(ValueError, match="out must have shape"):
            backward(rotary, t, out=out)


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def packed(x):
    wide = x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), float("nan"))
    wide[:, :, 1:-2] = x
    return wide[:, :, 1:-2]


@pytest.mark.parametrize("layout", [heads_first, packed, every_other], ids=lambda f: f.__name__)
def test_strides(layout, device):
    """Any strides give the bits of contiguous inputs, and no input is written."""
    t = inputs(2, 19, 3, 40, 24, torch.bfloat16, device)
    strided = {name: layout(one) if one.dim() == 4 or layout is every_other else one for name, one in t.items()}
    assert not strided["x"].is_contiguous()
    before = {name: one.clone() for name, one in strided.items()}
    assert torch.equal(forward(rotary, strided), forward(rotary, t))
    for ours, theirs in zip(backward(rotary, strided), backward(rotary, t), strict=True):
        assert torch.equal(ours, theirs)
    assert_equal(strided, before)


@pytest.mark.parametrize("dims", [(0, 1, 2), (3,), (0, 1, 2, 3), (2,)], ids=str)
def test_expanded_gradient(dims, device):
    """A gradient from .sum() has strides of 0."""
    t = inputs(2, 5, 3, 40, 24, torch.float32, device)
    dy = t["dy"]
    for dim in dims:
        dy = dy.narrow(dim, 0, 1)
    dy = dy.expand(2, 5, 3, 40)
    expected = backward(rotary, t | {"dy": dy.contiguous()})
    for ours, theirs in zip(backward(rotary, t | {"dy": dy}), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("far_dim", [0, 1, 2])
def test_offsets_beyond_int32(far_dim):
    """Batches, tokens or heads that start more than 2**31 elements after the first."""
    shape = [2, 2, 2, 40]
    shape[far_dim] = 10  # head 8 is the first of a second program
    t = inputs(*shape, 24, torch.bfloat16)
    strides = list(t["x"].stride())
    strides[far_dim] = 2**28 + 16
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1

    def far(x):  # memory is mapped only where it is touched: a page or two a row
        storage = torch.UntypedStorage(extent * x.element_size())
        return torch.empty(0, dtype=x.dtype).set_(storage, 0, shape, strides).copy_(x)

    y, (dx, dweight) = forward(rotary, t), backward(rotary, t)
    apart = t | {"x": far(t["x"]), "dy": far(t["dy"])}
    ours_dx, ours_dweight = backward(rotary, apart, out=apart["dy"])
    assert torch.equal(ours_dx, dx)
    assert torch.equal(ours_dweight, dweight)
    assert torch.equal(forward(rotary, apart, out=apart["x"]), y)


@pytest.mark.parametrize(
    ("dtype", "R"), [(torch.bfloat16, 0), (torch.bfloat16, 40), *((dtype, 24) for dtype in DTYPES)], ids=str
)
def test_backward_recomputes_the_bits_of_forward(dtype, R, device):
    """With dz one in one row and zero elsewhere dweight is h of that row, which forward gives with a weight of ones."""
    t = inputs(2, 19, 11, 40, R, dtype, device)
    no_turn = {"cos": torch.ones_like(t["cos"]), "sin": torch.zeros_like(t["sin"])} if R else {}
    t = {**t, **no_turn, "weight": torch.ones(40, device=device)}
    h = forward(rotary, t, out=torch.empty(2, 19, 11, 40, device=device))
    for row in ((0, 0, 0), (1, 18, 10)):
        dy = torch.zeros_like(t["x"])
        dy[row] = 1
        _, dweight = backward(rotary, t | {"dy": dy})
        assert torch.equal(dweight, h[row])


def test_rows_do_not_depend_on_chunks(device):
    """y and dx of a token are the same bits in any chunk of tokens or heads."""
    t = inputs(2, 19, 11, 40, 24, torch.bfloat16, device)
    heads = slice(2, 11)
    chunk = {
        name: one[1:, 5:17, heads] if one.dim() == 4 else one[1:, 5:17] if one.dim() == 3 else one
        for name, one in t.items()
    }
    assert torch.equal(forward(rotary, chunk), forward(rotary, t)[1:, 5:17, heads])
    assert torch.equal(backward(rotary, chunk)[0], backward(rotary, t)[0][1:, 5:17, heads])


def test_need_dweight(device):
    t = inputs(2, 5, 3, 40, 24, torch.bfloat16, device)
    dx, dweight = backward(rotary, t, need_dweight=False)
    assert dweight is None
    assert torch.equal(dx, backward(rotary, t)[0])


def test_runs_are_equal(device, repeats):
    """The first call equals the others bit for bit (cherimoya#50, mamba#827)."""
    t = inputs(2, 19, 9, 40, 24, torch.float32, device)
    first = [forward(rotary, t), *backward(rotary, t)]
    for _ in range(repeats):
        assert all(itertools.starmap(torch.equal, zip(first, [forward(rotary, t), *backward(rotary, t)], strict=True)))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
def test_padding_of_a_tile_gives_no_nan(device):
    """eps = 0: a padded row has no variance, and 0 * inf would reach dweight."""
    assert_like_eager(inputs(1, 5, 2, 40, 24, torch.float32, device), False, eps=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_bad_row_stays_alone(value, device):
    t = inputs(1, 5, 3, 40, 24, torch.float32, device)
    bad = t | {"x": t["x"].clone()}
    bad["x"][0, 2, 1, 7] = value
    good = torch.ones(1, 5, 3, dtype=torch.bool, device=device)
    good[0, 2, 1] = False
    y = forward(rotary, bad)
    assert torch.equal(y[good], forward(rotary, t)[good])
    assert torch.equal(backward(rotary, bad)[0][good], backward(rotary, t)[0][good])
    assert torch.equal(y.isnan(), forward(eager, bad).isnan())
