"""Attention by torch's own GPU kernels: cuDNN, flash and memory-efficient attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_core import AttentionCore, as_readable, empty_heads, heads_layout, repeated_heads, summed_by_group

_aten = torch.ops.aten


# Below LOWEST_LSE float32 numbers are more than 1 apart: such an lse has lost log(sum), so backward cannot compute
# probabilities from it, and these rows get no gradient (as in the kernels). ABSENT makes exp(s - lse) 0.
LOWEST_LSE, ABSENT = -(2.0**24), 2.0**100
BIAS_ROW = 16  # a bias's rows are padded in memory to a multiple of this, as torch does for the memory-efficient kernel


def _as_tokens(x: Tensor) -> Tensor:
    """Returns x [B, H, S, D] with a token's heads adjacent in memory, as projections return them."""
    return x if x.stride(2) >= x.stride(1) else empty_heads(x).copy_(x)


def _is_causal(core: AttentionCore) -> bool:
    return core.window == (None, 0)


def _filled_bias(q: Tensor, k: Tensor, core: AttentionCore, heads: int = 0) -> Tensor | None:
    """Returns the mask as a bias [B, heads, Sq, Sk] in q's dtype, expanded; heads 0: as many as the mask has. Hidden columns
    get a finite number: torch, too, avoids -inf in cuDNN, and a row of -inf has no softmax."""
    mask = core.mask
    if mask is None:
        return None
    (B, _, Sq, _), Sk, lowest = q.shape, k.shape[2], max(torch.finfo(q.dtype).min, -(2.0**126))
    bias = q.new_empty((*mask.shape[:3], -(-Sk // BIAS_ROW) * BIAS_ROW))[..., :Sk]
    if mask.dtype == torch.int8:
        bias.zero_().masked_fill_(mask == 0, lowest)
    else:
        bias.copy_(mask).clamp_(min=lowest)
    return bias.expand(B, heads or mask.shape[1], Sq, Sk)


def _without_hidden_rows(o: Tensor, lse: Tensor, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """Fills rows that the mask hides entirely with o = 0 and lse = -inf, in place: one pass over o."""
    if core.mask is not None:
        seen = core.mask != 0 if core.mask.dtype == torch.int8 else core.mask > -math.inf
        hidden = ~seen.any(-1, keepdim=True)
        o.masked_fill_(hidden, 0.0)
        lse.masked_fill_(hidden[..., 0], -math.inf)
    return o, lse


def _of_rows_with_gradients(lse: Tensor, core: AttentionCore) -> Tensor:
    """Returns lse with ABSENT in rows that get no gradient: the mask hides them entirely, by -inf or a large finite number."""
    return lse if core.mask is None else torch.where(lse < LOWEST_LSE, ABSENT, lse)


def _cudnn_fwd(q, k, v, core):
    q, k, v = map(_as_tokens, (q, k, v))
    bias = _filled_bias(q, k, core)
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, _is_causal(core), scale=core.scale)
    return _without_hidden_rows(o, lse.squeeze(-1), core)


def _cudnn_bwd(do, q, k, v, o, lse, core):
    """Computes dq, dk and dv with do and o always in the layout of torch's own calls: torch caches cuDNN's graphs by the
    layouts of q, k, v and the bias only, and a cached graph reads do and o in the layout of its first call."""
    q, k, v, o, do = *map(_as_tokens, (q, k, v)), heads_layout(o), heads_layout(do)
    bias = _filled_bias(q, k, core)
    no_dropout = lse.new_empty((), dtype=torch.int64)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        do,
        q,
        k,
        v,
        o,
        _of_rows_with_gradients(lse, core).unsqueeze(-1),
        no_dropout,
        no_dropout,
        bias,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        _is_causal(core),
        scale=core.scale,
    )


def _sequences(cu: Tensor, longest: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns each sequence's begin and end, int32 [2 N], at most `longest` rows apart, and a mask of rows in no sequence."""
    boundaries = torch.stack((cu[:-1], torch.minimum(cu[1:], cu[:-1] + longest)), 1).flatten()
    row = torch.arange(rows, dtype=cu.dtype, device=cu.device)
    # outside: as many sequences have ended as have begun
    return boundaries, torch.searchsorted(boundaries, row, right=True, out_int32=True) % 2 == 0


def _for_flash(
    q: Tensor, k: Tensor, core: AttentionCore
) -> tuple[tuple[Tensor | None, Tensor | None], tuple, dict[str, float]]:
    """Returns masks of the rows of q and of k in no sequence (None if not packed), the arguments cu_q .. max_k, and the keyword
    arguments, without reading the device. Flash attention aligns bottom-right, as packed cores do; other cores with a window
    have Sq = Sk.

    Flash attention takes boundaries of adjacent sequences and sees all of each. If sequences may be longer than max_q or max_k,
    their remaining rows become N - 1 further sequences, whose results are dropped. That costs 7 small launches (14 if cu_k
    differs) and, in backward, 128 float32 rows of dq for each of these sequences.
    """
    outside, T_q, T_k = (None, None), q.shape[2], k.shape[2]
    places = None, None, T_q, T_k
    if core.cu_q is not None:
        max_q, max_k = min(core.max_q, T_q), min(core.max_k, T_k)
        of_q = of_k = _sequences(core.cu_q, max_q, T_q)
        if core.cu_k is not core.cu_q or (max_k, T_k) != (max_q, T_q):
            of_k = _sequences(core.cu_k, max_k, T_k)
        whole = (max_q, max_k) == (T_q, T_k)
        cu_q, cu_k = (core.cu_q.contiguous(), core.cu_k.contiguous()) if whole else (of_q[0], of_k[0])
        max_q = max(max_q, 2)  # 1 means decoding: the kernel then takes every token for a sequence
        # the kernel ignores window bounds >= max_k, which is right only for max_q <= max_k
        outside, places = (of_q[1], of_k[1]), (cu_q, cu_k, max_q, max(max_k, max_q))
    left, right = (-1 if side is None or _is_causal(core) else min(side, max(places[2:])) for side in core.window)
    return outside, places, {"scale": core.scale, "window_size_left": left, "window_size_right": right}


def _as_rows(x: Tensor, outside: Tensor | None) -> Tensor:
    """Transposes [B, H, S, D] to [B, S, H, D], or to [tokens, H, D] for packed sequences."""
    return x.transpose(1, 2) if outside is None else x[0].transpose(0, 1)


def _as_heads(x: Tensor, outside: Tensor | None) -> Tensor:
    """Undoes `_as_rows` in place, since `as_heads` would copy a view. Rows in no sequence, which flash attention does not
    write, become zeros: one pass over x, 0.1 ms for 16,384 tokens of 32 heads of 128 at 3 TB/s."""
    if outside is not None:
        x.masked_fill_(outside[:, None, None], 0).unsqueeze_(0)
    return x.transpose_(1, 2)


def _flash_fwd(q, k, v, core):
    (outside, _), places, options = _for_flash(q, k, core)
    rows = (_as_rows(x, outside) for x in (q, k, v))
    o, lse, *_ = _aten._flash_attention_forward(*rows, *places, 0.0, _is_causal(core), False, **options)
    return _as_heads(o, outside), lse if outside is None else lse.masked_fill_(outside, 0.0).unsqueeze_(0)


def _flash_bwd(do, q, k, v, o, lse, core):
    (outside, of_keys), places, options = _for_flash(q, k, core)
    rows = (_as_rows(x, outside) for x in (do, q, k, v, o))
    no_dropout = lse.new_empty(2, dtype=torch.uint64)
    grads = _aten._flash_attention_backward(
        *rows, lse if outside is None else lse[0], *places, 0.0, _is_causal(core), no_dropout, no_dropout, **options
    )
    return tuple(map(_as_heads, grads, (outside, of_keys, of_keys)))


LSE_ROWS = 32  # the memory-efficient kernel pads lse with inf to a multiple of this


def _efficient_fwd(q, k, v, core):
    bias = _filled_bias(q, k, core, q.shape[1])
    o, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, _is_causal(core), scale=core.scale
    )
    return _without_hidden_rows(o, lse[..., : q.shape[2]].contiguous(), core)


def _efficient_bwd(do, q, k, v, o, lse, core):
    """Computes dq, dk and dv with o and do in memory as [B, S, H, D], the layout that the kernel assumes."""
    bias = _filled_bias(q, k, core, q.shape[1])
    lse, missing = _of_rows_with_gradients(lse, core), -q.shape[2] % LSE_ROWS
    lse = F.pad(lse, (0, missing), value=math.inf) if missing else lse
    no_dropout = lse.new_empty((), dtype=torch.int64)
    return _aten._scaled_dot_product_efficient_attention_backward(
        heads_layout(do),
        q,
        k,
        v,
        bias,
        heads_layout(o),
        lse,
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        _is_causal(core),
        scale=core.scale,
    )[:3]


def _cpu_fwd(q, k, v, core):
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, core.window[1] is not None, scale=core.scale)


def _cpu_bwd(do, q, k, v, o, lse, core):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, core.window[1] is not None, scale=core.scale
    )


# torch's kernels without dropout: forward (q, k, v, core) -> o, lse [B, H, Sq], and backward (do, q, k, v, o, lse, core) -> dq,
# dk, dv. `ops.attention.core.kernel_order` says which cores they compute; "cpu" is for meta tensors, of which only the
# allocated memory matters.
FUSED = {
    "cudnn": (_cudnn_fwd, _cudnn_bwd),
    "flash": (_flash_fwd, _flash_bwd),
    "efficient": (_efficient_fwd, _efficient_bwd),
    "cpu": (_cpu_fwd, _cpu_bwd),
}
GROUPED = ("cudnn", "flash")  # k and v may have fewer heads than q; for the others their heads are repeated


def fused_attn_fwd(q, k, v, core: AttentionCore) -> tuple[Tensor, Tensor]:
    """Computes o and lse by the kernel that `core.fused` names."""
    q, k, v = map(as_readable, (q, k, v))
    if core.fused not in GROUPED:
        k, v = (repeated_heads(x, q.shape[1]) for x in (k, v))
    return FUSED[core.fused][0](q, k, v, core)


def fused_attn_bwd(q, k, v, do, o, lse, core: AttentionCore) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk and dv by the kernel that `core.fused` names, which reads o instead of delta."""
    H_kv = k.shape[1]
    do, q, k, v, o = map(as_readable, (do, q, k, v, o))
    if core.fused not in GROUPED:
        k, v = (repeated_heads(x, q.shape[1]) for x in (k, v))
    dq, dk, dv = FUSED[core.fused][1](do, q, k, v, o, lse, core)
    return dq, summed_by_group(dk, H_kv), summed_by_group(dv, H_kv)
