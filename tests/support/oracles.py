"""What each op of the catalogue computes, in eager PyTorch ops: one oracle per public function, with the function's arguments.

An oracle shares no code with the ops. Of ckptkern it takes the definition of dropout's mask alone, which tests/test_state.py
tests. It takes random states from torch's generator in the order in which the ops draw them: for each sublayer that of its
low-rank updates, of its dropout, of residual dropout, of whole samples. In float64 an oracle is exact to rounding; in 16 bits
it rounds where eager PyTorch does.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from support.masks import keep_mask
from torch import Tensor

from ckptkern.state import threshold_scale

ACTIVATIONS = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": lambda z: z * torch.sigmoid(z),
    "identity": lambda z: z,
}


# -- what several share ------------------------------------------------------------------------------------------------


def draw() -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,))


def dropped(h: Tensor, p: float, state: Tensor | None = None, first_row: int = 0) -> Tensor:
    """Dropout of the rows of h [..., N]; state: drawn here unless it is given."""
    if not p:
        return h
    rows = math.prod(h.shape[:-1])
    keep = keep_mask(draw() if state is None else state, p, first_row + rows, h.shape[-1])[first_row:]
    return h * keep.view(h.shape) * threshold_scale(p)[1]


def normed(x: Tensor, kind: str | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps) if kind == "rms" else x


def updated(x: Tensor, weight: Tensor, bias: Tensor | None, lora=None, state: Tensor | None = None, first_row: int = 0):
    """x weight^T + bias, and scale dropout(x) a^T b^T with an update, in the update's dtype."""
    y = F.linear(x, weight, bias)
    if lora is None:
        return y
    rows = x if torch.is_autocast_enabled("cpu") else x.to(lora.a.dtype)
    rows = dropped(rows, lora.dropout_p, state, first_row)
    return (y + F.linear(F.linear(rows, lora.a), lora.b) * lora.scale).to(y.dtype)


def state_of(lora: dict) -> Tensor | None:
    """All updates of a sublayer share one state, of which each has rows of its own."""
    return draw() if any(adapter.dropout_p for adapter in lora.values()) else None


def by_sample(vectors: Tensor, x: Tensor) -> Tensor:
    """[B, e] or [B, 1, e] as it meets x [B, ..., d]; x [tokens, d] is one sample."""
    samples = x.shape[0] if x.dim() > 2 else 1
    return vectors.reshape(samples, *[1] * (x.dim() - 2), vectors.shape[-1])


def around(
    x,
    branch,
    norm=None,
    norm_weight=None,
    norm_bias=None,
    norm_scale=None,
    norm_shift=None,
    norm_eps=1e-5,
    norm_first=True,
    post_norm=None,
    post_norm_weight=None,
    post_norm_bias=None,
    post_norm_eps=1e-5,
    layer_scale=None,
    resid_dropout_p=0.0,
    drop_path_p=0.0,
    residual=True,
    training=True,
    **_,
) -> Tensor:
    """[x +] drop_path(layer_scale * post_norm(dropout(branch(h)))), and its norm if that is not before the branch."""
    h = normed(x, norm, norm_weight, norm_bias, norm_eps) if norm_first else x
    h = h if norm_scale is None else h * (1 + by_sample(norm_scale, x))
    h = h if norm_shift is None else h + by_sample(norm_shift, x)
    z = dropped(branch(h), resid_dropout_p if training else 0.0)
    z = normed(z, post_norm, post_norm_weight, post_norm_bias, post_norm_eps)
    if layer_scale is not None:
        of_samples = isinstance(layer_scale, Tensor) and layer_scale.dim() > 1
        z = z * (by_sample(layer_scale, x) if of_samples else layer_scale)
    if drop_path_p and training:
        keep = keep_mask(draw(), drop_path_p, x.shape[0] if x.dim() > 2 else 1, 1)
        z = z * by_sample(keep, x) * threshold_scale(drop_path_p)[1]
    y = x + z if residual else z
    return y if norm_first else normed(y, norm, norm_weight, norm_bias, norm_eps)


# -- linear layers and MLPs --------------------------------------------------------------------------------------------


def dropout(x, p=0.5, training=True):
    return dropped(x, p if training else 0.0)


def linear_act(x, weight, bias=None, activation="relu", **_):
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def linear_stack(x, weights, biases=None, activation="relu", **_):
    for i, weight in enumerate(weights):
        x = linear_act(x, weight, None if biases is None else biases[i], activation)
    return x


def mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation="gelu", dropout_p=0.0, *, training=True, **_):
    return mlp_branch(
        x, (fc1_weight, fc1_bias), (fc2_weight, fc2_bias), (None, None), activation, dropout_p, None, training
    )


def gated_mlp(
    x,
    gate_weight,
    up_weight,
    down_weight,
    activation="silu",
    dropout_p=0.0,
    *,
    gate_bias=None,
    up_bias=None,
    down_bias=None,
    training=True,
    **_,
):
    layers = (up_weight, up_bias), (down_weight, down_bias), (gate_weight, gate_bias)
    return mlp_branch(x, *layers, activation, dropout_p, None, training)


def mlp_branch(h, up, down, gate, activation, dropout_p, lora, training) -> Tensor:
    """up, down, gate: (weight, bias). The rows of an update's dropout begin after those of the layers before it."""
    lora, rows = without_dropout(lora, training), math.prod(h.shape[:-1])
    state = state_of(lora)
    z = updated(h, *up, lora.get("up"), state, rows)
    act = ACTIVATIONS[activation]
    hidden = act(z) if gate[0] is None else act(updated(h, *gate, lora.get("gate"), state)) * z
    return updated(dropout(hidden, dropout_p, training), *down, lora.get("down"), state, 2 * rows)


def without_dropout(lora: dict | None, training: bool) -> dict:
    return {name: adapter if training else adapter._replace(dropout_p=0.0) for name, adapter in (lora or {}).items()}


def mlp_block(
    x,
    up_weight,
    up_bias,
    down_weight,
    down_bias,
    activation="gelu",
    dropout_p=0.0,
    *,
    gate_weight=None,
    gate_bias=None,
    lora=None,
    training=True,
    **others,
):
    def branch(h):
        layers = (up_weight, up_bias), (down_weight, down_bias), (gate_weight, gate_bias)
        return mlp_branch(h, *layers, activation, dropout_p, lora, training)

    return around(x, branch, training=training, **others)


# -- attention ---------------------------------------------------------------------------------------------------------


def hidden_by_window(Sq: int, Sk: int, window: tuple[int, int] | None, causal: bool, first: int = 0) -> Tensor:
    """[Sq, Sk], True = not seen: row i, counted from `first`, sees i - left <= j <= i + right, -1 is no bound."""
    i, j = torch.arange(first, first + Sq)[:, None], torch.arange(Sk)
    left, right = window or (-1, -1)
    hidden = torch.zeros(Sq, Sk, dtype=torch.bool)
    hidden = hidden | (j < i - left) if left >= 0 else hidden
    hidden = hidden | (j > i + right) if right >= 0 else hidden
    return hidden | (j > i) if causal else hidden


def core(
    q,
    k,
    v,
    hidden,
    *,
    scale=None,
    softcap=None,
    slopes=None,
    added=None,
    sinks=None,
    p=0.0,
    state=None,
    plane=0,
    rows=0,
):
    """Attention of q [B, H, Sq, D], k and v [B, H or fewer, Sk, D]. hidden: bool, True = not seen; added: to the scores.

    plane: of the dropout mask, which is the first; rows: that a plane of it has, if these are not Sq.
    """
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    k, v = (heads.repeat_interleave(H // heads.shape[1], 1) for heads in (k, v))
    s = q @ k.mT * (D**-0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if slopes is not None:
        distance = (torch.arange(Sq)[:, None] - torch.arange(Sk)).abs()
        s = s - slopes.to(s.dtype)[..., None, None] * distance
    s = s if added is None else s + added
    s = s.masked_fill(hidden, -math.inf)
    sees_nothing = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(sees_nothing, 0.0)
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(B, H, Sq, 1)), -1)
    weights = s.softmax(-1)[..., :Sk].masked_fill(sees_nothing, 0.0)
    if p:
        keep = keep_mask(state, p, Sq, Sk, planes=B * H, plane_base=plane, total_rows=rows or Sq)
        weights = weights * keep.view(weights.shape) * threshold_scale(p)[1]
    return weights @ v


def core_of_sequences(q, k, v, ends, most, window, causal, **options):
    """`core` of each packed sequence of q, k, v [tokens, H, D]; zeros for tokens of none and for those beyond the first `most`.

    ends, most: of queries and of keys. The last row of a sequence sees the last column.
    """
    y = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)
    starts = [bounds.tolist() for bounds in ends]
    for n in range(len(starts[0]) - 1):
        rows, columns = (
            torch.arange(bounds[n], min(bounds[n + 1], bounds[n] + m)) for bounds, m in zip(starts, most, strict=True)
        )
        heads = (tensor.transpose(0, 1)[None] for tensor in (q[rows], k[columns], v[columns]))
        hidden = hidden_by_window(len(rows), len(columns), window, causal, len(columns) - len(rows))
        o = core(*heads, hidden, plane=n * q.shape[1], rows=most[0], **options)
        y = y.index_put((rows,), o[0].transpose(0, 1))
    return y


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    window_size=None,
    alibi_slopes=None,
    softcap=None,
    sinks=None,
    **_,
):
    state = draw() if dropout_p else None
    options = dict(scale=scale, softcap=softcap, slopes=alibi_slopes, sinks=sinks, p=dropout_p, state=state)
    return masked_core(query, key, value, attn_mask, False, None, window_size, is_causal, **options)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, is_causal=False, scale=None, window_size=None, **_
):
    ends, most = (cu_seq_q, cu_seq_k), (max_q, max_k)
    return core_of_sequences(query, key, value, ends, most, window_size, is_causal, scale=scale)


def rotated(x: Tensor, rotary, interleaved: bool, ends: Tensor | None = None) -> Tensor:
    """x [B, S, H, D], of which each pair of the first R dimensions is rotated by its angle. rotary: tables, or theta, whose
    positions begin anew with each packed sequence; angles and tables of it are float32."""
    if rotary is None:
        return x
    if isinstance(rotary, tuple):
        cos, sin = (table[..., ::2] if interleaved else table[..., : table.shape[-1] // 2] for table in rotary)
    else:
        S, D = x.shape[1], x.shape[-1]
        positions = torch.arange(S)
        for start in [] if ends is None else ends.tolist():
            positions[start:] = torch.arange(S - start)
        frequencies = rotary ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in (cos, sin))
    R = 2 * cos.shape[-1]
    pairs, rest = x[..., :R], x[..., R:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((pairs, rest), -1)


def masked_core(q, k, v, attn_mask, mask_is_exclusion, key_padding_mask, window, causal, **options) -> Tensor:
    hidden, added = hidden_by_window(q.shape[2], k.shape[2], window, causal), None
    masks = attn_mask if isinstance(attn_mask, tuple) else (attn_mask,)
    padding = None if key_padding_mask is None else torch.atleast_2d(key_padding_mask)[:, None, None]
    for mask, hides in (*((part, mask_is_exclusion) for part in masks), (padding, True)):
        if mask is not None and mask.dtype == torch.bool:
            hidden = hidden | (mask if hides else ~mask)
        elif mask is not None:
            added = mask if added is None else added + mask
    return core(q, k, v, hidden, added=added, **options)


def attention_block(
    x,
    qkv_weight,
    qkv_bias,
    out_weight,
    out_bias,
    num_heads,
    num_kv_heads=None,
    *,
    key_value=None,
    qkv_layout="qkv",
    qk_norm=None,
    qk_norm_kind="rms",
    qk_norm_eps=1e-6,
    rotary=None,
    rotary_interleaved=False,
    is_causal=False,
    attn_mask=None,
    mask_is_exclusion=False,
    key_padding_mask=None,
    window_size=None,
    alibi_slopes=None,
    cu_seqlens=None,
    max_seqlen=None,
    scale=None,
    softcap=None,
    sinks=None,
    gate_weight=None,
    gate_bias=None,
    gate_in_query=False,
    dropout_p=0.0,
    lora=None,
    residual=False,
    training=True,
    **others,
):
    H, H_kv = num_heads, num_kv_heads or num_heads
    lora, p = without_dropout(lora, training), dropout_p if training else 0.0

    def project(h, memory, state):
        """q, k, v [B, S, heads, D], and what q's projection has of a gate."""
        D, rows = out_weight.shape[1] // H, math.prod(h.shape[:-1])
        widths = [H * D, H_kv * D, H_kv * D]
        if isinstance(qkv_weight, Tensor) and key_value is None:
            qkv = updated(h, qkv_weight, qkv_bias, lora.get("qkv"), state)
            if qkv_layout == "heads":  # of each head of k its heads of q, itself, its head of v
                groups = qkv.unflatten(-1, (H_kv, -1, D))
                return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :], None
            q, k, v = qkv.split(widths, -1)
        else:
            packed = isinstance(qkv_weight, Tensor)
            weights = qkv_weight.split(widths) if packed else qkv_weight
            biases = [None] * 3 if qkv_bias is None else qkv_bias.split(widths) if packed else qkv_bias
            rows = rows if key_value is None else rows + math.prod(memory.shape[:-1])
            sources = zip((h, memory, memory), weights, biases, "qkv", range(3), strict=True)
            q, k, v = (
                updated(tensor, w, b, lora.get(name), state, place * rows) for tensor, w, b, name, place in sources
            )
        q, k, v = q.unflatten(-1, (H, -1)), k.unflatten(-1, (H_kv, D)), v.unflatten(-1, (H_kv, D))
        return (q[..., :D], k, v, q[..., D:]) if gate_in_query else (q, k, v, None)

    def qk_normed(heads, norm):
        weight, bias = norm if isinstance(norm, tuple) else (norm, None)
        rows = heads.flatten(-2) if weight.dim() == 1 and weight.shape[0] != heads.shape[-1] else heads
        rows = normed(rows, qk_norm_kind, None, None, qk_norm_eps) * weight
        return (rows if bias is None else rows + bias).view(heads.shape)

    def branch(h):
        state, batched = state_of(lora), h.dim() > 2
        state_of_core = draw() if p else None
        h = h if batched else h[None]
        memory = h if key_value is None else key_value if batched else key_value[None]
        q, k, v, gate = project(h, memory, state)
        if qk_norm is not None:
            q, k = qk_normed(q, qk_norm[0]), qk_normed(k, qk_norm[1])
        q, k = (rotated(heads, rotary, rotary_interleaved, cu_seqlens) for heads in (q, k))
        options = dict(scale=scale, softcap=softcap, slopes=alibi_slopes, sinks=sinks, p=p, state=state_of_core)
        if cu_seqlens is None:
            heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
            masks = attn_mask, mask_is_exclusion, key_padding_mask, window_size, is_causal
            o = masked_core(*heads, *masks, **options).transpose(1, 2)
        else:
            most = h.shape[1] if max_seqlen is None else max_seqlen
            ends = (cu_seqlens, cu_seqlens), (most, most), window_size, is_causal
            o = core_of_sequences(q[0], k[0], v[0], *ends, **options)[None]
        if gate_weight is not None:
            gate = F.linear(h, gate_weight, gate_bias).unflatten(-1, (H, -1))
        o = o if gate is None else o * torch.sigmoid(gate)
        tokens = math.prod(h.shape[:-1]) + (0 if key_value is None else math.prod(memory.shape[:-1]))
        f = updated(o.flatten(-2), out_weight, out_bias, lora.get("out"), state, 3 * tokens)
        return f if batched else f[0]

    return around(x, branch, residual=residual, training=training, **others)


def latent_attention_block(
    x,
    q_weight,
    kv_a_weight,
    kv_b_weight,
    out_weight,
    num_heads,
    *,
    q_bias=None,
    q_a_weight=None,
    q_a_bias=None,
    q_a_norm_weight=None,
    kv_a_bias=None,
    kv_a_norm_weight=None,
    kv_b_bias=None,
    out_bias=None,
    latent_norm_eps=1e-6,
    rotary=None,
    rotary_interleaved=False,
    is_causal=False,
    attn_mask=None,
    mask_is_exclusion=False,
    key_padding_mask=None,
    window_size=None,
    scale=None,
    softcap=None,
    dropout_p=0.0,
    residual=False,
    training=True,
    **others,
):
    rank, H = kv_b_weight.shape[1], num_heads
    rope, v_dim = kv_a_weight.shape[0] - rank, out_weight.shape[1] // H

    def latent_normed(c, weight):
        return c if weight is None else F.rms_norm(c, c.shape[-1:], weight, latent_norm_eps)

    def branch(h):
        q_latent = h
        if q_a_weight is not None:
            q_latent = latent_normed(F.linear(h, q_a_weight, q_a_bias), q_a_norm_weight)
        q = F.linear(q_latent, q_weight, q_bias).unflatten(-1, (H, -1))
        c, shared = F.linear(h, kv_a_weight, kv_a_bias).split([rank, rope], -1)
        kv = F.linear(latent_normed(c, kv_a_norm_weight), kv_b_weight, kv_b_bias).unflatten(-1, (H, -1))
        k, v = kv[..., :-v_dim], kv[..., -v_dim:]
        nope = k.shape[-1]
        q = torch.cat((q[..., :nope], rotated(q[..., nope:], rotary, rotary_interleaved)), -1)
        shared = rotated(shared.unsqueeze(-2), rotary, rotary_interleaved)
        k = torch.cat((k, shared.expand(*k.shape[:-1], rope)), -1)
        p, heads = dropout_p if training else 0.0, (tensor.transpose(1, 2) for tensor in (q, k, v))
        masks = attn_mask, mask_is_exclusion, key_padding_mask, window_size, is_causal
        o = masked_core(*heads, *masks, scale=scale, softcap=softcap, p=p, state=draw() if p else None).transpose(1, 2)
        return F.linear(o.flatten(-2), out_weight, out_bias)

    return around(x, branch, residual=residual, training=training, **others)


# -- experts -----------------------------------------------------------------------------------------------------------


def of_expert(x, e, gate_up_weight, down_weight, activation, biases=(None, None), lora=None):
    """The gated MLP of expert e."""
    lora = {name: adapter._replace(a=adapter.a[e], b=adapter.b[e]) for name, adapter in (lora or {}).items()}
    bias, down_bias = (None if tensor is None else tensor[e] for tensor in biases)
    g, u = updated(x, gate_up_weight[e], bias, lora.get("gate_up")).chunk(2, -1)
    return updated(ACTIVATIONS[activation](g) * u, down_weight[e], down_bias, lora.get("down"))


def moe_mlp(
    x,
    top_k_index,
    top_k_weights,
    gate_up_weight,
    down_weight,
    activation="silu",
    *,
    gate_up_bias=None,
    down_bias=None,
    lora=None,
    **_,
):
    """One expert after the other on its token-expert pairs, added up in float32 at least."""
    y = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in range(len(gate_up_weight)):
        *tokens, place = torch.where(top_k_index == e)
        f = of_expert(x[tuple(tokens)], e, gate_up_weight, down_weight, activation, (gate_up_bias, down_bias), lora)
        weights = top_k_weights[(*tokens, place)][:, None]
        y = y.index_put(tuple(tokens), f.to(y.dtype) * weights.to(y.dtype), accumulate=True)
    return y.to(x.dtype)


def grouped_gated_mlp(x, offs, gate_up_weight, down_weight, activation="silu", *, row_weights=None, lora=None, **_):
    bounds = [0, *offs.tolist()]
    parts = [
        of_expert(x[start:stop], e, gate_up_weight, down_weight, activation, lora=lora)
        for e, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    y = torch.cat([*parts, x.new_zeros(len(x) - bounds[-1], x.shape[1])])
    return y if row_weights is None else y * row_weights[:, None].to(y.dtype)


def chosen(scores, top_k, score_bias, num_groups, top_groups, group_score) -> Tensor:
    """The k best experts of each token among those of its best groups, which are ranked by their best one or two scores."""
    scores = scores.detach() if score_bias is None else scores.detach() + score_bias
    groups = scores.unflatten(-1, (num_groups, -1))
    best = groups.sort(-1, descending=True)[0][..., : 1 if group_score == "max" else 2].sum(-1)
    worst = best.sort(-1, descending=True)[0][..., (top_groups or num_groups) - 1, None]
    scores = groups.masked_fill((best < worst)[..., None], -math.inf).flatten(-2)
    return scores.sort(-1, descending=True)[1][..., :top_k]


def moe_block(
    x,
    router_weight,
    gate_up_weight,
    down_weight,
    activation="silu",
    *,
    top_k,
    scoring="softmax",
    normalize=True,
    score_bias=None,
    num_groups=1,
    top_groups=None,
    group_score="top2",
    routed_scaling_factor=1.0,
    router_bias=None,
    router_dtype=None,
    gate_up_bias=None,
    down_bias=None,
    shared_gate_weight=None,
    shared_gate_bias=None,
    shared_up_weight=None,
    shared_up_bias=None,
    shared_down_weight=None,
    shared_down_bias=None,
    shared_expert_gate=None,
    lora=None,
    residual=True,
    training=True,
    index=None,
    **others,
):
    """(y, router_logits). index: the choice of experts [tokens, k], where that of these logits is not asked for."""
    lora, logits = lora or {}, None

    def branch(h):
        nonlocal logits
        wide = torch.promote_types(h.dtype, router_dtype or h.dtype)
        bias = None if router_bias is None else router_bias.to(wide)
        logits = F.linear(h.to(wide), router_weight.to(wide), bias)
        scores = logits.to(torch.promote_types(wide, torch.float32))
        scores = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(-1)
        own = chosen(scores, top_k, score_bias, num_groups, top_groups, group_score)
        choice = (own if index is None else index).view(*h.shape[:-1], top_k)
        weights = scores.gather(-1, choice)
        weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        experts = {name: lora[name] for name in ("gate_up", "down") if name in lora}
        f = moe_mlp(
            h,
            choice,
            weights * routed_scaling_factor,
            gate_up_weight,
            down_weight,
            activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            lora=experts,
        )
        if shared_up_weight is None:
            return f
        updates = {
            name.removeprefix("shared_"): adapter for name, adapter in lora.items() if name.startswith("shared_")
        }
        layers = (shared_up_weight, shared_up_bias), (shared_down_weight, shared_down_bias)
        shared = mlp_branch(h, *layers, (shared_gate_weight, shared_gate_bias), activation, 0.0, updates, training)
        return f + (shared if shared_expert_gate is None else F.linear(h, shared_expert_gate).sigmoid() * shared)

    y = around(x, branch, residual=residual, training=training, **others)
    return y, logits.reshape(-1, logits.shape[-1])


# -- layers ------------------------------------------------------------------------------------------------------------


def transformer_layer(
    x, attention_arguments, mlp_arguments, *, cross_attention_arguments=None, parallel=False, training=True, **_
):
    attend = latent_attention_block if "kv_a_weight" in attention_arguments else attention_block
    feed = moe_block if "router_weight" in mlp_arguments else mlp_block
    mid = attend(x, training=training, **{"residual": True} | attention_arguments)
    if parallel:
        f = feed(x, training=training, **mlp_arguments | {"residual": False})
        return (mid + f[0], f[1]) if isinstance(f, tuple) else mid + f
    if cross_attention_arguments is not None:
        mid = attention_block(mid, training=training, **{"residual": True} | cross_attention_arguments)
    return feed(mid, training=training, **mlp_arguments)


# -- LM heads ----------------------------------------------------------------------------------------------------------


def logits_of(x, weight, bias, *, scale=1.0, softcap=None, lora=None) -> Tensor:
    """[..., V] in float32 at least."""
    state = draw() if lora is not None and lora.dropout_p else None
    z = updated(x, weight, bias, lora, state)
    z = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def entropy_of(z: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(z.dtype).min)).sum(-1)


def linear_cross_entropy(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    logit_scale=1.0,
    softcap=None,
    z_loss=0.0,
    return_lse=False,
    return_log_probs=False,
    return_entropy=False,
    return_accuracy=False,
    top_k=None,
    lora=None,
    **_,
):
    """The loss alone, or with what else was asked for in the order of CrossEntropyOutput."""
    z = logits_of(input, linear_weight, linear_bias, scale=logit_scale, softcap=softcap, lora=lora)
    classes = not target.is_floating_point()
    counted = target != ignore_index if classes else torch.ones(z.shape[:-1], dtype=torch.bool)
    z = z.masked_fill(~counted[..., None], 0.0)

    def classes_first(t):
        return t.movedim(-1, min(1, t.dim() - 1))

    shares = F.one_hot(target.masked_fill(~counted, 0), z.shape[-1]) if classes else target
    shares, weight = shares.to(z.dtype), None if weight is None else weight.to(z.dtype)
    loss = F.cross_entropy(
        classes_first(z),
        target if classes else classes_first(shares),
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    lse = torch.logsumexp(z, -1) * counted
    squares = z_loss * lse.square()
    if z_loss:
        loss = loss + (
            squares if reduction == "none" else squares.sum() / (counted.sum() if reduction == "mean" else 1)
        )
    results = [loss]
    results += [lse] if return_lse else []
    results += [(shares * z.log_softmax(-1)).sum(-1) * counted] if return_log_probs else []
    results += [entropy_of(z) * counted] if return_entropy else []
    if return_accuracy:
        best = z.detach().argmax(-1)
        right = ((best == shares.argmax(-1)) & counted).to(z.dtype)
        results += [right if reduction == "none" else right.sum() / counted.sum(), best * counted]
    if top_k:
        values, indices = z.detach().log_softmax(-1).topk(top_k, -1)
        results += [values * counted[..., None], indices * counted[..., None]]
    return tuple(results) if len(results) > 1 else loss


def selected_log_probs(
    hidden, weight, tokens, *, bias=None, temperature=1.0, return_entropy=False, lora=None, ignore_index=-100, **_
):
    z = logits_of(hidden, weight, bias, scale=1 / temperature, lora=lora)
    candidates = tokens if tokens.dim() == z.dim() else tokens[..., None]
    counted = candidates != ignore_index
    log_probs = z.log_softmax(-1).gather(-1, candidates.masked_fill(~counted, 0)) * counted
    log_probs = log_probs.view(tokens.shape)
    return (log_probs, entropy_of(z) * counted.any(-1)) if return_entropy else log_probs


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Of each token: KL(p, q) at beta 0, KL(q, p) at 1, else the generalised Jensen-Shannon divergence."""

    def kl(of, to):
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def reduced_divergence(losses, mask, reduction):
    losses = losses if mask is None else losses * mask
    count = losses.numel() if mask is None else mask.sum()
    return losses if reduction == "none" else losses.sum() / (count if reduction == "mean" else 1)


def linear_distillation(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    *,
    student_bias=None,
    teacher_bias=None,
    beta=0.0,
    temperature=1.0,
    softcap=None,
    teacher_softcap=None,
    mask=None,
    reduction="mean",
    **_,
):
    models = (student_input, student_weight, student_bias), (teacher_input, teacher_weight, teacher_bias)
    logits = (logits_of(*model, softcap=cap) for model, cap in zip(models, (softcap, teacher_softcap), strict=True))
    log_q, log_p = ((z / temperature).log_softmax(-1) for z in logits)
    return reduced_divergence(divergence(log_p.detach().to(log_q.dtype), log_q, beta), mask, reduction)


def linear_topk_distillation(
    student_input,
    student_weight,
    teacher_log_probs,
    teacher_tokens,
    *,
    student_bias=None,
    beta=0.0,
    temperature=1.0,
    add_tail_bucket=True,
    mask=None,
    reduction="mean",
    **_,
):
    """Of k classes and of all others as one, or of the k classes, whose probabilities are made to sum to one."""
    log_q = (logits_of(student_input, student_weight, student_bias) / temperature).log_softmax(-1)
    both = [teacher_log_probs.to(log_q.dtype), log_q.gather(-1, teacher_tokens)]
    if add_tail_bucket:
        rest = [torch.log1p(-logs.exp().sum(-1, keepdim=True)) for logs in both]
        log_p, log_q = (torch.cat(pair, -1) for pair in zip(both, rest, strict=True))
    else:
        log_p, log_q = (logits.log_softmax(-1) for logits in both)
    return reduced_divergence(divergence(log_p, log_q, beta), mask, reduction)
