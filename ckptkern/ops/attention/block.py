"""Defines attention_block: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection, and
what is around them, as one region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..dispatch.choices import Bytes
from ..registration.functions import across_ranks, build
from ..sublayer.lora import LoRA
from ..sublayer.residual import called
from .arguments import gather
from .core_sublayer import CoreOp, constants_of
from .sublayer import AttentionSublayer
from .tensors import AttentionOptions, AttentionTensors


class AttentionBlock(CoreOp):
    name = "attention_block"
    Tensors, Options, Sublayer = AttentionTensors, AttentionOptions, AttentionSublayer
    constants = constants_of(AttentionTensors)


_apply = build(AttentionBlock)
across = across_ranks(_apply)


@called(gather, _apply)
def attention_block(
    x: Tensor,
    qkv_weight: Tensor | Sequence[Tensor],
    qkv_bias: Tensor | Sequence[Tensor | None] | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    key_value: Tensor | None = None,
    qkv_layout: str = "qkv",
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
    qk_norm: tuple | None = None,
    qk_norm_kind: str = "rms",
    qk_norm_eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | float | None = None,
    rotary_interleaved: bool = False,
    is_causal: bool = False,
    attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    mask_is_exclusion: bool = False,
    key_padding_mask: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    gate_in_query: bool = False,
    dropout_p: float = 0.0,
    lora: Mapping[str, LoRA] | None = None,
    layer_scale: Tensor | float | None = None,
    resid_dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    residual: bool = False,
    training: bool = True,
    recompute: str = "selective",
    workspace: Bytes = None,
) -> Tensor:
    """Computes a self-attention or cross-attention sublayer as one region.

        q, k, v = h Wqkv^T + b;  o = attention(rotary(qk_norm(q)), rotary(qk_norm(k)), v);  f = [sigmoid(g) *] o Wo^T + bo
        h and y as in mlp_block

    x [B, S, d], [S, d], or [tokens, d] with cu_seqlens -> y [..., e].
    qkv_weight: one tensor [(H + 2 H_kv) D, d], or three (q, k, v); biases alike. out_weight [e, H D].
    qkv_layout: "qkv": rows of q, of k, of v. "heads": [H_kv, H / H_kv + 2, D], rows of q, k and v for each head of k
    (GPT-NeoX, Falcon).
    key_value: [B, S_k, d_k], the source of k and v in cross-attention; excludes rotary, cu_seqlens and "heads".
    qk_norm: weights, or pairs (weight, bias), of q and k: [D]; a row for each head (Cohere); or over all heads, [H D] and
    [H_kv D] (OLMo 2).
    rotary: tables (cos, sin) [S, R] or [B, S, R], R <= D (ckptkern.nn.rotary_tables), which layers should share, or a
    number theta, whose tables are recomputed. Rotates dimensions i, i + R/2, or with rotary_interleaved 2i, 2i + 1.
    attn_mask: bool (True = keep, unless mask_is_exclusion) or additive, broadcastable to [B, H, S, S_k]; a CausalBias; or a
    pair of masks. An additive mask, in a pair the first, may be trained.
    key_padding_mask: bool [B, S_k] (True = masked out) or additive.
    is_causal, window_size, alibi_slopes, scale, softcap, sinks: see scaled_dot_product_attention; slopes are not trained.
    cu_seqlens, max_seqlen: bounds of packed sequences, int32 [N + 1], and the longest length. For tokens outside o is zero.
    gate_weight: [H D, d], or [H, d] for one value per head: the gate g = h Wg^T + bg (arXiv 2505.06708). With gate_in_query
    q's weight has the gate's rows too, [H, 2, D] (Qwen3-Next).
    lora: a LoRA for each of "q", "k", "v" (or "qkv"), "out".

    Norms, layer_scale, dropouts, residual: see mlp_block; dropout_p is of attention weights.

    recompute: what is saved besides x, key_value, masks and tables:

        "none"       q, k, v, g, o, lse
        "selective"  o, lse: core attention is not recomputed
        "full"       nothing

    workspace: for groups of heads; a qk_norm over all heads needs one group.
    Raises: see Conventions.
    """
