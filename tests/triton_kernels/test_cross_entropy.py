"""The kernels of an LM head with its loss against their reference implementation, and the bits that backward recomputes."""

import pytest
import torch
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, EPS, assert_accurate

from ckptkern import eager, triton_kernels
from ckptkern.results import TokenGradients
from ckptkern.triton_kernels.cross_entropy import combine
from ckptkern.triton_kernels.tile import Tile

IGNORED = -100
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs_of(dtype, device="cpu", M=37, K=45, V=75, bias=True, weights=False):
    """(x, w, b, target, class weights): a third of the tokens ignored, one target in another shard."""
    x, w = torch.randn(M, K), torch.randn(V, K) / max(K, 1) ** 0.5
    target = torch.randint(V, (M,)) if V else torch.zeros(M, dtype=torch.int64)
    target[::3] = IGNORED
    target[4:5] = V + 3
    tensors = [x.to(dtype), w.to(dtype), torch.randn(V).to(dtype) if bias else None, target]
    return [None if t is None else t.to(device) for t in (*tensors, torch.rand(V) + 0.5 if weights else None)]


def wide(tensors):
    return [t if t is None or t.dtype == torch.int64 else t.double() for t in tensors]


def upstream_of(M, device, weighted=True, entropy=True, seed=1):
    torch.manual_seed(seed)
    return TokenGradients(
        *(torch.randn(M, device=device) if wanted else None for wanted in (True, True, weighted, entropy))
    )


def statistics(backend, tensors, head, **options):
    """Forward's results by name; 0 for ignored tokens, of which it gives anything."""
    outputs = backend.cross_entropy_fwd(*tensors, head, **options)
    results = outputs.statistics._asdict() | {"z": None if outputs.z is None else outputs.z.t()}
    ignored = tensors[3] == head.ignore_index
    return {name: value.masked_fill(ignored, 0) for name, value in results.items() if value is not None}


def lse_of(backend, tensors, head):
    return backend.cross_entropy_fwd(*tensors, head).statistics.lse


def gradient(backend, tensors, lse, upstream, head, keep=False, db=True, start=0, **tile):
    """(dz, db) of the rows of w from `start` on, recomputed or from what forward saves."""
    x, w, b, target, weights = tensors
    head = head._replace(first=head.first + start)
    out = torch.empty(len(x), len(w) - start, dtype=x.dtype, device=x.device)
    part = [None if t is None else t[start:] for t in (w, b, weights)]
    if keep:
        outputs = backend.cross_entropy_fwd(*tensors, head._replace(first=head.first - start), keep=True)
        saved = outputs.logits[:, start:], outputs.parts, outputs.statistics.z_t
        arguments = *saved, start, target, part[2], lse, upstream, head
        total = backend.cross_entropy_saved_bwd(*arguments, out, db=db)
    else:
        total = backend.cross_entropy_bwd(x, part[0], part[1], target, part[2], lse, upstream, head, out, db=db, **tile)
    return {"dz": out} | ({"db": total} if db else {})


CASES = pairwise(
    dtype=DTYPES,
    bias=(True, False),
    weights=(False, True),
    weighted=(True, False),
    softcap=(0.0, 3.0),
    arg_max=(False, True),
    entropy=(True, False),
    logits=(False, True),
    scale=(1.0, 0.5),
    keep=(False, True),
    first=(0, 40),
    size=((37, 45, 75), (64, 32, 64), (1, 5, 3), (70, 3, 33)),
)


@pytest.mark.parametrize("case", CASES)
def test_like_eager(case, device):
    """Statistics, dz and db of every option within twice eager's error."""
    M, K, V = case["size"]
    tensors = inputs_of(case["dtype"], device, M, K, V, case["bias"], case["weights"])
    head = eager.Head(case["scale"], case["softcap"], IGNORED, case["first"])
    tensors[3] = tensors[3].where(tensors[3] == IGNORED, tensors[3] + case["first"])
    wanted = {name: case[name] for name in ("weighted", "entropy", "arg_max", "logits")}
    of_all = (triton_kernels, tensors), (eager, tensors), (eager, wide(tensors))
    three = [statistics(backend, inputs, head, **wanted) for backend, inputs in of_all]
    assert_accurate(*three, slack=4 * EPS)
    lse, upstream = three[2]["lse"].float(), upstream_of(M, device, case["weighted"], case["entropy"])
    ours, eagers = (gradient(backend, inputs, lse, upstream, head, case["keep"]) for backend, inputs in of_all[:2])
    exact = gradient(eager, of_all[2][1], lse.double(), TokenGradients(*wide(upstream)), head, case["keep"])
    assert_accurate(ours, {name: t.to(ours[name].dtype) for name, t in eagers.items()}, exact, slack=4 * EPS)


@each_dtype
def test_backward_recomputes_the_logits_of_forward(dtype, device):
    """With lse = z_t, which forward gives in float32, exp(z - lse) - 1 is 0 at the target if, and only if, z has equal bits."""
    target = (tensors := inputs_of(dtype, device))[3]
    for softcap in (0.0, 3.0):
        head = eager.Head(0.7, softcap, IGNORED)
        z_t = triton_kernels.cross_entropy_fwd(*tensors, head).statistics.z_t
        ones = torch.ones_like(z_t)
        dz = gradient(triton_kernels, tensors, z_t, TokenGradients(ones, torch.zeros_like(ones)), head, db=False)["dz"]
        assert (dz[target == IGNORED] == 0).all()
        dz = gradient(triton_kernels, tensors, z_t, TokenGradients(ones, -ones), head, db=False)["dz"]
        rows = ((target >= 0) & (target < 75)).nonzero().squeeze(1)
        assert len(rows) > 20
        assert (dz[rows, target[rows]] == 0).all()
        slipped = gradient(triton_kernels, tensors, z_t + 1e-5, TokenGradients(ones, -ones), head, db=False)["dz"]
        assert (slipped[rows, target[rows]] != 0).all()


def test_softcapped_logits_that_are_saved_give_the_bits_of_recomputed_ones(device):
    """In float32 nothing is rounded between."""
    tensors = inputs_of(torch.float32, device, weights=True)
    head = eager.Head(0.7, 3.0, IGNORED)
    lse = lse_of(triton_kernels, tensors, head)
    upstream = upstream_of(37, device)
    recomputed, saved = (
        gradient(triton_kernels, tensors, lse, upstream, head, keep=keep)["dz"] for keep in (False, True)
    )
    torch.testing.assert_close(saved, recomputed, rtol=0, atol=0)


@each_dtype
@pytest.mark.parametrize("keep", [False, True])
def test_chunks_of_the_vocabulary_have_the_bits_of_the_whole(dtype, keep, device):
    tensors = inputs_of(dtype, device, V=300, weights=True)
    head = eager.Head(1.0, 0.0, IGNORED)
    lse = lse_of(triton_kernels, tensors, head)
    upstream = upstream_of(37, device)
    whole, part = (gradient(triton_kernels, tensors, lse, upstream, head, keep, start=start) for start in (0, 256))
    assert torch.equal(whole["dz"][:, 256:], part["dz"])


@pytest.mark.parametrize("slices", [1, 31, 64, 100])
def test_slices_are_combined(slices, device):
    """Several steps of the loop, whose maximum rises, falls, or is that of nothing."""
    parts = (torch.randn(slices, 50) * 20).to(device)
    parts[: slices // 2, 3:6] = float("-inf")
    parts[slices // 2 :, 5:9] = float("-inf")
    entropies = torch.rand(slices, 50, device=device)
    lse, entropy = combine(parts, True, entropies)
    whole, finite = torch.logsumexp(parts.double(), 0), parts.clamp_min(-50)
    share = (parts.double() - whole).exp()
    spread = (share * entropies + torch.special.entr(share)).sum(0).nan_to_num(0.0)
    for ours, exact, atol in (
        (lse, whole, 1e-5),
        (entropy, spread, 1e-6),
        (combine(finite, False)[0], finite.double().sum(0), 1e-3),
    ):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("tile", [Tile(16, 64, 16, 4, 1, 2), Tile(64, 32, 64, 4, 1)], ids=str)
def test_any_tile(tile, interpreted):
    """Slices of columns and rows of tiles are where the launcher says, for other tiles of the interpreter."""
    if not interpreted:
        pytest.skip("the default tiles are tests/triton_kernels/test_default_tiles.py")
    tensors, head, upstream = inputs_of(torch.float32, V=150), eager.Head(1.0, 0.0, IGNORED), upstream_of(37, "cpu")
    lse = lse_of(triton_kernels, tensors, head)
    ours, default = (
        statistics(triton_kernels, tensors, head, weighted=True, entropy=True, arg_max=True, **changes)
        | gradient(triton_kernels, tensors, lse, upstream, head, **changes)
        for changes in ({"tile": tile}, {})
    )
    torch.testing.assert_close(ours, default, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_ignored_tokens_and_infinities(keep, device):
    """NaN in an ignored token's x reaches nobody, entries of -inf have p = 0, and a whole slice of them counts for nothing."""
    x, _, b, target, _ = tensors = inputs_of(torch.bfloat16, device, V=100)
    x[::3] = float("nan")
    b[:70] = float("-inf")
    target[1] = 80
    head = eager.Head(1.0, 0.0, IGNORED)
    lse = lse_of(triton_kernels, tensors, head)
    counted = target != IGNORED
    torch.testing.assert_close(lse[counted], lse_of(eager, tensors, head)[counted])
    actual = gradient(triton_kernels, tensors, lse, upstream_of(37, device, False), head, keep)
    here = torch.arange(70, device=device) == target[:, None]
    assert not actual["dz"][~counted].any()
    assert not actual["dz"][:, :70][~here].any()
    assert actual["db"].isfinite().all()


@pytest.mark.parametrize(("M", "V"), [(0, 5), (5, 0), (0, 0)])
def test_empty(M, V, device):
    tensors, head = inputs_of(torch.float32, device, M=M, V=V), eager.Head(1.0, 0.0, IGNORED)
    totals = triton_kernels.cross_entropy_fwd(*tensors, head, weighted=True, entropy=True, arg_max=True).statistics
    assert all((tensor == float("-inf")).all() for tensor in (totals.lse, totals.largest))
    assert not any(tensor.any() for tensor in (totals.z_t, totals.wz, totals.entropy, totals.arg_max))
    db = gradient(triton_kernels, tensors, totals.lse, upstream_of(M, device), head)["db"]
    assert torch.equal(db, torch.zeros(V, device=device))
