"""scaled_dot_product_attention and varlen_attn: shapes, hidden rows, extreme scores, packed sequences, what kernels refuse."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import assert_as_exact, assert_same_within_rounding, clone, gradients, output_gradient

import ckptkern

each_backend = pytest.mark.parametrize("backend", ["eager", "triton"])
QUERY, KEY = (2, 4, 7, 6), (2, 4, 5, 6)
BOOL = torch.rand(2, 4, 7, 5, generator=torch.Generator().manual_seed(5)) > 0.4
BOOL[..., 0] = True


def inputs(query=QUERY, key=KEY, value=None, attn_mask=None, dtype=torch.float32):
    """Leaves of these shapes."""
    shapes = dict(query=query, key=key, value=value or key) | ({"attn_mask": attn_mask} if attn_mask else {})
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}


def ours(**options):
    return lambda t: ckptkern.scaled_dot_product_attention(**t, **options)


def torchs(**options):
    return lambda t: F.scaled_dot_product_attention(**t, **options)


GROUPED, FIVE = dict(key=(2, 2, 5, 6)), (2, 3, 4, 7, 6)
# What the options' rule has not: a scale in a tensor, masks of fewer dimensions, and sizes by size.
OPTIONS = {
    "a scale in a tensor": dict(scale=torch.tensor(0.2)), "a mask": dict(attn_mask=BOOL),
    "a mask of keys": dict(attn_mask=BOOL[:, :1, :1]), "a mask of two dimensions": dict(attn_mask=BOOL[0, 0]),
    "an additive mask of keys": dict(attn_mask=torch.randn(1, 5)),
}  # fmt: skip
SHAPES = (
    ((7, 6), (5, 6)), ((3, 7, 6), (3, 5, 6)), (FIVE, FIVE), (QUERY, (2, 1, 5, 6), KEY), ((4, 7, 6), (1, 5, 6)),
    ((2, 1, 7, 6), KEY), (QUERY, KEY, (2, 4, 5, 9)), ((5, 8), (1, 1, 3, 8)), ((1, 5, 8), (4, 8)),
    ((4, 1, 2, 5, 8), (3, 1, 4, 8)), ((2, 2, 1, 2, 5, 8), (2, 4, 8)),
)  # fmt: skip
# The gradient of a mask has its shape.
TRAINED = ((4, 7, 5), (2, 1, 7, 5), (2, 1, 1, 5), (5,))
TRAINED_OF_FIVE = ((3, 1, 7, 7), (4, 7, 7), (2, 1, 1, 1, 7))
LIKE_TORCHS = {
    **{name: (GROUPED, options | {"enable_gqa": True}) for name, options in OPTIONS.items()},
    **{str(shapes): (dict(zip(("query", "key", "value"), shapes, strict=False)), {}) for shapes in SHAPES},
    **{f"trained {shape}": (GROUPED | dict(attn_mask=shape), dict(enable_gqa=True)) for shape in TRAINED},
    **{f"trained {shape}": (dict(query=FIVE, key=FIVE, attn_mask=shape), {}) for shape in TRAINED_OF_FIVE},
}


@each_backend
@pytest.mark.parametrize("case", LIKE_TORCHS)
def test_like_torchs(case, backend):
    sizes, options = LIKE_TORCHS[case]
    tensors = inputs(**sizes)
    with ckptkern.backend(backend):
        found = gradients(ours(**options), tensors)
    assert_same_within_rounding(found, gradients(torchs(**options), tensors))


# -- rows that see nothing ---------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("kind", ["bool", "additive", "trained"])
def test_rows_that_see_nothing(kind, backend):
    """Zeros and zero gradients, never NaN (pytorch#103749, pytorch#41508), and elsewhere torch's."""
    mask = torch.randn(4, 7, 5) if kind != "bool" else torch.zeros(4, 7, 5)
    mask[:, 2] = mask[:, 5] = mask[1, :, 3] = -math.inf
    tensors = inputs() | {"attn_mask": (mask == 0) if kind == "bool" else mask.requires_grad_(kind == "trained")}
    with ckptkern.backend(backend):
        found = gradients(ours(), tensors)
    for name in {"y", "query", "attn_mask"} & found.keys():
        assert not found[name][..., [2, 5], :].any(), name
    expected = gradients(torchs(), tensors)
    assert_same_within_rounding(found, {name: t.nan_to_num() for name, t in expected.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [-1e4, torch.finfo(torch.float32).min, "large scores"])
def test_weights_of_extreme_scores_add_up_to_one(hidden, dtype):
    """Of rows that a finite mask hides, and next to a score of 1e4, where a float32 logsumexp has no digits left for log(5): as
    exact as softmax's own, in both directions."""
    tensors, mask = inputs(dtype=dtype), torch.zeros(7, 5, dtype=dtype)
    if hidden == "large scores":  # |q| of 100, keys alike
        tensors = {name: t.detach() for name, t in tensors.items()}
        tensors["query"] = 100 * tensors["query"].sign()
        tensors["key"] = (100 * tensors["key"][:, :, :1].sign()).expand(KEY)
        tensors["value"].requires_grad_()
    else:
        mask[2:4] = max(hidden, torch.finfo(dtype).min)

    def softmaxed(t):
        s = t["query"] @ t["key"].mT * 6**-0.5 + mask.to(t["query"].dtype)
        return s.softmax(-1) @ t["value"]

    dy = output_gradient(tensors["query"])
    exact = gradients(softmaxed, clone(tensors, torch.float64), dy.double())
    assert_as_exact(gradients(ours(attn_mask=mask), tensors, dy), gradients(softmaxed, tensors, dy), exact)


NOTHING = {
    "no batch": ((0, 4, 7, 6), (0, 4, 5, 6)), "no rows": ((2, 4, 0, 6), KEY), "no columns": (QUERY, (2, 4, 0, 6)),
    "no head dim": ((2, 4, 7, 0), (2, 4, 5, 0)), "packed, no rows": ((0, 4, 6), (5, 4, 6), (0, 0), (0, 5)),
    "packed, no columns": ((7, 4, 6), (0, 4, 6), (0, 7), (0, 0)), "no sequences": ((7, 4, 6), (5, 4, 6), (0,), (0,)),
    "packed, no head dim": ((7, 4, 0), (5, 4, 0), (0, 7), (0, 5)),
}  # fmt: skip


@each_backend
@pytest.mark.parametrize("case", NOTHING)
def test_zeros_where_there_is_nothing_to_see(case, backend):
    query, key, *ends = NOTHING[case]
    tensors = inputs(query, key)
    cu = [torch.tensor(end, dtype=torch.int32) for end in ends]
    with ckptkern.backend(backend):
        found = gradients(
            lambda t: ckptkern.varlen_attn(*t.values(), *cu, 7, 5) if cu else ours(dropout_p=0.3)(t), tensors
        )
    for name, t in found.items():
        assert t.shape == (query if name == "y" else tensors[name].shape)
        assert not t.any(), name


# -- what kernels refuse -----------------------------------------------------------------------------------------------

WIDE, NARROW = torch.randn(1, 3, 1, 257), torch.randn(1, 3, 1, 16)
ROWS, SLOPES, ones = torch.randn(3, 8), torch.ones(3, requires_grad=True), torch.ones
sdpa, TOO_WIDE = ckptkern.scaled_dot_product_attention, "the attention kernels cover head dims up to 256, not 257"
REFUSED = {
    "query": (lambda: sdpa(WIDE, WIDE, NARROW), TOO_WIDE),
    "value": (lambda: sdpa(NARROW, NARROW, WIDE), TOO_WIDE),
    "block": (lambda: ckptkern.attention_block(ROWS, ones(771, 8), None, ones(8, 257), None, 1), TOO_WIDE),
    "latents": (
        lambda: ckptkern.latent_attention_block(ROWS, ones(10, 8), ones(6, 8), ones(265, 4), ones(8, 257), 1), TOO_WIDE
    ),
    "slopes": (
        lambda: sdpa(NARROW, NARROW, NARROW, alibi_slopes=SLOPES), "the kernels form no gradient of alibi_slopes"
    ),
    "weights": (
        lambda: ckptkern.nn.MultiheadAttention(8, 2)(ROWS, ROWS, ROWS)[1],
        "the kernels do not return the weights: pass need_weights=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_only_eager_computes_is_an_error_of_the_kernels(call, message):
    assert call().isfinite().all()
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=message):
        call()


# -- packed sequences --------------------------------------------------------------------------------------------------

CU_Q, CU_K = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 4, 4, 9), (0, 3, 5, 11)))


def one_by_one(t, left, right):
    parts = []
    for (a, b), (c, d) in zip(itertools.pairwise(CU_Q), itertools.pairwise(CU_K), strict=True):
        before = torch.arange(d - c - b + a, d - c)[:, None] - torch.arange(d - c)
        heads = (one.transpose(0, 1) for one in (t["query"][a:b], t["key"][c:d], t["value"][c:d]))
        seen = (before <= left) & (before >= -right)
        parts.append(F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(0, 1))
    return torch.cat([*parts, torch.zeros(2, 4, 6)])


@each_backend
@pytest.mark.parametrize("window", [(99, 99), (99, 0), (2, 1)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_sequences(window, kv_heads, backend):
    """Each is torch's, whose last query sees its last key. One has no queries, one more queries than keys, and rows after the
    last are in none: zeros, though torch.empty gives NaN here."""
    tensors = inputs((11, 4, 6), (14, kv_heads, 6))
    options = dict(window_size=window) if window[1] else dict(is_causal=True)
    expected = gradients(lambda t: one_by_one(t, *window), tensors)
    torch.use_deterministic_algorithms(True)
    try:
        with ckptkern.backend(backend):
            found = gradients(
                lambda t: ckptkern.varlen_attn(*t.values(), CU_Q, CU_K, 5, 6, enable_gqa=True, **options), tensors
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_within_rounding(found, expected)
