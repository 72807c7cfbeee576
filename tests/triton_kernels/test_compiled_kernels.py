"""What only the emulator can show: bits across tiles and architectures, any order of CTAs, bounds of views."""

import functools
import random
import re
import zlib

import emulator
import pytest
import torch
from emulator.emulated import emulated
from support.kernel_cases import LAUNCHERS, SUMS_OF_ROWS, TILE_NAMES, assert_equal, dropout_of, inputs_of, kernel, named

import ckptkern
from benchmarks.codegen.cases import ARCHS, PERSISTENT_OPS
from ckptkern import eager, triton_kernels
from ckptkern.ops.dispatch import choices as _choices
from ckptkern.triton_kernels.tile import SMS, TILES

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _on_the_emulator(request, architecture):
    """Of `--sample`, each test on one of the architectures."""
    if architecture is None:
        pytest.skip("asks the emulator: --device emulated")
    name = re.sub(r"sm_\d+-?", "", request.node.name)
    if (
        request.config.option.sample
        and "once" not in request.fixturenames
        and zlib.crc32(name.encode()) % 2 != architecture // 10 % 2
    ):
        pytest.skip("in the sample on the other architecture")


@pytest.fixture
def once(architecture):
    """For tests that go through the architectures themselves."""
    if architecture != ARCHS[0]:
        pytest.skip("the same for every architecture")


def cancelling(tensors: dict) -> dict:
    """The tensors with matmuls whose second half takes away the first. What is left is the rounding of every step, and relu of
    it or its derivative: another order of the steps shows, which rounding to 16 bits would hide."""
    halved = {name: t.clone() for name, t in tensors.items() if t is not None and t.dim() == 2}
    for name, t in halved.items():
        if name in ("x", "dy"):
            t[:, t.shape[1] // 2 :] = t[:, : t.shape[1] // 2]
        elif name in ("w", "w1", "wg", "wu") and "x" in tensors:  # [N, K]
            t[:, t.shape[1] // 2 :] = -t[:, : t.shape[1] // 2]
        elif name in ("w", "w2", "wd"):  # [D, N]
            t[t.shape[0] // 2 :] = -t[: t.shape[0] // 2]
    return {name: halved.get(name) for name in tensors}


@pytest.mark.parametrize("name", TILE_NAMES)
def test_tiles_and_architectures_give_equal_bits(name, once, request):
    """Many rows of forward and few of a chunk of backward take different tiles, a checkpoint may move between GPUs, and a
    implementation may name others.

    Sums of columns are of tiles. Tensor cores round in their own way; the order is that of ascending steps of K in any tile.
    """
    if request.config.option.sample and name not in ("linear_bwd", "gated_bwd"):
        pytest.skip("in the sample one matmul, and three")
    tensors = cancelling(inputs_of(LAUNCHERS[name], BF16, M=72, K=128, N=144, D=128))
    results = {}
    for arch in ARCHS:
        for row, tile in TILES[TILE_NAMES[name], arch].items():
            if row != "32" and (not tile.programs or name in PERSISTENT_OPS):
                with emulated(arch):
                    results[arch, row] = kernel(LAUNCHERS[name], tensors, "relu", tile=tile)
    assert len(results) >= 8
    for other in results.values():
        assert_equal(other, results[90, "16"], SUMS_OF_ROWS)


@pytest.mark.parametrize("op", ["mlp", "gated_mlp"])
def test_tiles_by_hand_change_no_mask_and_no_bit(op, architecture, monkeypatch, request):
    """Every implementation of kernels, with every tile that it may name: forward, and what backward recomputes."""
    if request.config.option.sample and op != "mlp":
        pytest.skip("in the sample one op")
    monkeypatch.setitem(SMS, architecture, 1)  # a GPU that is never idle
    monkeypatch.setattr(_choices, "capability_of", lambda *device: (architecture // 10, 0))
    shapes = (72, 64), (144, 64), *[(144, 64)] * (op == "gated_mlp"), (64, 144)
    leaves = [torch.randn(shape).to(BF16).requires_grad_() for shape in shapes]
    x, first, *others = leaves
    dy, results = torch.randn(72, 64).to(BF16), {}
    for impl in _choices.candidates("triton", "cpu", None, BF16):
        if impl != "library":
            torch.manual_seed(0)
            with ckptkern.backend("triton"), _choices.forced_impl(impl):
                if op == "mlp":
                    y = ckptkern.mlp(x, first, None, *others, None, "silu", 0.3)
                else:
                    y = ckptkern.gated_mlp(x, first, *others, "silu", 0.3)
            results[impl] = y, *torch.autograd.grad(y, leaves, dy)
    assert len(results) >= 14
    for impl, other in results.items():
        assert all(map(torch.equal, other, results["triton"])), impl


@pytest.mark.parametrize("name", ["linear_bwd", "gated_bwd"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_rows_of_16_bytes_take_copies_and_give_the_bits_of_the_unaligned_tile(name, dtype, architecture):
    """Sizes that are multiples of 16 bytes and not of 16 elements."""
    more = 16 // dtype.itemsize
    tensors = inputs_of(LAUNCHERS[name], dtype, M=72, K=64 + more, N=80 + more, D=64 + more)
    ptx: list[str] = []
    with emulated(architecture, change=lambda text: ptx.append(text) or text):
        told = kernel(LAUNCHERS[name], tensors, "silu")
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx[0])
    assert not re.search(r"ld\.global\S*\.[bu]16", ptx[0])
    with emulated(architecture):
        unaligned = kernel(LAUNCHERS[name], tensors, "silu", tile=TILES[TILE_NAMES[name], architecture]["unaligned"])
    assert_equal(told, unaligned, SUMS_OF_ROWS)


@pytest.mark.parametrize(("backward", "forward"), [("mlp_bwd", "linear_fwd"), ("gated_bwd", "gated_fwd")])
def test_recompute_equals_forward_between_architectures(backward, forward, once):
    """h that backward recomputes on one architecture is forward's on the other, dropout included."""
    tensors = inputs_of(LAUNCHERS[backward], BF16, M=72, K=128, N=144, D=128)
    options = {"dropout": dropout_of(0.3)}
    given = dict(zip(LAUNCHERS[forward].inputs, tensors.values(), strict=False))
    for first, second in (ARCHS, ARCHS[::-1]):
        with emulated(first):
            ahead = kernel(LAUNCHERS[forward], given, "silu", **options)
        with emulated(second):
            again = kernel(LAUNCHERS[backward], tensors, "silu", **options)
        assert torch.equal(ahead["h"], again["h"])


def attention(*, backward: bool):
    q, k, v, do = (torch.randn(1, 2, 136, 64).to(BF16) for _ in range(4))
    core = eager.AttentionCore(0.125, "ieee", (None, 0), dropout=dropout_of(0.3))
    _, lse, delta = eager.attn_fwd(q, k, v, core, do=do)
    if backward:
        return lambda: triton_kernels.attn_bwd(q, k, v, do, lse, delta, core)
    return lambda: triton_kernels.attn_fwd(q, k, v, core, do=do)


def matmul(name: str):
    tensors = inputs_of(LAUNCHERS[name], BF16, M=200, K=64, N=320, D=64)
    return lambda: tuple(kernel(LAUNCHERS[name], tensors, "silu").values())


def norm():
    x, weight = torch.randn(600, 64).to(BF16), torch.randn(64).to(BF16)
    return lambda: triton_kernels.norm_bwd(x, x, weight, 1e-5, "rms", residual=x, need_dweight=True)


LAUNCHES = {
    "linear_bwd": functools.partial(matmul, "linear_bwd"), "mlp_bwd": functools.partial(matmul, "mlp_bwd"), "norm_bwd": norm,
    "attn_fwd": functools.partial(attention, backward=False), "attn_bwd": functools.partial(attention, backward=True),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_order_of_ctas_changes_no_bit(name, architecture):
    launch = LAUNCHES[name]()
    expected = launch()
    for order in (lambda n: range(n)[::-1], lambda n: random.Random(n).sample(range(n), n)):
        with emulated(architecture, programs=order) as launches:
            results = launch()
        assert max(one.counts.ctas for one in launches) > 1
        assert_equal(named(results), named(expected))


def test_a_lost_mask_is_seen(architecture):
    """A load of rows beyond the view, which are in its storage."""
    x = torch.randn(120, 176).to(BF16)[40:80, 16:160]
    unmasked = emulated(architecture, change=lambda ptx: re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx))
    with unmasked, pytest.raises(emulator.Fault, match="outside of the tensor's view"):
        triton_kernels.act_fwd(x, None, "silu")
