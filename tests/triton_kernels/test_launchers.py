"""Every launcher against its eager reference and float64: dtypes, activations, flags, shapes, strides, tiles."""

import pytest
import torch
from support.cases import SAMPLES, every_other, padded_rows, resampled, transposed
from support.drop_ins import pairwise
from support.kernel_cases import (
    ACTIVATIONS,
    DROPPING,
    DTYPES,
    LAUNCHERS,
    MATMULS,
    SUMS_OF_ROWS,
    TILE_NAMES,
    assert_accurate,
    assert_equal,
    call,
    dropout_of,
    exact,
    far_apart,
    inputs_of,
    kernel,
)

from benchmarks.codegen.cases import PERSISTENT_OPS
from ckptkern import eager, triton_kernels
from ckptkern.triton_kernels.tile import TILES, Tile, device_arch


def assert_like_eager(launcher, tensors, activation, tile=None, **options):
    """Twice eager's error at most; if one draw of the inputs misses it, twelve decide, as in `cases.check_exactness`: a
    sum that cancels to a single number is sometimes exact in eager PyTorch, by the processor's library."""
    tiled = {} if tile is None else {"tile": tile}

    def results(given):
        ours = kernel(launcher, given, activation, **options, **tiled)
        reference = call(launcher, eager, given, activation, **options)
        return ours, reference, exact(launcher, given, activation, **options)

    first = ours, *_ = results(tensors)
    try:
        assert_accurate(*first)
    except AssertionError:
        given = {name: t for name, t in tensors.items() if t is not None}
        drawn = [first, *(results(tensors | resampled(given, seed)) for seed in range(1, SAMPLES))]
        assert_accurate(
            *({name: torch.stack([one[name] for one in each]) for name in each[0]} for each in zip(*drawn, strict=True))
        )
    if "bits" in ours:
        assert torch.equal(ours["bits"], eager.pack_bits(~(ours["z"] <= 0)))
    return ours


@pytest.mark.sampled
@pytest.mark.parametrize("case", pairwise(launcher=tuple(LAUNCHERS), activation=ACTIVATIONS, dtype=DTYPES))
def test_dtype_and_activation(case, device):
    launcher = LAUNCHERS[case["launcher"]]
    assert_like_eager(launcher, inputs_of(launcher, case["dtype"], device), case["activation"])


@pytest.mark.parametrize("launcher", DROPPING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(launcher, dtype, device):
    """Dropout between act and the next matmul, in forward and back, against eager with the same 16 bytes."""
    options = {"dropout": dropout_of(0.3, device), "row_base": 48}
    assert_like_eager(launcher, inputs_of(launcher, dtype, device), "gelu", **options)


@pytest.mark.parametrize("launcher", [one for one in DROPPING if "dy" in one.inputs], ids=str)
def test_what_is_dropped_has_no_gradient_whatever_dy_is(launcher, device):
    """The gradients are 0 where eager PyTorch's are, also in the rows of an infinite dy, and nowhere else."""
    tensors = inputs_of(launcher, torch.bfloat16, device)
    tensors["dy"][::2] = float("inf")
    options = {"dropout": dropout_of(0.3, device), "row_base": 16, "save_h": False}
    ours, eagers = (call(launcher, backend, tensors, "identity", **options) for backend in (triton_kernels, eager))
    for name in ours.keys() & {"dz", "dg", "du"}:
        assert torch.equal(ours[name] == 0, eagers[name] == 0), name
        assert 0.2 < (ours[name] == 0).float().mean() < 0.4


@pytest.mark.parametrize("launcher", [one for one in LAUNCHERS.values() if one.biases], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_bias(launcher, dtype, device):
    tensors = inputs_of(launcher, dtype, device, bias=False)
    ours = assert_like_eager(launcher, tensors, "silu")
    zeros = {name: tensors["x"].new_zeros(tensors[name.replace("b", "w")].shape[0]) for name in launcher.biases}
    assert_equal(ours, kernel(launcher, tensors | zeros, "silu"))


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=str)
def test_optional_results_do_not_change_the_others(launcher, device):
    """Each result has the same bits whatever else is asked for, and what is not asked for is None."""
    tensors = inputs_of(launcher, torch.float32, device, N=23)
    everything = kernel(launcher, tensors, "gelu")
    for wanted in (None, *launcher.wants):
        some = kernel(launcher, tensors, "gelu", **{flag: flag == wanted for flag in launcher.wants})
        assert_equal(some, {name: everything[name] for name in some})
        assert (len(some) < len(everything)) == any(flag != wanted for flag in launcher.wants)


# Sizes that are no multiple of a tile, one exact tile, one element, and nothing at all in each direction.
SIZES = [
    {"M": 32, "K": 32, "N": 32, "D": 32},
    {"M": 1, "K": 1, "N": 1, "D": 1},
    {"M": 33, "K": 65, "N": 1, "D": 3},
    {"M": 33, "K": 40, "N": 72, "D": 24},  # multiples of 8: 16 bytes of a 16-bit type
    {"M": 33, "K": 36, "N": 44, "D": 68},  # of 4: 16 bytes of float32
    {"M": 0},
    {"K": 0},
    {"D": 0},
    {"N": 0},
    {"M": 0, "K": 0, "N": 0, "D": 0},
]


@pytest.mark.sampled
@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_sizes(launcher, sizes, device):
    assert_like_eager(launcher, inputs_of(launcher, torch.float32, device, **sizes), "gelu")


@pytest.mark.parametrize("launcher", MATMULS, ids=str)
@pytest.mark.parametrize("rows", [150, 113])
def test_groups_of_tile_rows(launcher, rows, device):
    """10 and 8 tile rows in groups of 8, two tile columns: every tile is computed, none twice in place of another."""
    tensors = inputs_of(launcher, torch.float32, device, M=rows, K=3, D=5)
    assert_like_eager(launcher, tensors, "gelu", tile=Tile(16, 32, 16, 4, 1))


@pytest.mark.parametrize("launcher", MATMULS, ids=str)
def test_epilogue_slices(launcher, device):
    """SUB slices of the epilogue write what one slice writes, bit for bit, dropout and bits included."""
    options = {"dropout": dropout_of(0.5, device)} if launcher.dropout else {}
    tensors = inputs_of(launcher, torch.bfloat16, device, N=150)
    whole = assert_like_eager(launcher, tensors, "relu", tile=Tile(64, 128, 32, 4, 1, 1), **options)
    for sub in (2, 4):
        tile = Tile(64, 128, 32, 4, 1, sub)
        assert_equal(kernel(launcher, tensors, "relu", tile=tile, **options), whole)


@pytest.mark.sampled
@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=str)
@pytest.mark.parametrize("layout", [transposed, padded_rows, every_other], ids=lambda f: f.__name__)
def test_strides(launcher, layout, device):
    """Any strides of any input, biases included, give the bits of contiguous ones."""
    tensors = inputs_of(launcher, torch.float32, device)
    strided = {name: layout(t) if t.dim() == 2 or layout is every_other else t for name, t in tensors.items()}
    assert any(not t.is_contiguous() for t in strided.values())
    assert_equal(kernel(launcher, strided, "gelu"), kernel(launcher, tensors, "gelu"))


@pytest.mark.sampled
@pytest.mark.parametrize("launcher", [one for one in LAUNCHERS.values() if {"dy", "dh"} & one.inputs.keys()], ids=str)
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_expanded_gradient(launcher, dims, device):
    """A gradient from .sum() has strides (0, 0)."""
    tensors = inputs_of(launcher, torch.float32, device)
    name = "dy" if "dy" in tensors else "dh"
    full = tensors[name]
    for dim in dims:
        full = full.narrow(dim, 0, 1)
    tensors[name] = full.expand(tensors[name].shape)
    assert all(tensors[name].stride(dim) == 0 for dim in dims)
    expected = kernel(launcher, tensors | {name: tensors[name].contiguous()}, "gelu")
    assert_equal(kernel(launcher, tensors, "gelu"), expected, SUMS_OF_ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("launcher", MATMULS, ids=str)
def test_tiles_of_the_table_give_equal_bits(launcher):
    """Many rows of forward and few of a chunk of backward take different ones, and an implementation may name others.
    Sums of columns are of tiles, so not db."""
    tensors = inputs_of(launcher, torch.bfloat16, "cuda", M=256, K=512, N=512, D=512)
    table = TILES[TILE_NAMES[launcher.name], 90 if device_arch(torch.cuda.current_device()) // 10 == 9 else 80]
    first, *others = (
        {name: t for name, t in kernel(launcher, tensors, "gelu", tile=table[row]).items() if not name.startswith("db")}
        for row, tile in table.items()
        if row != "32" and (not tile.programs or launcher.name in PERSISTENT_OPS)
    )
    for other in others:
        assert_equal(other, first)


@pytest.mark.parametrize("launcher", MATMULS, ids=str)
def test_matmuls_repeat_their_bits(launcher, device, repeats):
    """Full tiles and a long loop over K, again and again: a copy that a matmul does not wait for is seldom late."""
    sizes = {"M": 1024, "K": 2048, "N": 512, "D": 2048} if device == "cuda" else {}
    tensors = inputs_of(launcher, torch.bfloat16, device, **sizes)
    first = kernel(launcher, tensors, "gelu")
    for _ in range(repeats):
        assert_equal(kernel(launcher, tensors, "gelu"), first)


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=str)
def test_inputs_are_left_alone(launcher, device):
    """No launcher writes into what it was given."""
    tensors = inputs_of(launcher, torch.bfloat16, device)
    before = {name: t.clone() for name, t in tensors.items()}
    kernel(launcher, tensors, "gelu")
    assert_equal(tensors, before)


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=str)
def test_ten_runs_are_equal(launcher, device):
    """No atomics, no order that changes between runs."""
    tensors = inputs_of(launcher, torch.float32, device, M=40, K=5, N=9, D=3)
    first = kernel(launcher, tensors, "gelu")
    for _ in range(9):
        assert_equal(kernel(launcher, tensors, "gelu"), first)


@pytest.mark.parametrize(
    ("name", "spread_inputs"),
    [("linear_fwd", ["x", "w"]), ("linear_bwd", ["dh"]), ("act_grad", ["dy", "w", "z"]), ("act_bwd", ["dy", "saved"])],
)
def test_offsets_beyond_int32(name, spread_inputs, device):
    """Rows that start more than 2**31 elements after the first, and BLOCK_K rows as far apart."""
    launcher = LAUNCHERS[name]
    tensors = inputs_of(launcher, torch.bfloat16, device, M=9, K=40, N=9, D=17)
    far = tensors | {one: far_apart(tensors[one]) for one in spread_inputs}
    tile = {"tile": Tile(16, 32, 16, 4, 1)} if launcher.matmul else {}
    assert_equal(kernel(launcher, far, "relu", **tile), kernel(launcher, tensors, "relu", **tile))
