"""torch.nn.MultiheadAttention on fused ops that recompute in backward."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .. import ops
from ..ops.attention.masks import diagonal_of
from ..ops.attention.sdpa import attention_with_weights
from ..ops.dispatch.choices import autocast_dtype
from ..ops.dispatch.shard import ranks_of_rows, refuse_shard
from ..subclasses import PLAIN, own_dispatch
from .layer import Layer
from .unmodified import composed, dense, strided


def by_head(attn_mask: Tensor, heads: int) -> Tensor:
    """attn_mask [L, S] or [B H, L, S] as a view [1 or B, 1 or H, L, S]."""
    return attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, heads))


def without_bias(
    op: str, attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor, batch_first: bool
) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal hint). A CausalBias, whose memory is uninitialised, becomes a mask [L, S], True = hidden."""
    if attn_mask is None or type(attn_mask) in PLAIN:
        return attn_mask, is_causal
    rows = 1 if batch_first and query.dim() == 3 else 0
    L, S = (one.shape[rows] * ranks_of_rows() for one in (query, key))
    diagonal = diagonal_of(op, attn_mask, L, S)
    if diagonal is None:
        return attn_mask, is_causal
    return torch.ones(L, S, dtype=torch.bool, device=query.device).triu(diagonal + 1), diagonal == 0


def hidden_or_added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int) -> Tensor | None:
    """The masks of torch.nn.MultiheadAttention as one mask for scaled_dot_product_attention, or None.

    attn_mask [L, S] or [B H, L, S], key_padding_mask [B, S] or [S]: bool, True = hidden, or floating point and added
    -> [1 or B, 1 or H, 1 or L, S]: bool, True = visible, or floating point.
    """
    if attn_mask is not None:
        attn_mask = by_head(attn_mask, heads)
    if key_padding_mask is not None:
        key_padding_mask = torch.atleast_2d(key_padding_mask)[:, None, None]
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    hidden = [mask for mask in masks if mask.dtype == torch.bool]
    added = [mask for mask in masks if mask.dtype != torch.bool]
    if not added:
        return ~(hidden[0] if len(hidden) == 1 else hidden[0] | hidden[1]) if hidden else None
    total = added[0] if len(added) == 1 else added[0] + added[1]
    return total.masked_fill(hidden[0], -math.inf) if hidden else total


def _goes_with(added: torch.dtype, query: Tensor, need_weights: bool) -> bool:
    """Does torch add a mask of this dtype to this query's scores? It does so in baddbmm with need_weights, else in sdpa."""
    if autocast_dtype(query) is not None:  # autocast casts all but float64
        return (added == torch.float64) == (query.dtype == torch.float64)
    return added == query.dtype or (added == torch.float32 and not need_weights)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if own_dispatch((weight, bias)):
        return torch.nn.functional.linear(x, weight, bias)
    return ops.linear_act(x, weight, bias, "identity")


class MultiheadAttention(Layer, torch.nn.MultiheadAttention):
    """Replaces torch.nn.MultiheadAttention, with the same arguments, parameters and results in training and evaluation.

        o = concat_h softmax(q_h k_h^T / sqrt(D) + mask) v_h;  y = o Wo^T + bo

    query [L, B, E] ([B, L, E] with batch_first, [L, E] unbatched), key [S, B, kdim], value [S, B, vdim] -> (y, weights)
    attn_mask [L, S] or [B H, L, S], key_padding_mask [B, S] or [S]: True = hidden; floating point masks are added, and may be
    trained. attn_mask may be a CausalBias of torch.nn.attention.bias, whose uninitialised memory torch's module would read.

    Without need_weights, self-attention and cross-attention (key is value) are one ckptkern.attention_block in mode
    `recompute` and within `workspace`. All other calls save the inputs, q, k, v, o and the logsumexp in every mode,
    because projections and core attention are separate ops. need_weights=True, the default, computes o from the
    weights in PyTorch ops and saves them: pass False if you do not need the weights. Dropout of the weights saves 16
    bytes and samples the same mask with and without need_weights.

    A query whose keys are all hidden gives o = 0 and zero weights, as torch does without need_weights; torch's
    need_weights=True gives NaN. torch's own layer handles nested tensors, which it takes for inference only, tensors
    with their own dispatch (DTensor), and wrong arguments, for which it raises its own error. In these cases, and with
    parametrised or quantised weights, the module is one ckptkern.checkpoint, which saves its inputs.
    """

    torch_class = torch.nn.MultiheadAttention
    shown = ("embed_dim", "num_heads", "recompute", "workspace")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: str = "selective",
        workspace: int | str | None = None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.set_options(recompute, workspace)

    @property
    def dropout_p(self) -> float:
        """The dropout probability now: 0 in evaluation."""
        return self.dropout if self.training else 0.0

    def swapped(self, x: Tensor) -> Tensor:
        """Returns x [L, B, E] of a module without batch_first as [B, L, E], and the reverse."""
        return x.transpose(0, 1) if x.dim() == 3 and not self.batch_first else x

    def covers(
        self,
        query: Tensor,
        memory: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Does ckptkern.attention_block compute the output for keys and values of memory?"""
        unread = key_padding_mask, attn_mask if is_causal else None
        return self.fits(query, memory, memory, key_padding_mask, attn_mask, is_causal) and self.one_segment(
            query, memory, memory, *unread
        )

    def fits(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> bool:
        """Are these dense tensors and masks of the documented shapes, in dtypes that torch's own layer takes?"""
        tensors = (query, key, value)
        if any(not isinstance(t, Tensor) or t.is_nested or t.layout != torch.strided for t in tensors):
            return False
        if any(not t.is_floating_point() or t.dim() != query.dim() for t in tensors):
            return False
        if query.dim() not in (2, 3) or key.shape[:-1] != value.shape[:-1]:
            return False
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != (self.embed_dim, self.kdim, self.vdim):
            return False
        if own_dispatch((*tensors, key_padding_mask, attn_mask)):
            return False
        batched, rows = query.dim() == 3, 1 if self.batch_first and query.dim() == 3 else 0
        B = query.shape[1 - rows] if batched else 1
        if batched and key.shape[1 - rows] != B:
            return False
        if not (strided(self) and strided(self.out_proj)):
            return False
        weight = self.out_proj._parameters.get("weight")
        if weight is None:  # parametrised, and then computed in the region alone
            weight = next(self.out_proj.parameters(), None)
            weight = self.out_proj.weight if weight is None else weight
        if any(t.device != weight.device for t in tensors):
            return False
        dtypes = {weight.dtype, *(t.dtype for t in tensors)}
        if len(dtypes) > 1 and (
            torch.float64 in dtypes or autocast_dtype(query) is None
        ):  # autocast casts all but float64
            return False
        if isinstance(self.dropout_p, (int, float)) and self.dropout_p > 1:
            return False
        L, S = (one.shape[rows] * ranks_of_rows() for one in (query, key))
        added = []  # the dtypes that torch adds together
        for mask, shapes in (
            (key_padding_mask, ((B, S) if batched else (S,),)),
            (attn_mask, ((L, S), (B * self.num_heads, L, S))),
        ):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.shape not in shapes:
                return False
            if mask.dtype != torch.bool and not mask.is_floating_point():
                return False
            added.append(query.dtype if mask.dtype == torch.bool else mask.dtype)
        if is_causal and not need_weights and key_padding_mask is None:
            added = []  # the hint stands for attn_mask
        if added and not _goes_with(functools.reduce(torch.promote_types, added), query, need_weights):
            return False
        return attn_mask is not None or not is_causal

    def one_segment(self, query: Tensor, key: Tensor, value: Tensor, *unread: Tensor | None) -> bool:
        """Does ckptkern.attention_block compute this? It has one input for k and v.

        unread: masks that it forms no gradient of: key_padding_mask, and an attn_mask that the is_causal hint stands for.
        """
        return (
            key is value
            and self._dense()
            and self.bias_k is None
            and not self.add_zero_attn
            and not (torch.is_grad_enabled() and any(mask is not None and mask.requires_grad for mask in unread))
        )

    def _dense(self) -> bool:
        return dense(self) and dense(self.out_proj)

    def block_arguments(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> dict[str, object]:
        """The arguments of ckptkern.attention_block, by name, that this module stands for, besides query [B, L, E]. With the
        is_causal hint attn_mask must be the causal mask and is not read."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            bias = None if bias is None else bias.chunk(3)
        return {
            "key_value": None if key is query else self.swapped(key),
            "qkv_weight": weight,
            "qkv_bias": bias,
            "out_weight": self.out_proj.weight,
            "out_bias": self.out_proj.bias,
            "num_heads": self.num_heads,
            "is_causal": is_causal,
            "attn_mask": None if is_causal or attn_mask is None else by_head(attn_mask, self.num_heads),
            "mask_is_exclusion": True,
            "key_padding_mask": key_padding_mask,
            "dropout_p": self.dropout_p,
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (y, weights or None). weights: [B, L, S] averaged over heads, or [B, H, L, S]; without B if
        unbatched.

        is_causal: says that attn_mask is the causal mask; it is then read only if weights are needed. (torch also reads
        it if there is a key_padding_mask, so a wrong hint changes this module's result but not torch's.)
        """
        attn_mask, is_causal = without_bias(type(self).__name__, attn_mask, is_causal, query, key, self.batch_first)
        if not self.fits(query, key, value, key_padding_mask, attn_mask, is_causal, need_weights):
            return composed(
                super().forward, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                is_causal,
            )  # fmt: skip
        if not need_weights and self.one_segment(query, key, value, key_padding_mask, attn_mask if is_causal else None):
            arguments = self.block_arguments(query, key, key_padding_mask, attn_mask, is_causal)
            return self.swapped(ops.attention_block(self.swapped(query), **arguments, **self.modes)), None
        arguments = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return self._separate(*arguments) if self._dense() else composed(self._separate, *arguments)

    def _separate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """forward, with projections and core as ops of their own."""
        refuse_shard(
            f"{type(self).__name__} computes need_weights=True, add_bias_kv and other keys than values by ops of their own"
        )
        swapped = query.dim() == 3 and not self.batch_first
        q, k, v = self._heads(query, key, value)
        extra = k.shape[2] - key.shape[0 if swapped or key.dim() == 2 else 1]
        # torch uses the hint only if no key_padding_mask has to be merged with attn_mask
        is_causal = is_causal and not need_weights and key_padding_mask is None
        mask = hidden_or_added(None if is_causal else attn_mask, key_padding_mask, self.num_heads)
        if mask is not None and extra:
            mask = torch.nn.functional.pad(mask, (0, extra), value=True if mask.dtype == torch.bool else 0.0)
        weights = None
        if need_weights:
            o, weights = attention_with_weights(q, k, v, mask, self.dropout_p)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.dim() == 3 else weights.squeeze(0)
        else:
            o = ops.scaled_dot_product_attention(q, k, v, mask, self.dropout_p, is_causal)
        o = o.transpose(1, 2).flatten(2)  # [B, L, E]
        o = o.transpose(0, 1) if swapped else o if query.dim() == 3 else o.squeeze(0)
        return _linear(o, self.out_proj.weight, self.out_proj.bias), weights

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, L, D] and k, v [B, H, S, D] with the rows of bias_k, bias_v and zeros at their ends."""
        E, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            parts = [
                (query, self.q_proj_weight), (key, self.k_proj_weight), (value, self.v_proj_weight)
            ]  # fmt: skip
        elif query is key is value:
            parts = [(query, self.in_proj_weight)]
        elif key is value:
            parts = list(zip((query, key), self.in_proj_weight.split([E, 2 * E]), strict=True))
        else:
            parts = list(zip((query, key, value), self.in_proj_weight.chunk(3), strict=True))
        biases = [None] * len(parts) if bias is None else bias.split([w.shape[0] for _, w in parts])
        projected = [_linear(x, w, b) for (x, w), b in zip(parts, biases, strict=True)]
        q, k, v = (chunk for y in projected for chunk in y.split(E, -1))
        heads = []
        for y, row, zeros in (
            (q, None, False), (k, self.bias_k, self.add_zero_attn), (v, self.bias_v, self.add_zero_attn)
        ):  # fmt: skip
            y = y.unsqueeze(0) if y.dim() == 2 else y if self.batch_first else y.transpose(0, 1)
            rows = [y]
            if row is not None:
                rows.append(row.to(y.dtype).expand(y.shape[0], 1, E))
            if zeros:
                rows.append(y.new_zeros(y.shape[0], 1, E))
            y = torch.cat(rows, 1) if len(rows) > 1 else y
            heads.append(y.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2))
        return tuple(heads)
