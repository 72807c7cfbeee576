"""Norm and rotary embedding of heads against the eager reference, float64 and the models' own formulas; in place; bits."""

import pytest
import torch
from support.cases import every_other
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, assert_equal, check_results

from ckptkern import eager
from ckptkern.triton_kernels import rotary

EPS = 1e-6
# (B, S, H, D, R): more tokens than a tile has and more heads than a program, with a part left over; nothing, a part and
# all of a row turns; odd sizes; rows longer than a head ever is; nothing at all (attention-gym#260, mamba#387)
SHAPES = [
    (2, 19, 11, 96, 96), (1, 37, 2, 40, 24), (2, 3, 3, 40, 40), (3, 7, 9, 40, 0), (1, 5, 2, 3, 2), (2, 5, 1, 1, 0),
    (1, 3, 2, 1000, 1000), (1, 2, 1, 4100, 4096), (0, 5, 3, 40, 24), (2, 0, 3, 40, 24), (2, 5, 0, 40, 24), (2, 5, 3, 0, 0),
]  # fmt: skip
# norm of heads: none; of one weight, or of one for each head; a layer norm has a bias, too
NORMS = ("none", "rms", "rms own rows", "layer", "layer own rows")


def inputs(B, S, H, D, R, dtype, device="cpu", norm="rms"):
    """cos and sin [B, S, R] differ in every element, unlike a model's: each must be read where it belongs."""
    rows = (H, D) if "own" in norm else (D,)
    t = {name: torch.randn(B, S, H, D).to(dtype) for name in ("dy", "x")}
    t |= {} if norm == "none" else {"weight": (1 + torch.randn(rows) / 2).to(dtype)}
    t |= {"bias": torch.randn(rows).to(dtype)} if "layer" in norm else {}
    t |= {name: torch.randn(B, S, R) for name in ("cos", "sin")} if R else {}
    return {name: one.to(device) for name, one in t.items()}


def upcast(t):
    return {name: one.double() for name, one in t.items()}


def kind_of(t):
    return {"kind": "layer" if "bias" in t else "rms"}


def forward(backend, t, interleaved=False, eps=EPS, **options):
    arguments = t["x"], t.get("weight"), eps, t.get("cos"), t.get("sin"), interleaved
    return backend.heads_fwd(*arguments, bias=t.get("bias"), **kind_of(t), **options)


def backward(backend, t, interleaved=False, eps=EPS, **options):
    """dx, and the gradients of a weight and a bias, by name."""
    arguments = t["dy"], t["x"], t.get("weight"), eps, t.get("cos"), t.get("sin"), interleaved
    options = {"need_dweight": "weight" in t, "need_dbias": "bias" in t} | options
    results = backend.heads_bwd(*arguments, **kind_of(t), **options)
    return {name: one for name, one in zip(("dx", "dweight", "dbias"), results, strict=False) if one is not None}


def both(backend, t, interleaved=False, eps=EPS):
    return {"y": forward(backend, t, interleaved, eps)} | backward(backend, t, interleaved, eps)


def assert_like_eager(draw, interleaved=False, eps=EPS):
    def results():
        t = draw()
        return (
            both(rotary, t, interleaved, eps),
            both(eager, t, interleaved, eps),
            both(eager, upcast(t), interleaved, eps),
        )

    check_results(results, slack=2e-7)


# of heads, and of what is given besides: float32 under 16-bit heads, and the other way round
MIXED = [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("case", pairwise(shape=SHAPES, dtypes=MIXED, interleaved=(False, True), norm=NORMS))
def test_like_eager(case, device):
    heads, rest = case["dtypes"]

    def draw():
        t = inputs(*case["shape"], heads, device, case["norm"])
        return {name: one if name in ("x", "dy") else one.to(rest) for name, one in t.items()}

    assert_like_eager(draw, case["interleaved"])


def llama(x, cos, sin):
    """transformers' apply_rotary_pos_emb, unsqueeze_dim=2."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos.unsqueeze(2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(2)


def gptj(x, cos, sin):
    """transformers' GPT-J: rotate_every_two."""
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(2) + rotated * sin.unsqueeze(2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("formula", "interleaved", "R"), [(llama, False, 40), (gptj, True, 24)])
def test_eager_is_the_models_formula(R, formula, interleaved, norm):
    """Qwen3's order, a norm and then the first R elements rotated: forward and autograd's backward in float64."""
    t = upcast(inputs(2, 5, 3, 40, R, torch.float32, norm=norm))
    leaves = {name: one.requires_grad_() for name, one in t.items() if name in ("x", "weight", "bias")}
    z = t["x"]
    if "layer" in norm:
        z = torch.nn.functional.layer_norm(z, (40,), eps=EPS) * t["weight"] + t["bias"]
    elif "rms" in norm:
        z = t["weight"] * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + EPS))
    y = torch.cat((formula(z[..., :R], t["cos"], t["sin"]), z[..., R:]), -1)
    expected = torch.autograd.grad(y, list(leaves.values()), t["dy"])
    t = {name: one.detach() for name, one in t.items()}
    torch.testing.assert_close(forward(eager, t, interleaved), y.detach(), rtol=1e-12, atol=1e-12)
    ours = tuple(backward(eager, t, interleaved).values())
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


def test_angles_broadcast(device):
    """[S, R], [1, S, R], an expanded and a repeated [B, S, R] give the same bits."""
    t = inputs(3, 7, 2, 40, 24, torch.bfloat16, device)
    cos, sin = t["cos"][0], t["sin"][0]
    first, *others = (
        both(rotary, t | {"cos": c, "sin": s})
        for c, s in (
            (cos, sin), (cos[None], sin[None]), (cos.expand(3, 7, 24), sin.expand(3, 7, 24)),
            (cos.repeat(3, 1, 1), sin[None]), (cos.t().contiguous().t(), sin),
        )
    )  # fmt: skip
    for other in others:
        assert_equal(other, first)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_in_place(backend, interleaved, device):
    """Over x, over dy, over a slice of a packed projection: the bits of a result of its own; nothing else written."""
    t = inputs(2, 19, 11, 40, 24, torch.bfloat16, device)
    expected = both(backend, t, interleaved)

    wide = torch.randn(2, 19, 15, 40, device=device).to(torch.bfloat16)
    wide[:, :, 2:13] = t["x"]
    before, x = wide.clone(), wide[:, :, 2:13]
    assert forward(backend, t | {"x": x}, interleaved, out=x) is x
    before[:, :, 2:13] = expected.pop("y")
    assert torch.equal(wide, before)
    for name in ("dy", "x"):
        target = t[name].clone()
        ours = backward(backend, t | {name: target}, interleaved, out=target)
        assert ours["dx"] is target
        assert_equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_one_rounding(backend, dtype, device):
    """16-bit results are the float32 ones rounded, which a rounding on the way would move in every fourth element, and `out` of
    float32 has these.

    One in a hundred is granted: on a GPU float32 rows may lie in another layout, whose sums differ in the last bit.
    """
    t = inputs(2, 19, 3, 40, 24, dtype, device)
    wide, out = both(backend, {name: one.float() for name, one in t.items()}), torch.empty(2, 19, 3, 40, device=device)
    for name, ours in both(backend, t).items():
        assert name == "dweight" or (ours != wide[name].to(dtype)).float().mean() < 0.01, name
    assert (forward(backend, t, out=out) != wide["y"]).float().mean() < 0.01
    assert (backward(backend, t, out=out)["dx"] != wide["dx"]).float().mean() < 0.01


@pytest.mark.parametrize("backend", [rotary, eager], ids=["triton", "eager"])
def test_nothing_to_do_is_a_copy(backend, device):
    t = inputs(1, 5, 2, 40, 0, torch.float32, device, norm="none")
    for ours, given in ((forward(backend, t), t["x"]), (backward(backend, t)["dx"], t["dy"])):
        assert torch.equal(ours, given)
        assert ours.data_ptr() != given.data_ptr()


def test_out_of_another_shape_raises(device):
    t = inputs(1, 5, 2, 40, 24, torch.float32, device)
    for out in (torch.empty(1, 5, 2, 41, device=device), torch.empty(1, 5, 2, 80, device=device)[..., ::2]):
        for run in (forward, backward):
            with pytest.raises(ValueError, match="out must have shape"):
                run(rotary, t, out=out)


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def one_for_all(x):
    return x[:1, :1, :1, :1].expand(x.shape)


@pytest.mark.parametrize("layout", [heads_first, every_other, one_for_all], ids=lambda f: f.__name__)
def test_strides(layout, device):
    """Strides that results which are written over inputs cannot have give the bits of contiguous inputs."""
    t = inputs(2, 19, 3, 40, 24, torch.bfloat16, device)
    strided = {name: layout(one) if one.dim() == 4 else one for name, one in t.items()}
    assert not strided["x"].is_contiguous()
    assert_equal(both(rotary, strided), both(rotary, {name: one.contiguous() for name, one in strided.items()}))


@pytest.mark.parametrize(("dtype", "R"), [(torch.bfloat16, 0), (torch.float32, 40), (torch.float16, 24)], ids=str)
def test_backward_recomputes_the_bits_of_forward(dtype, R, device):
    """With dz one in one row and zero elsewhere dweight is h of that row, which forward gives with a weight of ones."""
    t = inputs(2, 19, 11, 40, R, dtype, device)
    no_turn = {"cos": torch.ones_like(t["cos"]), "sin": torch.zeros_like(t["sin"])} if R else {}
    t = {**t, **no_turn, "weight": torch.ones(40, device=device)}
    h = forward(rotary, t, out=torch.empty(2, 19, 11, 40, device=device))
    for row in ((0, 0, 0), (1, 18, 10)):
        dy = torch.zeros_like(t["x"])
        dy[row] = 1
        assert torch.equal(backward(rotary, t | {"dy": dy})["dweight"], h[row])


def test_rows_do_not_depend_on_chunks(device):
    """y and dx of a token are the same bits in any chunk of tokens or heads, and whatever else is wanted."""
    t = inputs(2, 19, 11, 40, 24, torch.bfloat16, device)
    part = {4: (slice(1, None), slice(5, 17), slice(2, None)), 3: (slice(1, None), slice(5, 17))}
    chunk = {name: one[part.get(one.dim(), ...)] for name, one in t.items()}
    assert torch.equal(forward(rotary, chunk), forward(rotary, t)[part[4]])
    alone = backward(rotary, chunk, need_dweight=False)
    assert_equal(alone, {"dx": backward(rotary, t)["dx"][part[4]]})


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy, in the interpreter
def test_padding_of_a_tile_gives_no_nan(device):
    """eps = 0: a padded row has no variance, and 0 * inf would reach dweight."""
    assert_like_eager(lambda: inputs(1, 5, 2, 40, 24, torch.float32, device), eps=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_bad_row_stays_alone(value, device):
    t = inputs(1, 5, 3, 40, 24, torch.float32, device)
    bad, good = t | {"x": t["x"].clone()}, torch.ones(1, 5, 3, dtype=torch.bool, device=device)
    bad["x"][0, 2, 1, 7] = value
    good[0, 2, 1] = False
    ours, expected = both(rotary, bad), both(rotary, t)
    for name in ("y", "dx"):
        assert torch.equal(ours[name][good], expected[name][good]), name
    assert torch.equal(ours["y"].isnan(), forward(eager, bad).isnan())
