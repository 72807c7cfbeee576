"""attn_fwd, attn_delta, attn_bwd, attn_dmask against eager references and float64, over every option of core attention."""

import dataclasses
import itertools
import math

import pytest
import torch
from support.drop_ins import pairwise
from support.kernel_cases import DTYPES, EPS, assert_accurate, assert_equal, dropout_of

from ckptkern import eager, triton_kernels
from ckptkern.eager import AttentionCore
from ckptkern.triton_kernels.attention import LARGE_TILES, TILES, AttentionTile, attention_tile

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
    "mask": (None, "bool keys", "bool all", "additive", "additive keys"),
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


def core_of(case: Case, device: str) -> AttentionCore:
    H = case.heads[0]
    lengths = {}
    B, Sq, Sk = case.batch, *((19, 19) if case.packed else case.lengths)
    if case.packed:
        B = 3
        cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ((1, 18, 18, 51), (0, 35, 38, 60)))
        lengths = {"cu_q": cu_q, "cu_k": cu_k, "max_q": 33, "max_k": 35}
    mask = slopes = None
    if case.mask:
        shape = {"bool keys": (B, 1, 1, Sk), "bool all": (1, H, Sq, Sk), "additive": (B, 1, Sq, Sk)}
        mask = torch.randn(shape.get(case.mask, (1, H, 1, Sk)), device=device)
        if case.mask.startswith("bool"):
            mask = (mask > -0.5).view(torch.int8)
            mask[..., :1] = 1
        else:
            mask = mask.masked_fill(mask < -1.5, -math.inf).to(case.dtype)
    if case.slopes:
        slopes = torch.rand(B if case.slopes == "batch" else 1, H, device=device)
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

    The gradient of an additive mask, too.
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
        results["dmask"] = backend.attn_dmask(q, k, v, do, lse, delta, core, core.mask.shape, **own)
    return results | {"empty": empty.to(torch.uint8)}


def wide(tensors: dict) -> dict:
    return {name: t.double() for name, t in tensors.items()}


def of_all(tensors: dict, core: AttentionCore, **tiles) -> tuple[dict, dict, dict]:
    """(ours, eagers, exact)."""
    eagers, exact = (results_of(eager, given, core) for given in (tensors, wide(tensors)))
    return results_of(triton_kernels, tensors, core, **tiles), eagers, exact


def check(case: Case, device: str, **tiles) -> dict[str, torch.Tensor]:
    ours, eagers, exact = of_all(inputs_of(case, device), core_of(case, device), **tiles)
    assert torch.equal(ours["empty"], exact["empty"])
    assert_accurate(ours, eagers, exact, slack_of(case.dtype))
    return ours


def slack_of(dtype: torch.dtype) -> float:
    """What eager has more: p and ds stay in float32 where the kernels, as every flash attention, round them to feed the
    tensor cores; and eager's sums over rows are pairwise where a tile after the other is added to dk and dv."""
    return 8 * EPS if dtype == torch.float32 else torch.finfo(dtype).eps / 2


# the widest heads, for which the tables have rows of their own
WIDE_HEADS = [
    Case(dtype, D, heads, (33, 41), (20, 3), "bool all", "heads", 0.3, layout)
    for dtype, D, heads, layout in (
        (torch.bfloat16, 128, (2, 1), "views of one tensor"), (torch.float16, 192, (2, 1), "dense"),
        (torch.bfloat16, 256, (3, 1), "views of one tensor"), (torch.float32, 256, (1, 1), "expanded gradient"),
    )
]  # fmt: skip


LARGE_CAP = Case(softcap=200.0)  # an error of tanh near 0 grows by so much


PAIRS = [Case(*options) for options in (one.values[0].values() for one in pairwise(has_meaning, **OPTIONS))]


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


FEW = Case(torch.float32, 3, (2, 1), (1, 1), (None, 0), "additive keys", dropout=0.3)
FEW_OR_NONE = [dataclasses.replace(FEW, lengths=lengths) for lengths in ((0, 5), (5, 0), (1, 1), (16, 32), (33, 64))]
FEW_OR_NONE += [
    dataclasses.replace(FEW, **one) for one in ({"batch": 0, "heads": (1, 1)}, {"head_dim": 0}, {"dropout": 1.0})
]


@pytest.mark.parametrize("case", FEW_OR_NONE, ids=str)
def test_sizes(case, device):
    """No rows, no columns, one of each, whole tiles, no sample, no feature, and everything dropped."""
    ours = check(case, device)
    if case.lengths[1] == 0 or case.dropout == 1:
        assert ours["empty"].all() == (case.dropout < 1)
        assert not any(ours[name].any() for name in ("o", "dq", "dk", "dv"))


# -- the gradient of a mask -------------------------------------------------------------------------------------------

# how a mask is broadcast over samples, heads, rows and columns, and what else the core has
LEARNED = [
    ("[B, H, Sq, Sk]", Case(torch.float32, 24, (4, 2), (37, 41), (None, 0), dropout=0.3, softcap=0.7)),
    ("[1, H, Sq, Sk]", Case(torch.bfloat16, 24, (2, 1), (70, 41), (3, 5), None, "batch", 0.3)),
    ("[B, 1, Sq, Sk]", Case(torch.float16, 24, (4, 2), (37, 41), (20, None))),
    ("[1, 1, Sq, Sk]", Case(torch.float32, 24, (2, 2), (37, 41), (None, -20), layout="views of one tensor")),
    ("[B, 1, 1, Sk]", Case(torch.bfloat16, 24, (2, 1), (70, 41), (None, 0), softcap=0.7)),
    ("[1, H, 1, Sk]", Case(torch.float16, 24, (2, 2), (37, 70), (9, 3), None, "heads", 0.3)),
    ("[1, H, Sq, 1]", Case(torch.float32, 24, (2, 1), (37, 70), (3, 5))),
    ("[1, 1, 1, 1]", Case(torch.float32, 24, (2, 1), (37, 41), dropout=0.3)),  # two row tiles, two column tiles
]  # fmt: skip


def learned_of(pattern: str, case: Case, device: str) -> tuple[AttentionCore, dict, tuple[int, ...]]:
    """(core, inputs, the mask's shape). The mask is a view of a larger tensor, and hides some keys."""
    sizes = {"B": BATCH, "H": case.heads[0], "Sq": case.lengths[0], "Sk": case.lengths[1]}
    shape = tuple(sizes.get(name, 1) for name in pattern[1:-1].split(", "))
    mask = torch.randn(*shape[:2], shape[3] + 3, shape[2], device=device).mT[..., 2:-1]
    mask = mask.masked_fill(mask < -1.5, -math.inf) if mask.numel() > 1 else mask
    return core_of(case, device)._replace(mask=mask.to(case.dtype)), inputs_of(case, device), shape


def dmask_of(backend, tensors: dict, core: AttentionCore, shape: tuple[int, ...], **options) -> torch.Tensor:
    q, k, v, do = tensors.values()
    _, lse, delta = backend.attn_fwd(q, k, v, core, do=do)
    return backend.attn_dmask(q, k, v, do, lse, delta, core, shape, **options)


def trained(tensors: dict, core: AttentionCore, shape: tuple[int, ...]) -> torch.Tensor:
    """The same by autograd, in float64: of zeros that are added to core's mask."""
    added = torch.zeros(shape, dtype=torch.float64, device=core.mask.device, requires_grad=True)
    q, k, v, do = wide(tensors).values()
    eager.attention_reference(q, k, v, core._replace(mask=core.mask.double() + added)).backward(do)
    return added.grad


@pytest.mark.parametrize(("pattern", "case"), LEARNED, ids=lambda one: str(one).replace(" ", ""))
def test_gradient_of_a_mask(pattern, case, device):
    """Against autograd, eager and kernel. Of what a whole row shares, it is the rounding of the scores' gradients ds."""
    core, tensors, shape = learned_of(pattern, case, device)
    exact = trained(tensors, core, shape)
    ds = trained(tensors, core, (BATCH, *inputs_of(case, device)["q"].shape[1:3], case.lengths[1]))
    torch.testing.assert_close(dmask_of(eager, wide(tensors), core, shape), exact)
    ours, eagers = (dmask_of(backend, tensors, core, shape) for backend in (triton_kernels, eager))
    assert ours.dtype == torch.float32
    assert_accurate(*({"dmask": one, "ds": ds} for one in (ours, eagers, exact)), slack_of(case.dtype))
    if shape == core.mask.shape:
        assert not ours[core.mask == -math.inf].any()


@pytest.mark.slow
def test_gradient_of_one_of_several_masks(device, repeats):
    """The core's mask is the sum of one that samples share and one of their own. Runs are equal, tiles within rounding."""
    case = Case(torch.float32, 24, (2, 1), (37, 41), dropout=0.3)
    core, tensors, _ = learned_of("[B, H, Sq, Sk]", case, device)
    shape = (1, 2, *case.lengths)
    first, *others = (dmask_of(triton_kernels, tensors, core, shape) for _ in range(1 + repeats))
    assert all(torch.equal(first, other) for other in others)
    others = [dmask_of(triton_kernels, tensors, core, shape, tile=tile) for tile in TILE_SIZES]
    for other in (*others, trained(tensors, core, shape).float()):
        torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-5)


# -- rows that see nothing --------------------------------------------------------------------------------------------


def random(Sq: int, Sk: int, D: int, device: str, dtype=torch.float32, B: int = 1) -> dict[str, torch.Tensor]:
    """q, k, v and do of two heads."""
    rows = {"q": Sq, "k": Sk, "v": Sk, "do": Sq}
    return {name: torch.randn(B, 2, S, D, device=device).to(dtype) for name, S in rows.items()}


@pytest.mark.parametrize("kind", ["bool and causal", "additive", "key padding", "window"])
def test_rows_that_see_nothing_give_zeros(kind, device):
    """Of 40 rows x 20 columns. Zeros and zero gradients, never NaN, and nothing from such a row reaches dk or dv."""
    mask, window, dropout = (
        torch.ones(BATCH, 2, 40, 20, dtype=torch.int8, device=device),
        (None, None),
        eager.NO_DROPOUT,
    )
    if kind == "window":
        mask[:, :, 25:], window = 0, (5, 0)  # row i sees i - 5 .. i - 0
    elif kind == "key padding":
        mask[1] = 0
    else:
        mask[0, 1, 3] = mask[1, 0, 16:33] = 0
    hidden = (mask == 0).all(-1)
    if kind == "bool and causal":
        window, dropout = (None, 0), dropout_of(0.3, device)
    given = {"window": None, "key padding": mask[:, :1, :1], "additive": mask.float().log()}.get(kind, mask)
    core = AttentionCore(0.3, "ieee", window, given, dropout=dropout)
    tensors = random(40, 20, 24, device, B=BATCH)
    ours, *others = of_all(tensors, core)
    assert_accurate(ours, *others)
    assert torch.equal(ours["empty"].bool(), hidden)
    for name in ("o", "dq", "delta", "saved_delta"):
        assert not ours[name][hidden].any(), name
    for name in ("q", "do"):
        tensors[name] = tensors[name].masked_fill(hidden[..., None], 1e3)
    assert_equal(results_of(triton_kernels, tensors, core), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_rows_that_a_finite_mask_hides(value, dtype, device):
    """The mean, as of torch. An lse so far down says nothing of the sum, so these rows give no gradient; the others theirs."""
    mask = torch.zeros(1, 1, 40, 20, device=device)
    mask[:, :, 3:9] = value
    mask[:, :, 9:, 5:] = value
    core = AttentionCore(0.3, "ieee", mask=mask.clamp(min=torch.finfo(dtype).min).to(dtype))
    tensors = random(40, 20, 24, device, dtype)
    tensors["q"][:, :, 3:9] = 0  # in float64 -1e9 + s is not the same for every s
    ours = results_of(triton_kernels, tensors, core)
    assert not ours["dq"][:, :, 3:9].any()
    tensors["do"][:, :, 3:9] = 0
    three = ({name: t for name, t in results.items() if name != "lse"} for results in of_all(tensors, core))
    assert_accurate(*three, torch.finfo(dtype).eps)


def test_no_row_beyond_the_longest_sequence(device):
    """A sequence longer than it was said to be: the rows and columns beyond give zeros and are not seen."""
    cu = torch.tensor([0, 40, 50], dtype=torch.int32, device=device)
    core = AttentionCore(0.3, "ieee", cu_q=cu, cu_k=cu, max_q=20, max_k=33)
    ours, *others = of_all(random(50, 50, 8, device), core)
    assert_accurate(ours, *others)
    for name, rows in (("o", 20), ("dq", 20), ("dk", 33), ("dv", 33)):
        assert not ours[name][:, :, rows:40].any(), name
        assert ours[name][:, :, :rows].any(-1).all(), name


# -- bits -------------------------------------------------------------------------------------------------------------

HEAVY = Case(torch.bfloat16, 24, (2, 1), (33, 41), (20, 3), "bool all", "heads", 0.3, softcap=0.7, batch=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recompute_equals_forward(dtype, device):
    """Forward again, with the gradient at hand: the same bits of o and lse, and delta of that very o."""
    case = dataclasses.replace(HEAVY, dtype=dtype)
    core, (q, k, v, do) = core_of(case, device), inputs_of(case, device).values()
    o, lse, nothing = triton_kernels.attn_fwd(q, k, v, core)
    again, lse_again, delta = triton_kernels.attn_fwd(q, k, v, core, do=do)
    assert nothing is None
    assert torch.equal(again, o)
    assert torch.equal(lse_again, lse)
    torch.testing.assert_close(delta, triton_kernels.attn_delta(o, do, core), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", [HEAVY, dataclasses.replace(HEAVY, lengths="packed", mask=None)], ids=str)
def test_results_do_not_depend_on_the_tile(case, device):
    """Sums over columns come in another order, so within rounding."""
    case = dataclasses.replace(case, dtype=torch.float32)
    core, tensors = core_of(case, device), inputs_of(case, device)
    first, *others = (results_of(triton_kernels, tensors, core, tile=tile) for tile in TILE_SIZES)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def test_only_what_is_needed(device):
    """None for the rest, the same bits for what is formed, and results written where they are wanted."""
    case = dataclasses.replace(HEAVY, lengths=(17, 33), batch=2)
    core, tensors = core_of(case, device), inputs_of(case, device)
    q, k, v, do = tensors.values()
    _, lse, delta = triton_kernels.attn_fwd(q, k, v, core, do=do)
    dq, dk, dv = triton_kernels.attn_bwd(q, k, v, do, lse, delta, core)
    only_q = triton_kernels.attn_bwd(q, k, v, do, lse, delta, core, need_dkv=False)
    only_kv = triton_kernels.attn_bwd(q, k, v, do, lse, delta, core, need_dq=False)
    assert only_q[1] is only_q[2] is only_kv[0] is None
    assert_equal({"dq": only_q[0], "dk": only_kv[1], "dv": only_kv[2]}, {"dq": dq, "dk": dk, "dv": dv})
    (B, H, Sq, D), (_, H_kv, Sk, _) = q.shape, k.shape
    views = {"dq": q.new_full((B, Sq, 9, H, D), 7.0)[:, :, 4].transpose(1, 2)}
    views |= {name: q.new_full((B, 3 * H_kv, Sk + 5, D), 7.0)[:, 1::3, 2:-3] for name in ("dk", "dv")}
    written = triton_kernels.attn_bwd(q, k, v, do, lse, delta, core, **views)
    assert all(made is view for made, view in zip(written, views.values(), strict=True))
    assert_equal(views, {"dq": dq, "dk": dk, "dv": dv})
    for view in views.values():
        assert (view._base == 7).sum() >= view._base.numel() - view.numel(), "written outside of the view"


# -- range ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_low_scores_stay_finite(dtype, device):
    """|q| and |k| of 300, so q k^T far beyond what float16 holds; and scores of -200, so that exp(0 - lse) overflows in the
    columns beyond Sk that fill up a tile."""
    normal = random(40, 40, 64, device, dtype)
    large = normal | {name: normal[name].sign() * 300 for name in ("q", "k")}
    assert large["q"].float().matmul(large["k"].float().mT).abs().max() > torch.finfo(torch.float16).max
    three = of_all(large, AttentionCore(1 / 8, "ieee", (None, 0)))
    assert_accurate(*({name: results[name] for name in ("o", "lse")} for results in three))
    low = normal | {"q": normal["q"] / 8 + 5, "k": normal["k"] / 8 - 5}
    for right in (None, 0):
        ours = results_of(triton_kernels, low, AttentionCore(1 / 8, "ieee", (None, right)))
        assert ours["lse"].max() < -190
        assert all(result.isfinite().all() for results in (ours, three[0]) for result in results.values())


def test_tiles_fit_the_masks_blocks():
    """A Philox counter covers 16 rows and 32 columns, so a tile that began inside of such a block would be wrong."""
    tiles = [AttentionTile(*tile) for table in TILES.values() for tile in table.values()]
    tiles += [AttentionTile(*tile) for _, tile in LARGE_TILES.values() if tile]
    assert all(tile.BLOCK_M % 16 == 0 and tile.BLOCK_N % 32 == 0 for tile in tiles)
    for table in TILES.values():
        assert table.keys() >= set(itertools.product(("16", "32", "32 ieee"), (64, 128, 256)))


def launched(call, arch: int, shared: int) -> list[dict]:
    """Grid and constants of every launch of `call` on a device of that architecture and shared memory."""
    module, caught = triton_kernels.attention, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "arch_of", lambda x: arch)
        patch.setattr(module, "shared_memory_of", lambda x: shared)
        patch.setattr(module, "launch", lambda kernel, grid, *args, **kwargs: caught.append({"grid": grid, **kwargs}))
        call()
    return caught


@pytest.mark.parametrize(("kernel", "one_stage"), [("fwd", False), ("dkdv", False), ("dq", True), ("dmask", True)])
def test_heads_of_256_take_one_stage_where_two_would_not_fit(kernel, one_stage):
    """sm_100's matmuls read more from shared memory than sm_80's, whose rows it takes (`make codegen-check` compiles them)."""
    for masked, D in itertools.product((False, True), (64, 128, 256)):
        of_80, *of_others = (
            attention_tile(kernel, arch, 232448, torch.bfloat16, D, "ieee", masked) for arch in (80, 100, 103)
        )
        assert of_others == 2 * [of_80._replace(num_stages=1) if one_stage and D == 256 else of_80]


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
def test_a_gpu_of_less_shared_memory_gets_a_smaller_tile_or_a_clear_error(arch):
    """A tile that does not fit into shared memory (triton#8182)."""
    core, lse = AttentionCore(1.0, "tf32"), torch.empty(1, 1, 64)

    def tiles(dtype, shared, **options):
        q = torch.empty(1, 1, 64, 256, dtype=dtype)
        launches = launched(lambda: triton_kernels.attn_bwd(q, q, q, q, lse, lse, core, **options), arch, shared)
        return [(kwargs["BLOCK_M"], kwargs["BLOCK_N"]) for kwargs in launches]

    assert tiles(torch.bfloat16, 166912) == [(64, 32), (64, 64)]
    assert tiles(torch.bfloat16, 101376) == [(32, 32), (64, 32)]
    assert tiles(torch.float32, 166912) == [(32, 32), (16, 64)]
    assert tiles(torch.float32, 101376, need_dkv=False) == [(16, 32)]
    message = r"heads of 256: its dkdv kernel needs 160 KiB of shared memory, the device has 99; use a 16-bit type"
    with pytest.raises(RuntimeError, match=message):
        tiles(torch.float32, 101376)


@pytest.mark.parametrize(("arch", "padded"), [(80, 32), (86, 32), (90, 64)])
def test_head_dims_are_padded_to_what_the_architecture_multiplies(arch, padded):
    q = torch.empty(1, 1, 64, 20)
    (kwargs,) = launched(lambda: triton_kernels.attn_fwd(q, q, q, AttentionCore(1.0, "tf32")), arch, 166912)
    assert kwargs["HEAD_D"] == padded


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
