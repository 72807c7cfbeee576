"""Checks the arguments of attention_block and latent_attention_block, and turns them into a sublayer's tensors and options."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..dispatch.choices import (
    check_choice,
    check_count,
    check_flags,
    check_input,
    check_mode,
    check_number,
    check_positive,
    check_probability,
    check_softcap,
    check_tensor,
    check_weight,
    choose_backend,
    compute_dtype,
    head_dim_not_covered,
    is_number,
    surely,
)
from ..dispatch.shard import ACTIVE
from ..sublayer.lora import NO_UPDATES, gather_lora
from ..sublayer.residual import NORMS, around
from .core import check_sinks, check_whole_sequence, fused_core
from .tensors import LAYERS, AttentionOptions, AttentionTensors, batch_and_rows


def one_or_three(op: str, name: str, value) -> tuple:
    """Returns (packed,) or (q, k, v)."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{op}: {name} must be one Tensor or three (q, k, v), not {type(value).__name__}")
    return tuple(value)


QKV_LAYOUTS = ("qkv", "heads")


def check_projections(
    op: str,
    x: Tensor,
    key_value: Tensor | None,
    qkv_weight,
    qkv_bias,
    layout: str,
    H: int,
    H_kv: int,
    gate_in_query: bool,
) -> tuple[tuple, tuple, int]:
    """Returns (weights, biases, head dim), of one packed projection or of q, k and v."""
    weights = one_or_three(op, "qkv_weight", qkv_weight)
    biases = (None,) * len(weights) if qkv_bias is None else one_or_three(op, "qkv_bias", qkv_bias)
    if len(weights) not in (1, 3) or len(biases) != len(weights):
        raise ValueError(f"{op}: qkv_weight must be one tensor or three (q, k, v), and qkv_bias alike")
    check_choice(op, "qkv_layout", layout, QKV_LAYOUTS)
    if layout != "qkv" and len(weights) == 3:
        raise ValueError(f"{op}: qkv_layout={layout!r} needs q, k and v in one qkv_weight, not three")
    if gate_in_query and len(weights) == 1:
        raise ValueError(f"{op}: gate_in_query needs three weights (q, k, v), the first with 2 H D rows, not one")
    names = ("qkv_weight",) if len(weights) == 1 else ("q_weight", "k_weight", "v_weight")
    features = x.shape[-1] if key_value is None else key_value.shape[-1]
    if len(weights) == 1 and features != x.shape[-1]:
        raise ShapeError(
            f"{op}: key_value has {features} features but the input {x.shape[-1]}; qkv_weight must then be three weights "
            "(q, k, v)"
        )
    for name, w, b in zip(names, weights, biases, strict=True):
        of_x = key_value is None or name in ("qkv_weight", "q_weight")
        check_weight(op, name, w, b, x, x.shape[-1] if of_x else features, "input" if of_x else "key_value")
    rows, heads = weights[0].shape[0], H + 2 * H_kv if len(weights) == 1 else 2 * H if gate_in_query else H
    D = rows // heads  # divmod fails for symbolic numbers
    if rows % heads or any(w.shape[0] != H_kv * D for w in weights[1:]):
        raise ShapeError(
            f"{op}: q, k, v weights with {[w.shape[0] for w in weights]} rows do not fit {H} query and {H_kv} key and "
            f"value heads{' with gate_in_query' if gate_in_query else ''}"
        )
    return weights, biases, D


def check_qk_norm(op: str, x: Tensor, qk_norm, D: int, H: int, H_kv: int) -> tuple[Tensor | None, ...]:
    """Returns the norms' parameters: (weight of q, weight of k, bias of q, bias of k)."""
    if not isinstance(qk_norm, (tuple, list)) or len(qk_norm) != 2:
        raise TypeError(f"{op}: qk_norm must be a pair of tensors, not {type(qk_norm).__name__}")
    if any(weight is None for weight in qk_norm):
        raise ValueError(f"{op}: qk_norm must be a pair of weights, but one of them is None")
    pairs = [norm if isinstance(norm, (tuple, list)) and len(norm) == 2 else (norm, None) for norm in qk_norm]
    for name, heads, (weight, bias) in zip("qk", (H, H_kv), pairs, strict=True):
        check_tensor(op, f"{name}'s norm weight", weight, x)
        if weight.shape not in ((D,), (heads, D), (heads * D,)):
            raise ShapeError(
                f"{op}: {name}'s norm weight must have shape ({D},), ({heads}, {D}) or ({heads * D},), but has "
                f"{tuple(weight.shape)}"
            )
        if bias is not None:
            check_tensor(op, f"{name}'s norm bias", bias, x)
            if bias.shape != weight.shape:
                raise ShapeError(
                    f"{op}: {name}'s norm bias must have the shape of its weight, {tuple(weight.shape)}, but has "
                    f"{tuple(bias.shape)}"
                )
    (q_norm, q_bias), (k_norm, k_bias) = pairs
    return q_norm, k_norm, q_bias, k_bias


def check_window(op: str, window_size: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Returns (left, right), None for no bound."""
    if window_size is None:
        return None, None
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(not isinstance(side, int) or side < -1 for side in window_size):
        raise ValueError(f"{op}: window_size must be (left, right), each -1 (no bound) or >= 0, not {window_size!r}")
    left, right = window_size
    return None if left == -1 else int(left), None if right == -1 else int(right)


def left_bound(left: int | None, rows: int) -> int | None:
    """Returns the left bound of a window, or None if it hides nothing in so many rows, so that kernels skip it."""
    return None if left is not None and surely(left >= rows - 1) else left


def diagonal_of(op: str, attn_mask: Tensor | None, Sq: int, Sk: int) -> int | None:
    """Returns n such that row i sees the columns up to i + n if attn_mask is torch's CausalBias, else None.

    A CausalBias has uninitialised memory. As in torch, an upper-left or square one fits all lengths.
    """
    module = sys.modules.get("torch.nn.attention.bias")  # not imported here, because it imports torch._dynamo
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return None
    if not hasattr(attn_mask, "variant"):
        raise TypeError(
            f"{op}: attn_mask is the result of an operation on a CausalBias, so its diagonal is no longer known"
        )
    shape = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if attn_mask.variant == module.CausalVariant.UPPER_LEFT or shape[0] == shape[1]:
        return 0
    if shape != (Sq, Sk):
        raise ValueError(f"{op}: attn_mask is causal_lower_right{shape}, but query has {Sq} rows and key {Sk}")
    return Sk - Sq


def within(right: int | None, diagonal: int | None) -> int | None:
    """Returns the tighter of two right bounds; None is no bound."""
    return diagonal if right is None else right if diagonal is None else min(right, diagonal)


def as_mask(op: str, attn_mask: Tensor, x: Tensor, wanted: tuple[int, int, int, int]) -> Tensor:
    """Returns attn_mask as [B or 1, H or 1, Sq or 1, Sk or 1]. wanted: (B, H, Sq, Sk)."""
    check_tensor(op, "attn_mask", attn_mask, x, floating=False)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise DtypeError(f"{op}: attn_mask must be bool (True = keep) or floating point, not {attn_mask.dtype}")
    if attn_mask.dtype == torch.float64 != x.dtype:
        raise DtypeError(f"{op}: attn_mask is {attn_mask.dtype}, which needs inputs of that dtype, not {x.dtype}")
    shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if attn_mask.dim() > 4 or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
        raise ShapeError(f"{op}: attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {wanted}")
    return (
        attn_mask if attn_mask.dim() == 4 else attn_mask.reshape(shape)
    )  # autograd adds no gradients of views in place


def as_slopes(op: str, alibi_slopes: Tensor, x: Tensor, B: int, H: int) -> Tensor:
    """Returns alibi_slopes as float32 [B or 1, H]."""
    check_tensor(op, "alibi_slopes", alibi_slopes, x)
    if alibi_slopes.shape not in ((H,), (1, H), (B, H)):
        raise ShapeError(
            f"{op}: alibi_slopes must be [H={H}] or [B={B}, H={H}], but has shape {tuple(alibi_slopes.shape)}"
        )
    return alibi_slopes.float().reshape(-1, H).contiguous()


def check_no_gradient(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient is formed for {name}; use ckptkern.scaled_dot_product_attention")


def check_hidden(
    op: str, x: Tensor, H: int, S_k: int, attn_mask, key_padding_mask, window_size, is_causal: bool
) -> tuple[Tensor | None, Tensor | None, int | None, int | None]:
    """Returns (mask, padding or a second mask, left bound, right bound) for H heads of x."""
    B, S = batch_and_rows(x)
    masks, diagonal, padding = [], None, None
    if key_padding_mask is not None:
        check_tensor(op, "key_padding_mask", key_padding_mask, x, floating=False)
        padding = key_padding_mask if x.dim() == 3 else key_padding_mask[None]
        if padding.dtype == torch.float64 != x.dtype:
            raise DtypeError(
                f"{op}: key_padding_mask is {padding.dtype}, which needs input of that dtype, not {x.dtype}"
            )
        if not (padding.dtype == torch.bool or padding.is_floating_point()) or padding.shape != (B, S_k):
            raise ShapeError(
                f"{op}: key_padding_mask must be bool (True = masked out) or floating point (added) of shape ({B}, {S_k}), "
                f"but is {padding.dtype} of shape {tuple(key_padding_mask.shape)}"
            )
    pair = attn_mask if isinstance(attn_mask, (tuple, list)) else () if attn_mask is None else (attn_mask,)
    if len(pair) > 2:
        raise TypeError(f"{op}: attn_mask must be one mask or a pair of them, not {len(pair)}")
    for part in pair:
        bound = diagonal_of(op, part, S, S_k)
        diagonal = within(diagonal, bound)
        if part is not None and bound is None:
            masks.append(as_mask(op, part, x, (B, H, S, S_k)))
    mask, second = (*masks, None, None)[:2]
    if second is not None and padding is not None:
        raise ValueError(
            f"{op}: key_padding_mask does not go with a pair of masks; make it one of the pair, [B, 1, 1, S]"
        )
    padding = padding if second is None else second
    if padding is not None:
        check_no_gradient(op, "key_padding_mask" if second is None else "the second attn_mask", padding)
    left, right = check_window(op, window_size)
    return mask, padding, left_bound(left, S), within(within(right, diagonal), 0 if is_causal else None)


def check_rotary(
    op: str, x: Tensor, rotary, B: int, S: int, D: int, own: int | None = None
) -> tuple[Tensor | None, Tensor | None, float]:
    """Returns (cos, sin, theta) of `rotary`: tables and 0, or (None, None, theta). own: the number of this rank's rows,
    which tables may have instead of all rows."""
    if is_number(rotary):
        check_positive(op, "rotary", rotary)
        if D % 2:
            raise ShapeError(
                f"{op}: the head dim must be even for rotary embedding, which rotates pairs, but is {D}: change the number of "
                "heads, pass tables of fewer dimensions, or rotate nothing (rotary=None; rope_theta=None of a layer)"
            )
        return None, None, float(rotary)
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"{op}: rotary must be a pair of tensors or a number (theta), not {type(rotary).__name__}")
    cos, sin = rotary
    for table in rotary:
        check_tensor(op, "rotary", table, x)
    R = cos.shape[-1]
    S = own if own is not None and cos.dim() > 1 and cos.shape[-2] == own else S
    if cos.shape != sin.shape or R % 2 or R > D or cos.shape[:-1] not in ((S,), (1, S), (B, S)):
        raise ShapeError(
            f"{op}: rotary must be (cos, sin) of shape [S={S}, R], [1, S={S}, R] or [B={B}, S={S}, R] with R even and at "
            f"most {D}, but they have shapes {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient is formed for rotary; detach its tables")
    return cos, sin, 0.0


def check_scores(
    op, x, shapes, *, recompute, dropout_p, scale, rotary_interleaved, is_causal, mask_is_exclusion, **others
) -> None:
    """Checks arguments of both kinds of attention that need no other argument. shapes: the shapes of x, for the message."""
    check_mode(op, recompute)
    check_probability(op, dropout_p)
    check_flags(op, rotary_interleaved=rotary_interleaved, is_causal=is_causal, mask_is_exclusion=mask_is_exclusion)
    check_number(op, "scale", 1.0 if scale is None else scale)
    check_input(op, x)
    if x.dim() not in (2, 3):
        raise ShapeError(f"{op}: input must be {shapes}, not {tuple(x.shape)}")


def around_core(
    op,
    x,
    probe,
    updates,
    features,
    H,
    H_kv,
    D,
    qk,
    rope,
    *,
    slopes=None,
    cu=None,
    max_len=0,
    key_value=None,
    rotary,
    rotary_interleaved,
    is_causal,
    attn_mask,
    mask_is_exclusion,
    key_padding_mask,
    window_size,
    scale,
    softcap,
    dropout_p,
    **others,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks the arguments of core attention and of what is around it, for both kinds of attention; returns them as fields
    of their tensors and options.

    H, H_kv, D: heads of q and k, and the head dim; qk: dimensions of q and k; rope: dimensions that may be rotated.
    slopes, cu, max_len, key_value: of `gather`, checked. probe, updates, features, others: see
    `around`.
    """
    softcap = check_softcap(op, softcap)
    tensors, options = around(op, x, probe, "out_weight", features, updates, **others)
    context = ACTIVE.context
    seen, own = (x, None) if context is None else (context.whole(x), x.shape[-2])  # seen: with the rows of all ranks
    B, S = batch_and_rows(seen)
    S_k = S if key_value is None else key_value.shape[-2]
    cos, sin, theta = (None, None, 0.0) if rotary is None else check_rotary(op, seen, rotary, B, S, rope, own)
    mask, padding, left, right = check_hidden(op, seen, H, S_k, attn_mask, key_padding_mask, window_size, is_causal)
    if cu is not None and (mask is not None or padding is not None):
        raise ValueError(f"{op}: attn_mask and key_padding_mask have no meaning for sequences packed by cu_seqlens")
    scale, drops = float(max(qk, 1) ** -0.5 if scale is None else scale), others["training"] and dropout_p > 0.0
    reason = head_dim_not_covered(D)
    if context is not None:
        rows = x.shape[-2]
        if key_value is not None:
            raise ValueError(
                f"{op}: key_value does not go with a sequence on several ranks; keep cross-attention's layers whole"
            )
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: no gradient of attn_mask is formed over a context-parallel group; detach it")
        if context.zigzag and rows % 2:
            raise ShapeError(
                f"{op}: zigzag order takes an even number of rows on each rank, not {rows}; pad the sequence"
            )
        if context.exchange == "heads":
            if H_kv % context.size:
                raise ValueError(
                    f"{op}: exchange='heads' needs num_kv_heads that the {context.size} ranks divide, not {H_kv}; use "
                    "'gather'"
                )
        elif cu is not None:
            if drops or slopes is not None:
                name = "dropout_p" if drops else "alibi_slopes"
                raise ValueError(f"{op}: {name} with cu_seqlens on several ranks needs exchange='heads'")
            if right != 0 and (left, right) != (None, None):
                raise ValueError(
                    f"{op}: cu_seqlens on several ranks with a window that sees later rows needs exchange='heads'"
                )
        elif drops and (rows // 2 if context.zigzag else rows) % 16:
            reason = f"the kernels' dropout masks need a multiple of 16 rows on each rank, not {rows}"
    backend = choose_backend(op, probe, reason)
    n = 1 if context is None or context.exchange == "gather" else context.size
    fused = fused_core(
        backend,
        x,
        probe.dtype,
        options["precision"],
        (B, H // n, S, D),
        (B, H_kv // n, S_k, D),
        left,
        right,
        scale,
        slopes,
        "dropout" if drops else None,
        softcap or None,
        "rows" if context is not None and n == 1 else None,
        masks=(mask, padding),
        cu=cu,
    )
    options |= dict(
        num_heads=H,
        theta=theta,
        interleaved=rotary_interleaved,
        mask_is_exclusion=mask_is_exclusion,
        context=context,
        left=left,
        right=right,
        scale=scale,
        softcap=softcap,
        dropout_p=float(dropout_p),
        max_q=max_len,
        max_k=max_len,
        first_plane=0,
        planes=0,
        backend=backend,
        fused=fused,
    )
    return tensors | dict(cos=cos, sin=sin, mask=mask, padding=padding), options


def gather(
    op,
    x,
    qkv_weight,
    qkv_bias,
    out_weight,
    out_bias,
    num_heads,
    num_kv_heads,
    *,
    key_value,
    qkv_layout,
    qk_norm,
    qk_norm_kind,
    qk_norm_eps,
    alibi_slopes,
    cu_seqlens,
    max_seqlen,
    sinks,
    gate_weight,
    gate_bias,
    gate_in_query,
    lora,
    **others,
) -> tuple[AttentionTensors, AttentionOptions]:
    """Checks all arguments of attention_block; returns the sublayer's tensors, without random states, and its options."""
    check_whole_sequence(op, takes_parts=True)
    check_scores(op, x, "[B, S, d], [S, d], or [tokens, d] with cu_seqlens", **others)
    check_flags(op, gate_in_query=gate_in_query)
    check_number(op, "qk_norm_eps", qk_norm_eps)
    context = ACTIVE.context
    seen = x if context is None else context.whole(x)
    B, S = batch_and_rows(seen)
    H, H_kv = num_heads, num_heads if num_kv_heads is None else num_kv_heads
    check_count(op, "num_heads", H)
    check_count(op, "num_kv_heads", H_kv)
    if H % H_kv:
        raise ValueError(f"{op}: num_kv_heads={H_kv} must divide num_heads={H}")
    if key_value is not None:
        check_tensor(op, "key_value", key_value, x)
        if key_value.dim() != x.dim() or key_value.shape[:-2] != x.shape[:-2]:
            raise ShapeError(
                f"{op}: key_value must be {'[B, S_k, d_k]' if x.dim() == 3 else '[S_k, d_k]'} with the samples of the input "
                f"{tuple(x.shape)}, but has shape {tuple(key_value.shape)}"
            )
        layout = None if qkv_layout == "qkv" else qkv_layout
        for name, value in dict(qkv_layout=layout, rotary=others["rotary"], cu_seqlens=cu_seqlens).items():
            if value is not None:
                raise ValueError(f"{op}: {name} is for self-attention and does not go with key_value")
    weights, biases, D = check_projections(op, x, key_value, qkv_weight, qkv_bias, qkv_layout, H, H_kv, gate_in_query)
    if gate_weight is not None or gate_bias is not None:
        if gate_weight is None:
            raise ValueError(f"{op}: gate_bias needs gate_weight, which is None")
        if gate_in_query:
            raise ValueError(f"{op}: gate_weight does not go with gate_in_query, where q's weight has the gate's rows")
        check_weight(op, "gate_weight", gate_weight, gate_bias, x, x.shape[-1], "input")
        if gate_weight.shape[0] not in (H * D, H):
            raise ShapeError(
                f"{op}: gate_weight must have {H * D} rows, one for each column of o, or {H}, one for each head, but has "
                f"{gate_weight.shape[0]}"
            )
    if sinks is not None:
        check_sinks(op, sinks, x, H)
    check_weight(op, "out_weight", out_weight, out_bias, x, H * D, "core attention")
    if lora is not None and "qkv" in lora and key_value is not None:
        raise ValueError(f"{op}: lora of 'qkv' does not go with key_value; pass three weights (q, k, v)")
    names = ("qkv",) if len(weights) == 1 else ("q", "k", "v")
    layers = dict(zip(names, weights, strict=True)) | {"out": out_weight}
    updates = NO_UPDATES
    if lora is not None:
        updates = gather_lora(op, x, lora, layers, LAYERS, {"qkv": "q", "out": "o"})
    check_choice(op, "qk_norm_kind", qk_norm_kind, NORMS)
    qk_norms = (None,) * 4 if qk_norm is None else check_qk_norm(op, x, qk_norm, D, H, H_kv)
    slopes = None
    if alibi_slopes is not None:
        slopes = as_slopes(op, alibi_slopes, x, B, H)
        check_no_gradient(op, "alibi_slopes", alibi_slopes)
    probe = x.new_empty(0, dtype=compute_dtype(op, x, *weights, out_weight, gate_weight, key_value))
    max_len = 0
    if cu_seqlens is not None:
        check_tensor(op, "cu_seqlens", cu_seqlens, x, floating=False)
        if x.dim() != 2 or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise ShapeError(f"{op}: cu_seqlens must be int32 [N + 1] and come with an input [tokens, d]")
        max_len = S if max_seqlen is None else max_seqlen
        check_count(op, "max_seqlen", max_len, least=0)
    elif max_seqlen is not None:
        raise ValueError(f"{op}: max_seqlen needs cu_seqlens, which is None")
    tensors, options = around_core(
        op,
        x,
        probe,
        updates,
        out_weight.shape[0],
        H,
        H_kv,
        D,
        D,
        D,
        slopes=slopes,
        cu=cu_seqlens,
        max_len=max_len,
        key_value=key_value,
        **others,
    )
    if context is not None and context.exchange == "gather" and cu_seqlens is not None and max_len < S:
        message = f"{op}: on several ranks max_seqlen={max_len} must not be below the longest sequence; leave it out"
        fits = (cu_seqlens.diff() <= max_len).all()
        if (
            not fits.is_cpu or torch.compiler.is_compiling()
        ):  # a device-side assertion, for which the host does not wait
            torch._assert_async(fits, message)
        elif not fits:
            raise ValueError(message)
    biases, weights = ((*layers, None, None)[:3] for layers in (biases, weights))
    own = (
        key_value,
        *weights,
        *biases,
        out_weight,
        out_bias,
        *qk_norms,
        sinks,
        gate_weight,
        gate_bias,
        slopes,
        cu_seqlens,
    )
    t = AttentionTensors(**dict(zip(AttentionTensors.own, own, strict=True)), **tensors)
    o = AttentionOptions(
        num_kv_heads=H_kv,
        qkv_layout=qkv_layout,
        gate_in_query=gate_in_query,
        qk_norm=qk_norm_kind,
        qk_norm_eps=float(qk_norm_eps),
        **options,
    )
    return t, o
