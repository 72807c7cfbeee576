"""Attention in PyTorch ops, a block of queries at a time: results, what it never writes out, and which blocks there are."""

import math
from typing import NamedTuple

import pytest
import torch
from support.blocks import rng_states, unfused_attention
from support.cases import SEED, assert_as_exact, clone, gradients, output_gradient, over_samples, resampled

import ckptkern
from ckptkern import eager
from ckptkern.eager import attention, attention_core, query_blocks
from ckptkern.memory import peak_memory

B, SQ, SK, D, P = 2, 83, 70, 6, 0.3
LEAST = "1KiB"  # below what any block takes, so that blocks have 16 rows of one head


def within(left: float = math.inf, right: float = math.inf, rows: int = SQ, columns: int = SK) -> torch.Tensor:
    """True where column j is not in i - left .. i + right."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    return (j < i - left) | (j > i + right)


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


class Case(NamedTuple):
    """ours: arguments; plain: those of `plain_attention`. trained: a tensor of both that trains, by its name in ours."""

    ours: dict
    unfused: dict
    trained: str = ""


SEEN = seeded(B, 1, SQ, SK) > -0.5
SEEN[:, :, 20:40] = False  # rows that see nothing: a whole block of them and parts of others
PADDING = torch.ones(B, 1, 1, SK, dtype=torch.bool)
PADDING[0, ..., :25] = False  # with causality, its first rows see nothing
PADDING[1, ..., -9:] = False
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
ADDED = seeded(1, 4, SQ, SK).bfloat16().float()  # in any dtype
CASES = {
    "bool": Case({"attn_mask": SEEN}, {"hidden": ~SEEN}),
    "bool of heads": Case({"attn_mask": seeded(1, 4, SQ, SK) > -0.5}, {"hidden": seeded(1, 4, SQ, SK) <= -0.5}),
    "causal, padding": Case(
        {"attn_mask": PADDING, "window_size": (-1, 0)}, {"hidden": ~PADDING | within(right=0)}
    ),
    "added": Case({"attn_mask": ADDED}, {"added": ADDED}),
    "added, transposed": Case(
        {"attn_mask": ADDED.mT.contiguous().mT, "window_size": (-1, 3)}, {"added": ADDED, "hidden": within(right=3)}
    ),
    "window": Case({"window_size": (14, 4)}, {"hidden": within(14, 4)}),
    "left window": Case({"window_size": (5, -1)}, {"hidden": within(5)}),
    "window, mask": Case({"window_size": (9, 0), "attn_mask": SEEN}, {"hidden": within(9, 0) | ~SEEN}),
    "alibi": Case({"alibi_slopes": SLOPES, "is_causal": True}, {"slopes": SLOPES, "causal": True}),
    "alibi, mask": Case({"alibi_slopes": SLOPES, "attn_mask": SEEN}, {"slopes": SLOPES, "hidden": ~SEEN}),
    "softcap": Case({"softcap": 2.0, "is_causal": True}, {"softcap": 2.0, "causal": True}),
    "dropout": Case({"dropout_p": P}, {"p": P}),
    "dropout, window": Case({"dropout_p": P, "window_size": (40, 0)}, {"p": P, "hidden": within(40, 0)}),
    "dropout, mask": Case({"dropout_p": P, "attn_mask": SEEN}, {"p": P, "hidden": ~SEEN}),
    "trained mask": Case({"attn_mask": ADDED, "window_size": (-1, 0)}, {"added": ADDED, "causal": True}, "attn_mask"),
    "trained keys": Case({"attn_mask": ADDED[:, :1, :1]}, {"added": ADDED[:, :1, :1]}, "attn_mask"),
    "sinks": Case({"sinks": SLOPES - 0.3, "is_causal": True}, {"sinks": SLOPES - 0.3, "causal": True}, "sinks"),
    "sinks, mask": Case({"sinks": SLOPES, "attn_mask": SEEN}, {"sinks": SLOPES, "hidden": ~SEEN}, "sinks"),
    "sinks, window, dropout": Case(
        {"sinks": SLOPES + 1, "window_size": (9, 0), "dropout_p": P, "softcap": 2.0},
        {"sinks": SLOPES + 1, "hidden": within(9, 0), "p": P, "softcap": 2.0}, "sinks",
    ),
    "trained slopes": Case({"alibi_slopes": SLOPES, "softcap": 3.0}, {"slopes": SLOPES, "softcap": 3.0}, "alibi_slopes"),
}  # fmt: skip


def heads(kv_heads: int = 4, dtype: torch.dtype = torch.float32, rows: int = SQ, columns: int = SK, batch: int = B):
    generator = torch.Generator().manual_seed(3)
    shapes = (batch, 4, rows, D), (batch, kv_heads, columns, D), (batch, kv_heads, columns, D)
    return {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for name, shape in zip("qkv", shapes, strict=True)
    }


def ours(case: Case, workspace: str = LEAST):
    def run(t):
        torch.manual_seed(SEED)
        options = case.ours | ({case.trained: t["trained"]} if case.trained else {})
        return ckptkern.scaled_dot_product_attention(
            t["q"], t["k"], t["v"], enable_gqa=True, workspace=workspace, **options
        )

    return run


def trained_of(case: Case) -> dict[str, torch.Tensor]:
    return {"trained": case.ours[case.trained].clone().requires_grad_()} if case.trained else {}


def unfused(case: Case):
    name = {"attn_mask": "added", "alibi_slopes": "slopes", "sinks": "sinks"}.get(case.trained)

    def run(t):
        options = case.unfused | ({name: t["trained"]} if name else {})
        hidden = options.pop("hidden", None)
        if "added" in options:
            options["added"] = options["added"].to(t["q"].dtype)
        if hidden is None:
            return unfused_attention(t["q"], t["k"], t["v"], drawn=rng_states(), **options)
        nothing = hidden.all(-1, keepdim=True)  # NaN in a softmax, and in its gradient
        o = unfused_attention(t["q"], t["k"], t["v"], drawn=rng_states(), hidden=hidden & ~nothing, **options)
        return o.masked_fill(nothing, 0.0)

    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kv_heads", "dtype"), [(4, torch.float32), (2, torch.float32), (1, torch.bfloat16), (2, torch.float16)], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_pytorch(name, kv_heads, dtype):
    """Output and every gradient against float64, in blocks of 16 rows: odd sizes, rows that see nothing, fewer kv heads."""
    case = CASES[name]
    tensors = heads(kv_heads, dtype) | trained_of(case)
    draws = (
        [resampled(tensors, seed) for seed in range(12)] if case.trained == "sinks" else [tensors]
    )  # four numbers alone
    results = over_samples(ours(case), unfused(case), draws, output_gradient(tensors["q"]))
    assert all(value.isfinite().all() for value in results[0].values())
    assert_as_exact(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["window", "dropout"])
def test_sums_over_blocks_are_in_float32(name, dtype):
    """64 blocks that all add to dk and dv: their sums lose no more digits than one rounding."""
    case = {"window": Case({"window_size": (-1, 900)}, {"hidden": within(right=900, rows=1024)})}.get(name, CASES[name])
    tensors = heads(2, dtype, rows=1024, batch=1)
    dy = torch.rand(1, 4, 1024, D, generator=torch.Generator().manual_seed(2)).to(dtype)  # of one sign
    exact = gradients(unfused(case), clone(tensors, torch.float64), dy.double())
    assert_as_exact(gradients(ours(case), tensors, dy), gradients(unfused(case), tensors, dy), exact)


@pytest.mark.parametrize("name", ["bool", "causal, padding", "dropout, mask", "window, mask", "sinks, mask"])
def test_rows_that_see_nothing(name):
    """Zeros and zero gradients, never NaN, in blocks as at once."""
    case = CASES[name]
    tensors = heads() | trained_of(case)
    nothing = case.unfused["hidden"].all(-1).expand(B, 4, SQ)
    assert nothing.any()
    for workspace in (LEAST, "1GiB"):
        results = gradients(ours(case, workspace), tensors)
        assert all(value.isfinite().all() for value in results.values())
        assert not results["y"][nothing].any()
        assert not results["q"][nothing].any()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["dropout", "dropout, window"])
def test_one_dropout_mask(name, kv_heads):
    """Values that are an identity show the weights: the same are dropped in blocks as at once, in both directions."""
    case = CASES[name]
    tensors = heads(kv_heads)
    eye = torch.eye(SK).expand(B, kv_heads, SK, SK).clone().requires_grad_()
    tensors = {"q": tensors["q"].new_zeros(B, 4, SQ, SK), "k": tensors["k"].new_zeros(B, kv_heads, SK, SK), "v": eye}
    blocked, whole = (gradients(ours(case, w), tensors, torch.ones(B, 4, SQ, SK)) for w in (LEAST, "1GiB"))
    assert (blocked["y"] == 0).any()
    assert torch.equal(blocked["y"] == 0, whole["y"] == 0)
    torch.testing.assert_close(blocked["v"], whole["v"])


@pytest.fixture
def one_thread():
    """torch's flash kernel for CPUs allocates a buffer for each thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [name for name in CASES if name != "added"])
def test_scores_are_never_written_out(name):
    """Above what the caller holds: the output, the logsumexp, the gradients, and 1 MiB, where one [B, H, Sq, Sk] has 16."""
    S, case = 1024, CASES[name]
    grown = {}
    for key, value in case.ours.items():
        big = isinstance(value, torch.Tensor) and value.dim() == 4
        grown[key] = value.repeat(1, 1, 20 if value.shape[2] > 1 else 1, 20)[:1, :, :S, :S] if big else value
    case = case._replace(ours=grown)
    tensors = heads(rows=S, columns=S, batch=1) | trained_of(case)
    call, dy = ours(case, "1MiB"), torch.ones(1, 4, S, D)
    call(tensors).backward(dy)  # first calls allocate for good
    for t in tensors.values():
        t.grad = None
    with peak_memory("cpu") as peak:
        call(tensors).backward(dy)
    own = sum(t.nbytes for t in tensors.values()) + tensors["q"].nbytes + 4 * 4 * S
    delta = 4 * 4 * S + 2 * tensors["q"].nbytes
    assert peak.bytes <= own + delta + 2**20 + 2**17


@pytest.mark.usefixtures("one_thread")
def test_what_sinks_take_fits_the_workspace():
    """A CPU upcasts 16-bit operands: o in forward, and in backward, which forms nothing else, o and its gradient."""
    q, workspace = torch.randn(1, 4, 1024, 64, dtype=torch.bfloat16), 2**18
    sinks = torch.zeros(4, requires_grad=True)

    def peaks(**options) -> tuple[int, int]:
        given = q.clone().requires_grad_(not options)
        with peak_memory("cpu") as forward:
            y = ckptkern.scaled_dot_product_attention(given, q, q, is_causal=True, workspace=workspace, **options)
        dy = torch.ones_like(y)
        with peak_memory("cpu") as backward:
            y.backward(dy)
        return forward.bytes, backward.bytes

    (with_sinks, of_sinks), (without, _) = peaks(sinks=sinks), peaks()
    rows = 4 * 4 * 1024
    assert with_sinks <= without + workspace + 3 * rows
    assert of_sinks <= workspace + 4 * rows


@pytest.mark.parametrize("window", [(None, None), (None, 0), (30, 5), (7, None), (None, -20), (2, -1)], ids=str)
@pytest.mark.parametrize(("rows", "columns", "samples", "kv_heads", "group"), [
    (83, 70, 2, 4, 1), (70, 300, 3, 1, 4), (16, 1, 1, 2, 2), (1, 65, 2, 3, 1), (300, 33, 1, 1, 1),
])  # fmt: skip
@pytest.mark.parametrize("budget", [1, 20_000, 10**9])
@pytest.mark.parametrize("one_each", [False, True])
def test_blocks_are_a_partition(window, rows, columns, samples, kv_heads, group, budget, one_each):
    """Every score that the window lets be seen lies in one block; a block starts where dropout masks can, and costs no more
    than the budget unless it is the least."""
    q, k = torch.empty(samples, kv_heads * group, rows, 1), torch.empty(samples, kv_heads, columns, 1)

    def cost(b, h, r):
        return b * h * r * columns

    covered = torch.zeros(samples, kv_heads * group, rows, columns, dtype=torch.int32)
    core = eager.AttentionCore(1.0, "ieee", window)
    for block in query_blocks.query_blocks(q, k, core, cost, budget, 64, one_each):
        block.of_scores(covered).add_(1) if 1 not in covered.shape else covered[
            block.samples, block.heads, block.rows, block.columns
        ].add_(1)
        assert block.rows.start % 16 == 0
        assert block.columns.start % 32 == 0
        part = block.of_keys(k).shape
        count = block.rows.stop - block.rows.start
        assert cost(part[0], part[1], count) <= budget or (part[:2] == (1, 1) and count <= 16)
        assert block.of_queries(q).shape[1] == part[1] * (1 if one_each else group)
    seen = ~within(*(math.inf if side is None else side for side in window), rows, columns)
    assert (covered <= 1).all()
    assert (covered[:, :, seen] == 1).all()


def test_a_block_counts_from_the_whole():
    """The scores of a block, with slopes, a window, a mask and dropout, are those of its place in the whole, bit for bit."""
    t = {name: x.detach() for name, x in heads(2).items()}
    core = eager.AttentionCore(
        1.0, "ieee", (20, 3), SEEN.view(torch.int8), SLOPES[None], (torch.tensor([3, 4]), 20_000, 1.0, 0), plane_base=5,
        planes=9,
    )  # fmt: skip
    scores = attention_core.masked_scores(torch.zeros(B, 4, SQ, SK), t["q"], t["k"], core)
    keep = attention_core.attention_keep(t["q"], t["k"], core)
    blocks = list(query_blocks.query_blocks(t["q"], t["k"], core, lambda b, h, r: b * h * r, 16, 16))
    assert len(blocks) == B * 2 * 6
    for block in blocks:
        own, q, k = block.core(core, t["q"]), block.of_queries(t["q"]), block.of_keys(t["k"])
        zeros = torch.zeros(*q.shape[:3], k.shape[2])
        assert torch.equal(attention_core.masked_scores(zeros, q, k, own), block.of_scores(scores))
        assert torch.equal(attention_core.attention_keep(q, k, own), block.of_scores(keep))


def calls_of(monkeypatch, module, name: str) -> list:
    """The results of a function of a module, as they come."""
    seen, own = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: seen.append(own(*args, **kwargs)) or seen[-1])
    return seen


@pytest.mark.parametrize("name", CASES)
def test_which_kernel(name, monkeypatch):
    """Masks, windows and slopes go to torch's flash attention; softcap, dropout and what trains are written out."""
    by_scores = calls_of(monkeypatch, attention, "_scores_bwd")
    gradients(ours(CASES[name]), heads() | trained_of(CASES[name]))
    assert bool(by_scores) == any(word in name for word in ("softcap", "dropout", "trained"))


def test_window_reads_what_it_sees(monkeypatch):
    """Blocks under a window read its columns alone: 13 % of all scores here."""
    read = []

    class Flops(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention_for_cpu" in func.__name__ and "backward" not in func.__name__:
                read.append(args[0].shape[2] * args[1].shape[2])
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 2048, 8)
    with Flops():
        eager.attn_fwd(q, q, q, eager.AttentionCore(1.0, "ieee", (128, 0), workspace=2**24))
    assert sum(read) < 0.13 * 2048**2


@pytest.mark.parametrize(("S", "found"), [(10, (None, 0)), (11, (9, 0))])
def test_window_that_hides_nothing_is_none(monkeypatch, S, found):
    """The core of causal attention is quicker than that of a window."""
    seen, own = [], eager.attn_fwd

    def attn_fwd(q, k, v, core, **options):
        seen.append(core.window)
        return own(q, k, v, core, **options)

    monkeypatch.setattr(eager, "attn_fwd", attn_fwd)
    q, w = torch.randn(1, 2, S, 8), torch.randn(16, 16)
    ckptkern.scaled_dot_product_attention(q, q, q, window_size=(9, 0))
    ckptkern.attention_block(torch.randn(1, S, 16), [w, w, w], None, w, None, 2, window_size=(9, 0))
    assert seen == [found, found]


def test_workspace_is_checked():
    tensors = heads()
    with pytest.raises(ValueError, match="workspace must be a positive number of bytes"):
        ours(CASES["bool"], "0MiB")(tensors)


def test_least_blocks_are_named():
    assert query_blocks.LEAST_ROWS == 16
    assert "16 rows of queries" in ckptkern.scaled_dot_product_attention.__doc__


def test_packed_sequences_in_blocks():
    """Each sequence in blocks, forward and backward, as at once."""
    cu = torch.tensor([0, 40, 40, 83], dtype=torch.int32)
    core = eager.AttentionCore(0.4, "ieee", (20, 0), cu_q=cu, cu_k=cu, max_q=50, max_k=50)
    q, k, v, do = (seeded(1, 4, 83, D) * (n + 1) for n in range(4))
    results = []
    for workspace in (None, 1024):
        of = core._replace(workspace=workspace)
        o, lse, delta = eager.attn_fwd(q, k, v, of, do=do)
        results.append(
            (o, lse, *eager.attn_grads(q, k, v, do, o, lse, of)[:3], *eager.attn_bwd(q, k, v, do, lse, delta, of))
        )
    for whole, blocked in zip(*results, strict=True):  # other blocks of a matmul round otherwise with several threads
        torch.testing.assert_close(blocked, whole, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("dropped", [0, 20_000])
@pytest.mark.parametrize("window", [(5, None), (None, -40)], ids=str)
def test_blocks_without_a_column(window, dropped):
    """128 rows of 32 columns: some blocks see none, and give zeros and zero gradients."""
    dropout = (torch.tensor([3, 4]) if dropped else None, dropped, 2.0, 0)
    core = eager.AttentionCore(0.4, "ieee", window, dropout=dropout)
    q, k, v, do = seeded(1, 4, 128, D), seeded(1, 4, 32, D), seeded(1, 4, 32, D) + 1, seeded(1, 4, 128, D) - 1
    results = []
    for workspace in (None, 1024):
        of = core._replace(workspace=workspace)
        o, lse, _ = eager.attn_fwd(q, k, v, of)
        results.append((o, *eager.attn_grads(q, k, v, do, o, lse, of)[:3]))
    for whole, blocked in zip(*results, strict=True):
        assert blocked.isfinite().all()
        torch.testing.assert_close(blocked, whole)
