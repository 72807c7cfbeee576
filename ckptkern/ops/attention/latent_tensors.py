"""What a sublayer of multi-head latent attention is made of: its tensors, options and sizes, and its groups of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import IntLikeType

from ... import eager
from ..registration.op import with_fields
from ..sublayer.residual import AroundTensors, RandomStates, SublayerOptions
from .groups import bytes_around
from .tensors import in_group, part_of


@with_fields(AroundTensors, ..., RandomStates)
class LatentTensors(NamedTuple):
    """The tensors of a sublayer of multi-head latent attention. wqa, q_a_norm: of q's latent, None where wq reads h itself;
    wkva: of the latent of k and v, and of the rotated part of k; wkvb: of k's other part and of v, from that latent.

    padding: key_padding_mask [B, S], or a second attn_mask, which has four dimensions.
    """

    wqa: Tensor | None
    bqa: Tensor | None
    q_a_norm: Tensor | None
    wq: Tensor
    bq: Tensor | None
    wkva: Tensor
    bkva: Tensor | None
    kv_a_norm: Tensor | None
    wkvb: Tensor
    bkvb: Tensor | None
    wo: Tensor
    bo: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    padding: Tensor | None

    slopes = sinks = cu = None  # what it does not take of attention


@with_fields(..., SublayerOptions)
class LatentOptions(NamedTuple):
    """The sublayer's other arguments, named as those of AttentionOptions. latent_norm_eps: of both latents' norms."""

    num_heads: int
    latent_norm_eps: float
    theta: float
    interleaved: bool
    mask_is_exclusion: bool
    left: IntLikeType | None
    right: IntLikeType | None
    scale: float
    softcap: float
    dropout_p: float
    backend: str
    fused: str

    max_len, first_plane, planes, context = 0, 0, 0, None


class LatentSizes(NamedTuple):
    """H: heads. nope, rope, v: dimensions of a head: of q and k those that no position rotates and those that one does, of v.
    q_rank, kv_rank: of the latents; q_rank is 0 where there is none."""

    H: int
    nope: int
    rope: int
    v: int
    q_rank: int
    kv_rank: int

    @property
    def qk(self) -> int:
        return self.nope + self.rope

    @property
    def D(self) -> int:
        """Returns the head dim of core attention, which has one: the smaller ones are filled with zeros."""
        return max(self.qk, self.v)

    @property
    def latents(self) -> int:
        """Columns of [q's latent | k's and v's | the rotated part of k]."""
        return self.q_rank + self.kv_rank + self.rope


def sizes_of(t: LatentTensors, num_heads: int) -> LatentSizes:
    H, kv_rank = num_heads, t.wkvb.shape[1]
    v = t.wo.shape[1] // H
    q_rank = 0 if t.wqa is None else t.wqa.shape[0]
    return LatentSizes(H, t.wkvb.shape[0] // H - v, t.wkva.shape[0] - kv_rank, v, q_rank, kv_rank)


# -- groups of heads ---------------------------------------------------------------------------------------------------


class LatentGroup(NamedTuple):
    """Some heads: group `index` of `count` equal ones, with their parts of weights and masks. rows_q, rows_kv, columns: of
    these parts in wq, wkvb and wo; None for all heads."""

    index: int
    count: int
    heads: int
    wq: Tensor
    bq: Tensor | None
    wkvb: Tensor
    bkvb: Tensor | None
    wo: Tensor
    rows_q: slice | None
    rows_kv: slice | None
    columns: slice | None
    core: eager.AttentionCore


def latent_group(
    t: LatentTensors, sizes: LatentSizes, core: eager.AttentionCore, index: int, count: int
) -> LatentGroup:
    """Group `index` of `count`, in the core of all heads."""
    if count == 1:
        return LatentGroup(0, 1, sizes.H, t.wq, t.bq, t.wkvb, t.bkvb, t.wo, None, None, None, core)
    rows_q, rows_kv, columns = (
        part_of(slice(0, sizes.H * width), index, count) for width in (sizes.qk, sizes.nope + sizes.v, sizes.v)
    )
    H = sizes.H // count
    core = core._replace(plane_base=index * H, planes=sizes.H)
    if core.mask is not None and core.mask.shape[1] > 1:
        core = core._replace(mask=in_group((core.mask,), index, count, 1)[0])
    bq, bkvb = (b if b is None else b[rows] for b, rows in ((t.bq, rows_q), (t.bkvb, rows_kv)))
    return LatentGroup(
        index, count, H, t.wq[rows_q], bq, t.wkvb[rows_kv], bkvb, t.wo[:, columns], rows_q, rows_kv, columns, core
    )


def latent_groups(x: Tensor, t: LatentTensors, o: LatentOptions) -> int:
    """The fewest equal groups of heads of which each fits the workspace, for x [tokens, d]; at most one for each head.

    Without a workspace there is one, so that no comparison depends on symbolic sizes.
    """
    if o.workspace is None:
        return 1
    sizes = sizes_of(t, o.num_heads)
    of_heads, room = _bytes_of_heads(x.shape[0], sizes, o), o.workspace - _bytes_beside(x, t, sizes, o)
    counts = [n for n in range(1, sizes.H + 1) if sizes.H % n == 0]
    return next((n for n in counts if of_heads <= room * n), counts[-1])


def _bytes_beside(x: Tensor, t: LatentTensors, sizes: LatentSizes, o: LatentOptions) -> int:
    """Returns bytes of the transient rows of all heads: h, the latents before and after their norms, and the larger of
    forward's o, if it is not saved, and of backward's gradients of the branch's result, the latents and h."""
    (rows, d), width, size = x.shape, t.wo.shape[1], o.dtype.itemsize
    h, df = bytes_around(x, t, o)
    held = (0 if sizes.q_rank else h) + (0 if o.recompute == "none" else sizes.latents) * size
    held += (sizes.q_rank * (t.q_a_norm is not None) + sizes.kv_rank * (t.kv_a_norm is not None)) * size
    # sums over groups in float32, of which the largest is copied when it is rounded
    of_latents = max(4, size) * ((sizes.q_rank or d) + sizes.kv_rank + sizes.rope)
    of_latents += size * max(sizes.q_rank or d, sizes.kv_rank) if size < 4 else 0
    return rows * (held + max(width * size if o.recompute == "full" else 0, df + of_latents))


def _bytes_of_heads(rows: int, sizes: LatentSizes, o: LatentOptions) -> int:
    """Returns bytes of what is transient of all heads at once in backward, which takes more than forward: q, k, v, o, do and
    the gradients of the first three as the core reads them, of which kv and q are not if they were saved and o is not without
    zeros; then the gradients of q and kv beside those, and the temporaries of PyTorch ops."""
    size, eagerly, D, kv = o.dtype.itemsize, o.backend == "eager", sizes.D, sizes.nope + sizes.v
    saved, filled = o.recompute == "none", sizes.v < D
    q = 0 if saved and sizes.qk == D else D
    v = D if filled else 0 if saved else kv
    core = q + D + v + (D if filled or o.recompute == "full" else 0) + 4 * D
    core += 4 * D // size if o.fused == "flash" else 0  # which sums dq in float32
    copied = 4 * max(sizes.qk, kv) if eagerly and size < 4 else 0  # a CPU has no float32 matmul of 16-bit operands
    temporaries = 4 * sizes.rope * max(size, 4) if eagerly else 0
    by_scores = eagerly and (o.dropout_p > 0 or o.softcap > 0 or o.dtype == torch.float16)  # not by flash attention
    block = D * max(size, 4) if by_scores else 0  # in float32, of which blocks of scores at least are made
    per_head = max(core * size + block, (3 * D + sizes.qk + kv) * size + max(copied, temporaries))
    return rows * sizes.H * (per_head + 3 * 4)  # and lse, and delta twice
