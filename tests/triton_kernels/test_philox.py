"""Masks drawn inside the kernels: the bits of the CPU extension, for any tile, first row, number of programs, state."""

import pytest
import torch
from support.kernel_cases import DROPPING, STATE, dropout_of, inputs_of, kernel

from ckptkern import state, triton_kernels
from ckptkern.triton_kernels.tile import Tile

P = 0.3
DROPPED = {"h", "dz", "dg", "du"}  # results that dropout, or its gradient, scales
KNOWN_ANSWER = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # Philox4x32-10 of key 0, counter 0: Random123


def masks_of(launcher, M, N, dtype=torch.float32, device="cpu", row_base=0, col_base=0, **options):
    """The mask in each result: of ones everywhere, identity as activation, a result is scale or 0."""
    tensors = inputs_of(launcher, dtype, device, bias=False, M=M, N=N, K=1, D=1)
    ones = {name: None if t is None else torch.ones_like(t) for name, t in tensors.items()}
    dropout = dropout_of(P, device, col_base)
    results = kernel(launcher, ones, "identity", dropout=dropout, row_base=row_base, **options)
    scale = torch.tensor(dropout[2]).to(dtype).item()
    for name in DROPPED & results.keys():
        assert set(results[name].unique().tolist()) <= {0.0, scale}, name
        yield name, (results[name] != 0).cpu()


# Tile, first row and column, dtype. Slices of 32 columns and more; tiles of one and of eight Philox blocks.
PLACES = [
    (Tile(16, 32, 16, 4, 1), 0, 32, torch.float32),
    (Tile(64, 64, 16, 4, 1, 2), 48, 96, torch.bfloat16),
    (Tile(32, 128, 16, 4, 1, 4), 2**20, 0, torch.float16),
    (Tile(64, 64, 16, 4, 1), 2**31 - 128, 2**20, torch.float32),
]


@pytest.mark.parametrize("launcher", DROPPING, ids=str)
@pytest.mark.parametrize(
    ("tile", "row_base", "col_base", "dtype"), PLACES, ids=lambda one: str(one).replace("Tile", "")
)
def test_one_mask_for_every_tile_and_place(launcher, tile, row_base, col_base, dtype, device):
    """Forward's h and backward's gradients are dropped by the mask that the CPU extension samples, whichever rows are a chunk's
    and whichever columns a shard's."""
    place = {"row_base": row_base, "col_base": col_base}
    expected = state.keep_mask(torch.tensor(STATE), P, 40, 150, **place)
    for name, mask in masks_of(launcher, 40, 150, dtype=dtype, device=device, tile=tile, **place):
        assert torch.equal(mask, expected), name


@pytest.mark.parametrize("launcher", DROPPING, ids=str)
def test_a_part_that_begins_inside_a_block_of_columns_is_refused(launcher):
    with pytest.raises(ValueError, match="col_base must be a multiple of 32, not 48"):
        list(masks_of(launcher, 16, 32, col_base=48))


@pytest.mark.parametrize("blocks", [(16, 64), (32, 256), (128, 32)], ids=str)
@pytest.mark.parametrize(("row_base", "col_base"), [(0, 0), (5, 96), (48, 2**20), (2**31 - 128, 0)])
def test_one_mask_for_every_block_of_the_dropout_kernel(blocks, row_base, col_base, device):
    ones, shape = torch.ones(48, 70, device=device), dict(zip(("BLOCK_M", "BLOCK_N"), blocks, strict=True))
    y = triton_kernels.dropout(ones, *dropout_of(P, device, col_base), row_base=row_base, blocks=shape)
    expected = state.keep_mask(torch.tensor(STATE), P, 48, 70, row_base=row_base, col_base=col_base)
    assert torch.equal(y.cpu() != 0, expected)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("word", range(4))
def test_known_answer(word, half, device):
    """The eight 16-bit values of counter 0 under key 0: each is saved at its own value as threshold, dropped above."""
    value = KNOWN_ANSWER[word] >> (16 * half) & 0xFFFF
    seed = torch.zeros(2, dtype=torch.int64, device=device)
    x, eye = torch.ones(16, 1, device=device), torch.ones(32, 1, device=device)
    for threshold in (value, value + 1):
        direct = triton_kernels.dropout(torch.ones(16, 32, device=device), seed, threshold, 1.0)
        h, _, _ = triton_kernels.linear_fwd(x, eye, None, "identity", "ieee", dropout=(seed, threshold, 1.0, 0))
        for y in (direct, h):
            assert (y[8 * half, 8 * word] != 0) == (threshold == value)


@pytest.mark.parametrize("word", [0, 1], ids=["key", "stream"])
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_part_of_the_state_counts(word, bit, device):
    """No seed is cut to 16 or 32 bits."""
    seed = torch.tensor(STATE)
    seed[word] ^= torch.tensor(1, dtype=torch.int64) << bit
    x = torch.ones(32, 64, device=device)
    mask = triton_kernels.dropout(x, seed.to(device), *state.threshold_scale(0.5)).cpu() != 0
    assert torch.equal(mask, state.keep_mask(seed, 0.5, 32, 64))
    assert not torch.equal(mask, state.keep_mask(torch.tensor(STATE), 0.5, 32, 64))


def test_keep_rate_and_correlations(device):
    """Within five standard deviations of independent elements: neighbours, Philox halves, words and blocks apart."""
    side, sigmas = 512, 5
    blocks = {"BLOCK_M": 128, "BLOCK_N": 512}
    for p in (0.1, 0.5):
        ones = torch.ones(side, side, device=device)
        y = triton_kernels.dropout(ones, *dropout_of(p, device), blocks=blocks).cpu()
        saved = (y != 0).double() - (1 - p)
        variance = p * (1 - p)
        assert abs(saved.sum()) <= sigmas * (saved.numel() * variance) ** 0.5
        for dim in (0, 1):
            for lag in (1, 8, 16, 32):
                matmuls = saved.narrow(dim, lag, side - lag) * saved.narrow(dim, 0, side - lag)
                assert abs(matmuls.sum()) <= sigmas * matmuls.numel() ** 0.5 * variance, (p, dim, lag)
