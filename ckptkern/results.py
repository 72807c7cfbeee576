"""Defines the results of launchers, of either backend: `ckptkern.eager` and `triton_kernels`. Outputs that were not
requested are None."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearForward(NamedTuple):
    """h = dropout(act(z)) [M, N]; z [M, N]; bits uint8 [M, ceil(N/8)]: where ReLU has a slope."""

    h: Tensor
    z: Tensor | None
    bits: Tensor | None


class HiddenGradient(NamedTuple):
    """Gradient of h = dropout(act(z)): dz and h [M, N], and db [N], the sum of dz's rows."""

    dz: Tensor
    h: Tensor | None
    db: Tensor | None


class GatedForward(NamedTuple):
    """h = dropout(act(g) u), g and u, each [M, N]."""

    h: Tensor
    g: Tensor | None
    u: Tensor | None


class GatedGradient(NamedTuple):
    """Gradient of h = dropout(act(g) u): dg, du and h [M, N], and dbg and dbu [N], the sums of dg's and du's rows."""

    dg: Tensor
    du: Tensor
    h: Tensor | None
    dbg: Tensor | None
    dbu: Tensor | None


class TokenStatistics(NamedTuple):
    """Statistics of each token's logits, float32 [M]: lse; z_t, the target's logit; wz, the sum of logits weighted by class;
    the probabilities' entropy; the largest logit and its class arg_max, which float32 holds up to 2^24. float32 [M, k]:
    top_z, the k largest logits in descending order, and top_v, their classes; z_c, the logits of a token's candidates."""

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
    """Coefficients of each token's gradient, float32 [M]: for a logit z_v with the probability p_v,

    dz_v = p p_v + p_log_p p_v log p_v + z_t [v = target] + wz w_v
    """

    p: Tensor
    z_t: Tensor
    wz: Tensor | None = None
    p_log_p: Tensor | None = None


class CrossEntropyForward(NamedTuple):
    """The statistics, and what "none" saves: logits [M, V], or their exponentials in x's dtype with parts [slices, M], the
    divisor of each slice of columns. z: the logits [M, V] in float32."""

    statistics: TokenStatistics
    logits: Tensor | None
    parts: Tensor | None
    z: Tensor | None
