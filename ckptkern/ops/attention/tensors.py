"""Defines an attention sublayer's tensors, options and projections, and the groups of heads in which its transient tensors
fit the workspace."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..registration.op import Chunks, row_count, token_chunks, with_fields
from ..sublayer.lora import updates_of
from ..sublayer.residual import AroundTensors, RandomStates, SublayerOptions
from .context import Context
from .core import CoreOptions


class PositionTensors(NamedTuple):
    """Holds the rotary tables and the masks; only mask may be trained. padding: key_padding_mask [B, S_k], or a second
    attn_mask, with four dimensions."""

    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    padding: Tensor | None


class HeadsOptions(NamedTuple):
    """Holds the options that both kinds of attention share, besides those of core attention. theta: the base of rotary
    tables made here, 0 for none; context: the context-parallel group of a split sequence."""

    num_heads: int
    theta: float
    interleaved: bool
    mask_is_exclusion: bool
    context: Context | None


LAYERS = ("q", "k", "v", "o")  # with low-rank updates


@with_fields(AroundTensors, ..., PositionTensors, updates_of(LAYERS), RandomStates)
class AttentionTensors(NamedTuple):
    """Holds the tensors of an attention sublayer. wq is the packed q, k, v weight where wk and wv are None; biases alike.

    key_value: the source of k and v in cross-attention, else None.
    q_norm, k_norm: weights [D], [heads, D] (a row for each head), or [heads D] (a norm over all heads).
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
    sinks: Tensor | None
    wg: Tensor | None
    bg: Tensor | None
    slopes: Tensor | None
    cu: Tensor | None


@with_fields(CoreOptions, HeadsOptions, ..., SublayerOptions)
class AttentionOptions(NamedTuple):
    """Holds the sublayer's other options. lora: of q, k, v and o; workspace: bytes for a group of heads, the core's blocks
    of queries included; first_plane, planes: the place of a shard's heads."""

    num_kv_heads: int
    qkv_layout: str
    gate_in_query: bool
    qk_norm: str
    qk_norm_eps: float

    projected = ("qkv",)  # names of what the core reads


def batch_and_rows(x: Tensor) -> tuple[int, int]:
    """Returns (B, S) of x [B, S, d] or [S, d]."""
    return (x.shape[0] if x.dim() == 3 else 1), x.shape[-2]


class Projection(NamedTuple):
    """A matmul with a weight or with some of its rows. letter: names the weight and bias, as "q" names wq and bq; rows: the
    weight's rows, None for all."""

    letter: str
    weight: Tensor
    bias: Tensor | None
    of_key_value: bool
    rows: slice | None = None


def over_all_heads(weight: Tensor | None, D: int) -> bool:
    """Returns whether this is the weight of a norm over all heads at once."""
    return weight is not None and weight.dim() == 1 and weight.shape[0] != D


# -- groups of heads ---------------------------------------------------------------------------------------------------


class Division(NamedTuple):
    """The division of a sublayer into equal groups of heads, and of h into chunks [start, stop) of rows. One chunk is held
    across groups; several are computed again in each group."""

    groups: int
    chunks: Chunks


def part_of(n: int, index: int, count: int, unit: int = 1) -> slice:
    """Returns the part of group `index` of `count` in n rows or heads, at least a unit, which several groups may share."""
    first = n * index // count // unit * unit
    return slice(first, first + max(n // count, unit))


def division(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> Division:
    """Returns the fewest groups that each fit the workspace, for x [tokens, d], at most one for each query head. More groups
    than kv heads share these.

    If h does not fit beside one kv head, it is computed in chunks. A norm over all heads needs one group. Without a
    workspace there is one group and one chunk, so no comparison depends on symbolic sizes.
    """
    (rows, d), whole = x.shape, [(0, x.shape[0])]
    if o.workspace is None:
        return Division(1, whole)
    D, size, width = t.wo.shape[1] // o.num_heads, o.dtype.itemsize, t.wo.shape[1]
    h, df = bytes_around(x, t, o)
    # besides h: in forward o, if it is not saved, and the gated o; in backward the gradients of h and of the branch's
    # result, unless these are the gradients of x and y
    dh = 4 * d if size < 4 else d * size if x.dtype != o.dtype else 0
    held = (o.recompute == "full") + (t.wg is not None or o.gate_in_query)
    others = rows * max(held * width * size, df + dh)
    # the core's blocks of queries, a rank's rows by all columns, take the other half
    room = o.workspace // 2 if o.context is not None and o.backend == "eager" else o.workspace
    if bytes_of_heads(rows, t, o) + rows * h + others <= room:
        return Division(1, whole)
    all_heads = over_all_heads(t.q_norm, D) or over_all_heads(t.k_norm, D)
    drops = t.lora_rng is not None and t.o_lora_a is not None
    apart = o.qkv_layout == "heads" or o.context is not None or (t.k_norm is not None and t.k_norm.dim() == 2)
    counts = []
    for n in range(1, 2 if all_heads else (o.num_kv_heads if apart else o.num_heads) + 1):
        spread = o.context is None or o.context.exchange != "heads" or o.num_kv_heads // n % o.context.size == 0
        # kernels draw masks of 32 n columns, also for the output's low-rank update
        drawn = n == 1 or not drops or o.backend == "eager" or o.num_heads // n * D % 32 == 0
        is_equal = o.num_kv_heads % n == 0 or (n % o.num_kv_heads == 0 and o.num_heads % n == 0)
        if is_equal and spread and drawn:
            counts.append(n)
    chunks = token_chunks(rows, h * 4, o.workspace // 4)  # besides a norm's transient tensors
    for beside, rows_of_h in ((rows * h + others, whole), (others, chunks)):
        for n in counts:
            if bytes_of_heads(rows, t, o, n) <= room - beside:
                return Division(n, rows_of_h)
    return Division(counts[-1], chunks)


def bytes_around(x: Tensor, t: Any, o: Any) -> tuple[int, int]:
    """Returns (h, df): bytes per row of h and of the gradients of the branch's result, as far as they are not x, y or their
    gradients."""
    d, e, size, cast, trailing = (
        x.shape[1],
        t.wo.shape[0],
        o.dtype.itemsize,
        x.dtype != o.dtype,
        bool(o.norm) and not o.norm_first,
    )
    h = d * size if cast or (o.norm and o.norm_first) else 0
    changed = (
        cast or trailing or o.resid_p or o.path_p or o.post_norm or o.branch_factor != 1.0 or t.layer_scale is not None
    )
    return h, e * (size if changed else 0) + e * (x.itemsize if trailing else 0)


def bytes_of_heads(rows: int, t: AttentionTensors, o: AttentionOptions, groups: int = 1) -> int:
    """Returns the transient bytes of a group of heads, in the pass that needs more.

    Both passes hold q, k, v, the gate and its sigmoid, o, and rotated copies of q and k if they are not rotated in place.
    Backward adds do, dq, dk, dv, the gate's gradient, a joint buffer if the projections need one, and temporaries of
    PyTorch ops.
    """
    D, size, eagerly = t.wo.shape[1] // o.num_heads, o.dtype.itemsize, o.backend == "eager"
    key_value_rows = rows if t.key_value is None else row_count(t.key_value)
    H, H_kv = o.num_heads // groups, max(o.num_kv_heads // groups, 1)
    q, kv = rows * H * D, key_value_rows * H_kv * D
    gate = q if o.gate_in_query else 0 if t.wg is None else rows * t.wg.shape[0] // groups
    qkv = q + gate + 2 * kv
    raw = 0 if o.recompute == "none" else qkv
    copies = q + kv if t.q_norm is not None or o.recompute == "none" or o.fused else 0
    # torch's attention on a CPU and memory-efficient attention repeat k and v for the heads of q, and sum their gradients;
    # flash attention sums these too, and dq in float32
    of_queries = 2 * kv // H_kv * H if H_kv != H else 0
    repeated = of_queries if eagerly or o.fused == "efficient" else 0
    grads = q + 2 * kv + (of_queries + 4 * q // size if o.fused == "flash" else repeated)
    core = raw + copies + repeated + 3 * q + grads + 2 * gate
    rotated = (raw if t.q_norm is not None else 0) + 2 * qkv + gate
    temporaries = 0 if not eagerly else (6 if t.q_norm is not None else 4) * q * max(size, 4)
    copied = 4 * q if eagerly and size < 4 else 0  # a CPU has no float32 matmul of 16-bit operands
    if o.context is not None and o.context.exchange == "gather":
        # k and v: sent, of all ranks, copied in order, and the float32 sums of their gradients twice
        core += 2 * kv + o.context.size * kv * (4 + 4 * (max(4, size) // size))
    elif o.context is not None:  # this rank's heads q, k, v, do and o, sent and arrived
        core += 3 * (3 * q + 2 * kv)
    of_rows = (3 if t.sinks is None else 5) * 4 * rows * H  # lse, delta twice; two more with sinks
    of_rows += 8 * kv if groups > o.num_kv_heads else 0  # sums of dk and dv over groups
    return max(core * size, rotated * size + temporaries, rotated * size + copied) + of_rows
