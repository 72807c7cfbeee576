"""Defines latent_attention_block: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) and what is
around it, as one region."""

from __future__ import annotations

from torch import Tensor

from ...errors import ShapeError
from ..dispatch.choices import Bytes, check_count, check_number, check_weight, compute_dtype
from ..dispatch.shard import refuse_shard
from ..registration.functions import build
from ..sublayer.lora import NO_UPDATES
from ..sublayer.residual import called, check_norm
from .arguments import around_core, check_scores
from .core import check_whole_sequence
from .core_sublayer import CoreOp, constants_of
from .latent_sublayer import LatentOptions, LatentSizes, LatentSublayer, LatentTensors


class LatentAttentionBlock(CoreOp):
    name = "latent_attention_block"
    Tensors, Options, Sublayer = LatentTensors, LatentOptions, LatentSublayer
    constants = constants_of(LatentTensors)


_apply = build(LatentAttentionBlock)


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
    **others,
) -> tuple[LatentTensors, LatentOptions]:
    """Checks all arguments of latent_attention_block; returns the sublayer's tensors, without random states, and its
    options."""
    refuse_shard("latent_attention_block has no form for several ranks")
    check_whole_sequence(op)
    check_scores(op, x, "[B, S, d] or [S, d]", **others)
    check_number(op, "latent_norm_eps", latent_norm_eps)
    check_count(op, "num_heads", num_heads)
    for name, weight, bias in (("q_a_weight", q_a_weight, q_a_bias), ("kv_a_weight", kv_a_weight, kv_a_bias)):
        if weight is not None:
            check_weight(op, name, weight, bias, x, x.shape[-1], "input")
    if q_a_weight is None and (q_a_bias is not None or q_a_norm_weight is not None):
        raise ValueError(f"{op}: q_a_bias and q_a_norm_weight need q_a_weight")
    of_q = (x.shape[-1], "input") if q_a_weight is None else (q_a_weight.shape[0], "q_a_weight")
    check_weight(op, "q_weight", q_weight, q_bias, x, *of_q)
    kv_rank, width = (w.shape[1] if isinstance(w, Tensor) and w.dim() == 2 else 0 for w in (kv_b_weight, out_weight))
    check_weight(op, "kv_b_weight", kv_b_weight, kv_b_bias, x, kv_rank, "kv_a_weight")
    check_weight(op, "out_weight", out_weight, out_bias, x, width, "core attention")
    for name, weight, rank in (("q_a_norm", q_a_norm_weight, of_q[0]), ("kv_a_norm", kv_a_norm_weight, kv_rank)):
        check_norm(op, x, name, None if weight is None else "rms", weight, None, rank)
    own = (q_a_weight, q_a_bias, q_a_norm_weight, q_weight, q_bias, kv_a_weight, kv_a_bias, kv_a_norm_weight)
    own = dict(zip(LatentTensors.own, (*own, kv_b_weight, kv_b_bias, out_weight, out_bias), strict=True))
    H, v, q_rank = num_heads, width // num_heads, 0 if q_a_weight is None else of_q[0]
    nope = kv_b_weight.shape[0] // H - v
    sizes = LatentSizes(H, nope, kv_a_weight.shape[0] - kv_rank, v, q_rank, kv_rank)
    shapes = [tuple(w.shape) for w in (q_weight, kv_a_weight, kv_b_weight, out_weight)]
    fits = shapes[0][0] == H * sizes.qk and shapes[2][0] == H * (nope + v) and width == H * v
    if not fits or nope < 0 or sizes.rope < 0:
        raise ShapeError(
            f"{op}: for {H} heads of D_n + D_r dimensions and values of D_v, weights must be q_weight [H (D_n + D_r), .], "
            f"kv_a_weight [r + D_r, d], kv_b_weight [H (D_n + D_v), r] and out_weight [e, H D_v], but have shapes "
            f"{', '.join(map(str, shapes))}"
        )
    probe = x.new_empty(0, dtype=compute_dtype(op, x, q_weight, kv_a_weight, kv_b_weight, out_weight, q_a_weight))
    dims = sizes.D, sizes.qk, sizes.rope
    tensors, options = around_core(op, x, probe, NO_UPDATES, out_weight.shape[0], H, H, *dims, **others)
    options["latent_norm_eps"] = float(latent_norm_eps)
    return LatentTensors(**own, **tensors), LatentOptions(**options)


@called(gather_latent, _apply)
def latent_attention_block(
    x: Tensor,
    q_weight: Tensor,
    kv_a_weight: Tensor,
    kv_b_weight: Tensor,
    out_weight: Tensor,
    num_heads: int,
    *,
    q_bias: Tensor | None = None,
    q_a_weight: Tensor | None = None,
    q_a_bias: Tensor | None = None,
    q_a_norm_weight: Tensor | None = None,
    kv_a_bias: Tensor | None = None,
    kv_a_norm_weight: Tensor | None = None,
    kv_b_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    latent_norm_eps: float = 1e-6,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_scale: Tensor | None = None,
    norm_shift: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    post_norm: str | None = None,
    post_norm_weight: Tensor | None = None,
    post_norm_bias: Tensor | None = None,
    post_norm_eps: float = 1e-5,
    rotary: tuple[Tensor, Tensor] | float | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    mask_is_exclusion: bool = False,
    key_padding_mask: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    layer_scale: float | Tensor | None = None,
    resid_dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    residual: bool = False,
    training: bool = True,
    recompute: str = "selective",
    workspace: Bytes = None,
) -> Tensor:
    """Computes a sublayer of multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1) as one region.

        q = q_a_norm(h Wqa^T) Wq^T or h Wq^T;  [c | r] = h Wkva^T;  [k | v] = kv_a_norm(c) Wkvb^T
        o = attention([q_n | rotary(q_r)], [k | rotary(r)], v);  f = o Wo^T + b;  h and y as in mlp_block

    x [B, S, d] or [S, d] -> y [..., e]. A head of q is [q_n | q_r], of D_n and D_r dimensions; all heads share r.

        q_a_weight [r_q, d] or None, q_weight [H (D_n + D_r), r_q or d], kv_a_weight [r + D_r, d]
        kv_b_weight [H (D_n + D_v), r], rows of k, then of v, for each head; out_weight [e, H D_v]

    latent_norm_eps: of the latents' RMS norms, which a weight of None leaves out.
    rotary: see attention_block; R <= D_r. DeepSeek's models are rotary_interleaved.
    scale: (D_n + D_r)^-0.5 by default; YaRN multiplies this by mscale^2.

    Other arguments: see attention_block. ckptkern.parallel does not shard this function.

    recompute: what is saved besides x, masks and tables:

        "none"       o, lse, the latents, rotary(r), q, and k and v of each head
        "selective"  o, lse: core attention is not recomputed
        "full"       nothing

    workspace: for groups of heads, beside the latents of all tokens.
    Raises: see Conventions.
    """
