"""What launchers return, of either backend: `ckptkern.eager` and `triton_kernels`. What was not asked for is None."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearForward(NamedTuple):
    """h = dropout(act(z)) [M, N], z [M, N], and bits uint8 [M, ceil(N/8)]: where relu has a slope."""

    h: Tensor
    z: Tensor | None
    bits: Tensor | None


class HiddenGradient(NamedTuple):
    """dz and h [M, N] of h = dropout(act(z)), and db [N], the sum of dz's rows."""

    dz: Tensor
    h: Tensor | None
    db: Tensor | None


class GatedForward(NamedTuple):
    """h = dropout(act(g) u), g and u, each [M, N]."""

    h: Tensor
    g: Tensor | None
    u: Tensor | None


class GatedGradient(NamedTuple):
    """dg, du and h [M, N] of h = dropout(act(g) u), and dbg and dbu [N], the sums of dg's and du's rows."""

    dg: Tensor
    du: Tensor
    h: Tensor | None
    dbg: Tensor | None
    dbu: Tensor | None


class TokenStatistics(NamedTuple):
    """Of each token, float32 [M]: lse of its logits, z_t of its target, wz the sum of logits weighted by class; the entropy of
    its probabilities; the largest logit, and arg_max, its class, which float32 holds up to 2^24; the k largest logits [M, k] in
    descending order, and their classes; z_c [M, k] of the candidates of a token."""

    lse: Tensor
    z_t: Tensor
    wz: Tensor | None = None
    entropy: Tensor | None = None
    largest: Tensor | None = None
    arg_max: Tensor | None = None
    top_z: Tensor | None = None
    top_v: Tensor | None = None
    z_c: Tensor | None = None


class TokenGradients(NamedTuple):
    """Of each token, float32 [M], the coefficients of its gradient: of a logit z_v with the probability p_v

    dz_v = p p_v + p_log_p p_v log p_v + z_t [v = target] + wz w_v
    """

    p: Tensor
    z_t: Tensor
    wz: Tensor | None = None
    p_log_p: Tensor | None = None


class CrossEntropyForward(NamedTuple):
    """The statistics, and what "none" saves: logits [M, V] or their exponentials in x's dtype, and of those, parts [slices, M],
    what each slice of columns was divided by. z: the logits [M, V] in float32."""

    statistics: TokenStatistics
    logits: Tensor | None
    parts: Tensor | None
    z: Tensor | None
