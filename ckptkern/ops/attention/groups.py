"""Groups of heads: some key and value heads with the query heads that read them at a time, so that what is transient of an
attention sublayer fits the workspace."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ... import eager
from ..registration.op import row_count, token_chunks
from ..sublayer.residual import has_trailing_norm
from .tensors import (
    AttentionOptions,
    AttentionTensors,
    gate_columns,
    has_gate,
    head_dim,
    in_group,
    over_all_heads,
    query_columns,
)


def group_of(
    t: AttentionTensors, o: AttentionOptions, core: eager.AttentionCore, index: int, count: int
) -> tuple[AttentionTensors, AttentionOptions, eager.AttentionCore]:
    """Returns what group `index` of `count` has for its tensors, options and core, those of q's, k's and v's projections
    apart."""

    def cut(tensor, dim):
        return in_group((tensor,), index, count, dim)[0]

    H = o.num_heads // count
    dims = {"wo": 1, "wg": 0, "o_lora_a": 1}  # that the heads are along
    if t.mask is not None and t.mask.shape[1] > 1:
        dims["mask"] = 1
    for name in ("q_norm", "k_norm", "q_norm_bias", "k_norm_bias"):
        weight = getattr(t, name)
        if weight is not None and weight.dim() == 2:
            dims[name] = 0
    whole = {name: getattr(t, name) for name in dims}
    t = t._replace(**{name: one if one is None else cut(one, dims[name]) for name, one in whole.items()})
    core = core._replace(plane_base=core.plane_base + index * H, planes=core.planes or o.num_heads)
    if core.mask is not None and core.mask.shape[1] > 1:
        core = core._replace(mask=cut(core.mask, 1))
    if core.sinks is not None:
        core = core._replace(sinks=cut(core.sinks, 1))
    if core.slopes is not None:
        core = core._replace(slopes=cut(core.slopes, 1).clone())  # at an address as aligned as that of all
    return t, o._replace(num_heads=H, num_kv_heads=o.num_kv_heads // count), core


class Division(NamedTuple):
    """How a sublayer is computed: in equal groups of heads, and from h in chunks [start, stop) of its rows; one chunk is held
    from group to group, several are formed again in each."""

    groups: int
    chunks: list[tuple[int, int]]


def division(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> Division:
    """The fewest groups of which each fits the workspace, for x [tokens, d]; at most one for each kv head.

    If h does not fit beside a group of one kv head, it is formed in chunks. A norm over all heads takes one group. Without a
    workspace there is one of both, so that no comparison depends on symbolic sizes.
    """
    D, whole = head_dim(t, o), [(0, x.shape[0])]
    if o.workspace is None:
        return Division(1, whole)
    (h, others), bytes_ = bytes_beside(x, t, o), bytes_of_heads(x.shape[0], t, o)
    # the core's blocks of queries, of a rank's rows by all columns, take the half that they may
    room = o.workspace // 2 if o.context is not None and o.backend == "eager" else o.workspace
    if bytes_ + h + others <= room:
        return Division(1, whole)
    all_heads = over_all_heads(t.q_norm, D) or over_all_heads(t.k_norm, D)
    limit = 1 if all_heads else o.num_kv_heads
    counts = [n for n in range(1, limit + 1) if o.num_kv_heads % n == 0 and _cuts(n, D, t, o)]
    rows = token_chunks(x.shape[0], h * 4 // max(x.shape[0], 1), o.workspace // 4)  # beside what a norm holds
    for beside, chunks in ((h + others, whole), (others, rows)):
        for n in counts:
            if bytes_ <= (room - beside) * n:
                return Division(n, chunks)
    return Division(counts[-1], chunks)


def _cuts(count: int, D: int, t: AttentionTensors, o: AttentionOptions) -> bool:
    """Can o be cut there? Kernels draw masks of 32 n columns, such as that of the output's low-rank update."""
    drops = t.lora_rng is not None and t.o_lora_a is not None
    if o.context is not None and o.context.exchange == "heads" and o.num_kv_heads // count % o.context.size:
        return False
    return count == 1 or not drops or o.backend == "eager" or o.num_heads // count * D % 32 == 0


def bytes_around(x: Tensor, t: Any, o: Any) -> tuple[int, int]:
    """Counts, of a row, what is not x or y or their gradients: (h, the gradients of the branch's result)."""
    d, e, size, cast, trailing = x.shape[1], t.wo.shape[0], o.dtype.itemsize, x.dtype != o.dtype, has_trailing_norm(o)
    h = d * size if cast or (o.norm and o.norm_first) else 0
    changed = (
        cast or trailing or o.resid_p or o.path_p or o.post_norm or o.branch_factor != 1.0 or t.layer_scale is not None
    )
    return h, e * (size if changed else 0) + e * (x.dtype.itemsize if trailing else 0)


def bytes_beside(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> tuple[int, int]:
    """Returns bytes of the transient rows of all heads: (h; in forward o, if it is not saved, and o with a gate, or in backward
    the gradients of h and of the branch's result, as far as they are not those of x and y)."""
    (rows, d), width, size = x.shape, t.wo.shape[1], o.dtype.itemsize
    h, df = bytes_around(x, t, o)
    dh = 4 * d if size < 4 else d * size if x.dtype != o.dtype else 0
    whole = (o.recompute == "full") + has_gate(t, o)
    return rows * h, rows * max(whole * width * size, df + dh)


def bytes_of_heads(rows: int, t: AttentionTensors, o: AttentionOptions) -> int:
    """Returns bytes of what is transient of all heads at once, in the pass that takes more.

    Both form q, k, v, a gate and its sigmoid, rotated copies of q and k if they are not rotated in place, and o. Backward has
    do, dq, dk and dv, the gate's gradient, the buffer of all if they are not what the projections read, and the temporaries of
    PyTorch ops.
    """
    D, size, eagerly = head_dim(t, o), o.dtype.itemsize, o.backend == "eager"
    key_value_rows = rows if t.key_value is None else row_count(t.key_value)
    q, kv = rows * o.num_heads * D, key_value_rows * o.num_kv_heads * D
    qkv = rows * (query_columns(t, o) + gate_columns(t)) + 2 * kv
    gate = 0 if not has_gate(t, o) else q if o.gate_in_query else rows * gate_columns(t)
    raw = 0 if o.recompute == "none" else qkv
    copies = q + kv if t.q_norm is not None or o.recompute == "none" or o.fused else 0
    # torch's attention on a CPU and its memory-efficient one have as many heads of k and v as of q, and sum their gradients;
    # flash attention sums these, too, and dq in float32
    of_queries = 2 * kv // o.num_kv_heads * o.num_heads if o.num_heads != o.num_kv_heads else 0
    repeated = of_queries if eagerly or o.fused == "efficient" else 0
    grads = q + 2 * kv + (of_queries + 4 * q // size if o.fused == "flash" else repeated)
    core = raw + copies + repeated + 3 * q + grads + 2 * gate
    rotated = (raw if t.q_norm is not None else 0) + 2 * qkv + gate
    temporaries = 0 if not eagerly else (6 if t.q_norm is not None else 4) * q * max(size, 4)
    copied = 4 * q if eagerly and size < 4 else 0  # a CPU has no float32 matmul of 16-bit operands
    if o.context is not None:
        core += of_context(q, kv, o)
    of_rows = (3 if t.sinks is None else 5) * 4 * rows * o.num_heads  # lse, and delta twice; what sinks make of them
    return max(core * size, rotated * size + temporaries, rotated * size + copied) + of_rows


def of_context(q: int, kv: int, o: AttentionOptions) -> int:
    """Elements of what comes from other ranks, beside q and kv of this one: k and v of all with what is sent and, in their
    order, copies, and the sums of their gradients in float32 twice; or of this rank's heads q, k, v, do and o, sent and
    arrived."""
    if o.context.exchange == "gather":
        wide = max(4, o.dtype.itemsize) // o.dtype.itemsize
        return 2 * kv + o.context.size * kv * (4 + 4 * wide)
    return 3 * (3 * q + 2 * kv)
