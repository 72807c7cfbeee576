"""Defines latent_attention_block: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) and what is around
it, as one region."""

from __future__ import annotations

from torch import Tensor

from ..dispatch.shard import refuse_shard
from ..registration.functions import build
from ..sublayer.residual import drawn
from .core_sublayer import CoreOp, constants_of
from .latent_arguments import gather_latent
from .latent_sublayer import LatentSublayer, latent_reference
from .latent_tensors import LatentOptions, LatentTensors


class LatentAttentionBlock(CoreOp):
    name = "latent_attention_block"
    Tensors, Options, Sublayer = LatentTensors, LatentOptions, LatentSublayer
    constants = constants_of(LatentTensors)
    projected = ("latents", "q", "kv")
    in_torch_ops = staticmethod(latent_reference)


_apply = build(LatentAttentionBlock)


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
    workspace: int | str | None = None,
) -> Tensor:
    """Computes multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1) and what is around it, as one
    region.

        h = norm(x);  q = q_a_norm(h Wqa^T) Wq^T, or h Wq^T;  [c | r] = h Wkva^T;  [k | v] = kv_a_norm(c) Wkvb^T
        [q_n | q_r] = q of each head;  q = [q_n | rotary(q_r)];  k = [k of each head | rotary(r) of all]
        o = attention(q, k, v)
        z = drop_path(layer_scale * post_norm(dropout(o Wo^T + b)))
        y = [x +] z                                           norm_first=False: y = norm([x +] z), h = x

    x [B, S, d] or [S, d] -> y of the same leading shape, [..., e]. A head of q and k has D_n + D_r dimensions, of v D_v; c has
    r features, q's latent r_q. Biases are added to the matmuls of the same name.

        q_a_weight [r_q, d], q_a_norm_weight [r_q]      None: q is projected from h
        q_weight [H (D_n + D_r), r_q or d]              of each head D_n rows, then D_r rows that are rotated
        kv_a_weight [r + D_r, d], kv_a_norm_weight [r]  r rows of the latent, then D_r of the part of k that all heads share
        kv_b_weight [H (D_n + D_v), r]                  of each head D_n rows of k, then D_v of v
        out_weight [e, H D_v]

    D_n, D_r, D_v and the ranks follow from these shapes. q_a_norm_weight, kv_a_norm_weight: of RMS norms of the latents, with
    latent_norm_eps; None: no norm. rotary: a pair (cos, sin) [S, R], [1, S, R] or [B, S, R] with R <= D_r even, or a number,
    theta, and rotary_interleaved as in attention_block, with its tables of D_r columns; DeepSeek's models take pairs of
    neighbours, interleaved. scale: default (D_n + D_r)^-0.5; YaRN multiplies it by the square of its mscale. Kernels have one
    head dim: v, or q and k, are filled with zeros up to the larger of D_n + D_r and D_v, in the transient tensors alone.
    norm, post_norm, layer_scale, attn_mask, key_padding_mask, is_causal, window_size, softcap, the dropouts and residual: as in
    attention_block, which has grouped heads, packed sequences, cross-attention and low-rank updates, too.
    recompute: what is saved for backward besides parameters (x itself, not a copy):

        "none"       x, o, lse, the latents and the rotated part of k, q, and k and v of each head
        "selective"  x, o, lse: the core is not run again
        "full"       x: as many matmuls as torch.utils.checkpoint

    o has D_v elements per head and token. workspace: transient bytes (default: by x's device). Heads are computed in the fewest
    equal groups that fit in it, at least one head, beside the latents of all tokens; gradients of latents are summed over
    groups in float32. ckptkern.parallel does not shard it. Raises ShapeError, DtypeError, DeviceError and
    LayoutError of ckptkern.errors, ValueError (choices), RuntimeError (backend).
    """
    arguments = dict(locals())
    refuse_shard("latent_attention_block has no form for several ranks")
    t, o = gather_latent("latent_attention_block", **arguments)
    return _apply(o, x, *drawn(t, o, x, training))
