"""The experts' kernels: against eager PyTorch on every kind of routing, and what must hold bit for bit."""

import itertools

import pytest
import torch
from ops import test_experts as shared
from ops.test_experts import gradients, ours_of, routing, tensors_of, theirs_of
from support.cases import Watch
from support.kernel_cases import ACTIVATIONS, DTYPES, assert_accurate, assert_equal, far_apart
from torch import Tensor

import ckptkern
from ckptkern import eager, triton_kernels
from ckptkern.triton_kernels import experts_tiles
from ckptkern.triton_kernels.tile import INTERPRETED_TILE, family_of

KINDS = {  # tokens, top_k, experts, features, hidden: several tiles, and none full
    "even": (50, 2, 3, 45, 41), "empty experts": (40, 3, 5, 35, 41), "dropped": (70, 2, 3, 33, 20),
    "all dropped": (9, 2, 4, 8, 9), "one expert": (40, 2, 2, 16, 36),
}  # fmt: skip
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)


class Given:
    """What the launchers take: rows that no expert has are NaN."""

    def __init__(self, kind: str, dtype: torch.dtype, device: str, sizes: tuple = ()):
        tokens, top_k, E, d, h = sizes or KINDS[kind]
        self.index = routing(kind, tokens, top_k, E).to(device)
        self.groups = eager.route(self.index, E)
        self.live = int(self.groups.offs[-1])
        t = {name: one.detach().to(device) for name, one in tensors_of(self.index, E, d, h, dtype).items()}
        self.x, self.w, self.b, self.wd, self.bd = (t[name] for name in ("x", "w", "b", "wd", "bd"))
        self.s = t["s"].float()
        self.dy = torch.randn(tokens, d).to(device, dtype)
        R = self.index.numel()
        self.gu, self.h = (torch.randn(R, n * h).to(device, dtype) for n in (2, 1))
        for rows in (self.gu, self.h):
            rows[self.live :] = float("nan")

    def results(self, backend, activation: str = "silu") -> dict[str, Tensor]:
        """Every output of every launcher, of rows that an expert has."""
        g, how, live = self.groups, (activation, "ieee"), slice(self.live)
        h, gu = backend.experts_fwd(self.x, self.w, self.b, g, *how, save_gu=True)
        full = backend.experts_bwd(self.x, self.w, self.b, self.dy, self.wd, self.s, g, *how)
        saved = backend.experts_act_grad(self.gu, self.dy, self.wd, self.s, g, *how)
        updated = backend.experts_act_grad(self.gu, self.dy, self.wd, self.s, g, *how, added=self.h)
        down = backend.experts_gemm(self.h, self.wd, self.bd, g, "ieee", transposed=True)
        rows = backend.experts_gemm(self.gu, self.w, None, g, "ieee", transposed=False)
        dw, dwd = torch.full_like(self.w, float("nan")), self.wd.to(eager.wide_of(self.wd.dtype), copy=True)
        backend.experts_dw(self.gu, self.x, g, "ieee", dw, gathered="b")
        backend.experts_dw(self.dy, self.h, g, "ieee", dwd, gathered="a", add=True)
        found = {"h": h[live], "gu": gu[live], "down": down[live], "rows": rows[live], "dw": dw, "dwd": dwd}
        for name, (hs, dgu, ds) in (("full", full), ("saved", saved), ("updated", updated)):
            found |= {f"hs {name}": hs[live], f"dgu {name}": dgu[live], f"ds {name}": ds}
        found["out"] = backend.experts_combine(self.h, self.s, g)
        found["dx"] = backend.experts_combine(self.h, None, g)
        found["db"] = backend.experts_sums(self.gu, None, g, gathered=False)
        found["dbd"] = backend.experts_sums(self.dy, self.s, g, gathered=True)
        return found

    def double(self) -> "Given":
        for name, one in vars(self).items():
            if isinstance(one, Tensor) and one.is_floating_point():
                setattr(self, name, one.double())
        return self


@each_dtype
@each_kind
def test_launchers(kind, dtype, device):
    """Twice eager's error at most. torch.empty gives NaN: what a kernel fails to write is seen, and so is what it reads
    of nobody's rows."""
    given = Given(kind, dtype, device)
    ours, eagers = given.results(triton_kernels), given.results(eager)
    assert_accurate(ours, eagers, given.double().results(eager), slack=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    given = Given("even", torch.bfloat16, device)
    ours, eagers = given.results(triton_kernels, activation), given.results(eager, activation)
    assert_accurate(ours, eagers, given.double().results(eager, activation), slack=1e-6)


@each_dtype
@each_kind
def test_recompute_equals_forward(kind, dtype, device):
    """What backward recomputes is what forward saved, bit for bit: from x or from g and u, one result."""
    given = Given(kind, dtype, device)
    how = given.groups, "gelu", "ieee"
    h, gu = triton_kernels.experts_fwd(given.x, given.w, given.b, *how, save_gu=True)
    ones = torch.ones_like(given.s)
    full = triton_kernels.experts_bwd(given.x, given.w, given.b, given.dy, given.wd, ones, *how)
    saved = triton_kernels.experts_act_grad(gu, given.dy, given.wd, ones, *how)
    live = slice(given.live)
    assert torch.equal(full[0][live], h[live])
    for name, a, b in zip(("hs", "dgu"), full, saved, strict=False):
        assert torch.equal(a[live], b[live]), name
    assert_equal({"ds": full[2]}, {"ds": saved[2]}, {"ds"})


@pytest.mark.parametrize("mode", ["none", "selective"])
@each_dtype
def test_every_mode_gives_the_same_bits(mode, dtype):
    index = routing("dropped", 50, 2, 3)
    t = tensors_of(index, 3, 24, 40, dtype)
    with ckptkern.backend("triton"):
        full, other = (gradients(ours_of(index, recompute=one), t) for one in ("full", mode))
    assert_equal(other, full, {"s"})


@each_dtype
@shared.each_routing
def test_gradients_are_as_exact_as_torchs(sizes, dtype):
    kind, tokens, top_k, E, d, h = sizes
    index = routing(kind, tokens, top_k, E)
    with ckptkern.backend("triton"):
        shared.check_exactness(ours_of(index), theirs_of(index), tensors_of(index, E, d, h, dtype, bias=E % 2 == 1))


@pytest.mark.parametrize("with_dropped", [False, True])
def test_sums_over_choices_ascend(with_dropped, device):
    """In float32 and in the order of a token's choices, rounded once: eager's bits. No atomics, so runs are equal."""
    given = Given("dropped" if with_dropped else "even", torch.bfloat16, device)
    ours, theirs = (one.experts_combine(given.h, given.s, given.groups) for one in (triton_kernels, eager))
    assert torch.equal(ours, theirs)
    order = given.groups.inv.view(given.s.shape).flip(1).reshape(-1)
    other = triton_kernels.experts_combine(given.h, given.s.flip(1), given.groups._replace(inv=order))
    assert torch.allclose(ours, other)


def test_runs_are_equal(device, repeats):
    given = Given("empty experts", torch.bfloat16, device)
    first = given.results(triton_kernels)
    for _ in range(repeats):
        assert_equal(given.results(triton_kernels), first)


SIZES = [[0], [1], [0, 0, 0], [33, 0, 64, 1, 0], [32] * 5, [0] * 700 + [5] + [0] * 300, [1] * 600]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} experts, {sum(sizes)} rows")
@pytest.mark.parametrize("dropped", [0, 40])
def test_tiles(sizes, dropped, device):
    """Each expert's tiles behind those of the experts before it, and -1 for what is left of the launch (aiter#4482)."""
    offs = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    rows = sum(sizes) + dropped
    tile = INTERPRETED_TILE
    found = experts_tiles.tiles_of(offs, rows, tile).tolist()
    expected = [
        (e, start + row) for e, (start, size) in enumerate(zip(offs.tolist(), sizes, strict=False))
        for row in range(0, size, tile.BLOCK_M)
    ]  # fmt: skip
    assert len(found[0]) == -(-rows // tile.BLOCK_M) + min(len(sizes), rows)
    assert list(zip(*found, strict=True))[: len(expected)] == expected
    assert set(found[0][len(expected) :]) <= {-1}


@pytest.mark.parametrize("kind", ["even", "empty experts", "dropped", "all dropped"])
def test_routing(kind, device):
    """Rows in the experts' order, token-expert pairs of one expert as they were; the inverse leads back."""
    index = routing(kind, 40, 3, 6).to(device)
    index[3, 1] = index[3, 1] if kind == "even" else 2**32 + 1  # of no expert, and of one in 32 bits
    order, inv, offs, top_k = eager.route(index, 6)
    flat = index.flatten().tolist()
    expected = [pair for e in range(6) for pair, one in enumerate(flat) if one == e]
    assert order.tolist()[: len(expected)] == expected
    assert order[inv.long()].tolist() == list(range(120))
    assert offs.tolist() == [sum(0 <= one < e for one in flat) for e in range(7)]
    assert (order.dtype, inv.dtype, offs.dtype, top_k) == (torch.int32, torch.int32, torch.int32, 3)


class NoSync(Watch):
    """Raises where a value, or a shape that depends on values, would have to come from the device."""

    SYNCS = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.removeprefix("aten::") not in self.SYNCS, func
        if func is torch.ops.aten.index.Tensor:
            assert not any(one is not None and one.dtype == torch.bool for one in args[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_nothing_waits_for_the_host(mode, monkeypatch):
    index = routing("dropped", 40, 2, 3)
    t = tensors_of(index, 3, 16, 16, torch.float32)
    offs = torch.tensor([3, 7, 30])
    monkeypatch.setattr(Tensor, "tolist", None, raising=False)
    with ckptkern.backend("triton"), NoSync():
        gradients(ours_of(index, recompute=mode), t)
        y = ckptkern.grouped_gated_mlp(t["x"], offs, t["w"], t["wd"], row_weights=t["s"][:, 0], recompute=mode)
        torch.autograd.grad(y.sum(), [t[name] for name in ("x", "s", "w", "wd")])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_is_captured_and_runs_another_routing(mode):
    """On a GPU, forward and backward in one CUDA graph; replayed with other choices it gives their result."""
    first, second = (routing("dropped", 256, 2, 4, seed).cuda() for seed in (1, 2))
    t = {
        name: one.detach().cuda().requires_grad_() for name, one in tensors_of(first, 4, 64, 96, torch.bfloat16).items()
    }
    index, dy = first.clone(), torch.randn(256, 64, device="cuda").bfloat16()

    def step():
        y = ours_of(index, recompute=mode)(t)
        return (y, *torch.autograd.grad(y, list(t.values()), dy))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for choices in (second, first):
        index.copy_(choices)
        graph.replay()
        torch.cuda.synchronize()
        for ours, expected in zip(captured, step(), strict=True):
            assert torch.equal(ours, expected)


def test_views_and_strides(device):
    """Matrices cut out of larger ones, NaN round them; stacks whose matrices do not follow each other; hooks' strides."""
    given = Given("dropped", torch.bfloat16, device)
    expected = given.results(triton_kernels)

    def inside(t: Tensor) -> Tensor:
        around = torch.full([n + 3 for n in t.shape], float("nan"), dtype=t.dtype, device=t.device)
        view = around[tuple(slice(1, n + 1) for n in t.shape)]
        return view.copy_(t)

    for name in ("x", "w", "b", "wd", "bd", "dy", "gu", "h", "s"):
        setattr(given, name, inside(getattr(given, name)))
    given.groups = eager.Groups(*(torch.stack((t, t), 1)[:, 0] for t in given.groups[:3]), given.groups.top_k)
    assert_equal(given.results(triton_kernels), expected, {"ds full", "ds saved", "db", "dbd"})


def test_rows_that_start_beyond_2_to_the_31(device):
    """Tokens, and experts' matrices, that end beyond element 2**31."""
    given = Given("even", torch.bfloat16, device, (3, 1, 2, 16, 32))
    h, _ = triton_kernels.experts_fwd(given.x, given.w, None, given.groups, "silu", "ieee")
    for x, w in ((far_apart(given.x), given.w), (given.x, far_apart(given.w))):
        assert torch.equal(triton_kernels.experts_fwd(x, w, None, given.groups, "silu", "ieee")[0], h)


@pytest.mark.parametrize("key", sorted(experts_tiles.TILES), ids=str)
def test_tile_tables(key):
    """Every class has a tile; all of a power of two, at least 64 wide on sm_90 (triton#11366)."""
    assert set(experts_tiles.TILES[key]) == {"16", "few", "32", "unaligned"}
    for tile in experts_tiles.TILES[key].values():
        assert all(n & (n - 1) == 0 for n in (tile.BLOCK_M, tile.BLOCK_N, tile.BLOCK_K, tile.num_warps, tile.SUB))
        assert min(tile.BLOCK_M, tile.BLOCK_N) >= 64


def test_tile_choice(monkeypatch):
    """Few rows an expert take low tiles; one stride, address or length that is no multiple of 16 makes the launch unaligned."""
    monkeypatch.setattr(experts_tiles, "arch_of", lambda x: 90)
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((64, 64), (4, 64, 64)))
    table = experts_tiles.TILES["experts_fwd", family_of(90)]
    assert experts_tiles.tile_of("experts_fwd", x, 4 * 256, 4, x, w) == table["16"]
    assert experts_tiles.tile_of("experts_fwd", x, 4 * 256 - 1, 4, x, w) == table["few"]
    assert experts_tiles.tile_of("experts_fwd", x.float(), 4096, 4, x.float(), w.float()) == table["32"]
    assert experts_tiles.tile_of("experts_fwd", x, 4096, 4, x, w.as_strided(w.shape, (4104, 64, 1))).UNIT == 8
    assert experts_tiles.tile_of("experts_fwd", x, 4096, 4, x, w.as_strided(w.shape, (4096, 72, 1))) == table[
        "16"
    ]._replace(UNIT=8)
    for uneven in (
        w[:, :, 1:],
        w[:, :, :63],
        w.as_strided(w.shape, (4100, 64, 1)),
        w.as_strided(w.shape, (4096, 68, 1)),
    ):
        assert experts_tiles.tile_of("experts_fwd", x, 4096, 4, x, uneven) == table["unaligned"]
