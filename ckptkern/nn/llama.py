"""Defines a decoder layer of the Llama family: RMSNorm, rotary grouped-query attention and SwiGLU as one region."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import ShapeError
from ..ops.attention.masks import diagonal_of, merged_mask
from ..ops.attention.rotary import positions_of, reference_rotary, rotary_tables
from ..ops.dispatch.checks import (
    check_count,
    check_input,
    check_number,
    check_options,
    check_positive,
    check_tensor,
    modes_of_sublayers,
)
from ..ops.dispatch.choices import parse_bytes
from .activations import Activation, activation_of
from .mlp import GatedMLP
from .unmodified import composed, unmodified


def _check_rows(op: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Checks what a module reads of its arguments before its op checks them."""
    check_input(op, x)
    if x.dim() not in (2, 3):
        raise ShapeError(f"{op}: input must be [B, S, d], [S, d], or [tokens, d] with cu_seqlens, not {tuple(x.shape)}")
    if cu_seqlens is None:
        return
    check_tensor(op, "cu_seqlens", cu_seqlens, x, floating=False)
    if x.dim() != 2 or cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() < 1:
        raise ShapeError(f"{op}: cu_seqlens must be int32 [N + 1] and come with an input [tokens, d]")


def _eps(norm: torch.nn.RMSNorm, x: Tensor) -> float:
    """norm.eps; None means the eps of the dtype in which torch computes the norm, also under autocast."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if norm.eps is None else norm.eps


def _same_sequence(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool [tokens, tokens]: True where two packed tokens are of one sequence."""
    place = torch.arange(x.shape[-2], device=x.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens, place, right=True)
    return sequence[:, None] == sequence


class LlamaAttention(torch.nn.Module):
    """Computes causal self-attention with grouped heads, rotary positions and optional RMS norms of every head's q and
    k.

    Parameters: q_proj.weight [H D, d], k_proj.weight and v_proj.weight [H_kv D, d], o_proj.weight [d, H D]; with `bias`
    also their biases, with `qk_norm` also q_norm.weight and k_norm.weight [D]. The weights are never concatenated.
    rope_theta None: only tables passed to forward rotate q and k. recompute, workspace and the rest: see
    ckptkern.attention_block.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope_theta: float | None = 10000.0,
        dropout: float = 0.0,
        *,
        recompute: str = "selective",
        workspace: int | str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        check_options(op, "identity", recompute, dropout)
        parse_bytes(op, workspace)
        check_count(op, "hidden_size", hidden_size)
        check_count(op, "num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_count(op, "num_kv_heads", num_kv_heads)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"{op}: num_heads={num_heads} must divide hidden_size={hidden_size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"{op}: num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        check_count(op, "head_dim", head_dim)
        check_number(op, "norm_eps", norm_eps)
        if rope_theta is not None:
            check_positive(op, "rope_theta", rope_theta)
        factory = {"device": device, "dtype": dtype}
        self.q_proj = torch.nn.Linear(hidden_size, num_heads * head_dim, bias, **factory)
        self.k_proj = torch.nn.Linear(hidden_size, num_kv_heads * head_dim, bias, **factory)
        self.v_proj = torch.nn.Linear(hidden_size, num_kv_heads * head_dim, bias, **factory)
        self.o_proj = torch.nn.Linear(num_heads * head_dim, hidden_size, bias, **factory)
        self.q_norm = torch.nn.RMSNorm(head_dim, norm_eps, **factory) if qk_norm else None
        self.k_norm = torch.nn.RMSNorm(head_dim, norm_eps, **factory) if qk_norm else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope_theta, self.dropout, self.recompute, self.workspace = rope_theta, dropout, recompute, workspace

    def block_arguments(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> dict[str, Any]:
        """The arguments of ckptkern.attention_block, by name, that this module stands for if it is unmodified."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        biases = [projection.bias for projection in projections]
        norms = {}
        if self.q_norm is not None:
            norms = {"qk_norm": (self.q_norm.weight, self.k_norm.weight), "qk_norm_eps": _eps(self.q_norm, x)}
        return {
            "qkv_weight": [projection.weight for projection in projections],
            "qkv_bias": None if all(bias is None for bias in biases) else biases,
            "out_weight": self.o_proj.weight,
            "out_bias": self.o_proj.bias,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            **norms,
            **self._core_arguments(rotary, **masks),
        }

    def _core_arguments(
        self,
        rotary: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> dict[str, Any]:
        """The part of block_arguments that reads no submodule."""
        if rotary is None and self.rope_theta is not None and self.head_dim % 2:
            raise ShapeError(
                f"{type(self).__name__}: head_dim must be even for rotary embedding, which rotates pairs, but "
                f"{self.num_heads * self.head_dim} / num_heads={self.num_heads} gives {self.head_dim}; use "
                f"rope_theta=None for no rotation, or pass rotary tables for fewer dimensions"
            )
        return {
            "rotary": self.rope_theta if rotary is None else rotary,
            "is_causal": is_causal,
            "attn_mask": attn_mask,
            "key_padding_mask": key_padding_mask,
            "window_size": window_size,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
            "dropout_p": self.dropout if self.training else 0.0,
        }

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> Tensor:
        """x [B, S, d] -> [B, S, d]. masks: as in LlamaDecoderLayer.forward."""
        _check_rows(type(self).__name__, x, masks.get("cu_seqlens"))
        if not self.is_unmodified():
            return composed(self._composed, x, rotary, **masks)
        given = {"recompute": self.recompute, "workspace": self.workspace}
        return ops.attention_block(x, **self.block_arguments(x, rotary, **masks), **given)

    def is_unmodified(self) -> bool:
        """Do its parameters alone determine what it computes?"""
        q_norm, k_norm = self.q_norm, self.k_norm
        if not unmodified(torch.nn.Linear, self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            return False
        if q_norm is None and k_norm is None:
            return True
        # the op has one eps for both norms, and takes a missing weight for a missing norm
        return (
            unmodified(torch.nn.RMSNorm, q_norm, k_norm)
            and q_norm.eps == k_norm.eps
            and q_norm.weight is not None
            and k_norm.weight is not None
        )

    def _composed(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, **masks: Any) -> Tensor:
        """forward, by calling the submodules."""
        options = self._core_arguments(rotary, **masks)
        if diagonal_of(type(self).__name__, options["attn_mask"], x.shape[-2], x.shape[-2]) is not None:
            options |= {"attn_mask": None, "is_causal": True}
        rows = x if x.dim() == 3 else x[None]
        q, k, v = (
            projection(rows).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (one if norm is None else norm(one) for one, norm in ((q, self.q_norm), (k, self.k_norm)))
        rotary = options["rotary"]
        if rotary is not None and not isinstance(rotary, (tuple, list)):  # a theta
            positions = positions_of(x.shape[-2], x.device, options["cu_seqlens"])
            rotary = rotary_tables(positions, self.head_dim, rotary)
        if rotary is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            q, k = (reference_rotary(one.to(wide), *rotary, False).to(one.dtype) for one in (q, k))
        left, right = options["window_size"] or (-1, -1)
        window = (left, 0 if options["is_causal"] else right)
        cu, longest = options["cu_seqlens"], options["max_seqlen"] or x.shape[-2]
        if cu is None or options["dropout_p"]:  # varlen_attn has no dropout
            mask = (
                merged_mask(options["attn_mask"], options["key_padding_mask"]) if cu is None else _same_sequence(x, cu)
            )
            mask = mask.view(torch.bool) if mask is not None and mask.dtype == torch.int8 else mask
            o = ops.scaled_dot_product_attention(
                *(one.transpose(1, 2) for one in (q, k, v)), mask, options["dropout_p"], enable_gqa=True, window_size=window,
            ).transpose(1, 2)  # fmt: skip
        else:
            o = ops.varlen_attn(q[0], k[0], v[0], cu, cu, longest, longest, window_size=window, enable_gqa=True)[None]
        y = self.o_proj(o.flatten(2))
        return y if x.dim() == 3 else y[0]

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"rope_theta={self.rope_theta}, dropout={self.dropout}, recompute={self.recompute!r}, "
            f"workspace={self.workspace!r}"
        )


class LlamaDecoderLayer(torch.nn.Module):
    """Computes x + attention(rms(x)), then + SwiGLU(rms(...)), as ONE region, with the parameter names of Hugging
    Face's Llama.

        input_layernorm.weight; self_attn.{q,k,v,o}_proj.weight [, .bias] [, self_attn.{q,k}_norm.weight]
        post_attention_layernorm.weight; mlp.{gate,up,down}_proj.weight [, .bias]

    num_kv_heads defaults to num_heads, head_dim to hidden_size / num_heads, intermediate_size to 4 hidden_size.
    qk_norm: RMS norms of q and k as in Qwen3; rope_theta None: only tables passed to forward rotate q and k. dropout of
    the attention weights, resid_dropout of both branches: replayed from 16 bytes each. recompute (a recompute mode, or
    a pair of recompute modes for attention and MLP), workspace: see ckptkern.transformer_layer. The q, k and v weights
    are never concatenated. If a submodule is of another type (LoRA, another norm), has hooks or a weight that is not
    plain memory (parametrised, quantised, sharded), the layer calls its submodules inside one ckptkern.checkpoint, and
    saves x as recompute="full" does.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        head_dim: int | None = None,
        activation: Activation = "silu",
        rms_norm_eps: float = 1e-6,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        dropout: float = 0.0,
        resid_dropout: float = 0.0,
        *,
        recompute: str | tuple[str, str] = "selective",
        workspace: int | str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = type(self).__name__
        activation = activation_of(op, activation)
        of_attention, _ = modes_of_sublayers(op, recompute)
        check_options(op, activation, of_attention, resid_dropout)
        parse_bytes(op, workspace)
        check_count(op, "hidden_size", hidden_size)
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        check_count(op, "intermediate_size", intermediate_size, least=0)
        check_number(op, "rms_norm_eps", rms_norm_eps)
        factory = {"device": device, "dtype": dtype}
        self.input_layernorm = torch.nn.RMSNorm(hidden_size, rms_norm_eps, **factory)
        self.self_attn = LlamaAttention(
            hidden_size, num_heads, num_kv_heads, head_dim, attention_bias, qk_norm, rms_norm_eps, rope_theta, dropout,
            recompute=of_attention, workspace=workspace, **factory,
        )  # fmt: skip
        self.post_attention_layernorm = torch.nn.RMSNorm(hidden_size, rms_norm_eps, **factory)
        self.mlp = GatedMLP(
            hidden_size, intermediate_size, activation=activation, bias=mlp_bias, workspace=workspace, **factory
        )
        self.resid_dropout, self.recompute, self.workspace = resid_dropout, recompute, workspace

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x [B, S, d], [S, d], or packed [tokens, d] with cu_seqlens int32 [N + 1] -> the same shape.

        rotary: (cos, sin) as from rotary_tables; all layers of a model can share one pair, which is then saved once.
        Without it the layer computes the tables from rope_theta and the positions 0, 1, ..., recomputes them in
        backward, and saves none.
        attn_mask: bool, True = visible, or additive; key_padding_mask [B, S]: True = hidden. Raises as
        ckptkern.transformer_layer does.
        """
        _check_rows(type(self).__name__, x, cu_seqlens)
        masks = {
            "attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal,
            "window_size": window_size, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen,
        }  # fmt: skip
        attention, mlp = self._attention_arguments(x, rotary, masks), self._mlp_arguments(x)
        if attention is not None and mlp is not None:
            return ops.transformer_layer(x, attention, mlp, recompute=self.recompute, workspace=self.workspace)
        return composed(self._sublayers, x, rotary, masks, attention, mlp)

    def _sublayers(self, x: Tensor, rotary, masks: dict, attention: dict | None, mlp: dict | None) -> Tensor:
        """forward, by calling the submodules of a sublayer that is not unmodified, whose arguments are None."""
        of_attention, of_mlp = modes_of_sublayers(type(self).__name__, self.recompute)
        if attention is None:
            branch = self.self_attn(self.input_layernorm(x), rotary, **masks)
            x = x + ops.dropout(branch, self.resid_dropout, self.training)
        else:
            x = ops.attention_block(x, **attention, recompute=of_attention, workspace=self.workspace)
        if mlp is None:
            branch = self.mlp(self.post_attention_layernorm(x))
            return x + ops.dropout(branch, self.resid_dropout, self.training)
        return ops.mlp_block(x, **mlp, recompute=of_mlp, workspace=self.workspace)

    def _half(self, norm: torch.nn.RMSNorm, x: Tensor) -> dict[str, Any]:
        """What both sublayers have: a norm before, dropout of the branch, a residual."""
        return {
            "norm": "rms",
            "norm_weight": norm.weight,
            "norm_eps": _eps(norm, x),
            "residual": True,
            "resid_dropout_p": self.resid_dropout if self.training else 0.0,
        }

    def _attention_arguments(self, x: Tensor, rotary, masks: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of ckptkern.attention_block, or None if the modules have to be called."""
        norm, attention = self.input_layernorm, self.self_attn
        if not (
            unmodified(torch.nn.RMSNorm, norm) and unmodified(LlamaAttention, attention) and attention.is_unmodified()
        ):
            return None
        return attention.block_arguments(x, rotary, **masks) | self._half(norm, x)

    def _mlp_arguments(self, x: Tensor) -> dict[str, Any] | None:
        """The arguments of ckptkern.mlp_block, or None likewise."""
        norm, mlp = self.post_attention_layernorm, self.mlp
        if not (unmodified(torch.nn.RMSNorm, norm) and unmodified(GatedMLP, mlp) and mlp.is_unmodified()):
            return None
        return {
            "gate_weight": mlp.gate_proj.weight,
            "gate_bias": mlp.gate_proj.bias,
            "up_weight": mlp.up_proj.weight,
            "up_bias": mlp.up_proj.bias,
            "down_weight": mlp.down_proj.weight,
            "down_bias": mlp.down_proj.bias,
            "activation": mlp.activation,
            "dropout_p": mlp.dropout if self.training else 0.0,
            **self._half(norm, x),
        }

    def extra_repr(self) -> str:
        return f"resid_dropout={self.resid_dropout}, recompute={self.recompute!r}, workspace={self.workspace!r}"
