"""Every launcher, as the cases of the code-generation check describe it, with every property that all launchers have; and
flags, sizes and tiles of matmuls."""

from collections.abc import Iterable

import pytest
import torch
import triton
from codegen import experts
from codegen.cases import DROPOUT_OPS, MATMUL_OPS, OPS, VARIANTS, AttentionCase, Case
from support import launchers as eager
from support.cases import every_other, padded_rows, transposed
from support.drop_ins import pairwise
from support.kernel_cases import (
    ACTIVATIONS,
    DROPPING,
    DTYPES,
    LAUNCHERS,
    MATMULS,
    TILE_NAMES,
    Tails,
    assert_accurate,
    assert_equal,
    call,
    check_like_eager,
    dropout_of,
    exact,
    far_apart,
    inputs_of,
    kernel,
    named,
)
from torch import Tensor

from ckptkern import triton_kernels
from ckptkern.triton_kernels.tile import TILES, Tile, device_arch


def variants_of(op: str) -> tuple[str, ...]:
    return ("",) if op == "dropout" else VARIANTS.get(op, ACTIVATIONS)


def case_of(
    op: str, variant: int = 0, dtype: torch.dtype = torch.bfloat16, unaligned: bool = True, extras: bool = True
):
    kind = "ieee" if dtype == torch.float32 and op in MATMUL_OPS else ""
    return Case(op, 80, str(dtype)[6:], unaligned, variants_of(op)[variant], extras and op in DROPOUT_OPS, extras, kind)


def attention(op: str, kind: str, dtype: str = "bfloat16") -> AttentionCase:
    return AttentionCase(op, 80, dtype, 40, True, True, kind)


# Results are written over inputs, which then cannot be expanded, or have columns with strides.
IN_PLACE = {
    "heads_fwd",
    "heads_bwd",
    "experts_dw",
    "experts_hidden_grad",
    "cross_entropy_bwd",
    "cross_entropy_saved_bwd",
}
# Options of core attention in pairs: test_attention.py. Here those that bring tensors of their own.
ATTENTION = [attention("attn_fwd_delta", kind) for kind in ("bool", "varlen")]
ATTENTION += [attention("attn_bwd", "additive"), attention("attn_dmask", "")]
HEAVIEST = [*map(case_of, OPS), *ATTENTION]
each_case = pytest.mark.parametrize("case", HEAVIEST, ids=lambda case: case.name.replace("/sm_80/bfloat16", ""))


def assert_same(ours, theirs) -> None:
    """Equal bits where the interpreter runs them; once compiled, operands of another alignment may take other tiles, whose sums
    come in another order."""
    interpreted = {"rtol": 0, "atol": 0} if triton.knobs.runtime.interpret else {}
    ours, theirs = named(ours), named(theirs)
    assert ours.keys() == theirs.keys()
    for name, result in ours.items():
        torch.testing.assert_close(
            result, theirs[name], **interpreted, equal_nan=True, msg=f"result {name}: {{}}".format
        )


def has_meaning(case: dict) -> bool:
    """Eight layers of squares overflow."""
    variants = variants_of(case["op"])
    return case["variant"] < len(variants) and (case["op"][:6], variants[case["variant"]]) != ("stack_", "relu2")


@pytest.mark.parametrize(
    "case",
    pairwise(
        has_meaning,
        op=tuple(OPS),
        variant=tuple(range(len(ACTIVATIONS))),
        dtype=DTYPES,
        unaligned=(True, False),
        extras=(True, False),
    ),
)
def test_like_eager(case, device):
    """Twice eager PyTorch's error at most, in every activation and variant, tiles full or not. Memory is NaN beforehand, and so
    is what a kernel fails to write."""
    check_like_eager(case_of(*case.values()), Tails, device)


def packed(case: Case, t: Tensor) -> bool:
    """Is t one of the tensors into which a narrow chain's weights are packed? They are contiguous."""
    return case.op.startswith("stack_") and t.shape[-1] == 64


def expanded_rows(t: Tensor) -> Tensor:
    """t with strides of 0, as a gradient from .sum() has them."""
    return t[:1].expand(t.shape) if t.dim() > 1 else t


@pytest.mark.parametrize("layout", [padded_rows, every_other, expanded_rows], ids=lambda layout: layout.__name__)
@each_case
def test_strides(case, layout, device):
    """Any strides of any input, vectors and results that are written over included, give the bits of contiguous ones."""
    if case.op in IN_PLACE and layout is not padded_rows:
        pytest.skip("results need contiguous columns and rows that do not overlap")

    def change(t: Tensor) -> Tensor:
        if packed(case, t) or (t.dim() == 1 and layout is not every_other):
            return t.clone()
        return layout(t) if t.is_floating_point() or layout is expanded_rows else transposed(t)

    tails = Tails(device)
    tails.backend = eager
    case.launch(tails)
    ours, theirs = (
        case.launch(tails.again(triton_kernels, change=layout)) for layout in (change, lambda t: change(t).contiguous())
    )
    assert_same(ours, theirs)


def dims_of(case: Case | AttentionCase) -> range:
    """The dimensions of inputs whose strides kernels multiply by an index; packed sequences are one sample."""
    if isinstance(case, AttentionCase):
        return range(1 if case.kind == "varlen" else 0, 4)
    return range(3 if case.op.startswith("heads_") else 2 if case.op in experts.MATMULS else 1)


FAR = [
    pytest.param(case, dim, id=f"{case.name}-{dim}".replace("/sm_80/bfloat16", ""))
    for case in HEAVIEST
    for dim in dims_of(case)
]


@pytest.mark.parametrize(("case", "dim"), FAR)
def test_offsets_beyond_int32(case, dim, device):
    """Rows, heads, tokens or matrices that start more than 2**31 elements after the first: of every input at once, on a GPU of
    the first two."""
    tails, spread = Tails(device), []
    tails.backend = eager
    case.launch(tails)

    def change(t: Tensor) -> Tensor:
        dims = t.dim() - (t.dim() < 4)  # columns of matrices are contiguous, those of a mask are not
        if packed(case, t) or dims <= dim or t.shape[dim] < 2 or (t.is_cuda and len(spread) == 2):
            return t.clone()
        spread.append(t)
        return far_apart(t, dim)

    assert_same(case.launch(tails.again(triton_kernels, change=change)), case.launch(tails.again(triton_kernels)))
    assert spread


@each_case
def test_runs_are_equal_and_inputs_are_left_alone(case, device, repeats):
    """The first launch and the others bit for bit: no atomics, no order that changes (cherimoya#50, mamba#827). What was
    saved or given is not overwritten (mamba#939)."""
    tails, used = Tails(device), []
    expected = named(case.launch(tails))
    for _ in range(repeats):
        again = tails.again(triton_kernels, change=lambda t: used.append(t.clone()) or used[-1])
        assert_equal(named(case.launch(again)), expected)
    if case.op not in IN_PLACE:
        for before, after in zip(tails.given, used, strict=False):
            assert torch.equal(after, before)


# -- flags, sizes and tiles of matmuls and activations ---------------------------------------------------------------------

each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=str)
each_matmul = pytest.mark.parametrize("launcher", MATMULS, ids=str)


def assert_like_eager(launcher, tensors: dict, activation: str, **options) -> dict[str, Tensor]:
    ours = kernel(launcher, tensors, activation, **options)
    options.pop("tile", None)
    eagers = call(launcher, eager, tensors, activation, **options)
    assert_accurate(ours, eagers, exact(launcher, tensors, activation, **options), slack=1e-6)
    if "bits" in ours:
        assert torch.equal(ours["bits"], eager.pack_bits(~(ours["z"] <= 0)))
    return ours


@each_launcher
def test_optional_arguments_and_results(launcher, device):
    """Each result has the same bits whatever else is asked for, and what is not asked for is None. No bias is one of zeros."""
    tensors = inputs_of(launcher, torch.float32, device, N=23)
    everything = kernel(launcher, tensors, "gelu")
    for wanted in (None, *launcher.wants):
        some = kernel(launcher, tensors, "gelu", **{flag: flag == wanted for flag in launcher.wants})
        assert_equal(some, {name: everything[name] for name in some})
        assert (len(some) < len(everything)) == any(flag != wanted for flag in launcher.wants)
    zeros = {name: torch.zeros_like(tensors[name]) for name in launcher.biases}
    none = dict.fromkeys(launcher.biases)
    assert_equal(kernel(launcher, tensors | none, "gelu"), kernel(launcher, tensors | zeros, "gelu"))


# One element, one exact tile, multiples of 16 bytes and not of 16 elements, and nothing at all in each direction.
SIZES = [
    {"M": 1, "K": 1, "N": 1, "D": 1}, {"M": 32, "K": 32, "N": 32, "D": 32}, {"M": 33, "K": 40, "N": 72, "D": 24},
    {"M": 33, "K": 36, "N": 44, "D": 68}, {"M": 0}, {"K": 0}, {"D": 0}, {"N": 0},
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@each_launcher
def test_sizes(launcher, sizes, device):
    """Empty batches, sizes of one, features of zero (attention-gym#260, mamba#387)."""
    assert_like_eager(launcher, inputs_of(launcher, torch.float32, device, **sizes), "gelu")


@each_matmul
def test_tiles(launcher, device):
    """9 tile rows in groups of 8 and several tile columns: every tile is computed, none twice in place of another. SUB slices
    of the epilogue write what one slice writes, bit for bit, dropout and bits included."""
    options = {"dropout": dropout_of(0.5, device)} if launcher.dropout else {}
    tensors = inputs_of(launcher, torch.bfloat16, device, M=130, K=3, N=150, D=5)
    whole = assert_like_eager(launcher, tensors, "relu", tile=Tile(16, 128, 16, 4, 1), **options)
    assert_equal(kernel(launcher, tensors, "relu", tile=Tile(16, 128, 16, 4, 1, 4), **options), whole)


@pytest.mark.parametrize("launcher", [row for row in DROPPING if "dy" in row.inputs], ids=str)
def test_what_is_dropped_has_no_gradient_whatever_dy_is(launcher, device):
    """The gradients are 0 where eager PyTorch's are, also in the rows of an infinite dy, and nowhere else."""
    tensors = inputs_of(launcher, torch.bfloat16, device)
    tensors["dy"][::2] = float("inf")
    options = {"dropout": dropout_of(0.3, device), "row_base": 16, "save_h": False}
    ours, eagers = (call(launcher, backend, tensors, "identity", **options) for backend in (triton_kernels, eager))
    for name in ours.keys() & {"dz", "dg", "du"}:
        assert torch.equal(ours[name] == 0, eagers[name] == 0), name
        assert 0.2 < (ours[name] == 0).float().mean() < 0.4


def assert_all_equal(results: Iterable[dict[str, Tensor]]) -> None:
    first, *others = results
    for other in others:
        assert_equal(other, first)


@pytest.mark.gpu
@each_matmul
def test_tiles_of_the_table_give_equal_bits(launcher):
    """Many rows of forward and few of a chunk of backward take different ones."""
    tensors = inputs_of(launcher, torch.bfloat16, "cuda", M=256, K=512, N=512, D=512)
    no_sums = {flag: False for flag in launcher.wants if flag.startswith("db")}
    table = TILES[TILE_NAMES[launcher.name], 90 if device_arch(torch.cuda.current_device()) // 10 == 9 else 80]
    tiles = [tile for row, tile in table.items() if row != "32"]
    assert_all_equal(kernel(launcher, tensors, "gelu", tile=tile, **no_sums) for tile in tiles)


@each_matmul
def test_matmuls_repeat_their_bits(launcher, device, repeats):
    """Full tiles and a long loop over K, again and again: a copy that a matmul does not wait for is seldom late."""
    sizes = {"M": 1024, "K": 2048, "N": 512, "D": 2048} if device == "cuda" else {}
    tensors = inputs_of(launcher, torch.bfloat16, device, **sizes)
    assert_all_equal(kernel(launcher, tensors, "gelu") for _ in range(1 + repeats))
