"""torch.nn.TransformerEncoderLayer and TransformerDecoderLayer on fused ops that recompute in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..ops.dispatch.checks import modes_of_sublayers
from ..ops.dispatch.choices import parse_bytes
from ..subclasses import PLAIN
from .activations import named
from .attention import MultiheadAttention, without_bias
from .dropout import Dropout
from .share import check_kind, share
from .unmodified import DROPOUT, composed, unmodified, untouched


def _drops(*dropouts: torch.nn.Module) -> bool:
    """Are these unmodified, with p between 0 and 1? torch reports any other p, in evaluation too."""
    return unmodified(DROPOUT, *dropouts) and not any(one.p < 0.0 or one.p > 1.0 for one in dropouts)


def _probability(dropout: torch.nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def _norm_arguments(norm: torch.nn.LayerNorm, norm_first: bool) -> dict[str, Any]:
    return {
        "norm": "layer",
        "norm_weight": norm.weight,
        "norm_bias": norm.bias,
        "norm_eps": norm.eps,
        "norm_first": norm_first,
    }


class _Layer:
    """What the encoder's and the decoder's layer share: each sublayer as the arguments of its op, or None if its modules have
    to be called."""

    torch_class: type[torch.nn.Module]
    workspace: int | str | None = None

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: str | tuple[str, str] = "selective",
        workspace: int | str | None = None,
    ):
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
            dtype,
        )  # fmt: skip
        self._adopt(recompute, workspace)

    def _adopt(self, recompute: str | tuple[str, str], workspace: int | str | None) -> None:
        """Replaces attention and dropout in a layer of torch's, after torch has drawn its initial weights. What the layer
        cannot stand for, such as a forward of the instance's own, stays as it is and is called."""
        of_attention, _ = modes_of_sublayers(type(self).__name__, recompute)
        parse_bytes(type(self).__name__, workspace)
        self.recompute, self.workspace = recompute, workspace
        for name, module in self._modules.items():
            if type(module) is torch.nn.MultiheadAttention and "forward" not in module.__dict__:
                self._modules[name] = MultiheadAttention.from_torch(module, of_attention, workspace)
            elif type(module) is torch.nn.Dropout and "forward" not in module.__dict__:
                self._modules[name] = Dropout.from_torch(module)

    @classmethod
    def from_torch(
        cls,
        module: torch.nn.Module,
        recompute: str | tuple[str, str] = "selective",
        workspace: int | str | None = None,
    ):
        """Returns a drop-in replacement of `module` that shares its parameters, buffers, hooks and settings, and its
        submodules or drop-in replacements of them."""
        check_kind(cls, module, cls.torch_class)
        drop_in = share(cls, module)  # type: ignore[type-var]
        drop_in._adopt(recompute, workspace)
        return drop_in

    def extra_repr(self) -> str:
        return f"recompute={self.recompute!r}, workspace={self.workspace!r}"

    def _is_torchs(self, method: str) -> bool:
        """Is `method` torch's own, overridden neither in a subclass nor on the instance?"""
        return getattr(type(self), method) is getattr(self.torch_class, method) and method not in self.__dict__

    def _without_bias(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
        if attn_mask is None or type(attn_mask) in PLAIN:  # a replaced self_attn may have no batch_first
            return attn_mask, is_causal
        batch_first = getattr(self.self_attn, "batch_first", False)
        return without_bias(type(self).__name__, attn_mask, is_causal, x, x, batch_first)

    def _attention_arguments(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> dict[str, Any] | None:
        """norm1, self-attention, dropout1 and residual as the arguments of ckptkern.attention_block."""
        if not self._is_torchs("_sa_block"):
            return None
        masks = (key_padding_mask, attn_mask, is_causal)
        return self._attended(self.self_attn, self.norm1, self.dropout1, x, x, *masks)

    def _attended(
        self,
        attention: torch.nn.Module,
        norm: torch.nn.Module,
        dropout: torch.nn.Module,
        x: Tensor,
        memory: Tensor,
        *masks: Any,
    ) -> dict[str, Any] | None:
        """A norm, attention of x to memory, a dropout and a residual as the arguments of ckptkern.attention_block. masks: key
        padding, the mask of the scores, and the is_causal hint."""
        if (
            type(attention).forward is not MultiheadAttention.forward
            or not untouched(attention)
            or not unmodified(torch.nn.LayerNorm, norm)
            or not _drops(dropout)
            or not attention.fits(x, memory, memory, *masks)
            or not attention.one_segment(x, memory, memory, masks[0], masks[1] if masks[2] else None)
        ):
            return None
        return {
            **attention.block_arguments(x, memory, *masks),
            **_norm_arguments(norm, self.norm_first),
            "resid_dropout_p": _probability(dropout),
            "residual": True,
        }

    def _mlp_arguments(self, norm: torch.nn.Module, dropout: torch.nn.Module) -> dict[str, Any] | None:
        """The norm, the feed-forward network, its dropouts and residual as the arguments of ckptkern.mlp_block."""
        activation = named(self.activation)
        if (
            activation is None
            or not self._is_torchs("_ff_block")
            or not unmodified(torch.nn.LayerNorm, norm)
            or not unmodified(torch.nn.Linear, self.linear1, self.linear2)
            or not _drops(self.dropout, dropout)
        ):
            return None
        return {
            "up_weight": self.linear1.weight,
            "up_bias": self.linear1.bias,
            "down_weight": self.linear2.weight,
            "down_bias": self.linear2.bias,
            "activation": activation,
            "dropout_p": _probability(self.dropout),
            **_norm_arguments(norm, self.norm_first),
            "resid_dropout_p": _probability(dropout),
            "residual": True,
        }

    def _half(self, x: Tensor, norm: torch.nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer of the layer, by calling its modules."""
        return x + branch(norm(x)) if self.norm_first else norm(x + branch(x))

    def _attention_sublayer(self, x: Tensor, arguments: dict[str, Any] | None, *masks) -> Tensor:
        if arguments is None:
            return self._half(x, self.norm1, lambda h: self._sa_block(h, *masks))
        swapped = x.dim() == 3 and not self.self_attn.batch_first
        mode, _ = modes_of_sublayers(type(self).__name__, self.recompute)
        x = x.transpose(0, 1) if swapped else x
        y = ops.attention_block(x, **arguments, recompute=mode, workspace=self.workspace)
        return y.transpose(0, 1) if swapped else y

    def _mlp_sublayer(self, x: Tensor, norm: torch.nn.Module, arguments: dict[str, Any] | None) -> Tensor:
        if arguments is None:
            return self._half(x, norm, self._ff_block)
        _, mode = modes_of_sublayers(type(self).__name__, self.recompute)
        return ops.mlp_block(x, **arguments, recompute=mode, workspace=self.workspace)


def _canonical(src: Tensor, src_mask: Tensor | None, src_key_padding_mask: Tensor | None) -> tuple:
    """The masks as torch's layer hands them on, with torch's names in its errors. torch's forward is not called for this: in
    evaluation it may take a kernel that reads additive masks as bool."""
    padding = F._canonical_mask(
        src_key_padding_mask, "src_key_padding_mask", F._none_or_dtype(src_mask), "src_mask", src.dtype
    )
    return F._canonical_mask(src_mask, "src_mask", None, "", src.dtype, False), padding


class TransformerEncoderLayer(_Layer, torch.nn.TransformerEncoderLayer):
    """Replaces torch.nn.TransformerEncoderLayer, with the same arguments, parameters and results in training and
    evaluation.

    The whole layer is one ckptkern.transformer_layer that saves, besides parameters, src at recompute="full"; src, o
    and the logsumexp at "selective"; everything at "none". If an activation is unknown to ckptkern.mlp, a submodule
    has hooks, another type or a weight that is no plain memory (parametrised, quantised, sharded), or a key padding mask
    needs a gradient, the layer is one ckptkern.checkpoint that calls it, and saves src as "full" does ("none": what its
    modules save). Global module hooks see the layer, not the submodules that its regions stand for. A pair of modes,
    such as ("selective", "none"), is of attention and of the MLP. workspace: see ckptkern.transformer_layer.

    src [S, B, E] ([B, S, E] with batch_first, [S, E] unbatched). Masks: as in MultiheadAttention. torch's own layer
    handles nested tensors, which it takes for inference only, and raises the errors for wrong arguments.

    Under autocast the result has torch's dtype except in one case: on CUDA, post-norm, a float16 or bfloat16 src gives its
    own dtype, while torch's layer_norm, and so torch's layer, gives float32. (On a CPU torch's gives src's dtype too.)
    """

    torch_class = torch.nn.TransformerEncoderLayer

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not isinstance(src, Tensor) or src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        src_mask, is_causal = self._without_bias(src, src_mask, is_causal)
        masks = (src_mask, src_key_padding_mask, is_causal)
        attention = self._attention_arguments(src, *masks)
        if attention is None and self._is_torchs("_sa_block"):
            masks = (*_canonical(src, src_mask, src_key_padding_mask), is_causal)
        mlp = self._mlp_arguments(self.norm2, self.dropout2)
        if attention is None or mlp is None:
            return composed(self._sublayers, src, masks, attention, mlp)
        swapped = src.dim() == 3 and not self.self_attn.batch_first
        x = src.transpose(0, 1) if swapped else src
        y = ops.transformer_layer(x, attention, mlp, recompute=self.recompute, workspace=self.workspace)
        return y.transpose(0, 1) if swapped else y

    def _sublayers(self, src: Tensor, masks: tuple, attention: dict | None, mlp: dict | None) -> Tensor:
        return self._mlp_sublayer(self._attention_sublayer(src, attention, *masks), self.norm2, mlp)


class TransformerDecoderLayer(_Layer, torch.nn.TransformerDecoderLayer):
    """Replaces torch.nn.TransformerDecoderLayer, with the same arguments, parameters and results in training and
    evaluation.

    The whole layer, cross-attention too, is one ckptkern.transformer_layer that saves, besides parameters and memory, tgt at
    recompute="full"; tgt, o and the logsumexp of both attentions at "selective"; everything at "none". Where
    TransformerEncoderLayer is one ckptkern.checkpoint, this layer is too, and saves tgt and memory. workspace: see
    ckptkern.transformer_layer.

    tgt [T, B, E] ([B, T, E] with batch_first, [T, E] unbatched), memory [S, B, E]. Masks: as in MultiheadAttention.
    Dtypes under autocast: as in TransformerEncoderLayer.
    """

    torch_class = torch.nn.TransformerDecoderLayer

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        tgt_mask, tgt_is_causal = self._without_bias(tgt, tgt_mask, tgt_is_causal)
        masks = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        attention, mlp = self._attention_arguments(tgt, *masks), self._mlp_arguments(self.norm3, self.dropout3)
        crossing = self._cross_arguments(tgt, *cross)
        if attention is None or mlp is None or crossing is None:
            return composed(self._sublayers, tgt, masks, cross, attention, mlp)
        swapped = tgt.dim() == 3 and not self.self_attn.batch_first
        x = tgt.transpose(0, 1) if swapped else tgt
        modes = {"recompute": self.recompute, "workspace": self.workspace}
        y = ops.transformer_layer(x, attention, mlp, cross_attention_arguments=crossing, **modes)
        return y.transpose(0, 1) if swapped else y

    def _cross_arguments(
        self, x: Tensor, memory: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> dict[str, Any] | None:
        """norm2, cross-attention, dropout2 and residual as the arguments of ckptkern.attention_block."""
        if not self._is_torchs("_mha_block") or memory is x:
            return None
        attention = self.multihead_attn
        if getattr(attention, "batch_first", None) != getattr(self.self_attn, "batch_first", None):
            return None
        if attn_mask is not None and type(attn_mask) not in PLAIN:
            attn_mask, is_causal = without_bias(
                type(self).__name__, attn_mask, is_causal, x, memory, attention.batch_first
            )
        return self._attended(attention, self.norm2, self.dropout2, x, memory, key_padding_mask, attn_mask, is_causal)

    def _sublayers(self, tgt: Tensor, masks: tuple, cross: tuple, attention: dict | None, mlp: dict | None) -> Tensor:
        x = self._half(
            self._attention_sublayer(tgt, attention, *masks), self.norm2, lambda h: self._mha_block(h, *cross)
        )
        return self._mlp_sublayer(x, self.norm3, mlp)
