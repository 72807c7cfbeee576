"""torch's attention kernels for GPUs as its source documents them, in PyTorch ops: what they take, give and leave unwritten."""

import math

import torch
from torch import Tensor

NAN = math.nan
BLOCK = 4  # rows that flash attention writes at once


def _visible(Sq: int, Sk: int, left: int, right: int, longest: int) -> Tensor:
    """Flash attention's bounds, -1 for none, counted from the last row and the last column."""
    left, right = (-1 if side >= longest else side for side in (left, right))
    if left < 0 <= right or right < 0 <= left:  # set_params_fprop
        left, right = (longest if side < 0 else side for side in (left, right))
    i, j = torch.arange(Sq)[:, None] + Sk - Sq, torch.arange(Sk)
    return torch.ones(Sq, Sk, dtype=torch.bool) if left < 0 else (j >= i - left) & (j <= i + right)


def _grouped(x: Tensor, H: int) -> Tensor:
    return x.repeat_interleave(H // x.shape[-3], -3)


def _scores(q: Tensor, k: Tensor, scale: float, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    s = q @ _grouped(k, q.shape[-3]).mT * scale
    return (s if bias is None else s + bias).masked_fill(~visible, -math.inf)


def _forward(s: Tensor, v: Tensor, unseen: float) -> tuple[Tensor, Tensor]:
    """(o, lse): 0 and `unseen` in rows that see nothing."""
    empty = (s == -math.inf).all(-1)
    p = torch.softmax(s.masked_fill(empty[..., None], 0.0), -1).masked_fill(empty[..., None], 0.0)
    return p @ _grouped(v, s.shape[-3]), torch.logsumexp(s, -1).masked_fill(empty, unseen)


def _backward(s: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, lse: Tensor, scale: float) -> tuple:
    """As the kernels do: p = exp(s - lse), from the o and lse that they are given."""
    p = torch.exp(s - lse[..., None])
    ds = p * (do @ _grouped(v, q.shape[-3]).mT - (do * o).sum(-1, keepdim=True)) * scale
    dk, dv = (g.unflatten(-3, (k.shape[-3], -1)).sum(-3) for g in (ds.mT @ q, p.mT @ do))
    return ds @ _grouped(k, q.shape[-3]), dk, dv


class Aten:
    """Stands for torch.ops.aten. Checks what the C++ checks; `calls` has the name of each call."""

    def __init__(self):
        self.calls = []

    # -- flash attention: rows [B, S, H, D], or [tokens, H, D] with boundaries

    def _sequences(self, q, k, cu_q, cu_k, max_q, max_k, causal, left, right):
        """(rows of q, rows of k, visible, how many rows of q and of k are written) of each."""
        right = 0 if causal else right
        if cu_q is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            return [(b, b, _visible(max_q, max_k, left, right, max_k), max_q, max_k) for b in range(len(q))]
        for cu in (cu_q, cu_k):
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert cu.shape == cu_q.shape != (1,)
        assert max_q > 1 or q.shape[0] == len(cu_q) - 1, "q.reshape({batch_size, ...})"
        ends, sequences = [cu.tolist() for cu in (cu_q, cu_k)], []
        for n in range(len(cu_q) - 1):
            rows, columns = (slice(bounds[n], bounds[n + 1]) for bounds in ends)
            Sq, Sk = rows.stop - rows.start, columns.stop - columns.start
            written = (min(S, -(-longest // BLOCK) * BLOCK) for S, longest in ((Sq, max_q), (Sk, max_k)))
            sequences.append((rows, columns, _visible(Sq, Sk, left, right, max_k), *written))
        return sequences

    def _flash_attention_forward(
        self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        self.calls.append("flash")
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        o = torch.full_like(q, NAN)
        lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), NAN, dtype=q.dtype)
        places = cu_q, cu_k, max_q, max_k, causal, window_size_left, window_size_right
        for rows, columns, visible, Sq, _ in self._sequences(q, k, *places):
            heads = [x.transpose(0, 1) for x in (q[rows], k[columns], v[columns])]
            outputs, sums = _forward(_scores(*heads[:2], scale, visible), heads[2], math.inf)
            o[rows][:Sq] = outputs.transpose(0, 1)[:Sq]
            (lse[rows] if cu_q is None else lse[:, rows])[:, :Sq] = sums[:, :Sq]
        return o, lse, None, None, None

    def _flash_attention_backward(
        self,
        do,
        q,
        k,
        v,
        o,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        rng,
        unused,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        self.calls.append("flash backward")
        assert rng.dtype == torch.uint64
        dq, dk, dv = (torch.full_like(x, NAN) for x in (q, k, v))
        places = cu_q, cu_k, max_q, max_k, causal, window_size_left, window_size_right
        for rows, columns, visible, Sq, Sk in self._sequences(q, k, *places):
            heads = [x.transpose(0, 1) for x in (q[rows], k[columns], v[columns], do[rows], o[rows])]
            sums = lse[rows] if cu_q is None else lse[:, rows]
            grads = _backward(_scores(*heads[:2], scale, visible), *heads, sums, scale)
            for out, place, grad, S in zip((dq, dk, dv), (rows, columns, columns), grads, (Sq, Sk, Sk), strict=True):
                out[place][:S] = grad.transpose(0, 1)[:S]
        return dq, dk, dv

    # -- the others: heads [B, H, S, D]

    def _checked_bias(self, bias, q, k, heads):
        if bias is None:
            return
        assert bias.dtype == q.dtype
        assert bias.stride(-1) == 1
        assert bias.isfinite().all()
        assert bias.shape == (q.shape[0], heads, q.shape[2], k.shape[2])

    def _seen(self, q, k, causal):
        return _visible(q.shape[2], k.shape[2], -1, 0 if causal else -1, k.shape[2])

    def _scaled_dot_product_cudnn_attention(self, q, k, v, bias, with_lse, dropout, causal, scale):
        self.calls.append("cudnn")
        self._checked_bias(bias, q, k, 1)
        o, lse = _forward(_scores(q, k, scale, self._seen(q, k, causal), bias), v, -math.inf)
        return o, lse[..., None]

    def _scaled_dot_product_cudnn_attention_backward(
        self, do, q, k, v, o, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, scale
    ):
        self.calls.append("cudnn backward")
        self._checked_bias(bias, q, k, 1)
        assert (lse.shape[-1], max_q, max_k) == (1, q.shape[2], k.shape[2])
        s = _scores(q, k, scale, self._seen(q, k, causal), bias)
        return _backward(s, q, k, v, do, o, lse[..., 0], scale)

    def _scaled_dot_product_efficient_attention(self, q, k, v, bias, with_lse, dropout, causal, scale):
        self.calls.append("efficient")
        assert q.shape[1] == k.shape[1] == v.shape[1]
        self._checked_bias(bias, q, k, q.shape[1])
        assert bias is None or all(stride % 4 == 0 for stride in bias.stride()[:-1]), (
            "attn_bias is not correctly aligned"
        )
        o, lse = _forward(_scores(q, k, scale, self._seen(q, k, causal), bias), v, 0.0)
        return o, torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf)

    def _scaled_dot_product_efficient_attention_backward(
        self, do, q, k, v, bias, o, lse, seed, offset, dropout, needs, causal, scale
    ):
        self.calls.append("efficient backward")
        assert q.shape[1] == k.shape[1]
        assert not needs[3]
        for x in (do, o):
            assert x.transpose(1, 2).is_contiguous()
        assert lse.shape[-1] % 32 == 0
        assert (lse[..., q.shape[2] :] == math.inf).all()
        s = _scores(q, k, scale, self._seen(q, k, causal), bias)
        return *_backward(s, q, k, v, do, o, lse[..., : q.shape[2]], scale), None
