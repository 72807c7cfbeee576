"""What an attention sublayer is made of: its tensors, its options, and its projections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.types import IntLikeType

from ..registration.op import with_fields
from ..sublayer.residual import AroundTensors, RandomStates, SublayerOptions
from .context import Context


@with_fields(AroundTensors, ..., RandomStates)
class AttentionTensors(NamedTuple):
    """The tensors of an attention sublayer. wq is the packed q, k, v weight where wk and wv are None; biases alike.

    key_value: what k and v are projected from, None where it is what q is projected from.
    padding: key_padding_mask [B, S_k], or a second attn_mask, which has four dimensions.
    q_norm, k_norm: weights [D], or [heads, D] with a row for each head, or [heads D] of a norm over all heads at once.
    LAYER_lora_a, LAYER_lora_b: low-rank updates (`low_rank`) of wq, wk, wv and wo.
    sinks: [H]. wg: the output gate's weight, [H D, d] or [H, d]; with `gate_in_query` wq has its rows instead.
    """

    key_value: Tensor | None
    wq: Tensor
    wk: Tensor | None
    wv: Tensor | None
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    wo: Tensor
    bo: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_norm_bias: Tensor | None
    k_norm_bias: Tensor | None
    q_lora_a: Tensor | None
    q_lora_b: Tensor | None
    k_lora_a: Tensor | None
    k_lora_b: Tensor | None
    v_lora_a: Tensor | None
    v_lora_b: Tensor | None
    o_lora_a: Tensor | None
    o_lora_b: Tensor | None
    sinks: Tensor | None
    wg: Tensor | None
    bg: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    padding: Tensor | None
    slopes: Tensor | None
    cu: Tensor | None


@with_fields(..., SublayerOptions)
class AttentionOptions(NamedTuple):
    """The sublayer's other arguments. norm, post_norm "" is none; theta: for rotary tables that are made here, 0 for none;
    left, right: visible columns, None for no bound; max_len: the longest packed sequence; first_plane, planes: AttentionCore's,
    where the heads are a shard; context: where the rows are a part of a sequence; lora: scale and dropout_p of the low-rank
    update of each of q, k, v and o; workspace: bytes for a group of heads, and in it for the core's blocks of queries."""

    num_heads: int
    num_kv_heads: int
    qkv_layout: str
    gate_in_query: bool
    qk_norm: str
    qk_norm_eps: float
    theta: float
    interleaved: bool
    mask_is_exclusion: bool
    left: IntLikeType | None
    right: IntLikeType | None
    max_len: IntLikeType
    scale: float
    softcap: float
    dropout_p: float
    first_plane: int
    planes: int
    backend: str
    fused: str
    context: Context | None


LAYERS = ("q", "k", "v", "o")  # that a low-rank update may be of


def batch_and_rows(x: Tensor) -> tuple[int, int]:
    """(B, S) of x [B, S, d] or [S, d]."""
    return (x.shape[0] if x.dim() == 3 else 1), x.shape[-2]


def head_dim(t: AttentionTensors, o: AttentionOptions) -> int:
    return t.wo.shape[1] // o.num_heads


def has_gate(t: AttentionTensors, o: AttentionOptions) -> bool:
    """Is o multiplied by the sigmoid of a projection?"""
    return t.wg is not None or o.gate_in_query


def query_columns(t: AttentionTensors, o: AttentionOptions) -> int:
    """Returns the columns of the projection of q, which may have the gate's, too."""
    return t.wo.shape[1] * (2 if o.gate_in_query else 1)


def gate_columns(t: AttentionTensors) -> int:
    """Returns the columns of a projection of the gate alone."""
    return 0 if t.wg is None else t.wg.shape[0]


class Projection(NamedTuple):
    """A matmul with a weight, or with the rows of one: letter names it, as "q" names wq and bq. rows: those, if not all."""

    letter: str
    weight: Tensor
    bias: Tensor | None
    of_key_value: bool
    rows: slice | None = None


def projections(t: AttentionTensors, o: AttentionOptions, index: int = 0, count: int = 1) -> list[Projection]:
    """Those of q, k and v, or of what is packed, and of a gate; of the heads of group `index` of `count`.

    A packed weight has rows for x and rows for key_value, if there is one.
    """
    crosses, D = t.key_value is not None, head_dim(t, o)
    q, kv = query_columns(t, o), o.num_kv_heads * D
    if t.wk is not None:
        blocks = [("q", 0, q, False), ("k", 0, kv, crosses), ("v", 0, kv, crosses)]
    elif o.qkv_layout == "heads" or (count == 1 and not crosses):
        blocks = [("q", 0, q + 2 * kv, False)]
    elif count == 1:
        blocks = [("q", 0, q, False), ("q", q, 2 * kv, True)]
    else:
        blocks = [("q", 0, q, False), ("q", q, kv, crosses), ("q", q + kv, kv, crosses)]
    if t.wg is not None:
        blocks.append(("g", 0, t.wg.shape[0], False))
    made = []
    for letter, start, width, of_key_value in blocks:
        weight, bias = getattr(t, f"w{letter}"), getattr(t, f"b{letter}")
        if count == 1 and width == weight.shape[0]:
            made.append(Projection(letter, weight, bias, of_key_value))
            continue
        rows = part_of(slice(start, start + width), index, count)
        made.append(Projection(letter, weight[rows], None if bias is None else bias[rows], of_key_value, rows))
    return made


def out_projection(t: AttentionTensors) -> Projection:
    return Projection("o", t.wo, t.bo, False)


def key_rows(S: int, t: AttentionTensors) -> int:
    """S_k of k and v [B, H_kv, S_k, D], for S rows of x."""
    return S if t.key_value is None else t.key_value.shape[-2]


def projected_shape(B: int, S: int, t: AttentionTensors, o: AttentionOptions) -> tuple[int]:
    """Returns the shape of the projections' buffer, a block of rows for each: [B S (H D + gate) + B S_k 2 H_kv D]."""
    own, kv = query_columns(t, o) + gate_columns(t), 2 * o.num_kv_heads * head_dim(t, o)
    return (B * (S * own + key_rows(S, t) * kv),)


def part_of(whole: slice, index: int, count: int) -> slice:
    """Part `index` of `count` equal ones."""
    size = (whole.stop - whole.start) // count
    return slice(whole.start + index * size, whole.start + (index + 1) * size)


def split_heads(qkv: Tensor, o: AttentionOptions, D: int, index: int = 0, count: int = 1) -> tuple[Tensor, ...]:
    """q, k and v [B, S, heads, D] of qkv [B, S, (H + 2 H_kv) D + gate]; of the heads of group `index` of `count`.

    Views, except q where several heads of q lie before each of several heads of k: no one stride leads from head to head.
    """
    H, H_kv = o.num_heads, o.num_kv_heads
    if o.qkv_layout == "qkv":
        q, rest = split_query(qkv, o, D)
        return in_group((q, *rest[..., : 2 * H_kv * D].unflatten(-1, (2 * H_kv, D)).split(H_kv, 2)), index, count)
    heads = qkv[..., : (H + 2 * H_kv) * D].unflatten(-1, (H_kv, H // H_kv + 2, D))
    q, k, v = heads[:, :, part_of(slice(0, H_kv), index, count)].split([H // H_kv, 1, 1], 3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def split_query(rows: Tensor, o: AttentionOptions, D: int) -> tuple[Tensor, Tensor]:
    """(q [B, S, H, D], the columns behind q's projection) of rows [B, S, ...] that begin with it."""
    width = o.num_heads * D
    if o.gate_in_query:
        return rows[..., : 2 * width].unflatten(-1, (o.num_heads, 2, D))[..., 0, :], rows[..., 2 * width :]
    return rows[..., :width].unflatten(-1, (o.num_heads, D)), rows[..., width:]


def split_gate(rows: Tensor, t: AttentionTensors, o: AttentionOptions, index: int = 0, count: int = 1) -> Tensor | None:
    """The gate [B, S, heads, D or 1], if there is one, of rows [B, S, ...] that begin with q's projection or end with the
    gate's; of the heads of group `index` of `count`."""
    H = o.num_heads
    if o.gate_in_query:
        gate = rows[..., : query_columns(t, o)].unflatten(-1, (H, 2, head_dim(t, o)))[..., 1, :]
    elif t.wg is not None:
        gate = rows[..., rows.shape[-1] - gate_columns(t) :].unflatten(-1, (H, gate_columns(t) // H))
    else:
        return None
    return in_group((gate,), index, count)[0]


def in_group(parts: Iterable[Tensor], index: int, count: int, dim: int = 2) -> tuple[Tensor, ...]:
    """The heads of group `index` of `count`, which are along `dim` of each tensor."""
    if count == 1:
        return tuple(parts)
    return tuple(one.narrow(dim, one.shape[dim] // count * index, one.shape[dim] // count) for one in parts)


def over_all_heads(weight: Tensor | None, D: int) -> bool:
    """Is this the weight of a norm over all heads at once?"""
    return weight is not None and weight.dim() == 1 and weight.shape[0] != D
