"""attn_fwd, attn_delta, attn_bwd, attn_dmask against eager references and float64, over every option of core attention."""

import dataclasses
import math

import pytest
import torch
from support import launchers as eager
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, EPS, assert_accurate, assert_equal, dropout_of

from ckptkern import triton_kernels
from ckptkern.eager import AttentionCore
from ckptkern.triton_kernels.attention import AttentionTile

BATCH = 2
TILE_SIZES = [AttentionTile(*size, 4, 1) for size in ((16, 32), (32, 64), (64, 32))]

# What a core can have, each with all that it can be. `packed` lengths are those of three sequences, one of them empty,
# with rows before and after them that are in none.
OPTIONS = {
    "dtype": DTYPES,
    "head_dim": (40, 64, 96, 1, 3),
    "heads": ((1, 1), (4, 2), (2, 1)),  # query heads, key and value heads
    "lengths": ((37, 41), (50, 5), (5, 50), (32, 64), "packed"),
    "window": ((None, None), (None, 0), (3, 5), (40, None), (None, -20)),
    # how it is broadcast over samples, heads, rows (queries) and columns (keys)
    "mask": (None, "bool B11K", "bool 1HQK", "BHQK", "1HQK", "B1QK", "11QK", "B11K", "1H1K", "1HQ1", "1111"),
    "slopes": (None, "heads", "batch"),
    "dropout": (0.0, 0.3),
    "layout": ("dense", "views of one tensor", "expanded gradient"),
    "softcap": (0.0, 0.7),
}


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    head_dim: int = 40
    heads: tuple = (2, 2)
    lengths: tuple | str = (37, 41)
    window: tuple = (None, None)
    mask: str | None = None
    slopes: str | None = None
    dropout: float = 0.0
    layout: str = "dense"
    softcap: float = 0.0
    batch: int = BATCH

    def __str__(self) -> str:
        chosen = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        return "-".join(f"{name} {value}" for name, value, default in chosen if value != default).replace("torch.", "")

    @property
    def packed(self) -> bool:
        return self.lengths == "packed"


def has_meaning(options: dict) -> bool:
    """Masks have no meaning for packed sequences."""
    return options["mask"] is None or options["lengths"] != "packed"


def mask_of(case: Case, device: str) -> torch.Tensor:
    """A transposed view, which hides some keys, and all of them from the first row, unless that is the only one."""
    sizes = {"B": case.batch, "H": case.heads[0], "Q": case.lengths[0], "K": case.lengths[1]}
    *lead, rows, columns = (sizes.get(letter, 1) for letter in case.mask[-4:])
    mask = torch.randn(*lead, columns, rows, device=device).mT
    if mask.numel() > columns:
        mask[mask < -1.5] = mask[0, 0, 0] = -math.inf
    return (mask > -math.inf).view(torch.int8) if case.mask.startswith("bool") else mask.to(case.dtype)


def core_of(case: Case, device: str) -> AttentionCore:
    H, lengths, slopes = case.heads[0], {}, None
    if case.packed:
        cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ((1, 18, 18, 51), (0, 35, 38, 60)))
        lengths = {"cu_q": cu_q, "cu_k": cu_k, "max_q": 33, "max_k": 35}
    if case.slopes:
        samples = 3 if case.packed else case.batch
        slopes = torch.rand(samples if case.slopes == "batch" else 1, H, device=device)
    mask = mask_of(case, device) if case.mask else None
    dropout = dropout_of(case.dropout, device) if case.dropout else eager.NO_DROPOUT
    planes = 9 if H > 1 else 0  # of a sample, of whose heads q has a shard
    return AttentionCore(0.3, "ieee", case.window, mask, slopes, dropout, 5, planes, softcap=case.softcap, **lengths)


def inputs_of(case: Case, device: str) -> dict[str, torch.Tensor]:
    """q, k, v and do, in the layout of `case`."""
    B, Sq, Sk = (1, 53, 62) if case.packed else (case.batch, *case.lengths)
    (H, H_kv), D = case.heads, case.head_dim
    shapes = {"q": (B, H, Sq, D), "k": (B, H_kv, Sk, D), "v": (B, H_kv, Sk, D), "do": (B, H, Sq, D)}
    tensors = {name: torch.randn(shape).to(device, case.dtype) for name, shape in shapes.items()}
    if case.layout == "views of one tensor":
        wide = torch.full((B, max(Sq, Sk), 3 * H + 1, D), math.nan, dtype=case.dtype, device=device)
        for place, name in enumerate(("q", "k", "v")):
            heads, rows = tensors[name].shape[1:3]
            view = wide[:, :rows, place * H + 1 : place * H + 1 + heads].transpose(1, 2)
            tensors[name] = view.copy_(tensors[name])
    if case.layout == "expanded gradient":
        tensors["do"] = tensors["do"][:, :1, :1, :1].expand(shapes["do"])
    return tensors


def results_of(backend, tensors: dict, core: AttentionCore, **tiles) -> dict[str, torch.Tensor]:
    """Everything that forward and backward return, by name; lse with 0 for the rows that see nothing, and which those are.

    The gradient of an additive mask, too, and of one that samples share where it is one of several.
    """
    q, k, v, do = tensors.values()
    own = {"tile": tiles["tile"]} if tiles else {}
    o, lse, delta = backend.attn_fwd(q, k, v, core, do=do, **own)
    saved = backend.attn_delta(o, do, core)
    both = {"tiles": (tiles["tile"], tiles["tile"])} if tiles else {}
    dq, dk, dv = backend.attn_bwd(q, k, v, do, lse, delta, core, **both)
    empty = lse == -math.inf
    if backend is eager and core.cu_q is None:  # torch's own kernel gives 0 there
        empty |= (lse == 0) & (o == 0).all(-1)
    results = dict(o=o, lse=lse.masked_fill(empty, 0), delta=delta, saved_delta=saved, dq=dq, dk=dk, dv=dv)
    if core.mask is not None and core.mask.is_floating_point():
        for name, shape in (("dmask", core.mask.shape), ("shared dmask", (1, *core.mask.shape[1:]))):
            results[name] = backend.attn_dmask(q, k, v, do, lse, delta, core, shape, **own)
    return results | {"empty": empty.to(torch.uint8)}


def of_all(tensors: dict, core: AttentionCore, **tiles) -> tuple[dict, dict, dict]:
    """(ours, eagers, exact)."""
    wide = {name: t.double() for name, t in tensors.items()}
    eagers, exact = (results_of(eager, inputs, core) for inputs in (tensors, wide))
    return results_of(triton_kernels, tensors, core, **tiles), eagers, exact


def check(case: Case, device: str, **tiles) -> dict[str, torch.Tensor]:
    """As exact as eager PyTorch; zeros of rows that see nothing, and of what a mask hides."""
    core = core_of(case, device)
    ours, eagers, exact = of_all(inputs_of(case, device), core, **tiles)
    assert case.packed or torch.equal(ours["empty"], exact["empty"])  # of packed ones torch's own kernel says nothing
    for name in ("o", "dq", "delta", "saved_delta"):
        assert not ours[name][ours["empty"].bool()].any(), name
    assert "dmask" not in ours or not ours["dmask"][core.mask == -math.inf].any()
    assert_accurate(ours, eagers, exact, slack_of(case.dtype))
    return ours


def slack_of(dtype: torch.dtype) -> float:
    """What eager has more: p and ds stay in float32 where the kernels, as every flash attention, round them to feed the
    tensor cores; and eager's sums over rows are pairwise where a tile after the other is added to dk and dv."""
    return 8 * EPS if dtype == torch.float32 else torch.finfo(dtype).eps / 2


# the widest heads, for which the tables have rows of their own
WIDE_HEADS = [
    Case(dtype, D, heads, (33, 41), (20, 3), "bool 1HQK", "heads", 0.3, layout)
    for dtype, D, heads, layout in (
        (torch.bfloat16, 128, (2, 1), "views of one tensor"),
        (torch.float16, 192, (2, 1), "dense"),
        (torch.bfloat16, 256, (3, 1), "views of one tensor"),
        (torch.float32, 256, (1, 1), "expanded gradient"),
    )
]


LARGE_CAP = Case(softcap=200.0)  # an error of tanh near 0 grows by so much


PAIRS = [Case(*options) for options in (pair.values[0].values() for pair in pairwise(has_meaning, **OPTIONS))]


@pytest.mark.parametrize("case", [*PAIRS, *WIDE_HEADS, LARGE_CAP], ids=str)
def test_like_eager_and_as_exact(case, device):
    check(case, device)


# Each bound beside none, and those that meet in a tile. 14 hides a single column of a tile from a single one of 16 rows; of
# a tile of rows that see a tile of columns, 17 leaves a single row.
WINDOWS = [
    *((left, None) for left in (None, 0, 14, 17, 60, 2**31 - 1)), *((None, right) for right in (0, 14, 32, 2**31 - 1)),
    (0, 0), (16, 17), (31, 32), (60, 0), (16, 2**31 - 1), (2**31 - 1, 17),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), WINDOWS, ids=lambda side: str(side))
def test_windows_round_tile_edges(left, right, device):
    """Which tiles are visited, and which of them without an edge mask."""
    check(Case(head_dim=8, heads=(1, 1), lengths=(50, 70), window=(left, right), batch=1), device, tile=TILE_SIZES[0])


FEW = Case(torch.float32, 3, (2, 1), (1, 1), (None, 0), "1H1K", dropout=0.3)
FEW_OR_NONE = [dataclasses.replace(FEW, lengths=lengths) for lengths in ((0, 5), (5, 0), (1, 1), (16, 32), (33, 64))]
FEW_OR_NONE += [
    dataclasses.replace(FEW, **changes)
    for changes in ({"batch": 0, "heads": (1, 1)}, {"head_dim": 0}, {"dropout": 1.0})
]


@pytest.mark.parametrize("case", FEW_OR_NONE, ids=str)
def test_sizes(case, device):
    """No rows, no columns, one of each, whole tiles, no sample, no feature, and everything dropped."""
    ours = check(case, device)
    if case.lengths[1] == 0 or case.dropout == 1:
        assert ours["empty"].all() == (case.dropout < 1)
        assert not any(ours[name].any() for name in ("o", "dq", "dk", "dv"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_rows_that_a_finite_mask_hides(value, dtype, device):
    """The mean, as of torch. An lse so far down says nothing of the sum, so these rows give no gradient; the others theirs."""
    mask = torch.zeros(1, 1, 40, 20, device=device)
    mask[:, :, 3:9] = value
    mask[:, :, 9:, 5:] = value
    core = AttentionCore(0.3, "ieee", mask=mask.clamp(min=torch.finfo(dtype).min).to(dtype))
    tensors = inputs_of(Case(dtype, 24, lengths=(40, 20), batch=1), device)
    tensors["q"][:, :, 3:9] = 0  # in float64 -1e9 + s is not the same for every s
    ours = results_of(triton_kernels, tensors, core)
    assert not ours["dq"][:, :, 3:9].any()
    tensors["do"][:, :, 3:9] = 0
    three = ({name: t for name, t in results.items() if name != "lse"} for results in of_all(tensors, core))
    assert_accurate(*three, torch.finfo(dtype).eps)


def test_no_row_beyond_the_longest_sequence(device):
    """Gives zeros for rows beyond max_seqlen, and does not read keys beyond it, where sequences are longer than was said."""
    case = Case(lengths="packed")
    core = core_of(case, device)._replace(max_q=20, max_k=33)
    assert_accurate(*of_all(inputs_of(case, device), core))


# -- bits -------------------------------------------------------------------------------------------------------------

HEAVY = Case(torch.bfloat16, 24, (2, 1), (33, 41), (20, 3), "BHQK", "heads", 0.3, softcap=0.7, batch=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recompute_equals_forward(dtype, device):
    """Forward again, with the gradient at hand: the same bits of o and lse."""
    case = dataclasses.replace(HEAVY, dtype=dtype)
    core, (q, k, v, do) = core_of(case, device), inputs_of(case, device).values()
    (o, lse, _), (again, lse_again, _) = (
        triton_kernels.attn_fwd(q, k, v, core, do=upstream) for upstream in (None, do)
    )
    assert_equal({"o": again, "lse": lse_again}, {"o": o, "lse": lse})


@pytest.mark.parametrize("case", [HEAVY, dataclasses.replace(HEAVY, lengths="packed", mask=None)], ids=str)
def test_results_do_not_depend_on_the_tile(case, device):
    """Sums over columns come in another order, so within rounding."""
    case = dataclasses.replace(case, dtype=torch.float32)
    core, tensors = core_of(case, device), inputs_of(case, device)
    first, *others = (results_of(triton_kernels, tensors, core, tile=tile) for tile in TILE_SIZES)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def test_only_what_is_needed(device):
    """None for the rest, the same bits for what is formed, and results written where they are wanted and nowhere else."""
    case = dataclasses.replace(HEAVY, lengths=(17, 33), batch=2)
    core, (q, k, v, do) = core_of(case, device), inputs_of(case, device).values()
    _, lse, delta = triton_kernels.attn_fwd(q, k, v, core, do=do)
    arguments = q, k, v, do, lse, delta, core
    expected = dict(zip(("dq", "dk", "dv"), triton_kernels.attn_bwd(*arguments), strict=True))
    dq, *nothing = triton_kernels.attn_bwd(*arguments, need_dkv=False)
    none, dk, dv = triton_kernels.attn_bwd(*arguments, need_dq=False)
    assert [none, *nothing] == [None] * 3
    assert_equal({"dq": dq, "dk": dk, "dv": dv}, expected)
    wide = {name: t.new_full((*t.shape[:3], 3, t.shape[3]), 7.0) for name, t in expected.items()}
    views = {name: t[..., 1, :] for name, t in wide.items()}
    written = triton_kernels.attn_bwd(*arguments, **views)
    assert all(out is view for out, view in zip(written, views.values(), strict=True))
    assert_equal(views, expected)
    assert all((t[..., ::2, :] == 7).all() for t in wide.values()), "written outside of the view"


# -- range ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_low_scores_stay_finite(dtype, device):
    """|q| and |k| of 300, so q k^T far beyond what float16 holds; and scores of -200, so that exp(0 - lse) overflows in the
    columns beyond Sk that fill up a tile."""
    normal = inputs_of(Case(dtype, 64, lengths=(40, 40), batch=1), device)
    large = normal | {name: normal[name].sign() * 300 for name in ("q", "k")}
    assert large["q"].float().matmul(large["k"].float().mT).abs().max() > torch.finfo(torch.float16).max
    three = of_all(large, AttentionCore(1 / 8, "ieee", (None, 0)))
    assert_accurate(*({name: results[name] for name in ("o", "lse")} for results in three))
    low = normal | {"q": normal["q"] / 8 + 5, "k": normal["k"] / 8 - 5}
    for right in (None, 0):
        ours = results_of(triton_kernels, low, AttentionCore(1 / 8, "ieee", (None, right)))
        assert ours["lse"].max() < -190
        assert all(result.isfinite().all() for results in (ours, three[0]) for result in results.values())


def launched(call, arch: int, shared: int) -> list[dict]:
    """Grid and constants of every launch of `call` on a device of that architecture and shared memory."""
    module, caught = triton_kernels.attention, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "arch_of", lambda x: arch)
        patch.setattr(module, "shared_memory_of", lambda x: shared)
        patch.setattr(module, "launch", lambda kernel, grid, *args, **kwargs: caught.append({"grid": grid, **kwargs}))
        call()
    return caught


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
def test_a_gpu_of_less_shared_memory_gets_a_smaller_tile_or_a_clear_error(arch):
    """A tile that does not fit into shared memory (triton#8182)."""
    core, lse = AttentionCore(1.0, "tf32"), torch.empty(1, 1, 64)

    def tiles(dtype, shared):
        q = torch.empty(1, 1, 64, 256, dtype=dtype)
        launches = launched(lambda: triton_kernels.attn_bwd(q, q, q, q, lse, lse, core), arch, shared)
        return [(kwargs["BLOCK_M"], kwargs["BLOCK_N"]) for kwargs in launches]

    assert tiles(torch.bfloat16, 166912) == [(64, 32), (64, 64)]
    assert tiles(torch.bfloat16, 101376) == [(32, 32), (64, 32)]
    assert tiles(torch.float32, 166912) == [(32, 32), (16, 64)]
    message = r"heads of 256: its dkdv kernel needs 160 KiB of shared memory, the device has 99; use a 16-bit type"
    with pytest.raises(RuntimeError, match=message):
        tiles(torch.float32, 101376)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_more_heads_than_a_grid_dimension_has_programs(packed):
    """Of a grid only the first dimension goes beyond 65535."""
    B, H, S, D = 700, 100, 3, 16
    q, k = (torch.empty(1 if packed else B, heads, S, D) for heads in (H, H // 2))
    lse, cu = torch.empty(q.shape[:3]), torch.zeros(B + 1, dtype=torch.int32) if packed else None
    core = AttentionCore(1.0, "tf32", cu_q=cu, cu_k=cu, max_q=S * packed, max_k=S * packed)

    def step():
        triton_kernels.attn_fwd(q, k, k, core)
        triton_kernels.attn_delta(q, q, core)
        triton_kernels.attn_bwd(q, k, k, q, lse, lse, core)
        triton_kernels.attn_dmask(q, k, k, q, lse, lse, core, (B, H, S, S))

    grids = [kwargs["grid"] for kwargs in launched(step, 90, 232448)]
    assert [grid[0] for grid in grids] == [B * H, B * H, B * H // 2, B * H, B * H]
    assert all(size <= 65535 for grid in grids for size in grid[1:])
