"""scaled_dot_product_attention and varlen_attn against torch's own, and what only ours have."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support.blocks import BOOL, CALLS, CU_K, CU_Q, MASKS, Attention, Block, heads, rng_states, unfused_attention
from support.cases import (
    DTYPES,
    MODES,
    SEED,
    assert_as_exact,
    assert_same,
    assert_same_within_rounding,
    check_exactness,
    clone,
    gradients,
    output_gradient,
    seeded,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckptkern
from ckptkern import eager, state, triton_kernels
from ckptkern.memory import saved_tensors
from ckptkern.ops.attention import arguments, sdpa
from ckptkern.ops.attention import core as attention_core
from ckptkern.ops.attention.arguments import gather
from ckptkern.ops.attention.backward import AttentionSublayer, attention_sublayer_backward
from ckptkern.ops.attention.sublayer import attention_sublayer, saves
from ckptkern.ops.dispatch.choices import primitives

P = 0.3


def qkv(B=2, H=4, H_kv=None, Sq=7, Sk=5, D=6, **options):
    kv = (B, H_kv or H, Sk, D)
    return heads((B, H, Sq, D), kv, kv, **options)


def ours(**options):
    def run(t):
        torch.manual_seed(SEED)
        return ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)

    return run


def learned(function, **options):
    """One of the two functions, of tensors that hold a mask."""
    return lambda t: function(attn_mask=t["mask"], **options)(t)


def torchs(**options):
    return lambda t: F.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("mask", [None, "causal", *MASKS])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_like_torchs(mask, scale, kv_heads):
    """Every argument of torch's function except dropout, whose mask is ours."""
    options = {"scale": scale, "enable_gqa": kv_heads != 4}
    options |= {"is_causal": True} if mask == "causal" else {"attn_mask": MASKS.get(mask)}
    tensors = qkv(H_kv=kv_heads)
    assert_same_within_rounding(gradients(ours(**options), tensors), gradients(torchs(**options), tensors))


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mask", [None, "causal", "additive"])
def test_softcap(mask, backend):
    """As the formula of Gemma 2; no kernel of torch's has one, so none runs. A large cap caps nothing."""
    options = {"is_causal": True} if mask == "causal" else {"attn_mask": MASKS.get(mask)}
    tensors = qkv()

    def capped(t):
        s = 0.7 * torch.tanh(t["q"] @ t["k"].mT * 6**-0.5 / 0.7)
        if mask == "causal":
            s = s.masked_fill(torch.ones(7, 5, dtype=torch.bool).triu(1), -math.inf)
        return (s if options.get("attn_mask") is None else s + MASKS[mask]).softmax(-1) @ t["v"]

    with ckptkern.backend(backend):
        assert_same_within_rounding(gradients(ours(softcap=0.7, **options), tensors), gradients(capped, tensors))
        assert_same_within_rounding(
            gradients(ours(softcap=1e4, **options), tensors), gradients(torchs(**options), tensors)
        )
    with pytest.raises(ValueError, match="softcap must be above 0 and finite, not 0"):
        ours(softcap=0)(tensors)


@pytest.mark.parametrize("shapes", [
    ((7, 6), (5, 6), (5, 6)), ((3, 7, 6), (3, 5, 6), (3, 5, 6)), ((2, 3, 4, 7, 6),) * 3,
    ((2, 4, 7, 6), (1, 4, 5, 6), (1, 4, 5, 6)), ((2, 4, 7, 6), (2, 1, 5, 6), (2, 1, 5, 6)),
    ((2, 4, 7, 6), (2, 1, 5, 6), (2, 4, 5, 6)), ((4, 7, 6), (1, 5, 6), (1, 5, 6)), ((2, 1, 7, 6), (2, 4, 5, 6), (2, 4, 5, 6)),
    ((2, 4, 7, 6), (2, 4, 5, 6), (2, 4, 5, 9)), ((2, 4, 7, 6), (2, 4, 5, 6), (2, 4, 5, 3)),
], ids=str)  # fmt: skip
def test_shapes_like_torchs(shapes):
    """Fewer and more dimensions, a broadcast batch, broadcast heads, and a value head dim of its own."""
    tensors = heads(*shapes)
    assert_same_within_rounding(gradients(ours(), tensors), gradients(torchs(), tensors))


@pytest.mark.parametrize("shape", [(3, 1, 7, 7), (4, 7, 7), (1, 1, 7, 7), (2, 3, 4, 7, 7), (2, 1, 1, 1, 7)], ids=str)
def test_masks_of_five_dimensions_like_torchs(shape):
    tensors = heads(*((2, 3, 4, 7, 6),) * 3) | {"mask": torch.randn(shape).requires_grad_()}
    assert_same_within_rounding(gradients(learned(ours), tensors), gradients(learned(torchs), tensors))


WIDE, NARROW, CU = torch.randn(1, 3, 1, 257), torch.randn(1, 3, 1, 16), torch.tensor([0, 3], dtype=torch.int32)
TOO_WIDE = {
    "query": lambda: ckptkern.scaled_dot_product_attention(WIDE, WIDE, NARROW),
    "value": lambda: ckptkern.scaled_dot_product_attention(NARROW, NARROW, WIDE),
    "packed": lambda: ckptkern.varlen_attn(WIDE[0], WIDE[0], WIDE[0], CU, CU, 3, 3),
    "block": lambda: ckptkern.attention_block(NARROW[:, :, 0], torch.ones(771, 16), None, torch.ones(16, 257), None, 1),
}


@pytest.mark.parametrize("call", TOO_WIDE.values(), ids=TOO_WIDE)
def test_head_dims_that_no_kernel_covers(call):
    """Eager PyTorch, and an error where kernels are asked for."""
    assert call().isfinite().all()
    with (
        ckptkern.backend("triton"),
        pytest.raises(RuntimeError, match="the attention kernels cover head dims up to 256, not 257"),
    ):
        call()


def test_what_only_eager_computes_is_no_secret():
    """A gradient of slopes, and the weights: an error where kernels are asked for."""
    q, slopes = torch.randn(1, 2, 5, 6), torch.ones(2, requires_grad=True)
    attention = ckptkern.nn.MultiheadAttention(6, 2)
    with ckptkern.backend("triton"):
        with pytest.raises(RuntimeError, match="the kernels form no gradient of alibi_slopes"):
            ckptkern.scaled_dot_product_attention(q, q, q, alibi_slopes=slopes)
        with torch.no_grad():
            ckptkern.scaled_dot_product_attention(q, q, q, alibi_slopes=slopes)
        x = torch.randn(5, 6)
        with pytest.raises(RuntimeError, match="the kernels do not return the weights: pass need_weights=False"):
            attention(x, x, x)
        attention(x, x, x, need_weights=False)


def test_meta_tensors():
    q = torch.empty(2, 4, 7, 6, device="meta")
    assert ckptkern.scaled_dot_product_attention(q, q, q, dropout_p=P).shape == q.shape
    rows, cu = torch.empty(9, 4, 6, device="meta", requires_grad=True), CU_Q.to("meta")
    out = ckptkern.varlen_attn(rows, rows, rows, cu, cu, 5, 5)
    out.sum().backward()
    assert out.shape == rows.grad.shape == rows.shape


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((5, 8), (3, 8)), ((5, 8), (1, 1, 3, 8)), ((5, 8), (2, 3, 8)), ((2, 5, 8), (3, 2, 4, 8)), ((1, 5, 8), (4, 8)),
        ((1, 2, 2, 5, 8), (3, 2, 2, 4, 8)), ((3, 2, 2, 5, 8), (4, 8)), ((4, 1, 2, 5, 8), (3, 1, 4, 8)),
        ((2, 2, 1, 2, 5, 8), (2, 4, 8)),
    ],
)  # fmt: skip
def test_leading_dimensions_broadcast_as_torchs(q, k):
    tensors = heads(q, k, k)
    expected = gradients(lambda t: F.scaled_dot_product_attention(*t.values()), tensors)
    assert_same_within_rounding(
        gradients(lambda t: ckptkern.scaled_dot_product_attention(*t.values()), tensors), expected
    )


def test_heads_of_no_dims():
    rows = torch.randn(9, 4, 0)
    assert ckptkern.varlen_attn(rows, rows, rows, CU_Q, CU_Q, 5, 5).shape == rows.shape
    x, qkv, out = torch.randn(9, 6), torch.randn(0, 6), torch.randn(6, 0)
    assert torch.equal(ckptkern.attention_block(x, qkv, None, out, None, 2, residual=True), x)


def test_a_scale_in_a_tensor_as_in_torch():
    tensors, scale = qkv(), torch.tensor(0.3)
    assert_same(gradients(ours(scale=scale), tensors), gradients(ours(scale=scale.item()), tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [(2, 1), (0, -1), (-1, 0), (-1, -1), (0, 0)], ids=str)
def test_window_and_slopes(window, dtype):
    tensors, slopes = qkv(dtype=dtype), torch.tensor([0.5, 0.25, 0.125, 1.0])
    i, j = torch.arange(7)[:, None], torch.arange(5)
    hidden = torch.zeros(7, 5, dtype=torch.bool)
    for side, beyond in zip(window, (j < i - window[0], j > i + window[1]), strict=True):
        hidden |= beyond if side >= 0 else False
    bias = (-slopes[:, None, None] * (i - j).abs()).masked_fill(hidden, -math.inf)
    results = gradients(ours(window_size=window, alibi_slopes=slopes), tensors)
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    dy = output_gradient(results["y"]).double()
    expected = gradients(torchs(attn_mask=bias[None].double()), wide, dy)
    for name, value in expected.items():
        near = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
        torch.testing.assert_close(results[name].double(), value.nan_to_num(), **near)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout(causal):
    tensors = qkv(Sq=7, Sk=7)
    expected = gradients(
        lambda t: unfused_attention(t["q"], t["k"], t["v"], causal=causal, p=P, drawn=rng_states()), tensors
    )
    assert_same_within_rounding(gradients(ours(dropout_p=P, is_causal=causal), tensors), expected)


@pytest.mark.parametrize("kind", ["bool", "additive", "window"])
def test_rows_that_see_nothing(kind):
    """Rows that see nothing give zeros and zero gradients, never NaN (pytorch#103749, pytorch#41508)."""
    tensors, hidden = qkv(Sq=7, Sk=3), torch.zeros(7, 3, dtype=torch.bool)
    hidden[2], hidden[5] = True, True
    options = {"attn_mask": ~hidden if kind == "bool" else torch.zeros(7, 3).masked_fill(hidden, -math.inf)}
    rows = [2, 5]
    if kind == "window":
        options, rows = {"window_size": (1, 0)}, [4, 5, 6]
    results = gradients(ours(**options), tensors)
    assert all(value.isfinite().all() for value in results.values())
    assert not results["y"][:, :, rows].any()
    assert not results["q"][:, :, rows].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_rows_hidden_by_a_finite_mask(value, dtype):
    """The rows' weights still add up to one: they are as exact as softmax's own, in both directions."""
    mask = torch.zeros(7, 5, dtype=dtype)
    mask[2:4] = max(value, torch.finfo(dtype).min)
    tensors, dy = qkv(dtype=dtype), torch.randn(2, 4, 7, 6).to(dtype)

    def softmaxed(t):
        s = t["q"] @ t["k"].mT * 6**-0.5 + mask.to(t["q"].dtype)
        return s.softmax(-1) @ t["v"]

    exact = gradients(softmaxed, clone(tensors, torch.float64), dy.double())
    assert_as_exact(gradients(ours(attn_mask=mask), tensors, dy), gradients(softmaxed, tensors, dy), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, P])
def test_large_scores(p, dtype):
    """|q| of 100, keys alike: next to a score of 1e4, a float32 logsumexp has no digits left for log(5)."""
    tensors = {name: t.detach() for name, t in qkv(dtype=dtype).items()}
    tensors["q"] = 100 * tensors["q"].sign()
    tensors["k"] = (100 * tensors["k"][:, :, :1].sign()).expand(2, 4, 5, 6)
    tensors["v"].requires_grad_()

    def unfused(t):
        return unfused_attention(t["q"], t["k"], t["v"], p=p, drawn=rng_states())

    exact = gradients(unfused, clone(tensors, torch.float64))
    call = ours(dropout_p=p, attn_mask=None if p else torch.ones(7, 5, dtype=torch.bool))
    assert_as_exact(gradients(call, tensors), gradients(unfused, tensors), exact)


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return seeded(torch.compile(function, backend=backend, fullgraph=True))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
class TestSegment:
    @pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
    def test_saved_bytes(self, call, how):
        """q, k, v, o, the logsumexp in float32, 16 bytes of dropout, and what was given: mask, sinks, the sequences' ends."""
        tensors = call.make(torch.bfloat16 if how == "bfloat16" else torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"), saved_tensors() as saved:
            call.fused(tensors)
        queries, keys = tensors["q"].numel(), tensors["k"].numel()
        mask = tensors.get("mask", call.options.get("attn_mask", torch.empty(0)))
        given = CU_Q.nbytes + CU_K.nbytes if call.packed else mask.nbytes + tensors.get("sinks", torch.empty(0)).nbytes
        itemsize = 4 if how == "float32" else 2
        assert saved.bytes == 2 * (queries + keys) * itemsize + queries // 6 * 4 + 16 * call.drops + given

    def test_per_sample_gradients(self, call):
        """vmap(grad) is a loop over the samples; with dropout under one mask, under one for each, or an error."""
        samples = [{name: t.detach() + n for name, t in call.make().items()} for n in range(3)]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in call.names}
        grad = torch.func.grad(lambda t: call.call(t).square().sum())

        def batched(randomness, t):
            return seeded(torch.func.vmap(grad, randomness=randomness))(t)

        results = batched("same" if call.drops else "error", batch)
        for n, sample in enumerate(samples):
            assert_same({name: t[n] for name, t in results.items()}, seeded(grad)(sample))
        if call.drops:
            alike = batched("different", {name: t[:1].expand_as(t) for name, t in batch.items()})["v"]
            assert all(not torch.equal(alike[i], alike[j]) for i, j in itertools.combinations(range(3), 2))
            with pytest.raises(RuntimeError, match="randomness"):
                batched("error", batch)

    def test_autocast(self, call):
        """The result has the bits that bfloat16 q, k and v give; gradients are float32. A mask and sinks stay as they are."""
        tensors = call.make()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call.fused(tensors)
        results = gradients(lambda t: y, tensors)
        others = {name: t for name, t in clone(tensors).items() if name in ("mask", "sinks")}
        expected = gradients(call.fused, clone(tensors, torch.bfloat16) | others)
        assert_same(results, {name: t if name == "y" else t.float() for name, t in expected.items()})

    def test_kernels(self, call):
        tensors = call.make()
        with ckptkern.backend("triton"):
            results = gradients(call.fused, tensors)
        assert_same_within_rounding(results, gradients(call.fused, tensors))


def one_graph(function, steps) -> int:
    """How often `function` is compiled for `steps`: shapes of q, k and v, with the other arguments."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(function, backend=counter, fullgraph=True)
    for shapes, *others in steps:
        tensors = heads(*shapes)
        results = gradients(seeded(lambda t, others=others: graph(t, *others)), tensors)
        assert_same(results, gradients(seeded(lambda t, others=others: function(t, *others)), tensors))
    return counter.frame_count


def sized(B, Sq, Sk):
    return [((B, 4, Sq, 6), (B, 4, Sk, 6), (B, 4, Sk, 6))]


def test_one_graph_for_all_lengths():
    """It compiles for the first lengths, then once for any."""

    def call(t):
        return ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], dropout_p=P)

    assert one_graph(call, (sized(2, Sq, Sk) for Sq, Sk in ((7, 5), (9, 8), (33, 64), (17, 3)))) <= 2


def test_one_graph_for_all_batch_sizes():
    """New sizes and seeds compile nothing anew (flash-attention#911)."""

    def call(t):
        return ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], dropout_p=P)

    assert one_graph(call, (sized(B, 7, 5) for B in (2, 3, 5, 4))) <= 2


def test_one_graph_for_all_packings():
    """Any number of tokens and sequences, and any longest one."""

    def call(t, cu, longest):
        return ckptkern.varlen_attn(t["q"], t["k"], t["v"], cu, cu, longest, longest, is_causal=True)

    packings = [[0, 4, 9], [0, 3, 5, 11], [0, 7, 20], [0, 1, 2, 3, 33], [0, 64, 65]]
    longest = [max(b - a for a, b in itertools.pairwise(ends)) for ends in packings]
    steps = [
        (((ends[-1], 4, 6),) * 3, torch.tensor(ends, dtype=torch.int32), n)
        for ends, n in zip(packings, longest, strict=True)
    ]
    assert one_graph(call, steps) <= 2


EMPTY = {
    "no batch": ((0, 4, 7, 6), (0, 4, 5, 6)),
    "no rows": ((2, 4, 0, 6), (2, 4, 5, 6)),
    "no columns": ((2, 4, 7, 6), (2, 4, 0, 6)),
    "no head dim": ((2, 4, 7, 0), (2, 4, 5, 0)),
    "packed, no rows": ((0, 4, 6), (5, 4, 6), (0, 0), (0, 5)),
    "packed, no columns": ((7, 4, 6), (0, 4, 6), (0, 7), (0, 0)),
    "no sequences": ((7, 4, 6), (5, 4, 6), (0,), (0,)),
}


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
def test_empty(shapes, backend):
    """Zeros and zero gradients where there is nothing to see."""
    q, k, *ends = shapes
    tensors = heads(q, k, k)

    def call(t):
        if not ends:
            return ours(dropout_p=P)(t)
        cu = (torch.tensor(end, dtype=torch.int32) for end in ends)
        return ckptkern.varlen_attn(t["q"], t["k"], t["v"], *cu, 7, 5)

    with ckptkern.backend(backend):
        results = gradients(call, tensors)
    assert results["y"].shape == q
    for name, t in results.items():
        assert not t.any(), name
        assert name == "y" or t.shape == tensors[name].shape


LEARNED = {
    "all": (2, 4, 7, 5), "three dimensions": (4, 7, 5), "samples": (2, 1, 7, 5), "two dimensions": (7, 5),
    "keys of samples": (2, 1, 1, 5), "keys": (5,),
}  # fmt: skip


# Every shape on the kernels, which take most of the time, in one dtype.
LEARNED_CASES = [(shape, dtype, "eager") for shape in LEARNED for dtype in DTYPES]
LEARNED_CASES += [(shape, DTYPES[i % 3], "triton") for i, shape in enumerate(LEARNED)]


@pytest.mark.parametrize(("shape", "dtype", "backend"), LEARNED_CASES, ids=str)
def test_learned_mask(shape, dtype, backend):
    """The gradient has the mask's shape and dtype, and at most twice the error of PyTorch's own."""
    tensors = qkv(H_kv=2, dtype=dtype) | {"mask": torch.randn(LEARNED[shape]).to(dtype).requires_grad_()}
    with ckptkern.backend(backend):
        check_exactness(learned(ours, enable_gqa=True), learned(torchs, enable_gqa=True), tensors)


def test_learned_slopes():
    """From PyTorch ops."""
    tensors, (i, j) = qkv() | {"slopes": torch.rand(4).requires_grad_()}, (torch.arange(7)[:, None], torch.arange(5))
    results = gradients(lambda t: ours(alibi_slopes=t["slopes"])(t), tensors)
    expected = gradients(lambda t: torchs(attn_mask=-t["slopes"][:, None, None] * (i - j).abs())(t), tensors)
    assert_same_within_rounding(results, expected)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_learned_mask_that_hides(backend):
    """-inf hides single keys and a whole row: their gradient is 0, never NaN, and torch's elsewhere."""
    mask = torch.randn(4, 7, 5)
    mask[:, 2] = mask[1, :, 3] = -math.inf
    tensors = qkv() | {"mask": mask.requires_grad_()}
    with ckptkern.backend(backend):
        results = gradients(learned(ours), tensors)
    assert (results["mask"] == 0).sum() == 4 * 5 + 6
    expected = gradients(learned(torchs), tensors)
    assert_same_within_rounding(results, {name: t.nan_to_num() for name, t in expected.items()})


def test_autocast_mixes_no_float64():
    q, k, v = qkv().values()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match=r"but have torch.float64, torch.float32"),
    ):
        ckptkern.scaled_dot_product_attention(q.double(), k, v)


# -- packed sequences -------------------------------------------------------------------------------------------------


@pytest.fixture
def _poisoned_memory():
    """Inside, torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.usefixtures("_poisoned_memory")
def test_varlen_like_each_sequence(window, kv_heads, backend):
    """One of them without queries, one with more queries than keys, and rows after the last that are in none."""
    tensors = heads((11, 4, 6), (14, kv_heads, 6), (14, kv_heads, 6))
    options = {"enable_gqa": kv_heads != 4}

    def packed(t):
        causal = window == (-1, 0)
        return ckptkern.varlen_attn(
            t["q"], t["k"], t["v"], CU_Q, CU_K, 5, 6, is_causal=causal, window_size=(-1, -1) if causal else window,
            **options,
        )  # fmt: skip

    def one_by_one(t):
        parts = []
        for n in range(3):
            rows, columns = slice(CU_Q[n], CU_Q[n + 1]), slice(CU_K[n], CU_K[n + 1])
            Sq, Sk = CU_Q[n + 1] - CU_Q[n], CU_K[n + 1] - CU_K[n]
            i, j = torch.arange(Sk - Sq, Sk)[:, None], torch.arange(Sk)
            left, right = (side if side >= 0 else 99 for side in window)
            seen = (j >= i - left) & (j <= i + right)
            q, k, v = (t[name][where].transpose(0, 1) for name, where in (("q", rows), ("k", columns), ("v", columns)))
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **options).transpose(0, 1))
        return torch.cat([*parts, torch.zeros(2, 4, 6)])

    expected = gradients(one_by_one, tensors)
    with ckptkern.backend(backend):
        assert_same_within_rounding(gradients(packed, tensors), expected)


# -- options of attention_block ----------------------------------------------------------------------------------------

BLOCKS = {
    "slopes": {"slopes": (4,)},
    "slopes by batch": {"slopes": (2, 4), "causal": False, "kv_heads": 2},
    "pairs": {"rotary": True, "interleaved": True},
    "tables by batch": {"rotary": True, "batched_tables": True, "kv_heads": 1},
    "pairs by batch": {"rotary": True, "batched_tables": True, "interleaved": True, "qk_norm": "rms"},
    "scale": {"scale": 0.9},
}


@pytest.mark.parametrize(("mode", "backend"), [*((mode, "eager") for mode in MODES), ("full", "triton")])
@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
def test_options_of_a_block(options, mode, backend):
    """Values and gradients, with dropout. The kernels give eager's results, whose error is known."""
    block = Block("", Attention(norm=None, resid_p=0.0, **options), recompute=mode)
    if backend == "eager":
        check_exactness(block.fused, block.unfused, block.make())
        return
    tensors = block.make()
    expected = gradients(block.fused, tensors)
    with ckptkern.backend("triton"):
        assert_same_within_rounding(gradients(block.fused, tensors), expected)


ENDS = torch.tensor([0, 4, 4, 11], dtype=torch.int32)


def rotated_block(rotary, mode="selective", **options):
    def run(t):
        return ckptkern.attention_block(
            t["x"], t["qkv_weight"], t["qkv_bias"], t["out_weight"], t["out_bias"], 4, rotary=rotary, recompute=mode,
            is_causal=True, **options,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_tables_of_one_row_cover_a_batch(backend, interleaved):
    """[1, S, R], as transformers makes them, is [S, R]; two of the six dimensions stay."""
    block = Block("", Attention(norm=None, residual=False))
    tables = ckptkern.nn.rotary_tables(torch.arange(7), 4, 10.0, interleaved=interleaved)
    tensors = block.make()
    with ckptkern.backend(backend):
        ours, expected = (
            gradients(rotated_block(pair, rotary_interleaved=interleaved), tensors)
            for pair in (tuple(table[None] for table in tables), tables)
        )
    assert_same(ours, expected)


@pytest.mark.parametrize(
    ("mode", "backend", "interleaved", "cu"),
    [*itertools.product(MODES, ["eager"], [False, True], [None, ENDS]), ("full", "triton", True, ENDS)],
)
def test_theta_stands_for_its_tables(mode, backend, interleaved, cu):
    """The same bits in first and second order, and no tables are saved."""
    block = Block("", Attention(norm=None, residual=False))
    tensors = block.make() if cu is None else block.make(lead=(11,))
    positions = torch.arange(7) if cu is None else torch.tensor([*range(4), *range(7)])
    tables = ckptkern.nn.rotary_tables(positions, 6, 10.0, interleaved=interleaved)
    by_theta, by_tables = (
        rotated_block(rotary, mode, rotary_interleaved=interleaved, cu_seqlens=cu) for rotary in (10.0, tables)
    )
    with ckptkern.backend(backend):
        assert_same(gradients(by_theta, tensors), gradients(by_tables, tensors))
        seconds = []
        for function in (by_theta, by_tables):
            (dx,) = torch.autograd.grad(function(tensors).square().sum(), tensors["x"], create_graph=True)
            seconds.append(torch.autograd.grad(dx.square().sum(), tensors["qkv_weight"])[0])
        assert torch.equal(*seconds)
        with saved_tensors() as saved:
            by_theta(tensors)
        with saved_tensors() as saved_with_tables:
            by_tables(tensors)
    assert saved_with_tables.bytes - saved.bytes == sum(table.nbytes for table in tables)


def packed_block(mode):
    def run(t):
        return ckptkern.attention_block(
            t["x"], t["qkv_weight"], t["qkv_bias"], t["out_weight"], t["out_bias"], 4, is_causal=True, dropout_p=P,
            cu_seqlens=ENDS, max_seqlen=7, recompute=mode,
        )  # fmt: skip

    return seeded(run)


def unfused_packed_block(t):
    """Sequence n has the planes of the masks that it would have in a batch of rows of max_seqlen."""
    drawn, outs = next(rng_states()), []
    q, k, v = F.linear(t["x"], t["qkv_weight"], t["qkv_bias"]).unflatten(-1, (3, 4, 6)).permute(1, 2, 0, 3)
    for n, (start, end) in enumerate(itertools.pairwise(ENDS.tolist())):
        S = end - start
        keep = state.keep_mask(drawn, P, S, S, planes=4, plane_base=4 * n, total_rows=7)
        s = q[:, start:end] @ k[:, start:end].mT * 6**-0.5
        p = s.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        outs.append(p * keep * state.threshold_scale(P)[1] @ v[:, start:end])
    return F.linear(torch.cat(outs, 1).transpose(0, 1).flatten(1), t["out_weight"], t["out_bias"])


PACKED_BLOCK = Block("", Attention(norm=None, residual=False))


@pytest.mark.parametrize(("mode", "backend"), [*((mode, "eager") for mode in MODES), ("full", "triton")])
def test_packed_sequences_with_dropout(mode, backend):
    """Backward uses forward's mask: with another, gradients would be those of another function."""
    with ckptkern.backend(backend):
        check_exactness(packed_block(mode), unfused_packed_block, PACKED_BLOCK.make(lead=(11,), seed=2))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_packed_sequences_with_dropout_in_every_mode(backend):
    """The same bits."""
    tensors = PACKED_BLOCK.make(torch.bfloat16, lead=(11,))
    with ckptkern.backend(backend):
        assert_same(gradients(packed_block("full"), tensors), gradients(packed_block("none"), tensors))


# -- errors -----------------------------------------------------------------------------------------------------------

Q = torch.randn(2, 4, 7, 6)
ERRORS = {
    "dtype": (TypeError, "must have one dtype", (Q, Q.double(), Q), {}),
    "integers": (TypeError, "must be floating point", (Q.int(), Q, Q), {}),
    "head dims": (ValueError, "head dim 6 but key has 3", (Q, Q[..., :3], Q), {}),
    "rows": (ValueError, "key has 7 rows but value has 5", (Q, Q, Q[:, :, :5]), {}),
    "heads": (ValueError, "enable_gqa=True", (Q, Q[:, :2], Q[:, :2]), {}),
    "dividing heads": (ValueError, "must divide", (Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}),
    "batches": (ValueError, "batch sizes must be equal or 1", (Q, Q.repeat(2, 1, 1, 1), Q), {}),
    "one dimension": (ValueError, r"must be \[\.\.\., S, D\]", (Q[0, 0, 0], Q, Q), {}),
    "mask and causal": (RuntimeError, "should not be set", (Q, Q, Q), {"attn_mask": BOOL, "is_causal": True}),
    "mask's shape": (ValueError, "does not broadcast", (Q, Q, Q), {"attn_mask": BOOL}),
    "mask's dtype": (TypeError, "attn_mask must be bool", (Q, Q, Q), {"attn_mask": BOOL.int()}),
    "probability": (ValueError, "dropout probability", (Q, Q, Q), {"dropout_p": 1.5}),
    "window": (ValueError, "window_size must be", (Q, Q, Q), {"window_size": (-2, 0)}),
    "window of one": (ValueError, "window_size must be", (Q, Q, Q), {"window_size": 3}),
    "mask of another dtype": (
        TypeError,
        "attn_mask is torch.float64",
        (Q, Q, Q),
        {"attn_mask": torch.zeros(1, dtype=torch.float64)},
    ),
    "mask's device": (
        ValueError,
        "input is on cpu but attn_mask is on meta",
        (Q, Q, Q),
        {"attn_mask": BOOL.to("meta")},
    ),
    "slopes' device": (
        ValueError,
        "alibi_slopes is on meta",
        (Q, Q, Q),
        {"alibi_slopes": torch.ones(4, device="meta")},
    ),
    "slopes' dtype": (TypeError, "alibi_slopes must be floating point", (Q, Q, Q), {"alibi_slopes": torch.arange(4)}),
    "a list of slopes": (TypeError, "alibi_slopes must be a Tensor, not list", (Q, Q, Q), {"alibi_slopes": [0.5] * 4}),
    "slopes": (ValueError, "alibi_slopes must be", (Q, Q, Q), {"alibi_slopes": torch.ones(3)}),
}


@pytest.mark.parametrize(("error", "message", "args", "options"), ERRORS.values(), ids=ERRORS)
def test_errors(error, message, args, options):
    with pytest.raises(error, match=f"scaled_dot_product_attention: .*{message}"):
        ckptkern.scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "must be \\[tokens, heads, head_dim\\]", {"query": Q}),
        (ValueError, "must be int32", {"cu_seq_q": CU_Q.long()}),
        (TypeError, "cu_seq_k must be a Tensor, not NoneType", {"cu_seq_k": None}),
        (ValueError, "input is on cpu but cu_seq_q is on meta", {"cu_seq_q": CU_Q.to("meta")}),
        (ValueError, "sequences but cu_seq_k has", {"cu_seq_q": CU_Q[:2]}),
        (ValueError, "must have one shape", {"key": torch.randn(5, 4, 6)}),
        (ValueError, "need enable_gqa=True", {"query": torch.randn(9, 8, 6)}),
        (ValueError, "max_q must be an integer of at least 0, not -1", {"max_q": -1}),
        (ValueError, "max_k must be an integer of at least 0, not None", {"max_k": None}),
        (TypeError, "scale must be a number, not '1'", {"scale": "1"}),
    ],
)
def test_varlen_errors(error, message, changes):
    k = torch.randn(11, 4, 6)
    arguments = dict(query=torch.randn(9, 4, 6), key=k, value=k, cu_seq_q=CU_Q, cu_seq_k=CU_K, max_q=5, max_k=6)
    with pytest.raises(error, match=f"varlen_attn: .*{message}"):
        ckptkern.varlen_attn(**arguments | changes)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_bounds_and_slopes_of_any_strides(backend):
    """The kernels read slopes with a stride of 1, so for a column of a table they would read its neighbours."""

    def column(t):
        return torch.stack((t, torch.full_like(t, 9)), -1)[..., 0]

    tensors = {"x": torch.randn(11, 10), "w": torch.randn(72, 10), "o": torch.randn(10, 24)}
    slopes, ends = torch.tensor([0.5, 0.25, 0.1, 0.2]), torch.tensor([0, 4, 11], dtype=torch.int32)
    q = torch.randn(11, 4, 6)
    with ckptkern.backend(backend):
        outs = [
            (
                ckptkern.varlen_attn(q, q, q, bounds, bounds, 7, 7),
                ckptkern.attention_block(
                    tensors["x"], tensors["w"], None, tensors["o"], None, 4, cu_seqlens=bounds, alibi_slopes=steep
                ),
            )
            for bounds, steep in ((ends, slopes), (column(ends), column(slopes)))
        ]
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


def test_lse_of_heads_without_dimensions():
    """Scores are 0, or the mask's: the saved tensors are those of eager PyTorch, not uninitialised memory."""
    q = torch.empty(1, 2, 3, 0)
    core = eager.AttentionCore(1.0, "ieee", (None, 0))
    for ours, theirs in zip(
        triton_kernels.attn_fwd(q, q, q, core, do=q), eager.attn_fwd(q, q, q, core, do=q), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(triton_kernels.attn_delta(q, q, core), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("bounds", [[0, 6, 2], [0, 4, 12], [-1, 4, 9]], ids=str)
def test_sequences_outside_of_the_rows(bounds):
    """PyTorch ops read the bounds and check them; the kernels do not, because the host would have to wait."""
    cu = torch.tensor(bounds, dtype=torch.int32)
    rows = torch.randn(9, 4, 6)
    with pytest.raises(ValueError, match=r"within 0\.\.9, but cu_seqlens is \[" + str(bounds)[1:-1]):
        ckptkern.varlen_attn(rows, rows, rows, cu, cu, 9, 9)


# -- torch's own kernel as the core ------------------------------------------------------------------------------------

HEADS = (2, 4, 128, 64)
CORES = {
    "plain": ({}, "cudnn"),
    "causal": ({"right": 0}, "cudnn"),
    "grouped heads": ({"k_shape": (2, 1, 128, 64)}, "cudnn"),
    "other lengths": ({"k_shape": (2, 4, 256, 64)}, "cudnn"),
    "other lengths, causal": ({"k_shape": (2, 4, 256, 64), "right": 0}, ""),
    "192 keys": ({"q_shape": (2, 4, 192, 64), "k_shape": (2, 4, 192, 64)}, ""),
    "192 keys, causal": ({"q_shape": (2, 4, 192, 64), "k_shape": (2, 4, 192, 64), "right": 0}, "cudnn"),
    "scale of 0": ({"right": 0, "scale": 0.0}, ""),
    "float32": ({"dtype": torch.float32}, ""),
    "heads of 32": ({"q_shape": (2, 4, 128, 32), "k_shape": (2, 4, 128, 32)}, "flash"),
    "heads of 256": ({"q_shape": (2, 4, 128, 256), "k_shape": (2, 4, 128, 256)}, "flash"),
    "heads of 264": ({"q_shape": (2, 4, 128, 264), "k_shape": (2, 4, 128, 264)}, ""),
    "heads of 68": ({"q_shape": (2, 4, 128, 68), "k_shape": (2, 4, 128, 68)}, ""),
    "no rows": ({"q_shape": (2, 4, 0, 64)}, ""),
    "one row": ({"q_shape": (2, 4, 1, 64)}, ""),
    "a window": ({"left": 3, "right": 0}, ""),
    "lower-right": ({"k_shape": (2, 4, 256, 64), "right": 128}, ""),
    "lower-right, fewer keys": ({"q_shape": (2, 4, 256, 64), "right": -128}, ""),
    "a mask, slopes or dropout": ({"other": True}, ""),
    "backend eager": ({"backend": "eager"}, ""),
    "Ampere": ({"capability": (8, 0)}, "flash"),
    "Blackwell": ({"capability": (10, 0)}, "flash"),
    "refused by torch": ({"accepts": False}, ""),
}


def chosen_core(monkeypatch, *, q_shape=HEADS, k_shape=HEADS, dtype=torch.bfloat16, left=None, right=None, backend="triton",
                scale=0.125, other=None, capability=(9, 0), accepts=True):  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(attention_core, "_accepts", lambda *args: accepts)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda")
    return attention_core.fused_core(backend, x, dtype, q_shape, k_shape, left, right, scale, None, other)


@pytest.mark.parametrize("call", CORES)
def test_whose_kernel_the_core_is(call, monkeypatch):
    options, wanted = CORES[call]
    assert chosen_core(monkeypatch, **options) == wanted


def test_sinks_are_no_reason_for_another_kernel(monkeypatch):
    """What is asked for is the same with them and without, in both ops."""
    asked = []
    for module in (sdpa, arguments):
        monkeypatch.setattr(module, "fused_core", lambda *args: asked.append(args[2:]) or "")
    t, w = qkv(), torch.randn(24, 24)
    for options in ({}, {"sinks": torch.zeros(4)}):
        ckptkern.scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)
        ckptkern.attention_block(torch.randn(2, 7, 24), [w, w, w], None, w, None, 4, **options)
    assert asked[:2] == asked[2:]


def test_the_core_is_ours_where_torchs_may_not_run(monkeypatch):
    """Our core runs under deterministic algorithms, backend("triton"), with a kernel that the user has disabled, off GPUs."""
    with ckptkern.backend("triton"):
        assert chosen_core(monkeypatch) == ""
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_core(monkeypatch) == ""
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert chosen_core(monkeypatch) == ""
        assert chosen_core(monkeypatch, capability=(8, 0)) == "flash"
    assert chosen_core(monkeypatch) == "cudnn"
    assert attention_core.fused_core("triton", torch.empty(1), torch.bfloat16, HEADS, HEADS, None, None, 0.125) == ""


class Calls(TorchDispatchMode):
    """Names of the ops below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return self.names.count(name)


@pytest.mark.parametrize(("rotary", "sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("fused", ["cudnn", "flash"])
def test_a_block_round_torchs_kernel(fused, mode, kv_heads, rotary, sinks):
    """On tensors without data: torch's kernels take q, k, v as they lie in the packed projection and return what the op
    promises; o and lse are saved as always, and only "full" runs forward's kernel again. Sinks change neither."""
    B, S, H, D = 2, 48, 4, 64
    d = H * D
    with torch.no_grad():
        x = torch.empty(B, S, d, device="meta", dtype=torch.bfloat16)
        weights = [x.new_empty((H + 2 * kv_heads) * D, d), None, x.new_empty(d, d), x.new_empty(d)]
        with ckptkern.backend("eager"):
            t, o = gather(
                "test", x, *weights, H, kv_heads, is_causal=True, residual=True, recompute=mode,
                rotary=tuple(x.new_empty(2, S, D, dtype=torch.float32)) if rotary else None,
                sinks=x.new_empty(H) if sinks else None,
            )  # fmt: skip
        o = o._replace(fused=fused)
        with Calls() as forward:
            y, made = attention_sublayer(x, t, o)
        _, promised = attention_sublayer(x, t, o._replace(fused=""))  # as fakes do
        saved = {name: made[name] for name in saves(o)}
        for name, tensor in saved.items():
            promise = promised[name]
            assert (tensor.shape, tensor.dtype, tensor.stride()) == (promise.shape, promise.dtype, promise.stride())
        needs = sum(1 << i for i, tensor in enumerate((x, *t)) if tensor is not None)
        with Calls() as backward:
            grads = attention_sublayer_backward(torch.empty_like(y), AttentionSublayer(x, t, o), saved, needs)
    assert {name: grads[name].shape for name in ("x", "wq", "wo", "bo")} == {
        "x": x.shape, "wq": weights[0].shape, "wo": weights[2].shape, "bo": weights[3].shape
    }  # fmt: skip
    core = f"_scaled_dot_product_{fused}_attention"
    assert (forward.count(core), forward.count(f"{core}_backward")) == (1, 0)
    assert (backward.count(core), backward.count(f"{core}_backward")) == (mode == "full", 1)
    unwanted = {"repeat_interleave", "_softmax"} | (set() if rotary else {"clone"}) | (set() if sinks else {"exp"})
    assert not unwanted & {*forward.names, *backward.names}


@pytest.mark.parametrize("do_layout", ["heads", "tokens", "expanded"])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("fused", ["cudnn", "flash"])
def test_what_torchs_kernels_are_given(fused, layout, do_layout):
    """torch caches cuDNN's graphs by the layout of q, k and v alone, so do and o must always have one layout, and lse
    [B, H, S, 1]. The backend's own kernels are not called: here there are none."""
    B, H, S, D = 2, 4, 48, 64

    def heads(layout):
        x = torch.empty((B, S, H, D) if layout == "tokens" else (B, H, S, D), device="meta", dtype=torch.bfloat16)
        return (
            x[:1, :1, :1, :1].expand(B, H, S, D)
            if layout == "expanded"
            else x.transpose(1, 2)
            if layout == "tokens"
            else x
        )

    given = {}

    class Given(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given[func.__name__.removesuffix(".default")] = args
            return func(*args, **(kwargs or {}))

    q, do, core = heads(layout), heads(do_layout), eager.AttentionCore(0.125, "ieee", (None, 0), fused=fused)
    backend = None
    with Given(), torch.no_grad():
        o, lse, delta = attention_core.attend(backend, q, q, q, core, do)
        *grads, dmask, dslopes = attention_core.attention_grads(backend, q, q, q, do, o, lse, core)
    assert delta is dmask is dslopes is None
    assert lse.shape == (B, H, S)
    assert [g.shape for g in grads] == [q.shape] * 3
    do, q, k, v, o, lse, *_ = given[f"_scaled_dot_product_{fused}_attention_backward"]
    tokens = (S * H * D, D, H * D, 1)
    if fused == "cudnn":
        assert lse.shape == (B, H, S, 1)
        assert do.stride() == o.stride() == q.stride() == k.stride() == v.stride() == tokens
    else:
        assert lse.shape == (B, H, S)
        assert do.stride(-1) == o.stride(-1) == 1


PACKED = (16 * 768, 64, 768, 1)  # strides of heads [2, 4, 16, 64] within q, k, v side by side


@pytest.mark.parametrize(("strides", "offset", "wanted"), [
    (PACKED, 0, True), (PACKED, 256, True), (PACKED, 257, False), ((4096, 1024, 64, 1), 0, True),
    ((4352, 68, 272, 1), 0, False), ((4160, 1040, 65, 1), 0, False), ((4096, 1024, 1, 16), 0, False),
    ((0, 1024, 64, 1), 0, False),
], ids=str)  # fmt: skip
def test_rows_that_torchs_kernels_can_read(strides, offset, wanted):
    """On a GPU rows must begin at multiples of 16 bytes; on a CPU it is enough that a row is contiguous."""
    memory = torch.empty(2 * 16 * 768 + 512, dtype=torch.bfloat16)
    assert eager.readable(memory.as_strided((2, 4, 16, 64), strides, offset)) == (strides[3] == 1)
    with FakeTensorMode():
        on_gpu = torch.empty(memory.shape, dtype=memory.dtype, device="cuda")
        assert eager.readable(on_gpu.as_strided((2, 4, 16, 64), strides, offset)) == wanted


def core_run(p, core, q, k, v, do):
    o, lse, _ = attention_core.attend(p, q, k, v, core)
    return o, lse, *attention_core.attention_grads(p, q, k, v, do, o, lse, core)[:3]


def accepted_kernels(dtype, D, causal, grouped):
    kernels = [name for name in ("cudnn", "flash") if attention_core._accepts(name, 0, dtype, D, causal, grouped)]
    assert kernels, "torch accepts none of its kernels here"
    return kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 80, 128])
def test_torchs_kernels_on_a_gpu(D, causal, kv_heads, dtype):
    """Every kernel that torch accepts there gives o, lse and gradients as exact as ours, and the same bits in every forward."""
    generator = torch.Generator("cuda").manual_seed(0)
    S = 200 if causal else 256
    q, do = (torch.randn(2, S, 4, D, generator=generator, device="cuda").to(dtype).transpose(1, 2) for _ in range(2))
    k, v = torch.randn(2, S, 2 * kv_heads, D, generator=generator, device="cuda").to(dtype).transpose(1, 2).chunk(2, 1)
    core = eager.AttentionCore(D**-0.5, "ieee", (None, 0) if causal else (None, None))

    exact = core_run(eager, core, *(t.double() for t in (q, k, v, do)))
    own = core_run(primitives("triton"), core, q, k, v, do)
    for name in accepted_kernels(dtype, D, causal, kv_heads != 4):
        got = core_run(eager, core._replace(fused=name), q, k, v, do)
        for result, ours, reference in zip(got, own, exact, strict=True):
            error, allowed = ((x.double() - reference).norm() / reference.norm() for x in (result, ours))
            assert error <= max(2 * allowed, 1e-5), name
            assert allowed < 0.02
        for _ in range(10):
            assert_same(attention_core.attend(eager, q, k, v, core._replace(fused=name))[:2], got[:2])


@pytest.mark.gpu
def test_torchs_kernels_on_a_gpu_in_every_layout():
    """Layouts run one after another in one process, with torch's own call among them: no plan reads with another's layout."""
    generator = torch.Generator("cuda").manual_seed(0)
    unfused = torch.randn(4, 2, 4, 256, 64, generator=generator, device="cuda").bfloat16()  # q, k, v, do

    def as_tokens(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def packed(x):
        return torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)

    layouts = {"heads": lambda x: x.clone(), "tokens": as_tokens, "packed": packed}
    core = eager.AttentionCore(0.125, "ieee")
    for name in accepted_kernels(torch.bfloat16, 64, False, False):
        for qkv_layout, do_layout in itertools.product(layouts, layouts):
            leaves = [layouts[qkv_layout](x).requires_grad_() for x in unfused[:3]]
            o = F.scaled_dot_product_attention(*leaves)
            o.backward(torch.empty_like(o).copy_(unfused[3]))  # with another layout torch's own has been wrong
            got = core_run(
                eager, core._replace(fused=name), *(x.detach() for x in leaves), layouts[do_layout](unfused[3])
            )
            for result, reference in zip(got, core_run(eager, core, *unfused.double()), strict=True):
                assert (result.double() - reference).norm() <= 0.02 * reference.norm(), (name, qkv_layout, do_layout)


@pytest.mark.gpu
@pytest.mark.parametrize("S", [64, 192, 256, 704, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_very_low_scores_on_a_gpu(causal, S):
    """pytorch#196678: cuDNN's backward gave NaN where a row's logsumexp is below -88.7 and keys do not fill a tile."""
    q, k, v = (torch.randn(2, S, 4, 128, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    with torch.no_grad():
        q[..., 0], k[..., 0] = 1, -120 * 128**0.5
    leaves = [t.requires_grad_() for t in (q, k, v)]
    ckptkern.scaled_dot_product_attention(*leaves, is_causal=causal).sum().backward()
    assert all(t.grad.isfinite().all() for t in leaves)
