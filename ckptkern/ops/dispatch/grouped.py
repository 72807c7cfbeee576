"""The matmuls of experts by torch's grouped_mm, where its CUTLASS kernel runs; elsewhere by our kernels.

| matmul | grouped_mm | our kernels |
|---|---|---|
| tokens' rows | gathered in memory, x[order // top_k] | gathered in the load |
| between two matmuls | one elementwise pass, in place | the matmul's epilogue |
| with a bias, or added to a float32 sum | does not exist | these run |

Where its kernel does not run, grouped_mm copies the offsets to the host and multiplies one expert after another. Rows beyond
the last offset are not written: what they hold is read by elementwise passes alone, which write it to the same rows.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager

CAPABILITIES = ((9, 0), (10, 0))  # of torch's kernel
NOT_ZEROED = (10, 0)  # leaves an expert without rows what the accumulator held (pytorch#172439, cutlass#2674)
MOST_EXPERTS = 1023  # of one launch


def capability_of(x: Tensor) -> tuple[int, int]:
    """Returns the compute capability of x's GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability(x.device.index) if x.is_cuda else (0, 0)


def runs_grouped(groups: eager.Groups, *operands: Tensor) -> bool:
    """Says whether torch's kernel takes these operands, rows [R, K] or stacks [E, N, K]: bfloat16, and sizes of a matrix,
    strides and addresses of 16 bytes, as TMA wants them. It asks for no value of a tensor."""
    return (
        groups.order.numel() > 0
        and 0 < groups.offs.numel() - 1 <= MOST_EXPERTS
        and capability_of(groups.offs) in CAPABILITIES
        and all(map(_suits_tma, operands))
    )


def _suits_tma(t: Tensor) -> bool:
    if t.dim() == 3 and t.stride(2) != 1:  # rows may not: each expert's would have to be multiples of 8
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


class GroupedExperts:
    """Replaces the experts' launchers, with the same arguments and results. kernels: has the launchers of triton_kernels."""

    kernels: ModuleType

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
