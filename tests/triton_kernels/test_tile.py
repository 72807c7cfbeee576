"""tile.py: rounding and matmuls that are right in the interpreter too, and the choice of a tile."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from support.kernel_cases import DTYPES, error

from ckptkern import eager
from ckptkern.triton_kernels.elementwise import pack_bits
from ckptkern.triton_kernels.tile import (
    INTERPRETED_TILE,
    INTERPRETER,
    SMS,
    TILES,
    Tile,
    cast,
    dot,
    matrix,
    rows_of,
    tile_for,
    unit_of,
    upcast,
)

BLOCK = 4096


@triton.jit
def _cast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, cast(tl.load(x_ptr + offs), y_ptr.dtype.element_ty))


@triton.jit
def _upcast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, upcast(tl.load(x_ptr + offs)))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, acc_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(a_ptr + m * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n)
    tl.store(c_ptr + m * N + n, dot(a, b, tl.load(acc_ptr + m * N + n), "ieee"))


@triton.jit
def _pack_kernel(bit_ptr, bits_ptr, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    bit = tl.load(bit_ptr + m * N + tl.arange(0, N)[None, :]) != 0
    tl.store(bits_ptr + m * (N // 8) + tl.arange(0, N // 8)[None, :], pack_bits(bit, M, N))


@triton.jit
def _masked_kernel(x_ptr, rows, TILE: tl.constexpr, STORE: tl.constexpr):
    offs = tl.arange(0, 4)
    row = tl.program_id(0) + tl.zeros_like(offs) if TILE else tl.program_id(0)
    mask = (offs < 4) & (row < rows)
    x = tl.load(x_ptr + offs) if STORE else tl.load(x_ptr + offs, mask=mask)
    tl.store(x_ptr + offs, x + 1.0, mask=mask if STORE else None)


def through(kernel, x, dtype):
    assert x.numel() % BLOCK == 0
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    kernel[(x.numel() // BLOCK,)](x, y, BLOCK=BLOCK)
    return y


def bits_of(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_bits(ours, theirs):
    """Bits where the value is a number; NaN where it is NaN (which of its bit patterns is nobody's promise)."""
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits_of(ours)[~ours.isnan()], bits_of(theirs)[~theirs.isnan()])


def float32_patterns(device):
    """Every upper half with the lower halves round which bf16 rounding turns, and 2**20 random patterns."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    random = torch.randint(-(2**31), 2**31, (2**20,)).to(torch.int32)
    return torch.cat([(high[:, None] | low).flatten(), random]).view(torch.float32).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_rounds_as_torch(dtype, device):
    """To nearest even, subnormals, overflow to inf and NaN included (the interpreter's own fp32 -> bf16 truncates)."""
    x = float32_patterns(device)
    assert_same_bits(through(_cast_kernel, x, dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_upcast_is_exact(dtype, device):
    """All 65,536 patterns (the interpreter's own bf16 -> fp32 is wrong for subnormals)."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    assert_same_bits(through(_upcast_kernel, x, torch.float32), x.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dot(dtype, device):
    """Integers are exact in any order; normal numbers are as accurate as a float32 matmul of the same operands."""
    M, N, K = 32, 64, 128
    for draw in (lambda *shape: torch.randint(-8, 9, shape).float(), torch.randn):
        a, b, acc = (draw(*shape).to(device) for shape in ((M, K), (K, N), (M, N)))
        a, b = a.to(dtype), b.to(dtype)
        c = torch.empty_like(acc)
        _dot_kernel[(1,)](a, b, c, acc, M, N, K)
        reference = torch.addmm(acc.double(), a.double(), b.double())
        own = error(torch.addmm(acc, a.float(), b.float()), reference)
        assert error(c, reference) <= 2 * own + torch.finfo(torch.float32).eps, (dtype, own)  # tensor cores truncate


def test_pack_bits_is_the_eager_layout(device):
    bit = torch.rand(16, 64, device=device) < 0.5
    bits = torch.empty(16, 8, dtype=torch.uint8, device=device)
    _pack_kernel[(1,)](bit.to(torch.uint8), bits, 16, 64)
    assert torch.equal(bits, eager.pack_bits(bit))
    assert torch.equal(eager.unpack_bits(bits, 64), bit)
    mask = torch.zeros(16, 64, device=device, dtype=torch.uint8)
    mask[3, 13] = 1
    _pack_kernel[(1,)](mask, bits, 16, 64)
    assert bits.nonzero().tolist() == [[3, 1]]
    assert bits[3, 1] == 1 << 5


# --- the choice of a tile

KERNELS = sorted({kernel for kernel, _ in TILES})


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_tile_depends_on_shape_class_dtype_and_architecture_alone(kernel, arch):
    table = TILES[kernel, 90 if arch == 90 else 80]
    for dtype, shape_class in [(torch.float16, "16"), (torch.bfloat16, "16"), (torch.float32, "32")]:
        operands = meta(64, 32, dtype=dtype), meta(4096, 1024, dtype=dtype)
        same = torch.randn(64, 32).to(dtype), torch.zeros(128, 16, dtype=dtype)
        tiles = {tile_for(kernel, arch, M, 4096, *tensors) for M in (4096, 5000) for tensors in (operands, same)}
        assert tiles == {table[shape_class]}


@pytest.mark.parametrize(
    ("view", "unit"),
    [
        (lambda: meta(7, 64), 1),  # rows need no multiple
        (lambda: meta(64, 80)[:, :64], 1),  # rows 80 elements apart
        (lambda: meta(64, 128)[:, 16:80], 1),
        (lambda: meta(64, 72), 8),
        (lambda: meta(64, 72)[:, :64], 8),  # 144 bytes apart, but 72 elements: Triton knows multiples of 16 alone
        (lambda: meta(64, 128)[:, :24], 8),
        (lambda: meta(64, 128)[:, 8:72], 1),
        (lambda: meta(64, 65), None),
        (lambda: meta(64, 68), None),  # 136 bytes
        (lambda: meta(64, 68)[:, :64], None),
        (lambda: meta(64, 128)[:, :20], None),
        (lambda: meta(64, 128)[:, 1:65], None),  # starts 2 bytes after a multiple of 16
        (lambda: meta(64, 128)[:, 4:68], None),
        (lambda: meta(64, 1), None),
        (lambda: meta(64, 68, dtype=torch.float32), 4),
        (lambda: meta(64, 88, dtype=torch.float32)[:, :64], 8),
        (lambda: meta(64, 128, dtype=torch.float32)[:, 4:68], 1),
        (lambda: meta(64, 66, dtype=torch.float32)[:, :64], None),
        (lambda: meta(64, 128, dtype=torch.float32)[:, 2:66], None),
    ],
)
def test_aligned_and_unaligned(view, unit):
    """Rows that no 16-byte copy fits make the whole launch unaligned, whichever operand they are in. Of the others the
    compiler is told what it does not see by itself."""
    table, tensor = TILES["linear", 90], view()
    tile = table["unaligned"] if unit is None else table["16" if tensor.itemsize == 2 else "32"]._replace(UNIT=unit)
    for operands in itertools.permutations([meta(64, 64, dtype=tensor.dtype), tensor]):
        assert tile_for("linear", 90, 4096, 4096, *operands) == tile
        assert tile_for("linear", INTERPRETER, 4096, 4096, *operands)[:-1] == INTERPRETED_TILE[:-1]


def test_units_and_strides_that_the_compiler_is_told():
    for n in (0, 16, 48, 1024, 1, 2, 6, 4097):
        assert unit_of(n) == unit_of(16, n) == 1
    assert unit_of(8) == unit_of(1032, 4096) == unit_of(24, 40) == 8
    assert unit_of(4) == unit_of(12, 8) == unit_of(1036, 1032) == 4
    assert unit_of(8, 2) == unit_of(4, 1) == 1
    for dtype, told in (
        (torch.bfloat16, (8, 24, 1032)),
        (torch.float32, (4, 8, 12, 20, 24, 1032, 1036)),
        (torch.uint8, ()),
    ):
        for n in (1, 2, 4, 6, 8, 12, 16, 20, 24, 64, 129, 1032, 1036):
            x = meta(3, n, dtype=dtype)
            assert matrix(x)[1:] == ((n, 1) if n in told else (n,)), (dtype, n)
    assert matrix(None) == (None, 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [80, 90])
def test_few_rows_or_columns_take_a_smaller_tile(kernel, arch):
    """Where that of many would leave half of the SMs idle, or half of its own columns empty."""
    table, operand = TILES[kernel, arch], meta(64, 64)
    tile = table["16"]
    rows = SMS[arch] // 2 * tile.BLOCK_M  # of one column of tiles
    assert tile_for(kernel, arch, rows, tile.BLOCK_N, operand) == table["few"]
    assert tile_for(kernel, arch, rows + 1, tile.BLOCK_N, operand) == tile
    assert tile_for(kernel, arch, 10 * rows, tile.BLOCK_N // 2, operand) == table["few"]
    assert tile_for(kernel, arch, 10 * rows, tile.BLOCK_N // 2 + 16, operand) == tile
    assert tile_for(kernel, arch, 1, 64, meta(64, 65)) == table["unaligned"]
    assert tile_for(kernel, arch, 1, 64, meta(64, 64, dtype=torch.float32)) == table["32"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_interpreted_tile_is_one_for_all(kernel):
    """Forward and recompute must share it there: numpy's matmul promises no equal bits between block shapes."""
    shapes = [(meta(64, 64),), (meta(3, 5), meta(1, 1)), (meta(64, 64, dtype=torch.float32),)]
    assert len({tile_for(kernel, INTERPRETER, M, 64, *operands) for operands in shapes for M in (1, 10**6)}) == 1


@pytest.mark.parametrize(("kernel", "arch"), sorted(TILES), ids=str)
def test_default_tiles_fit_the_mask_and_the_tensor_cores(kernel, arch):
    """Slices of the epilogue start at multiples of 32 columns (philox.py); sm_90 dots are at least 64 wide in M, N."""
    assert TILES[kernel, arch].keys() == {"16", "few", "32", "unaligned"}
    for tile in TILES[kernel, arch].values():
        assert isinstance(tile, Tile)
        assert tile.BLOCK_M % 16 == 0
        assert tile.BLOCK_N // tile.SUB % 32 == 0
        assert arch < 90 or min(tile.BLOCK_M, tile.BLOCK_N) >= 64
        assert tile.launch_options()["enable_fp_fusion"] is False
        assert tile.UNIT == 1
        if tile.maxnreg:  # two programs share 2**16 registers and 228 KiB, of which each takes one more
            stage = (tile.BLOCK_M + tile.BLOCK_N) * tile.BLOCK_K * 2
            assert 2 * 32 * tile.num_warps * tile.maxnreg <= 2**16
            assert 2 * (tile.num_stages * stage + 1024) <= 228 * 1024


def test_rows_of_copies_only_where_columns_have_strides():
    x = torch.randn(6, 10)
    for view in (x, x[::2], x[:, 3:7], x[:1].expand(5, -1), x[:0].t(), x.new_empty(0, 3)):
        assert rows_of(view) is view
    for view in (x.t(), x[:, ::2], x[:, :1].expand(-1, 5)):
        copy = rows_of(view)
        assert copy.stride(-1) == 1
        assert torch.equal(copy, view)


@pytest.mark.parametrize("access", ["load", "store"])
def test_a_mask_that_is_not_boolean_is_seen_in_every_triton(access, interpreted):
    """The scalar `row < rows` beside a tile. 3.9's interpreter refuses it by itself."""
    if not interpreted:
        pytest.skip("compiled kernels may use it")
    x = torch.zeros(4)
    _masked_kernel[(1,)](x, 1, TILE=True, STORE=access == "store")
    assert torch.equal(x, torch.ones(4))
    with pytest.raises(triton.runtime.errors.InterpreterError, match=f"create_masked_{access}: .* int32, not bool"):
        _masked_kernel[(1,)](x, 1, TILE=False, STORE=access == "store")
