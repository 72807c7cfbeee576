"""Masks drawn inside the kernels: the bits of the CPU extension, for any tile, first row, number of programs, state."""

import pytest
import torch
from support.kernel_cases import DROPPING, STATE, dropout_of, inputs_of, kernel
from support.masks import keep_mask

from ckptkern import state, triton_kernels
from ckptkern.triton_kernels.tile import Tile

P = 0.3
DROPPED = {"h", "dz", "dg", "du"}  # results that dropout, or its gradient, scales


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
    ("tile", "row_base", "col_base", "dtype"), PLACES, ids=lambda value: str(value).replace("Tile", "")
)
def test_one_mask_for_every_tile_and_place(launcher, tile, row_base, col_base, dtype, device):
    """Forward's h and backward's gradients are dropped by the mask that the CPU extension samples, whichever rows are a chunk's
    and whichever columns a shard's."""
    place = {"row_base": row_base, "col_base": col_base}
    expected = keep_mask(torch.tensor(STATE), P, 40, 150, **place)
    for name, mask in masks_of(launcher, 40, 150, dtype=dtype, device=device, tile=tile, **place):
        assert torch.equal(mask, expected), name


@pytest.mark.parametrize("launcher", DROPPING, ids=str)
def test_a_part_that_begins_inside_a_block_of_columns_is_refused(launcher):
    with pytest.raises(ValueError, match="col_base must be a multiple of 32, not 48"):
        list(masks_of(launcher, 16, 32, col_base=48))


@pytest.mark.parametrize("blocks", [(16, 64), (32, 256), (128, 32)], ids=str)
@pytest.mark.parametrize(("row_base", "col_base"), [(0, 0), (5, 96), (48, 2**20), (2**31 - 128, 0)])
def test_one_mask_for_every_block_of_the_dropout_kernel(blocks, row_base, col_base, device):
    """What is dropped is 0, NaN or not."""
    ones, shape = torch.ones(48, 70, device=device), dict(zip(("BLOCK_M", "BLOCK_N"), blocks, strict=True))
    ones[7] = float("nan")
    y = triton_kernels.dropout(ones, *dropout_of(P, device, col_base), row_base=row_base, blocks=shape)
    expected = keep_mask(torch.tensor(STATE), P, 48, 70, row_base=row_base, col_base=col_base)
    assert torch.equal(y.cpu() != 0, expected)


@pytest.mark.parametrize("word", [0, 1], ids=["key", "stream"])
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_every_part_of_the_state_counts(word, bit, device):
    """No seed is cut to 16 or 32 bits."""
    seed = torch.tensor(STATE)
    seed[word] ^= torch.tensor(1, dtype=torch.int64) << bit
    x = torch.ones(32, 64, device=device)
    mask = triton_kernels.dropout(x, seed.to(device), *state.threshold_scale(0.5)).cpu() != 0
    assert torch.equal(mask, keep_mask(seed, 0.5, 32, 64))
    assert not torch.equal(mask, keep_mask(torch.tensor(STATE), 0.5, 32, 64))
