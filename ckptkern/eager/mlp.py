"""MLP and gated MLP: the reference implementations of triton_kernels/mlp.py, step by step."""

from __future__ import annotations

from ..results import GatedForward, GatedGradient
from .elementwise import ACTIVATIONS, NO_DROPOUT, act, apply_dropout, column_sum
from .linear import act_grad, linear, mm


def mlp_bwd(x, w1, b1, dy, w2, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_h=True, db=False):
    return act_grad(
        dy,
        w2,
        linear(x, w1, b1),
        activation,
        precision,
        dropout=dropout,
        row_base=row_base,
        save_h=save_h,
        h_over_z=True,
        db=db,
    )


def gated_fwd(x, wg, bg, wu, bu, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_gu=False):
    g, u = linear(x, wg, bg), linear(x, wu, bu)
    h = apply_dropout(act(g, activation) * u, dropout, row_base)
    return GatedForward(h, g, u) if save_gu else GatedForward(h, None, None)


def gated_bwd(
    x,
    wg,
    bg,
    wu,
    bu,
    dy,
    wd,
    activation,
    precision,
    *,
    dropout=NO_DROPOUT,
    row_base=0,
    save_h=True,
    dbg=False,
    dbu=False,
):
    return gated_act_grad(
        dy,
        wd,
        linear(x, wg, bg),
        linear(x, wu, bu),
        activation,
        precision,
        dropout=dropout,
        row_base=row_base,
        save_h=save_h,
        dbg=dbg,
        dbu=dbu,
    )


def gated_hidden_grad(dh, g, u, activation, *, save_h=True, dbg=False, dbu=False, over=False, over_gu=False):
    """The results are new tensors here, whatever a kernel may write over."""
    return _gated_grads(dh, g, u, activation, NO_DROPOUT, 0, save_h, dbg, dbu, over=False)


def gated_act_grad(
    dy, wd, g, u, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_h=True, dbg=False, dbu=False
):
    dh = apply_dropout(mm(dy, wd), dropout, row_base)
    return _gated_grads(dh, g, u, activation, dropout, row_base, save_h, dbg, dbu, over=True)


def _gated_grads(dh, g, u, activation, dropout, row_base, save_h, dbg, dbu, *, over):
    """Forms the gradients from that, dh, of act(g) * u, dropout undone, which is overwritten if `over`."""
    a = act(g, activation)
    h = apply_dropout(a * u, dropout, row_base) if save_h else None
    du = dh * a if a is g else a.mul_(dh)
    dg = ACTIVATIONS[activation].grad_(dh.mul_(u) if over else dh * u, g)
    return GatedGradient(dg, du, h, column_sum(dg, dbg), column_sum(du, dbu))
