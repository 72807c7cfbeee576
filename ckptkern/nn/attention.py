"""Defines torch.nn.MultiheadAttention on fused ops that recompute in backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import ops
from ..ops.attention.arguments import diagonal_of
from ..ops.attention.core import check_whole_sequence
from ..ops.dispatch.choices import Bytes, autocast_dtype
from ..ops.dispatch.shard import ranks_of_rows
from ..subclasses import PLAIN, own_dispatch
from .layer import Layer
from .unmodified import composed, dense


def _is_causal_bias(attn_mask: Tensor | None) -> bool:
    """Returns whether the mask is torch's CausalBias, whose memory is uninitialised."""
    return attn_mask is not None and type(attn_mask) not in PLAIN and hasattr(attn_mask, "variant")


class MultiheadAttention(Layer, nn.MultiheadAttention):
    """Replaces torch.nn.MultiheadAttention.

        o = concat_h softmax(q_h k_h^T / sqrt(D) + mask) v_h;  y = o Wo^T + bo

    query [L, B, E] ([B, L, E] with batch_first, [L, E] unbatched), key [S, B, kdim], value [S, B, vdim] -> (y, weights).
    attn_mask [L, S], [B H, L, S] or torch's CausalBias, key_padding_mask [B, S] or [S]: True = hidden; floating point masks are
    added and may be trained. A query whose keys are all hidden gives o = 0.

    With need_weights=False and key and value the same tensor, the module is one ckptkern.attention_block (see its options).
    Other calls, also with add_bias_kv, add_zero_attn or nested tensors, run torch's forward as one ckptkern.checkpoint.
    is_causal: says that attn_mask is the causal mask, which the op then does not read.
    """

    torch_class = nn.MultiheadAttention
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
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: str = "selective",
        workspace: Bytes = None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.set_options(recompute, workspace)

    @property
    def dropout_p(self) -> float:
        """Returns the dropout probability; 0 in evaluation."""
        return self.dropout if self.training else 0.0

    def swapped(self, x: Tensor) -> Tensor:
        """Returns x [L, B, E] of a module without batch_first as [B, L, E], and the reverse."""
        return x.transpose(0, 1) if x.dim() == 3 and not self.batch_first else x

    def covers(
        self,
        query: Tensor,
        memory: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Returns whether ckptkern.attention_block computes this call, memory being key and value; False if torch would
        raise."""
        masks, tensors = (key_padding_mask, attn_mask), (query, memory)
        if any(not isinstance(x, Tensor) or x.is_nested for x in tensors):
            return False
        if _is_causal_bias(attn_mask):
            masks, is_causal = (key_padding_mask, None), False
        if own_dispatch((*tensors, *masks)) or not dense(self) or not dense(self.out_proj):
            return False
        weight, q, m = self.out_proj.weight, self.swapped(query), self.swapped(memory)  # [B, L, E] or [L, E]
        lead, ranks = q.shape[:-2], ranks_of_rows()
        dtypes = {weight.dtype, *(x.dtype for x in tensors)}
        autocasts = autocast_dtype(query) is not None  # all but float64
        if (
            query.dim() not in (2, 3)
            or memory.dim() != query.dim()
            or m.shape[:-2] != lead
            or any(x.layout != torch.strided or x.device != weight.device for x in tensors)
            or any(not dtype.is_floating_point for dtype in dtypes)
            or (len(dtypes) > 1 and (torch.float64 in dtypes or not autocasts))
            or (query.shape[-1], memory.shape[-1], self.kdim) != (self.embed_dim, self.kdim, self.vdim)
            or self.bias_k is not None
            or self.add_zero_attn
            or (isinstance(self.dropout_p, (int, float)) and self.dropout_p > 1)
            or (is_causal and masks[1] is None)
        ):
            return False
        L, S = q.shape[-2] * ranks, m.shape[-2] * ranks
        shapes = ((*lead, S),), ((L, S), (lead.numel() * self.num_heads, L, S))
        # the op computes no gradient of a key_padding_mask, nor of an attn_mask that is_causal replaces
        unread = torch.is_grad_enabled(), torch.is_grad_enabled() and is_causal
        for mask, of_mask, is_unread in zip(masks, shapes, unread, strict=True):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.shape not in of_mask or (is_unread and mask.requires_grad):
                return False
            if autocasts:
                fits = mask.is_floating_point() and (mask.dtype == torch.float64) == (query.dtype == torch.float64)
            else:
                fits = mask.dtype in (query.dtype, torch.float32)
            if mask.dtype != torch.bool and not fits:
                return False
        return True

    def block_arguments(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> dict[str, object]:
        """Returns the arguments of ckptkern.attention_block for this module, except the query [B, L, E]. With is_causal,
        attn_mask must be the causal mask and is not read."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            bias = None if bias is None else bias.chunk(3)
        if not _is_causal_bias(attn_mask):
            attn_mask = None if is_causal else attn_mask
            if attn_mask is not None and attn_mask.dim() == 3:  # [B H, L, S]
                attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        return {
            "key_value": None if key is query else self.swapped(key),
            "qkv_weight": weight,
            "qkv_bias": bias,
            "out_weight": self.out_proj.weight,
            "out_bias": self.out_proj.bias,
            "num_heads": self.num_heads,
            "is_causal": is_causal and attn_mask is None,
            "attn_mask": attn_mask,
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
        """Returns y and, with need_weights, the weights: [B, L, S] averaged over heads or [B, H, L, S], without B if unbatched.

        is_causal: the caller's hint that attn_mask is the causal mask, which is then read only if weights are needed. torch
        also reads attn_mask if there is a key_padding_mask, so a wrong hint may give another result than torch's.
        """
        masks = attn_mask, key_padding_mask, is_causal
        if not need_weights and key is value and self.covers(query, key, *masks):
            arguments = self.block_arguments(query, key, *masks)
            return self.swapped(ops.attention_block(self.swapped(query), **arguments, **self.modes)), None
        check_whole_sequence(type(self).__name__)
        if _is_causal_bias(attn_mask):  # becomes a mask [L, S], True = hidden
            L, S = (self.swapped(x).shape[-2] for x in (query, key))
            diagonal = diagonal_of(type(self).__name__, attn_mask, L, S)
            attn_mask = torch.ones(L, S, dtype=torch.bool, device=query.device).triu(diagonal + 1)
            is_causal = diagonal == 0
        options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        return composed(self._composed, query, key, value, *options)
