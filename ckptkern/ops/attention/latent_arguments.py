"""The arguments of latent_attention_block, checked one by one, as the tensors and options of its sublayer."""

from __future__ import annotations

from torch import Tensor

from ...errors import ShapeError
from ..dispatch.checks import check_count, check_number, check_weight
from ..dispatch.choices import choose_backend, compute_dtype, head_dim_not_covered
from ..sublayer.lora import NO_UPDATES
from ..sublayer.residual import around, check_norm
from .arguments import check_hidden, check_scores
from .core import check_whole_sequence, fused_core
from .latent_tensors import LatentOptions, LatentSizes, LatentTensors
from .rotary import check_rotary
from .tensors import batch_and_rows


def check_latents(
    op: str, x: Tensor, H: int, q_a: tuple, q: tuple, kv_a: tuple, kv_b: tuple, out_weight: Tensor
) -> LatentSizes:
    """The sizes of a head and of the latents, from the weights; q_a, q, kv_a, kv_b: (weight, bias, weight of the norm)."""
    features = x.shape[-1]
    for name, (weight, bias, _) in (("q_a_weight", q_a), ("kv_a_weight", kv_a)):
        if weight is not None:
            check_weight(op, name, weight, bias, x, features, "input")
    if q_a[0] is None and (q_a[1] is not None or q_a[2] is not None):
        raise ValueError(f"{op}: q_a_bias and q_a_norm_weight need q_a_weight")
    q_rank = 0 if q_a[0] is None else q_a[0].shape[0]
    check_weight(op, "q_weight", q[0], q[1], x, q_rank or features, "q_a_weight" if q_rank else "input")
    kv_rank, width = (w.shape[1] if isinstance(w, Tensor) and w.dim() == 2 else 0 for w in (kv_b[0], out_weight))
    check_weight(op, "kv_b_weight", kv_b[0], kv_b[1], x, kv_rank, "kv_a_weight")
    check_weight(op, "out_weight", out_weight, None, x, width, "core attention")
    check_norm(op, x, "q_a_norm", None if q_a[2] is None else "rms", q_a[2], None, q_rank)
    check_norm(op, x, "kv_a_norm", None if kv_a[2] is None else "rms", kv_a[2], None, kv_rank)
    v, rope = out_weight.shape[1] // H, kv_a[0].shape[0] - kv_rank
    nope = kv_b[0].shape[0] // H - v
    fits = q[0].shape[0] == H * (nope + rope) and kv_b[0].shape[0] == H * (nope + v) and out_weight.shape[1] == H * v
    if not fits or nope < 0 or rope < 0:
        raise ShapeError(
            f"{op}: for {H} heads of D_n + D_r dimensions and values of D_v, weights must be q_weight [H (D_n + D_r), .], "
            f"kv_a_weight [r + D_r, d], kv_b_weight [H (D_n + D_v), r] and out_weight [e, H D_v], but have shapes "
            f"{', '.join(str(tuple(w.shape)) for w in (q[0], kv_a[0], kv_b[0], out_weight))}"
        )
    return LatentSizes(H, nope, rope, v, q_rank, kv_rank)


def gather_latent(
    op,
    x,
    q_weight,
    kv_a_weight,
    kv_b_weight,
    out_weight,
    num_heads,
    *,
    q_bias,
    q_a_weight,
    q_a_bias,
    q_a_norm_weight,
    kv_a_bias,
    kv_a_norm_weight,
    kv_b_bias,
    out_bias,
    latent_norm_eps,
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
) -> tuple[LatentTensors, LatentOptions]:
    """Checks all arguments of latent_attention_block; returns the sublayer's tensors, still without random states, and its
    options."""
    check_whole_sequence(op)
    softcap = check_scores(
        op,
        x,
        others["recompute"],
        dropout_p,
        scale,
        softcap,
        "[B, S, d] or [S, d]",
        rotary_interleaved=rotary_interleaved,
        is_causal=is_causal,
        mask_is_exclusion=mask_is_exclusion,
    )
    check_number(op, "latent_norm_eps", latent_norm_eps)
    check_count(op, "num_heads", num_heads)
    (B, S), H = batch_and_rows(x), num_heads
    sizes = check_latents(
        op,
        x,
        H,
        (q_a_weight, q_a_bias, q_a_norm_weight),
        (q_weight, q_bias, None),
        (kv_a_weight, kv_a_bias, kv_a_norm_weight),
        (kv_b_weight, kv_b_bias, None),
        out_weight,
    )
    check_weight(op, "out_weight", out_weight, out_bias, x, H * sizes.v, "core attention")
    probe = x.new_empty(0, dtype=compute_dtype(op, x, q_weight, kv_a_weight, kv_b_weight, out_weight, q_a_weight))
    tensors, options = around(op, x, probe, "out_weight", out_weight.shape[0], NO_UPDATES, **others)
    cos, sin, theta = check_rotary(op, x, rotary, B, S, sizes.rope)
    mask, padding, left, right = check_hidden(op, x, H, S, attn_mask, key_padding_mask, window_size, is_causal)
    scale = float(max(sizes.qk, 1) ** -0.5 if scale is None else scale)
    backend = choose_backend(op, probe, head_dim_not_covered(sizes.D))
    shape = (B, H, S, sizes.D)
    fused = fused_core(
        backend,
        x,
        probe.dtype,
        options["precision"],
        shape,
        shape,
        left,
        right,
        scale,
        "dropout" if others["training"] and dropout_p > 0.0 else None,
        softcap or None,
        masks=(mask, padding),
    )
    t = LatentTensors(
        wqa=q_a_weight,
        bqa=q_a_bias,
        q_a_norm=q_a_norm_weight,
        wq=q_weight,
        bq=q_bias,
        wkva=kv_a_weight,
        bkva=kv_a_bias,
        kv_a_norm=kv_a_norm_weight,
        wkvb=kv_b_weight,
        bkvb=kv_b_bias,
        wo=out_weight,
        bo=out_bias,
        cos=cos,
        sin=sin,
        mask=mask,
        padding=padding,
        **tensors,
    )
    o = LatentOptions(
        num_heads=H,
        latent_norm_eps=float(latent_norm_eps),
        theta=theta,
        interleaved=rotary_interleaved,
        mask_is_exclusion=mask_is_exclusion,
        left=left,
        right=right,
        scale=scale,
        softcap=softcap,
        dropout_p=float(dropout_p),
        backend=backend,
        fused=fused,
        **options,
    )
    return t, o
