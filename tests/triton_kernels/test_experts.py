"""The experts' kernels: against eager PyTorch on every kind of routing, and what must hold bit for bit."""

import itertools

import pytest
import torch
from codegen import experts
from codegen.cases import Case
from support import launchers as eager
from support.cases import NoSync
from support.kernel_cases import DTYPES, Tails, check_like_eager
from torch import Tensor

import ckptkern
from ckptkern import triton_kernels
from ckptkern.triton_kernels import experts_tiles
from ckptkern.triton_kernels.tile import INTERPRETED_TILE, family_of

KINDS = {  # tokens, top_k, experts
    "even": (50, 2, 3), "empty experts": (40, 3, 5), "dropped": (70, 2, 3), "all dropped": (9, 2, 4), "one expert": (40, 2, 2),
    "no tokens": (0, 2, 3), "many experts": (7, 1, 100),
}  # fmt: skip


def routing(kind: str, tokens: int, top_k: int, experts: int) -> Tensor:
    """The experts of each token, by chance; -1 and `experts` are of none."""
    index = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    if kind == "empty experts":  # and duplicates
        index[(index == 0) | (index == experts - 1)] = 1
    elif kind == "dropped":
        index[::2, 0], index[1::3, -1] = -1, experts
    elif kind == "all dropped":
        index[:] = -1
    elif kind == "one expert":
        index[:] = 1
    return index


def pairs_of(
    kind: str, device: str, *widths: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[eager.Groups, int, list[Tensor]]:
    """(groups, how many token-expert pairs an expert has, a row for each pair: NaN where none has it)."""
    groups = eager.route(routing(kind, *KINDS[kind]).to(device), KINDS[kind][2])
    live, rows = int(groups.offs[-1]), [torch.randn(len(groups.order), width).to(device, dtype) for width in widths]
    for t in rows:
        t[live:] = float("nan")
    return groups, live, rows


class Routed(Tails):
    """The inputs of a case with a routing of `kind`."""

    kind, live = "even", None

    def sizes(self, case: Case) -> dict[str, int]:
        tokens, self.TOP_K, self.EXPERTS = KINDS[self.kind]
        return super().sizes(case) | {"M": tokens * self.TOP_K}

    def groups(self, tokens: int) -> eager.Groups:
        *tensors, top_k = pairs_of(self.kind, self.device)[0]
        groups = eager.Groups(*map(self.remember, tensors), top_k)
        self.live, self.pairs = int(groups.offs[-1]), len(groups.order)
        return groups

    def remember(self, tensor: Tensor) -> Tensor:
        if self.rest is None and self.live is not None and len(tensor) == self.pairs:
            tensor[self.live :] = float("nan")
        return super().remember(tensor)

    def promised(self, result: Tensor) -> Tensor:
        rows = torch.arange(len(result), device=result.device) < self.live if len(result) == self.pairs else None
        return result if rows is None else torch.where(rows[:, None], result, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", experts.LAUNCHES)
def test_like_eager(op, kind, device):
    """Twice eager's error at most, also of what nobody has: rows that are read of it are NaN, and so is what a kernel fails to
    write."""
    turn = [*KINDS].index(kind)
    dtype, variants = str(DTYPES[turn % 3])[6:], experts.VARIANTS.get(op, ("silu",))
    case = Case(op, 80, dtype, True, variants[turn % len(variants)], False, True, "ieee" if dtype == "float32" else "")
    check_like_eager(case, type(kind, (Routed,), {"kind": kind}), device, slack=1e-6)


@pytest.mark.parametrize("kind", ["even", "dropped"])
def test_recompute_equals_forward(kind, device):
    """h that backward recomputes from x, or from g and u, has forward's bits; it is rounded before it is weighted."""
    (tokens, top_k, E), (groups, live, _), bf16 = KINDS[kind], pairs_of(kind, device), torch.bfloat16
    shapes = (tokens, 35), (E, 82, 35), (E, 82), (tokens, 35), (E, 35, 41)
    x, w, b, dy, wd = (torch.randn(shape).to(device, bf16) for shape in shapes)
    how, s = (groups, "gelu", "ieee"), torch.randn(tokens, top_k, device=device)
    forward, gu = triton_kernels.experts_fwd(x, w, b, *how, save_gu=True)
    expected = (forward.float() * s.view(-1, 1)[groups.order.long()]).to(bf16)
    full = triton_kernels.experts_bwd(x, w, b, dy, wd, s, *how)
    saved = triton_kernels.experts_act_grad(gu, dy, wd, s, *how)
    assert torch.equal(full[0][:live], expected[:live])
    assert torch.equal(saved[0][:live], expected[:live])
    assert torch.equal(full[1][:live], saved[1][:live])


@pytest.mark.parametrize("kind", ["even", "dropped"])
def test_sums_over_choices_ascend(kind, device):
    """In float32 and in the order of a token's choices, rounded once: eager's bits."""
    groups, _, (rows,) = pairs_of(kind, device, 41)
    s = torch.randn(KINDS[kind][:2], device=device)
    ours, theirs = (backend.experts_combine(rows, s, groups) for backend in (triton_kernels, eager))
    assert torch.equal(ours, theirs)


SIZES = [[0], [1], [0, 0, 0], [33, 0, 64, 1, 0], [32] * 5, [0] * 700 + [5] + [0] * 300, [1] * 600]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} experts, {sum(sizes)} rows")
@pytest.mark.parametrize("dropped", [0, 40])
def test_tiles(sizes, dropped, device):
    """Each expert's tiles behind those of the experts before it, and -1 for what is left of the launch (aiter#4482)."""
    offs = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    rows, height = sum(sizes) + dropped, INTERPRETED_TILE.BLOCK_M
    tiles = experts_tiles.tiles_of(offs, rows, INTERPRETED_TILE).tolist()
    starts = enumerate(zip(offs.tolist(), sizes, strict=False))
    expected = [(e, start + row) for e, (start, size) in starts for row in range(0, size, height)]
    assert len(tiles[0]) == -(-rows // height) + min(len(sizes), rows)
    assert list(zip(*tiles, strict=True))[: len(expected)] == expected
    assert set(tiles[0][len(expected) :]) <= {-1}


def layer(device: str, tokens: int, features: int, hidden: int, dtype: torch.dtype):
    """(a step of moe_mlp as a function of its mode, its choices)."""
    index = routing("dropped", tokens, 2, 3).to(device)
    shapes = (tokens, features), (tokens, 2), (3, 2 * hidden, features), (3, features, hidden)
    x, s, w, wd = leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    dy = torch.randn_like(x)

    def step(mode: str):
        y = ckptkern.moe_mlp(x, index, s, w, wd, recompute=mode)
        return y, *torch.autograd.grad(y, leaves, dy)

    return step, index


def test_nothing_waits_for_the_host(monkeypatch):
    step, _ = layer("cpu", 40, 16, 16, torch.float32)
    x, s, w, wd = (torch.randn(shape, requires_grad=True) for shape in ((40, 16), (40,), (3, 32, 16), (3, 16, 16)))
    offs = torch.tensor([3, 7, 30])
    monkeypatch.setattr(Tensor, "tolist", None, raising=False)
    with ckptkern.backend("triton"), NoSync():
        for mode in ("selective", "full"):
            step(mode)
            y = ckptkern.grouped_gated_mlp(x, offs, w, wd, row_weights=s, recompute=mode)
            torch.autograd.grad(y.sum(), [x, s, w, wd])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_is_captured_and_runs_another_routing(mode):
    """On a GPU, forward and backward in one CUDA graph; replayed with other choices it gives their result."""
    step, index = layer("cuda", 256, 64, 96, torch.bfloat16)
    second, first = routing("dropped", 256, 2, 3).cuda(), index.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(mode)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(mode)
    for choices in (second, first):
        index.copy_(choices)
        graph.replay()
        torch.cuda.synchronize()
        for ours, expected in zip(captured, step(mode), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("strides", "row", "unit"),
    [
        ((4096, 64, 1), "16", None),
        ((4104, 64, 1), "16", 8),
        ((4096, 72, 1), "16", 8),
        ((4100, 64, 1), "unaligned", None),
        ((4096, 68, 1), "unaligned", None),
    ],
)
def test_tile_choice(strides, row, unit, monkeypatch):
    """Few rows an expert take low tiles; one stride, address or length that is no multiple of 16 makes the launch unaligned."""
    monkeypatch.setattr(experts_tiles, "arch_of", lambda x: 90)
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 64), (4, 80, 80)))
    table = experts_tiles.TILES["experts_fwd", family_of(90)]

    def tile(w: Tensor, rows: int = 4096, x: Tensor = x):
        return experts_tiles.tile_of("experts_fwd", x, rows, 4, x, w)

    w = w.as_strided((4, 64, 64), strides)
    assert tile(w) == (table[row]._replace(UNIT=unit) if unit else table[row])
    assert tile(w[:, :, 1:]) == tile(w[:, :, :63]) == table["unaligned"]
    if (row, unit) == ("16", None):
        assert (tile(w, 4 * 256), tile(w, 4 * 256 - 1)) == (table["16"], table["few"])
        assert tile(w.float(), x=x.float()) == table["32"]
