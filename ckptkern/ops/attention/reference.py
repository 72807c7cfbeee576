"""The attention sublayer in differentiable PyTorch ops: its reference implementation, of which second derivatives are made."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import eager
from ..registration.op import cast_parameter
from ..sublayer.residual import reference_inputs, reference_norm, reference_output
from .core_sublayer import rotary_of, sublayer_core
from .rotary import reference_rotary
from .sublayer import update_of
from .tensors import (
    AttentionOptions,
    AttentionTensors,
    Projection,
    batch_and_rows,
    over_all_heads,
    projections,
    split_gate,
    split_heads,
)


def reference_qk_norm(heads: Tensor, weight: Tensor, bias: Tensor | None, o: AttentionOptions) -> Tensor:
    """The norm of q or k [B, S, heads, D] in differentiable PyTorch ops."""
    if over_all_heads(weight, heads.shape[-1]):
        return reference_norm(heads.flatten(-2), o.qk_norm, weight, bias, o.qk_norm_eps).view(heads.shape)
    if weight.dim() == 1:
        return reference_norm(heads, o.qk_norm, weight, bias, o.qk_norm_eps)
    h = reference_norm(heads, o.qk_norm, None, None, o.qk_norm_eps) * cast_parameter(weight, heads.dtype)
    return h if bias is None else h + cast_parameter(bias, heads.dtype)


def attention_reference(x: Tensor, t: AttentionTensors, o: AttentionOptions) -> Tensor:
    """The sublayer in differentiable PyTorch ops. Raises NotImplementedError for a part of a sequence."""
    if o.context is not None:
        raise NotImplementedError("attention: no second-order gradients over a context-parallel group")
    B, S = batch_and_rows(x)
    H, D = o.num_heads, t.wo.shape[1] // o.num_heads
    h = reference_inputs(x, t, o)

    def linear(rows: Tensor, part: Projection) -> Tensor:
        y = F.linear(rows, cast_parameter(part.weight, o.dtype), cast_parameter(part.bias, o.dtype))
        pair = None if part.letter == "g" else update_of(part.letter, B * S, t, o)
        return y if pair is None else y + pair.reference(rows)

    sources = h, h if t.key_value is None else t.key_value.to(o.dtype)
    blocks = [linear(sources[part.of_key_value], part).flatten(0, -2) for part in projections(t, o)]
    q, k, v = split_heads(blocks, t, o, B, S)
    if t.q_norm is not None:
        q, k = reference_qk_norm(q, t.q_norm, t.q_norm_bias, o), reference_qk_norm(k, t.k_norm, t.k_norm_bias, o)
    cos, sin = rotary_of(S, D, t, o)
    if cos is not None:
        q, k = (reference_rotary(heads, cos, sin, o.interleaved) for heads in (q, k))
    core = sublayer_core(t, o)
    out = eager.attention_reference(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), core)
    out = out.transpose(1, 2)
    if t.wg is not None or o.gate_in_query:
        out = out * torch.sigmoid(split_gate(blocks, t, o, B, S))
    f = linear(out.reshape(*x.shape[:-1], H * D), Projection("o", t.wo, t.bo, False))
    return reference_output(x, f, t, o)
