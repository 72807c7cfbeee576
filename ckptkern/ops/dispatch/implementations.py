"""Implementations of matmuls with an epilogue, where kernels run: the launchers of triton_kernels, or a library.

| implementation | z = x w^T + b and h = act(z) | backward at "full" |
|---|---|---|
| triton | one kernel | both matmuls in one kernel (three of a gated MLP), with h and dz in its epilogue: z is never written |
| library | cuBLAS, then one elementwise kernel | cuBLAS twice, then elementwise kernels |

PyTorch ops have one implementation, `eager`. `default_impl` returns the implementation where nothing was tuned.

The implementation is an option of the op, chosen in forward and saved for backward. On "triton" recompute equals forward bit
for bit, whatever the tiles (all add in the same order). On "library" the recompute runs the matmuls of forward, of the same
shapes, for which cuBLAS chooses alike; with another number of rows in a chunk it may not.

The matmuls of experts on "library" run torch's grouped_mm where its CUTLASS kernel runs, and our kernels elsewhere.

| matmul | grouped_mm | our kernels |
|---|---|---|
| tokens' rows | gathered in memory, x[order // top_k] | gathered in the load |
| between two matmuls | one elementwise pass, in place | the matmul's epilogue |
| with a bias, or added to a float32 sum | does not exist | these run |

Where its kernel does not run, grouped_mm copies the offsets to the host and multiplies one expert after another. It does not
write rows beyond the last offset. Only elementwise passes read them, and they write what they read to the same rows.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ...eager.mlp import Steps

CAPABILITIES = ((9, 0), (10, 0))  # that torch's kernel runs on
NOT_ZEROED = (10, 0)  # torch's kernel leaves garbage in dw of experts without rows (pytorch#172439, cutlass#2674)
MOST_EXPERTS = 1023  # per launch


def capability_of(x: Tensor) -> tuple[int, int]:
    """Returns the compute capability of x's GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability(x.device.index) if x.is_cuda else (0, 0)


def runs_grouped(groups: eager.Groups, *operands: Tensor) -> bool:
    """Returns whether torch's kernel takes these operands, rows [R, K] or stacks [E, N, K]: bfloat16, and matrix sizes, strides
    and addresses in multiples of 16 bytes, as TMA needs. Reads no tensor's values."""
    return (
        groups.order.numel() > 0
        and 0 < groups.offs.numel() - 1 <= MOST_EXPERTS
        and capability_of(groups.offs) in CAPABILITIES
        and all(map(_suits_tma, operands))
    )


def _suits_tma(t: Tensor) -> bool:
    if t.dim() == 3 and t.stride(2) != 1:  # not for rows: each expert's number would have to be a multiple of 8
        t = t.mT
    return (
        t.dtype == torch.bfloat16
        and t.stride(-1) == 1
        and t.stride(-2) >= t.shape[-1] > 0
        and not any(n % 8 for n in (*t.shape[1:], *t.stride()[:-1]))
        and t.data_ptr() % 16 == 0
    )


def _grouped_mm(a: Tensor, b: Tensor, groups: eager.Groups) -> Tensor:
    return F.grouped_mm(a, b, offs=groups.offs[1:].contiguous())


class Kernels:
    """The implementation "triton": the kernels as they are, and cuBLAS for matmuls without an epilogue."""

    def __init__(self, kernels: ModuleType):
        self.kernels = kernels

    def __getattr__(self, name: str):
        return getattr(self.kernels, name)

    linear, mm = staticmethod(eager.linear), staticmethod(eager.mm)

    def apply_dropout(self, h: Tensor, dropout: eager.Dropout, row_base: int) -> Tensor:
        """Returns dropout(h), or h itself without a state."""
        return h if dropout[0] is None else self.kernels.dropout(h, *dropout, row_base=row_base)


class Library(Kernels, Steps):
    """The implementation "library": cuBLAS's matmuls and grouped_mm, and elementwise kernels between them."""

    recomputes_relu = True  # by forward's matmul with relu: relu's result holds the mask

    def relu(self, x, w, b):
        """Returns relu(z), with a bias by cuBLASLt's epilogue. Rounding changes no sign, so its bits are those of a rounded z.
        The epilogue of tanh-GELU would not round z, so forward and recompute would differ."""
        if b is not None and x.is_cuda and x.shape[1]:  # without features ATen returns b without relu
            return torch._addmm_activation(b, x, w.t())
        return super().relu(x, w, b)

    def experts_fwd(self, x, w, b, groups, activation, precision, *, save_gu=False):
        if b is not None or not runs_grouped(groups, w):
            return self.kernels.experts_fwd(x, w, b, groups, activation, precision, save_gu=save_gu)
        gu = _grouped_mm(eager.gather_rows(x, groups), w.mT, groups)
        h = self.kernels.act_fwd(*gu.chunk(2, 1), activation)
        return h, gu if save_gu else None

    def experts_gemm(self, a, w, b, groups, precision, *, transposed):
        if b is not None or not runs_grouped(groups, a, w):
            return self.kernels.experts_gemm(a, w, b, groups, precision, transposed=transposed)
        return _grouped_mm(a, w.mT if transposed else w, groups)

    def experts_bwd(self, x, w, b, dy, wd, s, groups, activation, precision, **wanted):
        if b is not None or not runs_grouped(groups, w, wd):
            return self.kernels.experts_bwd(x, w, b, dy, wd, s, groups, activation, precision, **wanted)
        gu = _grouped_mm(eager.gather_rows(x, groups), w.mT, groups)
        dh = _grouped_mm(eager.gather_rows(dy, groups), wd, groups)
        return self.kernels.experts_hidden_grad(gu, dh, s, groups, activation, **wanted, over_gu=True)

    def experts_act_grad(self, gu, dy, wd, s, groups, activation, precision, *, added=None, **wanted):
        if not runs_grouped(groups, wd):
            return self.kernels.experts_act_grad(gu, dy, wd, s, groups, activation, precision, added=added, **wanted)
        dh = _grouped_mm(eager.gather_rows(dy, groups), wd, groups)
        dh = dh if added is None else dh.add_(added)
        return self.kernels.experts_hidden_grad(gu, dh, s, groups, activation, **wanted)

    def experts_dw(self, a, b, groups, precision, out, *, gathered):
        tokens, rows = (a, b) if gathered == "a" else (b, a)
        if out is not rows.dtype or tokens.shape[1] % 8 or not runs_grouped(groups, rows):
            return self.kernels.experts_dw(a, b, groups, precision, out, gathered=gathered)
        tokens = eager.gather_rows(tokens, groups)
        a, b = (tokens, rows) if gathered == "a" else (rows, tokens)
        dw = _grouped_mm(a.mT, b, groups)
        if capability_of(a) == NOT_ZEROED:
            dw.masked_fill_((groups.offs[1:] == groups.offs[:-1])[:, None, None], 0)
        return dw


OF_KERNELS = {"triton": Kernels, "library": Library}
IMPLS = (*OF_KERNELS, "eager")


SIZES = (256, 512, 1024, 2048, 4096, 2**62)  # classes of an op's widest input or output, in features


def size_class(features: int) -> int:
    """Returns the class of SIZES; an int, even if torch.compile has a symbol for `features`."""
    for most in SIZES:
        if features <= most:
            return most
    raise ValueError(f"features must be at most {SIZES[-1]}, not {features}")


def size_text(size: int) -> str:
    """Describes a class of SIZES in words."""
    return f"up to {size} features" if size < SIZES[-1] else f"more than {SIZES[-2]} features"


# Implementations that took less time than libraries in runs under benchmarks/results, in 16 bits: (op, compute capability) ->
# (implementation, most features). On an H200 experts by kernels took 0.56 and 0.64 of grouped_mm's time at "none", of 1,024 and
# 2,048 features (0.62 and 0.81 at "full"). MLPs by kernels took 1.25 of eager's at "full", of 1,024 features, where
# torch.utils.checkpoint took 1.20: they are not here.
MEASURED = {("moe_mlp", (9, 0)): ("triton", 2048)}


def default_impl(op: str, capability: tuple[int, int], dtype: torch.dtype, size: int) -> str:
    """Returns the implementation where nothing was tuned: kernels where these were measured to take less time, else libraries,
    which are tuned for every GPU, dtype and size, so that a step takes no more matmul time than eager's and its recompute. On
    "library", chains of narrow layers, and experts where grouped_mm has no fast path (`runs_grouped`), still run our kernels.
    """
    impl, features = MEASURED.get((op, capability), ("library", 0))
    return impl if size <= features and dtype.itemsize == 2 else "library"
