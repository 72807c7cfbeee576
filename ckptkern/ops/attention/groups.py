"""Groups of heads: some key and value heads with the query heads that read them at a time, so that what is transient of an
attention sublayer fits the workspace."""

from __future__ import annotations

from ... import eager
from ..registration.rows import row_count
from .tensors import AttentionOptions, AttentionTensors, head_dim, in_group, over_all_heads


def group_of(
    t: AttentionTensors, o: AttentionOptions, core: eager.AttentionCore, index: int, count: int
) -> tuple[AttentionTensors, AttentionOptions, eager.AttentionCore]:
    """What group `index` of `count` has for its tensors, options and core, those of q's, k's and v's projections apart."""

    def cut(tensor, dim):
        return in_group((tensor,), index, count, dim)[0]

    H = o.num_heads // count
    t = t._replace(wo=cut(t.wo, 1))
    if t.o_lora_a is not None:
        t = t._replace(o_lora_a=cut(t.o_lora_a, 1))
    if t.mask is not None and t.mask.shape[1] > 1:
        t = t._replace(mask=cut(t.mask, 1))
    for name in ("q_norm", "k_norm", "q_norm_bias", "k_norm_bias"):
        weight = getattr(t, name)
        if weight is not None and weight.dim() == 2:
            t = t._replace(**{name: cut(weight, 0)})
    core = core._replace(plane_base=core.plane_base + index * H, planes=core.planes or o.num_heads)
    if core.mask is not None and core.mask.shape[1] > 1:
        core = core._replace(mask=cut(core.mask, 1))
    if core.slopes is not None:
        core = core._replace(slopes=cut(core.slopes, 1).clone())  # at an address as aligned as that of all
    return t, o._replace(num_heads=H, num_kv_heads=o.num_kv_heads // count), core


def group_count(rows: int, t: AttentionTensors, o: AttentionOptions) -> int:
    """The fewest equal groups of kv heads of which each fits the workspace, for `rows` rows of x; at most one for each kv head.

    A norm over all heads takes one group. Without a workspace one, so that no comparison depends on symbolic sizes.
    """
    D = head_dim(t, o)
    if o.workspace is None or over_all_heads(t.q_norm, D) or over_all_heads(t.k_norm, D):
        return 1
    bytes_ = sublayer_bytes(rows, t, o)
    if bytes_ <= o.workspace:
        return 1
    counts = [n for n in range(1, o.num_kv_heads + 1) if o.num_kv_heads % n == 0 and _cuts(n, D, t, o)]
    return next((n for n in counts if bytes_ <= o.workspace * n), counts[-1])


def _cuts(count: int, D: int, t: AttentionTensors, o: AttentionOptions) -> bool:
    """Can o be cut there? Kernels draw masks of 32 n columns, such as that of the output's low-rank update."""
    drops = t.lora_rng is not None and t.o_lora_a is not None
    return count == 1 or not drops or o.backend == "eager" or o.num_heads // count * D % 32 == 0


def sublayer_bytes(rows: int, t: AttentionTensors, o: AttentionOptions) -> int:
    """Of what is transient of all heads in backward: q, k, v and their gradients, before and after rotation, o and do."""
    D = head_dim(t, o)
    key_value_rows = rows if t.key_value is None else row_count(t.key_value)
    q, kv = rows * o.num_heads * D, key_value_rows * o.num_kv_heads * D
    return (3 * (q + 2 * kv) + 2 * q) * o.dtype.itemsize
