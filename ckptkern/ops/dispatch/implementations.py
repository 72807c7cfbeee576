"""How a matmul with an epilogue is made: where kernels run by the launchers of triton_kernels, or by what takes less time.

| implementation | z = x w^T + b and h = act(z) | backward at "full" |
|---|---|---|
| triton | one kernel | z by one kernel; dh = dy v with h and dz in its epilogue |
| persistent | the same kernel on an H100 or H200, where programs stay and load by TMA | the same, likewise |
| dual | one kernel | both matmuls in one kernel (three of a gated MLP): z is never written, the tile is half as wide |
| library | cuBLAS, then one elementwise kernel | cuBLAS twice, then elementwise kernels |

In PyTorch ops there is one, `eager`.

A kernel implementation may name other tiles than the default ones behind a colon, "triton:128x128": every kernel of the
op that has a tile of this name takes it (`VARIANTS`).

An implementation is one of the ops' static arguments, chosen in forward and saved for backward. On "triton",
"persistent" and "dual", recompute equals forward bit for bit, whatever the tiles (all add in the same order). On
"library" cuBLAS may choose another
algorithm for the rows of a chunk: the same rounding points and masks, and errors within twice eager's.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from ... import eager
from ...results import GatedForward, LinearForward

# Launchers of matmuls with an epilogue, which have tiles to choose from; of those the ones with a persistent kernel.
PERSISTENT = frozenset(("linear_fwd", "act_grad", "gated_act_grad"))
TILED = PERSISTENT | {"linear_bwd", "mlp_bwd", "gated_fwd", "gated_bwd"}


class Dual:
    """The kernels as they are, with the tiles of that variant's name where they have such."""

    def __init__(self, kernels: ModuleType, variant: str = ""):
        self.kernels, self.variant = kernels, variant

    def __getattr__(self, name: str):
        found = getattr(self.kernels, name)
        return functools.partial(found, variant=self.variant) if self.variant and name in TILED else found

    linear, mm = staticmethod(eager.linear), staticmethod(eager.mm)

    def apply_dropout(self, h: Tensor, dropout: eager.Dropout, row_base: int) -> Tensor:
        """As dropout.apply_dropout, which stands on this file."""
        return h if dropout[0] is None else self.kernels.dropout(h, *dropout, row_base=row_base)


class Separate(Dual):
    """The kernels, with one launch for each matmul."""

    def mlp_bwd(
        self, x, w1, b1, dy, w2, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_h=True, db=False
    ):
        z = self.linear_fwd(x, w1, b1, "identity", precision).h
        return self.act_grad(
            dy, w2, z, activation, precision, dropout=dropout, row_base=row_base, save_h=save_h, h_over_z=True, db=db
        )

    def gated_bwd(self, x, wg, bg, wu, bu, dy, wd, activation, precision, **wanted):
        g = self.linear_fwd(x, wg, bg, "identity", precision).h
        u = self.linear_fwd(x, wu, bu, "identity", precision).h
        return self.gated_act_grad(dy, wd, g, u, activation, precision, **wanted)


class Persistent(Separate):
    """The kernels with one launch for each matmul, persistent where TMA takes the operands (triton_kernels/persistent.py)."""

    def __getattr__(self, name: str):
        found = super().__getattr__(name)
        return functools.partial(found, persistent=True) if name in PERSISTENT else found


class Library(Separate):
    """cuBLAS's matmuls, and elementwise kernels between them."""

    def linear_fwd(
        self, x, w, b, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_z=False, save_bits=False
    ):
        if save_bits:  # no elementwise kernel packs them
            return self.kernels.linear_fwd(
                x, w, b, activation, precision, dropout=dropout, row_base=row_base, save_z=save_z, save_bits=True
            )
        z = self.linear(x, w, b)
        h = z if activation == "identity" else self.kernels.act_fwd(z, None, activation)
        return LinearForward(self.apply_dropout(h, dropout, row_base), z if save_z else None, None)

    def linear_bwd(self, x, w, b, dh, activation, precision, *, db=False):
        return self.kernels.act_bwd(dh, self.linear(x, w, b), activation, db=db)

    def act_grad(
        self, dy, w, z, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_h=False, h_over_z=False,
        db=False,
    ):  # fmt: skip
        dh = self.apply_dropout(self.mm(dy, w), dropout, row_base)
        grads = self.kernels.hidden_grad(dh, z, activation, save_h=save_h, db=db)
        del dh
        return grads._replace(h=self.apply_dropout(grads.h, dropout, row_base)) if save_h else grads

    def gated_fwd(
        self, x, wg, bg, wu, bu, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_gu=False
    ):
        g, u = self.linear(x, wg, bg), self.linear(x, wu, bu)
        h = self.apply_dropout(self.kernels.act_fwd(g, u, activation), dropout, row_base)
        return GatedForward(h, g, u) if save_gu else GatedForward(h, None, None)

    def gated_act_grad(
        self, dy, wd, g, u, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_h=True, dbg=False,
        dbu=False,
    ):  # fmt: skip
        dh = self.apply_dropout(self.mm(dy, wd), dropout, row_base)
        grads = self.kernels.gated_hidden_grad(dh, g, u, activation, save_h=save_h, dbg=dbg, dbu=dbu)
        del dh
        return grads._replace(h=self.apply_dropout(grads.h, dropout, row_base)) if save_h else grads


OF_KERNELS = {"triton": Separate, "persistent": Persistent, "dual": Dual, "library": Library}
# implementation -> compute capability whose tiles a GPU takes (`triton_kernels.tile.family_of`) -> the tiles of 16-bit
# rows that it may name. They are in triton_kernels.tile.TILES, which imports Triton.
_POINTERS = {
    90: ("128x128", "128x256", "256x128", "64x256", "128x64", "64x128"),
    80: ("128x64", "128x256", "256x128", "64x256", "128x128", "64x128"),
}
VARIANTS: dict[str, dict[int, tuple[str, ...]]] = {
    "triton": _POINTERS, "dual": _POINTERS, "persistent": {90: ("128x128", "256x128", "128x256")},
}  # fmt: skip


def with_tiles(impl: str, family: int) -> tuple[str, ...]:
    """The names of an implementation with other tiles than the default ones."""
    return tuple(f"{impl}:{tiles}" for tiles in VARIANTS.get(impl, {}).get(family, ()))


_TILES = dict.fromkeys(name for impl in VARIANTS for family in VARIANTS[impl] for name in with_tiles(impl, family))
IMPLS = (*OF_KERNELS, *_TILES, "eager")


def of_kernels(name: str, kernels: ModuleType) -> Dual:
    """What runs by the implementation of that name."""
    impl, _, variant = name.partition(":")
    return OF_KERNELS[impl](kernels, variant)


def candidates(backend: str, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[str, ...]:
    """The implementations that such a call may take, those with default tiles first. "persistent" wants TMA and rows of
    16 bits; these have other tiles."""
    if backend == "eager":
        return ("eager",)
    hopper, narrow = capability == (9, 0), dtype.itemsize == 2
    impls = tuple(impl for impl in OF_KERNELS if impl != "persistent" or (hopper and narrow))
    return impls + tuple(name for impl in impls if narrow for name in with_tiles(impl, 90 if hopper else 80))


SIZES = (256, 512, 1024, 2048, 4096, 2**62)  # classes of an op's widest input or output, in features

# (op, compute capability, bytes of an element) -> an implementation for each size. 16-bit rows are from a model of the
# GPUs, not from a measurement: python -m benchmarks.model, whose figures are in benchmarks/NOTES.md. Of a GPU without a
# row nothing is known but that cuBLAS is tuned for it. "persistent" has no row: the model sees 1 to 2 % in it, less
# than its own error. Other tiles than the default ones have one where it sees more than 3 % in them, with its blind
# spots guessed at, too (NOTES.md).
WIDE_BY_LIBRARY = ("triton",) * 4 + ("library",) * 2
NARROW_DUAL = ("dual",) * 3 + ("triton",) * 3
DEFAULT: dict[tuple[str, tuple[int, int], int], tuple[str, ...]] = {
    ("mlp", (9, 0), 2): WIDE_BY_LIBRARY,
    ("mlp", (9, 0), 4): NARROW_DUAL,
    ("mlp", (8, 0), 2): ("dual",) * 2 + ("triton",) * 4,
    ("mlp", (8, 0), 4): NARROW_DUAL,
    ("gated_mlp", (9, 0), 2): WIDE_BY_LIBRARY,
    ("gated_mlp", (9, 0), 4): NARROW_DUAL,
    ("gated_mlp", (8, 0), 2): ("triton",) * 2 + ("triton:128x128",) * 2 + ("library",) * 2,
    ("gated_mlp", (8, 0), 4): NARROW_DUAL,
} | {("linear_act", capability, size): ("triton",) * 6 for capability in ((9, 0), (8, 0)) for size in (2, 4)}
# The same of few rows of 16 bits (`few_rows`): the model's best, where it is 3 % below the implementation for many rows
# (NOTES.md).
DUAL_UP_TO_512 = ("dual",) * 2
DEFAULT_FEW: dict[tuple[str, tuple[int, int]], tuple[str, ...]] = {
    ("linear_act", (9, 0)): ("triton", "library", "library", "library", "triton", "library"),
    ("mlp", (9, 0)): (*DUAL_UP_TO_512, "triton", "triton", "library", "library"),
    ("gated_mlp", (9, 0)): (*DUAL_UP_TO_512, "triton", "triton", "library", "library"),
    ("linear_act", (8, 0)): ("triton", "library", "library", "library", "library", "triton"),
    ("mlp", (8, 0)): (*DUAL_UP_TO_512, "library", "library", "library", "triton"),
    ("gated_mlp", (8, 0)): (*DUAL_UP_TO_512, "library", "library", "library", "library"),
}
UNKNOWN_GPU = ("library",) * len(SIZES)


def size_class(features: int) -> int:
    """The place in SIZES; a number, even if torch.compile has a symbol for `features`."""
    for place, most in enumerate(SIZES):
        if features <= most:
            return place
    raise ValueError(f"wanted at most {SIZES[-1]} features, but got {features}")


def size_text(place: int, few: bool = False) -> str:
    """That place in words."""
    text = f"up to {SIZES[place]} features" if SIZES[place] < 2**62 else f"more than {SIZES[place - 1]} features"
    return f"{text}, few rows" if few else text


def few_rows(capability: tuple[int, int], itemsize: int, size: int) -> int:
    """The most rows that are few in this class of sizes: with which its narrowest layer has the tiles of few rows. 0 where the
    table of tiles has none, for float32. Imports Triton."""
    from ...triton_kernels import tile

    if itemsize != 2:
        return 0
    family = tile.family_of(10 * capability[0] + capability[1])
    return tile.few_rows(tile.TILES["linear", family]["16"], family, (0, *SIZES)[size] + 1)


def default_impl(op: str, capability: tuple[int, int], itemsize: int, size: int, few: bool = False) -> str:
    many = DEFAULT.get((op, capability, itemsize), UNKNOWN_GPU)
    return (DEFAULT_FEW.get((op, capability), many) if few and itemsize == 2 else many)[size]
