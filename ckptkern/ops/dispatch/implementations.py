"""How a matmul with an epilogue is made where kernels run: by the launchers of triton_kernels, or by what takes less time.

| implementation | z = x w^T + b and h = act(z) | backward at "full" |
|---|---|---|
| triton | one kernel | both matmuls in one kernel (three of a gated MLP), with h and dz in its epilogue: z is never written |
| library | cuBLAS, then one elementwise kernel | cuBLAS twice, then elementwise kernels |

In PyTorch ops there is one, `eager`. `default_impl` says which of them runs where nothing was tuned.

An implementation is one of the ops' static arguments, chosen in forward and saved for backward. On "triton" recompute equals
forward bit for bit, whatever the tiles (all add in the same order). On "library" the recompute runs the matmuls of forward, of
the same shapes, for which cuBLAS chooses alike; with another number of rows in a chunk it may not.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ... import eager
from ...results import GatedForward, LinearForward
from .grouped import GroupedExperts


class Kernels:
    """Gives the kernels as they are, and the matmuls without an epilogue, which are cuBLAS's."""

    def __init__(self, kernels: ModuleType):
        self.kernels = kernels

    def __getattr__(self, name: str):
        return getattr(self.kernels, name)

    linear, mm = staticmethod(eager.linear), staticmethod(eager.mm)

    def apply_dropout(self, h: Tensor, dropout: eager.Dropout, row_base: int) -> Tensor:
        """Does as dropout.apply_dropout, which stands on this file."""
        return h if dropout[0] is None else self.kernels.dropout(h, *dropout, row_base=row_base)


class Library(GroupedExperts, Kernels):
    """Runs cuBLAS's matmuls, and elementwise kernels between them."""

    def linear_fwd(
        self, x, w, b, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_z=False, save_bits=False
    ):
        if activation == "relu" and not save_z:
            z, h = None, self.relu(x, w, b)
        else:
            z = self.linear(x, w, b)
            h = z if activation == "identity" else self.kernels.act_fwd(z, None, activation)
        bits = self.kernels.relu_bits(h) if save_bits else None
        return LinearForward(self.apply_dropout(h, dropout, row_base), z if save_z else None, bits)

    def relu(self, x, w, b):
        """Returns relu(z), with a bias by cuBLASLt's epilogue. Rounding changes no sign, so its bits are those of a rounded
        z. That of tanh-GELU would not round z, which a recompute needs: forward and recompute would differ."""
        if b is not None and x.is_cuda and x.shape[1]:  # without features ATen gives b as it is
            return torch._addmm_activation(b, x, w.t())
        return self.kernels.act_fwd(self.linear(x, w, b), None, "relu")

    def recomputed(self, x, w, b, activation):
        """Returns z, or relu's own result by the matmul that forward ran: it tells what z would."""
        return self.relu(x, w, b) if activation == "relu" else self.linear(x, w, b)

    def mlp_bwd(self, x, w1, b1, dy, w2, activation, precision, *, save_h=True, **wanted):
        z = self.recomputed(x, w1, b1, activation)
        return self.act_grad(dy, w2, z, activation, precision, save_h=save_h, h_over_z=True, **wanted)

    def gated_bwd(self, x, wg, bg, wu, bu, dy, wd, activation, precision, **wanted):
        g, u = self.linear(x, wg, bg), self.linear(x, wu, bu)
        return self.gated_act_grad(dy, wd, g, u, activation, precision, **wanted, over_gu=True)

    def linear_bwd(self, x, w, b, dh, activation, precision, *, db=False):
        return self.kernels.act_bwd(dh, self.recomputed(x, w, b, activation), activation, db=db)

    def act_grad(self, dy, w, z, activation, precision, *, save_h=False, **wanted):
        return self.hidden_grads(self.kernels.hidden_grad, dy, w, (z, activation), save_h, **wanted)

    def gated_act_grad(self, dy, wd, g, u, activation, precision, *, save_h=True, **wanted):
        """Takes over_gu, too: dg and du may be written over g and u."""
        return self.hidden_grads(self.kernels.gated_hidden_grad, dy, wd, (g, u, activation), save_h, **wanted)

    def hidden_grads(self, launcher, dy, w, saved, save_h, *, dropout=eager.NO_DROPOUT, row_base=0, **wanted):
        """Returns what the elementwise kernel gives of dh = dropout(dy w), with h behind the dropout."""
        dh = self.apply_dropout(self.mm(dy, w), dropout, row_base)
        grads = launcher(dh, *saved, save_h=save_h, over=True, **wanted)
        del dh
        return grads._replace(h=self.apply_dropout(grads.h, dropout, row_base)) if save_h else grads

    def gated_fwd(
        self, x, wg, bg, wu, bu, activation, precision, *, dropout=eager.NO_DROPOUT, row_base=0, save_gu=False
    ):
        g, u = self.linear(x, wg, bg), self.linear(x, wu, bu)
        h = self.apply_dropout(self.kernels.act_fwd(g, u, activation), dropout, row_base)
        return GatedForward(h, g, u) if save_gu else GatedForward(h, None, None)


OF_KERNELS = {"triton": Kernels, "library": Library}
IMPLS = (*OF_KERNELS, "eager")


SIZES = (256, 512, 1024, 2048, 4096, 2**62)  # classes of an op's widest input or output, in features


def size_class(features: int) -> int:
    """Returns the class of SIZES; a number, even if torch.compile has a symbol for `features`."""
    for most in SIZES:
        if features <= most:
            return most
    raise ValueError(f"wanted at most {SIZES[-1]} features, but got {features}")


def size_text(size: int) -> str:
    """Returns a class in words."""
    return f"up to {size} features" if size < SIZES[-1] else f"more than {SIZES[-2]} features"


# What took less time than libraries in runs under benchmarks/results: (op, compute capability) -> (implementation, up to how
# many features), in 16 bits. On an H200 experts by kernels took 0.56 and 0.64 of grouped_mm's time at "none", of 1,024 and
# 2,048 features (0.62 and 0.81 at "full"). MLPs by kernels took 1.25 of eager's at "full", of 1,024 features, where
# torch.utils.checkpoint took 1.20: they are not here.
MEASURED = {("moe_mlp", (9, 0)): ("triton", 2048)}


def default_impl(op: str, capability: tuple[int, int], dtype: torch.dtype, size: int) -> str:
    """Returns the implementation where nothing was tuned: what was measured to take less time there, else libraries, which
    their makers tune for every GPU, dtype and size, so that a step takes no more matmul time than eager's and its recompute.
    What libraries have no route for takes the kernels: chains of narrow layers, and experts where grouped_mm has no fast
    path (`grouped`)."""
    impl, features = MEASURED.get((op, capability), ("library", 0))
    return impl if size <= features and dtype.itemsize == 2 else "library"
