"""scaled_dot_product_attention and varlen_attn: flash attention that keeps q, k, v, o and the logsumexp."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from .. import eager
from ..errors import DeviceError, DtypeError, ShapeError
from ..subclasses import foreign
from ._common import (
    autocast_dtype,
    check_count,
    check_input,
    check_number,
    check_probability,
    check_tensor,
    choose_backend,
    compose_of,
    draw_state,
    dropout_arguments,
    head_dim_not_covered,
    kernels_alone,
    matmul_precision,
    primitives,
)  # fmt: skip
from ._op import Op, build, needed

Q, K, V = range(3)


def core_of(
    scale, precision, left, right, mask=None, slopes=None, rng=None, dropout_p=0.0, cu_q=None, cu_k=None, max_q=0,
    max_k=0, fused="",
) -> eager.AttentionCore:  # fmt: skip
    """The core from an op's flat arguments.

    Here, within the ops, a bool mask is viewed as int8: torch 2.11's inductor cannot.
    """
    mask = mask.view(torch.int8) if mask is not None and mask.dtype == torch.bool else mask
    return eager.AttentionCore(
        scale,
        precision,
        (left, right),
        mask,
        slopes,
        dropout_arguments(rng, dropout_p),
        0,
        cu_q,
        cu_k,
        max_q,
        max_k,
        fused,
    )


# -- whose kernel the core is -----------------------------------------------------------------------------------------

# compute capability -> torch's own kernel where that is measured faster than kernels in Triton, for these head dims. Nobody has
# measured ours yet; the figures are others', and a run of benchmarks/ overrules them. H100, heads of 128, TFLOP/s: cuDNN
# 595-617 forward and 465-518 backward, Triton 389-395 forward (figures of arXiv 2407.08608). A100: FlexAttention, in Triton,
# reaches 90 % of flash attention in forward and 85 % in backward (its authors). Of other cards nothing is known: ours.
FUSED_CORES = {(9, 0): "cudnn", (8, 0): "flash"}
FUSED_HEAD_DIMS = range(64, 129, 8)


@functools.cache
def _accepts(kernel: str, index: int | None, dtype: torch.dtype, D: int, causal: bool, grouped: bool) -> bool:
    """Does torch's own rule let `kernel` serve such heads on this device, with this build and this cuDNN?"""
    # In this mode torch lays cuDNN's logsumexp out in another way.
    if kernel == "cudnn" and os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") not in ("", "0"):
        return False
    # no fake tensors: what is asked for is the device, which torch takes from the current one
    with _disable_current_modes(), torch.cuda.device(index), torch.inference_mode(False), torch.enable_grad():
        q, k = (
            torch.empty((1, heads, 128, D), dtype=dtype, device="cuda", requires_grad=True)
            for heads in (2, 1 if grouped else 2)
        )
        asked = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, causal, grouped)
        return getattr(torch.backends.cuda, f"can_use_{kernel}_attention")(asked)


def _constant_fused(index: int | None, dtype: torch.dtype, D: int, causal: bool, grouped: bool) -> str:
    kernel = FUSED_CORES.get(torch.cuda.get_device_capability(index))
    if kernel is None or not getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")():
        return ""
    return kernel if _accepts(kernel, index, dtype, D, causal, grouped) else ""


_constant_fused._dynamo_marked_constant = True  # as in _common: called, not traced


def fused_core(
    backend: str, x: Tensor, dtype: torch.dtype, q_shape: Sequence[int], k_shape: Sequence[int], left: int | None,
    right: int | None, scale: float, *others: object,
) -> str:  # fmt: skip
    """torch's own kernel as the core of attention of q [B, H, Sq, D] by k [B, H_kv, Sk, D], or "" for the backend's.

    others: masks, slopes, dropout, cu_seqlens; with any that is not None the core is the backend's. So it is with a scale
    that is not positive (torch's on a CPU hides a score by -inf before it scales it), under deterministic algorithms, under
    backend("triton"), where torch.backends.cuda has the kernel disabled, and where all of a number of keys are seen that is
    no multiple of 128: cuDNN's backward has given NaN for some (pytorch#196678). Both keep o and lse, so the choice shows in
    no saved set.
    """
    if backend != "triton":
        return ""
    H, Sq, D = q_shape[1:]
    head_dim = next((n for n in FUSED_HEAD_DIMS if n == D), 0)  # a number, where torch.compile has a symbol for D
    if (
        not x.is_cuda or kernels_alone() or dtype not in (torch.float16, torch.bfloat16)
        or not head_dim or any(other is not None for other in others)
        or left is not None or right not in (None, 0) or not scale > 0 or (Sq != k_shape[2] if right == 0 else k_shape[2] % 128)
        or 0 in (*q_shape, *k_shape) or 1 in (Sq, k_shape[2])
        or torch.are_deterministic_algorithms_enabled()
    ):  # fmt: skip
        return ""
    grouped = True if k_shape[1] != H else False  # noqa: SIM210 (a bool, likewise)
    return _constant_fused(x.device.index, dtype, head_dim, right == 0, grouped)


def attend(p: ModuleType, q: Tensor, k: Tensor, v: Tensor, core: eager.AttentionCore, do: Tensor | None = None):
    """(o, lse, delta) of the core; delta where `do` is given and the core's backward reads it. p: the backend's module."""
    p = eager if core.fused else p
    wants_delta = do is not None and not (p is eager and eager.fused_kernel(q, k, core))
    o, lse, delta = p.attn_fwd(q, k, v, core, do=do if wants_delta else None)
    return eager.as_heads(o), lse, delta


def attention_grads(
    p: ModuleType, q, k, v, do, o, lse, core: eager.AttentionCore, *, delta=None, need_dq=True, need_dkv=True, out=(None,) * 3
) -> tuple:  # fmt: skip
    """(dq, dk, dv) from o and lse, by the core's own way.

    out: where they are written; torch's own kernels make new ones. delta: of `attend`, if at hand.
    """
    p = eager if core.fused else p
    needs = dict(need_dq=need_dq, need_dkv=need_dkv)
    if p is eager and (fused := eager.fused_kernel(q, k, core)):
        return eager.fused_attn_bwd(q, k, v, do, o, lse, core, fused, **needs)
    delta = p.attn_delta(o, do, core) if delta is None else delta
    dq, dk, dv = out
    return p.attn_bwd(q, k, v, do, lse, delta, core, **needs, dq=dq, dk=dk, dv=dv)


class Attention(Op):
    name = "attention"
    inputs = (
        "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? slopes, Tensor? rng, Tensor? cu_q, Tensor? cu_k"
    )
    kept = "Tensor? out, Tensor? lse"
    statics = (
        "float dropout_p, float scale, SymInt? left, SymInt? right, SymInt max_q, SymInt max_k, str backend, str precision, "
        "str fused"
    )
    results = "(Tensor out, Tensor lse)"
    grads = "Tensor[]"
    constants = frozenset(range(3, 8))  # a mask or slopes that train go through PyTorch ops

    @staticmethod
    def _core(mask, slopes, rng, cu_q, cu_k, dropout_p, scale, left, right, max_q, max_k, precision, fused=""):
        return core_of(scale, precision, left, right, mask, slopes, rng, dropout_p, cu_q, cu_k, max_q, max_k, fused)

    @staticmethod
    def forward(
        q, k, v, mask, slopes, rng, cu_q, cu_k, dropout_p, scale, left, right, max_q, max_k, backend, precision, fused
    ):
        core = Attention._core(
            mask, slopes, rng, cu_q, cu_k, dropout_p, scale, left, right, max_q, max_k, precision, fused
        )
        out, lse, _ = attend(primitives(backend), q, k, v, core)
        return out, lse

    @staticmethod
    def forward_fake(q, k, v, *others):
        return eager.empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))

    @staticmethod
    def saved(tensors, outputs, statics, needs):
        return [*tensors, *outputs]

    @staticmethod
    def backward(
        do, q, k, v, mask, slopes, rng, cu_q, cu_k, out, lse, dropout_p, scale, left, right, max_q, max_k, backend,
        precision, fused, needs,
    ):  # fmt: skip
        core = Attention._core(
            mask, slopes, rng, cu_q, cu_k, dropout_p, scale, left, right, max_q, max_k, precision, fused
        )
        grads = attention_grads(
            primitives(backend), q, k, v, do, out, lse, core, need_dq=needed(needs, Q),
            need_dkv=needed(needs, K) or needed(needs, V),
        )  # fmt: skip
        return [
            eager.as_heads(g) if needed(needs, i) else None for i, g in enumerate(grads)
        ] + [None for _ in range(5)]  # fmt: skip

    @staticmethod
    def backward_fake(do, q, k, v, *others):
        needs = others[-1]
        return [
            eager.empty_heads(t) if needed(needs, i) else do.new_empty(0) for i, t in enumerate((q, k, v))
        ] + [do.new_empty(0) for _ in range(5)]  # fmt: skip

    @staticmethod
    def composite(q, k, v, mask, slopes, rng, cu_q, cu_k, dropout_p, scale, left, right, max_q, max_k, *others):
        core = Attention._core(mask, slopes, rng, cu_q, cu_k, dropout_p, scale, left, right, max_q, max_k, "ieee")
        return eager.attention_composite(q, k, v, core)

    @staticmethod
    def forward_flops(q, k, v, *others, out_val=None):
        return attention_flops(q.shape, k.shape, 2)

    @staticmethod
    def backward_flops(do, q, k, v, *others, out_val=None):
        needs = others[-1]
        return attention_flops(q.shape, k.shape, 5 if needs & 0b111 == 0b111 else 3 if needs & 0b110 == 0 else 4)


def attention_flops(q_shape, k_shape, products: int) -> int:
    """`products` products of [Sq, D] x [D, Sk] a head, as torch's counter has it: masks do not shorten it."""
    B, H, Sq, D = q_shape
    return products * 2 * B * H * Sq * k_shape[2] * D


_apply = build(Attention)


def check_window(op: str, window_size: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """(left, right), None for no bound."""
    if window_size is None:
        return None, None
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(not isinstance(side, int) or side < -1 for side in window_size):
        raise ValueError(f"{op}: window_size must be (left, right), each -1 (no bound) or >= 0, not {window_size!r}")
    left, right = window_size
    return None if left == -1 else int(left), None if right == -1 else int(right)


def diagonal_of(op: str, attn_mask: Tensor | None, Sq: int, Sk: int) -> int | None:
    """The n for which row i sees the columns up to i + n, where attn_mask is torch's CausalBias, else None.

    Its memory holds nothing. As in torch an upper-left or square one fits all lengths.
    """
    module = sys.modules.get("torch.nn.attention.bias")  # torch._dynamo comes with it: here nothing imports it
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return None
    if not hasattr(attn_mask, "variant"):
        raise TypeError(
            f"{op}: attn_mask is the result of an operation on a CausalBias, which tells no diagonal any more"
        )
    shape = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if attn_mask.variant == module.CausalVariant.UPPER_LEFT or shape[0] == shape[1]:
        return 0
    if shape != (Sq, Sk):
        raise ValueError(f"{op}: attn_mask is causal_lower_right{shape}, but query has {Sq} rows and key {Sk}")
    return Sk - Sq


def within(right: int | None, diagonal: int | None) -> int | None:
    """The tighter of two right bounds, None for none."""
    return diagonal if right is None else right if diagonal is None else min(right, diagonal)


def as_mask(op: str, attn_mask: Tensor, q: Tensor, Sk: int) -> Tensor:
    """attn_mask as [B or 1, H or 1, Sq or 1, Sk or 1]."""
    check_tensor(op, "attn_mask", attn_mask, q, floating=False)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise DtypeError(f"{op}: attn_mask must be bool (True = keep) or floating point, not {attn_mask.dtype}")
    if attn_mask.dtype == torch.float64 != q.dtype:
        raise DtypeError(f"{op}: attn_mask is {attn_mask.dtype}, which no input of {q.dtype} goes with")
    wanted = (q.shape[0], q.shape[1], q.shape[2], Sk)
    shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if attn_mask.dim() > 4 or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
        raise ShapeError(f"{op}: attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {wanted}")
    return attn_mask.reshape(shape)


def _cast_qkv(
    op: str, query: Tensor, key: Tensor, value: Tensor, *, jagged: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_input(f"{op}: {name}", tensor, jagged=jagged)
        if tensor.device != query.device:
            raise DeviceError(f"{op}: query is on {query.device} but {name} is on {tensor.device}")
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
) -> Tensor:
    """dropout(softmax(scale q k^T + mask)) v: torch.nn.functional.scaled_dot_product_attention, with replayed dropout.

    query [B, H, Sq, D], key and value [B, H or H_kv, Sk, D] -> [B, H, Sq, D]; fewer dimensions and more batch
    dimensions as in torch. float16, bfloat16, float32; float64 and head dims beyond 256 in PyTorch ops. Kept for backward:
    q, k, v, the output, the logsumexp [B, H, Sq] in float32, and 16 bytes if there is dropout.

    attn_mask: bool (True = keep) or additive (float64 beside float64 alone), broadcastable to [B, H, Sq, Sk]. Its gradient,
    if wanted, is formed in PyTorch ops. torch.nn.attention.bias.causal_lower_right(Sq, Sk) and causal_upper_left(Sq, Sk) are
    bounds, not memory. is_causal aligns top-left, and so does the window: window_size = (left, right): row i sees
    i - left <= j <= i + right, -1 is no bound; (-1, 0) is causal, beside an attn_mask too. alibi_slopes [H] or [B, H]: adds
    -slope |i - j|. dropout_p always applies, as in torch.
    A row that sees nothing gives zeros and zero gradients. One of which an additive mask hides everything by a large
    finite number (-1e9) gives the mean of the values, as in torch, and from the kernels no gradient.
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (dropout_p, window_size),
    RuntimeError (attn_mask together with is_causal; backend).
    """
    op = "scaled_dot_product_attention"
    check_probability(op, dropout_p)
    query, key, value = _cast_qkv(op, query, key, value, jagged=True)
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            f"{op}: Explicit attn_mask should not be set when is_causal=True; pass window_size=(-1, 0) with attn_mask, "
            f"which hides what is_causal hides, or attn_mask alone with the causal triangle in it"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ShapeError(f"{op}: {name} must be [..., S, D], but has shape {tuple(tensor.shape)}")
    diagonal = diagonal_of(op, attn_mask, query.shape[-2], key.shape[-2])
    others = (None if diagonal is not None else attn_mask, alibi_slopes)
    if kind := foreign((query, key, value, *others)):
        if window_size is not None or alibi_slopes is not None:
            raise TypeError(f"{op}: window_size and alibi_slopes do not go with a {kind.__name__}")
        compose_of(op, kind)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    attn_mask = others[0]
    dims, batch = max(query.dim(), key.dim(), value.dim()), None
    if not query.dim() == key.dim() == value.dim() == 4:
        query, key, value, attn_mask, batch = _to_four_dims(dims, query, key, value, attn_mask)
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"{op}: query has head dim {query.shape[-1]} but key has {key.shape[-1]}")
    if key.shape[2] != value.shape[2]:
        raise ShapeError(f"{op}: key has {key.shape[2]} rows but value has {value.shape[2]}")
    query, key, value = _broadcast(op, query, key, value, enable_gqa)
    H, H_kv = query.shape[1], key.shape[1]
    if value.shape[1] != H_kv or (H_kv not in (1, H) and (not enable_gqa or H_kv == 0 or H % H_kv)):
        raise ShapeError(
            f"{op}: query has {H} heads, key {H_kv} and value {value.shape[1]}; fewer key and value heads need "
            f"enable_gqa=True and must divide those of query"
        )
    D, D_v = query.shape[-1], value.shape[-1]
    check_number(op, "scale", 1.0 if scale is None else scale)
    scale = 1.0 / math.sqrt(D) if scale is None and D else 1.0 if scale is None else scale
    if D_v != D:  # zeros add nothing to a score and make columns that are cut off again
        query, key = F.pad(query, (0, max(D_v - D, 0))), F.pad(key, (0, max(D_v - D, 0)))
        value = F.pad(value, (0, max(D - D_v, 0)))
    left, right = check_window(op, window_size)
    right = within(right, 0 if is_causal else diagonal)
    if attn_mask is not None:
        attn_mask = as_mask(op, attn_mask, query, key.shape[2])
    slopes = None
    if alibi_slopes is not None:
        check_tensor(op, "alibi_slopes", alibi_slopes, query)
        if alibi_slopes.shape not in ((H,), (1, H), (query.shape[0], H)):
            raise ShapeError(f"{op}: alibi_slopes must be [H={H}] or [B, H], but has shape {tuple(alibi_slopes.shape)}")
        slopes = alibi_slopes.float().reshape(-1, H).contiguous()
    learned = any(t is not None and t.requires_grad for t in (attn_mask, slopes)) and torch.is_grad_enabled()
    reason = "the kernels form no gradient of attn_mask or alibi_slopes" if learned else None
    backend = choose_backend(op, query, reason or head_dim_not_covered(max(D, D_v)))
    rng = draw_state(query, dropout_p, True)
    if learned:
        core = core_of(scale, "ieee", left, right, attn_mask, slopes, rng, dropout_p)
        out = eager.attention_composite(query, key, value, core)
    else:
        fused = fused_core(
            backend, query, query.dtype, query.shape, key.shape, left, right, scale, attn_mask, slopes, rng
        )  # fmt: skip
        statics = (float(dropout_p), float(scale), left, right, 0, 0, backend, matmul_precision(query), fused)
        out = _apply(statics, query, key, value, attn_mask, slopes, rng, None, None)
    out = out[..., :D_v] if D_v != D else out
    return out if dims == 4 else out.unflatten(0, batch) if dims > 4 else out.reshape(out.shape[4 - dims :])


def attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(o, p): scaled_dot_product_attention and the weights it applies, softmax and dropout done, for inspection.

    query [B, H, Sq, D], key and value [B, H, Sk, D] of one dtype -> o [B, H, Sq, D], p [B, H, Sq, Sk].
    In PyTorch ops, whose backward keeps p: no kernel returns it.
    """
    if autocast_dtype(query) is not None:  # Dynamo traces torch.autocast, not the guard that the ops' bodies run under
        with torch.autocast(query.device.type, enabled=False):
            return attention_with_weights(query, key, value, attn_mask, dropout_p)
    op = "attention_with_weights"
    check_probability(op, dropout_p)
    scale = query.shape[-1] ** -0.5
    mask = None if attn_mask is None else as_mask(op, attn_mask, query, key.shape[2])
    choose_backend(op, query, "the kernels do not return the weights: pass need_weights=False")
    rng = draw_state(query, dropout_p, True)
    core = core_of(scale, "ieee", None, None, mask, None, rng, dropout_p)
    weights = eager.attention_weights(query, key, core).to(query.dtype)
    return torch.matmul(weights, value), weights


def _to_four_dims(dims, query, key, value, attn_mask):
    """Fewer dimensions gain leading ones; of more than 4 the batch dimensions become one, and come back as the last result."""
    least = 3 if dims > 4 else 4
    query, key, value = (
        t.reshape((1,) * (least - t.dim()) + tuple(t.shape)) if t.dim() < least else t for t in (query, key, value)
    )
    if dims <= 4:
        return query, key, value, attn_mask, None
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if attn_mask is not None and attn_mask.dim() > 3:
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
    return *(t.expand(*batch, *t.shape[-3:]).flatten(0, -4) for t in (query, key, value)), attn_mask, batch


def _broadcast(op, query, key, value, enable_gqa):
    """One batch size; without enable_gqa also one number of heads, or one for both key and value."""
    B = query.shape[0]  # in no set: that would make torch.compile take every size for a constant
    for t in (key, value):
        B = t.shape[0] if B == 1 else B
    if any(t.shape[0] != B and t.shape[0] != 1 for t in (query, key, value)):
        raise ShapeError(
            f"{op}: batch sizes must be equal or 1, but are {query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
        )
    query, key, value = (t if t.shape[0] == B else t.expand(B, -1, -1, -1) for t in (query, key, value))
    if enable_gqa:
        return query, key, value
    H = max(t.shape[1] for t in (query, key, value))
    query = query if query.shape[1] != 1 else query.expand(-1, H, -1, -1)
    if key.shape[1] != value.shape[1]:
        key, value = (t if t.shape[1] != 1 else t.expand(-1, H, -1, -1) for t in (key, value))
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
    """Attention within sequences of different lengths, packed without padding (torch.nn.attention.varlen.varlen_attn).

    query [T_q, H, D], key and value [T_k, H_kv, D] -> [T_q, H, D]; cu_seq_q, cu_seq_k int32 [N + 1]: sequence n has the
    rows cu_seq[n] .. cu_seq[n + 1] - 1; max_q, max_k: the longest sequence's length (no read-back from the device). Rows in
    no sequence, and those of a sequence beyond max_q or max_k, are not seen; they give zeros and zero gradients.
    is_causal is window_size (-1, 0), (left, right) as in scaled_dot_product_attention, but aligned bottom-right as torch's
    varlen_attn has it: the last query of a sequence sees its last key.
    Kept for backward: q, k, v, the output, and the logsumexp. No paged caches (torch's cu_seq_k=None, block_table).
    Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (window_size),
    RuntimeError (backend).
    """
    op = "varlen_attn"
    query, key, value = _cast_qkv(op, query, key, value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ShapeError(f"{op}: {name} must be [tokens, heads, head_dim], but has shape {tuple(tensor.shape)}")
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
    scale = 1.0 / math.sqrt(D) if scale is None and D else 1.0 if scale is None else scale
    backend = choose_backend(op, query, head_dim_not_covered(D))
    statics = (0.0, float(scale), left, right, max_q, max_k, backend, matmul_precision(query), "")
    packed = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    return _apply(statics, *packed, None, None, None, cu_seq_q, cu_seq_k).squeeze(0).transpose(0, 1)
