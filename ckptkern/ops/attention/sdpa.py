"""Defines scaled_dot_product_attention and varlen_attn: flash attention that saves q, k, v, o and the logsumexp."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ...errors import DeviceError, DtypeError, ShapeError
from ...subclasses import own_dispatch
from ..dispatch.choices import (
    Bytes,
    autocast_dtype,
    check_count,
    check_input,
    check_number,
    check_probability,
    check_softcap,
    check_tensor,
    choose_backend,
    choose_workspace,
    compose_of,
    head_dim_not_covered,
    matmul_precision,
    primitives,
)
from ..registration.functions import build
from ..registration.op import Op, needed
from ..sublayer.dropout import draw_state
from .arguments import as_mask, as_slopes, check_window, diagonal_of, left_bound, within
from .core import (
    CoreOptions,
    CoreTensors,
    attend,
    attention_grads,
    check_sinks,
    check_whole_sequence,
    core_of,
    fused_core,
)

Q, K, V, MASK, SLOPES, SINKS = range(6)
OTHERS = len(CoreTensors._fields)


class Attention(Op):
    name = "attention"
    Options = CoreOptions
    constants = frozenset(range(SINKS + 1, V + 1 + OTHERS))

    @staticmethod
    def saves(o):
        return "y", "lse"

    @staticmethod
    def forward(tensors, o):
        q, k, v, *others = tensors
        out, lse, _ = attend(primitives(o.backend), q, k, v, core_of(CoreTensors(*others), o))
        return out, {"lse": lse}

    @staticmethod
    def backward(do, tensors, saved, o, needs):
        q, k, v, *others = tensors
        t, p = CoreTensors(*others), primitives(o.backend)
        *grads, dmask, dslopes, dsinks = attention_grads(
            p,
            q,
            k,
            v,
            do,
            saved["y"],
            saved["lse"],
            core_of(t, o),
            need_dq=needed(needs, Q),
            need_dkv=needed(needs, K) or needed(needs, V),
            dmask_shape=t.mask.shape if needed(needs, MASK) else None,
            need_dslopes=needed(needs, SLOPES),
            need_dsinks=needed(needs, SINKS),
        )
        heads = [eager.as_heads(g) if needed(needs, i) else None for i, g in enumerate(grads)]
        dmask = None if dmask is None else dmask.to(t.mask.dtype)
        dsinks = None if dsinks is None else dsinks.to(t.sinks.dtype)
        return [*heads, dmask, dslopes, dsinks] + [None] * (OTHERS - 3)

    @staticmethod
    def reference(tensors, o):
        q, k, v, *others = tensors
        core = core_of(CoreTensors(*others), o._replace(precision="ieee", fused=""))
        return eager.attention_reference(q, k, v, core)


_apply = build(Attention)


def _cast_qkv(op: str, query: Tensor, key: Tensor, value: Tensor, *, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Checks query, key and value; returns them in one dtype."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_input(f"{op}: {name}", tensor, jagged=not packed)
        if tensor.device != query.device:
            raise DeviceError(f"{op}: query is on {query.device} but {name} is on {tensor.device}")
        if tensor.dim() != 3 if packed else tensor.dim() < 2:
            shape = "[tokens, heads, head_dim]" if packed else "[..., S, D]"
            raise ShapeError(f"{op}: {name} must be {shape}, but has shape {tuple(tensor.shape)}")
    dtype = autocast_dtype(query)
    if dtype is not None and torch.float64 not in (query.dtype, key.dtype, value.dtype):
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise DtypeError(
            f"{op}: query, key and value must have one dtype, but have {query.dtype}, {key.dtype} and {value.dtype}"
        )
    return query, key, value


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: Bytes = None,
) -> Tensor:
    """Computes dropout(softmax(scale q k^T + mask)) v, as torch.nn.functional.scaled_dot_product_attention.

    query [B, H, Sq, D], key and value [B, H or H_kv, Sk, D] -> [B, H, Sq, D]; other dimensions as in torch. Head dims
    beyond 256 run in PyTorch ops. Saves q, k, v, the output and the logsumexp [B, H, Sq] in float32.

    attn_mask: bool (True = keep), additive, broadcastable to [B, H, Sq, Sk], or a CausalBias. An additive mask may be
    trained: two more matmuls in backward.
    dropout_p: always applies, as in torch.
    window_size: (left, right): row i sees columns i - left to i + right; -1 is no bound. is_causal is (-1, 0); with an
    attn_mask pass the window. Both align top-left.
    alibi_slopes: [H] or [B, H], adds -slope |i - j|. Trained slopes run in PyTorch ops.
    softcap: caps scores s, before masks, to softcap tanh(s / softcap) (Gemma 2).
    sinks: [H], trained logits in the denominators (GPT-OSS): p_j = exp(s_j) / (exp(sink) + sum_j exp(s_j)).
    workspace: for scores, masks and biases in PyTorch ops.

    A row that sees no column gives zeros and zero gradients. A row masked by a large finite number (-1e9) gets no gradient
    from the kernels.

    Raises: see Conventions; RuntimeError for attn_mask with is_causal.
    """
    op = "scaled_dot_product_attention"
    check_probability(op, dropout_p)
    check_number(op, "scale", 1.0 if scale is None else scale)
    query, key, value = _cast_qkv(op, query, key, value, packed=False)
    left, right = check_window(op, window_size)
    softcap = check_softcap(op, softcap)
    diagonal = diagonal_of(op, attn_mask, query.shape[-2], key.shape[-2])
    if attn_mask is not None and is_causal:
        if diagonal is not None:
            raise ValueError(f"{op}: a CausalBias should not be used with is_causal=True; leave is_causal out")
        raise RuntimeError(
            f"{op}: Explicit attn_mask should not be set when is_causal=True; pass window_size=(-1, 0) with attn_mask, "
            f"which hides what is_causal hides, or attn_mask alone with the causal triangle in it"
        )
    if kind := own_dispatch((query, key, value, attn_mask if diagonal is None else None, alibi_slopes, sinks)):
        bounded = left is not None or right not in (None, 0) or (right == 0 and attn_mask is not None)
        if bounded or softcap or alibi_slopes is not None or sinks is not None:
            raise TypeError(f"{op}: window_size, alibi_slopes, softcap and sinks do not go with a {kind.__name__}")
        compose_of(op, kind)
        is_causal = is_causal or right == 0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    attn_mask = attn_mask if diagonal is None else None
    dims, batch = max(query.dim(), key.dim(), value.dim()), None
    if not query.dim() == key.dim() == value.dim() == 4:
        least = 3 if dims > 4 else 4  # fewer dimensions gain leading ones, more are flattened into one
        query, key, value = (
            t if t.dim() >= least else t.reshape((1,) * (least - t.dim()) + tuple(t.shape)) for t in (query, key, value)
        )
        if dims > 4:
            batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
            if attn_mask is not None and attn_mask.dim() > 3:
                attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
            query, key, value = (t.expand(*batch, *t.shape[-3:]).flatten(0, -4) for t in (query, key, value))
    query, key, value = _broadcast(op, query, key, value, enable_gqa)
    D, D_v = query.shape[-1], value.shape[-1]
    scale = float(1.0 / math.sqrt(max(D, 1)) if scale is None else scale)
    if D_v != D:  # zeros do not change scores; their columns of the output are cut off
        query, key = F.pad(query, (0, max(D_v - D, 0))), F.pad(key, (0, max(D_v - D, 0)))
        value = F.pad(value, (0, max(D - D_v, 0)))
    left, right = left_bound(left, query.shape[2]), within(right, 0 if is_causal else diagonal)
    mask = None if attn_mask is None else as_mask(op, attn_mask, query, (*query.shape[:3], key.shape[2]))
    slopes = None if alibi_slopes is None else as_slopes(op, alibi_slopes, query, *query.shape[:2])
    if sinks is not None:
        check_sinks(op, sinks, query, query.shape[1])
    core = dict(scale=scale, left=left, right=right, dropout_p=float(dropout_p), softcap=softcap, max_q=0, max_k=0)
    out = _attention(op, query, key, value, CoreTensors(mask, slopes, sinks), workspace, **core)
    out = out[..., :D_v] if D_v != D else out
    return out if dims == 4 else out.unflatten(0, batch) if dims > 4 else out.reshape(out.shape[4 - dims :])


def _attention(
    op: str, query: Tensor, key: Tensor, value: Tensor, tensors: CoreTensors, workspace: Bytes, **core: Any
) -> Tensor:
    """Calls the op on the backend that computes all its gradients. tensors: without the dropout state; core: other fields of
    CoreOptions."""
    check_whole_sequence(op)
    slopes = tensors.slopes
    learned = slopes is not None and slopes.requires_grad and torch.is_grad_enabled()
    reason = "the kernels compute no gradient for alibi_slopes" if learned else None
    backend = choose_backend(op, query, reason or head_dim_not_covered(query.shape[-1]))
    workspace = choose_workspace(op, workspace, query)  # before the draw: an error leaves the generator unchanged
    tensors = tensors._replace(rng=draw_state(query, core["dropout_p"], True))
    precision = matmul_precision(query)
    bounds = core["left"], core["right"], core["scale"]
    fused = fused_core(
        backend,
        query,
        query.dtype,
        precision,
        query.shape,
        key.shape,
        *bounds,
        slopes,
        tensors.rng,
        core["softcap"] or None,
        masks=(tensors.mask,),
        cu=tensors.cu_q,
    )
    choices = dict(backend=backend, precision=precision, fused=fused, workspace=workspace)
    return _apply(CoreOptions(**core, **choices, first_plane=0, planes=0), query, key, value, *tensors)


def _broadcast(op, query, key, value, enable_gqa):
    """Expands to one batch size, and without enable_gqa to one number of heads, or one for both key and value."""
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"{op}: query has head dim {query.shape[-1]} but key has {key.shape[-1]}")
    if key.shape[2] != value.shape[2]:
        raise ShapeError(f"{op}: key has {key.shape[2]} rows but value has {value.shape[2]}")
    B = query.shape[0]  # not a set of sizes, which torch.compile would turn into constants
    for t in (key, value):
        B = t.shape[0] if B == 1 else B
    if any(t.shape[0] != B and t.shape[0] != 1 for t in (query, key, value)):
        raise ShapeError(
            f"{op}: batch sizes must be equal or 1, but are {query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
        )
    query, key, value = (t if t.shape[0] == B else t.expand(B, -1, -1, -1) for t in (query, key, value))
    if not enable_gqa:
        H = max(t.shape[1] for t in (query, key, value))
        query = query if query.shape[1] != 1 else query.expand(-1, H, -1, -1)
        if key.shape[1] != value.shape[1]:
            key, value = (t if t.shape[1] != 1 else t.expand(-1, H, -1, -1) for t in (key, value))
    H, H_kv = query.shape[1], key.shape[1]
    if value.shape[1] != H_kv or (H_kv not in (1, H) and (not enable_gqa or H_kv == 0 or H % H_kv)):
        raise ShapeError(
            f"{op}: query has {H} heads, key {H_kv} and value {value.shape[1]}; fewer key and value heads need "
            f"enable_gqa=True and must divide those of query"
        )
    return query, key, value


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Computes attention within packed sequences, as torch.nn.attention.varlen.varlen_attn.

    query [T_q, H, D], key and value [T_k, H_kv, D] -> [T_q, H, D]. Saves q, k, v, the output and the logsumexp.

    cu_seq_q, cu_seq_k: int32 [N + 1]: sequence n has the rows cu_seq[n] to cu_seq[n + 1] - 1.
    max_q, max_k: the longest sequence's length. Rows beyond it, or in no sequence, give zeros and zero gradients.
    window_size: as in scaled_dot_product_attention, but aligned bottom-right, as in torch.

    Paged caches (cu_seq_k=None, block_table) are not supported.

    Raises: see Conventions.
    """
    op = "varlen_attn"
    query, key, value = _cast_qkv(op, query, key, value, packed=True)
    for name, cu in (("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)):
        check_tensor(op, name, cu, query, floating=False)
        if cu.dim() != 1 or cu.dtype != torch.int32 or cu.numel() < 1:
            raise ShapeError(f"{op}: {name} must be int32 [N + 1], but is {cu.dtype} of shape {tuple(cu.shape)}")
    if cu_seq_q.shape != cu_seq_k.shape:
        raise ShapeError(f"{op}: cu_seq_q has {cu_seq_q.numel() - 1} sequences but cu_seq_k has {cu_seq_k.numel() - 1}")
    H, H_kv, D = query.shape[1], key.shape[1], query.shape[2]
    if key.shape != value.shape or key.shape[2] != D:
        raise ShapeError(
            f"{op}: key {tuple(key.shape)} and value {tuple(value.shape)} must have one shape, and query's head dim {D}"
        )
    if H_kv != H and (not enable_gqa or H_kv == 0 or H % H_kv):
        raise ShapeError(
            f"{op}: {H_kv} key and value heads for {H} query heads need enable_gqa=True and must divide them"
        )
    left, right = check_window(op, window_size)
    right = within(right, 0 if is_causal else None)
    check_number(op, "scale", 1.0 if scale is None else scale)
    check_count(op, "max_q", max_q, least=0)
    check_count(op, "max_k", max_k, least=0)
    packed = [t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
    scale = float(1.0 / math.sqrt(max(D, 1)) if scale is None else scale)
    core = dict(scale=scale, left=left, right=right, dropout_p=0.0, softcap=0.0, max_q=max_q, max_k=max_k)
    out = _attention(op, *packed, CoreTensors(cu_q=cu_seq_q, cu_k=cu_seq_k), None, **core)
    return out.squeeze(0).transpose(0, 1)
