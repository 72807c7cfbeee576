"""Computes attention and a language model's loss with the arguments that transformers passes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import linear_cross_entropy, scaled_dot_product_attention


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes a transformers model's attention by `ckptkern.scaled_dot_product_attention`, also with a softcap or sinks.

    query [B, H, Sq, D], key, value [B, Hkv, Sk, D], attention_mask as of transformers' "sdpa", s_aux (sinks) [H] ->
    ([B, Sq, H, D], None). Saves query, key, value, the output and float32 [B, H, Sq] for backward. A window is part of
    attention_mask.
    """
    if position_bias is not None and attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask + position_bias
    elif position_bias is not None:
        hidden = position_bias.new_tensor(float("-inf"))
        attention_mask = position_bias if attention_mask is None else position_bias.where(attention_mask, hidden)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        bool(is_causal) and attention_mask is None and query.size(-2) > 1,
        scaling,
        query.size(1) != key.size(1),
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2), None


def causal_lm_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    **_: Any,
) -> Tensor:
    """Computes a language model's loss from hidden states, without logits: transformers' `ForCausalLMLoss` behind the LM head.

    hidden_states [B, S, hidden_size], lm_head_weight [V, hidden_size], labels or shift_labels [B, S] -> a scalar: the mean over
    labels other than ignore_index, or their sum over num_items_in_batch. Saves what `ckptkern.linear_cross_entropy` does.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        reduction=reduction,
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
