"""The eager backend with the launchers that ops call of kernels alone, as their reference implementations: gradients of a core
from lse and delta, the hidden layer of experts, and narrow chains of Linear + activation layer by layer.

Weights of chains come packed and zero-padded to [L, width, width]: act(0) = 0, so padding stays zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ckptkern import eager
from ckptkern.eager import AttentionCore, act_bwd, act_grad, linear_fwd, mm, relu_bits
from ckptkern.eager.attention import _scores_bwd
from ckptkern.eager.attention_core import each_sequence, is_packed


def __getattr__(name: str):
    return getattr(eager, name)


def attn_bwd(q, k, v, do, lse, delta, core: AttentionCore, *, need_dq=True, need_dkv=True, dq=None, dk=None, dv=None):
    """(dq, dk, dv), written into the given tensors or into new ones."""
    if not is_packed(q, core):
        return _scores_bwd(q, k, v, do, delta, core, need_dq, need_dkv, None, False, (dq, dk, dv))[:3]
    needs = {"need_dq": need_dq, "need_dkv": need_dkv}
    grads = each_sequence(
        lambda q, do, lse, delta, k, v, own: attn_bwd(q, k, v, do, lse, delta, own, **needs),
        core,
        (q, do, lse, delta),
        (k, v),
        key_results=2,
    )
    outs = zip(grads, (dq, dk, dv), strict=True)
    return tuple(value if value is None or out is None else out.copy_(value) for value, out in outs)


def attn_dmask(q, k, v, do, lse, delta, core: AttentionCore, shape):
    """The gradient [B or 1, H or 1, Sq or 1, Sk or 1] of what was added to the scores, in float32 (float64 for float64).

    shape: its own; dimensions of 1 are summed over. core.mask may be larger: that of a sum of several masks.
    """
    return _scores_bwd(q, k, v, do, delta, core, False, False, shape, False, (None,) * 3)[3]


def experts_hidden_grad(gu, dh, s, groups, activation, *, hs=True, dgu=True, ds=True, over_gu=False):
    """The results are new tensors here, whatever a kernel may write over."""
    (g, u), wide, function = gu.chunk(2, 1), eager.wide_of(dh.dtype), eager.ACTIVATIONS[activation]
    is_nobodys = torch.arange(len(gu), device=gu.device) >= groups.offs[-1]
    g, u, dh = (tensor.masked_fill(is_nobodys[:, None], 0) for tensor in (g, u, dh))
    a, weights = function.act(g), s.reshape(-1)[groups.order].to(wide)[:, None]
    h, d = a * u, (dh.to(wide) * weights).to(dh.dtype)
    of_rows = (dh.to(wide) * h.to(wide)).sum(1)
    of_pairs = torch.where(groups.inv < groups.offs[-1], of_rows[groups.inv], 0).view(s.shape)
    weighted = (h.to(wide) * weights).to(h.dtype).masked_fill(is_nobodys[:, None], 0)
    grads = torch.cat((function.grad(d * u, g), d * a), 1)
    return weighted if hs else None, grads if dgu else None, of_pairs if ds else None


def stack_width(x: Tensor, widths: list[int]) -> int | None:
    """The width that a chain of these feature counts is padded to: here simply the widest, as each layer runs alone."""
    return max(widths)


def pack_stack(weights, biases, width: int, dtype: torch.dtype):
    """Weights [n_l, k_l] and biases [n_l] or None -> zero-padded [L, width, width] and [L, width] (or None) in `dtype`."""
    packed = [F.pad(w.to(dtype), (0, width - w.shape[1], 0, width - w.shape[0])) for w in weights]
    packed_b = [F.pad(b.to(dtype), (0, width - b.shape[0])) for b in biases or ()]
    return torch.stack(packed), torch.stack(packed_b) if packed_b else None


def _forward(x, packed_w, packed_b, activation: str, precision: str):
    """Every layer's input [M, width], y among them as the last, and every z."""
    inputs, zs = [F.pad(x, (0, packed_w.shape[2] - x.shape[1]))], []
    for w, b in zip(packed_w, [None] * len(packed_w) if packed_b is None else packed_b, strict=True):
        h, z, _ = linear_fwd(inputs[-1], w, b, activation, precision, save_z=True)
        inputs.append(h)
        zs.append(z)
    return inputs, zs


def stack_fwd(x, packed_w, packed_b, out_features: int, activation: str, precision: str, *, save_bits=False):
    """x [M, K] through the packed layers -> (y [M, out_features], relu's bits of the last layer or None)."""
    inputs, zs = _forward(x, packed_w, packed_b, activation, precision)
    y = inputs[-1][:, :out_features].contiguous()
    return y, relu_bits(zs[-1][:, :out_features]) if save_bits else None


def stack_bwd(x, packed_w, packed_b, dy, bits, activation: str, precision: str, *, dx=True):
    """(dx [M, K] or None, dw [L, width, width] and db [L, width] or None, in float32). bits: relu's, from stack_fwd."""
    inputs, zs = _forward(x, packed_w, packed_b, activation, precision)
    N, width, sums = dy.shape[1], packed_w.shape[1], torch.promote_types(x.dtype, torch.float32)
    dz, db = act_bwd(dy, zs[-1][:, :N] if bits is None else bits, activation, bits=bits is not None, db=True)
    dz, db = F.pad(dz, (0, width - N)), F.pad(db, (0, width - N))
    dws, dbs = [], []
    for i in reversed(range(len(packed_w))):
        dws.append(dz.t().to(sums) @ inputs[i].to(sums))
        dbs.append(db.to(sums))
        if i:
            dz, _, db = act_grad(dz, packed_w[i], zs[i - 1], activation, precision, db=True)
    dx_out = mm(dz, packed_w[0])[:, : x.shape[1]].contiguous() if dx else None
    return dx_out, torch.stack(dws[::-1]), None if packed_b is None else torch.stack(dbs[::-1])
