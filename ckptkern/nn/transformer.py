"""TransformerEncoderLayer and TransformerDecoderLayer on fused ops that recompute in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.types import Device

from .. import ops
from ..ops.dispatch.choices import Bytes, modes_of_sublayers
from .activations import Activation, named
from .attention import MultiheadAttention
from .layer import Dropout, Layer, weights
from .unmodified import DROPOUT, composed, unmodified, untouched


class _Layer(Layer):
    """The common base of the encoder's and the decoder's layer: their sublayers as arguments of ops."""

    has_sublayers = True
    shown = ("recompute", "workspace")
    torch_class: type[nn.Module]

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: str | tuple[str, str] = "selective",
        workspace: Bytes = None,
    ):
        of_torch = layer_norm_eps, batch_first, norm_first, bias, device, dtype
        super().__init__(d_model, nhead, dim_feedforward, dropout, activation, *of_torch)
        self.set_options(recompute, workspace)

    def set_options(self, recompute: Any = "selective", workspace: Bytes = None, **own: Any) -> None:
        """Sets options and replaces torch's attention and dropout modules, after torch has initialised them. Modules with a
        forward set on the instance stay."""
        super().set_options(recompute, workspace, **own)
        of_attention, _ = modes_of_sublayers(type(self).__name__, recompute)
        for name, module in self._modules.items():
            if "forward" in module.__dict__:
                continue
            if type(module) is nn.MultiheadAttention:
                self._modules[name] = MultiheadAttention.from_torch(module, of_attention, workspace)
            elif type(module) is nn.Dropout:
                self._modules[name] = Dropout.from_torch(module)

    def _is_torchs(self, method: str) -> bool:
        """Returns whether `method` is torch's, overridden neither in a subclass nor on the instance."""
        return getattr(type(self), method) is getattr(self.torch_class, method) and method not in self.__dict__

    def _is_unmodified(self) -> bool:
        """Returns whether all submodules except attention are unmodified. A dropout's p outside 0..1 is left to torch, which
        raises in evaluation too."""
        norms, dropouts = (
            [m for name, m in self._modules.items() if name.startswith(kind)] for kind in ("norm", "dropout")
        )
        blocks = [name for name in ("_sa_block", "_mha_block", "_ff_block") if hasattr(self.torch_class, name)]
        return (
            named(self.activation) is not None
            and all(map(self._is_torchs, blocks))
            and unmodified(nn.Linear, self.linear1, self.linear2)
            and unmodified(nn.LayerNorm, *norms)
            and unmodified(DROPOUT, *dropouts)
            and not any(dropout.p < 0.0 or dropout.p > 1.0 for dropout in dropouts)
        )

    def _attends(self, attention: nn.Module, x: Tensor, memory: Tensor, *masks: Any) -> bool:
        """Returns whether ckptkern.attention_block computes this attention. masks: attn_mask, key_padding_mask, is_causal."""
        return (
            type(attention).forward is MultiheadAttention.forward
            and untouched(attention)
            and attention.covers(x, memory, *masks)
        )

    def layer_arguments(
        self, x: Tensor, masks: tuple, memory: Any = None, cross: tuple | None = None
    ) -> dict[str, dict[str, Any]]:
        """Returns the arguments of ckptkern.transformer_layer for an unmodified layer. cross: the masks of memory."""

        def around(number):
            norm, dropout = (getattr(self, f"{kind}{number}") for kind in ("norm", "dropout"))
            return {
                "norm": "layer",
                "norm_weight": norm.weight,
                "norm_bias": norm.bias,
                "norm_eps": norm.eps,
                "norm_first": self.norm_first,
                "resid_dropout_p": _probability(dropout),
                "residual": True,
            }

        arguments: dict = {"attention_arguments": self.self_attn.block_arguments(x, x, *masks) | around(1)}
        if cross is not None:
            arguments["cross_attention_arguments"] = self.multihead_attn.block_arguments(x, memory, *cross) | around(2)
        arguments["mlp_arguments"] = {
            **weights(self, up="linear1", down="linear2"),
            "activation": named(self.activation),
            "dropout_p": _probability(self.dropout),
            **around(len(arguments) + 1),
        }
        return arguments

    def _fused(self, x: Tensor, *others: Any) -> Tensor:
        """Computes forward as one op. others: the arguments of `layer_arguments` after x."""
        swapped, arguments = self.self_attn.swapped, self.layer_arguments(x, *others)
        return swapped(ops.transformer_layer(swapped(x), **arguments, **self.modes))


def _probability(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """Runs torch.nn.TransformerEncoderLayer as one ckptkern.transformer_layer.

    src [S, B, E] ([B, S, E] with batch_first, [S, E] unbatched). Masks: as in MultiheadAttention.
    recompute: a mode, or a pair for attention and MLP. "full" saves src, "selective" also o and lse.

    A layer with another activation than ckptkern.ACTIVATIONS, or a trained key padding mask, is one ckptkern.checkpoint. Global
    module hooks see the layer, not its submodules. Under autocast a post-norm layer on CUDA returns a 16-bit src's dtype, where
    torch returns float32.
    """

    torch_class = nn.TransformerEncoderLayer

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not isinstance(src, Tensor) or src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        masks = src_mask, src_key_padding_mask, is_causal
        attends = self._attends(self.self_attn, src, src, *masks)
        if attends and self._is_unmodified():
            return self._fused(src, masks)
        if self._is_torchs("_sa_block") and not attends:
            # converts masks as torch's layer does, with torch's names in errors. torch's forward is not called: in evaluation
            # it may choose a kernel that reads additive masks as bool
            names = "src_key_padding_mask", F._none_or_dtype(src_mask), "src_mask"
            padding = F._canonical_mask(src_key_padding_mask, *names, src.dtype)
            masks = F._canonical_mask(src_mask, "src_mask", None, "", src.dtype, False), padding, is_causal
        return composed(self._composed, src, masks)

    def _composed(self, x: Tensor, masks: tuple) -> Tensor:
        """Computes forward by calling the submodules."""
        for norm, branch in ((self.norm1, lambda h: self._sa_block(h, *masks)), (self.norm2, self._ff_block)):
            x = x + branch(norm(x)) if self.norm_first else norm(x + branch(x))
        return x


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """Runs torch.nn.TransformerDecoderLayer, cross-attention included, as one ckptkern.transformer_layer.

    tgt [T, B, E] ([B, T, E] with batch_first, [T, E] unbatched), memory [S, B, E]. See TransformerEncoderLayer for masks and
    options; memory is saved too, and "selective" saves o and lse of both attentions.
    """

    torch_class = nn.TransformerDecoderLayer

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
        masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        cross = memory_mask, memory_key_padding_mask, memory_is_causal
        attention, crossing = self.self_attn, self.multihead_attn
        if (
            memory is not tgt
            and self._attends(attention, tgt, tgt, *masks)
            and self._attends(crossing, tgt, memory, *cross)
            and crossing.batch_first == attention.batch_first
            and self._is_unmodified()
        ):
            return self._fused(tgt, masks, memory, cross)
        return composed(
            self._composed,
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )
