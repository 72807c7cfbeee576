"""attention_block: [norm ->] q, k, v projections [-> q/k norm] [-> rotary] -> attention -> output projection
and what is around them, as one region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

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
    workspace: int | str | None = None,
) -> Tensor:
    """Self-attention or cross-attention with everything around it, as one region.

        h = norm(x) * (1 + norm_scale) + norm_shift;  q, k, v = h Wqkv^T + b;  q, k = rotary(qk_norm(q, k))
        o = attention(q, k, v);  z = drop_path(layer_scale * post_norm(dropout(o sigmoid(g) Wo^T + bo))), or o without a gate
        y = [x +] z                                           norm_first=False: y = norm([x +] z), h = x

    x [B, S, d], [S, d], or [tokens, d] with cu_seqlens -> y of the same leading shape, [..., e].
    qkv_weight: one tensor [(H + 2 H_kv) D, d], or three (q, k, v); biases alike. out_weight [e, H D].
    key_value [B, S_k, d_k] ([S_k, d_k]): cross-attention, whose k, v = key_value Wkv^T + b, without the norm of x (a decoder
    layer's memory: BART, T5, Whisper, nn.TransformerDecoderLayer). Its masks are [B, H, S, S_k] and [B, S_k]; it takes neither
    rotary, nor cu_seqlens, nor qkv_layout="heads", and k and v have weights of their own if d_k is not d. qkv_layout, of one
    tensor's rows: "qkv", all heads of q, then of k, then of v; or "heads", [H_kv, H / H_kv + 2, D], which is for each head of
    k its heads of q, itself, and its head of v (GPT-NeoX, BLOOM, Falcon).
    norm: None, "layer" or "rms", with norm_weight [d] and norm_bias [d] or None. norm_scale, norm_shift [B, d] or [B, 1, d]: a
    vector for each sample (adaLN: DiT, SD3, Flux) of a norm before the branch, saved for backward as it is, its gradient
    summed over the sample's tokens in float32. post_norm as norm, of what the branch gives (Gemma 2, OLMo 2, Swin v2).
    layer_scale: a number (Granite), a vector [e] (layer scale: CaiT, DINOv2), or one for each sample, [B, e] or [B, 1, e]
    (the gate of adaLN). Backward recomputes what the branch gives for a norm behind it and for trained vectors: by one
    matmul from o. qk_norm: q's and k's weights, or pairs (weight, bias): [D], of one head; [H, D] and [H_kv, D], with a row
    for each head (Cohere); or [H D] and [H_kv D], of a norm over all heads at once (OLMo 2). qk_norm_kind: "rms" or
    "layer". rotary: a pair (cos, sin), each [S, R], [1, S, R] or [B, S, R], R even, of any floating dtype; or a number,
    theta. The first R <= D dimensions of every q and k are rotated in pairs, for i < R/2; the others stay: elements i and i
    + R/2, or with rotary_interleaved (GPT-J) 2i and 2i + 1. A pair's angle stands in both of its columns of the tables.
    ckptkern.nn.rotary_tables makes tables of either kind. Tables that are given are saved for backward, so layers should
    share one pair. A theta stands for rotary_tables(positions, D, theta), with positions 0, 1, ... that start again in each
    packed sequence; these tables are not saved but recomputed in backward. attn_mask: bool (True = keep; with
    mask_is_exclusion True = masked out, as in nn.MultiheadAttention) or additive, broadcastable to [B, H, S, S], or torch's
    CausalBias, which acts as is_causal; key_padding_mask: bool [B, S], True = masked out, or additive. An additive
    attn_mask may be trained (T5's and Swin's biases), a key_padding_mask and alibi_slopes may not. A pair of attn_masks
    both apply, such as a trained bias [1, H, S, S] and a mask [B, 1, S, S]; the first may be trained. The masks are saved
    for backward as they are, so that layers share them. is_causal, window_size, alibi_slopes, softcap, sinks [H]: as in
    scaled_dot_product_attention. g, the output gate (arXiv 2505.06708): h Wg^T + bg of gate_weight [H D, d], or [H, d] for
    one value a head, and gate_bias; or with gate_in_query a part of q's projection, whose weight, the first of three, has
    rows [H, 2, D], q's and the gate's of each head (Qwen3-Next). What the branch gives is recomputed of g, too. cu_seqlens:
    int32 [N + 1]; max_seqlen: the longest of these sequences (default: all tokens). Attention gives zeros for tokens in no
    sequence and for those beyond max_seqlen, and does not see them. dropout_p of the attention weights, resid_dropout_p of
    the branch, drop_path_p of whole samples of the branch (stochastic depth; x [S, d] and [tokens, d] is one sample):
    replayed from 16 bytes each. lora: low-rank updates, a ckptkern.LoRA each, of the layers "q", "k", "v" or "qkv", and
    "out". What passes through them is recomputed in backward, and a frozen weight gets no gradient.
    recompute: what is saved for backward besides parameters (x itself, not a copy):

        "none"       x, q, k, v, g, o, lse
        "selective"  x, o, lse: the core is not run again, o as it is before a gate
        "full"       x: as many matmuls as torch.utils.checkpoint

    and key_value itself, which the layers of a decoder share. workspace: transient bytes (default: by x's device). Heads of k,
    with q's, are computed in the fewest equal groups that fit; a norm of q or k over all heads takes all at once. Raises
    ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (choices), RuntimeError (backend).
    """
