"""MLP and gated MLP: the reference implementations of triton_kernels/mlp.py, step by step."""

from ..results import GatedForward, GatedGradient
from .elementwise import ACTIVATIONS, NO_DROPOUT, act, column_sum
from .linear import Eager, LinearSteps


def gated_hidden_grad(dh, g, u, activation, *, save_h=True, dbg=False, dbu=False, over=False, over_gu=False):
    """Computes the gradients of g and u, and h; g and u are not overwritten here."""
    a = act(g, activation)
    h = a * u if save_h else None
    du = dh * a if a is g else a.mul_(dh)
    dg = ACTIVATIONS[activation].grad_(dh.mul_(u) if over else dh * u, g)
    return GatedGradient(dg, du, h, column_sum(dg, dbg), column_sum(du, dbu))


class Steps(LinearSteps):
    """LinearSteps with the launchers of MLPs."""

    def mlp_bwd(
        self, x, w1, b1, dy, w2, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_h=True, db=False
    ):
        recompute = self.relu if self.recomputes_relu and activation == "relu" else self.linear
        saved, wanted = (recompute(x, w1, b1), activation), dict(save_h=save_h, h_over_z=True, db=db)
        return self.hidden_grads(self.hidden_grad, dy, w2, saved, dropout, row_base, **wanted)

    def gated_fwd(self, x, wg, bg, wu, bu, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_gu=False):
        g, u = self.linear(x, wg, bg), self.linear(x, wu, bu)
        h = self.apply_dropout(self.act_fwd(g, u, activation), dropout, row_base)
        return GatedForward(h, g, u) if save_gu else GatedForward(h, None, None)

    def gated_bwd(
        self,
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
        saved = self.linear(x, wg, bg), self.linear(x, wu, bu), activation
        wanted = dict(save_h=save_h, dbg=dbg, dbu=dbu, over_gu=True)
        return self.hidden_grads(self.gated_hidden_grad, dy, wd, saved, dropout, row_base, **wanted)

    def gated_act_grad(
        self, dy, wd, g, u, activation, precision, *, dropout=NO_DROPOUT, row_base=0, save_h=True, dbg=False, dbu=False
    ):
        wanted = dict(save_h=save_h, dbg=dbg, dbu=dbu)
        return self.hidden_grads(self.gated_hidden_grad, dy, wd, (g, u, activation), dropout, row_base, **wanted)


class _Eager(Steps, Eager):
    gated_hidden_grad = staticmethod(gated_hidden_grad)


_steps = _Eager()
mlp_bwd, gated_fwd = _steps.mlp_bwd, _steps.gated_fwd
gated_bwd, gated_act_grad = _steps.gated_bwd, _steps.gated_act_grad
