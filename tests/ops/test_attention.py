"""scaled_dot_product_attention and varlen_attn against torch's own: shapes, masks, what hides rows, extreme scores, packed
sequences; and arguments of attention_block that stand for others."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import assert_as_exact, assert_same_within_rounding, clone, gradients, output_gradient

import ckptkern
from ckptkern.ops import catalog
from ckptkern.ops.examples import normal

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


FIVE = (2, 3, 4, 7, 6)
OPTIONS = {
    "no mask": {}, "causal": dict(is_causal=True), "a scale": dict(scale=0.2),
    "a scale in a tensor": dict(scale=torch.tensor(0.2)),
    "a mask": dict(attn_mask=BOOL), "of keys": dict(attn_mask=BOOL[:, :1, :1]), "of two dimensions": dict(attn_mask=BOOL[0, 0]),
    "an additive mask": dict(attn_mask=torch.randn(1, 4, 7, 5)), "an additive mask of keys": dict(attn_mask=torch.randn(1, 5)),
}  # fmt: skip
GROUPED = {"two heads": dict(key=(2, 2, 5, 6)), "one head": dict(key=(2, 1, 5, 6))}
SHAPES = (
    ((7, 6), (5, 6)), ((3, 7, 6), (3, 5, 6)), (FIVE, FIVE), (QUERY, (1, 4, 5, 6)), (QUERY, (2, 1, 5, 6)),
    (QUERY, (2, 1, 5, 6), KEY), ((4, 7, 6), (1, 5, 6)), ((2, 1, 7, 6), KEY), (QUERY, KEY, (2, 4, 5, 9)),
    (QUERY, KEY, (2, 4, 5, 3)), ((5, 8), (1, 1, 3, 8)), ((2, 5, 8), (3, 2, 4, 8)), ((1, 5, 8), (4, 8)),
    ((3, 2, 2, 5, 8), (4, 8)), ((4, 1, 2, 5, 8), (3, 1, 4, 8)), ((2, 2, 1, 2, 5, 8), (2, 4, 8)),
)  # fmt: skip
# The gradient of a mask has its shape.
TRAINED = ((2, 4, 7, 5), (4, 7, 5), (2, 1, 7, 5), (7, 5), (2, 1, 1, 5), (5,))
TRAINED_OF_FIVE = ((3, 1, 7, 7), (4, 7, 7), (1, 1, 7, 7), (2, 3, 4, 7, 7), (2, 1, 1, 1, 7))
LIKE_TORCHS = {
    **{name: ({}, options) for name, options in OPTIONS.items()},
    **{
        f"{name}, {heads}": (sizes, options | {"enable_gqa": True})
        for (name, options), (heads, sizes) in itertools.product(OPTIONS.items(), GROUPED.items())
    },
    **{str(shapes): (dict(zip(("query", "key", "value"), shapes, strict=False)), {}) for shapes in SHAPES},
    **{f"trained {shape}": (GROUPED["two heads"] | dict(attn_mask=shape), dict(enable_gqa=True)) for shape in TRAINED},
    **{f"trained {shape}": (dict(query=FIVE, key=FIVE, attn_mask=shape), {}) for shape in TRAINED_OF_FIVE},
}


@each_backend
@pytest.mark.parametrize("case", LIKE_TORCHS)
def test_like_torchs(case, backend):
    """Every argument of torch's function except dropout, whose mask is ours."""
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
@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_rows_hidden_by_a_finite_mask(value, dtype):
    """The rows' weights still add up to one: they are as exact as softmax's own, in both directions."""
    mask = torch.zeros(7, 5, dtype=dtype)
    mask[2:4] = max(value, torch.finfo(dtype).min)
    check_softmax(inputs(dtype=dtype), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores(dtype):
    """|q| of 100, keys alike: next to a score of 1e4, a float32 logsumexp has no digits left for log(5)."""
    tensors = {name: t.detach() for name, t in inputs(dtype=dtype).items()}
    tensors["query"] = 100 * tensors["query"].sign()
    tensors["key"] = (100 * tensors["key"][:, :, :1].sign()).expand(KEY)
    tensors["value"].requires_grad_()
    check_softmax(tensors, torch.zeros(7, 5, dtype=dtype))


def check_softmax(tensors, mask):
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

WIDE, NARROW, CU = torch.randn(1, 3, 1, 257), torch.randn(1, 3, 1, 16), torch.tensor([0, 3], dtype=torch.int32)
ROWS, SLOPES, ones = torch.randn(3, 8), torch.ones(3, requires_grad=True), torch.ones
TOO_WIDE = {
    "query": lambda: ckptkern.scaled_dot_product_attention(WIDE, WIDE, NARROW),
    "value": lambda: ckptkern.scaled_dot_product_attention(NARROW, NARROW, WIDE),
    "packed": lambda: ckptkern.varlen_attn(WIDE[0], WIDE[0], WIDE[0], CU, CU, 3, 3),
    "block": lambda: ckptkern.attention_block(ROWS, ones(771, 8), None, ones(8, 257), None, 1),
    "latents": lambda: ckptkern.latent_attention_block(ROWS, ones(257, 8), ones(6, 8), ones(263, 4), ones(8, 8), 1),
    "values": lambda: ckptkern.latent_attention_block(ROWS, ones(10, 8), ones(6, 8), ones(265, 4), ones(8, 257), 1),
}
REFUSED = dict.fromkeys(TOO_WIDE.values(), "the attention kernels cover head dims up to 256, not 257") | {
    lambda: ckptkern.scaled_dot_product_attention(NARROW, NARROW, NARROW, alibi_slopes=SLOPES): (
        "the kernels form no gradient of alibi_slopes"
    ),
    lambda: ckptkern.nn.MultiheadAttention(8, 2)(ROWS, ROWS, ROWS)[1]: (
        "the kernels do not return the weights: pass need_weights=False"
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.items(), ids=[*TOO_WIDE, "slopes", "weights"])
def test_what_only_eager_computes_is_an_error_of_the_kernels(call, message):
    assert call().isfinite().all()
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=message):
        call()


# -- packed sequences --------------------------------------------------------------------------------------------------

CU_Q, CU_K = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 4, 4, 9), (0, 3, 5, 11)))


@pytest.fixture
def _poisoned_memory():
    """Inside, torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_backend
@pytest.mark.parametrize(("left", "right"), [(99, 99), (99, 0), (2, 1)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.usefixtures("_poisoned_memory")
def test_packed_sequences(left, right, kv_heads, backend):
    """Each is torch's, whose last query sees its last key. One has no queries, one more queries than keys, and rows after the
    last are in none."""
    tensors = inputs((11, 4, 6), (14, kv_heads, 6))

    def packed(t):
        options = {"window_size": (left, right)} if right else {"is_causal": True}
        return ckptkern.varlen_attn(*t.values(), CU_Q, CU_K, 5, 6, enable_gqa=True, **options)

    def one_by_one(t):
        parts = []
        for (a, b), (c, d) in zip(itertools.pairwise(CU_Q.tolist()), itertools.pairwise(CU_K.tolist()), strict=True):
            before = torch.arange(d - c - b + a, d - c)[:, None] - torch.arange(d - c)
            q, k, v = (one.transpose(0, 1) for one in (t["query"][a:b], t["key"][c:d], t["value"][c:d]))
            seen = (before <= left) & (before >= -right)
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1))
        return torch.cat([*parts, torch.zeros(2, 4, 6)])

    expected = gradients(one_by_one, tensors)
    with ckptkern.backend(backend):
        assert_same_within_rounding(gradients(packed, tensors), expected)


# -- attention_block ---------------------------------------------------------------------------------------------------

BLOCK, SIZES = catalog.OPS["attention_block"], catalog.Sizes((2, 7), 10, heads=4)


@each_backend
def test_slopes_and_tables_by_sample(backend):
    """Slopes [B, H] are each sample's own; tables [1, S, R] are any sample's, and leave dimensions beyond R as they are."""
    arguments, slopes = BLOCK.inputs(SIZES), torch.rand(2, 4)
    leaves, tables = catalog.random_leaves(arguments), ckptkern.nn.rotary_tables(torch.arange(7), 2, 10.0)

    def run(slopes, tables, x=leaves["x"]):
        return catalog.call(BLOCK, arguments, leaves | {"x": x}, alibi_slopes=slopes, rotary=tables)

    with ckptkern.backend(backend):
        found = run(slopes, tuple(table[None] for table in tables))
        each = [run(slopes[n], tables, leaves["x"][n : n + 1]) for n in (0, 1)]
    torch.testing.assert_close(found, torch.cat(each))


@each_backend
def test_bounds_and_slopes_of_any_strides(backend):
    """The kernels read both with a stride of 1, so for a column of a table they would read its neighbours."""

    def column(t):
        return torch.stack((t, torch.full_like(t, 9)), -1)[..., 0]

    arguments, ends = BLOCK.inputs(SIZES) | {"x": normal(11, 10)}, torch.tensor([0, 4, 11], dtype=torch.int32)
    leaves, slopes = catalog.random_leaves(arguments), torch.tensor([0.5, 0.25, 0.1, 0.2])
    with ckptkern.backend(backend):
        strided, dense = (
            catalog.call(BLOCK, arguments, leaves, cu_seqlens=of(ends), alibi_slopes=of(slopes))
            for of in (column, torch.clone)
        )
    assert torch.equal(strided, dense)
