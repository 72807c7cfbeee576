"""What only the emulator can show: bits across tiles and architectures, any order of CTAs, bounds of views."""

import functools
import random
import re
import zlib

import emulator
import pytest
import torch
from codegen.cases import ARCHS
from emulator.emulated import emulated
from support.kernel_cases import LAUNCHERS, SUMS_OF_ROWS, TILE_NAMES, assert_equal, dropout_of, inputs_of, kernel, named

from ckptkern import eager, triton_kernels
from ckptkern.triton_kernels.tile import TILES

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _on_the_emulator(request, architecture):
    """Of `--sample`, each test on one of the architectures."""
    if architecture is None:
        pytest.skip("asks the emulator: --device emulated")
    name = re.sub(r"sm_\d+-?", "", request.node.name)
    if request.config.option.sample and zlib.crc32(name.encode()) % 2 != architecture // 10 % 2:
        pytest.skip("in the sample on the other architecture")


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
def test_tiles_and_architectures_give_equal_bits(name, architecture, request):
    """Many rows of forward and few of a chunk of backward take different tiles, and a checkpoint may move between GPUs. That
    recompute equals forward on one of them is tests/triton_kernels/test_mlp.py.

    Sums of columns are of tiles. Tensor cores round in their own way; the order is that of ascending steps of K in any tile.
    """
    if architecture != ARCHS[0] and not request.config.option.sample:
        pytest.skip("goes through the architectures itself")
    if request.config.option.sample and name not in ("linear_bwd", "gated_bwd"):
        pytest.skip("in the sample one matmul, and three")
    tensors = cancelling(inputs_of(LAUNCHERS[name], BF16, M=72, K=128, N=144, D=128))
    results = {}
    for arch in ARCHS:
        for row, tile in TILES[TILE_NAMES[name], arch].items():
            if row != "32":
                with emulated(arch):
                    results[arch, row] = kernel(LAUNCHERS[name], tensors, "relu", tile=tile)
    assert len(results) == 6
    for other in results.values():
        assert_equal(other, results[90, "16"], SUMS_OF_ROWS)


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
    with emulated(architecture):
        expected = launch()
    for order in (lambda n: range(n)[::-1], lambda n: random.Random(n).sample(range(n), n)):
        with emulated(architecture, programs=order) as launches:
            results = launch()
        assert max(launch.counts.ctas for launch in launches) > 1
        assert_equal(named(results), named(expected))


def test_a_lost_mask_is_seen(architecture):
    """A load of rows beyond the view, which are in its storage."""
    x = torch.randn(120, 176).to(BF16)[40:80, 16:160]
    unmasked = emulated(architecture, change=lambda ptx: re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx))
    with unmasked, pytest.raises(emulator.Fault, match="outside of the tensor's view"):
        triton_kernels.act_fwd(x, None, "silu")
